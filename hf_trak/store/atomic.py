"""Files that are either absent or complete, and names that stay inside their directory.

Everything the store writes goes to a temporary file in the target directory first, is flushed to disk, and is then
renamed (or, where the first writer must win, hard-linked) into place. A killed process leaves at most a temporary
file behind, which no reader looks at.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import IO, Any

from safetensors import SafetensorError

from hf_trak.errors import HfTrakError, StoreError

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 200
"""Longest accepted name; file systems stop at 255 bytes, and the store adds suffixes of its own."""

TEMPORARY = re.compile(r"\.hf_trak-tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{16}")
"""Names of temporary files and directories; `hf_trak.store.leftovers` says who removes them."""

_STALE_SECONDS = 3600.0


def safe_name(name: str, what: str = "name") -> str:
    """Check that `name` can be used as the name of one file or directory, and return it unchanged.

    Args:
        name: the name given by the user.
        what: the argument it came from, for the error message.

    Raises:
        TypeError: it is not a string.
        ValueError: it is empty or blank, starts with a dot, contains a path separator, a drive, a NUL or another
            control character, or is longer than `MAX_NAME_BYTES` bytes: it could leave the output directory, or not
            be written.
    """
    if not isinstance(name, str):
        raise TypeError(f"`{what}` is {name!r} of type {type(name).__name__}; expected a string.")
    problem = None
    if not name.strip():
        problem = "it is empty"
    elif name.startswith("."):
        problem = "it starts with a dot"
    elif "/" in name or "\\" in name:
        problem = "it contains a path separator"
    elif PureWindowsPath(name).drive:
        problem = "it starts with a drive"
    elif any(ord(char) < 32 or ord(char) == 127 for char in name):
        problem = "it contains a control character"
    elif len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        problem = f"it is longer than {MAX_NAME_BYTES} bytes"
    if problem:
        raise ValueError(
            f"`{what}` is {name!r}: {problem}. Expected the plain name of one directory inside the output directory. "
            "Use letters, digits, dashes and underscores."
        )
    return name


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path in the directory of `path`; renamed onto `path` when the block ends without an exception.

    The file gets the permissions that the process's umask asks for, even when the code in the block rewrites it with
    tighter ones (safetensors writes mode 0600). Parent directories are created.
    """
    with explained(path), temporary_file(path.parent) as temporary:
        mode = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        os.chmod(temporary, mode)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)


@contextlib.contextmanager
def temporary_file(directory: Path) -> Iterator[Path]:
    """An empty file under a name that no other writer uses, in `directory` (created if need be), removed at the end.

    Raises:
        StoreError: it cannot be created.
    """
    with explained(directory):
        temporary = _create_temporary(directory)
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, atomically, replacing what is there."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def create_bytes(path: Path, data: bytes) -> bool:
    """Create `path` with `data` unless it exists, see [`create_file`]."""
    return create_file(path, lambda temporary: temporary.write_bytes(data))


def create_file(path: Path, fill: Callable[[Path], object]) -> bool:
    """Create a file unless it exists; of several processes that try at once, exactly one succeeds.

    Args:
        path: the file.
        fill: writes the content to the temporary path that it is given.

    Returns:
        Whether this call created the file.
    """
    with explained(path), temporary_file(path.parent) as temporary:
        fill(temporary)
        _sync(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            return _create_without_links(temporary, path)
        _sync(path.parent)
        return True


def allocate(file: IO[bytes], size: int) -> None:
    """Give an open file its final size, and disk space for all of it where the file system can: writing into a mapped
    file that the disk has no room for would kill the process without a word.
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
    """Turn what the system says of a write that failed into a `StoreError` that names the file and the room left."""
    try:
        yield
    except HfTrakError:
        raise  # an error of the block itself, which may be an OSError, too
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{path} cannot be written: {error}. Expected a directory that this process may write to, on a disk with "
            f"room{_room(path.parent)}. Make room or get access, or use another output directory, and run the same "
            "command again; files that are complete stay valid."
        ) from error


def _room(directory: Path) -> str:
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        return f" ({shutil.disk_usage(directory).free / 2**20:,.1f} MiB are free there)"
    except OSError:
        return ""


def json_bytes(content: Any) -> bytes:
    """JSON with sorted keys, so that equal content gives equal bytes.

    Raises:
        TypeError, ValueError: the content is not plain JSON (NaN and infinities included).
    """
    return (json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        StoreError: the file is not a JSON object.
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
        raise StoreError(f"{path} holds a JSON {type(content).__name__}; expected an object, as hf_trak writes it.")
    return content


def differing(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """One line per key whose values differ: `key: saved …, given …`."""
    absent = object()

    def show(value: Any) -> str:
        text = "(absent)" if value is absent else json.dumps(value, sort_keys=True, default=repr)
        return text if len(text) <= 400 else f"{text[:397]}…"

    keys = sorted(set(saved) | set(given))
    pairs = [(key, saved.get(key, absent), given.get(key, absent)) for key in keys]
    return [f"{key}: saved {show(old)}, given {show(new)}" for key, old, new in pairs if old != new]


def remove_stale_temporaries(directory: Path) -> None:
    """Remove temporary files that processes of this host left behind in a directory when they died, if they are over
    an hour old. This is the part of the policy in `hf_trak.store.leftovers` that costs one look at one directory.
    """
    for entry in directory.glob(".hf_trak-tmp-*"):
        match = TEMPORARY.fullmatch(entry.name)
        if match is None or match["host"] != host_name() or is_alive(int(match["pid"])):
            continue
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file() and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                entry.unlink()
                logger.info("Removed %s, left behind by a process that died.", entry)


def _create_temporary(directory: Path) -> Path:
    """An empty file under a name that no other writer uses, with the permissions that the umask asks for."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f".hf_trak-tmp-{host_name()}-{os.getpid()}-{secrets.token_hex(8)}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return path


def _create_without_links(temporary: Path, path: Path) -> bool:
    """Exclusive creation on file systems without hard links: one winner, but for an instant an empty file is
    visible.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    os.replace(temporary, path)
    return True


def _sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to disk."""
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


def host_name() -> str:
    """This host, as it stands in the names of temporaries."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64] or "unknown"


def is_alive(pid: int) -> bool:
    """Whether a process of this host lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
