"""The columns of a reranked result: beside rows and scores their ranks in the index, and the stage of the scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from hf_trak.scores.scored_dataset import (
    RANK_COLUMNS,
    RERANK_COLUMNS,
    STAGE_COLUMN,
    TOP_K_COLUMNS,
    fixed_size_list,
)


@dataclass(frozen=True)
class IndexRanking:
    """The rows that an index ranks first for each of m targets, from both ends.

    Attributes:
        highest: row numbers `(m, count)`, int64, those with the highest scores, best first.
        lowest: row numbers `(m, count)`, those with the lowest scores, lowest first.
    """

    highest: np.ndarray
    lowest: np.ndarray

    @classmethod
    def of(cls, columns: Dataset) -> "IndexRanking":
        """Take the rows of a top-k result."""
        listed = columns.with_format("numpy")
        return cls(*(np.stack(listed[name][:]).astype(np.int64) for name in (TOP_K_COLUMNS[0], TOP_K_COLUMNS[2])))

    @property
    def rows(self) -> tuple[int, ...]:
        """All rows that are listed for any target, ascending."""
        return tuple(np.unique(np.concatenate([self.highest.reshape(-1), self.lowest.reshape(-1)])).tolist())


def reranked_columns(found: Dataset, rows: np.ndarray, index: IndexRanking, stage: str) -> Dataset:
    """Put together the columns of a reranked result.

    Args:
        found: the columns of a top-k result, in which rows are counted among those that were scored.
        rows: the numbers of these rows in the training dataset, ascending.
        index: the ranking of the index, for the same targets.
        stage: what the scores come from.

    Returns:
        The columns of a top-k result, and [`RERANK_COLUMNS`].
    """
    listed = found.with_format("numpy")
    columns = {name: np.stack(listed[name][:]) for name in TOP_K_COLUMNS}
    table = {name: fixed_size_list(values) for name, values in columns.items()}
    sides = zip((TOP_K_COLUMNS[0], TOP_K_COLUMNS[2]), RANK_COLUMNS, (index.highest, index.lowest), strict=True)
    for name, rank_name, ranking in sides:
        numbers = rows[columns[name]]
        table[name] = fixed_size_list(numbers)
        table[rank_name] = _ranks(numbers, ranking)
    return Dataset(pa.table({**table, STAGE_COLUMN: pa.array([stage] * len(found))}))


def index_columns(columns: Dataset, top_k: int) -> Dataset:
    """Put together the same columns from the index alone.

    Args:
        columns: the columns of a top-k result of the index.
        top_k: rows to keep for each target, from either end.
    """
    listed = columns.with_format("numpy")
    kept = {name: np.ascontiguousarray(np.stack(listed[name][:])[:, :top_k]) for name in TOP_K_COLUMNS}
    table = {name: fixed_size_list(values) for name, values in kept.items()}
    m, count = kept[TOP_K_COLUMNS[0]].shape
    ranks = np.tile(np.arange(1, count + 1, dtype=np.int64), (m, 1))
    table |= {name: fixed_size_list(ranks) for name in RANK_COLUMNS}
    return Dataset(pa.table({**table, STAGE_COLUMN: pa.array(["index"] * m)}))


def without_rerank_columns(rows: Any) -> Any:
    """Leave out the columns that an earlier call has added, if the rows are a `datasets.Dataset`."""
    if not isinstance(rows, Dataset):
        return rows
    return rows.remove_columns([name for name in RERANK_COLUMNS if name in rows.column_names])


def _ranks(numbers: np.ndarray, ranking: np.ndarray) -> pa.FixedSizeListArray:
    """Look rows `(m, k)` up in rankings `(m, count)`."""
    ranks = np.zeros(numbers.shape, dtype=np.int64)
    for one, wanted, listed in zip(ranks, numbers, ranking, strict=True):
        order = np.argsort(listed)
        places = np.searchsorted(listed, wanted, sorter=order).clip(max=len(listed) - 1)
        one[:] = np.where(listed[order[places]] == wanted, order[places] + 1, 0)
    flat = ranks.reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, mask=flat == 0), numbers.shape[1])
