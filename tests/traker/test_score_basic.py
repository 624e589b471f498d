"""The score computers of the `trak` API."""

import numpy as np
import pytest
import torch

from hf_trak.errors import NonFiniteError, SingularGramError
from hf_trak.score_computers import AbstractScoreComputer, BasicScoreComputer, BasicSingleBlockScoreComputer


def exact(features: torch.Tensor, targets: torch.Tensor, lam: float = 0.0, normalized: bool = True) -> np.ndarray:
    """Scores in float64: X M tᵀ, where M is the inverse of XᵀX + λI divided by its mean absolute entry."""
    x, t = features.double().numpy(), targets.double().numpy()
    inverse = np.linalg.inv(x.T @ x + lam * np.eye(x.shape[1]))
    return x @ (inverse / np.abs(inverse).mean() if normalized else inverse) @ t.T


def run(computer: AbstractScoreComputer, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    accumulator = torch.zeros(len(features), len(targets))
    computer.get_scores(computer.get_x_xtx_inv(features, computer.get_xtx(features)), targets, accumulator)
    return accumulator


def relative_error(actual: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(actual.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("block", [7, 50, 20_000])
@pytest.mark.parametrize("lam", [0.0, 3.0])
def test_basic_equals_float64_for_any_block_size(block, lam):
    features, targets = torch.randn(120, 16), torch.randn(5, 16)
    computer = BasicScoreComputer(torch.float32, "cpu", CUDA_MAX_DIM_SIZE=block, lambda_reg=lam)
    assert relative_error(run(computer, features, targets), exact(features, targets, lam)) < 1e-5


def test_single_block_equals_float64_without_normalization():
    features, targets = torch.randn(120, 16), torch.randn(5, 16)
    computer = BasicSingleBlockScoreComputer(torch.float32, "cpu")
    assert relative_error(run(computer, features, targets), exact(features, targets, normalized=False)) < 1e-5


def test_scores_of_checkpoints_accumulate_in_place():
    features, targets = torch.randn(40, 8), torch.randn(5, 8)
    computer = BasicScoreComputer(torch.float32, torch.device("cpu"))
    accumulator = torch.full((40, 5), 2.0)
    address = accumulator.data_ptr()
    assert computer.get_scores(features, targets, accumulator) is None
    torch.testing.assert_close(accumulator, 2 + features @ targets.T)
    assert accumulator.data_ptr() == address


@pytest.mark.parametrize("cls", [BasicScoreComputer, BasicSingleBlockScoreComputer])
def test_half_precision_features_of_60000_rows(cls):
    """Their Gram matrix overflows float16 by far. It is kept in float32, and scores stay finite."""
    features = torch.randn(60_000, 16).mul_(30).to(torch.float16)
    targets = torch.randn(4, 16).mul_(30).to(torch.float16)
    computer = cls(torch.float16, "cpu")
    gram = computer.get_xtx(features)
    expected = features.double().T @ features.double()
    assert expected.diagonal().max() > 100 * torch.finfo(torch.float16).max
    assert gram.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(gram.double(), expected, rtol=1e-7, atol=0)  # rounded once, at the end
    scores = run(cls(torch.float32, "cpu"), features, targets)
    assert relative_error(scores, exact(features, targets, normalized=cls is BasicScoreComputer)) < 1e-4


def test_half_precision_results_are_the_rounded_float32_results():
    features, targets = torch.randn(300, 16).to(torch.float16), torch.randn(4, 16).to(torch.float16)
    scores = run(BasicScoreComputer(torch.float16, "cpu"), features, targets)
    assert relative_error(scores, exact(features, targets)) < 5e-3


@pytest.mark.parametrize("cls", [BasicScoreComputer, BasicSingleBlockScoreComputer])
@pytest.mark.parametrize("n", [3, 15, 16])
def test_fewer_examples_than_features_without_ridge_is_an_error(cls, n):
    features = torch.randn(n, 16)
    computer = cls(torch.float32, "cpu")
    gram = computer.get_xtx(features)
    with pytest.raises(SingularGramError, match="lambda_reg"):
        computer.get_x_xtx_inv(features, gram)
    ridge = BasicScoreComputer(torch.float32, "cpu", lambda_reg=0.1 * float(gram.trace()) / n)
    assert ridge.get_x_xtx_inv(features, gram).isfinite().all()


def test_duplicate_columns_and_rows_without_ridge_are_an_error():
    """There are enough rows, but their rank is too low."""
    computer = BasicScoreComputer(torch.float32, "cpu")
    for features in (torch.randn(100, 8).repeat(1, 2), torch.randn(10, 16).repeat(10, 1)):
        with pytest.raises(SingularGramError, match="singular"):
            computer.get_x_xtx_inv(features, computer.get_xtx(features))


@pytest.mark.parametrize("cls", [BasicScoreComputer, BasicSingleBlockScoreComputer])
def test_nan_in_features_is_named_at_the_first_step(cls):
    features = torch.randn(50, 8)
    features[33, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="row 33 "):
        cls(torch.float32, "cpu").get_xtx(features)
    with pytest.raises(SingularGramError, match="NaN"):
        cls(torch.float32, "cpu").get_x_xtx_inv(torch.randn(50, 8), torch.full((8, 8), float("nan")))
    with pytest.raises(NonFiniteError, match="row 33 "):
        cls(torch.float32, "cpu").get_scores(features, torch.randn(2, 8), torch.zeros(50, 2))


def test_overflow_of_the_result_dtype_is_an_error_and_leaves_the_accumulator():
    computer = BasicScoreComputer(torch.float16, "cpu")
    accumulator = torch.ones(2, 2, dtype=torch.float16)
    with pytest.raises(NonFiniteError, match=r"Row 1 .* overflows torch.float16"):
        computer.get_scores(torch.tensor([[1.0], [300.0]]), torch.tensor([[1.0], [300.0]]), accumulator)
    assert torch.equal(accumulator, torch.ones(2, 2, dtype=torch.float16))


def test_dtypes_follow_the_trak_api():
    features = torch.randn(50, 8)
    for dtype in (torch.float16, torch.float32, torch.float64):
        computer = BasicScoreComputer(dtype, "cpu")
        gram = computer.get_xtx(features)
        assert gram.dtype == torch.promote_types(dtype, torch.float32)
        assert computer.get_x_xtx_inv(features, gram).dtype == dtype


def test_construction_touches_no_device_and_checks_its_numbers():
    computer = BasicScoreComputer(torch.float16, "cuda:0")
    assert computer.CUDA_MAX_DIM_SIZE == 20_000 and computer.lambda_reg == 0.0
    with pytest.raises(ValueError, match="CUDA_MAX_DIM_SIZE"):
        BasicScoreComputer(torch.float32, "cpu", CUDA_MAX_DIM_SIZE=0)
    with pytest.raises(ValueError, match="lambda_reg"):
        BasicScoreComputer(torch.float32, "cpu", lambda_reg=-1)
