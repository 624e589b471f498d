"""Reading a run, with every file compared to its size and checksum in `run.json`.

Runs of format 1, and two datasets that were saved as `scored/` and `train/`, have no checksums. They are read with as
many checks as their formats allow, but a changed score or letter in them goes unnoticed.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetInfo
from safetensors import SafetensorError
from safetensors.numpy import load_file

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.report.run_record import (
    RECORD,
    REMEDY,
    STATISTICS,
    RunRecord,
    SavedFile,
    check_file,
    is_dataset,
    missing_file,
    parts_of,
    read_record,
    unreadable,
)

logger = logging.getLogger(__name__)

_DAMAGED = (
    pa.ArrowException,
    SafetensorError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    StopIteration,
    TypeError,
    ValueError,
)
"""Errors that readers raise for damaged files."""

_ATTEMPTS = 100
_STATE_KEYS = ("_data_files", "_fingerprint", "_format_columns", "_format_kwargs", "_format_type", "_split")
_warned: set[tuple[Path, str]] = set()

T = TypeVar("T")


@dataclass(frozen=True)
class SavedParts:
    """The contents of the files of a run."""

    scored: Dataset
    train: Dataset | None
    tensors: Mapping[str, np.ndarray]
    facts: dict[str, Any]
    root: Path
    """The directory that contains `scored/`."""


def read_parts(directory: Path, with_train: bool, use: Callable[[SavedParts], T]) -> T:
    """Read the parts of a single save, even if other processes replace the run at the same time.

    Args:
        directory: the directory of the run.
        with_train: read the training rows that the run keeps.
        use: called with the parts. If it raises `StoreError` and the run has been replaced meanwhile, the new run is
            read.

    Returns:
        The value of `use`.

    Raises:
        IncompleteStoreError: the run is not complete, or a file is missing.
        StoreError: a file is damaged, or the run was replaced again and again.
    """
    record = read_record(directory)
    for _ in range(_ATTEMPTS):
        try:
            return use(_parts(directory, record, with_train))
        except StoreError:
            current = read_record(directory)
            if current == record:
                raise
            record = current
    raise StoreError(
        f"{directory} was replaced {_ATTEMPTS} times while it was being read. Expected a run that stays unchanged for "
        "a moment. Wait until the processes that save to it have ended."
    )


def _parts(directory: Path, record: RunRecord | None, with_train: bool) -> SavedParts:
    if record is None or record.parts is None:
        return _unchecked_parts(directory, record, with_train)
    root = directory / record.parts
    if is_dataset(directory / "scored"):
        _warn_once(
            directory, "%s has a dataset in scored/ that is no part of the run; the one in %s is read.", record.parts
        )
    for name, expected in record.files.items():
        if with_train or not name.startswith("train/"):
            check_file(root / name, expected)
    train = None
    if with_train and any(name.startswith("train/") for name in record.files):
        train = _checked_dataset(root / "train", record.files)
    return SavedParts(
        _checked_dataset(root / "scored", record.files), train, _tensors(root / STATISTICS), record.facts, root
    )


def _checked_dataset(path: Path, files: Mapping[str, SavedFile]) -> Dataset:
    """Load a dataset whose files have been compared with their checksums."""
    for name in _data_files(path):
        if f"{path.name}/{name}" not in files:
            raise StoreError(
                f"{path / 'state.json'} names the file {name!r}, which {RECORD} does not list. Expected only files of "
                "the run. Attribute again."
            )
    with _damage(path):
        return Dataset.load_from_disk(path)


def _unchecked_parts(directory: Path, record: RunRecord | None, with_train: bool) -> SavedParts:
    """Read a run of format 1, or two datasets without `run.json`."""
    if record is None:
        _refuse_interrupted(directory)
    else:
        _warn_once(
            directory,
            "%s was saved by an earlier version of hf_trak, without checksums: damage to its files may go unnoticed. "
            "Attribute again to save it with checksums.",
        )
    tensors = _tensors(directory / STATISTICS) if record is not None else {}
    scored = _unchecked_dataset(directory / "scored")
    train = None
    if with_train and (record is None or "train_rows" in tensors or (directory / "train").is_dir()):
        train = _unchecked_dataset(directory / "train")
    return SavedParts(scored, train, tensors, record.facts if record is not None else {}, directory)


def _refuse_interrupted(directory: Path) -> None:
    """Refuse a directory without `run.json` that has files of an unfinished save.

    Raises:
        IncompleteStoreError: the directory has such files.
    """
    begun = [*parts_of(directory), *directory.glob(".hf_trak-tmp-*"), *directory.glob(".scored.*")]
    begun += [path for path in [directory / STATISTICS] if path.exists()]
    if begun:
        raise IncompleteStoreError(
            f"{directory} lacks {RECORD}, which is written last, but has {begun[0].name}: saving the run was "
            "interrupted, or is still in progress elsewhere. Expected a complete run. Attribute again."
        )


def _warn_once(directory: Path, message: str, *values: object) -> None:
    if (key := (directory.resolve(), message)) not in _warned:
        _warned.add(key)
        logger.warning(message, directory, *values)


def _unchecked_dataset(path: Path) -> Dataset:
    """Load a dataset without checksums, or raise a `StoreError` that names the damaged file."""
    if not path.is_dir():
        raise IncompleteStoreError(
            f"{path} is missing. Expected a dataset written by `save_to_disk`. Attribute again."
        )
    if (path / "dataset_dict.json").is_file():
        raise StoreError(f"{path} holds several splits. Expected one dataset. Save one of them with `save_to_disk`.")
    names = _data_files(path)
    with _damage(path / "dataset_info.json"):
        DatasetInfo.from_dict(_json(path / "dataset_info.json"))
    for name in names:
        with _damage(path / name), pa.memory_map(str(path / name)) as file:
            pa.ipc.open_stream(file).read_all().validate(full=True)
    with _damage(path):
        return Dataset.load_from_disk(path)


def _data_files(path: Path) -> list[str]:
    """List the names of the Arrow files of a dataset."""
    state = _json(path / "state.json")
    if missing := [key for key in _STATE_KEYS if key not in state]:
        raise StoreError(f"{path / 'state.json'} lacks {missing}. Expected a file of `save_to_disk`. Attribute again.")
    files = state["_data_files"]
    names = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise StoreError(
            f"{path / 'state.json'} names the files {str(files)[:200]}. Expected names of files in the same "
            "directory, at least one. Attribute again."
        )
    return [str(name) for name in names]


def _json(path: Path) -> dict[str, Any]:
    with unreadable(path):
        data = path.read_bytes()
    with _damage(path):
        content = json.loads(data)
    if not isinstance(content, dict):
        raise StoreError(f"{path} holds a JSON {type(content).__name__}. Expected an object. Attribute again.")
    return content


def _tensors(path: Path) -> dict[str, np.ndarray]:
    with _damage(path):
        return dict(load_file(path))


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn the errors that readers raise for a damaged or missing file into a `StoreError` that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise missing_file(path, error) from error
    except (*_DAMAGED, OSError) as error:
        raise StoreError(
            f"{path} is damaged, or no file of a run: {type(error).__name__}: {str(error)[:300]}. Expected a file "
            f"written by `AttributionRun.save` or `save_to_disk`. {REMEDY}"
        ) from error
