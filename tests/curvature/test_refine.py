"""Refined targets: conjugate gradients against direct solves, alone and in company, through kills and processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import store_jobs
import torch
from curvature_runs import assembled, error, rows_of, written_curvature
from dense_curvature import log_odds, minus_cross_entropy, sample_gradients
from store_jobs import Job, start_group
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from trak_options import trak_config

from hf_trak import Exact, TrakAttributor
from hf_trak.curvature.conjugate_gradients import (
    REASONS,
    Refinement,
    Solutions,
    checked_refinement,
    damping_terms,
    summary,
)
from hf_trak.errors import NonFiniteError
from hf_trak.featurize import exact, refining
from hf_trak.featurize.definition import drawn_rows
from hf_trak.modelout_functions import FunctionModelOutput
from hf_trak.store import atomic
from hf_trak.store.sealed import read_sealed

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

KILLED = -signal.SIGKILL
TO_THE_END = {"steps": 200, "tolerance": 1e-8}


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.body(pixel_values)


class Question:
    """A classifier with training rows and targets, and its Gauss-Newton matrix written out."""

    def __init__(self, n: int = 90, m: int = 6, dtype: torch.dtype = torch.float32) -> None:
        self.model = Net(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4)).to(dtype)
        self.inputs, self.labels = (torch.randn(n + m, 5) + 0.3).to(dtype), torch.randint(4, (n + m,))
        self.n = n
        self.train = rows_of(pixel_values=self.inputs[:n], labels=self.labels[:n])
        self.targets = rows_of(pixel_values=self.inputs[n:], labels=self.labels[n:])

    def attributor(self, directory: Path, **options: Any) -> TrakAttributor:
        defaults = {"use_cpu": True, "shard_size": 32, "per_device_batch_size": 16}
        args = trak_config(str(directory), **{**defaults, **options})
        return TrakAttributor(self.model, args, train_dataset=self.train, task="image_classification")

    def scores(self, directory: Path, refine: Any, targets: Any = None, **options: Any) -> Tensor:
        """Scores `(n, m)`."""
        own = self.attributor(directory, **options)
        scored = own.attribute(self.targets if targets is None else targets, method=Exact(refine=refine), top_k=None)
        return torch.tensor(scored["trak_scores"][:]).T

    def gauss_newton(self, rows: list[int]) -> Tensor:
        """The mean over rows of Jᵀ (diag(p) − p pᵀ) J, `(P, P)`, float64."""
        parameters = {name: value.detach().double() for name, value in self.model.named_parameters()}

        def logits(given: dict[str, Tensor], one: Tensor) -> Tensor:
            return functional_call(self.model, given, (one[None],))[0]

        inputs = self.inputs[rows].double()
        found = vmap(jacrev(logits), (None, 0))(parameters, inputs)
        derivatives = torch.cat([one.flatten(2) for one in found.values()], 2)
        p = torch.stack([logits(parameters, one) for one in inputs]).softmax(1)
        hessians = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        return torch.einsum("bcp,bcd,bdq->pq", derivatives, hessians, derivatives) / len(rows)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of minus the loss of training rows, and of the targets' margins, float64."""
        parts = (slice(0, self.n), minus_cross_entropy), (slice(self.n, None), log_odds)
        first, second = (sample_gradients(self.model, self.inputs[at], self.labels[at], of) for at, of in parts)
        return first, second


def refined_files(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.rglob(f"refined-*/{pattern}"))


def report(directory: Path) -> list[dict[str, Any]]:
    """What is told of every target."""
    return [one for path in refined_files(directory, "*.json") for one in read_sealed(path)["targets"]]


# -- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damping", "dtype"), [pytest.param(0.1, torch.float64, marks=pytest.mark.slow), (10.0, torch.float32)]
)
def test_refined_scores_are_those_of_a_direct_solve(tmp_path: Path, damping: float, dtype: torch.dtype) -> None:
    """With little damping the system is so stiff that a weight in float32 is not exact enough."""
    question = Question(dtype=dtype)
    scores = question.scores(tmp_path, Refinement(rows=1000, damping=damping, **TO_THE_END))
    terms = damping_terms(written_curvature(tmp_path), damping)
    train, targets = question.gradients()
    matrix = question.gauss_newton(list(range(question.n))) + terms.diag()
    assert error(scores, train @ torch.linalg.solve(matrix, targets.T)) < 1e-5
    found = report(tmp_path)
    assert all(one["residual"] <= 1e-6 and one["unrefined"] > 0.01 for one in found)
    plain = question.scores(tmp_path, None, curvature_damping=damping)
    assert error(scores, plain) > 0.1, "there was something to refine"


def test_damping_is_that_of_the_curvature(tmp_path: Path) -> None:
    """P is the damped curvature whose damping D is, so that both systems have the same one."""
    question = Question()
    own = question.attributor(tmp_path).fit_curvature()
    curvature = written_curvature(tmp_path)
    matrix = assembled(curvature) + damping_terms(curvature, 0.3).diag()
    gradients = torch.randn(3, curvature.numel)
    expected = torch.linalg.solve(matrix, gradients.double().T).T
    assert error(curvature.precondition(gradients, 0.3), expected) < 1e-5
    assert own.features.layout.total == curvature.numel


@pytest.mark.slow
def test_a_sample_of_rows(tmp_path: Path) -> None:
    question = Question()
    refinement = Refinement(rows=40, damping=1.0, **TO_THE_END)
    rows = drawn_rows(len(question.train), refinement.rows, 0)
    assert len(set(rows)) == 40 and rows == sorted(rows) and rows != list(range(40))
    assert drawn_rows(len(question.train), 20, 0) != rows[:20], "drawn from all rows"
    scores = question.scores(tmp_path, refinement)
    train, targets = question.gradients()
    matrix = question.gauss_newton(rows) + damping_terms(written_curvature(tmp_path), 1.0).diag()
    assert error(scores, train @ torch.linalg.solve(matrix, targets.T)) < 1e-5


def test_one_step_keeps_the_ranking(tmp_path: Path) -> None:
    """It finds the best multiple of the answer without refinement."""
    question = Question()
    one = question.scores(tmp_path, Refinement(steps=1, damping=0.1))
    plain = question.scores(tmp_path, None, curvature_damping=0.1)
    multiples = (one * plain).sum(0) / plain.square().sum(0)
    assert error(one, plain * multiples) < 1e-5
    assert float(multiples.min()) > 0
    assert {entry["stopped"] for entry in report(tmp_path)} == {"steps"}


@pytest.mark.slow
def test_empirical_labels(tmp_path: Path) -> None:
    """The matrix of the data's gradients is refined with products of the same gradients; the task has no loss."""
    question = Question()
    task = FunctionModelOutput(lambda output, batch: minus_cross_entropy(output, batch["labels"]))
    args = trak_config(str(tmp_path), use_cpu=True, curvature_labels="empirical")
    own = TrakAttributor(question.model, args, train_dataset=question.train, task=task)
    refinement = Refinement(damping=1.0, **TO_THE_END)
    scored = own.attribute(question.targets, method=Exact(refine=refinement), top_k=None)
    both = sample_gradients(question.model, question.inputs, question.labels, minus_cross_entropy)
    train, targets = both[: question.n], both[question.n :]
    matrix = train.T @ train / question.n + damping_terms(written_curvature(tmp_path), 1.0).diag()
    expected = train @ torch.linalg.solve(matrix, targets.T)
    weights = torch.ones(1)  # a function has q = 1
    assert error(torch.tensor(scored["trak_scores"][:]).T, expected * weights) < 1e-5


# -- targets in company --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_targets_do_not_depend_on_their_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, in files of two, and alone: float32, a few steps, in which rounding grows."""
    question = Question(n=30)
    refinement = Refinement(steps=8, tolerance=0.0, damping=1.0)
    together = question.scores(tmp_path / "together", refinement)
    numel = sum(one.numel() for one in question.model.parameters())
    monkeypatch.setattr(exact, "TARGET_SHARD_BYTES", 2 * 4 * numel)
    apart = question.scores(tmp_path / "apart", refinement)
    assert len(refined_files(tmp_path / "apart", "refined-0*.safetensors")) == 3
    some = range(1, len(question.targets), 4)
    alone = torch.cat([question.scores(tmp_path / str(i), refinement, [question.targets[i]]) for i in some], 1)
    scale = together.abs().amax(0)
    assert float(((apart - together).abs() / scale).max()) < 2e-5
    assert float(((alone - together[:, some]).abs() / scale[some]).max()) < 2e-5


@pytest.mark.slow
def test_easy_targets_wait_for_none(tmp_path: Path) -> None:
    """Targets stop by themselves, and none goes on because another has to."""
    question = Question(m=12)
    question.scores(tmp_path, Refinement(steps=60, tolerance=0.05, damping=0.1))
    steps = [one["steps"] for one in report(tmp_path)]
    assert len(set(steps)) > 1
    assert all(one["residual"] <= 0.05 and one["stopped"] == "tolerance" for one in report(tmp_path))


# -- the iterations, without a model -------------------------------------------------------------------------------


def system(size: int = 30, m: int = 4) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """A positive matrix, right-hand sides, and a preconditioner."""
    half = torch.randn(size, size, dtype=torch.float64)
    matrix = half @ half.T / size + 0.1 * torch.eye(size, dtype=torch.float64)
    diagonal = matrix.diagonal().clone()
    return matrix, torch.randn(m, size, dtype=torch.float64), lambda rows: rows / diagonal.to(rows.dtype)


def solved(matrix: Tensor, gradients: Tensor, precondition: Callable[[Tensor], Tensor], **options: Any) -> Solutions:
    state = Solutions.start(gradients, precondition)
    while len(state.running):
        products = state.directions[state.running] @ matrix
        state.advance(products, precondition, **{"steps": 100, "tolerance": 1e-10, **options})
    return state


def stopped(state: Solutions) -> list[str]:
    return [one.stopped for one in state.report()]


def test_iterations_reach_the_solution() -> None:
    matrix, gradients, precondition = system()
    state = solved(matrix, gradients, precondition)
    assert error(state.found, torch.linalg.solve(matrix, gradients.T).T) < 1e-8
    assert stopped(state) == ["tolerance"] * 4
    for one, gradient in zip(state.report(), gradients, strict=True):
        unrefined = gradient - precondition(gradient) @ matrix
        norm = float((unrefined @ precondition(unrefined) / (gradient @ precondition(gradient))).sqrt())
        assert one.unrefined == pytest.approx(norm, rel=1e-9)
    assert "relative residual" in summary(state.report()) and "tolerance 4" in summary(state.report())


def test_negative_curvature_ends_a_target_alone() -> None:
    """A matrix with one negative direction: whoever meets it keeps what it has found before, or P⁻¹g."""
    matrix = torch.diag(torch.tensor([-1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    gradients = torch.tensor([[1.0, 0, 0, 0], [0, 1, 1, 1], [0.3, 1, 1, 1]], dtype=torch.float64)
    state = solved(matrix, gradients, lambda rows: rows)
    assert stopped(state) == ["negative curvature", "tolerance", "negative curvature"]
    assert torch.equal(state.found[0], gradients[0])
    assert error(state.found[1], torch.tensor([0, 1 / 2, 1 / 3, 1 / 4], dtype=torch.float64)) < 1e-12
    assert bool(state.found[2].abs().sum() > 0) and bool(torch.isfinite(state.found).all())
    assert state.report()[0].steps == 0


def test_zero_and_stagnation() -> None:
    matrix, gradients, precondition = system()
    gradients[1] = 0
    state = solved(matrix.float(), gradients.float(), precondition, tolerance=0.0, steps=1000)
    assert stopped(state)[1] == "zero gradient" and not bool(state.found[1].any())
    assert {stopped(state)[i] for i in (0, 2, 3)} == {"stagnation"}
    assert max(one.steps for one in state.report()) < 200
    assert error(state.found, torch.linalg.solve(matrix, gradients.T).T) < 1e-4
    assert summary([]) == "no target has a gradient"


def test_the_tightest_limit_stops() -> None:
    matrix, gradients, precondition = system()
    assert stopped(solved(matrix, gradients, precondition, steps=3)) == ["steps"] * 4
    assert {one.steps for one in solved(matrix, gradients, precondition, steps=3).report()} == {3}
    loose = solved(matrix, gradients, precondition, tolerance=0.5).report()
    assert all(one.residual <= 0.5 and one.steps < 30 for one in loose)
    assert REASONS[0] == "running"


# -- what is refused -----------------------------------------------------------------------------------------------


def test_arguments(tmp_path: Path) -> None:
    question = Question()
    with pytest.raises(ValueError, match=r"`refine` is 'newton'. Expected 'cg'.*use `curvature='hybrid'`"):
        question.scores(tmp_path, "newton")
    with pytest.raises(ValueError, match=r"`refine` is 3. Expected 'cg'"):
        question.scores(tmp_path, 3)
    with pytest.raises(ValueError, match=r"`curvature` is 'hybrid', with `refine='cg'`.*Set `curvature='ekfac'`"):
        question.scores(tmp_path, "cg", curvature="hybrid")
    with pytest.raises(
        ValueError, match=r"`curvature` is 'identity', with `refine='cg'`. Expected a fitted curvature"
    ):
        question.scores(tmp_path, "cg", curvature="identity")
    for options, message in (
        ({"steps": 0}, "`steps` is 0"),
        ({"rows": 2.5}, r"`rows` is 2\.5"),
        ({"tolerance": -1.0}, r"`tolerance` of a refinement is -1\.0"),
        ({"damping": float("nan")}, "`damping` of a refinement is nan"),
        ({"form": "both"}, "`form` of a refinement is 'both'"),
    ):
        with pytest.raises(ValueError, match=message):
            Refinement(**options)


def test_text() -> None:
    assert checked_refinement(None) is None
    assert checked_refinement("cg") == Refinement()
    assert checked_refinement("cg, steps=3,damping=0.5,form=twice") == Refinement(steps=3, damping=0.5, form="twice")
    for text, message in (
        ("cg,steps", r"`refine` has the option 'steps'. Expected `name=value`"),
        ("cg,step=3", r"`refine` has the option 'step=3'"),
        ("cg,steps=many", r"`refine` has the option 'steps=many'. Expected a number after `=`"),
    ):
        with pytest.raises(ValueError, match=message):
            checked_refinement(text)


def test_a_target_without_a_gradient(tmp_path: Path) -> None:
    question = Question()
    targets = [*question.targets[:2], {"pixel_values": torch.zeros(5), "labels": torch.tensor(0)}]
    nn.init.zeros_(question.model.body[3].weight)
    with torch.no_grad():  # the last layer's inputs are zero for this row alone, and nothing before it counts
        question.model.body[0].bias.zero_()
    args = {"grad_wrt": ["body.3.weight"]}
    with pytest.raises(ValueError, match="Target 2 has the gradient zero"):
        question.scores(tmp_path, "cg", targets, **args)


def test_a_product_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = Question()
    products = refining.GaussNewton.products
    calls: list[int] = []

    def third_is_nan(self: Any, batch: Any, directions: Tensor) -> Tensor:
        calls.append(len(directions))
        return products(self, batch, directions) * (torch.nan if len(calls) == 3 else 1)

    monkeypatch.setattr(refining.GaussNewton, "products", third_is_nan)
    with pytest.raises(NonFiniteError, match="one of the training rows 2 to 82 is NaN or infinite"):
        question.scores(tmp_path, "cg")


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """They are noticed before anything is refined."""
    question = Question()
    with torch.no_grad():
        question.model.body[3].weight[1, 2] = torch.nan
    with pytest.raises(NonFiniteError):
        question.scores(tmp_path, "cg")


@pytest.mark.slow
def test_options_make_files_of_their_own(tmp_path: Path) -> None:
    """Another option is another result, and a known one costs nothing."""
    question = Question()
    first = question.scores(tmp_path, Refinement(steps=2))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert not list(tmp_path.rglob("gradients-*")) and not list(tmp_path.rglob("refined-steps"))
    second = question.scores(tmp_path, Refinement(steps=3))
    assert not torch.equal(first, second)
    assert torch.equal(question.scores(tmp_path, Refinement(steps=2)), first)
    assert {path: path.stat().st_mtime_ns for path in files} == files


@pytest.mark.slow
def test_groups(tmp_path: Path) -> None:
    """The mean of refined targets."""
    question = Question()
    refinement = Refinement(damping=1.0)
    each = question.scores(tmp_path, refinement)
    scored = question.attributor(tmp_path).attribute(
        question.targets, method=Exact(refine=refinement), group_by="all", top_k=None
    )
    assert error(torch.tensor(scored["trak_scores"][:])[0], each.mean(1)) < 1e-5


# -- processes and kills ---------------------------------------------------------------------------------------------


def job(directory: Path, steps: int = 4) -> dict[str, str]:
    """Refine three targets in files of two, and digest scores and refined targets."""
    torch.manual_seed(5)
    attributor = store_jobs.make(directory)
    exact.TARGET_SHARD_BYTES = 2 * 4 * attributor.features.layout.total
    refinement = Refinement(steps=steps, tolerance=0.0, damping=1.0)
    scored = attributor.attribute(store_jobs.rows(3, 2), method=Exact(refine=refinement), top_k=None)
    files = [*refined_files(directory, "refined-0*.safetensors"), *refined_files(directory, "refined-0*.json")]
    found = {
        path.name: store_jobs.digest(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
        for path in files
    }
    assert not list(directory.rglob("refined-steps"))
    return {**found, "scores": store_jobs.digest(scored.with_format("torch")["trak_scores"][:])}


def kill_at(name: str, count: int, directory: Path) -> dict[str, str]:
    """The job, killed right before the `count`-th file whose name starts with `name` becomes visible."""
    seen = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            nonlocal seen
            seen += Path(target).name.startswith(name)
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(source, target, **options)

        return call

    for call in ("replace", "link"):
        setattr(atomic.os, call, watched(getattr(os, call)))
    return job(directory)


def steps_of(directory: Path, computed: list[int]) -> dict[str, str]:
    """The job, which notes the steps that it computes."""
    advance = Solutions.advance

    def noted(state: Solutions, *arguments: Any) -> None:
        computed.append(int(state.counts[0].max()))
        advance(state, *arguments)

    Solutions.advance = noted  # type: ignore[method-assign]
    return {**job(directory), "computed": ",".join(map(str, computed))}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a job reports that is left alone."""
    directory = tmp_path_factory.mktemp("reference")
    found = Job(directory / "report.json", job, directory / "store").wait()
    assert found is not None and "value" in found, found
    return found


@pytest.mark.slow
def test_killed_again_and_again(reference: dict[str, Any], tmp_path: Path) -> None:
    """A kill loses one step, and the same call ends with the same bits."""
    store = tmp_path / "store"
    for name, count in (("state-00000", 3), ("state-00001", 2), ("refined-00001", 1)):
        killed = Job(tmp_path / "report.json", kill_at, name, count, store)
        assert killed.wait() is None and killed.process.exitcode == KILLED
    left = sorted(path.name for path in store.rglob("refined-steps/state-*"))
    assert left == ["state-00001-00004.safetensors"]
    assert Job(tmp_path / "report.json", job, store).wait() == reference


@pytest.mark.slow
def test_a_resumed_refinement_goes_on_where_it_was(reference: dict[str, Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    killed = Job(tmp_path / "report.json", kill_at, "state-00000", 4, store)  # the states before steps 1, 2 and 3
    assert killed.wait() is None
    found = Job(tmp_path / "report.json", steps_of, store, []).wait()
    assert found is not None
    assert found["value"].pop("computed") == "2,3,0,1,2,3"
    assert found == reference


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_more_processes(reference: dict[str, Any], tmp_path: Path, world: int) -> None:
    reports = [one.wait() for one in start_group(tmp_path, world, job, tmp_path / "store")]
    assert reports == [reference] * world


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_take_over_from_each_other(reference: dict[str, Any], tmp_path: Path) -> None:
    """A run of one process that was killed is finished by two."""
    store = tmp_path / "store"
    killed = Job(tmp_path / "report.json", kill_at, "state-00000", 3, store)
    assert killed.wait() is None
    assert [one.wait() for one in start_group(tmp_path, 2, job, store)] == [reference] * 2


def test_parts_are_the_same_for_any_number_of_rows() -> None:
    assert refining.PARTS == 8, "a part of the definition of a result's bits"
