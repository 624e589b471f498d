"""`Curvature`: the fitted blocks of a model, and the products with their inverse."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock

if TYPE_CHECKING:  # slow to import, and not needed for curvatures that are described
    from hf_trak.gradient_computers.layout import ParameterLayout

CurvatureKind = Literal["ekfac", "shampoo", "kfac", "diagonal", "identity"]

"""The ladder of approximations.

* `"ekfac"`: bases of the factors, eigenvalues corrected (George et al. 2018, arXiv 1806.03884; for influence: Grosse
  et al. 2023, arXiv 2308.03296).
* `"shampoo"`: bases of whole gradients, eigenvalues corrected.
* `"kfac"`: bases and eigenvalues of the factors (Martens & Grosse 2015, arXiv 1503.05671).
* `"diagonal"`: mean squared gradients.
* `"identity"`: no curvature. Scores are inner products of gradients.
"""


KINDS: tuple[str, ...] = get_args(CurvatureKind)


_NEGLIGIBLE = 1e-7

"""Eigenvalues below this part of the largest are rounding. Without damping, they have no inverse."""


NOISE = 3e-13

"""Mean Λ of a block, relative to the largest of the model, below which rounding explains it. In float32, gradients
that are zero came out at 1e-25 to 1e-13, most of them below 1e-14. Right ones were above 8e-13, which queries and keys
of a BERT that is not trained had; those of LoRA's A after one step of AdamW with the rate 1e-6 had 8e-10."""


_LARGEST = 1e30

"""Factors up to this are float32 with room to spare."""


_SMALLEST = torch.finfo(torch.float32).tiny

"""Squares of float32 numbers below this have lost digits, or are 0."""


@dataclass(frozen=True)
class KroneckerValues:
    """The curvature of one Kronecker block.

    Attributes:
        bases (`tuple[torch.Tensor, torch.Tensor]`, *optional*): Q_left `(I, I)` and Q_right `(J, J)`, columns are
            eigenvectors; `None` for the unit vectors.
        eigenvalues (`torch.Tensor`): Λ `(I, J)`, the mean over rows of squared rotated gradients.
        count (`int`): number of positions behind the bases (of rows, where they are those of whole gradients).
    """

    bases: tuple[Tensor, Tensor] | None
    eigenvalues: Tensor
    count: int

    def rotated(self, gradients: Tensor) -> Tensor:
        """Compute Q_leftᵀ G Q_right of matrices `(B, I, J)`."""
        if self.bases is None:
            return gradients
        left, right = (basis.to(gradients.device) for basis in self.bases)
        return left.T @ (gradients @ right)

    def rotated_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute Q_leftᵀ G Q_right of G = leftᵀ right, from factors `(B, T, I)` and `(B, T, J)`: `(B, I, J)`.

        Factors are rotated before they are multiplied where that takes fewer multiplications.
        """
        positions, (height, width) = left.shape[1], self.eigenvalues.shape
        if self.bases is None or positions * (height**2 + width**2) > height * width * (height + width):
            return self.rotated(torch.bmm(left.transpose(1, 2), right))
        left, right = (side @ basis.to(side.device) for side, basis in zip((left, right), self.bases, strict=True))
        return torch.bmm(left.transpose(1, 2), right)

    def rotated_back(self, gradients: Tensor) -> Tensor:
        """Compute Q_left G Q_rightᵀ of matrices `(B, I, J)`."""
        if self.bases is None:
            return gradients
        left, right = (basis.to(gradients.device) for basis in self.bases)
        return left @ (gradients @ right.T)


@dataclass(frozen=True)
class Curvature:
    """The Fisher information of a model, block by block; see `hf_trak.curvature.blocks`.

    The values of blocks that another process holds are on the meta device: they have a shape and no memory.

    Attributes:
        kind (`str`): see [`CurvatureKind`].
        blocks ([`CurvatureBlocks`]): the division of the parameters.
        kronecker (`tuple[KroneckerValues, ...]`): as `blocks.kronecker`.
        diagonal (`tuple[torch.Tensor, ...]`): mean squared gradients of `blocks.diagonal`.
        rows (`int`): number of rows in the sample.
        digest (`str`): identity of all of the above.
        scale (`float`): largest mean Λ of a block.
    """

    kind: str
    blocks: CurvatureBlocks
    kronecker: tuple[KroneckerValues, ...]
    diagonal: tuple[Tensor, ...]
    rows: int
    digest: str
    scale: float = 0.0

    @property
    def floor(self) -> float:
        """Return the mean Λ of a block below which its gradients are rounding."""
        return NOISE * self.scale

    @property
    def numel(self) -> int:
        """Return P, the number of parameters."""
        return self.blocks.numel

    @property
    def held(self) -> list[int]:
        """Return the indices of the Kronecker blocks whose values are in this process."""
        return [index for index, one in enumerate(self.kronecker) if not one.eigenvalues.is_meta]

    @property
    def held_numbers(self) -> list[int]:
        """Return the indices of the diagonal blocks whose values are in this process."""
        return [index for index, one in enumerate(self.diagonal) if not one.is_meta]

    def items(self) -> list[tuple[KroneckerBlock | DiagonalBlock, Tensor]]:
        """List all blocks with their eigenvalues."""
        eigenvalues = [values.eigenvalues for values in self.kronecker]
        kronecker = zip(self.blocks.kronecker, eigenvalues, strict=True)
        return [*kronecker, *zip(self.blocks.diagonal, self.diagonal, strict=True)]

    def precondition(self, gradients: Tensor, damping: float) -> Tensor:
        """Multiply gradients by the inverse of the damped curvature.

        Args:
            gradients (`torch.Tensor` of shape `(B, P)`):
                Gradients, float32.
            damping (`float`):
                c, see [`damping_of`].

        Returns:
            `torch.Tensor` of shape `(B, P)`: P⁻¹ g of every row.
        """
        out = gradients.clone()
        if self.kind == "identity":
            return out
        for block, values in zip(self.blocks.kronecker, self.kronecker, strict=True):
            rotated = scaled(values.rotated(block.matrix(out)), inverse(values.eigenvalues, damping, self.floor))
            block.put(values.rotated_back(rotated), out)
        for one, squares in zip(self.blocks.diagonal, self.diagonal, strict=True):
            part = out[:, one.start : one.start + one.numel]
            part.copy_(scaled(part, inverse(squares, damping, self.floor)))
        return out

    def describe(self) -> dict[str, Any]:
        """Describe kind and identity as plain JSON, for the identity of scores."""
        return {"digest": self.digest, "kind": self.kind, "rows": self.rows}


def weights(eigenvalues: Tensor, damping: float, floor: float, power: float) -> Tensor:
    """Compute a power of [`inverse`]: float32, or float64 where float32 cannot hold it (a tiny curvature, say)."""
    found = inverse(eigenvalues, damping, floor).pow_(power)
    return found.float() if float(found.max()) < _LARGEST else found


def scaled(gradients: Tensor, factor: Tensor) -> Tensor:
    """Multiply gradients by [`weights`] or [`inverse`], without a change of their dtype."""
    return (gradients * factor.to(gradients.device)).to(gradients.dtype)


def damping_of(eigenvalues: Tensor, damping: float, floor: float = 0.0) -> Tensor:
    """Return d, which is added to all eigenvalues of a block: c · mean Λ.

    Where the mean is below the floor F of the model, d is (F / mean)⁴ times as much. A block whose gradients are
    rounding then has next to no say, instead of as much as any other.

    Args:
        eigenvalues (`torch.Tensor`):
            Λ of one block, not all of them 0.
        damping (`float`):
            c, at least 0.
        floor (`float`, *optional*, defaults to 0.0):
            F, see [`Curvature.floor`].

    Returns:
        `torch.Tensor`: one number, float64.
    """
    mean = eigenvalues.double().mean()
    return damping * mean * (floor / mean).clamp_min(1) ** 4


def inverse(eigenvalues: Tensor, damping: float, floor: float = 0.0) -> Tensor:
    """Invert damped eigenvalues, 1 / (Λ + d).

    A block without curvature (an expert that no row of the sample was sent to) gets 0, so that it adds nothing to a
    score. Without damping, so do eigenvalues and blocks that are nothing but rounding.

    Args:
        eigenvalues (`torch.Tensor`):
            Λ of one block, at least 0.
        damping (`float`):
            c, at least 0.
        floor (`float`, *optional*, defaults to 0.0):
            F, see [`damping_of`].

    Returns:
        `torch.Tensor`: float64, of the same shape.
    """
    values = eigenvalues.double()
    if not bool((values > _SMALLEST).any()):
        return torch.zeros_like(values)
    if damping == 0:
        kept = (values > _NEGLIGIBLE * values.max()) & (values.mean() >= floor)
        return torch.where(kept, 1 / values, 0.0)
    return 1 / (values + damping_of(values, damping, floor))


def identity_curvature(layout: "ParameterLayout") -> Curvature:
    """Make the curvature that changes nothing: scores under it are inner products of gradients."""
    whole = CurvatureBlocks((), tuple(DiagonalBlock(slot.name, slot.offset, slot.numel) for slot in layout.slots))
    return Curvature("identity", whole, (), tuple(torch.ones(slot.numel) for slot in layout.slots), 0, "identity")


PARTS = 8

"""Parts of the sample at most. More would lose less to a kill, and write more."""


ROWS_PER_PART = 64

"""Least number of rows of a part, if the sample has as many. Files of fewer would take as long as the gradients."""


LARGEST_SIDE = 8192

"""Longest side of a basis. The eigendecomposition of twice the side takes eight times as long."""


BASIS_POSITIONS = 20

"""Positions per dimension of a basis that are enough: scores then change less than with other draws of the labels."""


BASIS_ROWS = 256

"""Least number of rows behind a basis, if the sample has as many, since the positions of a row are alike."""


Rows = tuple[int, ...]


@dataclass(frozen=True)
class FitPlan:
    """The settings of a fit and the rows that it takes.

    Attributes:
        kind: see [`~hf_trak.curvature.curvature.CurvatureKind`].
        rows: numbers of the rows of the sample, ascending.
        batch_size: rows per batch.
        embeddings: names of embedding tables.
        transposed: names of weights whose rows are inputs.
        description: for progress bars.
        largest_side: longest side of a basis.
    """

    kind: str
    rows: Rows
    batch_size: int
    embeddings: frozenset[str]
    transposed: frozenset[str]
    description: str
    largest_side: int = LARGEST_SIDE

    @cached_property
    def parts(self) -> list[Rows]:
        """Split the whole sample into the parts of the second pass, each a strided subset."""
        return _divided(self.rows, PARTS)

    @cached_property
    def first_basis_parts(self) -> list[Rows]:
        """Return the parts of the first pass that every fit computes."""
        return _divided(self._shuffled[:BASIS_ROWS], PARTS // 2) if self.kind == "ekfac" else self.parts

    def further_basis_parts(self, rows: int) -> list[Rows]:
        """Return the other parts of the first pass if bases take so many rows in all.

        Bases of the whole sample have none.

        Args:
            rows: number of rows, from 0 to those of the sample.
        """
        return _divided(self._shuffled[BASIS_ROWS:rows], PARTS // 2) if self.kind == "ekfac" else []

    @cached_property
    def _shuffled(self) -> Rows:
        """Return the sample in an order whose every beginning is a random sample itself."""
        order = np.random.Generator(np.random.Philox(len(self.rows))).permutation(len(self.rows))
        return tuple(self.rows[place] for place in order)

    def batches(self, rows: Rows) -> list[Sequence[int]]:
        """Divide the rows of one part into batches."""
        return [rows[low : low + self.batch_size] for low in range(0, len(rows), self.batch_size)]


def _divided(rows: Rows, most: int) -> list[Rows]:
    """Divide rows into at most so many parts of almost equal length, each ascending."""
    count = min(most, -(-len(rows) // ROWS_PER_PART))
    return [tuple(sorted(rows[part::count])) for part in range(count)]


def rows_needed(counted: int, sides_and_positions: Sequence[tuple[int, int]], available: int) -> int:
    """Return the number of rows that give every basis enough positions.

    Args:
        counted: number of rows that were looked at.
        sides_and_positions: for every Kronecker block its longer side, and its positions in these rows.
        available: number of rows of the sample, which is taken whole where a block had no position yet.
    """
    if any(positions == 0 for _, positions in sides_and_positions):
        return available
    wanted = (-(-counted * BASIS_POSITIONS * side // positions) for side, positions in sides_and_positions)
    return min(available, max(wanted, default=0))
