"""Which solver is chosen, that results say so, and what each one costs."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_jobs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trak_options import trak_config

from hf_trak import TrakAttributor, TrakConfig, estimate
from hf_trak.runtime.processes import Processes
from hf_trak.scores import dual, solvers
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.solvers import SolverChoice, choose_solver, solver_cost, solver_costs
from hf_trak.store.store import FeatureStore

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    "n, k, free, expected",
    [
        (262, 4096, 64 * GIB, ("dual", 262)),  # few rows: n × n, not k × k in every call
        (2048, 4096, 64 * GIB, ("dual", 2048)),
        (2049, 4096, 64 * GIB, ("primal", 4096)),
        (10, 1024, 64 * GIB, ("primal", 1024)),
        (10, 1026, 64 * GIB, ("dual", 10)),
        (10, 4096, 0, ("primal", 4096)),  # as before there were other solvers, whatever the memory is
        (10**6, 4096, 64 * GIB, ("primal", 4096)),
        (10, 4097, 64 * GIB, ("dual", 10)),
        (4097, 4097, 64 * GIB, ("primal", 4097)),
        (10**6, 16_384, 13 * GIB, ("primal", 16_384)),  # 3 · 8 · 16,384² = 6 GiB, in half of 13
        (10**6, 16_384, 11 * GIB, ("low_rank", 2048)),
        (10**6, 16_385, 640 * GIB, ("low_rank", 2048)),
        (16_383, 16_384, 13 * GIB, ("dual", 16_383)),
        (16_384, 16_384, 13 * GIB, ("primal", 16_384)),
        (10_000, 2**20, 5 * GIB, ("dual", 10_000)),  # 3 · 8 · 10⁸ = 2.2 GiB
        (10_000, 2**20, 4 * GIB, ("low_rank", 2048)),
        (16_384, 2**20, 13 * GIB, ("dual", 16_384)),
        (16_385, 2**20, 640 * GIB, ("low_rank", 2048)),
        (1000, 2**20, GIB, ("dual", 1000)),
        (1000, 2**20, 0, ("low_rank", 1000)),
    ],
)
def test_the_choice(n: int, k: int, free: int, expected: tuple[str, int]) -> None:
    choice = choose_solver("auto", None, n, k, free)
    assert (choice.kind, choice.size) == expected
    assert choose_solver("auto", None, n, k, free, gram_exists=True).kind == "primal"


def test_what_is_set_is_taken() -> None:
    assert choose_solver("primal", None, 10, 2**20, 0).kind == "primal"
    assert choose_solver("dual", None, 10**6, 16, 0) == SolverChoice("dual", 10**6, "it is set")
    assert choose_solver("low_rank", None, 100, 64, 0).size == 64
    assert choose_solver("low_rank", 12, 100, 64, 0).size == 12
    assert choose_solver("auto", 500, 10**6, 10**5, 0) == replace(
        choose_solver("auto", None, 10**6, 10**5, 0), size=500
    )
    for solver in ("low_rank", "auto"):
        with pytest.raises(ValueError, match=r"`solver_rank` is 101\. Expected an integer from 1 to 100"):
            choose_solver(solver, 101, 100, 10**5, 0)  # type: ignore[arg-type]


def test_the_reason_says_what_decided() -> None:
    assert "XᵀX is there" in choose_solver("auto", None, 10, 10**5, 0, gram_exists=True).reason
    assert "at most 16,384" in choose_solver("auto", None, 10**5, 10**5, 640 * GIB).reason
    assert "size 10,000 take 2.2 GiB" in choose_solver("auto", None, 10_000, 10**5, 2 * GIB).reason
    assert "half of 2.0 GiB" in choose_solver("auto", None, 10_000, 10**5, 2 * GIB).reason


# -- in a store ------------------------------------------------------------------------------------------------------

N, K = 20, 30


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    config = {"train_size": N, "proj_dim": K, "feature_dtype": "float32", "shard_size": 5}
    made = FeatureStore.open(tmp_path, config)
    made.register_checkpoint(0, "weights")
    for index in range(4):
        made.train(0).write(index, torch.randn(5, K), torch.ones(5))
    return made


def scorer(store: FeatureStore, *solver: Any) -> Scorer:
    return Scorer(store, Processes(use_cpu=True), CPU, 0.3, *solver)


def test_small_stores_are_solved_and_described_as_ever(store: FeatureStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_trak"):
        one = scorer(store)
        one.precondition(0, lambda: torch.ones(2, K), 2)
    assert {path.name for path in store.checkpoint_dir(0).glob("*.safetensors") if "train" not in path.name} == {
        "gram.safetensors"
    }
    assert [record.getMessage()[:17] for record in caplog.records] == ["Checkpoint 0: λ ="]
    keys = {
        "checkpoints",
        "config",
        "device",
        "lambda_relative",
        "scores_version",
        "threads",
    }
    assert set(one.identity([0], [store.train(0)])) == keys


def test_results_say_which_solver_they_come_from(store: FeatureStore) -> None:
    def identity(*solver: Any) -> Any:
        return scorer(store, *solver).identity([0], [store.train(0)]).get("solvers")

    assert identity("primal") is None
    assert identity("dual") == [{"kind": "dual"}]
    assert identity("low_rank", 7) == [{"algorithm": "subspace-1", "kind": "low_rank", "rank": 7}]


def test_memory_decides_once(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was chosen first holds for all that one scorer does, and the reason is in the log."""
    monkeypatch.setattr("hf_trak.scores.solvers.PLAIN_PRIMAL", 8)
    free = [10**9, 0]
    monkeypatch.setattr(solvers, "free_bytes", lambda device: free.pop(0))
    with caplog.at_level(logging.INFO, logger="hf_trak"):
        one = scorer(store)
        one.prepare(0)
        assert one.solvers.choice(0).kind == "dual" and len(free) == 1
    assert "solver dual of size 20: k = 30 is large, and n = 20 is small enough" in caplog.text
    assert scorer(store).solvers.choice(0).kind == "low_rank"


def test_a_gram_matrix_that_is_there_is_used(store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_trak.scores.solvers.PLAIN_PRIMAL", 8)
    monkeypatch.setattr(solvers, "free_bytes", lambda device: 0)
    assert scorer(store).solvers.choice(0).kind == "low_rank"
    scorer(store).gram(0)
    assert scorer(store).solvers.choice(0).kind == "primal"
    assert scorer(store).report(0).kind == "primal"


@pytest.mark.slow
def test_few_rows_never_make_a_matrix_of_features(tmp_path: Path) -> None:
    """With whole gradients of a large layer, P × P would be 1.3 TB; with the default k, 128 MiB for 20 rows."""
    torch.manual_seed(0)
    data = [(torch.randn(20_000), i % 20) for i in range(20)]
    for name, options in {"none": {"proj_type": "none"}, "default": {"feature_dtype": "float32"}}.items():
        config = trak_config(output_dir=str(tmp_path / name), use_cpu=True, **options)  # type: ignore[arg-type]
        attributor = TrakAttributor(nn.Linear(20_000, 20), config, data, task="image_classification").featurize()
        scored = attributor.attribute(data[:2], top_k=1)
        assert [row[0] for row in scored["trak_indices"][:]] == [0, 1]
        assert attributor.features.scorer.report(0).kind == "dual"
        files = {path.name for path in (tmp_path / name / "checkpoint-0").iterdir() if "train" not in path.name}
        assert "kernel.safetensors" in files and not any("gram" in file for file in files)


def test_the_setting_reaches_the_scores(tmp_path: Path) -> None:
    """The same scores from every exact solver. Each keeps its own file and its own results."""
    found = {}
    networks = store_jobs.models(1)
    for solver in ("auto", "dual", "low_rank"):
        attributor = store_jobs.make(tmp_path, solver=solver).featurize(networks)
        result = attributor.attribute(store_jobs.rows(3, 2), top_k=None).with_format("numpy")
        found[solver] = np.stack(result["trak_scores"][:])
        assert attributor.features.scorer.report(0).kind == ("primal" if solver == "auto" else solver)
    for solver, scores in found.items():
        # float32 products with float32 targets; a rank of 16 covers everything
        np.testing.assert_allclose(scores, found["auto"], rtol=1e-4, atol=1e-5 * np.abs(scores).max(), err_msg=solver)
    names = {path.name for path in (tmp_path / "checkpoint-0").glob("*.safetensors") if "train" not in path.name}
    assert names == {
        "gram.safetensors",
        "kernel.safetensors",
        "low_rank-16.safetensors",
    }


# -- costs -----------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.total += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("solver, rank", [("primal", None), ("dual", None), ("low_rank", 40)])
def test_costs_are_those_of_what_is_done(
    tmp_path: Path, solver: Any, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes on disk, and products; of factorizations and solutions of triangular systems nothing is counted."""
    monkeypatch.setattr(dual, "_TILE", 16)  # XXᵀ is computed in blocks, half of them
    n, k, m = 200, 600, 50
    config = {"train_size": n, "proj_dim": k, "feature_dtype": "float32", "shard_size": 64}
    store = FeatureStore.open(tmp_path, config)
    store.register_checkpoint(0, "weights")
    shards = store.train(0)
    for index in range(len(shards)):
        rows = len(shards.plan.rows(index))
        shards.write(index, torch.randn(rows, k), torch.ones(rows))
    one = scorer(store, solver, rank)
    cost = solver_cost(one.solvers.choice(0), n, k, m)
    with Products() as products:
        one.precondition(0, lambda: torch.ones(m, k), m)
    factorized = {
        "primal": k**3 // 6 + m * k * k,
        "dual": n**3 // 6 + m * n * n,
    }
    assert products.total == pytest.approx(cost.multiply_adds - factorized.get(solver, 0), rel=0.15)
    kept = [path for path in tmp_path.glob("checkpoint-0/*.safetensors") if "train" not in path.name]
    assert sum(path.stat().st_size for path in kept) == pytest.approx(cost.disk, rel=0.03)
    assert cost.exact == (solver in ("primal", "dual"))


def model() -> nn.Module:
    return nn.Linear(300, 400)


def test_an_estimate_names_the_solver_and_the_others() -> None:
    expected = estimate(model(), 5000, TrakConfig(proj_dim=65_536), checkpoints=2, eval_dataset=10)
    assert expected.solver.kind == "dual" and expected.solver.size == 5000
    assert [one.kind for one in expected.alternatives] == ["primal", "low_rank"]
    assert expected.stages["solver"].disk == pytest.approx(2 * 8 * 5000**2, rel=1e-3)
    assert expected.stages["solver"].memory > expected.solver.memory >= 3 * 8 * 5000**2
    primal = expected.alternatives[0]
    assert primal.memory == 3 * 8 * 65_536**2 and primal.disk == 8 * 65_536**2
    assert primal.multiply_adds > 5 * expected.solver.multiply_adds
    said = str(expected)
    assert "381.5 MiB" in said and "solver of the ridge: dual (5,000, memory" in said
    assert "; or primal (65,536, memory 96.0 GiB, disk 32.0 GiB" in said and "low_rank (2,048, not exact" in said
    small = estimate(model(), 5000, TrakConfig(proj_dim=64))
    assert small.solver.kind == "primal" and small.stages["solver"].disk == pytest.approx(8 * 64**2, abs=1000)


def test_an_estimate_follows_the_settings() -> None:
    options = TrakConfig(proj_dim=65_536, solver="low_rank-100")
    expected = estimate(model(), 5000, options)
    assert (expected.solver.kind, expected.solver.size) == ("low_rank", 100)
    assert [(one.kind, one.size) for one in expected.alternatives] == [
        ("primal", 65_536), ("dual", 5000),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="`solver_rank` is 100"):
        estimate(model(), 50, options)


def test_memory_grows_with_the_system_not_with_the_square_of_k() -> None:
    """At a million features, what is chosen fits where XᵀX would take terabytes."""
    chosen, others = solver_costs("auto", None, 10**6, 2**20, 100, 64 * GIB)
    assert chosen.kind == "low_rank" and chosen.memory < 64 * GIB < next(iter(others)).memory
    chosen, _ = solver_costs("auto", None, 4000, 2**20, 100, 64 * GIB)
    assert chosen.kind == "dual" and chosen.memory < 2 * GIB


def test_targets_of_any_dtype_reach_the_streamed_solvers(store: FeatureStore) -> None:
    rows = torch.randn(3, K)

    def solved(dtype: torch.dtype) -> Tensor:
        return scorer(store, "dual").precondition(0, lambda: rows.to(dtype), 3).values

    torch.testing.assert_close(solved(torch.float64), solved(torch.float32))
