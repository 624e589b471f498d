"""The projector of the two-sided map `factored`: large matrices of the gradient become p × p numbers, then `sjlt`.

The gradient of a linear layer is a sum of T outer products of output gradients and inputs. Its two-sided projection
Lᵀ G M needs these factors alone, so that nothing of the size of the layer is formed. `two_sided_matrices` tells which
parts of the gradient are such matrices, from the shapes of the parameters and p alone; everything else, and the p × p
numbers, go through the sparse map. `reference.py` defines the map entry by entry.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trak.config import DEFAULT_FACTORED_DIM
from hf_trak.kernels.torch_two_sided import TwoSidedMap
from hf_trak.projectors.base import BlockProjector, ProjectionSink, ProjectionType, formed_slices, without_autocast
from hf_trak.projectors.checks import check_factors, check_proj_type
from hf_trak.projectors.dense import SparseProjector
from hf_trak.runtime.checks import checked_int

MAX_FACTORED_DIM = 4096


@dataclass(frozen=True)
class TwoSidedMatrix:
    """A part of the gradient vector that is a matrix `(I, J)`, row by row, and is multiplied from both sides.

    Attributes:
        start (`int`): position of its first element.
        height (`int`): I.
        width (`int`): J.
        reduced_start (`int`): position of the first of its p × p numbers in the reduced vector.
    """

    start: int
    height: int
    width: int
    reduced_start: int

    @property
    def stop(self) -> int:
        """Return the position behind its last element."""
        return self.start + self.height * self.width


def is_large(height: int, width: int, size: int) -> bool:
    """Tell whether projecting the factors of a matrix takes at most half as many multiplications as forming it.

    For each of the T outer products, p · (I + J) for its two factors and p² for theirs, beside I · J. Products with
    few columns run at a lower rate: of half as many, all T are faster, of equally many, few
    (`benchmarks/pages/factored.md`).

    Args:
        height: I.
        width: J.
        size: p.
    """
    return 2 * size * (height + width + size) <= height * width


def two_sided_matrices(shapes: Sequence[Sequence[int]], size: int) -> list[TwoSidedMatrix]:
    """List the matrices that the map multiplies from both sides.

    A parameter with at least three dimensions is a stack of matrices (experts) where its last two are large enough;
    otherwise the first dimension is that of the rows, and all others together are the columns (convolutions).

    Args:
        shapes: shapes of the parameters, in their order in the gradient vector.
        size: p.
    """
    found: list[TwoSidedMatrix] = []
    start, reduced = 0, 0
    for shape in shapes:
        numel = math.prod(shape)
        if len(shape) > 2 and is_large(shape[-2], shape[-1], size):
            height, width = shape[-2], shape[-1]
        elif len(shape) > 1 and is_large(shape[0], numel // max(shape[0], 1), size):
            height, width = shape[0], numel // shape[0]
        else:
            height, width = 0, 0
        count = numel // (height * width) if height else 0
        for index in range(count):
            found.append(TwoSidedMatrix(start + index * height * width, height, width, reduced + index * size**2))
        start += numel
        reduced += count * size**2 if count else numel
    return found


class FactoredProjector(BlockProjector):
    """Two-sided random projection of large matrices, followed by the sparse one (`factored`).

    Every matrix G that [`two_sided_matrices`] lists becomes Lᵀ G M / p, with independent ±1 in L `(I, p)` and M
    `(J, p)`. These numbers and the remaining elements of the gradient, in their order, are a reduced vector, which a
    [`SparseProjector`] maps to k numbers.
    """

    algorithm = "factored-1"

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType = "factored",
        device: str | torch.device = "cpu",
        nonzeros: int = 1,
        *,
        shapes: Sequence[Sequence[int]],
        factored_dim: int = DEFAULT_FACTORED_DIM,
    ) -> None:
        """
        Args:
            grad_dim (`int`):
                P, length of a gradient vector, 1 ≤ P < 2⁶³.
            proj_dim (`int`):
                k, length of a projected gradient, 1 ≤ k ≤ 2²⁴.
            seed (`int`, *optional*, defaults to 0):
                Seed of the random matrices, 0 ≤ seed < 2⁶³.
            proj_type (`str`, *optional*, defaults to `"factored"`):
                Name of the map; no other one is accepted.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Device on which [`~BlockProjector.project`] expects gradients. Not touched before the first batch.
            nonzeros (`int`, *optional*, defaults to 1):
                s, the number of entries per row of the sparse map, 1 ≤ s ≤ k.
            shapes (`Sequence[Sequence[int]]`):
                Shapes of the parameters, in their order in the gradient vector.
            factored_dim (`int`, *optional*, defaults to 128):
                p, 1 ≤ p ≤ 4096.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is outside its range, `proj_type` is another map, the shapes do not have P elements,
                or none of them is large enough to be multiplied from both sides.
        """
        check_proj_type(type(self), proj_type, ("factored",))
        self.factored_dim = checked_int(factored_dim, "factored_dim", 1, MAX_FACTORED_DIM)
        # p is part of what identifies the map wherever its name is recorded
        super().__init__(grad_dim, proj_dim, seed, f"factored, p = {self.factored_dim}", device)
        self.nonzeros = checked_int(nonzeros, "nonzeros", 1, self.proj_dim)
        self.matrices = two_sided_matrices(shapes, self.factored_dim)
        total = sum(math.prod(shape) for shape in shapes)
        if total != self.grad_dim:
            raise ValueError(
                f"`shapes` have {total} elements together and `grad_dim` is {self.grad_dim}. Expected the shapes of "
                "all parameters of the gradient, in their order."
            )
        if not self.matrices:
            raise ValueError(
                f"No parameter is large enough for the map 'factored' with `factored_dim` {self.factored_dim}: "
                "matrices of I × J need I · J ≥ 2 p · (I + J + p). Choose a smaller one, or the map 'sjlt'."
            )
        self._starts = [matrix.start for matrix in self.matrices]
        self._tallest: dict[int, int] = {}
        for matrix in self.matrices:
            self._tallest[matrix.width] = max(matrix.height, self._tallest.get(matrix.width, 0))
        last = self.matrices[-1]
        self.reduced_dim = last.reduced_start + self.factored_dim**2 + self.grad_dim - last.stop
        self.two_sided = TwoSidedMap(self.factored_dim, self.seed)
        self.sparse = SparseProjector(self.reduced_dim, self.proj_dim, self.seed, device=device, nonzeros=nonzeros)

    @property
    def scale(self) -> float:
        """Return 1/√s, as for the sparse map: the factor 1/p of the two-sided one is part of R."""
        return self.sparse.scale

    def free_memory(self) -> None:
        """Drop the cached bits: p for each row and column of a matrix, and those of the sparse map."""
        self.two_sided.free_memory()
        self.sparse.free_memory()

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> ProjectionSink:
        """Open the block form for a whole batch, see [`BlockProjector.sink`].

        It adds up the p × p numbers of a matrix while parts of it follow each other. A subclass that overrides
        `accumulate` gets a sink that calls it for every block.
        """
        if self._accumulates_its_own_way(FactoredProjector):
            return ProjectionSink(self, batch_size, model_id, device)
        return _FactoredSink(self, batch_size, model_id, device)

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Tell whether to project factors rather than form their product, see [`BlockProjector.takes_outer`].

        They may be those of some rows of a matrix. Both ways give the same features, to rounding.
        """
        if self._accumulates_its_own_way(FactoredProjector):
            return False
        tokens, height, width, p = left.shape[1], left.shape[2], right.shape[2], self.factored_dim
        if height > self._tallest.get(width, 0):
            return False
        return tokens * p * (height + width + p) <= height * width * (tokens + p) + height * p * p

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, TwoSidedMatrix | None, int]]:
        """Cut columns of the gradient vector at the ends of matrices.

        Args:
            start: first column.
            stop: the column behind the last one.

        Yields:
            First column of a part, the one behind its last, the matrix that it belongs to, and the position of its
            first number in the reduced vector: that of a single element, or of the p × p numbers of the matrix.
        """
        while start < stop:
            index = bisect_right(self._starts, start) - 1
            matrix = self.matrices[index] if index >= 0 else None
            if matrix is not None and start < matrix.stop:
                end = min(stop, matrix.stop)
                yield start, end, matrix, matrix.reduced_start
            else:
                end = min(stop, self._starts[index + 1]) if index + 1 < len(self._starts) else stop
                before = 0 if matrix is None else matrix.reduced_start + self.factored_dim**2 - matrix.stop
                yield start, end, None, start + before
            start = end

    def matrix_of(self, start: int, height: int, width: int) -> TwoSidedMatrix | None:
        """Return the matrix that has `height` whole rows from a column on, if there is one."""
        matrix = next(self.parts(start, start + 1))[2]
        if matrix is None or matrix.width != width or (start - matrix.start) % width:
            return None
        return matrix if start + height * width <= matrix.stop else None

    def add_block(self, sums: Tensor, block: Tensor, start: int, matrix: TwoSidedMatrix, model_id: int) -> None:
        """Add columns of a matrix, from any element to any other, to its p × p numbers without their factor 1/p.

        Args:
            sums: `(B, p, p)`, changed in place.
            block: `(B, n)`.
            start: position of the first column in the gradient vector.
            matrix: the matrix.
            model_id: id of the checkpoint.
        """
        row, before = divmod(start - matrix.start, matrix.width)
        behind = -(before + block.shape[1]) % matrix.width
        if before or behind:
            block = torch.nn.functional.pad(block, (before, behind))
        rows = block.unflatten(1, (-1, matrix.width))
        self.two_sided.add_rows(sums, rows, matrix.start, (matrix.height, matrix.width), row, model_id)

    def empty_sums(self, batch_size: int, device: str | torch.device) -> Tensor:
        """Return zeros for the p × p numbers of a matrix, `(B, p, p)`."""
        return torch.zeros(batch_size, self.factored_dim, self.factored_dim, device=device)

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        for low, high, matrix, reduced in self.parts(start, start + block.shape[1]):
            part = block[:, low - start : high - start]
            if matrix is not None:
                sums = self.empty_sums(len(block), block.device)
                self.add_block(sums, part, low, matrix, model_id)
                part = sums.flatten(1) / self.factored_dim
            self.sparse.accumulate(out, part, reduced, model_id)

    def _accumulate_outer(self, out: Tensor, left: Tensor, right: Tensor, start: int, model_id: int) -> None:
        matrix = self.matrix_of(start, left.shape[2], right.shape[2])
        if matrix is None or self._accumulates_its_own_way(FactoredProjector):
            super()._accumulate_outer(out, left, right, start, model_id)
            return
        sums = self.empty_sums(len(left), left.device)
        self.add_factors(sums, left, right, start, matrix, model_id)
        self.sparse.accumulate(out, sums.flatten(1) / self.factored_dim, matrix.reduced_start, model_id)

    def add_factors(
        self, sums: Tensor, left: Tensor, right: Tensor, start: int, matrix: TwoSidedMatrix, model_id: int
    ) -> None:
        """Add whole rows of a matrix, given as factors `(B, T, n)` and `(B, T, J)`; see [`add_block`]."""
        shape, row = (matrix.height, matrix.width), (start - matrix.start) // matrix.width
        self.two_sided.add_outer(sums, left, right, matrix.start, shape, row, model_id)


class _FactoredSink(ProjectionSink):
    """Adds up the p × p numbers of one matrix at a time, and hands them to a sink of the sparse map."""

    def __init__(
        self, projector: FactoredProjector, batch_size: int, model_id: int, device: str | torch.device
    ) -> None:
        super().__init__(projector, batch_size, model_id, device)
        self._factored = projector
        self._reduced = projector.sparse.sink(batch_size, model_id, device)
        self._open: TwoSidedMatrix | None = None
        self._sums = projector.empty_sums(batch_size, device)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Add a block in factored form; arguments and errors as in [`BlockProjector.accumulate_outer`].

        Raises:
            TypeError: `start` is not an integer.
            ValueError: the block does not lie in [0, P), or shapes, dtypes or devices do not fit.
            RuntimeError: the result has been taken already.
        """
        self._require_open()
        start = check_factors(self._out, left, right, start, self.projector.grad_dim, self.projector.proj_dim)
        if not left.numel() or not right.numel():
            return
        left, right = left.detach(), right.detach()
        with torch.no_grad(), without_autocast(left.device):
            if (matrix := self._factored.matrix_of(start, left.shape[2], right.shape[2])) is None:
                for offset, block in formed_slices(left, right):
                    self._add(start + offset, block)
            else:
                sums = self._sums_of(matrix)
                self._factored.add_factors(sums, left, right, start, matrix, self.model_id)

    def _add(self, start: int, block: Tensor) -> None:
        for low, high, matrix, reduced in self._factored.parts(start, start + block.shape[1]):
            part = block[:, low - start : high - start]
            if matrix is None:
                self._reduced(reduced, part)
            else:
                self._factored.add_block(self._sums_of(matrix), part, low, matrix, self.model_id)

    def _finish(self) -> None:
        self._close()
        self._out = self._reduced.result()

    def _sums_of(self, matrix: TwoSidedMatrix) -> Tensor:
        """Return the p × p numbers of a matrix, to be added to, and hand on those of another one."""
        if self._open is not matrix:
            self._close()
            self._open = matrix
        return self._sums

    def _close(self) -> None:
        if self._open is not None:
            self._reduced(self._open.reduced_start, self._sums.flatten(1) / self._factored.factored_dim)
            self._sums.zero_()
            self._open = None
