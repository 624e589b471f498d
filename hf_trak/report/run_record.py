"""Files of a saved run: one directory, replaced as a whole, whose `run.json` names every file in it.

    run/
      run.json                 {"checksum": …, "format_version": 1, "save": 16 hex digits of its own for every save,
                               "facts": {…}, "files": {"scored/state.json": [bytes, xxh3-128], …}}; written last
      scored/, train/          datasets, for `datasets.load_from_disk`, too
      statistics.safetensors   self-influence, distributions and row numbers

Arrow files have the digits of their save in their names. A dataset that was loaded before the run was replaced, and is
opened again by its path in another process, thus misses its file, and never gets rows of another run.
"""

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.numpy
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.numpy import load_file

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.report.distributions import BINS, ScoreDistributions
from hf_trak.runtime.progress import no_progress_bars
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS
from hf_trak.store.atomic import TEMPORARY, atomic_directory, json_bytes, remove_stale
from hf_trak.store.sealed import (
    CHECKSUM_KEY,
    SEALED_VERSION,
    VERSION_KEY,
    Finding,
    content_digest,
    file_digest,
    read_sealed,
)

RUN = "run"

RECORD = "run.json"

STATISTICS = "statistics.safetensors"

TRAIN_ROWS = "train_rows"

SELF_INFLUENCE = "self_influence"

_FILE = re.compile(rf"(scored|train)/[A-Za-z0-9][A-Za-z0-9_.-]*|{re.escape(STATISTICS)}")

_MOST_BYTES = 16 << 20

_ATTEMPTS = 100

_PAUSE = 0.005  # seconds between attempts to find a run while another process puts one there

_REMEDY = "Restore it from a copy, or attribute again."

_DAMAGED = (
    pa.ArrowException, SafetensorError, ArithmeticError, AttributeError, LookupError, MemoryError, OSError,
    RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip

"""Errors that readers raise for damaged files."""


T = TypeVar("T")


@dataclass(frozen=True)
class RunRecord:
    """The content of `run.json`.

    Attributes:
        save: 16 hex digits, others for every save.
        facts: shown in the report, in this order.
        files: `(bytes, xxh3-128 digest)` of every other file, by its path in the directory.
    """

    save: str
    facts: dict[str, Any]
    files: dict[str, tuple[int, str]]

    def content(self) -> bytes:
        """Serialize the record with its checksum.

        Raises:
            StoreError: the file would be larger than the largest that is read.
        """
        content = {VERSION_KEY: SEALED_VERSION, "save": self.save, "files": self.files, "facts": self.facts}
        text = json.dumps({CHECKSUM_KEY: content_digest(content), **content}, indent=2) + "\n"
        if len(text) > _MOST_BYTES:
            raise StoreError(
                f"The facts of the run and the list of its files make a {RECORD} of {len(text):,} bytes. Expected at "
                f"most {_MOST_BYTES:,}. Keep large values in a file of their own."
            )
        return text.encode()


@dataclass(frozen=True)
class SavedParts:
    """The contents of the files of a run."""

    scored: Dataset
    train: Dataset | None
    tensors: dict[str, np.ndarray]
    facts: dict[str, Any]
    root: Path
    """The directory that contains `run.json`."""


def find_run(directory: str | Path) -> Path:
    """Find a run: in a directory itself, or the only one in its `scores/`.

    Returns:
        The directory that contains `run/`.

    Raises:
        IncompleteStoreError: there is no run.
        ValueError: there are several runs.
    """
    directory = Path(directory)
    if directory.name == RUN and (directory / RECORD).exists():
        return directory.parent
    if (directory / RUN).is_dir():
        return directory
    found = sorted(path.parent for path in directory.glob(f"scores/*/{RUN}"))
    if len(found) > 1:
        raise ValueError(f"{directory} holds several runs. Expected one of {[str(path) for path in found]}.")
    if found or _is_being_saved(directory):
        return found[0] if found else directory
    advice = "Run `hf-trak attribute`, or save one with `AttributionRun.save`."
    if beside := sorted(path.parent.name for path in directory.parent.glob(f"*/{RUN}")):
        advice = f"Name one of {beside}, which are beside it."
    raise IncompleteStoreError(
        f"{directory} holds no run. Expected a directory with `{RUN}/{RECORD}`, or the `output_dir` of "
        f"`hf-trak attribute`. {advice}"
    )


def read_record(directory: Path) -> RunRecord:
    """Read `run.json` of a run.

    Args:
        directory: the directory that contains `run/`.

    Raises:
        IncompleteStoreError: the file does not exist.
        StoreError: the file is damaged, or of another version.
    """
    path = directory / RUN / RECORD
    try:
        with _readable(path):
            for _ in range(_ATTEMPTS):
                if path.exists() or not _is_being_saved(directory):
                    break
                time.sleep(_PAUSE)  # a system that cannot exchange directories has neither run for an instant
            if (size := path.stat().st_size) > _MOST_BYTES:
                raise StoreError(f"{path} has {size:,} bytes. Expected at most {_MOST_BYTES:,}. {_REMEDY}")
            content = read_sealed(path, _REMEDY)
    except IncompleteStoreError as error:
        if _is_being_saved(directory):
            raise IncompleteStoreError(
                f"{path} is missing, and {directory} has temporary files: saving the run was interrupted, or is still "
                "in progress elsewhere. Expected a complete run. Attribute again."
            ) from error
        raise
    save, facts, files = (content.get(name) for name in ("save", "facts", "files"))
    if not (isinstance(save, str) and isinstance(facts, dict) and isinstance(files, dict) and _are_measured(files)):
        raise StoreError(f"{path} does not say which files the run has, or has no facts. Expected both. {_REMEDY}")
    return RunRecord(save, facts, {name: (size, digest) for name, (size, digest) in files.items()})


def read_run(directory: Path, with_train: bool, use: Callable[[SavedParts], T]) -> T:
    """Read the parts of a single save, even if other processes replace the run at the same time.

    Args:
        directory: the directory that contains `run/`.
        with_train: read the training rows that the run keeps.
        use: called with the parts. If the run has been replaced meanwhile, it is called again with the new ones.

    Returns:
        The value of `use`.

    Raises:
        IncompleteStoreError: the run is not complete, or a file is missing.
        StoreError: a file is damaged, or the run was replaced again and again.
        ValueError: raised by `use`.
    """
    record = read_record(directory)
    for _ in range(_ATTEMPTS):
        problem = None
        try:
            for name, expected in record.files.items():
                if with_train or not name.startswith("train/"):
                    _check_file(directory / RUN / name, expected)
            result = use(_parts(directory / RUN, record, with_train))
        except (StoreError, ValueError) as error:
            problem = error
        before, record = record, read_record(directory)
        if record == before:
            if problem is not None:
                raise problem
            return result
    raise StoreError(
        f"{directory / RUN} was replaced {_ATTEMPTS} times while it was being read. Expected a run that stays "
        "unchanged for a moment. Wait until the processes that save to it have ended."
    )


def write_run(parts: SavedParts) -> None:
    """Save the parts of a run in `parts.root`, and put them in the place of the run that is there, if there is one.

    Args:
        parts: the parts. Their facts are plain JSON.

    Raises:
        StoreError: a file cannot be written, or a row refers to a file that cannot be read.
    """
    save = secrets.token_hex(8)
    with atomic_directory(parts.root) as written:
        for name, dataset in (("scored", parts.scored), ("train", parts.train)):
            if dataset is not None:
                _write_dataset(dataset, written / name, save)
        (written / STATISTICS).write_bytes(safetensors.numpy.save(parts.tensors))
        paths = sorted(path for path in written.rglob("*") if path.is_file())
        files = {path.relative_to(written).as_posix(): _measured(path) for path in paths}
        (written / RECORD).write_bytes(RunRecord(save, parts.facts, files).content())
    remove_stale(parts.root.parent)


def verify_run(directory: str | Path) -> Iterator[Finding]:
    """Check every file of a run.

    Args:
        directory (`str` or `Path`):
            `run/`, or the directory that contains it.

    Yields:
        `Finding`: one per file; `leftover` for files that `run.json` does not name, and one `damaged` for `run/` if
        all files are as they were written but do not make a run.
    """
    directory = Path(directory)
    root = directory if directory.name == RUN and not (directory / RUN).is_dir() else directory / RUN
    try:
        record = read_record(root.parent)
    except StoreError as error:
        yield _fault(root / RECORD, error)
        return
    yield Finding(root / RECORD, "intact")
    whole = True
    for name, expected in record.files.items():
        try:
            _check_file(root / name, expected)
        except StoreError as error:
            whole = False
            yield _fault(root / name, error)
        else:
            yield Finding(root / name, "intact")
    from hf_trak.scores.score_files import SCORE_FILES, check_score_file  # slow to import

    all_scores = record.facts.get(SCORE_FILES)
    for name, digest in all_scores.items() if isinstance(all_scores, dict) else ():
        try:
            check_score_file(root.parent, name, digest)
        except (StoreError, ValueError) as error:  # or no name of a file
            yield _fault(root.parent / name, error)
        else:
            yield Finding(root.parent / name, "intact")
    known = {RECORD, *record.files}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if path.relative_to(root).as_posix() not in known:
            yield Finding(path, "leftover", f"{RECORD} does not name it", "Delete it.")
    if whole:
        try:
            check_parts(_parts(root, record, True))
        except StoreError as error:
            yield _fault(root, error)


def _fault(path: Path, error: StoreError | ValueError) -> Finding:
    again = "Attribute again: `hf-trak attribute` with the same name and settings replaces the run."
    return Finding(path, "missing" if isinstance(error, IncompleteStoreError) else "damaged", str(error), again)


def _is_being_saved(directory: Path) -> bool:
    """Tell whether a directory has temporary files of a save that goes on, or was killed."""
    return any(TEMPORARY.fullmatch(path.name) for path in directory.glob(".hf_trak-tmp-*"))


def _are_measured(files: Mapping[str, object]) -> bool:
    return all(
        _FILE.fullmatch(name) and isinstance(entry, list) and [type(value) for value in entry] == [int, str]
        for name, entry in files.items()
    )


def _measured(path: Path) -> tuple[int, str]:
    """Measure the size in bytes and the xxh3-128 digest of a file."""
    return path.stat().st_size, file_digest(path)


def _check_file(path: Path, expected: tuple[int, str]) -> None:
    """Compare a file with its size and digest in `run.json`.

    Raises:
        IncompleteStoreError: the file is missing.
        StoreError: its size or digest differs, or it cannot be read.
    """
    with _readable(path):
        size, digest = _measured(path)
    if size != expected[0]:
        what = f"it has {size:,} bytes instead of {expected[0]:,}"
    elif digest != expected[1]:
        what = f"its checksum is {digest} instead of {expected[1]}"
    else:
        return
    raise StoreError(f"{path} is damaged: {what}. Expected the file that {RECORD} describes. {_REMEDY}")


@contextlib.contextmanager
def _readable(path: Path, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn errors of reading a file into a `StoreError` that names it."""
    try:
        yield
    except StoreError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = error.filename or path
        raise IncompleteStoreError(f"{missing} is missing. Expected a file that the run needs. {_REMEDY}") from error
    except errors as error:
        raise StoreError(
            f"{path} cannot be read: {type(error).__name__}: {str(error)[:300]}. Expected a file written by "
            f"`AttributionRun.save`, to which this process has access. {_REMEDY}"
        ) from error


def _parts(root: Path, record: RunRecord, with_train: bool) -> SavedParts:
    """Read the files that a record names, which were compared with their digests."""
    train = None
    if with_train and any(name.startswith("train/") for name in record.files):
        train = _dataset(root / "train", record)
    with _readable(root / STATISTICS, _DAMAGED):
        tensors = load_file(root / STATISTICS)
    return SavedParts(_dataset(root / "scored", record), train, tensors, record.facts, root)


def _dataset(path: Path, record: RunRecord) -> Dataset:
    """Load a dataset. The record has to name all of its files."""
    with _readable(path, _DAMAGED):
        names = [file["filename"] for file in json.loads((path / "state.json").read_bytes())["_data_files"]]
        if foreign := [name for name in names if f"{path.name}/{name}" not in record.files]:
            raise StoreError(
                f"{path / 'state.json'} names the files {str(foreign)[:200]}, which {RECORD} does not list. Expected "
                "only files of the run. Attribute again."
            )
        return Dataset.load_from_disk(path)


def _write_dataset(dataset: Dataset, path: Path, save: str) -> None:
    """Save a dataset, with the digits of the save in the names of its Arrow files.

    Raises:
        StoreError: a row refers to a file that cannot be read.
    """
    try:
        with no_progress_bars():
            dataset.save_to_disk(path)
    except OSError as error:
        if not isinstance(error.filename, str) or Path(error.filename).is_relative_to(path):
            raise
        raise StoreError(
            f"{error.filename} cannot be read: {error}. Expected the file that a row of the run refers to. Restore "
            "it, or leave its column out."
        ) from error
    state = json.loads((path / "state.json").read_bytes())
    for file in state["_data_files"]:
        (path / file["filename"]).rename(path / f"{save}-{file['filename']}")
        file["filename"] = f"{save}-{file['filename']}"
    (path / "state.json").write_bytes(json_bytes(state))


_DISTRIBUTIONS = tuple(ScoreDistributions.__dataclass_fields__)

_INTEGERS = (TRAIN_ROWS, "counts", "first")


@dataclass(frozen=True)
class Ends:
    """The flattened top-k lists of some targets, from one end.

    Attributes:
        targets: `(entries,)`, the target of every entry.
        rows: `(entries,)`, training rows.
        scores: `(entries,)`, their scores.
        name: name of the column with the rows.
    """

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
    for batch, table in enumerate(tables):
        for rows_name, scores_name in (TOP_K_COLUMNS[:2], TOP_K_COLUMNS[2:]):
            lengths, rows = _flat(table, rows_name, pa.types.is_integer)
            others, scores = _flat(table, scores_name, pa.types.is_floating)
            if not np.array_equal(lengths, others):
                raise ValueError(f"the lists of `{rows_name}` and `{scores_name}` have different lengths")
            targets = batch * batch_size + np.repeat(np.arange(len(lengths)), lengths)
            yield Ends(targets, rows, scores, rows_name)


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


def scores_problem(scored: Dataset, n_train: int, held: np.ndarray | None) -> str | None:
    """Describe what is wrong with the scores.

    Args:
        scored: the targets with their scores.
        n_train: number of training rows.
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


def _problem(ends: Ends, n_train: int, held: np.ndarray | None) -> str | None:
    """Describe the first score that is not finite, or row that does not exist, in some top-k lists."""

    def first(bad: np.ndarray, what: str, values: np.ndarray) -> str | None:
        if not bad.any():
            return None
        place = int(np.argmax(bad))
        return f"target {ends.targets[place]}: {what.format(values[place])}"

    names_row = f"`{ends.name}` names the training row {{}}"
    problem = first(~np.isfinite(ends.scores), "the score {} is not finite", ends.scores)
    problem = problem or first(ends.rows < 0, f"{names_row}, expected 0 or more", ends.rows)
    problem = problem or first(ends.rows >= n_train, f"{names_row}; there are {n_train}", ends.rows)
    if held is not None:
        place = np.minimum(np.searchsorted(held, ends.rows), max(len(held) - 1, 0))
        absent = held[place] != ends.rows if len(held) else np.ones(len(ends.rows), dtype=bool)
        problem = problem or first(absent, f"{names_row}, which is not among those that the run keeps", ends.rows)
    return problem


def _statistics_problem(tensors: Mapping[str, np.ndarray], targets: int) -> str | None:
    """Describe what is wrong with the tensors of `statistics.safetensors`, for so many targets."""
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


def parts_problem(parts: SavedParts) -> tuple[str, str] | None:
    """Find a part of a run, other than the scores, that does not fit the rest.

    Returns:
        The name of the part, and the problem as the end of a sentence; `None` if there is none.
    """
    tensors, train = parts.tensors, parts.train
    if problem := _statistics_problem(tensors, len(parts.scored)):
        return STATISTICS, problem
    n_train, rows = parts.facts.get(TRAIN_ROWS), tensors.get(TRAIN_ROWS)
    if type(n_train) is not int or n_train < 1:
        return RECORD, f"the number of training rows is {n_train!r}"
    sizes = {"the fact `train_rows`": n_train}
    if SELF_INFLUENCE in tensors:
        sizes[f"`{SELF_INFLUENCE}`"] = len(tensors[SELF_INFLUENCE])
    if len(tensors.get("counts", ())):
        sizes["`counts`"] = int(tensors["counts"][0].sum())
    if train is not None and rows is None:
        sizes["the training dataset"] = len(train)
    if len(set(sizes.values())) > 1:
        return RECORD, f"its parts disagree about the number of training rows: {sizes}"
    if rows is not None and len(rows) != len(train or ()):
        return STATISTICS, f"`{TRAIN_ROWS}` names {len(rows)} training rows; the run has {len(train or ())}"
    if rows is not None and len(rows) and rows[-1] >= n_train:
        return STATISTICS, f"`{TRAIN_ROWS}` names the training row {rows[-1]}; there are {n_train}"
    return None


def check_parts(parts: SavedParts) -> None:
    """Check that the parts that were read make a run.

    Raises:
        StoreError: a part does not fit the others.
    """
    found = parts_problem(parts)
    if found is None:
        problem = scores_problem(parts.scored, parts.facts[TRAIN_ROWS], parts.tensors.get(TRAIN_ROWS))
        found = None if problem is None else ("scored", problem)
    if found is not None:
        raise StoreError(
            f"{parts.root / found[0]} does not fit the rest of the run: {found[1]}. Expected the parts of one "
            "attribution. Restore the run from a copy, or attribute again."
        )
