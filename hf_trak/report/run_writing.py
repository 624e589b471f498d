"""Save a run such that it is there whole, or not at all.

Each save writes its files into a directory of its own, and then replaces `run.json`, which names that directory and
has the checksums of its files. A killed save leaves a directory that no `run.json` names, see `run_leftovers`. Of
several processes that save into one directory, the last one to replace `run.json` wins.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.report.run_leftovers import old_layout, remove_superseded
from hf_trak.report.run_record import RECORD, STATISTICS, VIEWS, RunRecord, SavedFile, read_record
from hf_trak.report.write_errors import write_errors
from hf_trak.store.atomic import host_name, json_bytes, write_bytes

_ATTEMPTS = 20


def write_run(
    directory: Path, scored: Dataset, train: Dataset | None, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Save the parts of a run; the run that is there is replaced at once when all is written.

    Args:
        directory: of the run, created if need be.
        scored: the targets.
        train: training rows, or `None`.
        tensors: what goes into `statistics.safetensors`.
        facts: plain JSON.

    Raises:
        StoreError: a file cannot be written.
    """
    with _temporary_directory(directory) as temporary:
        written = temporary / f"parts-{temporary.name[-16:]}"
        with write_errors(written):
            written.mkdir()
        for name, dataset in zip(VIEWS, (scored, train), strict=True):
            if dataset is not None:
                with write_errors(written / name):
                    dataset.save_to_disk(written / name)
        with write_errors(written / STATISTICS):
            save_file(dict(tensors), written / STATISTICS)
            os.chmod(written / STATISTICS, 0o666 & ~_umask(temporary))  # safetensors writes mode 0600
        files = _flushed(written)
        _commit(directory, written, RunRecord(dict(facts), written.name, _recorded(directory), files))
        show(directory)
    remove_superseded(directory)


@contextlib.contextmanager
def _temporary_directory(directory: Path) -> Iterator[Path]:
    """A directory under a name that no other writer uses, removed at the end."""
    temporary = directory / f".hf_trak-tmp-{host_name()}-{os.getpid()}-{secrets.token_hex(8)}"
    with write_errors(temporary):
        directory.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask(directory: Path) -> int:
    """Of this process, as a new directory shows it: asking for it would change it for other threads."""
    return ~stat.S_IMODE(directory.stat().st_mode) & 0o777


def _commit(directory: Path, written: Path, record: RunRecord) -> None:
    """Put the files in their place, and have `run.json` name them."""
    parts = directory / written.name
    complete = False
    try:
        with write_errors(parts):
            written.rename(parts)
            _flush(directory)
        _require(parts, record.files)
        write_bytes(directory / RECORD, record.content())
        complete = True
        with write_errors(directory):
            _remove_old_layout(directory, written.parent)
    finally:
        if not complete and _recorded(directory) != parts.name:
            shutil.rmtree(parts, ignore_errors=True)


def _recorded(directory: Path) -> str | None:
    """The parts that `run.json` names; `None` where it names none, or is damaged and about to be replaced."""
    try:
        record = read_record(directory)
    except StoreError:
        return None
    return None if record is None else record.parts


def _flushed(parts: Path) -> dict[str, SavedFile]:
    """Size and checksum of every file, once all are on disk."""
    found = {}
    for path in sorted(path for path in parts.rglob("*") if path.is_file()):
        with write_errors(path):
            _flush(path)
            found[path.relative_to(parts).as_posix()] = SavedFile.of(path)
    with write_errors(parts):
        for path in [*(path for path in parts.iterdir() if path.is_dir()), parts]:
            _flush(path)
    return found


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open directories
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # network file systems refuse to sync a directory
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _require(parts: Path, files: Mapping[str, SavedFile]) -> None:
    """Raise `StoreError` if somebody removed files of this save: `run.json` must not name what is not there."""
    for name, file in files.items():
        path = parts / name
        if not path.is_file() or path.stat().st_size != file.size:
            raise StoreError(
                f"{path} was removed or changed while the run was being saved. Expected to be the only one to write "
                "there. Save again, and clean the directory only while nothing is saved to it."
            )


def _remove_old_layout(directory: Path, temporary: Path) -> None:
    """Remove the datasets and statistics of format 1, which are beside the new `run.json` and no part of it."""
    for path in old_layout(directory):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                path.rename(temporary / path.name)  # at once: another process may write a view of this name
            else:
                path.unlink()


def show(directory: Path) -> None:
    """Make `scored/` and `train/` show the rows that `run.json` names.

    Raises:
        StoreError: a file cannot be written.
    """
    shown: str | None = None
    for _ in range(_ATTEMPTS):  # another save may replace `run.json` before this one has shown its rows
        record = read_record(directory)
        if record is None or record.parts is None or record.parts == shown:
            return
        with contextlib.suppress(FileNotFoundError):  # its files are gone: it has been replaced
            for name in VIEWS:
                if f"{name}/state.json" in record.files:
                    for file, data in view_of(directory, record.parts, name).items():
                        write_bytes(directory / name / file, data)
                else:
                    shutil.rmtree(directory / name, ignore_errors=True)
            shown = record.parts


def view_of(directory: Path, parts: str, name: str) -> dict[str, bytes]:
    """The files of a view. Only `state.json` differs between saves: both could not be replaced at once.

    Raises:
        FileNotFoundError: the parts are gone.
    """
    state = json.loads((directory / parts / name / "state.json").read_bytes())
    state["_data_files"] = [{"filename": f"../{parts}/{name}/{file['filename']}"} for file in state["_data_files"]]
    # The features of the rows are in the Arrow files, too.
    return {"dataset_info.json": b"{}\n", "state.json": json_bytes(state)}
