"""Finding a row that the collator pads, so that it can be compared with the same row collated alone.

Whether a model's features of a row depend on its padding shows only in a row that is padded. The first batch may have
none, and collating every row of every batch a second time would cost as much as loading the data. So rows are collated
alone only where padding is likely, and only until one was found to be padded: up to four rows of the first batch;
later the first and the last row of a batch of another shape, and up to two rows of any batch that end or begin with
one value repeated, as padding does. After eight batches in vain (fixed lengths, or padding that a row alone has, too)
only the 16th, the 32nd and so on is looked at.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.modelout_functions.base import Batch

CollatedAlone = Callable[[int], Batch]
"""`collated_alone(i)`: the batch that the collator makes of row i of the current batch alone, on the same device."""

_LOOKS = 8


class PaddingSearch:
    """The search for a padded row among the batches of one kind.

    Attributes:
        finished: whether one was found and compared with itself alone. Set by whoever compares.
    """

    def __init__(self) -> None:
        self.finished = False
        self._batches = 0
        self._vain = 0
        self._shapes: set[tuple[torch.Size, ...]] = set()

    def look(self, split: SplitBatch, collated_alone: CollatedAlone) -> dict[int, Batch]:
        """Look for a padded row in a batch.

        Args:
            split: the batch. In one of a single sample nothing is padded because of others.
            collated_alone: see [`CollatedAlone`].

        Returns:
            The first padded row that was found, and its batch alone; empty if none was.

        Raises:
            GradientEngineError: the collator makes other values of a row that is alone, although it does not pad it.
        """
        self._batches += 1
        if split.size == 1:
            return {}
        if self._vain >= _LOOKS and self._batches & (self._batches - 1):
            return {}
        rows = self._candidates(split)
        for row in rows:
            alone = collated_alone(row)
            if is_padded(split, row, alone):
                return {row: alone}
        self._vain += bool(rows)
        return {}

    def _candidates(self, split: SplitBatch) -> list[int]:
        shapes = tuple(tensor.shape[1:] for tensor in split.mapped.values())
        unknown = shapes not in self._shapes
        self._shapes.add(shapes)
        rows = likely_padded(split)[:2]
        ends = [0, split.size - 1] if unknown else []
        return list(dict.fromkeys([*rows, *ends]))


def likely_padded(split: SplitBatch) -> list[int]:
    """Rows that end or begin with one value repeated, those with the longest repetition first."""
    repeated = None
    for tensor in split.mapped.values():
        if tensor.ndim in (2, 3) and tensor.shape[1] > 1:
            length = torch.maximum(_run(tensor), _run(tensor.flip(1)))
            repeated = length if repeated is None else torch.maximum(repeated, length.to(repeated.device))
    if repeated is None:
        return []
    lengths = repeated.tolist()
    return sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])


def _run(tensor: Tensor) -> Tensor:
    """How many positions at the end of dimension 1 repeat the one behind them, `(B,)`; 0 where all do, as in a mask
    without padding."""
    same = (tensor[:, :-1] == tensor[:, 1:]).flatten(2).all(2) if tensor.ndim > 2 else tensor[:, :-1] == tensor[:, 1:]
    length = same.flip(1).int().cumprod(1).sum(1)
    return length.masked_fill(length == same.shape[1], 0)


def is_padded(split: SplitBatch, row: int, alone: Batch) -> bool:
    """Whether a row has another shape in its batch than alone.

    Raises:
        GradientEngineError: it has the same shape, but other values.
    """
    single = SplitBatch.of(alone)
    if single.size != 1:  # the collator makes several samples of a row, or one of several: no row to compare with
        return False
    common = [key for key in split.mapped if isinstance(single.mapped.get(key), Tensor)]
    if any(split.mapped[key].shape[1:] != single.mapped[key].shape[1:] for key in common):
        return True
    for key in common:
        within, by_itself = split.mapped[key][row], single.mapped[key][0].to(split.mapped[key].device)
        if not bool(((within == by_itself) | ((within != within) & (by_itself != by_itself))).all()):
            raise GradientEngineError(
                f"The data collator makes other values of `{key}` when row {row} of the batch is alone than within "
                "the batch, although it does not pad it. Expected the same sample every time. Use a collator and a "
                "dataset that draw nothing at random and do not mix rows (of a random transform, keep one result as "
                "a column of the dataset)."
            )
    return False
