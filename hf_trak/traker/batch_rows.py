"""The rows that a batch belongs to, from the arguments `inds` and `num_samples` of `featurize` and `score`."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hf_trak.gradient_computers import batch_size_of
from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.modelout_functions import Batch
from hf_trak.runtime.checks import checked_int, is_int


def materialize(batch: Any) -> Batch:
    """Return a batch as a mapping or a tuple.

    Raises:
        TypeError: the batch is a single tensor, or neither a mapping nor iterable.
    """
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, Tensor) or not isinstance(batch, Iterable):
        raise TypeError(
            f"The batch is a {type(batch).__name__}. Expected a sequence of tensors such as (images, labels), or a "
            "mapping of names to tensors."
        )
    return tuple(batch)


def selected(batch: Batch, chosen: np.ndarray) -> Batch:
    """Return a batch of some samples of a batch.

    Args:
        batch: the batch; tensors without a batch dimension are kept as they are.
        chosen: positions of the samples, ascending.
    """
    if len(chosen) == batch_size_of(batch):
        return batch
    split = SplitBatch.of(batch)
    return split.rebuild({key: tensor[chosen.tolist()] for key, tensor in split.mapped.items()})


def rows_of(
    batch: Batch, inds: Iterable[int] | None, num_samples: int | None, size: int, what: str, next_row: int
) -> list[int]:
    """Determine and check the row numbers of a batch.

    Args:
        batch: the batch as the model gets it.
        inds: row numbers, one per sample.
        num_samples: number of samples, given instead of `inds`; their rows follow those of the previous call.
        size: number of all rows.
        what: the argument that `size` came from, for error messages.
        next_row: the row after those of the previous call.

    Returns:
        `list[int]`: one row number per sample.

    Raises:
        ValueError: not exactly one of `inds` and `num_samples` is given, their number differs from that of the
            samples, or a row is out of range or named twice.
        TypeError: a row number is not an integer.
    """
    if (inds is None) == (num_samples is None):
        raise ValueError(
            f"`inds` is {inds!r} and `num_samples` is {num_samples!r}. Expected exactly one of the two: row "
            "numbers, or the number of samples to write after those of the previous call."
        )
    if inds is not None:
        rows = [_as_row(i) for i in (inds.tolist() if isinstance(inds, Tensor) else inds)]
        source = f"`inds` has {len(rows)} row numbers"
    else:
        count = checked_int(num_samples, "num_samples", 1, type_error=ValueError)
        rows = list(range(next_row, next_row + count))
        source = f"`num_samples` is {count}"
    found = batch_size_of(batch)
    if found != len(rows):
        raise ValueError(
            f"{source}, but the batch has {found} samples. Expected the same number. Pass one row number per sample."
        )
    outside = [row for row in rows if not 0 <= row < size]
    if outside:
        after = f" (the previous calls wrote {next_row} rows)" if num_samples is not None else ""
        raise ValueError(
            f"The batch is to be written to rows {outside[:5]}{after}. Expected rows 0 … {size - 1}, since "
            f"`{what}` is {size}. Correct the row numbers, or use another save_dir for another `{what}`."
        )
    if len(set(rows)) < len(rows):
        twice = sorted({row for row in rows if rows.count(row) > 1})
        raise ValueError(f"`inds` names the rows {twice[:5]} more than once. Expected different row numbers.")
    return rows


def _as_row(value: Any) -> int:
    if not is_int(value):
        raise TypeError(f"`inds` contains {value!r} of type {type(value).__name__}. Expected integers: row numbers.")
    return operator.index(value)
