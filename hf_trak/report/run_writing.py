"""Save a run such that it is there whole, or not at all.

Each save writes its files into a directory of its own, and then replaces `run.json`, which names that directory and
has the checksums of its files. A killed save leaves a directory that no `run.json` names. Of several processes that
save into one directory, the last one to replace `run.json` wins.

While a save is in progress, a temporary file (see `hf_trak.savers.atomic`) whose name ends in the same 16 digits as
the directory says so: other saves leave the directory alone, see `run_leftovers`.
"""

import contextlib
import errno
import json
import os
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
from hf_trak.savers.atomic import json_bytes, remove_stale_temporaries, temporary_file, write_bytes

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
    with temporary_file(directory) as lease:
        parts = directory / f"parts-{lease.name[-16:]}"
        with _removed_on_failure(parts):
            with write_errors(parts):
                parts.mkdir()
            for name, dataset in zip(VIEWS, (scored, train), strict=True):
                if dataset is not None:
                    with write_errors(parts / name):
                        dataset.save_to_disk(parts / name)
                    os.utime(lease)  # still at work
            with write_errors(parts / STATISTICS):
                save_file(dict(tensors), parts / STATISTICS)
                os.chmod(parts / STATISTICS, stat.S_IMODE(lease.stat().st_mode))  # safetensors writes mode 0600
            files = _flushed(parts)
            record = RunRecord(dict(facts), parts.name, _recorded(directory), files)
            _require(parts, files)
            write_bytes(directory / RECORD, record.content())
        with write_errors(directory):
            _remove_old_layout(directory, parts)
        show(directory)
        remove_superseded(directory)


@contextlib.contextmanager
def _removed_on_failure(parts: Path) -> Iterator[None]:
    """Remove the files of a save that failed, unless `run.json` names them already."""
    complete = False
    try:
        yield
        complete = True
    finally:
        if not complete and _recorded(parts.parent) != parts.name:
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
        for path in [*(path for path in parts.iterdir() if path.is_dir()), parts, parts.parent]:
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


def _remove_old_layout(directory: Path, parts: Path) -> None:
    """Remove the datasets and statistics of format 1, which are beside the new `run.json` and no part of it."""
    for path in old_layout(directory):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                moved = parts / f"old-{path.name}"
                path.rename(moved)  # at once: another process may be about to write a view of this name
                shutil.rmtree(moved, ignore_errors=True)
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
                    remove_stale_temporaries(directory / name)
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
