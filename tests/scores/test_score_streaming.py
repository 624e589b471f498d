"""Streamed scores equal the closed form in float64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hf_trak.errors import NonFiniteError, StoreError
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from hf_trak.scores.streaming import score_blocks, self_influence_blocks
from hf_trak.store.shard_set import Shard

N, K, M, CHECKPOINTS = 97, 24, 6, 3


def shards(features: torch.Tensor, q: torch.Tensor, size: int) -> Iterator[Shard]:
    for start in range(0, len(features), size):
        stop = min(start + size, len(features))
        yield Shard(start, stop, features[start:stop], q[start:stop])


@pytest.fixture
def problem():
    """Features with correlated columns, targets, q and λ of three checkpoints."""
    mixing = torch.randn(K, K) / K**0.5 + 0.2
    features = [torch.randn(N, K) @ mixing for _ in range(CHECKPOINTS)]
    targets = [torch.randn(M, K) @ mixing for _ in range(CHECKPOINTS)]
    qs = [torch.rand(N) for _ in range(CHECKPOINTS)]
    systems = []
    for x in features:
        gram = x.double().T @ x.double()
        systems.append(RidgeSystem(gram, ridge_lambda(float(gram.trace()), N, K, 0.1)))
    return features, targets, qs, systems


def closed_form(features, targets, qs) -> np.ndarray:
    """Compute TRAK scores by the formula, in float64, with λ = 0.1 · trace / min(n, k)."""
    products = []
    for x, t in zip(features, targets, strict=True):
        x, t = x.double().numpy(), t.double().numpy()
        gram = x.T @ x
        products.append(x @ np.linalg.inv(gram + 0.1 * np.trace(gram) / min(x.shape) * np.eye(K)) @ t.T)
    return np.mean(products, axis=0) * np.mean([q.double().numpy() for q in qs], axis=0)[:, None]


def assemble(blocks, rows: int) -> torch.Tensor:
    parts, expected_start = [], 0
    for start, stop, block in blocks:
        assert start == expected_start and len(block) == stop - start and block.dtype == torch.float32
        parts.append(block)
        expected_start = stop
    assert expected_start == rows
    return torch.cat(parts)


def assert_relative(actual: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(actual.double().numpy() - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("size", [1, 10, 96, 97, 1000])
def test_scores_equal_the_closed_form_for_any_shard_size(problem, size):
    features, targets, qs, systems = problem
    solved = [system.solve(t) for system, t in zip(systems, targets, strict=True)]
    blocks = score_blocks([shards(x, q, size) for x, q in zip(features, qs, strict=True)], solved)
    assert_relative(assemble(blocks, N), closed_form(features, targets, qs), 1e-5)


def test_mean_of_products_times_mean_of_q_not_mean_of_their_products(problem):
    features, targets, qs, systems = problem
    solved = [system.solve(t) for system, t in zip(systems, targets, strict=True)]
    scores = assemble(score_blocks([shards(x, q, 30) for x, q in zip(features, qs, strict=True)], solved), N)
    mixed = np.mean(
        [closed_form([x], [t], [q]) for x, t, q in zip(features, targets, qs, strict=True)],
        axis=0,
    )
    assert np.abs(scores.numpy() - mixed).max() > 0.05 * np.abs(mixed).max()


def test_self_influence_is_the_diagonal_of_scoring_the_train_examples(problem):
    features, _, qs, systems = problem
    blocks = self_influence_blocks([shards(x, q, 13) for x, q in zip(features, qs, strict=True)], systems)
    assert_relative(assemble(blocks, N), np.diag(closed_form(features, features, qs)), 1e-5)


def test_half_precision_features_are_scored_in_float32(problem):
    features, targets, qs, systems = problem
    half = [(x * 4096).to(torch.float16) for x in features]
    exact = [x.double() / 4096 for x in half]
    solved = [system.solve(t) / 4096 for system, t in zip(systems, targets, strict=True)]
    scores = assemble(score_blocks([shards(x, q, 20) for x, q in zip(half, qs, strict=True)], solved), N)
    expected = np.mean([(x @ a.T * 4096).numpy() for x, a in zip(exact, solved, strict=True)], axis=0)
    assert_relative(scores, expected * np.mean([q.numpy() for q in qs], axis=0)[:, None], 1e-5)


def test_one_shard_at_a_time_is_held(problem):
    features, targets, qs, systems = problem
    alive: set[int] = set()
    most = 0

    class Counted(Shard):
        def __post_init__(self) -> None:
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    def counted(x, q):
        nonlocal most
        for shard in shards(x, q, 10):
            item = Counted(shard.start, shard.stop, shard.grads, shard.out_to_loss)
            most = max(most, len(alive))
            yield item
            del item

    solved = [system.solve(t) for system, t in zip(systems, targets, strict=True)]
    assemble(score_blocks([counted(x, q) for x, q in zip(features, qs, strict=True)], solved), N)
    # each suspended reader still refers to the shard it gave out last
    assert most <= CHECKPOINTS + 1


def test_nan_never_leaves(problem):
    """A score that is not finite raises an error that names the training row."""
    features, targets, qs, systems = problem
    solved = [system.solve(t) for system, t in zip(systems, targets, strict=True)]
    broken = features[1].clone()
    broken[41, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="score of row 41 "):
        assemble(score_blocks([shards(x, qs[0], 10) for x in (features[0], broken, features[2])], solved), N)
    with pytest.raises(NonFiniteError, match="row 41 "):
        assemble(self_influence_blocks([shards(broken, qs[0], 10)], systems[:1]), N)
    q = qs[0].clone()
    q[7] = float("inf")
    with pytest.raises(NonFiniteError, match="score of row 7 "):
        assemble(score_blocks([shards(features[0], q, 10)], solved[:1]), N)


def test_checkpoints_cut_differently_or_incomplete_are_refused(problem):
    features, targets, qs, systems = problem
    solved = [system.solve(t) for system, t in zip(systems, targets, strict=True)][:2]
    first, second = features[:2]
    with pytest.raises(StoreError, match="rows 0 … 20 where checkpoint number 0 has rows 0 … 10"):
        assemble(score_blocks([shards(first, qs[0], 10), shards(second, qs[1], 20)], solved), N)
    with pytest.raises(StoreError, match="nothing where checkpoint number 0 has rows 90 … 97"):
        assemble(score_blocks([shards(first, qs[0], 10), shards(second[:90], qs[1][:90], 10)], solved), N)
    with pytest.raises(StoreError, match="rows 90 … 97, which checkpoint number 0 lacks"):
        assemble(score_blocks([shards(first[:90], qs[0][:90], 10), shards(second, qs[1], 10)], solved), 90)


def test_widths_must_fit(problem):
    features, targets, qs, systems = problem
    solved = [system.solve(t) for system, t in zip(systems, targets, strict=True)]
    with pytest.raises(ValueError, match=f"{K - 1} columns, its targets {K}"):
        next(score_blocks([shards(features[0][:, 1:], qs[0], 10)], solved[:1]))
