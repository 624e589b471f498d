"""Scores as columns of a `datasets.Dataset`."""

from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from torch import Tensor

ScoreBlock = tuple[int, int, Tensor]
"""`(start, stop, block)`: `block`, of shape `(stop - start, m)`, holds the scores of training rows `start … stop - 1`
for m targets."""

TOP_K_COLUMNS = ("trak_indices", "trak_scores", "trak_opponent_indices", "trak_opponent_scores")
"""Columns of a top-k result. A result with all scores has `trak_scores` alone."""

RANK_COLUMNS = ("trak_index_ranks", "trak_opponent_index_ranks")
"""For every row of `trak_indices` and `trak_opponent_indices` its rank in the index: 1 for the row with the highest
score, and with the lowest. Null where the index has it behind the shortlist of the target."""

STAGE_COLUMN = "trak_stage"
"""The stage that the scores of a target come from: `"exact"`, `"refined"`, or `"index"` if nothing was reranked."""

RERANK_COLUMNS = (*RANK_COLUMNS, STAGE_COLUMN)


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
    stale = [name for name in (*TOP_K_COLUMNS, *RERANK_COLUMNS) if name in rows.column_names]
    kept = rows.with_format(None).remove_columns(stale)
    return concatenate_datasets([kept, columns], axis=1)
