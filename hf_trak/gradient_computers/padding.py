"""The search for a row that the collator pads, so that it can be compared with the same row collated alone.

Only a padded row shows whether the features of a row depend on its padding. The first batch may have none, and
collating every row of every batch a second time would cost as much as loading the data. So rows are collated alone
only where padding is likely, and only until a padded one is found: up to four rows of the first batch; later the first
and the last row of a batch of another shape, and up to two rows of any batch that end or begin with one value
repeated, as padding does. After eight batches in vain (fixed lengths, or padding that a row alone has as well), only
the 16th, the 32nd and so on is looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.modelout_functions.base import Batch

CollatedAlone = Callable[[int], Batch]
"""`collated_alone(i)` returns the batch that the collator makes of row i of the current batch alone, on its device."""

MASKS = ("attention_mask", "pixel_mask", "padding_mask")
"""Endings of the names of masks that are 0 on padding."""

_LOOKS = 8


@dataclass(frozen=True)
class RowAlone:
    """A row that differs when it is collated alone.

    Attributes:
        row: its position in the batch.
        batch: the batch that the collator makes of the row alone.
        padded: whether it has another shape in the batch.
        changed: keys whose values differ by more than padding: a collator that draws at random, or that normalizes
            over the batch.
    """

    row: int
    batch: Batch
    padded: bool
    changed: tuple[Any, ...]

    @classmethod
    def of(cls, split: SplitBatch, row: int, alone: Batch) -> "RowAlone | None":
        """Compare a row of a batch with the same row alone.

        Args:
            split: the batch.
            row: position of the row in it.
            alone: the batch that the collator makes of the row alone.

        Returns:
            `RowAlone` or `None`: `None` if nothing differs, or if `alone` holds another number of samples than one.
        """
        single = SplitBatch.of(alone)
        if single.size != 1:
            return None
        padded, changed = False, []
        for key, tensor in split.mapped.items():
            if key in single.mapped:
                within, by_itself = tensor[row], single.mapped[key][0].to(tensor.device)
                padded = padded or within.shape != by_itself.shape
                if not _contains(within, by_itself):
                    changed.append(key)
        return cls(row, alone, padded, tuple(changed)) if padded or changed else None


class PaddingSearch:
    """The search for a padded row among the batches of one kind.

    Attributes:
        finished: whether one was found and compared with itself alone. The caller that compares sets it.
    """

    def __init__(self) -> None:
        self.finished = False
        self._batches = 0
        self._vain = 0
        self._shapes: set[tuple[torch.Size, ...]] = set()

    def look(self, split: SplitBatch, collated_alone: CollatedAlone) -> RowAlone | None:
        """Look for a padded row in a batch.

        Args:
            split: the batch. In one of a single sample nothing is padded because of others.
            collated_alone: see [`CollatedAlone`].

        Returns:
            `RowAlone` or `None`: the first padded row that was found, or else one whose values change when it is
            collated alone; `None` if there was neither.

        Raises:
            Exception: what the data collator raises for a single row, with a note.
        """
        self._batches += 1
        if split.size == 1 or (self._vain >= _LOOKS and self._batches & (self._batches - 1)):
            return None
        other = None
        rows = self._candidates(split)
        for row in rows:
            try:
                alone = collated_alone(row)
            except Exception as error:
                error.add_note(
                    f"This happened when row {row} of a batch was collated alone, to see whether its padding matters. "
                    "A data collator has to take any number of rows."
                )
                raise
            found = RowAlone.of(split, row, alone)
            if found is not None and found.padded:
                return found
            other = other or found
        self._vain += bool(rows)
        return other

    def _candidates(self, split: SplitBatch) -> list[int]:
        """Choose the rows to collate alone."""
        shapes = tuple(tensor.shape[1:] for tensor in split.mapped.values())
        unknown = shapes not in self._shapes
        self._shapes.add(shapes)
        rows = likely_padded(split)[:2]
        ends = [0, split.size - 1] if unknown else []
        return list(dict.fromkeys([*rows, *ends]))


_FIRST = 2**20


def likely_padded(split: SplitBatch) -> list[int]:
    """List the rows with zeros in a mask, most zeros first, then rows that end or begin with one value repeated.

    The attention mask comes before others, whose tensors the model may not take.
    """
    masked, repeated = [0] * split.size, [0] * split.size
    for key, tensor in split.mapped.items():
        if str(key).endswith(MASKS) and tensor.ndim > 1:
            zeros = (tensor == 0).flatten(1).sum(1)
            masked = _summed(masked, zeros * _FIRST if key == "attention_mask" else zeros)
        elif tensor.ndim in (2, 3) and tensor.shape[1] > 1:
            repeated = _summed(repeated, torch.maximum(_run(tensor), _run(tensor.flip(1))))
    likely = [row for row in range(split.size) if masked[row] or repeated[row]]
    return sorted(likely, key=lambda row: (-masked[row], -repeated[row]))


def _summed(counts: list[int], more: Tensor) -> list[int]:
    return [count + extra for count, extra in zip(counts, more.tolist(), strict=True)]


def _run(tensor: Tensor) -> Tensor:
    """Count the positions at the end of dimension 1 that repeat the one before them, `(B,)`; 0 where all do."""
    same = (tensor[:, :-1] == tensor[:, 1:]).flatten(2).all(2) if tensor.ndim > 2 else tensor[:, :-1] == tensor[:, 1:]
    length = same.flip(1).int().cumprod(1).sum(1)
    return length.masked_fill(length == same.shape[1], 0)


def _contains(within: Tensor, alone: Tensor) -> bool:
    """Tell whether a row is the row alone, possibly with something before or behind it in one dimension."""
    if within.shape == alone.shape:
        return _equal(within, alone)
    dims = [d for d in range(within.ndim) if alone.ndim == within.ndim and within.shape[d] != alone.shape[d]]
    if len(dims) != 1:  # padded in several directions: not looked into
        return True
    dim, length = dims[0], min(alone.shape[dims[0]], within.shape[dims[0]])
    behind, before = within.narrow(dim, 0, length), within.narrow(dim, within.shape[dim] - length, length)
    alone_begin, alone_end = alone.narrow(dim, 0, length), alone.narrow(dim, alone.shape[dim] - length, length)
    return _equal(behind, alone_begin) or _equal(before, alone_end)


def _equal(left: Tensor, right: Tensor) -> bool:
    """Compare values; a NaN equals a NaN."""
    return bool(((left == right) | ((left != left) & (right != right))).all())
