"""Files that are either absent or complete, and names that stay inside their directory.

Everything the store writes goes to a temporary file in the target directory, or to one in a temporary directory there,
is flushed to disk, and is then renamed (or, where the first writer must win, hard-linked) into place. A killed process
leaves at most something temporary behind, which no reader looks at.
"""

import contextlib
import ctypes
import errno
import json
import logging
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import IO, Any

import psutil
from safetensors import SafetensorError

from hf_trak.errors import HfTrakError, StoreError
from hf_trak.runtime.temporary import TEMPORARY, host_name, temporary_name

logger = logging.getLogger(__name__)


MAX_NAME_BYTES = 200

"""Longest accepted name; file systems stop at 255 bytes, and the store adds suffixes of its own."""


_STALE_SECONDS = 3600.0


def safe_name(name: str, what: str = "name") -> str:
    """Check that `name` can be used as the name of one file or directory, and return it unchanged.

    Args:
        name: the name given by the user.
        what: the argument it came from, for the error message.

    Raises:
        TypeError: `name` is not a string.
        ValueError: `name` could leave the output directory, or could not be written: it is empty or blank, starts with
            a dot, contains a path separator, a drive, a NUL or another control character, or is longer than
            `MAX_NAME_BYTES` bytes.
    """
    if not isinstance(name, str):
        raise TypeError(f"`{what}` is {name!r} ({type(name).__name__}). Expected a string. Give a name.")
    problems = {
        "it is empty": not name.strip(),
        "it starts with a dot": name.startswith("."),
        "it contains a path separator": "/" in name or "\\" in name,
        "it starts with a drive": bool(PureWindowsPath(name).drive),
        "it contains a control character": any(ord(char) < 32 or ord(char) == 127 for char in name),
        f"it is longer than {MAX_NAME_BYTES} bytes": len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES,
    }
    if any(problems.values()):
        problem = next(text for text, found in problems.items() if found)
        raise ValueError(
            f"`{what}` is {name!r}: {problem}. Expected the plain name of one directory inside the output directory. "
            "Use letters, digits, dashes and underscores."
        )
    return name


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it onto `path` when the block ends without an exception.

    The path lies in a temporary directory beside `path`, because the code in the block may write through temporary
    files of its own, as safetensors does: a process that is killed leaves them where they are found. The file gets the
    permissions that the process's umask asks for, even when the code in the block rewrites it with tighter ones
    (safetensors writes mode 0600). Parent directories are created.

    Raises:
        StoreError: the file cannot be written.
    """
    with explained(path), _temporary_directory(path.parent) as directory:
        temporary = directory / temporary_name()
        _create_empty(temporary)
        mode = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        os.chmod(temporary, mode)
        flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory, and put it in the place of `path` when the block ends without an exception.

    A process that is killed leaves the old directory or the new one under this name. Where the system or the file
    system cannot exchange two directories in one step, there is for an instant neither; both are then complete in the
    temporary directory beside it. Parent directories are created.

    Raises:
        StoreError: the directory cannot be written.
    """
    with explained(path), _temporary_directory(path.parent) as temporary:
        written = temporary / "written"
        written.mkdir()
        yield written
        for entry in [*sorted(written.rglob("*")), written]:
            flush_to_disk(entry)
        while not _moved(written, path) and not _exchanged(written, path):
            with contextlib.suppress(FileNotFoundError):  # another writer has moved it
                os.rename(path, temporary / secrets.token_hex(8))
        flush_to_disk(path.parent)


@contextlib.contextmanager
def temporary_file(directory: Path) -> Iterator[Path]:
    """Create an empty file under a name that no other writer uses, and remove it when the block ends.

    Args:
        directory: where; created if need be.

    Raises:
        StoreError: the file cannot be created.
    """
    temporary = directory / temporary_name()
    with _removed(temporary):
        with explained(directory):
            _create_empty(temporary)
        yield temporary


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically, replacing a file that exists. Raises as [`atomic_path`]."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def create_bytes(path: Path, data: bytes) -> bool:
    """Create a file with the content `data` unless it exists. Returns and raises as [`create_file`]."""
    return create_file(path, lambda temporary: temporary.write_bytes(data))


def create_file(path: Path, fill: Callable[[Path], object]) -> bool:
    """Create a file unless it exists; of several processes that try at once, exactly one succeeds.

    Args:
        path: the file.
        fill: writes the content to the temporary path that it is given.

    Returns:
        Whether this call created the file.

    Raises:
        StoreError: the file cannot be written.
    """
    with explained(path), temporary_file(path.parent) as temporary:
        fill(temporary)
        flush_to_disk(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            return _create_without_links(temporary, path)
        flush_to_disk(path.parent)
        return True


def allocate(file: IO[bytes], size: int) -> None:
    """Give an open file its final size, and reserve disk space for all of it where the file system can.

    Without that, writing into a memory-mapped file on a full disk would kill the process without a message.

    Args:
        file: opened for writing.
        size: bytes.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    file.flush()
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
    file.truncate(size)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the system's error for a failed write into one that names the file and the free space.

    Raises:
        StoreError: the block raised an `OSError` or a `SafetensorError`.
    """
    try:
        yield
    except HfTrakError:
        raise  # an error of the block itself, which may be an OSError, too
    except (OSError, SafetensorError) as error:
        if isinstance(error, IsADirectoryError) and path.is_dir():
            raise StoreError(f"{path} is a directory. Expected the path of a file. Name one in it.") from error
        raise StoreError(
            f"{path} cannot be written: {error}. Expected a directory that this process may write to, on a disk with "
            f"enough free space{_free_space(path.parent)}. Free some space, get access or use another output "
            "directory, and run the same command again; complete files stay valid."
        ) from error


def _free_space(directory: Path) -> str:
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        return f" ({shutil.disk_usage(directory).free / 2**20:,.1f} MiB are free there)"
    except OSError:
        return ""


def json_bytes(content: Any) -> bytes:
    """Encode content as JSON with sorted keys, so that equal content gives equal bytes.

    Raises:
        TypeError, ValueError: the content is not plain JSON, or holds NaN or an infinity.
    """
    return (json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def plain_json(content: Any) -> Any:
    """Return content as it is read back from JSON, such as lists in place of tuples.

    Raises:
        TypeError, ValueError: as [`json_bytes`].
    """
    return json.loads(json.dumps(content, sort_keys=True, allow_nan=False, ensure_ascii=False))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: the file does not exist.
        StoreError: its content is not a JSON object.
    """
    data = path.read_bytes()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{path} is not valid JSON ({str(error)[:200]}). Expected a file written by hf_trak. Restore it from a "
            "copy, or delete the directory it describes and run again."
        ) from error
    if not isinstance(content, dict):
        raise StoreError(
            f"{path} holds a JSON {type(content).__name__}. Expected an object, as hf_trak writes it. Restore it from "
            "a copy, or delete the directory it describes and run again."
        )
    return content


def differing(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """List the keys whose values differ, one line each: `key: saved …, given …`."""
    absent = object()

    def show(value: Any) -> str:
        text = "(absent)" if value is absent else json.dumps(value, sort_keys=True, default=repr)
        return text if len(text) <= 400 else f"{text[:397]}…"

    keys = sorted(set(saved) | set(given))
    pairs = [(key, saved.get(key, absent), given.get(key, absent)) for key in keys]
    return [f"{key}: saved {show(old)}, given {show(new)}" for key, old, new in pairs if old != new]


def remove_stale_temporaries(directory: Path) -> None:
    """Remove what processes of this host left in a directory, and not below, when they died over an hour ago.

    This is the part of the policy in `hf_trak.store.atomic` that costs no more than listing one directory.
    """
    for one in _found(directory, deep=False):
        if one.alive is False and one.age > _STALE_SECONDS and one.remove():
            logger.info("Removed %s, left behind by a process that died.", one.path)


@contextlib.contextmanager
def _temporary_directory(directory: Path) -> Iterator[Path]:
    path = directory / temporary_name()
    with _removed(path):
        with explained(directory):
            path.mkdir(parents=True)
        yield path


@contextlib.contextmanager
def _removed(path: Path) -> Iterator[None]:
    """Remove a file or directory when the block ends, also where Ctrl-C comes while it is created or removed."""

    def remove() -> None:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()

    try:
        yield
    finally:
        try:
            remove()
        finally:
            remove()


def _moved(directory: Path, place: Path) -> bool:
    """Rename a directory, unless there is one with files in its place."""
    try:
        os.rename(directory, place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _exchanged(first: Path, second: Path) -> bool:
    """Exchange two directories in one step, where the system and the file system can."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # not in every C library
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def _create_empty(path: Path) -> None:
    """Create an empty file, with the permissions that the umask asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def _create_without_links(temporary: Path, path: Path) -> bool:
    """Create a file on a file system without hard links: one writer wins, but an empty file is visible for an instant.

    Returns:
        Whether this call created the file.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    os.replace(temporary, path)
    return True


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk.

    Raises:
        OSError: the file cannot be opened or flushed.
    """
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open directories
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # network file systems refuse to sync a directory; their rename is durable on the server's terms
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


DAY = 86_400.0


@dataclass(frozen=True)
class Leftover:
    """A temporary file or directory.

    Attributes:
        path: where it is.
        size: bytes.
        age: seconds since the last write.
        host: host of the writer; `None` where the name does not say.
        alive: whether the writer is running; `None` where this host cannot see that.
    """

    path: Path
    size: int
    age: float
    host: str | None
    alive: bool | None

    @property
    def removable(self) -> bool:
        """Tell whether it may be removed on request."""
        return self.alive is False or (self.alive is None and self.age > DAY)

    @property
    def stale(self) -> bool:
        """Tell whether any run may remove it unasked."""
        return (self.alive is False and self.age > _STALE_SECONDS) or self.age > 7 * DAY

    def remove(self) -> bool:
        """Remove it, and return whether it is gone: removed by another process, say. It may not be ours to remove."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                self.path.unlink()
        return not os.path.lexists(self.path)


def leftovers(directory: Path) -> list[Leftover]:
    """List all temporary files below a directory, sorted by path. Links to directories are not followed."""
    return sorted(_found(directory), key=lambda one: one.path)


def remove_stale(directory: Path) -> list[Leftover]:
    """Remove what any run may remove below a directory, see the module's docstring, and return what was removed."""
    return [one for one in leftovers(directory) if one.stale and one.remove()]


def _found(directory: Path, deep: bool = True) -> Iterator[Leftover]:
    try:
        entries = list(os.scandir(directory))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for entry in entries:
        match = TEMPORARY.fullmatch(entry.name)
        if match is None:
            if deep and entry.is_dir(follow_symlinks=False):
                yield from _found(Path(entry.path))
            continue
        with contextlib.suppress(FileNotFoundError):  # finished in the meantime
            size, written = _extent(Path(entry.path))
            alive = psutil.pid_exists(int(match["pid"])) if match["host"] == host_name() else None
            yield Leftover(Path(entry.path), size, max(0.0, time.time() - written), match["host"], alive)


def _extent(path: Path) -> tuple[int, float]:
    """Return the size in bytes and the time of the last write of a file, or of everything in a directory."""
    status = path.lstat()
    size, written = status.st_size, status.st_mtime
    if path.is_dir() and not path.is_symlink():
        for folder, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(folder, name))
                    size, written = size + status.st_size, max(written, status.st_mtime)
    return size, written
