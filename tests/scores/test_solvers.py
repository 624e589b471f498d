"""Solvers of the ridge regression agree: exact ones with each other, the others within the error that they state; with
the same bits for any number of processes, and after an interruption."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import assert_within
from store_jobs import start_group
from torch import Tensor

from hf_trak.errors import NonFiniteError, SingularGramError, StoreError
from hf_trak.runtime.processes import Processes
from hf_trak.scores import dual, subspace, training_features
from hf_trak.scores.dual import DualSystem, extreme_eigenvalues
from hf_trak.scores.gram import ProductSum, power_above
from hf_trak.scores.low_rank import Factors, LowRankSystem, overlaps_of
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.subspace import SubspaceIteration, random_normals, random_signs, residual_bound
from hf_trak.scores.training_features import TrainingFeatures
from hf_trak.store.checkpoint_records import code_settings
from hf_trak.store.shards import write_tensors
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import FeatureStore

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

CPU = torch.device("cpu")
M = 5
SHAPES = [(40, 90), (90, 40), (48, 48)]
SPECTRA: dict[str, Callable[[int], Tensor]] = {
    "flat": lambda size: torch.ones(size, dtype=torch.float64),
    "1/i": lambda size: 1 / torch.arange(1, size + 1, dtype=torch.float64),
    "1/i²": lambda size: 1 / torch.arange(1, size + 1, dtype=torch.float64) ** 2,
}
"""Eigenvalues of XᵀX."""


def features(n: int, k: int, spectrum: str = "1/i", seed: int = 0) -> Tensor:
    """X `(n, k)`, float32, with singular values √spectrum."""
    generator = torch.Generator().manual_seed(seed)
    size = min(n, k)
    left, right = (torch.randn(rows, size, generator=generator, dtype=torch.float64) for rows in (n, k))
    return ((torch.linalg.qr(left)[0] * SPECTRA[spectrum](size).sqrt()) @ torch.linalg.qr(right)[0].T).float()


def make_store(
    directory: Path, rows: Tensor, shard_size: int = 7, dtype: str = "float32", checkpoints: int = 1
) -> FeatureStore:
    n, k = rows.shape
    config = {"train_size": n, "proj_dim": k, "feature_dtype": dtype, "shard_size": shard_size, "seed": 3}
    store = FeatureStore.open(directory, {**config, **code_settings(dtype)})
    for model_id in range(checkpoints):
        store.register_checkpoint(model_id, f"weights {model_id}")
        shards = store.train(model_id)
        for index in range(len(shards)):
            part = shards.plan.rows(index)
            values = rows[part.start : part.stop] * (1 + model_id)
            shards.write(index, values, torch.linspace(0.5, 1.5, n)[part.start : part.stop])
    return store


def scorer(
    store: FeatureStore,
    solver: Any = "auto",
    rank: int | None = None,
    lambda_relative: float = 0.3,
) -> Scorer:
    return Scorer(store, Processes(use_cpu=True), CPU, lambda_relative, solver, rank)


def stored(store: FeatureStore) -> Tensor:
    """X as it is read, in float64."""
    return torch.cat([shard.grads for shard in store.train(0)]).double()


def exact(store: FeatureStore, lam: float) -> Tensor:
    """(XᵀX + λI)⁻¹, from the eigenvalues of XᵀX."""
    x = stored(store)
    values, vectors = torch.linalg.eigh(x.T @ x)
    return (vectors / (values + lam)) @ vectors.T


def targets(k: int) -> Tensor:
    return torch.randn(M, k, generator=torch.Generator().manual_seed(5))


def solved(one: Scorer, rows: Tensor) -> Tensor:
    """t (XᵀX + λI)⁻¹ in float64, before it is rounded to float32."""
    if one.solvers.choice(0).kind == "primal":
        gram = one.gram(0)
        assert gram is not None
        return one.system(0, gram).solve(rows)
    return one.solvers.solve(one.solvers.make(0), rows)


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest ‖found − expected‖ / ‖expected‖ of a row."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def bytes_of(directory: Path, pattern: str) -> dict[str, str]:
    """Digests of files."""
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.rglob(pattern))}
    assert found
    return found


# -- exact solvers ---------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_primal_and_dual_agree(tmp_path: Path, shape: tuple[int, int], spectrum: str) -> None:
    """Errors are those of float64 times the condition number, of 10⁵ at most."""
    store = make_store(tmp_path, features(*shape, spectrum))
    rows, x = targets(shape[1]), stored(store)
    for lam in (1e-3, 0.3, 10.0):
        primal, other = (scorer(store, kind, lambda_relative=lam) for kind in ("primal", "dual"))
        assert relative(solved(other, rows), solved(primal, rows)) < 1e-8
        system = other.solvers.make(0)
        expected = (x @ exact(store, system.lam) * x).sum(1)
        assert float((system.quadratic(x) / expected - 1).abs().max()) < 1e-8
        assert float((system.training_quadratic(range(len(store.train(0)))) / expected - 1).abs().max()) < 1e-8
        # in float32, each with its own rounding
        found, same = other.self_influence([0]), primal.self_influence([0])
        torch.testing.assert_close(found, same, rtol=4 * 2.0**-24, atol=0.0)


@pytest.mark.few(4)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lambda_and_condition_number_are_the_same(tmp_path: Path, shape: tuple[int, int], spectrum: str) -> None:
    """In the 2-norm for all but the primal solver, whose 1-norm lies between that and k times that."""
    store = make_store(tmp_path, features(*shape, spectrum))
    n, k = shape
    x = stored(store)
    lam = 0.01 * float(x.square().sum()) / min(n, k)
    condition = float(torch.linalg.cond(x.T @ x + lam * torch.eye(k, dtype=torch.float64)))
    for kind in ("dual", "low_rank"):
        report = scorer(store, kind, lambda_relative=0.01).report(0)
        assert report.lam == pytest.approx(lam, rel=1e-12)
        # eigenvalues are rounded relative to the largest one, in float32 for the low rank
        assert report.condition == pytest.approx(condition, rel=1e-4 if kind == "low_rank" else 1e-9)
    report = scorer(store, "primal", lambda_relative=0.01).report(0)
    assert report.lam == pytest.approx(lam, rel=1e-12)
    assert condition / 3 <= report.condition <= k * condition


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int1"])
def test_stored_features_are_what_is_solved_with(tmp_path: Path, dtype: str) -> None:
    """Half precision and codes are read as they are, not as the gradients that they came from."""
    store = make_store(tmp_path, features(30, 64), dtype=dtype)
    rows = targets(64)
    found = {kind: solved(scorer(store, kind), rows) for kind in ("primal", "dual", "low_rank")}
    lam = scorer(store, "primal").report(0).lam
    for kind, one in found.items():
        assert relative(one, rows.double() @ exact(store, lam)) < (1e-5 if kind == "low_rank" else 1e-9), kind


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4", "int2", "int1"])
def test_pieces_are_what_the_shards_hold(tmp_path: Path, dtype: str) -> None:
    """Any columns of codes are decoded by themselves, from the blocks that they lie in."""
    k = 4096 + 3 if dtype == "int1" else 1003  # several blocks of 512 bytes
    store = make_store(tmp_path, torch.randn(9, k), shard_size=5, dtype=dtype)
    rows = TrainingFeatures(store.train(0), Processes(use_cpu=True), CPU)
    whole = stored(store)
    for columns in (range(k), range(8), range(3, 11), range(500, 1003), range(k - 1, k), range(512, 513)):
        for together in (None, 2):
            pieces = list(rows.pieces([0, 1], columns, together))
            assert torch.equal(torch.cat([piece for _, piece in pieces]), whole[:, columns.start : columns.stop])
            assert [start for start, _ in pieces] == ([0, 5] if together is None else [0, 2, 4, 5, 7])


def test_an_ensemble_of_several_solvers(tmp_path: Path) -> None:
    """One checkpoint with a Gram matrix, one without: means of scores and of self-influence as everywhere."""
    store = make_store(tmp_path, features(30, 50), checkpoints=2)
    primal, mixed = scorer(store, "primal"), scorer(store, "primal")
    for model_id, kind in enumerate(("primal", "dual")):
        mixed.solvers.solver = kind
        mixed.solvers.choice(model_id)
    torch.testing.assert_close(mixed.self_influence([0, 1]), primal.self_influence([0, 1]), rtol=1e-6, atol=0.0)
    rows = targets(50)
    scores = []
    for one in (primal, mixed):
        preconditioned = [one.precondition(model_id, lambda: rows, M) for model_id in (0, 1)]
        scores.append(torch.cat([block for _, _, block in one.blocks([0, 1], preconditioned)]))
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=1e-5 * float(scores[0].abs().max()))


def test_a_large_ridge_keeps_small_self_influence(tmp_path: Path) -> None:
    """1 − λ(K + λI)⁻¹ would lose every digit."""
    store = make_store(tmp_path, features(20, 30))
    x, lam = stored(store), 1e14
    found = scorer(store, "dual", lambda_relative=lam * 20 / float(x.square().sum())).self_influence([0])
    expected = (x.square().sum(1) / lam) * torch.linspace(0.5, 1.5, 20)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.few(3)
@pytest.mark.parametrize("size, columns", [(1, 3), (30, 20), (700, 900), (1100, 1200)])
def test_largest_eigenvalues(size: int, columns: int) -> None:
    """Large matrices go to an iteration; a gap of 1 % between the first two is enough for nine digits."""
    scales = torch.ones(columns, dtype=torch.float64)
    scales[0] = 30
    x = torch.randn(size, columns, dtype=torch.float64) * scales
    found = extreme_eigenvalues(x @ x.T, None)
    assert found["smallest_eigenvalue"] == 0
    assert found["largest_eigenvalue"] == pytest.approx(float(torch.linalg.norm(x, 2)) ** 2, rel=1e-9)
    assert extreme_eigenvalues(torch.zeros(size, size, dtype=torch.float64), None)["largest_eigenvalue"] == 0


# -- low rank --------------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rank_that_covers_everything_is_exact(tmp_path: Path, shape: tuple[int, int], spectrum: str) -> None:
    """But for the rounding of V to float32, which moves XᵀX by at most 2⁻²³ √(trace · σ₁²), and a by that over λ."""
    store = make_store(tmp_path, features(*shape, spectrum))
    one = scorer(store, "low_rank")
    system, rows, x = one.solvers.make(0), targets(shape[1]), stored(store)
    assert isinstance(system, LowRankSystem)
    trace, largest = float(x.square().sum()), float(torch.linalg.norm(x, 2)) ** 2
    bound = 2.0**-23 * math.sqrt(trace * largest) / system.lam
    assert bound < 2e-5
    assert relative(solved(one, rows), rows.double() @ exact(store, system.lam)) < bound
    assert system.factors.captured == pytest.approx(1, abs=1e-6)
    assert system.error < 100 * bound


@pytest.mark.few(2)
@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_errors_stay_within_their_bound(tmp_path: Path, spectrum: str, rank: int) -> None:
    for number, shape in enumerate(SHAPES):
        store = make_store(tmp_path / str(number), features(*shape, spectrum))
        for lam in (0.3, 30.0):
            system = scorer(store, "low_rank", rank, lambda_relative=lam).solvers.make(0)
            assert isinstance(system, LowRankSystem)
            check_factors(system.factors, stored(store), float(SPECTRA[spectrum](min(shape))[rank]))
            check_errors(system, store)


def left_out(factors: Factors, x: Tensor) -> Tensor:
    """XᵀX without the eigenvalues that are kept."""
    wide = factors.vectors.double()
    return x.T @ x - (wide * factors.eigenvalues) @ wide.T


def check_factors(factors: Factors, x: Tensor, least: float) -> None:
    """The approximation is a good one, from below, and says how good it is. `least` is the largest eigenvalue that an
    approximation of this rank has to leave out."""
    spread = torch.linalg.eigvalsh(left_out(factors, x))
    assert float(spread[0]) > -1e-7  # Ĝ ≼ G, but for the rounding of V
    assert float(spread[-1]) < 1.5 * least
    # never too small; too large by (√D / c)^{1/3} at most, with D ≤ 90 equal eigenvalues left out and c = 0.55
    assert float(spread[-1]) <= factors.residual <= 2.6 * float(spread[-1])
    assert factors.captured == pytest.approx(1 - float(spread.sum()) / factors.trace, abs=1e-6)


def check_errors(system: LowRankSystem, store: FeatureStore) -> None:
    """Scores of rows for targets and for each other are off by no more than the bound, which is worth something."""
    x = stored(store)
    assert system.error == pytest.approx(system.factors.residual / (system.lam + system.factors.residual))
    every = torch.cat([targets(x.shape[1]).double(), x])
    whole = exact(store, system.lam)
    found, expected = x @ system.solve(every).T, x @ whole @ every.T
    scale = torch.outer(system.quadratic(x), system.quadratic(every)).sqrt()
    assert_within(found, expected, system.error * scale)
    # the direction that is left out reaches it, up to the factor in `check_factors`
    direction = torch.linalg.eigh(left_out(system.factors, x))[1][:, -1:].T
    own = float(system.quadratic(direction))
    assert (own - float(direction @ whole @ direction.T)) / own > 0.3 * system.error


def test_the_bound_is_kept_by_construction() -> None:
    """‖Eᑫω‖ for matrices E with one eigenvalue: far below it with a chance of 10⁻⁶ only, and often below it."""
    below = 0
    for seed in range(200):
        normals = random_normals(30, subspace.PROBES, seed, 0)
        powers = torch.zeros_like(normals)
        powers[0] = 0.7**3 * normals[0]  # E = 0.7 e₁e₁ᵀ
        bound = residual_bound(powers)
        assert bound >= 0.7
        below += bound < 1.6 * 0.7
    assert below > 50


def test_what_the_low_rank_says_of_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(tmp_path, features(40, 60, "1/i²"))
    with caplog.at_level(logging.INFO, logger="hf_trak"):
        report = scorer(store, "low_rank", 8).report(0)
    assert report.kind == "low_rank" and report.size == 8
    values = SPECTRA["1/i²"](40)
    assert report.captured == pytest.approx(float(values[:8].sum() / values.sum()), abs=1e-3)
    assert report.error is not None and 0 < report.error < 1
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert (
        f"8 eigenvalues have {report.captured:.2%} of trace" in said
        and f"at most {report.error:.2g} times the geometric mean" in said
    )
    assert report.to_dict()["captured"] == report.captured


def test_vectors_that_are_not_orthonormal_are_solved_with_as_they_are() -> None:
    """The inverse of V diag(σ²) Vᵀ + λI for any V, such as one rounded to float32."""
    vectors, values = torch.randn(20, 6), torch.rand(6, dtype=torch.float64).sort(descending=True).values
    system = LowRankSystem(Factors(vectors, values, overlaps_of(vectors), 1.0, 0.0), 0.1)
    wide = vectors.double()
    inverse = torch.linalg.inv((wide * values) @ wide.T + 0.1 * torch.eye(20, dtype=torch.float64))
    rows = targets(20).double()
    assert relative(system.solve(rows), rows @ inverse) < 1e-10
    torch.testing.assert_close(system.quadratic(rows), (rows @ inverse * rows).sum(1), rtol=1e-10, atol=0.0)


def test_features_without_a_direction(tmp_path: Path) -> None:
    """Rank 2 where 8 are asked for, and columns of zeros: eigenvalues and vectors of zero, no NaN."""
    rows = torch.zeros(20, 30)
    rows[:, 3] = torch.arange(20)
    rows[:, 7] = 1
    store = make_store(tmp_path, rows)
    one = scorer(store, "low_rank", 8)
    system = one.solvers.make(0)
    assert isinstance(system, LowRankSystem)
    assert int((system.factors.eigenvalues > 1e-6).sum()) == 2
    assert relative(solved(one, targets(30)), targets(30).double() @ exact(store, system.lam)) < 1e-5


# -- the same bits ---------------------------------------------------------------------------------------------------


class Backwards(Processes):
    """One process that takes everything in the reverse order."""

    def share(self, count: int) -> Any:
        return range(count - 1, -1, -1)


@pytest.mark.parametrize("kind, rank", [("dual", None), ("low_rank", 6)])
def test_the_order_of_shards_changes_no_bit(
    tmp_path: Path, kind: Any, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dual, "_TILE", 8)
    monkeypatch.setattr(dual, "_SLICE_NUMBERS", 33 * 10)
    monkeypatch.setattr(training_features, "_COLUMN_SLICE", 7)
    monkeypatch.setattr(training_features, "PIECE_NUMBERS", 200)
    found = []
    for name, processes in (("forwards", Processes(use_cpu=True)), ("backwards", Backwards(use_cpu=True))):
        store = make_store(tmp_path / name, features(33, 60))
        one = Scorer(store, processes, CPU, 0.3, kind, rank)
        found.append((solved(one, targets(60)), bytes_of(tmp_path / name, "*.safetensors")))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_integer_sums_are_as_exact_as_float64() -> None:
    """And do not depend on the order, where sums in float64 do."""
    left, right = torch.randn(300, 20).double() * torch.logspace(-4, 4, 20).double(), torch.randn(300, 6).double()
    scales = power_above(left.square().sum(0) * 4), power_above(right.square().sum(0))
    totals = []
    for order in (range(30), range(29, -1, -1), torch.randperm(30).tolist()):
        total = ProductSum(*scales)
        for piece in order:
            rows = slice(10 * piece, 10 * piece + 10)
            total.add(left[rows], right[rows], strip=7)
        totals.append(total.result())
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0], totals[2])
    # each piece is rounded to 2⁻⁵³ of the product of the scales, which are below 4 and 2 times the norms
    norms = torch.outer(left.norm(dim=0), right.norm(dim=0))
    assert float(((totals[0] - left.T @ right).abs() / norms).max()) < 30 * 8 * 2.0**-53
    plain = [left[10 * i : 10 * i + 10].T @ right[10 * i : 10 * i + 10] for i in range(30)]
    assert not torch.equal(sum(plain[1:], plain[0]), sum(plain[-2::-1], plain[-1]))


def test_random_vectors_are_a_function_of_seed_and_checkpoint() -> None:
    signs = random_signs(20_000, 130, seed=2**40 + 1, model_id=3)
    assert signs.abs().eq(1).all()
    # 20,000 rows: five standard deviations, for 130² products
    off = (signs.T @ signs / 20_000 - torch.eye(130)).abs()
    assert float(off.max()) < 5 / math.sqrt(20_000)
    assert torch.equal(random_signs(300, 5, 2**40 + 1, 3), signs[:300, :5])
    normals = random_normals(20_000, 6, 1, 0)
    assert float((normals.T @ normals / 20_000 - torch.eye(6)).abs().max()) < 5 * math.sqrt(2 / 20_000)
    assert torch.equal(random_normals(300, 6, 1, 0), normals[:300])
    for seed, model_id in ((2, 0), (1, 1)):
        assert not torch.equal(random_normals(300, 6, seed, model_id), normals[:300])
        assert not torch.equal(random_signs(300, 6, seed, model_id), random_signs(300, 6, 1, 0))


def run_all(directory: Path) -> dict[str, Any]:
    """Every solver in this process group: digests of what was saved, solved, and asked."""
    store = FeatureStore.load(directory)
    found: dict[str, Any] = {}
    for kind, rank in (("dual", None), ("low_rank", 6)):
        one = scorer(store, kind, rank)
        rows = one.precondition(0, lambda: targets(60), M)
        scores = torch.cat([block for _, _, block in one.blocks([0], [rows], everywhere=True)])
        for name, value in (("rows", rows.values), ("scores", scores), ("self", one.self_influence([0]))):
            found[f"{kind} {name}"] = hashlib.sha256(value.numpy().tobytes()).hexdigest()
        found[f"{kind} report"] = one.report(0).to_dict()
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        make_store(directory, features(33, 60))
    alone = {"value": run_all(directories[0])}
    assert [job.wait() for job in start_group(tmp_path, 2, run_all, directories[1])] == [alone] * 2
    assert bytes_of(directories[0], "*.safetensors") == bytes_of(directories[1], "*.safetensors")


# -- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", range(subspace.PASSES))
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the pass after `passes` of them, which are not repeated."""
    rows = features(33, 60)
    whole = make_store(tmp_path / "whole", rows)
    scorer(whole, "low_rank", 6).prepare(0)
    store = make_store(tmp_path / "killed", rows)
    calls: list[int] = []
    run = SubspaceIteration._pass

    def counted(self: SubspaceIteration, done: int) -> Callable[[], None]:
        if len(calls) == passes:
            calls.append(-1)
            raise KeyboardInterrupt
        calls.append(done)
        return run(self, done)

    monkeypatch.setattr(SubspaceIteration, "_pass", counted)
    with pytest.raises(KeyboardInterrupt):
        scorer(store, "low_rank", 6).prepare(0)
    states = list((tmp_path / "killed").rglob("*.passes.safetensors"))
    assert len(states) == (passes > 0)
    scorer(store, "low_rank", 6).prepare(0)
    assert calls == [*range(passes), -1, *range(passes, subspace.PASSES)]
    assert bytes_of(tmp_path / "killed", "low_rank*") == bytes_of(tmp_path / "whole", "low_rank*")
    assert not list((tmp_path / "killed").rglob("*.passes.safetensors"))


def test_what_is_saved_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, features(33, 60))
    kinds: list[tuple[Any, int | None]] = [("dual", None), ("low_rank", 6)]
    before = [solved(scorer(store, kind, rank), targets(60)) for kind, rank in kinds]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint-0/*")}
    monkeypatch.setattr(TrainingFeatures, "gram_times", None)
    monkeypatch.setattr(dual, "kernel", None)
    after = [solved(scorer(store, kind, rank), targets(60)) for kind, rank in kinds]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint-0/*")} == files


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["primal", "dual", "low_rank"])
def test_no_ridge_with_fewer_rows_than_features_is_an_error(tmp_path: Path, kind: Any) -> None:
    store = make_store(tmp_path, features(20, 30))
    one = scorer(store, kind, lambda_relative=0.0)
    with pytest.raises(SingularGramError, match=r"λ = 0 is singular: .*Set a positive λ"):
        one.precondition(0, lambda: targets(30), M)


@pytest.mark.parametrize("kind, lam", [("dual", 1e-17), ("low_rank", 1e-8)])
def test_a_ridge_below_rounding_is_an_error(tmp_path: Path, kind: Any, lam: float) -> None:
    store = make_store(tmp_path, features(20, 30))
    with pytest.raises(SingularGramError, match=r"condition number is about .* Set a positive λ"):
        scorer(store, kind, lambda_relative=lam * 20 / float(stored(store).square().sum())).report(0)


@pytest.mark.parametrize("kind", ["dual", "low_rank"])
def test_rows_that_are_not_finite_are_named(tmp_path: Path, kind: Any) -> None:
    store = make_store(tmp_path, features(20, 30))
    shards = store.train(0)
    rows = shards.read(1).grads.clone()
    rows[4, 17] = float("nan")
    write_tensors(shards.path(1), {"grads": rows, "out_to_loss": torch.ones(7)}, shards.identity, start=7, stop=14)
    with pytest.raises(NonFiniteError, match="feature vector of row 11 "):
        scorer(store, kind).prepare(0)
    assert not list(tmp_path.rglob("kernel*")) and not list(tmp_path.rglob("low_rank*"))


@pytest.mark.parametrize("kind", ["dual", "low_rank"])
def test_targets_and_rows_are_checked(tmp_path: Path, kind: Any) -> None:
    system = scorer(make_store(tmp_path, features(20, 30)), kind).solvers.make(0)
    bad = targets(30)
    bad[3, 2] = float("inf")
    with pytest.raises(NonFiniteError, match="target feature vector of row 3 "):
        system.solve(bad)
    with pytest.raises(NonFiniteError, match="row 10 "):
        system.quadratic(bad, start=7)
    with pytest.raises(ValueError, match=r"\(5, 31\).*\(rows, 30\)"):
        system.solve(torch.ones(5, 31))


@pytest.mark.parametrize("rank", [21, 1000])
def test_a_rank_above_the_number_of_eigenvalues_is_an_error(tmp_path: Path, rank: int) -> None:
    store = make_store(tmp_path, features(20, 30))
    with pytest.raises(ValueError, match=rf"`solver_rank` is {rank}. Expected an integer from 1 to 20"):
        scorer(store, "low_rank", rank).prepare(0)


def flipped(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


NAMES = {"dual": "kernel", "low_rank": "low_rank-6"}


@pytest.mark.parametrize("place", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("kind", NAMES)
def test_damaged_files_are_refused(tmp_path: Path, kind: Any, place: float) -> None:
    store = make_store(tmp_path, features(20, 30))
    rank = {"dual": None, "low_rank": 6}[kind]
    rows = solved(scorer(store, kind, rank), targets(30))
    path = tmp_path / "checkpoint-0" / f"{NAMES[kind]}.safetensors"
    flipped(path, place)
    with pytest.raises(StoreError, match=rf"{NAMES[kind]}\.safetensors .*Delete"):
        solved(scorer(store, kind, rank), targets(30))
    path.unlink()
    assert torch.equal(solved(scorer(store, kind, rank), targets(30)), rows)


def interrupted(store: FeatureStore, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    run = SubspaceIteration._pass

    def stop(self: SubspaceIteration, done: int) -> Callable[[], None]:
        if done == passes:
            raise KeyboardInterrupt
        return run(self, done)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SubspaceIteration, "_pass", stop)
        scorer(store, "low_rank", 6).prepare(0)


@pytest.mark.parametrize("place", [0.0, 0.02, 0.9])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_a_damaged_state_is_refused(
    tmp_path: Path, passes: int, place: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, features(20, 30))
    interrupted(store, monkeypatch, passes)
    path = tmp_path / "checkpoint-0" / "low_rank-6.passes.safetensors"
    flipped(path, place)
    with pytest.raises(StoreError, match=r"low_rank-6\.passes\.safetensors .*Delete"):
        scorer(store, "low_rank", 6).prepare(0)
    path.unlink()
    scorer(store, "low_rank", 6).prepare(0)


def test_files_of_other_features_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed from rows that have changed since, finished or not."""
    store = make_store(tmp_path, features(20, 30))
    for kind, rank in (("dual", None), ("low_rank", 5)):
        scorer(store, kind, rank).prepare(0)
    interrupted(store, monkeypatch, 3)
    make_store(tmp_path, features(20, 30, seed=1))
    for kind, rank in (("dual", None), ("low_rank", 5), ("low_rank", 6)):
        with pytest.raises(StoreError, match=r"belongs to another run.*content"):
            scorer(store, kind, rank).solvers.make(0)


def test_every_file_can_be_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, features(20, 30))
    files = SolverFiles(store, 0)
    assert list(files.findings(True)) == []
    for kind, rank in (("primal", None), ("dual", None), ("low_rank", 5)):
        scorer(store, kind, rank).prepare(0)
    interrupted(store, monkeypatch, 3)
    names = [
        "kernel", "low_rank-5", "low_rank-6.passes",
    ]  # fmt: skip
    assert [one.path.name for one in files.findings(True)] == [f"{name}.safetensors" for name in names]
    assert {one.state for one in files.findings(True)} == {"intact"}
    assert {one.state for one in files.findings(False)} == {"unchecked"}
    for number, path in enumerate(files.paths()):
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], b"", content[:-1] + bytes([content[-1] ^ 1])):
            path.write_bytes(damaged)
            states = [one.state for one in files.findings(True)]
            assert states.pop(number) == "damaged" and set(states) == {"intact"}
        path.write_bytes(content)
    make_store(tmp_path, features(20, 30, seed=1))
    found = list(SolverFiles(store, 0).findings(True))
    assert {one.state for one in found} == {"damaged"} and all("another run" in one.detail for one in found)


def test_facts_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path, features(20, 30))
    files = SolverFiles(store, 0)
    processes = Processes(use_cpu=True)
    rows = TrainingFeatures(store.train(0), processes, CPU)
    scorer(store, "dual").prepare(0)
    matrix = dual.read_kernel(rows, files)
    with pytest.raises(NonFiniteError, match=r"kernel\.safetensors has NaN or infinite"):
        files.write("kernel", {"kernel": matrix}, {"kind": "kernel"}, {"trace": math.nan})
    files.write("kernel", {"kernel": matrix}, {"kind": "kernel"}, {"trace": 1.0})
    with pytest.raises(StoreError, match=r"`largest_eigenvalue` is None\. Expected a finite number"):
        DualSystem(rows, files, 1.0)
    (tmp_path / "checkpoint-0" / "low_rank-6.passes.safetensors").unlink(missing_ok=True)
    identity = {"algorithm": subspace.ALGORITHM, "kind": "passes", "rank": 6, "seed": 3}
    files.write("low_rank-6.passes", {"column_squares": torch.ones(30)}, identity, {"passes": 9, "trace": 1.0})
    with pytest.raises(StoreError, match=r"9 passes are done\. Expected 1 to 4"):
        scorer(store, "low_rank", 6).prepare(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
