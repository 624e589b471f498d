"""Scores as columns of a `datasets.Dataset`."""

from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from torch import Tensor

ScoreBlock = tuple[int, int, Tensor]
"""`(start, stop, block)`: `block` of shape `(stop - start, m)` scores these training rows against m targets."""

TOP_K_COLUMNS = ("trak_indices", "trak_scores", "trak_opponent_indices", "trak_opponent_scores")
"""Columns of a top-k result. A full result has `trak_scores` alone."""


def fixed_size_list(values: np.ndarray) -> pa.FixedSizeListArray:
    """A 2-D array `(rows, n)` as one Arrow fixed-size list per row, without a copy if it is contiguous."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def attach_columns(rows: Any, columns: Dataset) -> Dataset:
    """Put score columns beside the rows they belong to; earlier score columns of the same name are replaced.

    Args:
        rows: a dataset of as many rows. Its columns are kept as stored if it is a `datasets.Dataset`, and left out
            otherwise.
        columns: the score columns.
    """
    if not isinstance(rows, Dataset):
        return columns
    stale = [name for name in TOP_K_COLUMNS if name in rows.column_names]
    kept = rows.with_format(None).remove_columns(stale)
    return concatenate_datasets([kept, columns], axis=1)
