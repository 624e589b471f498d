"""Bounds on rounding errors that follow from the precision and the number of operations.

A tolerance that was measured on one processor fails on another one: matrix libraries choose the order of additions by
the instructions that they find. The bounds below hold for every order. u is the unit roundoff of a type (2⁻²⁴ for
float32): one operation gives the exact result times 1 + δ with |δ| ≤ u. Sources:

- N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002: sections 3.1 (γ_n and inner
  products), 3.5 (matrix products), 4.2 (sums in any order), 10.1 (linear systems by Cholesky's method).
- N. J. Higham and T. Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019:
  √n in place of n where rounding errors are independent of each other and have mean zero.

They suppose that no operation over- or underflows. A wider intermediate result, a fused multiplication and addition,
and a sum in blocks only make errors smaller. Two computations that are compared with each other may both be wrong: add
their bounds. A difference that is larger than its bound is a mistake, or arithmetic of a lower precision.

No useful bound is known for a whole network: its layers may amplify errors, and never do it as much as they might.
Tests that compare gradients or scores of networks allow a relative distance ‖found − expected‖₂ / ‖expected‖₂ of 1e-5
or 1e-4. `likely_gamma` reaches 1e-5 after 650 roundings in a row, 1e-4 after 65,000. A mistake in one row, sign or
layer, or half precision, changes the norm by 1e-3 or more.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype = torch.float32) -> float:
    """u, the largest relative error of one operation: half the distance from 1 to the next larger number."""
    return torch.finfo(dtype).eps / 2


def gamma(operations: int, dtype: torch.dtype = torch.float32) -> float:
    """γ_n = n u / (1 − n u): the largest relative change of a number by n roundings after each other.

    Also the error of an inner product of n terms, in any order, relative to Σ|x_i y_i| (equation 3.5).

    Raises:
        ValueError: n u ≥ 1, where no bound of this kind exists.
    """
    error = operations * unit_roundoff(dtype)
    if error >= 1:
        raise ValueError(f"{operations} operations in {dtype} may lose every digit. Use fewer, or a wider type.")
    return error / (1 - error)


def likely_gamma(operations: int, dtype: torch.dtype = torch.float32, failure: float = 1e-9) -> float:
    """γ̃_n = exp(λ √n u + n u² / (1 − u)) − 1: as `gamma`, but with a probability of `failure` that it is exceeded.

    Theorem 2.4 of Higham and Mary: roundings are taken as independent of each other, with mean zero, and λ solves
    2 exp(−λ² (1 − u)² / 2) = failure. The default gives λ = 6.5.
    """
    u = unit_roundoff(dtype)
    deviations = math.sqrt(2 * math.log(2 / failure)) / (1 - u)
    return math.expm1(deviations * math.sqrt(operations) * u + operations * u * u / (1 - u))


def sum_bound(terms: Any, dtype: torch.dtype = torch.float32, dim: int = -1) -> Tensor:
    """γ_{n−1} Σ|x_i| over a dimension: the error of a sum of n terms that are exact, in any order (equation 4.4)."""
    terms = _float64(terms)
    return gamma(max(terms.shape[dim] - 1, 0), dtype) * terms.abs().sum(dim)


def product_bound(left: Any, right: Any, dtype: torch.dtype = torch.float32, extra: int = 0) -> Tensor:
    """γ_{n+extra} |A||B|: the error of every element of A B, where A is `(m, n)` and B `(n, p)` (equation 3.13).

    Args:
        left, right: the exact factors, with any leading batch dimensions.
        dtype: the type that products are added in.
        extra: roundings that each term or the result goes through besides, such as a division by a factor.
    """
    left, right = _float64(left), _float64(right)
    return gamma(left.shape[-1] + extra, dtype) * (left.abs() @ right.abs())


def random_walk_bound(
    terms: int,
    norm: Any,
    dtype: torch.dtype = torch.float32,
    sums: int = 1,
    computations: int = 1,
    failure: float = 1e-6,
) -> Any:
    """λ u ‖x‖₂ √(n / 3): the error of sums of n terms of random sign, where n u Σ|x_i| says next to nothing.

    The partial sums S_i of such terms are a random walk, and rounding adds at most u |S_i| to each, spread evenly:
    with a variance of u² S_i² / 3. For Brownian motion B on [0, 1], the total is u ‖x‖₂ √(n / 3) Z with Z normal of
    variance W = ∫ B². Cameron and Martin's formula E exp(s² W / 2) = 1 / √cos s gives, at s = 1.5,
    P(|Z| > λ) ≤ 2 exp(−1.5 λ) / √cos 1.5 < 7.6 exp(−1.5 λ). The same holds for the sum of the errors of c computations
    that round independently of each other, divided by √c (Hölder's inequality).

    A sum in blocks of b terms, whose n / b results are added in turn, has the bound of b + n / b terms.

    Args:
        terms: n, the number of terms of one sum. None outweighs all others.
        norm: ‖x‖₂ of the terms of each sum.
        sums: how many sums must all be within their bounds, with a probability of 1 − `failure`.
        computations: c, 2 if both sides of a comparison are rounded.
    """
    deviations = math.log(7.6 * sums / failure) / 1.5
    return deviations * unit_roundoff(dtype) * math.sqrt(computations * terms / 3) * norm


def solve_bound(matrix: Any, dtype: torch.dtype = torch.float64) -> float:
    """κ₂(A) n γ_{3n+1}: the error of a solution of A x = b by Cholesky's method, ‖x̂ − x‖₂ / ‖x‖₂.

    Theorem 10.4: x̂ solves (A + ΔA) x̂ = b with |ΔA| ≤ γ_{3n+1} |R̂ᵀ||R̂|, whose norm is at most n γ_{3n+1} ‖A‖₂ but for
    terms of order u². The bound for the inverse, column by column, is the same.

    Raises:
        ValueError: the condition number is so large that a solution may have no correct digit.
    """
    matrix = _float64(matrix)
    n = matrix.shape[-1]
    error = float(torch.linalg.cond(matrix)) * n * gamma(3 * n + 1, dtype)
    if error >= 0.5:
        raise ValueError(f"The system is too ill-conditioned for {dtype}: the bound on its error is {error:.2g}.")
    return error / (1 - error)  # ‖ΔA‖ changes the norm of the solution, too


def assert_within(found: Any, expected: Any, bound: Any) -> None:
    """Every element of `found` differs from `expected` by no more than its `bound`, a number or one for each element.

    Raises:
        AssertionError: one does not, or shapes differ, or a bound is not finite; names the worst element.
    """
    found, expected = _float64(found), _float64(expected)
    assert found.shape == expected.shape, f"found has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    bound = _float64(bound).expand(found.shape)
    assert bound.isfinite().all(), "a bound that is not finite allows everything"
    error = torch.where(found == expected, 0.0, (found - expected).abs())  # equal infinities are equal
    outside = ~(error <= bound)  # NaN is outside of every bound
    if not outside.any():
        return
    ratio = torch.where(outside, torch.nan_to_num(error / bound, nan=math.inf, posinf=math.inf), 0.0)
    worst = np.unravel_index(int(ratio.argmax()), tuple(found.shape))
    raise AssertionError(
        f"{int(outside.sum())} of {found.numel()} elements are outside of their bounds. The worst, at "
        f"{tuple(map(int, worst))}, is {float(found[worst])!r} and should be {float(expected[worst])!r}: a difference "
        f"of {float(error[worst]):.3g} = {float(ratio[worst]):.3g} times its bound of {float(bound[worst]):.3g}."
    )


def _float64(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64)
    return torch.as_tensor(np.asarray(values, dtype=np.float64))
