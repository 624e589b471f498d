"""The routing of one batch's gradients to the blocks of a curvature."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hf_trak.curvature.blocks import CurvatureBlocks, KroneckerBlock
from hf_trak.curvature.observation import BatchObserver
from hf_trak.gradient_computers.hooked.workspace import every_factor

SLICE_BYTES = 2**25
"""Bytes of a dense slice of gradients that is formed at a time."""


RangeKind = Literal["weight", "bias", "diagonal"]


class BlockRanges:
    """Finds the blocks that positions in the gradient vector belong to."""

    def __init__(
        self, blocks: CurvatureBlocks, kronecker: Iterable[int], diagonal: Iterable[int] | None = None
    ) -> None:
        """
        Args:
            blocks: the blocks.
            kronecker: indices of the Kronecker blocks to look for.
            diagonal: indices of the diagonal blocks to look for; `None` for all.
        """
        ranges: list[tuple[int, int, int, RangeKind]] = []
        for index in kronecker:
            one = blocks.kronecker[index]
            ranges.append((one.start, one.start + (one.left - 1) * one.stride + one.right, index, "weight"))
            if one.bias is not None:
                ranges.append((one.bias, one.bias + one.bias_length, index, "bias"))
        for index in range(len(blocks.diagonal)) if diagonal is None else diagonal:
            lone = blocks.diagonal[index]
            ranges.append((lone.start, lone.start + lone.numel, index, "diagonal"))
        self._ranges = sorted(ranges)
        self._starts = [low for low, *_ in self._ranges]
        self._longest = max((stop - low for low, stop, *_ in self._ranges), default=0)

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int, RangeKind]]:
        """Yield `(start, stop, index of the block, kind)` of all ranges that have positions in `start … stop`."""
        # ranges may interleave where a matrix is cut in two directions: look back as far as the longest one reaches
        for place in range(bisect_right(self._starts, start - self._longest), len(self._ranges)):
            low, high, index, kind = self._ranges[place]
            if low >= stop:
                return
            if high > start:
                yield low, high, index, kind


def by_source(blocks: CurvatureBlocks, held: Collection[int] | None = None) -> dict[int, list[int]]:
    """List the Kronecker blocks (of those that are held) whose gradients come as factors, by the start of these."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, one in enumerate(blocks.kronecker):
        if one.source is not None and (held is None or index in held):
            found[one.source].append(index)
    return dict(found)


class BlockConsumer(Protocol):
    """A receiver of the gradients of a batch, block by block. Each block is complete when it comes.

    Attributes:
        takes_numbers: whether gradients of diagonal blocks are wanted, which are otherwise not formed.
    """

    takes_numbers: bool

    def factors(self, index: int, left: Tensor, right: Tensor) -> None:
        """Take the gradients of Kronecker block `index` as factors `(B, T, shape[0])` and `(B, T, shape[1])`."""

    def matrices(self, index: int, gradients: Tensor) -> None:
        """Take the gradients of Kronecker block `index` as matrices `(B, *shape)`."""

    def numbers(self, index: int, first: int, gradients: Tensor) -> None:
        """Take elements `first …` of diagonal block `index`, `(B, n)`."""


class BatchArrivals:
    """A sink of gradients that gives every block of a curvature to a consumer once it is complete.

    Factors of a layer that is used once go straight through. What adds up within a batch (a layer used several times,
    an embedding that is also the head, a matrix whose gradient comes in slices) is kept until
    [`~BatchArrivals.finish`].
    """

    takes_outer = staticmethod(every_factor)

    def __init__(
        self, blocks: CurvatureBlocks, consumer: BlockConsumer, kronecker: Collection[int] | None = None
    ) -> None:
        """
        Args:
            blocks: the blocks.
            consumer: what takes their gradients.
            kronecker: indices of the Kronecker blocks that count; `None` for all. Diagonal ones count if this
                is empty or `None`.
        """
        self._blocks = blocks
        self._consumer = consumer
        self._takes_numbers = consumer.takes_numbers and not kronecker
        counting = set(range(len(blocks.kronecker)) if kronecker is None else kronecker)
        self._by_source = by_source(blocks, counting)
        self._ranges = BlockRanges(
            blocks, [index for index in sorted(counting) if blocks.kronecker[index].source is None]
        )
        self._later: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._matrices: dict[int, Tensor] = {}
        self._numbers: dict[int, _Repeated] = defaultdict(_Repeated)

    def __call__(self, start: int, block: Tensor) -> None:
        """Take columns `start … start + n` of the gradients, `(B, n)`."""
        block = block.float()
        stop = start + block.shape[1]
        whole: set[int] = set()  # a matrix and its bias are two ranges of one block
        for low, high, index, kind in self._ranges.overlapping(start, stop):
            if kind != "diagonal":
                if index not in whole:
                    self._add_to_matrix(index, start, block)
                whole.add(index)
                continue
            if not self._takes_numbers:
                continue
            part = block[:, max(low - start, 0) : high - start]
            first = max(start, low) - low
            if self._blocks.diagonal[index].start in self._blocks.repeated:
                self._numbers[index].add_dense(first, part)
            else:
                self._consumer.numbers(index, first, part)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Take a block by its factors, `(B, T, I)` and `(B, T, J)`."""
        if start in self._by_source:
            if start in self._blocks.repeated:
                self._later[start].append((left, right))
            else:
                self._factors(start, left, right)
            return
        stop = start + left.shape[2] * right.shape[2]
        for low, high, index, kind in self._ranges.overlapping(start, stop):
            if kind != "diagonal" or low > start or high < stop:
                for first, part in slices(left, right):
                    self(start + first, part)
                return
            if not self._takes_numbers:
                continue
            if self._blocks.diagonal[index].start in self._blocks.repeated:
                self._numbers[index].factors.append((start - low, left, right))
            else:
                for first, part in slices(left, right):
                    self._consumer.numbers(index, start - low + first, part)

    def finish(self) -> None:
        """Hand on what was kept until the batch was complete."""
        for start, calls in self._later.items():
            self._factors(
                start, torch.cat([left for left, _ in calls], 1), torch.cat([right for _, right in calls], 1)
            )
        for index, matrices in self._matrices.items():
            self._consumer.matrices(index, matrices)
        for index, repeated in self._numbers.items():
            for first, gradients in repeated.summed(self._blocks.diagonal[index].numel):
                self._consumer.numbers(index, first, gradients)

    def _factors(self, start: int, left: Tensor, right: Tensor) -> None:
        for index in self._by_source[start]:
            self._consumer.factors(index, *self._blocks.kronecker[index].factors(left, right))

    def _add_to_matrix(self, index: int, start: int, block: Tensor) -> None:
        """Add columns of the gradients to the matrices of a block that comes dense."""
        one: KroneckerBlock = self._blocks.kronecker[index]
        if (matrices := self._matrices.get(index)) is None:
            self._matrices[index] = matrices = block.new_zeros(block.shape[0], *one.shape)
        add_weights(matrices, one, start, block)
        if one.bias is not None:
            add_part(one.bias_of(matrices), one.bias, start, block)


class _Repeated:
    """The gradients of one batch for a diagonal block that several calls add to.

    Attributes:
        factors (`list[tuple[int, torch.Tensor, torch.Tensor]]`): first element, and factors.
    """

    def __init__(self) -> None:
        self.factors: list[tuple[int, Tensor, Tensor]] = []
        self._dense: list[tuple[int, Tensor | None, Tensor]] = []

    def add_dense(self, first: int, part: Tensor) -> None:
        """Take elements `first …`, `(B, n)`, whose memory may be used again: a copy is kept, of an embedding's
        gradient one of the elements that differ from zero in some row."""
        touched = ((part.amax(0) != 0) | (part.amin(0) != 0)).nonzero()[:, 0]
        if 2 * len(touched) < part.shape[1]:
            self._dense.append((first, touched + first, part[:, touched]))
        else:
            self._dense.append((first, None, part.clone()))

    def summed(self, numel: int) -> Iterator[tuple[int, Tensor]]:
        """Add all up, in slices of bounded size: yield `(first element, (B, n))`."""
        size = self.factors[0][1].shape[0] if self.factors else self._dense[0][2].shape[0]
        device = self.factors[0][1].device if self.factors else self._dense[0][2].device
        width = self.factors[0][2].shape[2] if self.factors else 1
        step = max(1, SLICE_BYTES // (4 * size * width)) * width
        for low in range(0, numel, step):
            high = min(low + step, numel)
            products = [found for one in self.factors if (found := _product(*one, low, high)) is not None]
            dense = [one for one in self._dense if one[0] < high and (one[1] is not None or _end(one) > low)]
            if not products and not dense:
                continue
            if products and products[0][1].shape[1] == high - low:
                total = products.pop(0)[1]
            else:
                total = torch.zeros(size, high - low, device=device)
            for first, block in products:
                total[:, first - low : first - low + block.shape[1]] += block
            for first, places, values in dense:
                if places is None:
                    add_part(total, low, first, values)
                    continue
                begin, end = torch.searchsorted(places, torch.tensor([low, high], device=device)).tolist()
                total.index_add_(1, places[begin:end] - low, values[:, begin:end])
            yield low, total


def _end(dense: tuple[int, Tensor | None, Tensor]) -> int:
    return dense[0] + dense[2].shape[1]


def _product(first: int, left: Tensor, right: Tensor, low: int, high: int) -> tuple[int, Tensor] | None:
    """Form the part of leftᵀ right, whose first element is `first`, that lies in `low … high`.

    Returns:
        Its first element, and the part `(B, n)`; `None` if there is none.
    """
    width = right.shape[2]
    begin, end = max(first, low), min(first + left.shape[2] * width, high)
    if begin >= end:
        return None
    rows = slice((begin - first) // width, -(-(end - first) // width))
    part = torch.bmm(left[:, :, rows].float().transpose(1, 2), right.float()).flatten(1)
    start = first + rows.start * width
    return begin, part[:, begin - start : end - start]


class ObservingSink:
    """Passes blocks to an observer, and to another sink."""

    takes_outer = staticmethod(every_factor)

    def __init__(self, observer: BatchObserver, sink: Any = None) -> None:
        self._observer = observer
        self._sink = sink

    def __call__(self, start: int, block: Tensor) -> None:
        self._observer.dense(start, block)
        if self._sink is not None:
            self._sink(start, block)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        self._observer.outer(start, left, right)
        if self._sink is not None:
            self._sink.add_outer(start, left, right)


class FirstRow:
    """Passes on the first of two equal rows."""

    takes_outer = staticmethod(every_factor)

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def __call__(self, start: int, block: Tensor) -> None:
        self._sink(start, block[:1])

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        self._sink.add_outer(start, left[:1], right[:1])


class Unwanted:
    """Drops all blocks."""

    takes_outer = staticmethod(every_factor)

    def __call__(self, start: int, block: Tensor) -> None:
        """Drop a block."""

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Drop a block in factored form."""


def add_weights(matrices: Tensor, one: KroneckerBlock, start: int, block: Tensor) -> None:
    """Add columns `start … start + n` of the gradients, `(B, n)`, to the weights in matrices `(B, *shape)`."""
    stop = start + block.shape[1]
    for row in range(max(0, (start - one.start - one.right) // one.stride), one.left):
        low = one.start + row * one.stride
        if low >= stop:
            break
        add_part(matrices[:, row, : one.right], low, start, block)


def add_part(values: Tensor, first: int, start: int, block: Tensor) -> None:
    """Add columns `start … start + n` of the gradients, `(B, n)`, to the values `(B, m)` of positions from `first`."""
    low, high = max(first, start), min(first + values.shape[1], start + block.shape[1])
    if low < high:
        values[:, low - first : high - first] += block[:, low - start : high - start]


def slices(left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Form Σ_t left ⊗ right in slices of bounded size: `(first element, (B, n))`."""
    width = right.shape[2]
    step = max(1, SLICE_BYTES // (4 * left.shape[0] * width))
    right = right.float()
    for low in range(0, left.shape[2], step):
        part = torch.bmm(left[:, :, low : low + step].float().transpose(1, 2), right)
        yield low * width, part.flatten(1)
