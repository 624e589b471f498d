"""XᵀX of a sample: drawn by row number and length, without bias, with its error stated, and never in silence."""

import logging
import math
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_trak.engines.engine import LocalEngine, over_shards
from hf_trak.errors import NonFiniteError, StoreError
from hf_trak.featurize.cluster import GRAM_SECONDS
from hf_trak.hub.index_files import file_bounds
from hf_trak.kernels.philox import philox
from hf_trak.runtime.processes import Processes
from hf_trak.scores import gram_sample
from hf_trak.scores.gram_sample import ROWS_PER_FEATURE, SAMPLED_FROM, sample_size, sampled_gram
from hf_trak.scores.ridge import RidgeSystem, _largest_ratio, ridge_lambda
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.solvers import choose_solver, solver_cost
from hf_trak.store.checkpoint_records import code_settings
from hf_trak.store.revised import RevisedStore
from hf_trak.store.shards import write_tensors
from hf_trak.store.store import GRAM_FILE, FeatureStore

N, K = 3000, 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_sample, "SAMPLED_FROM", 1000)
    monkeypatch.setattr(gram_sample, "ROWS_PER_FEATURE", 64)


def features(seed: int = 0) -> Tensor:
    """Make rows whose lengths are log-normal, and one that is longer than all others together."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(N, K, generator=generator) * torch.exp(torch.randn(N, 1, generator=generator))
    rows[:, :2] *= 5
    rows[1234] *= 3000 / rows[1234].norm()
    return rows


def make_store(
    path: Path, rows: Tensor, dtype: str = "float32", shard_size: int = 100, models: int = 1
) -> FeatureStore:
    config = {"train_size": len(rows), "proj_dim": K, "feature_dtype": dtype, "shard_size": shard_size, "seed": 5}
    store = FeatureStore.open(path, {**config, **code_settings(dtype)})
    for model_id in range(models):
        store.register_checkpoint(model_id, "a")
        shards = store.train(model_id)
        for index in range(len(shards)):
            part = shards.plan.rows(index)
            shards.write(index, rows[part.start : part.stop], torch.ones(len(part)))
    return store


def here(store: FeatureStore, parts: int = 1, backwards: bool = False):
    """Divide the shards of a store into parts, in one order or the other."""
    count = len(store.train(0))
    places = [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]

    def over(function, reduction):
        return reduce(reduction, [function(one) for one in (reversed(places) if backwards else places)])

    return over


def estimated(store: FeatureStore, over=None, model_id: int = 0):
    return sampled_gram(store, model_id, 64 * K, over or here(store), torch.device("cpu"))


def by_hand(rows: Tensor, weights: Tensor, model_id: int) -> tuple[Tensor, Tensor, int]:
    """Sum the sample row by row, with the generator in plain Python."""
    total, spread, count = torch.zeros(K, K).double(), torch.zeros(K, K).double(), 0
    rounded = [math.sqrt(2) ** (math.floor(2 * math.log2(weight)) + 1) for weight in weights.tolist()]
    low, high = 0.0, 1 / min(rounded)
    for _ in range(200):  # the factor with which 64 rows per feature are drawn on average
        middle = (low + high) / 2
        few = sum(min(1.0, middle * weight) for weight in rounded) < 64 * K
        low, high = (middle, high) if few else (low, middle)
    for number, (row, weight) in enumerate(zip(rows.double(), rounded, strict=True)):
        first, second, _, _ = philox(number, 0, 130, 5, model_id)
        likely = 1.0 if low * weight > 1 - 1e-9 else math.floor(low * weight * 2**32) / 2**32
        if first / 2**32 < likely:
            term = torch.outer(row, row) / likely
            total += term
            spread += (0 if likely == 1 else 1 - 2 * (second % 2)) * term
            count += 1
    return total, spread, count


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_the_sample_is_the_one_that_is_written_down(tmp_path, dtype):
    store = make_store(tmp_path, features(), dtype)
    shards = list(store.train(0))
    rows = torch.cat([shard.grads for shard in shards])
    lengths = rows.double().square().sum(dim=1)
    weights = lengths if dtype == "float32" else torch.cat([shard.coded.scale for shard in shards]).double().square()
    total, spread, count = by_hand(rows, weights, 0)
    found = estimated(store)
    norms = total.diagonal().sqrt()
    assert (
        (found.matrix - total).abs() / torch.outer(norms, norms)
    ).max() < 1e-7  # probabilities are whole numbers of 2⁻³²
    assert ((found.spread - spread).abs() / torch.outer(norms, norms)).max() < 1e-7
    assert found.sample == count and 0.1 * N < count < 0.3 * N
    assert found.trace == pytest.approx(float(total.trace()), rel=1e-7)


@pytest.mark.slow
def test_the_same_bits_for_any_division_and_engine_and_the_same_rows_for_any_shards(tmp_path):
    store = make_store(tmp_path / "a", features())
    expected = estimated(store)
    for over in (here(store, 3), here(store, 7, True), over_shards(LocalEngine(), store.train(0))):
        found = estimated(store, over)
        assert torch.equal(found.matrix, expected.matrix) and torch.equal(found.spread, expected.spread)
    other = estimated(make_store(tmp_path / "b", features(), shard_size=333))
    assert other.sample == expected.sample
    assert torch.allclose(other.matrix, expected.matrix, rtol=1e-11, atol=1e-11 * expected.trace)


@pytest.mark.slow
def test_no_bias_and_an_error_as_stated(tmp_path):
    """Over 60 checkpoints with the same rows: the mean is that of all rows, and D is as large as the error."""
    rows, times = features(), 60
    store = make_store(tmp_path, rows, shard_size=N, models=times)
    whole = rows.double().T @ rows.double()
    found = [estimated(store, model_id=model_id) for model_id in range(times)]
    errors = torch.stack([one.matrix - whole for one in found])
    deviation = errors.square().mean(dim=0).sqrt()
    assert (errors.mean(dim=0).abs() < 5 * deviation / math.sqrt(times) + 1e-9 * deviation.max()).all()
    system = RidgeSystem(whole, ridge_lambda(float(whole.trace()), N, K, 0.001))
    true = [_largest_ratio(error, system._cholesky) for error in errors]
    seen = [_largest_ratio(one.spread, system._cholesky) for one in found]
    assert 0.01 < sum(true) / times < 0.5
    # A mean of 60 norms of one law is off by a tenth at most; p < 1 makes D larger, by a half at most here.
    assert 0.85 < sum(seen) / sum(true) < 1.5


def test_scores_are_within_the_stated_error(tmp_path, caplog):
    rows = features()
    store = make_store(tmp_path, rows)
    processes = Processes(use_cpu=True)
    scorer = Scorer(store, processes, processes.device, 0.001)
    described = scorer.identity([0], [store.train(0)])
    with caplog.at_level(logging.INFO, "hf_trak"):
        gram = scorer.gram(0)
        system = scorer.system(0, gram)
    assert "estimated from" in caplog.text and f"of {N:,} rows" in caplog.text and f"{system.error:.2g}" in caplog.text
    assert described == scorer.identity([0], [store.train(0)])  # before and after it was summed
    assert described["checkpoints"][0]["gram"] == gram_sample.SAMPLE
    assert "sample" in str(scorer.report(0)) and scorer.report(0).error == system.error
    check_error(system, rows)


def check_error(system: RidgeSystem, rows: Tensor) -> None:
    """Compare scores for the first rows with those of all rows' XᵀX, and what they differ by with the stated error."""
    wide = rows.double()
    exact = RidgeSystem(wide.T @ wide, system.lam)
    change = (wide @ system.solve(rows[:50]).T - wide @ exact.solve(rows[:50]).T).abs()
    allowed = torch.outer(system.quadratic(rows), system.quadratic(rows[:50])).sqrt()
    assert system.error is not None
    assert 0 < float((change / allowed).max()) < system.error < 1


def test_a_revision_has_a_sample_of_its_own(tmp_path):
    """Also without the row that is longer than all others; the stated error is that of the rows it has."""
    rows, gone = features(), sorted({*range(0, 600, 3), 1234})
    base, added = make_store(tmp_path / "base", rows[:2000]), make_store(tmp_path / "added", rows[2000:])
    kept = torch.cat([torch.stack([rows[row] for row in range(2000) if row not in set(gone)]), rows[2000:]])
    processes = Processes(use_cpu=True)
    first = Scorer(base, processes, processes.device, 0.001).gram(0)
    revised = RevisedStore(tmp_path / "revision", {**base.config, "train_size": len(kept)}, base, gone, added)
    scorer = Scorer(revised, processes, processes.device, 0.001)
    gram = scorer.gram(0)
    assert gram.n == len(kept) and None not in (first.sample, gram.sample) and gram.trace < 0.5 * first.trace
    check_error(scorer.system(0, gram), kept)
    alone = make_store(tmp_path / "alone", kept)  # the same rows at the same places, in other shards
    assert torch.allclose(gram.matrix, estimated(alone).matrix, rtol=1e-11, atol=1e-11 * gram.trace)


def test_a_whole_matrix_stays_whole_when_rows_are_added(tmp_path):
    rows = features()
    base, added = make_store(tmp_path / "base", rows[:900]), make_store(tmp_path / "added", rows[900:])
    processes = Processes(use_cpu=True)
    Scorer(base, processes, processes.device, 0.001).gram(0)
    revised = RevisedStore(tmp_path / "revision", {**base.config, "train_size": N}, base, [], added)
    scorer = Scorer(revised, processes, processes.device, 0.001)
    gram = scorer.gram(0)
    assert gram.sample is None and "gram" not in scorer.identity([0], [base.train(0)])["checkpoints"][0]
    wide = rows.double()
    assert torch.allclose(gram.matrix, wide.T @ wide, rtol=1e-12)


def test_nothing_changes_below_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(gram_sample, "SAMPLED_FROM", N + 1)
    store = make_store(tmp_path, features())
    processes = Processes(use_cpu=True)
    scorer = Scorer(store, processes, processes.device, 0.1)
    gram = scorer.gram(0)
    assert gram.sample is None and gram.spread is None and torch.equal(gram.matrix, scorer._sum_gram(0))
    assert "gram" not in scorer.identity([0], [store.train(0)])["checkpoints"][0]
    assert scorer.system(0, gram).error == 0
    monkeypatch.setattr(gram_sample, "SAMPLED_FROM", N)  # a matrix of all rows is kept
    assert "gram" not in scorer.identity([0], [store.train(0)])["checkpoints"][0]
    assert scorer.gram(0).sample is None


def test_sizes(monkeypatch):
    monkeypatch.undo()
    assert (SAMPLED_FROM, ROWS_PER_FEATURE) == (1_000_000, 256)
    assert sample_size(999_999, 512) is None and sample_size(10**6, 512) == 131_072
    assert sample_size(10**6, 2048) is None  # more than half of the rows
    whole, part = (solver_cost(choose_solver("primal", None, n, 512, 0), n, 512, 1) for n in (999_999, 10**6))
    assert (whole.exact, part.exact) == (True, False) and part.disk == 2 * whole.disk
    assert part.multiply_adds < whole.multiply_adds / 7
    assert GRAM_SECONDS > 0


def test_files_of_samples_are_checked(tmp_path):
    store = make_store(tmp_path, features())
    found = estimated(store)
    store.write_gram(0, found.matrix, N, found.sample, found.spread)
    read = store.read_gram(0)
    assert read.sample == found.sample and torch.equal(read.spread, found.spread)
    path = store.checkpoint_dir(0) / GRAM_FILE
    bounds = file_bounds(store, f"checkpoint-0/{GRAM_FILE}")
    bounds.check(path.stat().st_size)
    identity = store._gram_identity(0)
    facts = {"n": N, "trace": found.trace}
    write_tensors(path, {"gram": found.matrix, "spread": found.spread}, identity, **facts, sample=N + 1)
    with pytest.raises(StoreError, match=r"estimated from 3001 rows. Expected a number up to 3000"):
        store.read_gram(0)
    write_tensors(path, {"gram": found.matrix}, identity, **facts, sample=5)
    with pytest.raises(StoreError, match="`spread` is missing"):
        store.read_gram(0)
    store.write_gram(0, found.matrix, N)
    bounds.check(path.stat().st_size)
    with pytest.raises(NonFiniteError, match="NaN"):
        store.write_gram(0, found.matrix, N, 5, found.spread / 0)


def test_classes_and_bounds():
    found = gram_sample.bounds(torch.zeros(2048), 10)
    assert not found.any()
    counts = torch.zeros(2048, dtype=torch.float64)
    counts[1024], counts[1026], counts[1100], counts[0] = 1000, 100, 2, 50  # w = 1, 2, and much
    found = gram_sample.bounds(counts, 122) / 2**32
    assert found[1100] == 1 and found[0] == 0
    assert float(found[1024]) == pytest.approx(120 / 1200, abs=1e-9) and found[1026] == pytest.approx(0.2, abs=1e-9)
    assert float((counts * found).sum()) == pytest.approx(122, abs=1e-5)
    assert (gram_sample.bounds(counts, 5000)[[1024, 1026, 1100]] == 2**32).all()


@pytest.mark.parametrize("k", [1, 3, 60])
def test_lanczos_finds_the_largest_eigenvalue(k):
    generator = torch.Generator().manual_seed(k)
    square = torch.randn(k, k, dtype=torch.float64, generator=generator)
    spread = square + square.T
    system = square @ square.T + torch.eye(k, dtype=torch.float64)
    factor = torch.linalg.cholesky(system)
    inverse = torch.linalg.inv(factor)
    expected = float(torch.linalg.eigvalsh(inverse @ spread @ inverse.T).abs().max())
    assert _largest_ratio(spread, factor) == pytest.approx(expected, rel=1e-3)


def test_a_row_that_is_not_finite_is_named(tmp_path, monkeypatch):
    store = make_store(tmp_path, features())

    def poisoned(shards, indices: Sequence[int]):
        shard = shards.read(indices[0])
        shard.features[7, 2] = math.nan
        return gram_sample.classes(shard)

    with pytest.raises(NonFiniteError, match="feature vector of row 107"):
        poisoned(store.train(0), [1])
