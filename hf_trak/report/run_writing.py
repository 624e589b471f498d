"""Atomic saving of a run: it is complete, or it is the run that was there before.

Each save writes its files to a directory of its own, and then replaces `run.json`, which names this directory and the
checksums of its files. A killed save leaves a directory that no `run.json` names, see `run_leftovers`. Of several
processes that save to one directory, the last one to replace `run.json` wins.
"""

import contextlib
import json
import shutil
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
from hf_trak.store.atomic import atomic_path, flush_to_disk, json_bytes, temporary_name, write_bytes

_ATTEMPTS = 20


def write_run(
    directory: Path, scored: Dataset, train: Dataset | None, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Save the parts of a run, and then replace the run that is in the directory, if there is one.

    Args:
        directory: the directory of the run, created if it does not exist.
        scored: the targets with their scores.
        train: the training rows, or `None`.
        tensors: the content of `statistics.safetensors`.
        facts: the facts, plain JSON.

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
        with atomic_path(written / STATISTICS) as statistics:  # gives the file the permissions of the umask
            save_file(dict(tensors), statistics)
        files = _flushed(written)
        _commit(directory, written, RunRecord(dict(facts), written.name, _recorded(directory), files))
        write_views(directory)
    remove_superseded(directory)


@contextlib.contextmanager
def _temporary_directory(directory: Path) -> Iterator[Path]:
    """Create a directory under a name that no other writer uses, and remove it at the end of the block."""
    temporary = directory / temporary_name()
    with write_errors(temporary):
        directory.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _commit(directory: Path, written: Path, record: RunRecord) -> None:
    """Move the files to their place, and let `run.json` name them. If that fails, remove them."""
    parts = directory / written.name
    complete = False
    try:
        with write_errors(parts):
            written.rename(parts)
            flush_to_disk(directory)
        _require(parts, record.files)
        write_bytes(directory / RECORD, record.content())
        complete = True
        with write_errors(directory):
            _remove_old_layout(directory, written.parent)
    finally:
        if not complete and _recorded(directory) != parts.name:
            shutil.rmtree(parts, ignore_errors=True)


def _recorded(directory: Path) -> str | None:
    """Return the name of the parts in `run.json`, or `None` if there is none, or the file is damaged."""
    try:
        record = read_record(directory)
    except StoreError:
        return None
    return None if record is None else record.parts


def _flushed(parts: Path) -> dict[str, SavedFile]:
    """Flush all files to disk, and measure their sizes and checksums."""
    found = {}
    for path in sorted(path for path in parts.rglob("*") if path.is_file()):
        with write_errors(path):
            flush_to_disk(path)
            found[path.relative_to(parts).as_posix()] = SavedFile.of(path)
    with write_errors(parts):
        for path in [*(path for path in parts.iterdir() if path.is_dir()), parts]:
            flush_to_disk(path)
    return found


def _require(parts: Path, files: Mapping[str, SavedFile]) -> None:
    """Check that no other process has removed files of this save, since `run.json` must not name missing files.

    Raises:
        StoreError: a file is missing or has another size.
    """
    for name, file in files.items():
        path = parts / name
        if not path.is_file() or path.stat().st_size != file.size:
            raise StoreError(
                f"{path} was removed or changed while the run was being saved. Expected no other process to write "
                "there. Save again, and clean the directory only while nothing is being saved to it."
            )


def _remove_old_layout(directory: Path, temporary: Path) -> None:
    """Remove the datasets and statistics of a run of format 1, which do not belong to the new `run.json`."""
    for path in old_layout(directory):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                path.rename(temporary / path.name)  # atomic, since another process may be writing a view of this name
            else:
                path.unlink()


def write_views(directory: Path) -> None:
    """Let `scored/` and `train/` show the rows that `run.json` names.

    Raises:
        StoreError: a file cannot be written.
    """
    shown: str | None = None
    for _ in range(_ATTEMPTS):  # another save may replace `run.json` before this one has shown its rows
        record = read_record(directory)
        if record is None or record.parts is None or record.parts == shown:
            return
        with contextlib.suppress(FileNotFoundError):  # the files are missing if the run has been replaced
            for name in VIEWS:
                if f"{name}/state.json" in record.files:
                    for file, data in view_of(directory, record.parts, name).items():
                        write_bytes(directory / name / file, data)
                else:
                    shutil.rmtree(directory / name, ignore_errors=True)
            shown = record.parts


def view_of(directory: Path, parts: str, name: str) -> dict[str, bytes]:
    """Make the files of a view: a dataset directory that refers to the Arrow files of the parts.

    Two files cannot be replaced in one step, so only `state.json` differs between saves.

    Returns:
        The contents of the files, by name.

    Raises:
        FileNotFoundError: the parts have been removed.
    """
    state = json.loads((directory / parts / name / "state.json").read_bytes())
    state["_data_files"] = [{"filename": f"../{parts}/{name}/{file['filename']}"} for file in state["_data_files"]]
    # `dataset_info.json` may be empty, because the Arrow files contain the features, too.
    return {"dataset_info.json": b"{}\n", "state.json": json_bytes(state)}
