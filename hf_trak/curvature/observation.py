"""Gradients as they arrive: in which form each parameter's gradient comes out of an engine.

The division into blocks follows from what is seen rather than from a list of layer types, so that every model that an
engine can take apart has a curvature.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock, Part
from hf_trak.curvature.curvature import FitPlan
from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot

SMALLEST_SIDE = 4

"""Matrices with a smaller side are described by one number per element: a basis would hold as many."""


BIAS_TOLERANCE = 1e-2

"""Relative difference of two sums over the same numbers if one is rounded to bfloat16 (4e-3 at most)."""


BIAS_NOISE = 1e-5

"""The same relative to the numbers themselves: sums that cancel (biases of attention keys) are only rounding."""


@dataclass
class Observation:
    """The facts that one or several batches have shown.

    Attributes:
        factors (`dict[int, tuple[int, int, int]]`): by start, the sizes of both factors, and the largest number of
            times that they came in one batch.
        dense (`set[str]`): parameters whose gradients came as dense blocks.
        overlapping (`set[str]`): parameters whose dense blocks overlapped, or came beside factors, in one batch.
        biases (`dict[int, tuple[int, str]]`): by start of the factors, the position of the bias that is their sum over
            positions, and the side of the inputs.
        refuted (`set[int]`): starts of factors whose sum was another one in some batch.
    """

    factors: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    dense: set[str] = field(default_factory=set)
    overlapping: set[str] = field(default_factory=set)
    biases: dict[int, tuple[int, Part]] = field(default_factory=dict)
    refuted: set[int] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        """Describe the observation as plain JSON."""
        return {
            "factors": sorted([start, *sizes] for start, sizes in self.factors.items()),
            "dense": sorted(self.dense),
            "overlapping": sorted(self.overlapping),
            "biases": sorted([start, *bias] for start, bias in self.biases.items()),
            "refuted": sorted(self.refuted),
        }

    def merge(self, content: dict[str, Any]) -> None:
        """Add what [`~Observation.to_json`] of another observation gave."""
        for start, left, right, calls in content["factors"]:
            before = self.factors.get(start, (left, right, 0))
            self.factors[start] = (left, right, max(calls, before[2]))
        self.dense |= set(content["dense"])
        self.overlapping |= set(content["overlapping"])
        for start, position, part in content["biases"]:
            if self.biases.setdefault(start, (position, part)) != (position, part):
                self.refuted.add(start)
        self.refuted |= set(content["refuted"])


class BatchObserver:
    """Notes what arrives in one batch."""

    def __init__(self, layout: ParameterLayout, observation: Observation) -> None:
        """
        Args:
            layout: the attributed parameters.
            observation: to which the batch is added.
        """
        self._observation = observation
        self._layout = layout
        self._by_name = {slot.name: slot for slot in layout.slots}
        self._calls: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # sums over positions, by start
        self._sizes: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # bounds of sums of absolute values
        self._ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._vectors: dict[int, Tensor] = {}

    def dense(self, start: int, block: Tensor) -> None:
        """Note a dense block."""
        for slot, low, high in self._layout.overlaps(start, start + block.shape[1]):
            self._ranges[slot.name].append((low, high))
            if len(slot.shape) == 1:
                part = block[:, low - start : high - start].float()
                whole = self._vectors.setdefault(slot.offset, part.new_zeros(part.shape[0], slot.numel))
                whole[:, low - slot.offset : high - slot.offset] += part

    def outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Note a block in factored form."""
        left, right = left.float(), right.float()
        self._calls[start].append((left.sum(1), right.sum(1)))
        for side, factor in enumerate((left, right)):
            self._sizes[start][side] += math.sqrt(factor.shape[1]) * float(factor.norm())

    def finish(self) -> None:
        """Add the batch to the observation."""
        seen = self._observation
        for name, ranges in self._ranges.items():
            seen.dense.add(name)
            ranges.sort()
            if any(second[0] < first[1] for first, second in pairwise(ranges)):
                seen.overlapping.add(name)
        for start, calls in self._calls.items():
            sizes = calls[0][0].shape[1], calls[0][1].shape[1]
            before = seen.factors.get(start, (*sizes, 0))
            seen.factors[start] = (*sizes, max(before[2], len(calls)))
            slot = next(self._layout.overlaps(start, start + 1))[0]
            if slot.name in self._ranges:
                seen.overlapping.add(slot.name)
            self._look_for_bias(start, slot, calls)

    def _look_for_bias(self, start: int, slot: ParameterSlot, calls: list[tuple[Tensor, Tensor]]) -> None:
        """Compare the sum of the factors over positions with the gradient of the layer's bias."""
        bias = self._by_name.get(slot.name.removesuffix("weight") + "bias")
        if not slot.name.endswith("weight") or bias is None or bias.offset not in self._vectors:
            return
        given = self._vectors[bias.offset]
        parts: tuple[tuple[int, Part], ...] = ((0, "right"), (1, "left"))
        for side, part in parts:
            total = sum(call[side] for call in calls)
            assert isinstance(total, Tensor)
            # channel groups: the factors at `start` belong to a slice of the bias
            first = (start - slot.offset) * given.shape[1] // slot.numel if side == 0 else 0
            expected = given[:, first : first + total.shape[1]]
            if expected.shape != total.shape:
                continue
            if not bool((expected != 0).any() | (total != 0).any()):
                return  # a layer that the batch does not reach shows nothing
            allowed = BIAS_TOLERANCE * float(expected.norm()) + BIAS_NOISE * self._sizes[start][side]
            if float((total - expected).norm()) <= allowed:
                self._observation.biases.setdefault(start, (bias.offset + first, part))
                if self._observation.biases[start] == (bias.offset + first, part):
                    return
        self._observation.refuted.add(start)


def divide(layout: ParameterLayout, seen: Observation, plan: FitPlan) -> CurvatureBlocks:
    """Divide the gradient vector into blocks.

    * A weight whose gradient comes as factors alone is a [`KroneckerBlock`], per group of channels.
    * Another matrix is one, too, with bases from its whole gradients; of a stack of matrices (the experts of a
      mixture) each. Not so embedding tables, since a sample has few of their rows, nor parameters that are an
      embedding and a head at once, since no one basis is right for both.
    * Everything else is diagonal.

    Args:
        layout: the attributed parameters.
        seen: what the sample showed.
        plan: names the embedding tables, and the square weights whose rows are inputs (`Conv1D`). Sides longer than
            its largest are cut. For the diagonal kind, dense parameters are diagonal whatever their shape.

    Returns:
        The blocks, which contain every parameter once.
    """
    kronecker: list[KroneckerBlock] = []
    lone: list[DiagonalBlock] = []
    silent = []
    repeated = {start for start, (_, _, calls) in seen.factors.items() if calls > 1}
    for slot in layout.slots:
        starts = sorted(s for s in seen.factors if slot.offset <= s < slot.offset + slot.numel)
        if not starts and slot.name not in seen.dense:
            silent.append(slot.name)
        covered = sum(seen.factors[s][0] * seen.factors[s][1] for s in starts)
        if starts and slot.name not in seen.dense and covered == slot.numel:
            for start in starts:
                bias = None if start in seen.refuted else seen.biases.get(start)
                sides = seen.factors[start][:2]
                kronecker += _cut_up(slot.name, start, sides, bias, plan.largest_side, from_factors=True)
        elif slot.name not in plan.embeddings and not starts and plan.kind != "diagonal" and _is_matrix(slot):
            bias = _dense_bias(layout, slot, seen, slot.name in plan.transposed)
            kronecker += _stacked(slot, plan.largest_side, bias)
        else:
            lone.append(DiagonalBlock(slot.name, slot.offset, slot.numel))
            if slot.name in seen.overlapping or len(starts) > 1:
                repeated.add(slot.offset)
    return CurvatureBlocks(
        tuple(sorted(kronecker, key=lambda block: (block.start, block.source_left))),
        tuple(_without(lone, joined_ranges(kronecker))),
        frozenset(repeated),
        tuple(silent),
    )


def joined_ranges(kronecker: list[KroneckerBlock]) -> list[tuple[int, int]]:
    """List the positions of biases that are part of a Kronecker block, as ranges, ascending."""
    return sorted((one.bias, one.bias + one.bias_length) for one in kronecker if one.bias is not None)


def _without(blocks: list[DiagonalBlock], ranges: list[tuple[int, int]]) -> list[DiagonalBlock]:
    """Cut ranges out of diagonal blocks."""
    rest = []
    for block in blocks:
        low, stop = block.start, block.start + block.numel
        for first, last in ranges:
            if last <= low or first >= stop:
                continue
            if first > low:
                rest.append(DiagonalBlock(block.name, low, first - low))
            low = last
        if low < stop:
            rest.append(DiagonalBlock(block.name, low, stop - low))
    return rest


def _is_matrix(slot: ParameterSlot) -> bool:
    # four dimensions and more are kernels of depthwise convolutions: those of others come as factors
    return len(slot.shape) in (2, 3) and min(slot.shape[-2:]) >= SMALLEST_SIDE


def _dense_bias(
    layout: ParameterLayout, slot: ParameterSlot, seen: Observation, transposed: bool
) -> tuple[int, Part] | None:
    """Find the bias of a matrix by name and length.

    It must not be a block of its own: that of attention keys has no gradient but rounding, which the damping of such a
    block, relative to itself, would not hide.
    """
    found = [one for one in layout.slots if one.name == slot.name.removesuffix("weight") + "bias"]
    if not slot.name.endswith("weight") or len(slot.shape) != 2 or not found or found[0].name not in seen.dense:
        return None
    rows, columns = slot.shape
    if found[0].shape == (columns,) and (rows != columns or transposed):
        return found[0].offset, "left"
    return (found[0].offset, "right") if found[0].shape == (rows,) else None


def _stacked(slot: ParameterSlot, largest: int, bias: tuple[int, Part] | None) -> list[KroneckerBlock]:
    """Make blocks of a matrix, or of every matrix of a stack, whose gradients come as dense blocks."""
    sides = slot.shape[-2:]
    starts = range(slot.offset, slot.offset + slot.numel, math.prod(sides))
    return [block for start in starts for block in _cut_up(slot.name, start, sides, bias, largest, from_factors=False)]


def _own_bias(bias: tuple[int, Part] | None, low: int, first: int) -> tuple[int | None, Part]:
    """Find the position of the bias of the part that starts in row `low` and column `first` of a matrix, and its side.

    It belongs to the first part of the inputs, cut as the outputs are.
    """
    if bias is None:
        return None, "right"
    position, part = bias
    if (first if part == "right" else low) != 0:
        return None, part
    return position + (low if part == "right" else first), part


def _cut_up(
    name: str, start: int, sides: Sequence[int], bias: tuple[int, Part] | None, largest: int, from_factors: bool
) -> list[KroneckerBlock]:
    """Make the blocks of a matrix: one, unless a side is too long."""
    rows, columns = sides
    blocks = []
    for low, height in _cuts(rows, largest):
        for first, width in _cuts(columns, largest):
            place, source = start + low * columns + first, (start, low, first) if from_factors else ()
            blocks.append(KroneckerBlock(name, place, height, width, columns, *_own_bias(bias, low, first), *source))
    return blocks


def _cuts(length: int, largest: int) -> list[tuple[int, int]]:
    """Cut a length into parts of at most `largest` that differ by at most one: `(first, length)` of each."""
    parts = -(-length // largest)
    edges = [length * i // parts for i in range(parts + 1)]
    return [(low, high - low) for low, high in pairwise(edges)]


logger = logging.getLogger(__name__)


_JITTER = 1e-12

"""Added to the diagonal, relative to its mean, where LAPACK does not converge."""


def eigenbasis(total: Tensor, count: float, what: str) -> tuple[Tensor, Tensor]:
    """Decompose a sum of outer products, in float64.

    Args:
        total: the sum, `(d, d)`, finite. Only the lower triangle is read.
        count: the number that divides it first, so that no decomposition sees huge numbers.
        what: name of the parameter and the side, for errors.

    Returns:
        Eigenvalues `(d,)`, ascending, at least 0, float64; and eigenvectors as columns `(d, d)`, float32.
    """
    matrix = total.to("cpu", torch.float64) / max(count, 1)
    try:
        values, vectors = torch.linalg.eigh(matrix, UPLO="L")
    except torch.linalg.LinAlgError:
        shift = _JITTER * float(matrix.diagonal().mean())
        logger.warning("The covariance of %s did not converge; %.3g is added to its diagonal.", what, shift)
        matrix.diagonal().add_(shift)
        values, vectors = torch.linalg.eigh(matrix, UPLO="L")
    return values.clamp_(min=0), vectors.float()


@cache
def _cube_seconds(side: int) -> float:
    """Measure the seconds of a decomposition, divided by the cube of the side."""
    drawn = torch.randn(side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix, begun = drawn @ drawn.T, time.perf_counter()
    eigenbasis(matrix, 1, "a random matrix")
    return (time.perf_counter() - begun) / side**3


def decomposition_seconds(cubes: float) -> float:
    """Return about how long eigendecompositions take on this machine, which always are computed on the CPU.

    A decomposition of 512 or, of much work, 1,024 is timed, which takes at most a thirtieth of that.

    Args:
        cubes: the sum of the cubes of their sides.
    """
    if cubes < 30 * 512**3:
        return 0.0
    return cubes * _cube_seconds(512 if cubes < 30 * 1024**3 else 1024)


def even_in_null_spaces(eigenvalues: Tensor, left_values: Tensor, right_values: Tensor) -> Tensor:
    """Average corrected eigenvalues over the directions that the rows behind a basis said nothing about.

    These directions span the null space of a covariance, and a decomposition may return any basis of it: rounding
    chooses. Gradients of other rows, or with other labels, do have parts there. The mean over the null space, of
    Λ = mean_b (Q_leftᵀ G_b Q_right)∘², is the same for every basis of it.

    Args:
        eigenvalues: Λ `(I, J)`.
        left_values: eigenvalues of the left covariance, `(I,)`.
        right_values: those of the right one, `(J,)`.

    Returns:
        Λ `(I, J)`.
    """
    found = eigenvalues.clone()
    for view, values in ((found, left_values), (found.T, right_values)):
        null = values <= len(values) * torch.finfo(torch.float32).eps * values.max()
        if bool(null.any()):
            view[null] = view[null].mean(0)
    return found
