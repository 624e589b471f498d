"""How many tokens or samples of sound the rows of a dataset have, without loading the rows."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

_SEQUENCES = ("input_ids", "input_values", "prompt_ids", "completion_ids", "chosen_ids", "rejected_ids")
"""Columns of which collators of transformers and TRL pad the rows of a batch to one length."""


def row_lengths(dataset: Any, rows: range) -> Sequence[int] | None:
    """Count the elements of some rows' sequences, the sum over their columns.

    Args:
        dataset: the dataset.
        rows: consecutive row numbers.

    Returns:
        One number per row, or `None` where the lengths are not stored: in datasets that are not Arrow tables, in those
        with a transform, and in those without tokens.
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return None
    names = [name for name in _SEQUENCES if name in dataset.column_names]
    if not names:
        return None
    table: pa.Table = dataset.select_columns(names).with_format("arrow")[rows.start : rows.stop]
    total = pa.array([0] * len(rows), pa.int64())
    for name in names:
        column = table.column(name)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            return None
        total = pc.add(total, pc.fill_null(pc.list_value_length(column), 0))
    return [int(length) for length in total.to_pylist()]
