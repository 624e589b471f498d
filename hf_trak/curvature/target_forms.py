"""The forms in which preconditioned targets V = P⁻¹ ∇f are kept: all P numbers of each, or matrices of low rank.

A matrix V `(I, J)` of a Kronecker block as U W with r columns takes r (I + J) numbers instead of I J. Scoring forms it
again, a slice at a time, which takes r / B times as long as the products with a batch of B rows. So low rank is for
memory, and for fewer passes over the training rows where not all targets fit; it makes no single pass faster.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trak.curvature.arrivals import BlockRanges, add_weights
from hf_trak.curvature.blocks import KroneckerBlock
from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.maps import DenseSink, GradientMap, MapSink, OwnPlaces, Preconditioning, TargetProducts

_OVERSAMPLING, _POWERS = 8, 2
"""Further columns and power iterations of the randomized range finder (Halko, Martinsson, Tropp 2011, arXiv 0909.4061,
Algorithms 4.4 and 5.1)."""

_SLICE_BYTES = 2**24


class TargetForm:
    """All P numbers of every target.

    Attributes:
        width (`int`): number of numbers that are kept of a target.
    """

    def __init__(self, curvature: Curvature, damping: float) -> None:
        """
        Args:
            curvature: the curvature P.
            damping: c in 1 / (Λ + c · mean Λ).
        """
        self.curvature = curvature
        self.damping = damping
        self.width = curvature.numel

    def preconditioning(self) -> GradientMap:
        """Make the map of gradients to rows of this form, `(B, width)`."""
        return Preconditioning(self.curvature, self.damping)

    def whole(self, rows: Tensor) -> Tensor:
        """Turn rows `(m, width)` into V, `(m, P)`, float32."""
        return rows.float()

    def products(self, rows: Tensor) -> GradientMap:
        """Make the map of gradients to their products with rows `(m, width)`: `(B, m)`."""
        return TargetProducts(rows)

    def zero(self, rows: Tensor) -> Tensor:
        """Mark the rows `(m, width)` whose V is zero, `(m,)`."""
        # most rows differ from zero in their first numbers: the others need not be read
        zero = (rows[:, : 2**12] == 0).all(1)
        zero[zero.clone()] = (rows[zero] == 0).all(1)
        return zero


@dataclass(frozen=True)
class Place:
    """The place of a matrix in a row: U `(I, r)` and then W `(r, J)`, or all of it if `rank` is `None`."""

    start: int
    numel: int
    rank: int | None


class LowRankForm(TargetForm):
    """Matrices of rank r, and all numbers of those that are no smaller so, and of diagonal blocks.

    A row holds the Kronecker blocks in their order, then the diagonal blocks, and last ‖V − UW‖ / ‖V‖, its error.
    Of a curvature whose blocks other processes hold, it holds the others alone.

    Attributes:
        rank (`int`): r.
    """

    def __init__(self, curvature: Curvature, damping: float, rank: int) -> None:
        """
        Args:
            curvature: the curvature P.
            damping: c in 1 / (Λ + c · mean Λ).
            rank: r.
        """
        super().__init__(curvature, damping)
        self.rank = rank
        self._places: list[Place] = []
        self._diagonal: list[int] = []
        start = 0
        held, held_numbers = set(curvature.held), set(curvature.held_numbers)
        for index, one in enumerate(curvature.blocks.kronecker):
            numel = low_rank_numel(*one.shape, rank) if index in held else 0
            self._places.append(Place(start, numel, rank if numel < one.numel else None))
            start += numel
        for index, lone in enumerate(curvature.blocks.diagonal):
            self._diagonal.append(start)
            start += lone.numel if index in held_numbers else 0
        self.width = start + 1
        self._ranges = BlockRanges(curvature.blocks, held, held_numbers)

    def preconditioning(self) -> GradientMap:
        return _CompressedPreconditioning(self)

    def products(self, rows: Tensor) -> GradientMap:
        return _LowRankProducts(self, rows)

    def whole(self, rows: Tensor) -> Tensor:
        blocks = self.curvature.blocks
        out = torch.zeros(len(rows), blocks.numel, device=rows.device)
        for index, one in enumerate(blocks.kronecker):
            one.put(self._matrix_rows(rows, index, 0, one.shape[0]), out)
        for lone, start in zip(blocks.diagonal, self._diagonal, strict=True):
            out[:, lone.start : lone.start + lone.numel] = rows[:, start : start + lone.numel].float()
        return out

    def zero(self, rows: Tensor) -> Tensor:
        return super().zero(rows[:, :-1])

    def errors(self, rows: Tensor) -> Tensor:
        """Return ‖V − UW‖ / ‖V‖ of rows `(m, width)`: `(m,)`."""
        return rows[:, -1].float()

    def compressed(self, whole: Tensor) -> Tensor:
        """Turn V `(B, P)` into rows `(B, width)`."""
        blocks, rows = self.curvature.blocks, whole.new_zeros(len(whole), self.width)
        lost = whole.new_zeros(len(whole), dtype=torch.float64)
        for one, place in zip(blocks.kronecker, self._places, strict=True):
            kept, rest = self.compressed_matrix(place.rank, one.matrix(whole))
            rows[:, place.start : place.start + place.numel] = kept
            lost += rest
        for lone, start in zip(blocks.diagonal, self._diagonal, strict=True):
            rows[:, start : start + lone.numel] = whole[:, lone.start : lone.start + lone.numel]
        norms = whole.double().square().sum(1).clamp_min(torch.finfo(torch.float64).tiny)
        rows[:, -1] = (lost / norms).sqrt()
        return rows

    def compressed_matrix(self, rank: int | None, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Turn matrices V `(B, I, J)` into rows `(B, r (I + J))`, or `(B, I J)` where `rank` is `None`.

        Returns:
            The rows, and ‖V − UW‖² `(B,)`, float64.
        """
        if rank is None:
            return matrices.flatten(1), matrices.new_zeros(len(matrices), dtype=torch.float64)
        left, right, rest = truncated(matrices, rank)
        return torch.cat([left.flatten(1), right.flatten(1)], 1), rest

    def places(self) -> dict[str, Place]:
        """List where the blocks that this process holds are in a row, by name: `matrix-00012`, `numbers-00003`."""
        curvature = self.curvature
        found = {f"matrix-{index:05d}": self._places[index] for index in curvature.held}
        for index in curvature.held_numbers:
            found[f"numbers-{index:05d}"] = Place(self._diagonal[index], curvature.blocks.diagonal[index].numel, None)
        return found

    def whole_rows(self, rows: Tensor) -> Tensor:
        """Turn rows into those of the form with all numbers of the same blocks, float32."""
        held, numbers = self.curvature.held, self._diagonal[0] if self._diagonal else self.width - 1
        matrices = [
            self._matrix_rows(rows, i, 0, self.curvature.blocks.kronecker[i].shape[0]).flatten(1) for i in held
        ]
        return torch.cat([*matrices, rows[:, numbers:].float()], 1)

    def add_products(self, scores: Tensor, targets: Tensor, start: int, block: Tensor) -> None:
        """Add the products of columns `start … start + n` of gradients, `(B, n)`, to scores `(B, m)`."""
        for low, high, index, kind in self._ranges.overlapping(start, start + block.shape[1]):
            if kind == "weight":
                self._add_matrix(scores, targets, index, start, block)
                continue
            first, last = max(low, start), min(high, start + block.shape[1])
            if kind == "bias":
                values = self._bias(targets, index)[:, first - low : last - low]
            else:
                place = self._diagonal[index] + first - low
                values = targets[:, place : place + last - first].float()
            scores.addmm_(block[:, first - start : last - start], values.to(block.device).T)

    def _add_matrix(self, scores: Tensor, targets: Tensor, index: int, start: int, block: Tensor) -> None:
        """Add the products with the rows of a matrix that a part of the gradients belongs to."""
        one = self.curvature.blocks.kronecker[index]
        low = max(0, (start - one.start - one.right) // one.stride + 1)
        high = min(one.left, -(-(start + block.shape[1] - one.start) // one.stride))
        step = max(1, _SLICE_BYTES // (4 * one.shape[1] * max(len(targets), len(block))))
        for first in range(low, high, step):
            last = min(first + step, high)
            values = self._matrix_rows(targets, index, first, last)[:, :, : one.right].to(block.device)
            scores.addmm_(_rows_of(one, first, last, start, block), values.flatten(1).T)

    def _matrix_rows(self, rows: Tensor, index: int, low: int, high: int) -> Tensor:
        """Form rows `low … high − 1` of the matrices of a block: `(m, high − low, J)`, float32."""
        place, (height, width) = self._places[index], self.curvature.blocks.kronecker[index].shape
        own = rows[:, place.start : place.start + place.numel]
        if place.rank is None:
            return own.view(-1, height, width)[:, low:high].float()
        left = own[:, low * place.rank : high * place.rank].float().view(-1, high - low, place.rank)
        return left @ own[:, height * place.rank :].float().view(-1, place.rank, width)

    def _bias(self, rows: Tensor, index: int) -> Tensor:
        """Form the bias of a block, `(m, bias_length)`."""
        one, place = self.curvature.blocks.kronecker[index], self._places[index]
        height, width = one.shape
        if one.bias_part == "left":
            return self._matrix_rows(rows, index, height - 1, height)[:, 0]
        if place.rank is None:
            return self._matrix_rows(rows, index, 0, height)[:, :, -1]
        own = rows[:, place.start : place.start + place.numel].float()
        left = own[:, : height * place.rank].view(-1, height, place.rank)
        return (left @ own[:, height * place.rank :].view(-1, place.rank, width)[:, :, -1:]).squeeze(2)


class _CompressedPreconditioning(Preconditioning):
    def __init__(self, form: LowRankForm) -> None:
        super().__init__(form.curvature, form.damping)
        self.proj_dim = form.width
        self._form = form

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        places = OwnPlaces(self.curvature, batch_size, device)
        return self.opened(places, lambda: self._form.compressed(places.rows))


class _LowRankProducts(GradientMap):
    def __init__(self, form: LowRankForm, targets: Tensor) -> None:
        super().__init__(len(targets))
        self._form = form
        self._targets = targets

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        scores = torch.zeros(batch_size, self.proj_dim, device=device)
        return DenseSink(
            lambda start, block: self._form.add_products(scores, self._targets, start, block), lambda: scores
        )


def low_rank_numel(height: int, width: int, rank: int) -> int:
    """Count the numbers that are kept of a matrix: r (I + J), or I J if that is no more."""
    return min(rank * (height + width), height * width)


def truncated(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Approximate matrices by products of rank r, by a randomized singular value decomposition.

    Args:
        matrices: V, `(B, I, J)`.
        rank: r, at most min(I, J).

    Returns:
        U `(B, I, r)`, W `(B, r, J)`, and ‖V − UW‖² `(B,)`, float64. The random start is the same in every call. Both
        are zero where V is, and W is NaN where V is not finite.
    """
    finite = matrices.isfinite().flatten(1).all(1)
    matrices = torch.where(finite[:, None, None], matrices, 0.0)
    columns = min(rank + _OVERSAMPLING, *matrices.shape[1:])
    start = torch.randn(matrices.shape[2], columns, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(matrices @ start.to(matrices.device)).Q
    for _ in range(_POWERS):
        basis = torch.linalg.qr(matrices.mT @ basis).Q
        basis = torch.linalg.qr(matrices @ basis).Q
    left, values, right = torch.linalg.svd(basis.mT @ matrices, full_matrices=False)
    kept = values[:, :rank].masked_fill(~finite[:, None], torch.nan)
    rest = matrices.double().square().sum((1, 2)) - kept.double().square().sum(1)
    left = (basis @ left[:, :, :rank]) * (values[:, :1, None] != 0)
    return left, kept.unsqueeze(2) * right[:, :rank], rest.clamp_min(0)


def _rows_of(one: KroneckerBlock, first: int, last: int, start: int, block: Tensor) -> Tensor:
    """Take rows `first … last − 1` of a matrix out of a part of the gradients, zero beyond it: `(B, rows · right)`."""
    begin, end = one.start + first * one.stride - start, one.start + last * one.stride - start
    if one.stride == one.right and begin >= 0 and end <= block.shape[1]:
        return block[:, begin:end]
    matrices = block.new_zeros(len(block), one.left, one.right)
    add_weights(matrices, one, start, block)
    return matrices[:, first:last].flatten(1)
