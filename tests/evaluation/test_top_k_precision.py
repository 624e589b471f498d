"""Precision of the first rows, against a ridge regression whose leave-one-out effects have a closed form."""

from typing import Any

import numpy as np
import pytest

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.lds import top_k_precision

N, D, M = 120, 5, 7


def ridge() -> tuple[np.ndarray, np.ndarray]:
    """Effects of leaving out each row on f(z_j) = x_jᵀθ, `(N, M)`: by retraining, and in closed form.

    θ − θ₋ᵢ = A⁻¹xᵢrᵢ / (1 − hᵢ), with A = XᵀX + λI, residuals r and leverages hᵢ = xᵢᵀA⁻¹xᵢ.
    """
    rng = np.random.default_rng(0)
    x, targets = rng.normal(size=(N, D)), rng.normal(size=(M, D))
    y = x @ rng.normal(size=D) + rng.normal(size=N)

    def outputs(rows: np.ndarray) -> np.ndarray:
        return targets @ np.linalg.solve(x[rows].T @ x[rows] + 2 * np.eye(D), x[rows].T @ y[rows])

    every = np.arange(N)
    retrained = np.stack([outputs(every) - outputs(np.delete(every, i)) for i in every])
    inverse = np.linalg.inv(x.T @ x + 2 * np.eye(D))
    residuals, leverages = y - x @ inverse @ x.T @ y, np.einsum("ij,jk,ik->i", x, inverse, x)
    return retrained, (x * (residuals / (1 - leverages))[:, None]) @ inverse @ targets.T


RETRAINED, EXACT = ridge()


def test_exact_effects_find_the_true_first_rows() -> None:
    np.testing.assert_allclose(EXACT, RETRAINED, rtol=0, atol=1e-12)
    found = top_k_precision(EXACT, RETRAINED, k=[1, 10, 100])
    for k in (1, 10, 100):
        assert (found.per_target[k] == 1).all() and (found.mean[k].low, found.mean[k].high) == (1, 1)
    assert found.chance == {1: 1 / N, 10: 10 / N, 100: 100 / N} and found.rows == N


def test_precision_is_the_share_of_common_rows() -> None:
    noisy = EXACT + np.random.default_rng(1).normal(size=EXACT.shape) * EXACT.std()
    found = top_k_precision(noisy, RETRAINED, k=[10])
    common = [len(set(np.argsort(-noisy[:, j])[:10]) & set(np.argsort(-RETRAINED[:, j])[:10])) for j in range(M)]
    np.testing.assert_allclose(found.per_target[10], np.array(common) / 10)
    assert found.chance[10] < found.mean[10].low < found.mean[10].value < found.mean[10].high < 1
    assert found.mean[10].value == pytest.approx(np.mean(common) / 10)
    assert f"top 10 of {N}: {found.mean[10]}, chance 0.083" in str(found)
    plain = found.to_dict()
    assert plain["mean"]["10"]["value"] == found.mean[10].value and len(plain["per_target"]["10"]) == M
    # The lowest rows are no first rows.
    assert top_k_precision(-EXACT, RETRAINED, k=[10]).mean[10].value == 0


def test_random_scores_have_the_precision_of_chance() -> None:
    rng = np.random.default_rng(2)
    found = top_k_precision(rng.normal(size=(200, 150)), rng.normal(size=(200, 150)), k=[20, 50])
    # One target's precision deviates by less than √(.25 / k); 150 of them by a twelfth of that.
    assert found.mean[20].value == pytest.approx(0.1, abs=0.03)
    assert found.mean[50].value == pytest.approx(0.25, abs=0.03)


def test_only_rows_that_were_left_out_are_ranked() -> None:
    rows = [3, 90, 17, 44, 5, 61, 8]
    scores = EXACT.copy()
    scores[np.setdiff1d(np.arange(N), rows)] += 100  # these would be the first ones
    found = top_k_precision(scores, RETRAINED[rows], k=[2], rows=rows)
    assert found.mean[2].value == 1 and found.rows == 7 and found.chance[2] == 2 / 7
    in_wrong_order = top_k_precision(scores, RETRAINED[sorted(rows)], k=[2], rows=rows)
    assert in_wrong_order.mean[2].value < 1


def test_rows_of_equal_values_count_by_their_probability() -> None:
    """Of the rows 1, 1, 1, 0 three are tied for the first two places: each is there with probability 2/3."""
    truth = np.array([[3.0], [2.0], [1.0], [0.0]])
    scores = np.array([[1.0], [1.0], [1.0], [0.0]])
    assert top_k_precision(scores, truth, k=[2]).mean[2].value == pytest.approx(2 / 3)
    # One row is surely first, and the second place is tied between three: 1 + 1/3 of 2.
    scores = np.array([[5.0], [1.0], [1.0], [1.0]])
    assert top_k_precision(scores, truth, k=[2]).mean[2].value == pytest.approx((1 + 1 / 3) / 2)
    # Ties on both sides, in the same rows: the true one is among the chosen with probability 1/2.
    ties = np.array([[1.0], [1.0], [0.0], [0.0]])
    assert top_k_precision(ties, ties, k=[1]).mean[1].value == pytest.approx(1 / 2)
    assert top_k_precision(ties, ties, k=[2]).mean[2].value == 1


@pytest.mark.parametrize("k", [1, 10, 100])
def test_constant_scores_have_exactly_the_precision_of_chance(k: int) -> None:
    shares = top_k_precision(np.zeros((N, M)), RETRAINED, k=[k]).per_target[k]
    np.testing.assert_allclose(shares, k / N, rtol=1e-12)


def test_the_order_of_rows_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    coarse, truth, order = rng.integers(0, 4, size=(N, M)), rng.integers(0, 4, size=(N, M)), rng.permutation(N)
    one, other = top_k_precision(coarse, truth, k=[20]), top_k_precision(coarse[order], truth[order], k=[20])
    np.testing.assert_allclose(one.per_target[20], other.per_target[20], rtol=1e-12)


MATRIX = np.arange(12.0).reshape(6, 2)
BAD: list[tuple[Any, str]] = [
    (lambda: top_k_precision(MATRIX.T, MATRIX.T, k=[1]), r"shape \(2, 6\).*transposed"),
    (lambda: top_k_precision(MATRIX, MATRIX.T, k=[1]), r"`truth` has the shape \(2, 6\).*transposed"),
    (lambda: top_k_precision(MATRIX, MATRIX[:5], k=[1]), r"`truth` has the shape \(5, 2\). Expected \(6, 2\)"),
    (lambda: top_k_precision(MATRIX[:, 0], MATRIX, k=[1]), r"`scores` has the shape \(6,\)"),
    (lambda: top_k_precision(MATRIX, MATRIX), r"`k` is \[10, 100\] for 6 rows.*1 to 5"),
    (lambda: top_k_precision(MATRIX, MATRIX, k=[6]), r"`k` is \[6\]"),
    (lambda: top_k_precision(MATRIX, MATRIX, k=[0]), r"`k` is \[0\]"),
    (lambda: top_k_precision(MATRIX, MATRIX, k=[2, 2]), "distinct numbers"),
    (lambda: top_k_precision(MATRIX, MATRIX, k=[2.0]), r"`k` is \[2\.0\]"),  # type: ignore[list-item]
    (lambda: top_k_precision(MATRIX, MATRIX[:2], k=[1], rows=[0, 6]), r"`rows` is \[0, 6\].*0 to 5"),
    (lambda: top_k_precision(MATRIX, MATRIX[:2], k=[1], rows=[1, 1]), "distinct"),
    (lambda: top_k_precision(MATRIX, MATRIX, k=[1], rows=[1, 2]), r"Expected \(2, 2\)"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_are_named(bad: float) -> None:
    spoiled = MATRIX.copy()
    spoiled[4, 1] = bad
    with pytest.raises(NonFiniteError, match=r"`scores` holds NaN.*row 4 and target 1"):
        top_k_precision(spoiled, MATRIX, k=[1])
    with pytest.raises(NonFiniteError, match=r"`truth` holds NaN.*row 4 and target 1"):
        top_k_precision(MATRIX, spoiled, k=[1])


def test_more_targets_than_rows_are_meant_if_the_shape_says_so() -> None:
    assert top_k_precision(MATRIX.T, MATRIX.T, k=[1], shape=(2, 6)).mean[1].value == 1
