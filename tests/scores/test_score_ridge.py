"""Accumulation of the Gram matrix, λ, and the factorized ridge system."""

import logging
import math
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from rounding import assert_within, product_bound, solve_bound
from store_jobs import TinyNet

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import NonFiniteError, SingularGramError
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from hf_trak.traker.score_computers import BasicScoreComputer


def spd(k: int, condition: float) -> torch.Tensor:
    """Make a float64 matrix with eigenvalues from 1 to 1/condition, evenly spaced on a logarithmic scale."""
    basis, _ = torch.linalg.qr(torch.randn(k, k, dtype=torch.float64))
    return basis @ torch.diag(torch.logspace(0, -math.log10(condition), k, dtype=torch.float64)) @ basis.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gram_is_exact_to_float64_for_every_feature_dtype(dtype):
    features = (torch.randn(200, 12) * 100).to(dtype)
    gram = BasicScoreComputer(torch.float64, "cpu", CUDA_MAX_DIM_SIZE=64).get_xtx(features)
    exact = features.double().numpy().T @ features.double().numpy()
    assert_within(gram, exact, 2 * product_bound(features.T, features, torch.float64))  # sums of 200 products


def test_gram_names_the_row_that_is_not_finite():
    features = torch.ones(103, 3)
    features[102, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="row 102 "):
        BasicScoreComputer(torch.float32, "cpu", CUDA_MAX_DIM_SIZE=64).get_xtx(features)


def test_lambda():
    assert ridge_lambda(600.0, n=30, k=20, lambda_relative=0.1) == pytest.approx(3.0)
    assert ridge_lambda(600.0, n=10, k=20, lambda_relative=0.1) == pytest.approx(6.0)
    assert ridge_lambda(600.0, n=10, k=20, lambda_relative=0.0) == 0.0
    with pytest.raises(NonFiniteError, match="trace"):
        ridge_lambda(float("inf"), 1, 1, lambda_relative=0.1)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_relative_lambda_makes_scores_independent_of_the_scale_of_features(scale):
    features, targets = torch.randn(50, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)

    def scores(factor: float) -> torch.Tensor:
        x, t = features * factor, targets * factor
        gram = x.T @ x
        return x @ RidgeSystem(gram, ridge_lambda(float(gram.trace()), 50, 8, 0.1)).solve(t).T

    torch.testing.assert_close(scores(scale), scores(1.0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_solve_and_quadratic_equal_numpy(lam):
    gram, targets = spd(16, 1e4), torch.randn(5, 16)
    system = RidgeSystem(gram, lam)
    matrix = gram.numpy() + lam * np.eye(16)
    expected = np.linalg.solve(matrix, targets.double().numpy().T).T
    relative = 2 * solve_bound(matrix)  # of κ = 10⁴ and 16 unknowns; NumPy's solution is rounded, too
    norms = np.linalg.norm(expected, axis=1)
    assert_within(np.linalg.norm(system.solve(targets).numpy() - expected, axis=1), np.zeros(5), relative * norms)
    quadratic = np.einsum("ij,ij->i", targets.double().numpy(), expected)
    assert_within(system.quadratic(targets), quadratic, relative * norms * targets.double().norm(dim=1).numpy())
    inverse = np.linalg.inv(matrix)
    norms = np.linalg.norm(inverse, axis=0)
    assert_within(np.linalg.norm(system.inverse().numpy() - inverse, axis=0), np.zeros(16), relative * norms)


@pytest.mark.parametrize("k", [1, 2, 5, 40])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e8])
def test_condition_estimate_is_a_tight_lower_bound(k, condition):
    for _ in range(10):
        matrix = spd(k, condition)
        exact = float(np.linalg.cond(matrix.numpy(), 1))
        estimate = RidgeSystem(matrix, 0.0).condition
        assert exact / 3 <= estimate <= exact * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 15, 31])
def test_rank_deficient_without_ridge_is_an_error_with_a_remedy(dtype, rank):
    """A singular matrix is refused although rounding often makes it barely positive definite."""
    for _ in range(10):
        features = torch.randn(rank, 32, dtype=torch.float64).repeat(3, 1)
        gram = (features.T @ features).to(dtype)
        with pytest.raises(SingularGramError, match="Set a positive λ"):
            RidgeSystem(gram, 0.0)
        regular = RidgeSystem(gram, ridge_lambda(float(gram.trace()), 3 * rank, 32, 0.1))
        assert regular.solve(torch.randn(2, 32)).isfinite().all()


def test_a_regular_matrix_of_many_features_passes_without_ridge():
    features = torch.randn(400, 64)
    gram = (features.T @ features).double()
    assert RidgeSystem(gram, 0.0).condition < 1e3
    assert RidgeSystem(gram.float(), 0.0).condition < 1e3
    assert RidgeSystem(spd(64, 1e9), 0.0).condition > 1e8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gram_is_an_error(value):
    gram = torch.eye(4, dtype=torch.float64)
    gram[1, 2] = gram[2, 1] = value
    with pytest.raises(SingularGramError, match="NaN or infinities"):
        RidgeSystem(gram, 1.0)


def test_non_finite_rows_are_named():
    system = RidgeSystem(torch.eye(3, dtype=torch.float64), 0.0)
    rows = torch.zeros(5, 3)
    rows[3, 2] = float("inf")
    with pytest.raises(NonFiniteError, match="target feature vector of row 3 "):
        system.solve(rows)
    with pytest.raises(NonFiniteError, match="row 10 "):
        system.quadratic(rows, start=7)


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        RidgeSystem(torch.ones(3, 2), 0.0)
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(rows, 3\)"):
        RidgeSystem(torch.eye(3), 0.0).solve(torch.ones(2, 4))


def test_the_log_tells_lambda_and_the_condition_number(tmp_path, caplog):
    """λ and the condition number are logged for every checkpoint, equal to those of its features on disk."""
    args = TrakConfig(str(tmp_path), proj_dim=8, use_cpu=True, lambda_relative=0.05, budget="fast")
    rows = Dataset.from_dict({"pixel_values": torch.randn(20, 6).tolist(), "labels": [i % 3 for i in range(20)]})
    models = [TinyNet(), TinyNet()]
    attributor = TrakAttributor(models[0], args, train_dataset=rows, task="image_classification").featurize(models)
    with caplog.at_level(logging.INFO, logger="hf_trak"):
        attributor.attribute(rows.select(range(2)), top_k=3, checkpoints=models)
    said = [record.getMessage() for record in caplog.records if "condition number" in record.getMessage()]
    assert len(said) == 2
    for model_id, line in enumerate(said):
        found = re.fullmatch(r"Checkpoint (\d): λ = (\S+), condition number of XᵀX \+ λI about (\S+)\.", line)
        assert found is not None and int(found[1]) == model_id
        x = torch.cat([shard.grads for shard in attributor.features.store.train(model_id)]).double()
        gram = x.T @ x
        lam = 0.05 * float(gram.trace()) / 8
        assert float(found[2]) == pytest.approx(lam, rel=1e-5)
        exact = float(torch.linalg.cond(gram + lam * torch.eye(8, dtype=torch.float64), 1))
        assert exact / 3 < float(found[3]) < exact * 1.01
