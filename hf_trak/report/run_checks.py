"""Consistency checks between the parts of a run: scores, the rows that they name, and statistics of all rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from hf_trak.errors import StoreError
from hf_trak.report.distributions import BINS, ScoreDistributions
from hf_trak.report.run_reading import SavedParts
from hf_trak.report.run_record import STATISTICS
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS

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
