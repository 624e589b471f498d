"""The bounds of `rounding.py`: rounding keeps within them, and they are not larger than needed."""

import math

import numpy as np
import pytest
import torch
from rounding import (
    assert_within,
    gamma,
    likely_gamma,
    product_bound,
    random_walk_bound,
    solve_bound,
    sum_bound,
    unit_roundoff,
)
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def added(terms: Tensor) -> Tensor:
    """The sum over the last dimension, one term after the other, each addition rounded to the type of the terms."""
    total = torch.zeros_like(terms[..., 0])
    for column in terms.unbind(-1):
        total = total + column
    return total


def in_pairs(terms: Tensor) -> Tensor:
    """The sum of neighbours, of neighbours of sums, and so on."""
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = torch.nn.functional.pad(terms, (0, 1))
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_unit_roundoff_is_the_largest_error_of_one_operation(dtype: torch.dtype) -> None:
    u = unit_roundoff(dtype)
    one = torch.ones((), dtype=dtype)
    assert float(one + torch.tensor(u, dtype=dtype)) == 1.0  # a tie, to even
    assert float(one + torch.tensor(1.5 * u, dtype=dtype)) == 1.0 + 2 * u


@pytest.mark.parametrize("order", [added, in_pairs, lambda terms: added(terms.sort(-1).values), lambda t: t.sum(-1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_in_any_order_keep_within_their_bound(order, dtype: torch.dtype) -> None:
    for terms in (torch.randn(50, 200), torch.rand(50, 200), torch.randn(50, 200).exp()):
        terms = terms.to(dtype)
        assert_within(order(terms), terms.double().sum(-1), sum_bound(terms, dtype))


@pytest.mark.parametrize("n", [2, 10, 500])
def test_an_adversarial_sum_reaches_the_bound(n: int) -> None:
    """1 and then terms just below u, each lost whole: half of γ_{n−1} Σ|x_i| would not be enough."""
    u = unit_roundoff()
    terms = torch.full((n,), u * (1 - u))
    terms[0] = 1.0
    error = float(terms.double().sum() - added(terms).double())
    assert 0.99 * float(sum_bound(terms)) < error <= float(sum_bound(terms))


@pytest.mark.parametrize("n", [1, 30, 3000])
def test_products_keep_within_their_bound(n: int) -> None:
    left, right = torch.randn(20, n), torch.randn(n, 30)
    exact = left.double() @ right.double()
    bound = product_bound(left, right)
    assert_within(left @ right, exact, bound)
    assert_within(added(left[:, None] * right.T[None]), exact, bound)
    assert_within(in_pairs(left[:, None] * right.T[None]), exact, bound)


def test_mistakes_in_a_product_are_outside_of_its_bound() -> None:
    left, right = torch.randn(20, 300), torch.randn(300, 30)
    exact, bound = left.double() @ right.double(), 2 * product_bound(left, right)
    wrong_sign = left.clone()
    wrong_sign[:, 7] *= -1
    for found in (
        left[:, 1:] @ right[1:],  # a row is dropped
        wrong_sign @ right,
        left.half().float() @ right.half().float(),  # half precision
        left.bfloat16().float() @ right,
        left @ right + 1e-2,  # of products of size √300
    ):
        with pytest.raises(AssertionError, match="outside of their bounds"):
            assert_within(found, exact, bound)


def test_likely_gamma_is_exceeded_as_rarely_as_it_says() -> None:
    """10,000 chains of 400 multiplications by random numbers: the error of each is a product of 400 factors 1 + δ."""
    factors = 1 + torch.rand(10_000, 400) / 100
    found, exact = torch.ones(10_000), factors.double().prod(1)
    for column in factors.unbind(1):
        found = found * column
    error = ((found.double() - exact) / exact).abs()
    assert error.max() <= likely_gamma(400) < gamma(400) / 2
    for failure in (0.1, 0.01):
        assert (error > likely_gamma(400, failure=failure)).double().mean() <= failure
    # δ is spread over [−u, u] with a variance of at most u² / 3: no factor above 8 is given away
    assert error.max() > likely_gamma(400) / 8


def test_random_walk_bound_is_exceeded_as_rarely_as_it_says() -> None:
    """20,000 sums of 400 terms of random sign, one after the other."""
    terms = torch.randn(20_000, 400)
    error = (added(terms).double() - terms.double().sum(1)).abs()
    norms = terms.double().norm(dim=1)
    assert_within(error, torch.zeros_like(error), random_walk_bound(400, norms, sums=20_000))
    for failure in (0.1, 0.01, 0.001):
        assert (error > random_walk_bound(400, norms, failure=failure)).double().mean() <= failure
    found, other = added(terms), added(terms.flip(1))
    assert_within(found, other, random_walk_bound(400, norms, sums=20_000, computations=2))
    assert float(((found - other).abs() / random_walk_bound(400, norms, sums=20_000)).max()) > 1 / 8
    blocks = added(added(terms.view(20_000, 20, 20)))
    assert_within(blocks, terms.double().sum(1), random_walk_bound(20 + 20, norms, sums=20_000))
    # within a factor of 8 of the largest error, and far below the bound for any sum
    assert float((error / random_walk_bound(400, norms, sums=20_000)).max()) > 1 / 8
    assert (random_walk_bound(400, norms, sums=20_000) < sum_bound(terms)).all()


@pytest.mark.parametrize("exponent", [0, 2, 4])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_solutions_keep_within_their_bound(k: int, exponent: int) -> None:
    basis, _ = torch.linalg.qr(torch.randn(k, k, dtype=torch.float64))
    matrix = (basis * torch.logspace(0, -exponent, k, dtype=torch.float64)) @ basis.T
    matrix = ((matrix + matrix.T) / 2).to(torch.float32)
    targets = torch.randn(k, 7)
    found = torch.cholesky_solve(targets, torch.linalg.cholesky(matrix))
    exact = torch.linalg.solve(matrix.double(), targets.double())
    if exponent == 4 and k == 40:
        with pytest.raises(ValueError, match="too ill-conditioned"):
            solve_bound(matrix, torch.float32)
        return
    error = (found.double() - exact).norm(dim=0) / exact.norm(dim=0)
    assert float(error.max()) <= solve_bound(matrix, torch.float32)
    wrong = torch.linalg.solve(matrix.double() + 1e-6 * torch.eye(k), targets.double())
    assert float(((wrong - exact).norm(dim=0) / exact.norm(dim=0)).max()) > solve_bound(matrix)


def test_what_is_compared() -> None:
    assert_within(np.array([1.0, math.inf]), [1.0, math.inf], 0.0)
    assert_within(torch.tensor([[1.0, 2.0]]), [[1.5, 2.25]], torch.tensor([0.5, 0.25]))
    for found, expected, bound, message in (
        ([1.0, 2.0], [1.0, 2.5], 0.25, r"1 of 2 .* at \(1,\), is 2.0 and should be 2.5.* 2 times its bound of 0.25"),
        (3.0, 2.0, 0.5, r"at \(\), is 3.0"),
        ([math.nan], [1.0], 1e9, r"is nan"),
        ([math.nan], [math.nan], 1e9, r"is nan"),
        ([math.inf], [-math.inf], 1e9, r"is inf"),
        ([1.0], [2.0], 0.0, "inf times"),
        ([1.0], [1.0, 1.0], 1.0, "shape"),
        ([1.0], [1.0], math.inf, "not finite"),
        ([1.0], [1.0], math.nan, "not finite"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_within(found, expected, bound)


def test_too_many_operations_have_no_bound() -> None:
    assert gamma(0) == 0 and gamma(1) == pytest.approx(2**-24, rel=1e-6)
    assert gamma(1000, torch.float16) == pytest.approx(1000 / (2048 - 1000))
    with pytest.raises(ValueError, match=r"2048 operations in torch\.float16"):
        gamma(2048, torch.float16)
