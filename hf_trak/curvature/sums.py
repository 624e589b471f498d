"""The sums of the passes over the sample: factors or whole gradients for the bases, rotated squares for the
eigenvalues.

Sums are float64, products float32 where they are large. Of symmetric sums the lower triangle alone is computed. With
G_b the gradient of row b (see `blocks`), over R rows:

    K-FAC bases     L = Σ_b Σ_t left_t left_tᵀ,   R = Σ_b Σ_t right_t right_tᵀ
    Shampoo bases   L = Σ_b G_b G_bᵀ,             R = Σ_b G_bᵀ G_b
    eigenvalues     Λ = Σ_b (Q_leftᵀ G_b Q_right)∘²

K-FAC: Martens & Grosse 2015, arXiv 1503.05671. Corrected eigenvalues: George et al. 2018, arXiv 1806.03884.
"""

import math
from collections.abc import Collection, Hashable, Mapping
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from hf_trak.curvature.arrivals import SLICE_BYTES
from hf_trak.curvature.blocks import CurvatureBlocks, KroneckerBlock

_ROUNDING, _COUNTED = 3e-6, 3e-5
"""Norms of a position, relative to the largest of its row. Up to the first it does not count: where the gradient is
zero, attention leaves up to 1e-6 in float32. From the second on it counts as one. In between its weight rises with the
logarithm of the norm, so that no basis hangs on the side of a border that one position falls on."""

_LARGE, _CACHED_BYTES = 2**16, 2**20
"""Elements of a product that is formed piece by piece on a CPU, and bytes of a piece."""

Key = TypeVar("Key", bound=Hashable)

BasisKind = Literal["factors", "gradients", "none"]
"""What the bases are those of: the factors (K-FAC), whole gradients (Shampoo), or none: every parameter alone."""

_STRIPE, _MOST_STRIPES = 128, 8
"""Rows of a symmetric product that are computed together, at least; and into how many stripes it is cut at most. Eight
take 9/16 of the multiplications of the whole square."""


class BasisSums:
    """The sums of the first pass: one pair of matrices per Kronecker block. Only their lower triangles count."""

    takes_numbers = False

    def __init__(
        self, blocks: CurvatureBlocks, kind: BasisKind, device: torch.device, owned: Collection[int] | None = None
    ) -> None:
        """
        Args:
            blocks: the blocks.
            kind: which bases.
            device: where gradients are.
            owned: the Kronecker blocks whose gradients come here; `None` for all.
        """
        self.blocks = blocks
        self.kind = kind
        summed = {} if kind == "none" else _owned(blocks, owned)
        self.left = {i: _zeros(shape[0], shape[0], device=device) for i, shape in summed.items()}
        self.right = {i: _zeros(shape[1], shape[1], device=device) for i, shape in summed.items()}
        self.counts = [0.0] * len(blocks.kronecker)
        """Sum of the weights of positions, or number of rows if bases are those of whole gradients or missing."""

    def factors(self, index: int, left: Tensor, right: Tensor) -> None:
        if self.kind == "none":
            self.counts[index] += left.shape[0]
            return
        if self.kind == "gradients":
            self._gradients_of_factors(index, left, right)
            return
        # Only positions that take part in the output count: padding has inputs, but no gradient. Nor do those whose
        # gradient is zero but for rounding, which depends on the batch and the kernel.
        weights = (_weights(left) * _weights(right)).flatten()
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        if not bool((weights == 1).all()):
            counted = weights > 0
            weights, left, right = weights[counted], left[counted], right[counted]
            root = weights.sqrt().unsqueeze(1)
            left, right = left * root, right * root
        add_product(self.left[index], left, left)
        add_product(self.right[index], right, right)
        self.counts[index] += float(weights.double().sum())

    def matrices(self, index: int, gradients: Tensor) -> None:
        self.counts[index] += gradients.shape[0]
        if self.kind == "none":
            return
        tall = gradients.transpose(0, 1).reshape(gradients.shape[1], -1)
        wide = gradients.reshape(-1, gradients.shape[2])
        add_product(self.left[index], tall.T, tall.T)
        add_product(self.right[index], wide, wide)

    def numbers(self, index: int, first: int, gradients: Tensor) -> None:
        """Do nothing: parameters without a basis need no first pass."""

    def _gradients_of_factors(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add Σ_b G_b G_bᵀ = Σ_b leftᵀ (right rightᵀ) left, or form G_b where that costs less."""
        size, positions, height = left.shape
        width = right.shape[2]
        through_positions = positions**2 * (height + width) + positions * (height**2 + width**2)
        through_gradients = height * width * (positions + height + width)
        if through_gradients <= through_positions:
            step = max(1, SLICE_BYTES // (4 * height * width))
            for low in range(0, size, step):
                part = slice(low, low + step)
                self.matrices(index, torch.bmm(left[part].transpose(1, 2), right[part]))
            return
        inner = torch.bmm(torch.bmm(right, right.transpose(1, 2)), left)
        add_product(self.left[index], left.flatten(0, 1), inner.flatten(0, 1))
        inner = torch.bmm(torch.bmm(left, left.transpose(1, 2)), right)
        add_product(self.right[index], right.flatten(0, 1), inner.flatten(0, 1))
        self.counts[index] += size


class SquareSums:
    """The sums of the second pass: squares of rotated gradients, per element."""

    takes_numbers = True

    def __init__(
        self,
        blocks: CurvatureBlocks,
        bases: list[tuple[Tensor, Tensor] | None],
        device: torch.device,
        owned: Collection[int] | None = None,
    ) -> None:
        """
        Args:
            blocks: the blocks.
            bases: Q_left and Q_right of every Kronecker block; `None` for one without a basis.
            device: where gradients are.
            owned: the Kronecker blocks whose gradients come here; `None` for all.
        """
        self.blocks = blocks
        self.bases = bases
        self.kronecker = {i: _zeros(*shape, device=device) for i, shape in _owned(blocks, owned).items()}
        self.diagonal = {i: _zeros(one.numel, device=device) for i, one in enumerate(blocks.diagonal)}

    def factors(self, index: int, left: Tensor, right: Tensor) -> None:
        if (bases := self.bases[index]) is not None:
            left, right = left @ bases[0], right @ bases[1]
        total = self.kronecker[index]
        if left.shape[1] == 1:  # one position: the squares of the factors make up those of their product
            total += left.squeeze(1).square().T @ right.squeeze(1).square()
            return
        add_squares(total, left, right)

    def matrices(self, index: int, gradients: Tensor) -> None:
        add_sum_of_squares(self.kronecker[index], rotated(gradients, self.bases[index]))

    def numbers(self, index: int, first: int, gradients: Tensor) -> None:
        add_sum_of_squares(self.diagonal[index][first : first + gradients.shape[1]], gradients)


def _weights(factor: Tensor) -> Tensor:
    """Return how much positions `(B, T)` of a factor `(B, T, I)` count, from 0 for rounding to 1."""
    norms = factor.norm(dim=2)
    relative = norms / norms.amax(1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
    return ((relative / _ROUNDING).log() / math.log(_COUNTED / _ROUNDING)).clamp(0, 1)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the lower triangle of the symmetric product leftᵀ right to a sum. Anything may stand above it.

    Small products are float64: it takes no time that one would notice, and with few positions, rounding would turn the
    eigenvectors of the smallest eigenvalues.

    Args:
        total: the sum, `(d, d)`.
        left: `(N, d)`.
        right: `(N, d)`.
    """
    size = left.shape[1]
    if size < _STRIPE:
        left, right = left.to(total.dtype), right.to(total.dtype)
    stripes = min(max(size // _STRIPE, 1), _MOST_STRIPES)
    edges = [size * stripe // stripes for stripe in range(stripes + 1)]
    for low, high in pairwise(edges):
        total[low:high, :high] += left[:, low:high].T @ right[:, :high]


def add_squares(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σ_b (leftᵀ_b right_b)∘² to a sum.

    On a CPU large products are made row by row, a piece at a time that stays in its cache, which takes a fifth less.

    Args:
        total: the sum, `(I, J)`.
        left: `(B, T, I)`.
        right: `(B, T, J)`.
    """
    size, _, height = left.shape
    width = right.shape[2]
    if left.device.type != "cpu" or height * width < _LARGE:
        step = max(1, SLICE_BYTES // (4 * size * width))
        for low in range(0, height, step):
            part = torch.bmm(left[:, :, low : low + step].transpose(1, 2), right)
            total[low : low + step] += part.square_().sum(0)
        return
    step = max(1, _CACHED_BYTES // (4 * width))
    for low in range(0, height, step):
        columns = left[:, :, low : low + step]
        squares = left.new_zeros(columns.shape[2], width)
        product = torch.empty_like(squares)
        for row in range(size):
            torch.mm(columns[row].T, right[row], out=product)
            squares.addcmul_(product, product)
        total[low : low + step] += squares


def add_sum_of_squares(total: Tensor, gradients: Tensor) -> None:
    """Add Σ_b G_b∘² of gradients `(B, …)` to a sum `(…)`, row by row: large temporary tensors would take longer."""
    squares = torch.zeros_like(gradients[0])
    for row in gradients:
        squares.addcmul_(row, row)
    total += squares


def _owned(blocks: CurvatureBlocks, owned: Collection[int] | None) -> dict[int, tuple[int, int]]:
    return {i: one.shape for i, one in enumerate(blocks.kronecker) if owned is None or i in owned}


def _zeros(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=device)


def rotated(gradients: Tensor, bases: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return Q_leftᵀ G Q_right of matrices `(B, I, J)`."""
    return gradients if bases is None else bases[0].T @ gradients @ bases[1]


def shared_out(costs: Mapping[Key, int], loads: list[int]) -> dict[Key, int]:
    """Give each piece of work to the process that has least to do, the dearest first.

    Args:
        costs: what each piece costs. Of equal ones the first comes first.
        loads: what each process has to do already. It grows by the costs.

    Returns:
        The process of each piece, in the order in which they were given out.
    """
    owners: dict[Key, int] = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        owners[key] = owner = loads.index(min(loads))
        loads[owner] += costs[key]
    return owners


def sides(block: KroneckerBlock) -> int:
    """Estimate the cost of the eigendecompositions of a block, relative to others."""
    return block.shape[0] ** 3 + block.shape[1] ** 3
