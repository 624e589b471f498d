"""The ridge regression from the largest eigenvalues of G = XᵀX, with λI for the rest, for large n and k.

With G ≈ Ĝ = V diag(σ²) Vᵀ, V `(k, r)`, and B = V diag(σ), the Woodbury identity gives

    (Ĝ + λI)⁻¹ = (I − B (λI + BᵀB)⁻¹ Bᵀ) / λ

which for orthonormal V is (I − V diag(σ² / (σ² + λ)) Vᵀ) / λ. V is kept in float32 and σ² in float64. Since BᵀB is
taken of the rounded V, this is the inverse for a matrix next to Ĝ, instead of a rounded inverse, whose errors the
condition number would multiply.

*Error of scores.* `hf_trak.scores.subspace` computes Ĝ such that E = G − Ĝ is positive semidefinite but for rounding,
and ε ≥ ‖E‖₂. With Â = Ĝ + λI, A = G + λI and M = Â^{-1/2} E Â^{-1/2},

    Â⁻¹ − A⁻¹ = Â^{-1/2} (I − (I + M)⁻¹) Â^{-1/2}

Eigenvalues of M lie between −ρ/λ and ε/λ, where −ρ bounds the eigenvalues of E from below, and those of I − (I + M)⁻¹
between −ρ/(λ − ρ) and ε/(λ + ε). With δ the larger of the two in size, by the Cauchy–Schwarz inequality

    |x Â⁻¹ tᵀ − x A⁻¹ tᵀ| ≤ δ √(x Â⁻¹ xᵀ · t Â⁻¹ tᵀ)

for every row x and target t: relative to the geometric mean of the self-influences of both. Rounding V to float32
moves Ĝ by at most ρ = 2⁻²³ √(Σσ² · σ₁²).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_trak.scores.ridge import check_condition, checked_rows, raise_singular
from hf_trak.scores.training_features import TrainingFeatures, sum_over_strips

_STRIP_NUMBERS = 1 << 24
"""Numbers of V that are converted to float64 at a time."""


@dataclass(frozen=True)
class Factors:
    """An approximation of G = XᵀX `(k, k)` by r eigenvalues.

    Attributes:
        vectors (`torch.Tensor` of shape `(k, r)`): V, float32. Columns beyond the rank of G are zero.
        eigenvalues (`torch.Tensor` of shape `(r,)`): σ², float64, descending.
        overlaps (`torch.Tensor` of shape `(r, r)`): VᵀV, float64.
        trace (`float`): trace(G).
        residual (`float`): ε, an upper bound of ‖G − V diag(σ²) Vᵀ‖₂, see `hf_trak.scores.subspace`.
    """

    vectors: Tensor
    eigenvalues: Tensor
    overlaps: Tensor
    trace: float
    residual: float

    @property
    def captured(self) -> float:
        """Return the share of trace(G) that the approximation has."""
        kept = float(self.eigenvalues @ self.overlaps.diagonal())
        return kept / self.trace if self.trace > 0 else 1.0

    @cached_property
    def strip(self) -> int:
        """Return the number of rows of V that are converted at a time."""
        return max(1, _STRIP_NUMBERS // self.vectors.shape[1])

    def project(self, rows: Tensor) -> Tensor:
        """Compute rows · V.

        Args:
            rows: `(m, k)`, float64.

        Returns:
            `(m, r)`, float64.
        """
        result = torch.zeros(len(rows), self.vectors.shape[1], dtype=torch.float64)
        for part, columns in zip(self.vectors.split(self.strip), rows.split(self.strip, dim=1), strict=True):
            result.addmm_(columns, part.double())
        return result

    def combine(self, weights: Tensor) -> Tensor:
        """Compute weights · Vᵀ.

        Args:
            weights: `(m, r)`, float64.

        Returns:
            `(m, k)`, float64.
        """
        return torch.cat([weights @ part.double().T for part in self.vectors.split(self.strip)], dim=1)


def overlaps_of(vectors: Tensor) -> Tensor:
    """Compute VᵀV `(r, r)` in float64."""
    strip = max(1, _STRIP_NUMBERS // vectors.shape[1])
    return sum_over_strips(vectors, strip, lambda part: part.T @ part)


class LowRankSystem:
    """(Ĝ + λI)⁻¹ for an approximation Ĝ of XᵀX.

    Attributes:
        lam (`float`): λ.
        condition (`float`):
            Condition number of Ĝ + λI in the 2-norm: (σ₁² + λ) / λ, or over σ_k² + λ where all k eigenvalues are kept.
        error (`float`):
            δ, which bounds the error of scores, see the module's docstring; infinite where no bound holds.
    """

    def __init__(self, factors: Factors, lam: float) -> None:
        """
        Args:
            factors: the approximation.
            lam: λ.

        Raises:
            SingularGramError: λ = 0, or the sum cannot be told from a singular matrix in float32.
        """
        self.lam = float(lam)
        self.factors = factors
        values = factors.eigenvalues
        if self.lam <= 0:
            raise_singular(self.lam, f"beyond {len(values)} eigenvalues nothing but λ is left of it")
        largest = float(values[0])
        smallest = float(values[-1]) if len(values) == self.k else 0.0
        self.condition = (largest + self.lam) / (smallest + self.lam)
        check_condition(self.condition, self.lam, torch.float32, self.k)
        rounding = min(factors.residual, 2.0**-23 * math.sqrt(float(values.sum()) * largest))
        above, below = factors.residual / (self.lam + factors.residual), rounding / (self.lam - rounding)
        self.error = max(above, below) if rounding < self.lam else math.inf
        self._roots = values.sqrt()
        inner = factors.overlaps * self._roots * self._roots.unsqueeze(1)
        inner.diagonal().add_(self.lam)
        self._cholesky = torch.linalg.cholesky(inner)

    @property
    def k(self) -> int:
        """Return the number of features, k."""
        return self.factors.vectors.shape[0]

    def solve(self, targets: Tensor) -> Tensor:
        """Compute t (Ĝ + λI)⁻¹ for every row t.

        Args:
            targets: `(m, k)`, any floating dtype.

        Returns:
            `(m, k)`, float64, on the CPU.

        Raises:
            ValueError: the shape does not fit.
            NonFiniteError: a target is not finite; names its row.
        """
        wide = checked_rows(targets, self.k, "target feature vector").cpu()
        inner = torch.cholesky_solve((self.factors.project(wide) * self._roots).T, self._cholesky).T
        return (wide - self.factors.combine(inner * self._roots)).div_(self.lam)

    def quadratic(self, features: Tensor, start: int = 0) -> Tensor:
        """Compute x (Ĝ + λI)⁻¹ xᵀ for every row x.

        Args:
            features: `(rows, k)`.
            start: index of the first row, for error messages.

        Returns:
            `(rows,)`, float64, never negative.

        Raises:
            As `solve`.
        """
        wide = checked_rows(features, self.k, "feature vector", start).cpu()
        inner = (self.factors.project(wide) * self._roots).T
        inner = torch.linalg.solve_triangular(self._cholesky, inner, upper=False)
        return (wide.square().sum(dim=1) - inner.square().sum(dim=0)).div_(self.lam).clamp_min_(0)

    def training_quadratic(self, features: TrainingFeatures, indices: Sequence[int]) -> Tensor:
        """Compute x (Ĝ + λI)⁻¹ xᵀ for the training rows x of some shards.

        Args:
            features: the training rows.
            indices: the shards.

        Returns:
            `(rows of all these shards,)`, float64.

        Raises:
            As `solve`.
        """
        parts = [self.quadratic(piece, start) for start, piece in features.pieces(indices)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
