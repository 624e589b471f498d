"""Scores as columns of a `datasets.Dataset`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets

from hf_trak.runtime.progress import no_progress_bars

if TYPE_CHECKING:  # slow to import, and not needed for scores that are read
    from torch import Tensor

ScoreBlock = tuple[int, int, "Tensor"]

"""`(start, stop, block)`: `block`, of shape `(stop - start, m)`, holds the scores of training rows `start … stop - 1`
for m targets."""


def weighted_blocks(parts: Sequence[Iterator[ScoreBlock]], weights: Sequence[float]) -> Iterator[ScoreBlock]:
    """Add up scores of the same rows, each part times its weight, whose blocks may be cut differently.

    Args:
        parts: blocks of the same rows in the same order.
        weights: one number for each part.

    Returns:
        An iterator of blocks, cut wherever a part is.
    """
    blocks = [next(part, None) for part in parts]
    while (first := blocks[0]) is not None:
        start, stop = first[0], min(block[1] for block in blocks if block is not None)
        total = first[2].new_zeros(first[2][: stop - start].shape)
        for i, (block, weight) in enumerate(zip(blocks, weights, strict=True)):
            assert block is not None and block[0] == start
            total += weight * block[2][: stop - start].to(total)
            rest = block[2][stop - start :]
            blocks[i] = (stop, block[1], rest) if len(rest) else next(parts[i], None)
        yield start, stop, total


TOKEN_POSITIONS = "trak_token_positions"
TOKEN_SCORES = "trak_token_scores"
HARMFUL_TOKEN_SCORES = "trak_harmful_token_scores"
TOKEN_SCORE_COLUMNS = (TOKEN_POSITIONS, TOKEN_SCORES, HARMFUL_TOKEN_SCORES)

TOP_K_COLUMNS = ("trak_indices", "trak_scores", "trak_harmful_indices", "trak_harmful_scores")

"""Columns of a top-k result. A result with all scores has `trak_scores` alone."""


RANK_COLUMNS = ("trak_index_ranks", "trak_harmful_index_ranks")

"""For every row of `trak_indices` and `trak_harmful_indices` its rank in the index: 1 for the row with the highest
score, and with the lowest. Null where the index has it behind the shortlist of the target."""


STAGE_COLUMN = "trak_stage"

"""The stage that the scores of a target come from: `"exact"`, `"refined"`, or `"index"` if nothing was reranked."""


RERANK_COLUMNS = (*RANK_COLUMNS, STAGE_COLUMN)


WORDS_COLUMN = "trak_words"

"""For every target of a language model the rows that its words find, see `report.words`."""


def fixed_size_list(values: np.ndarray) -> pa.FixedSizeListArray:
    """Convert an array `(rows, n)` to one Arrow fixed-size list per row, without a copy if it is contiguous."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def attach_columns(rows: Any, columns: Dataset) -> Dataset:
    """Add score columns to the rows that they belong to. They replace score columns of an earlier call.

    Args:
        rows (`Dataset`):
            A dataset with as many rows as `columns`.
        columns (`datasets.Dataset`):
            The score columns.

    Returns:
        `datasets.Dataset`: the columns of `rows` as stored, without a transform set on them, followed by the score
        columns; `columns` alone if `rows` is no `datasets.Dataset`.
    """
    if not isinstance(rows, Dataset):
        return columns
    of_scores = {*TOP_K_COLUMNS, *RERANK_COLUMNS, *TOKEN_SCORE_COLUMNS, WORDS_COLUMN, *columns.column_names}
    kept = rows.with_format(None).remove_columns([name for name in rows.column_names if name in of_scores])
    with no_progress_bars():
        return concatenate_datasets([kept, columns], axis=1)


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
        """Return all rows that are listed for any target, ascending."""
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
