"""`run.json`, the record of a saved run: its facts, and its files with their sizes and checksums.

    {
      "checksum": …, "format_version": 2,      see `hf_trak.store.sealed`
      "facts": {…},                            shown in the report, in this order
      "parts": "parts-<16 hex digits>",        directory of the files
      "previous": "parts-…" or null,           directory of the previous save, kept until the next save
      "files": {"scored/state.json": {"bytes": …, "xxh3_128": …}, …}
    }

Runs of format 1 have their files next to `run.json`, without checksums.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets import Dataset, DatasetInfo
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.report.distributions import BINS, ScoreDistributions
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS
from hf_trak.store.atomic import (
    TEMPORARY,
    Leftover,
    atomic_path,
    explained,
    flush_to_disk,
    json_bytes,
    leftovers,
    remove_stale,
    temporary_name,
    write_bytes,
)
from hf_trak.store.sealed import CHECKSUM_KEY, VERSION_KEY, check_seal, content_digest
from hf_trak.store.shards import Finding

RECORD = "run.json"

STATISTICS = "statistics.safetensors"

FORMAT_VERSION = 1

VIEWS = ("scored", "train")

"""Names of the datasets of a run, and of the directories next to `run.json` from which `datasets.load_from_disk` reads
the same rows."""


PARTS = re.compile(r"parts-[0-9a-f]{16}")

"""Pattern of the names of directories that saves write to."""


_FILE = re.compile(rf"(scored|train)/[A-Za-z0-9][A-Za-z0-9_.-]*|{re.escape(STATISTICS)}")

_MOST_BYTES = 16 << 20

REMEDY = "Restore it from a copy, or attribute again."


@dataclass(frozen=True)
class SavedFile:
    """Size in bytes and xxh3-128 digest of a file."""

    size: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> "SavedFile":
        """Measure a file on disk.

        Raises:
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            return cls(file.tell(), digest)


@dataclass(frozen=True)
class RunRecord:
    """The content of `run.json`. In a run of format 1, `parts` is `None` and `files` is empty."""

    facts: dict[str, Any]
    parts: str | None = None
    previous: str | None = None
    files: Mapping[str, SavedFile] = field(default_factory=dict)

    def content(self) -> bytes:
        """Serialize the record with its checksum. Facts keep their order, in which the report shows them.

        Raises:
            StoreError: the file would be larger than the largest that is read.
        """
        content: dict[str, Any] = {
            VERSION_KEY: FORMAT_VERSION,
            "parts": self.parts,
            "previous": self.previous,
            "files": {name: {"bytes": file.size, "xxh3_128": file.digest} for name, file in self.files.items()},
            "facts": self.facts,
        }
        text = json.dumps({CHECKSUM_KEY: content_digest(content), **content}, indent=2, allow_nan=False) + "\n"
        if len(text) > _MOST_BYTES:
            raise StoreError(
                f"The facts of the run and the list of its files make a {RECORD} of {len(text):,} bytes. Expected at "
                f"most {_MOST_BYTES:,}. Keep large values in a file of their own."
            )
        return text.encode()


def read_record(directory: Path) -> RunRecord | None:
    """Read `run.json` of a run.

    Returns:
        The record, or `None` if the file does not exist.

    Raises:
        StoreError: the file is damaged or of a later format.
    """
    path = directory / RECORD
    with unreadable(path):
        try:
            if (size := path.stat().st_size) > _MOST_BYTES:
                raise StoreError(f"{path} has {size:,} bytes. Expected at most {_MOST_BYTES:,}. {REMEDY}")
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no JSON ({str(error)[:200]}). Expected a JSON object. {REMEDY}") from error
    if not isinstance(content, dict):
        raise StoreError(f"{path} holds a JSON {type(content).__name__}. Expected an object. {REMEDY}")
    version = content.get(VERSION_KEY)
    if version not in (1, FORMAT_VERSION) or isinstance(version, bool):
        raise StoreError(
            f"{path} has format version {version!r}. Expected {FORMAT_VERSION}, or 1 without checksums. Read it with "
            "the version of hf_trak that wrote it, or attribute again."
        )
    try:
        check_seal(content, path, REMEDY)
    except (ValueError, RecursionError) as error:  # for values such as NaN, which hf_trak never writes
        raise StoreError(f"{path} is damaged ({str(error)[:200]}). Expected plain JSON. {REMEDY}") from error
    record = _parsed(content) if version == FORMAT_VERSION else _parsed_version_1(content)
    if record is None:
        raise StoreError(f"{path} does not say which files the run has, or has no facts. Expected both. {REMEDY}")
    return record


def _parsed(content: Mapping[str, Any]) -> RunRecord | None:
    facts, parts, previous, files = (content.get(name) for name in ("facts", "parts", "previous", "files"))
    if not isinstance(facts, dict) or not isinstance(files, dict) or not _is_parts(parts):
        return None
    if previous is not None and not _is_parts(previous):
        return None
    found = {}
    for name, entry in files.items():
        size, digest = (entry.get("bytes"), entry.get("xxh3_128")) if isinstance(entry, dict) else (None, None)
        if not isinstance(size, int) or not isinstance(digest, str) or not _FILE.fullmatch(name):
            return None
        found[name] = SavedFile(size, digest)
    return RunRecord(facts, parts, previous, found)


def _parsed_version_1(content: Mapping[str, Any]) -> RunRecord | None:
    facts = content.get("facts")
    return RunRecord(facts) if isinstance(facts, dict) and "parts" not in content else None


def _is_parts(name: object) -> bool:
    return isinstance(name, str) and PARTS.fullmatch(name) is not None


def parts_of(directory: Path) -> list[Path]:
    """List all directories that saves of a run have made."""
    return sorted(path for path in directory.glob("parts-*") if PARTS.fullmatch(path.name))


def is_dataset(path: Path) -> bool:
    """Tell whether a directory is a dataset with rows of its own, not a view."""
    return path.is_symlink() or any(path.glob("*.arrow"))


def find_run(directory: str | Path) -> Path:
    """Find a run in a directory: the directory itself, or the only run in its `scores/`.

    Raises:
        IncompleteStoreError: there is no run.
        ValueError: there are several runs.
    """
    directory = Path(directory)
    if (directory / "scored").is_dir() or parts_of(directory):
        return directory
    found = sorted(path for path in directory.glob("scores/*") if (path / RECORD).exists() or parts_of(path))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{directory} holds several runs. Expected one of {[str(path) for path in found]}.")
    if (directory / RECORD).exists():
        return directory
    raise IncompleteStoreError(
        f"{directory} holds no run. Expected a directory with `{RECORD}` or with the datasets `scored/` and `train/`, "
        "or the `output_dir` of `hf-trak attribute`. Run `hf-trak attribute`, or save one with `AttributionRun.save`."
    )


def check_file(path: Path, expected: SavedFile) -> None:
    """Compare a file with its size and checksum in `run.json`.

    Raises:
        IncompleteStoreError: the file is missing.
        StoreError: its size or checksum differs, or it cannot be read.
    """
    with unreadable(path):
        found = SavedFile.of(path)
    if found != expected:
        what = (
            f"it has {found.size:,} bytes instead of {expected.size:,}"
            if found.size != expected.size
            else f"its checksum is {found.digest} instead of {expected.digest}"
        )
        raise StoreError(f"{path} is damaged: {what}. Expected the file that {RECORD} describes. {REMEDY}")


def missing_file(path: Path, error: FileNotFoundError) -> IncompleteStoreError:
    """Make the error for a file of the run that does not exist: the one that `error` names, or else `path`."""
    return IncompleteStoreError(f"{error.filename or path} is missing. Expected a file that the run needs. {REMEDY}")


@contextlib.contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Turn the `OSError` for a file that cannot be read into a `StoreError`.

    Raises:
        IncompleteStoreError: the file does not exist.
        StoreError: the file cannot be read.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise missing_file(path, error) from error
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error}. Expected a file that this process may read. Get access to it, or "
            "attribute again."
        ) from error


def run_leftovers(directory: str | Path) -> list[Leftover]:
    """Find parts that `run.json` does not name, and the files of a run of format 1 that was replaced.

    The parts of the previous save are among them, although saving keeps those for datasets in memory. Temporary files
    are not.

    Args:
        directory: the directory of the run.

    Returns:
        The leftovers. Those of a save in progress have a living writer. If `run.json` is damaged, the list is empty,
        since the parts that it named are unknown.
    """
    return _superseded(Path(directory), keep_previous=False)


def remove_superseded(directory: Path) -> None:
    """Remove, after a save, the parts of all replaced saves except the previous one.

    Parts and temporary files of killed saves are removed, too, if they are old enough for any run to remove them.
    """
    for one in _superseded(directory, keep_previous=True):
        if one.host is None or one.stale:
            one.remove()
    remove_stale(directory)


def old_layout(directory: Path) -> list[Path]:
    """List the datasets and statistics that a run of format 1 has next to `run.json`."""
    found = [directory / name for name in VIEWS if is_dataset(directory / name)]
    return [path for path in [*found, directory / STATISTICS] if path.exists() or path.is_symlink()]


def _superseded(directory: Path, keep_previous: bool) -> list[Leftover]:
    """Find parts that `run.json` does not name, in the order of steps that the docstring of the module explains."""
    found = parts_of(directory)
    writers = {one.path.name[-16:]: one for one in leftovers(directory) if TEMPORARY.fullmatch(one.path.name)}
    try:
        record = read_record(directory)
    except StoreError:
        return []
    result = []
    if record is not None and record.parts is not None:
        kept = {record.parts, record.previous} if keep_previous else {record.parts}
        found = [parts for parts in found if parts.name not in kept]
        result = [_leftover(path, None) for path in old_layout(directory)]
    return result + [_leftover(parts, writers.get(parts.name.removeprefix("parts-"))) for parts in found]


def _leftover(path: Path, writer: Leftover | None) -> Leftover:
    """Describe a leftover. Its writer has ended unless there is still a temporary directory of it, `writer`."""
    size = 0
    files = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
    for file in files or [str(path)]:
        with contextlib.suppress(FileNotFoundError):  # another process may be removing it
            size += os.lstat(file).st_size
    if writer is not None:
        return Leftover(path, size, writer.age, writer.host, writer.alive)
    age = 0.0
    with contextlib.suppress(FileNotFoundError):
        age = max(0.0, time.time() - path.lstat().st_mtime)
    return Leftover(path, size, age, None, False)


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


TRAIN_ROWS = "train_rows"

SELF_INFLUENCE = "self_influence"

_DISTRIBUTIONS = tuple(ScoreDistributions.__dataclass_fields__)

_INTEGERS = (TRAIN_ROWS, "counts", "first")


@dataclass(frozen=True)
class Ends:
    """The flattened top-k lists of some targets, from one end.

    Attributes:
        start: number of the first target.
        targets: `(entries,)`, the target of every entry, counted from `start`.
        rows: `(entries,)`, training rows.
        scores: `(entries,)`, their scores.
        name: name of the column with the rows.
    """

    start: int
    targets: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    name: str


def ends_of(scored: Dataset, batch_size: int = 10_000) -> Iterator[Ends]:
    """Iterate over the top-k lists of a scored dataset, `batch_size` targets at a time, best and worst in turn.

    Raises:
        ValueError: a column is missing, is no list of numbers, or its lists have other lengths than their scores.
    """
    if missing := [name for name in TOP_K_COLUMNS if name not in scored.column_names]:
        raise ValueError(f"it has the columns {scored.column_names}; {missing} are missing")
    tables = scored.with_format("arrow").select_columns(list(TOP_K_COLUMNS)).iter(batch_size)
    for place, table in enumerate(tables):
        start = place * batch_size
        for rows_name, scores_name in (TOP_K_COLUMNS[:2], TOP_K_COLUMNS[2:]):
            lengths, rows = _flat(table, rows_name, pa.types.is_integer)
            others, scores = _flat(table, scores_name, pa.types.is_floating)
            if not np.array_equal(lengths, others):
                raise ValueError(f"the lists of `{rows_name}` and `{scores_name}` have different lengths")
            yield Ends(start, np.repeat(np.arange(len(lengths)), lengths), rows, scores, rows_name)


def _flat(table: pa.Table, name: str, kind: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of the lists in a column, and all their values."""
    column = table[name].combine_chunks()
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    types = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(check(column.type) for check in types) or not kind(column.type.value_type):
        raise ValueError(f"the column `{name}` has the type {column.type}, not lists of numbers")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise ValueError(f"the column `{name}` has missing values")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), values.to_numpy(zero_copy_only=False)


def check_parts(parts: SavedParts, train_dataset: Any = None) -> None:
    """Check that the parts that were read make a run.

    Args:
        parts: the parts of the run.
        train_dataset: all training rows, if they are given. Then those of the run have not been read.

    Raises:
        StoreError: a part does not fit the others.
        ValueError: `train_dataset` does not have as many rows as were attributed.
    """
    tensors = dict(parts.tensors)
    if problem := statistics_problem(tensors, len(parts.scored)):
        raise _misfit(parts.root / STATISTICS, problem)
    if train_dataset is None:
        rows = tensors.get(TRAIN_ROWS)
        sizes = train_sizes(tensors, parts.facts, parts.train)
        problem = sizes_problem(sizes, rows, parts.train)
    else:
        rows = None
        tensors.pop(TRAIN_ROWS, None)
        sizes = train_sizes(tensors, parts.facts, None)
        problem = sizes_problem(sizes, None, None) if sizes else None
    if problem:
        raise _misfit(parts.root, problem)
    n_train = next(iter(sizes.values()), None)
    if train_dataset is not None:
        if n_train not in (None, len(train_dataset)):
            raise ValueError(
                f"`train_dataset` has {len(train_dataset)} rows; the run is about {n_train}. Expected the dataset "
                "that was attributed. Pass that one, or none to see the rows that the run keeps."
            )
        n_train = len(train_dataset)
    if problem := scores_problem(parts.scored, n_train, rows):
        raise _misfit(parts.root / "scored", problem)


def _misfit(path: Path, problem: str) -> StoreError:
    return StoreError(
        f"{path} does not fit the rest of the run: {problem}. Expected the parts of one attribution. Restore the run "
        "from a copy, or attribute again."
    )


def scores_problem(scored: Dataset, n_train: int | None, held: np.ndarray | None) -> str | None:
    """Describe what is wrong with the scores.

    Args:
        scored: the targets with their scores.
        n_train: number of training rows, if it is known.
        held: the training rows that the run keeps, `(rows,)`, ascending. `None` if it keeps all or none.

    Returns:
        The problem as the end of a sentence, or `None` if there is none.
    """
    if len(scored) == 0:
        return "it has no targets"
    try:
        problems = (_problem(ends, n_train, held) for ends in ends_of(scored))
        return next((problem for problem in problems if problem is not None), None)
    except ValueError as error:
        return str(error)


def _problem(ends: Ends, n_train: int | None, held: np.ndarray | None) -> str | None:
    """Describe the first problem of some top-k lists."""
    best = ends.name == TOP_K_COLUMNS[0]

    def first(bad: np.ndarray, what: str, values: np.ndarray) -> str | None:
        if not bad.any():
            return None
        place = int(np.argmax(bad))
        return f"target {ends.start + int(ends.targets[place])}: {what.format(values[place])}"

    # Scores are finite, and rows exist.
    names_row = f"`{ends.name}` names the training row {{}}"
    problem = first(~np.isfinite(ends.scores), "the score {} is not finite", ends.scores)
    problem = problem or first(ends.rows < 0, f"{names_row}, expected 0 or more", ends.rows)
    if n_train is not None:
        problem = problem or first(ends.rows >= n_train, f"{names_row}; there are {n_train}", ends.rows)
    if held is not None:
        place = np.minimum(np.searchsorted(held, ends.rows), max(len(held) - 1, 0))
        absent = held[place] != ends.rows if len(held) else np.ones(len(ends.rows), dtype=bool)
        problem = problem or first(absent, f"{names_row}, which is not among those that the run keeps", ends.rows)
    # The scores of each target are sorted.
    same = np.diff(ends.targets, prepend=-1) == 0
    step = np.diff(ends.scores.astype(np.float64), prepend=0.0)
    order = "from the highest to the lowest" if best else "from the lowest to the highest"
    unsorted = same & ((step > 0) if best else (step < 0))
    problem = problem or first(unsorted, f"the score {{}} is out of order; scores go {order}", ends.scores)
    # No row occurs twice in the list of a target.
    by_row = np.lexsort((ends.rows, ends.targets))
    twice = np.zeros(len(by_row), dtype=bool)
    twice[by_row[1:]] = (np.diff(ends.rows[by_row]) == 0) & (np.diff(ends.targets[by_row]) == 0)
    return problem or first(twice, f"{names_row} twice", ends.rows)


def statistics_problem(tensors: Mapping[str, Any], targets: int) -> str | None:
    """Describe what is wrong with the tensors of `statistics.safetensors`.

    Args:
        tensors: the arrays, by name.
        targets: number of targets, m.

    Returns:
        The problem as the end of a sentence, or `None` if there is none.
    """
    known = {TRAIN_ROWS, SELF_INFLUENCE, *_DISTRIBUTIONS}
    if unknown := sorted(set(tensors) - known):
        return f"it has the tensors {unknown}; expected some of {sorted(known)}"
    present = [name for name in _DISTRIBUTIONS if name in tensors]
    if present and len(present) != len(_DISTRIBUTIONS):
        return f"of the distributions it has only {present}; expected {list(_DISTRIBUTIONS)}"
    for name, value in tensors.items():
        kinds = "iu" if name in _INTEGERS else "f"
        if value.dtype.kind not in kinds or value.ndim != (2 if name == "counts" else 1):
            return f"`{name}` has dtype {value.dtype} and shape {value.shape}"
        if not np.isfinite(value).all():
            return f"`{name}` has values that are not finite"
        if name in _DISTRIBUTIONS and len(value) != targets:
            return f"`{name}` is about {len(value)} targets; there are {targets}"
    rows = tensors.get(TRAIN_ROWS)
    if rows is not None and (np.diff(rows, prepend=-1) <= 0).any():
        return f"`{TRAIN_ROWS}` is not ascending from 0"
    return _distributions_problem(tensors) if present else None


def _distributions_problem(tensors: Mapping[str, Any]) -> str | None:
    counts = tensors["counts"]
    if counts.shape[1] != BINS + 2:
        return f"`counts` has {counts.shape[1]} bins; expected {BINS + 2}"
    if (counts < 0).any() or len(np.unique(counts.sum(axis=1))) > 1:
        return "`counts` does not count the same number of scores for every target"
    if (tensors["width"] <= 0).any() or (tensors["std"] < 0).any():
        return "`width` or `std` is negative, or a width 0"
    if ((tensors["positive"] < 0) | (tensors["positive"] > 1)).any():
        return "`positive` is no fraction between 0 and 1"
    return None


def train_sizes(tensors: Mapping[str, Any], facts: Mapping[str, Any], train: Any) -> dict[str, Any]:
    """Collect what the parts of a run say about the number of training rows, by the name of the part."""
    sizes: dict[str, Any] = {}
    if TRAIN_ROWS in facts:
        sizes["the fact `train_rows`"] = facts[TRAIN_ROWS]
    if SELF_INFLUENCE in tensors:
        sizes[f"`{SELF_INFLUENCE}`"] = len(tensors[SELF_INFLUENCE])
    if len(tensors.get("counts", ())):
        sizes["`counts`"] = int(tensors["counts"][0].sum())
    if train is not None and TRAIN_ROWS not in tensors:
        sizes["the training dataset"] = len(train)
    return sizes


def sizes_problem(sizes: Mapping[str, Any], rows: np.ndarray | None, train: Any) -> str | None:
    """Describe what is wrong with the number of training rows, or return `None` if all parts agree."""
    if not sizes:
        return "it does not say how many training rows there are"
    if len(set(map(repr, sizes.values()))) > 1:
        return f"its parts disagree about the number of training rows: {sizes}"
    n_train = next(iter(sizes.values()))
    if isinstance(n_train, bool) or not isinstance(n_train, int) or n_train < 1:
        return f"the number of training rows is {n_train!r}"
    if rows is not None:
        if train is None or len(rows) != len(train):
            return f"`{TRAIN_ROWS}` names {len(rows)} training rows; the run has {0 if train is None else len(train)}"
        if len(rows) and rows[-1] >= n_train:
            return f"`{TRAIN_ROWS}` names the training row {rows[-1]}; there are {n_train}"
    return None


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the error of a failed write into a `StoreError` that names the file and the free space.

    Errors that name a file elsewhere pass: such a file could not be read, for example an image that a row refers to.

    Args:
        path: the file, or a directory. If the error names no file, the newest file in the directory is the one that
            was being written.

    Raises:
        StoreError: a file could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        named = getattr(error, "filename", None)
        if isinstance(named, str) and not Path(named).is_relative_to(path.parent):
            raise
        with explained(Path(named) if isinstance(named, str) else _newest(path)):
            raise


def _newest(path: Path) -> Path:
    """Find the file below a directory that was written last."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=path)


_WRITE_ATTEMPTS = 20


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
    for _ in range(_WRITE_ATTEMPTS):  # another save may replace `run.json` before this one has shown its rows
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
