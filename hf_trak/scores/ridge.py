"""The ridge regression of TRAK: the Gram matrix G = XᵀX, the ridge λ, and the solution of (G + λI) aᵀ = tᵀ.

The system is solved by a Cholesky factorization in float64. See Sections 3.2 and 3.4 of the TRAK paper, arXiv
2303.14186, whose formula has no λ; it is added because G is singular or badly conditioned unless n is much larger
than k.
"""

import math
from typing import NoReturn

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError, SingularGramError
from hf_trak.runtime.checks import check_finite_rows


def ridge_lambda(trace: float, n: int, k: int, lambda_relative: float) -> float:
    """Compute the ridge λ from its relative setting.

        λ = lambda_relative · trace(XᵀX) / min(n, k),

    a multiple of the mean of the min(n, k) eigenvalues of XᵀX that can be nonzero. The relative value does not depend
    on the scale of gradients or features.

    Args:
        trace: trace(XᵀX).
        n: number of training examples.
        k: number of features.
        lambda_relative: the relative value, a finite number of at least 0.

    Returns:
        λ, in the units of XᵀX.

    Raises:
        NonFiniteError: the trace is not finite.
        SingularGramError: the trace is 0.
    """
    if trace == 0:
        raise SingularGramError(
            "All features of all training rows are 0: the outputs do not depend on the attributed parameters, as they "
            "do not on an adapter that was merged. Expected parameters that take part in the output. Name such in "
            "`grad_wrt`, or attribute the model as it was trained, before merging."
        )
    if not math.isfinite(trace):
        raise NonFiniteError(
            f"The trace of XᵀX is {trace}, so some feature is NaN or infinite. Expected finite features. Featurize "
            "again with gradients in float32."
        )
    return lambda_relative * trace / min(n, k)


class RidgeSystem:
    """The matrix A = G + λI, factorized once and applied to any number of right-hand sides.

    Attributes:
        lam (`float`):
            λ.
        condition (`float`):
            Estimate of the condition number of A in the 1-norm: a lower bound, usually within a factor of 3 (Higham
            1988, ACM TOMS 14:381).
        error (`float`):
            About the most that scores are off, as multiples of the geometric mean of self-influences, where G is
            estimated from a sample: ε / (1 − ε), see `hf_trak.scores.gram_sample`. 0 otherwise, but for rounding.
    """

    def __init__(self, gram: Tensor, lam: float, spread: Tensor | None = None) -> None:
        """
        Args:
            gram: G `(k, k)`, symmetric, in the dtype in which it was accumulated: float64 or float32.
            lam: λ, a finite number of at least 0.
            spread: D of a sample, `(k, k)`, symmetric; `None` if G is exact.

        Raises:
            ValueError: G is not square.
            SingularGramError: A contains NaN or infinities, is not positive definite, or cannot be distinguished from
                a singular matrix at the precision of `gram`.
        """
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] == 0:
            raise ValueError(f"`gram` has shape {tuple(gram.shape)}. Expected (k, k) with k ≥ 1.")
        self.lam = float(lam)
        if not bool(gram.isfinite().all()):
            raise_singular(self.lam, "it contains NaN or infinities, so some feature does (or the matrix overflowed)")
        matrix = gram.to(torch.float64, copy=True)
        matrix.diagonal().add_(self.lam)
        self._cholesky, info = torch.linalg.cholesky_ex(matrix)
        if int(info) != 0:
            raise_singular(self.lam, f"its leading minor of order {int(info)} is not positive")
        self.condition = _norm1(matrix) * _inverse_norm1(self._cholesky)
        check_condition(self.condition, self.lam, gram.dtype, self.k)
        ratio = 0.0 if spread is None else _largest_ratio(spread.to(matrix), self._cholesky)
        self.error = ratio / (1 - ratio) if ratio < 1 else math.inf

    @property
    def k(self) -> int:
        """Return the number of features, k."""
        return self._cholesky.shape[0]

    def solve(self, targets: Tensor) -> Tensor:
        """Precondition targets: solve (G + λI) aᵀ = tᵀ for every row t.

        Args:
            targets: t, `(m, k)`, any floating dtype.

        Returns:
            The rows t (G + λI)⁻¹, `(m, k)`, float64, on the device of `gram`.

        Raises:
            ValueError: the shape does not fit.
            NonFiniteError: a target is not finite; names its row.
        """
        wide = self._check_rows(targets, "target feature vector")
        return torch.cholesky_solve(wide.T, self._cholesky).T.contiguous()

    def quadratic(self, features: Tensor, start: int = 0) -> Tensor:
        """Compute x (G + λI)⁻¹ xᵀ for every row x. With the Cholesky factor L of A this is ‖L⁻¹xᵀ‖².

        Args:
            features: the rows x, `(rows, k)`, any floating dtype.
            start: index of the first row, for error messages.

        Returns:
            `(rows,)`, float64, never negative.

        Raises:
            ValueError: the shape does not fit.
            NonFiniteError: a row is not finite; names it.
        """
        wide = self._check_rows(features, "feature vector", start)
        return torch.linalg.solve_triangular(self._cholesky, wide.T, upper=False).square().sum(dim=0)

    def inverse(self) -> Tensor:
        """Compute (G + λI)⁻¹, `(k, k)`, float64. Prefer [`~RidgeSystem.solve`] to multiplying by it."""
        return torch.cholesky_inverse(self._cholesky)

    def _check_rows(self, rows: Tensor, what: str, start: int = 0) -> Tensor:
        return checked_rows(rows, self.k, what, start).to(device=self._cholesky.device)


def checked_rows(rows: Tensor, k: int, what: str, start: int = 0) -> Tensor:
    """Check rows `(rows, k)`, and return them in float64.

    Args:
        rows: any floating dtype.
        k: the number of columns that they must have.
        what: what a row is, for error messages.
        start: index of the first row, for error messages.

    Raises:
        ValueError: the shape does not fit.
        NonFiniteError: a row is not finite; names it.
    """
    if rows.ndim != 2 or rows.shape[1] != k:
        raise ValueError(f"The {what}s have shape {tuple(rows.shape)}. Expected (rows, {k}).")
    check_finite_rows(rows, what, start)
    return rows.to(torch.float64)


def check_condition(condition: float, lam: float, dtype: torch.dtype, k: int) -> None:
    """Check that (k, k) matrices of this condition number can be told from singular ones.

    Args:
        condition: the condition number of G + λI.
        lam: λ, for the error message.
        dtype: the dtype in which G was accumulated.
        k: the size of G.

    Raises:
        SingularGramError: they cannot.
    """
    if not condition * _uncertainty(dtype, k) < 1:
        raise_singular(
            lam,
            f"its condition number is about {condition:.1e}, too large to tell it from a singular one in {dtype}",
        )


def raise_singular(lam: float, reason: str) -> NoReturn:
    """Raise the error of a matrix XᵀX + λI that cannot be inverted, for a reason.

    Raises:
        SingularGramError: always.
    """
    raise SingularGramError(
        f"XᵀX + λI with λ = {lam:g} is singular: {reason}. Expected a positive definite matrix, which λ = 0 "
        "gives only if there are clearly more training examples than features. Set a positive λ, about 0.1 · "
        "trace(XᵀX) / min(n, k), or lower the projection dimension."
    )


def _uncertainty(dtype: torch.dtype, k: int) -> float:
    """Bound the eigenvalue, relative to the largest, that rounding alone can turn a zero eigenvalue into."""
    if dtype == torch.float64:
        return k * torch.finfo(torch.float64).eps
    return 2 * torch.finfo(dtype).eps


def _norm1(matrix: Tensor) -> float:
    return float(matrix.abs().sum(dim=0).max())


_VERTICES = 5
"""Vertices to visit at most."""


def _inverse_norm1(cholesky: Tensor) -> float:
    """Estimate ‖A⁻¹‖₁ from below for A = LLᵀ (Higham 1988, ACM TOMS 14:381).

    ‖A⁻¹x‖₁ is convex in x, so its maximum over the unit ball of the 1-norm is at a vertex ±e_i. The method goes from
    vertex to vertex along the gradient until the value no longer rises.

    Args:
        cholesky: L, `(k, k)`.
    """
    k = cholesky.shape[0]

    def apply(vector: Tensor) -> Tensor:
        return torch.cholesky_solve(vector.unsqueeze(1), cholesky).squeeze(1)

    # A fixed alternating vector covers the matrices on which the ascent stops at its first point.
    index = torch.arange(k, dtype=torch.float64, device=cholesky.device)
    alternating = torch.where(index % 2 == 0, 1.0, -1.0) * (1 + index / max(k - 1, 1))
    best = 2 * float(apply(alternating).abs().sum()) / (3 * k)
    vector = torch.full((k,), 1 / k, dtype=torch.float64, device=cholesky.device)
    for _ in range(_VERTICES):
        image = apply(vector)
        best = max(best, float(image.abs().sum()))
        gradient = apply(torch.where(image >= 0, 1.0, -1.0).double())
        vertex = int(gradient.abs().argmax())
        if float(gradient.abs()[vertex]) <= float(gradient @ vector):
            break
        vector = torch.zeros_like(vector)
        vector[vertex] = 1
    return best


_STEPS = 40
"""Steps of Lanczos at most."""


def _largest_ratio(spread: Tensor, cholesky: Tensor) -> float:
    """Estimate ‖L⁻¹DL⁻ᵀ‖₂ by steps of Lanczos, from below, within a few percent.

    Args:
        spread: D, `(k, k)`, symmetric, float64.
        cholesky: L, `(k, k)`.
    """
    index = torch.arange(len(spread), dtype=torch.float64, device=spread.device)
    start = torch.where(index % 2 == 0, 1.0, -1.0) * (1 + index / len(spread))
    basis, images = [start / start.norm()], list[Tensor]()
    for _ in range(min(_STEPS, len(spread))):
        inner = torch.linalg.solve_triangular(cholesky.T, basis[-1].unsqueeze(1), upper=True)
        images.append(torch.linalg.solve_triangular(cholesky, spread @ inner, upper=False).squeeze(1))
        known, rest = torch.stack(basis), images[-1]
        for _ in range(2):  # the first leaves a rest of rounding
            rest = rest - known.T @ (known @ rest)
        if float(rest.norm()) <= 1e-10 * float(images[-1].norm()):
            break
        basis.append(rest / rest.norm())
    projected = torch.stack(basis[: len(images)]) @ torch.stack(images).T
    return float(torch.linalg.eigvalsh((projected + projected.T) / 2).abs().max())
