"""Verification of every byte of a saved run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.report.run_checks import check_parts
from hf_trak.report.run_leftovers import run_leftovers
from hf_trak.report.run_reading import read_parts
from hf_trak.report.run_record import (
    RECORD,
    STATISTICS,
    VIEWS,
    RunRecord,
    check_file,
    is_dataset,
    parts_of,
    read_record,
)
from hf_trak.report.run_writing import view_of
from hf_trak.store.findings import Finding
from hf_trak.store.leftovers import leftovers

_AGAIN = "Attribute again: `hf-trak attribute` with the same name and settings replaces the run."
_CLEAN = "`hf-trak clean` removes it, and so does a later save of the run."


def verify_run(directory: str | Path) -> Iterator[Finding]:
    """Check every file of a run. Other files in its directory are ignored.

    Args:
        directory (`str` or `Path`):
            The directory of the run, see `hf_trak.report.run`.

    Yields:
        `Finding`: one per file, `unchecked` for files of runs without checksums (format 1, and datasets saved by
        other means); one `leftover` per file or directory of saves that were killed or replaced; and one `damaged`
        for the directory if all files are as they were written but do not make a run.
    """
    directory = Path(directory)
    try:
        record = read_record(directory)
    except StoreError as error:
        yield Finding(directory / RECORD, "damaged", str(error), _AGAIN)
        for path in _files(*parts_of(directory)):
            yield Finding(path, "unchecked", f"its checksum is in {RECORD}, which is damaged", _AGAIN)
        return
    found = list(
        _unchecked(directory, record) if record is None or record.parts is None else _checked(directory, record)
    )
    yield from found
    if all(finding.state in ("intact", "unchecked", "leftover") for finding in found):
        try:
            read_parts(directory, True, check_parts)
        except StoreError as error:
            yield Finding(directory, "damaged", str(error), _AGAIN)
    yield from _leftovers(directory)


def _checked(directory: Path, record: RunRecord) -> Iterator[Finding]:
    yield Finding(directory / RECORD, "intact")
    root = directory / str(record.parts)
    for name, expected in record.files.items():
        try:
            check_file(root / name, expected)
        except IncompleteStoreError as error:
            yield Finding(root / name, "missing", str(error), _AGAIN)
        except StoreError as error:
            yield Finding(root / name, "damaged", str(error), _AGAIN)
        else:
            yield Finding(root / name, "intact")
    for path in _files(root):
        if path.relative_to(root).as_posix() not in record.files:
            yield Finding(path, "leftover", f"{RECORD} does not name it", "Delete it.")
    yield from _views(directory, record)


def _views(directory: Path, record: RunRecord) -> Iterator[Finding]:
    """Check the directories that `datasets.load_from_disk` reads."""
    remedy = f"Save the run again, or delete it: {RECORD} and the parts that it names are the run."
    for name in VIEWS:
        if f"{name}/state.json" not in record.files or is_dataset(directory / name):
            continue
        try:
            expected = view_of(directory, str(record.parts), name)
        except (OSError, LookupError, TypeError, ValueError):
            continue  # a damaged part, which has its own finding
        for file, data in expected.items():
            path = directory / name / file
            if not path.is_file():
                yield Finding(path, "missing", "`datasets.load_from_disk` reads it, the report does not", remedy)
            elif path.read_bytes() != data:
                stale = path.read_bytes() == _data_before(directory, record, name, file)
                rows = "the rows of the save before" if stale else "other rows"
                yield Finding(
                    path, "leftover" if stale else "damaged", f"it shows {rows}, not those that {RECORD} names", remedy
                )
            else:
                yield Finding(path, "intact")


def _data_before(directory: Path, record: RunRecord, name: str, file: str) -> bytes | None:
    """Return the content of a view file before the last save, which did not replace it if it was killed at its end."""
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        return view_of(directory, str(record.previous), name).get(file)
    return None


def _unchecked(directory: Path, record: RunRecord | None) -> Iterator[Finding]:
    """Check a run of format 1, two datasets without `run.json`, or a directory without a run."""
    if record is None and (parts_of(directory) or (directory / STATISTICS).exists()):
        yield Finding(
            directory / RECORD, "missing", "saving the run was interrupted, or is in progress elsewhere", _AGAIN
        )
        return
    files = [directory / name for name in (RECORD, STATISTICS) if (directory / name).exists()]
    for path in [*files, *_files(*(directory / name for name in VIEWS))]:
        yield Finding(path, "unchecked", "the run was saved without checksums", _AGAIN)


def _leftovers(directory: Path) -> Iterator[Finding]:
    for one in run_leftovers(directory):
        yield Finding(one.path, "leftover", f"{one.size} bytes of a save that was replaced or killed", _CLEAN)
    for one in leftovers(directory):
        yield Finding(one.path, "leftover", f"{one.size} bytes", "`hf-trak clean` removes it.")


def _files(*directories: Path) -> Iterator[Path]:
    for directory in directories:
        yield from sorted(path for path in directory.rglob("*") if path.is_file())
