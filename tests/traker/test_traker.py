"""TRAKer against a closed form in float64, and each way in which it must not go wrong."""

import hashlib
import logging
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_jobs import Job
from torch import Tensor

from hf_trak import TRAKer
from hf_trak.errors import (
    CheckpointMismatchError,
    ConfigMismatchError,
    HfTrakError,
    IncompleteStoreError,
    NonFiniteError,
    SingularGramError,
    StoreError,
)
from hf_trak.gradient_computers import AbstractGradientComputer, FunctionalGradientComputer, IterativeGradientComputer
from hf_trak.modelout_functions import AbstractModelOutput, ImageClassificationModelOutput
from hf_trak.projectors import (
    AbstractProjector,
    BasicProjector,
    BasicSingleBlockProjector,
    NoOpProjector,
    ProjectionType,
    SparseProjector,
)
from hf_trak.savers import AbstractSaver, ModelIDException
from hf_trak.score_computers import AbstractScoreComputer, BasicScoreComputer, BasicSingleBlockScoreComputer

N, M, D, CLASSES = 40, 6, 4, 3
LAMBDA = 1e-3


def without_addresses(value: object) -> str:
    """Names of test cases that are the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(D, 5), torch.nn.Tanh(), torch.nn.Linear(5, CLASSES))


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N + M, D, generator=generator), torch.randint(0, CLASSES, (N + M,), generator=generator)


@pytest.fixture
def checkpoints() -> list[dict[str, Tensor]]:
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        found.append({name: value.clone() for name, value in make_model().state_dict().items()})
    return found


def make_traker(path: Path, **changes: Any) -> TRAKer:
    arguments: dict[str, Any] = {
        "model": make_model(),
        "task": "image_classification",
        "train_set_size": N,
        "save_dir": path,
        "device": "cpu",
        "projector": NoOpProjector(device="cpu"),
        "use_half_precision": False,
        "lambda_reg": LAMBDA,
        "logging_level": logging.WARNING,
    }
    return TRAKer(**{**arguments, **changes})


def featurize(traker: TRAKer, data: tuple[Tensor, Tensor], batches: list[range] | None = None) -> None:
    x, y = data
    for rows in batches or [range(i, min(i + 8, N)) for i in range(0, N, 8)]:
        traker.featurize((x[list(rows)], y[list(rows)]), inds=rows)


def run_scores(traker: TRAKer, data: tuple[Tensor, Tensor], checkpoints: list[dict], name: str = "test") -> Tensor:
    x, y = data
    for model_id, checkpoint in enumerate(checkpoints):
        traker.start_scoring_checkpoint(name, checkpoint, model_id, M)
        traker.score((x[N:], y[N:]), num_samples=M)
    return traker.finalize_scores(name)


def run_all(traker: TRAKer, data: tuple[Tensor, Tensor], checkpoints: list[dict]) -> Tensor:
    for model_id, checkpoint in enumerate(checkpoints):
        traker.load_checkpoint(checkpoint, model_id)
        featurize(traker, data)
    traker.finalize_features()
    return run_scores(traker, data, checkpoints)


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.name.endswith(".lock")]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def exact_gradients(
    checkpoint: dict[str, Tensor], x: Tensor, y: Tensor, names: list[str] | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of log p_y − log(1 − p_y) and 1 − p_y in float64, one sample at a time, by plain autograd."""
    model = make_model().double()
    model.load_state_dict({name: value.double() for name, value in checkpoint.items()})
    parameters = [p for name, p in model.named_parameters() if names is None or name in names]
    gradients, q = [], []
    for image, label in zip(x.double(), y, strict=True):
        p = model(image).softmax(0)[label]
        taken = torch.autograd.grad(p.log() - (1 - p).log(), parameters)
        gradients.append(torch.cat([g.reshape(-1) for g in taken]))
        q.append(1 - p.detach())
    return torch.stack(gradients), torch.stack(q)


def closed_form(
    checkpoints: list[dict[str, Tensor]],
    data: tuple[Tensor, Tensor],
    names: list[str] | None = None,
    normalized: bool = True,
    lam: float = LAMBDA,
) -> Tensor:
    """The scores of the `trak` API in float64: gradients divided by √P, the inverse by its mean absolute entry."""
    products, qs = [], []
    for checkpoint in checkpoints:
        g, q = exact_gradients(checkpoint, *data, names)
        g = g / g.shape[1] ** 0.5
        x, t = g[:N], g[N:]
        inverse = torch.linalg.inv(x.T @ x + lam * torch.eye(x.shape[1], dtype=x.dtype))
        products.append(x @ (inverse / inverse.abs().mean() if normalized else inverse) @ t.T)
        qs.append(q[:N])
    return torch.stack(products).mean(0) * torch.stack(qs).mean(0)[:, None]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# -- agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computer", [FunctionalGradientComputer, IterativeGradientComputer])
def test_three_checkpoints_equal_the_closed_form(tmp_path, data, checkpoints, computer):
    scores = run_all(make_traker(tmp_path, gradient_computer=computer), data, checkpoints)
    expected = closed_form(checkpoints, data)
    assert scores.shape == (N, M) and scores.dtype == torch.float32
    assert relative(scores, expected) < 2e-3
    assert float((scores - expected).abs().max() / expected.abs().max()) < 2e-3
    # it is the mean of products times the mean of q, which is not the mean of their products
    each = torch.stack([closed_form([checkpoint], data) for checkpoint in checkpoints]).mean(0)
    assert relative(scores, each) > 2e-2


def test_half_precision_default_with_ridge(tmp_path, data, checkpoints):
    """The defaults store float16. With a ridge, scores agree with float64 to the accuracy of float16."""
    lam = 0.1 * N / 38 * float(exact_gradients(checkpoints[0], *data)[0][:N].pow(2).sum()) / N / 38
    traker = make_traker(tmp_path, use_half_precision=True, lambda_reg=lam)
    assert traker.saver.dtype == torch.float16
    scores = run_all(traker, data, checkpoints)
    assert relative(scores, closed_form(checkpoints, data, lam=lam)) < 1e-2


def test_default_projector_is_the_rademacher_map(tmp_path, data, checkpoints):
    traker = make_traker(tmp_path, projector=None, proj_dim=16, projector_seed=3)
    traker.load_checkpoint(checkpoints[1], model_id=7)
    featurize(traker, data)
    exact = exact_gradients(checkpoints[1], *data)[0][:N]
    matrix = BasicSingleBlockProjector(traker.num_params, 16, 3, ProjectionType.rademacher, "cpu")
    expected = matrix.project(exact.float(), model_id=7) / traker.num_params**0.5
    assert torch.allclose(traker.saver.read_grads(), expected, atol=1e-5)
    assert traker.proj_dim == 16


def test_a_mapping_is_a_batch_too(tmp_path, data, checkpoints):
    class Named(torch.nn.Sequential):
        def forward(self, pixel_values: Tensor) -> Tensor:
            return super().forward(pixel_values)

    x, y = data
    model = Named(*make_model())
    traker = make_traker(tmp_path / "a", model=model)
    traker.load_checkpoint(checkpoints[0], 0)
    traker.featurize({"pixel_values": x[:5], "labels": y[:5]}, inds=torch.arange(5))
    traker.featurize({"pixel_values": x[:N], "labels": y[:N]}, inds=np.arange(N))
    plain = make_traker(tmp_path / "b")
    plain.load_checkpoint(checkpoints[0], 0)
    featurize(plain, data)
    assert torch.allclose(traker.saver.read_grads(), plain.saver.read_grads(), atol=1e-6)


def test_num_samples_writes_in_sequence(tmp_path, data, checkpoints):
    x, y = data
    traker = make_traker(tmp_path)
    for model_id in range(2):  # the count starts anew with every checkpoint
        traker.load_checkpoint(checkpoints[0], model_id)
        for start, size in ((0, 16), (16, 20), (36, 4)):
            traker.featurize(iter((x[start : start + size], y[start : start + size])), num_samples=size)
        exact = exact_gradients(checkpoints[0], x[:N], y[:N])[0] / traker.num_params**0.5
        assert torch.allclose(traker.saver.read_grads(), exact.float(), atol=1e-5)
    with pytest.raises(ValueError, match="rows 0 … 39"):
        traker.featurize((x[:1], y[:1]), num_samples=1)


def test_loss_task_takes_other_gradients_for_targets(tmp_path, data, checkpoints):
    """Train examples take gradients of the loss, targets those of the margin, and q = 1."""
    scores = run_all(make_traker(tmp_path, task="loss"), data, checkpoints[:1])
    model = make_model().double()
    model.load_state_dict({name: value.double() for name, value in checkpoints[0].items()})
    rows = []
    for image, label in zip(data[0][:N].double(), data[1][:N], strict=True):
        loss = torch.nn.functional.cross_entropy(model(image), label)
        rows.append(-torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    x = torch.stack(rows)
    x, t = x / x.shape[1] ** 0.5, exact_gradients(checkpoints[0], *data)[0][N:] / x.shape[1] ** 0.5
    inverse = torch.linalg.inv(x.T @ x + LAMBDA * torch.eye(x.shape[1], dtype=x.dtype))
    assert relative(scores, x @ (inverse / inverse.abs().mean()) @ t.T) < 2e-3


# -- plugged-in parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computer", [FunctionalGradientComputer, IterativeGradientComputer])
def test_grad_wrt(tmp_path, data, checkpoints, computer):
    """Only the named parameters are differentiated, counted and projected."""
    names = ["2.weight", "0.bias"]
    traker = make_traker(tmp_path, grad_wrt=iter(names), gradient_computer=computer)
    assert traker.num_params == 15 + 5
    scores = run_all(traker, data, checkpoints)
    assert relative(scores, closed_form(checkpoints, data, names)) < 2e-3


def test_frozen_parameters_are_left_out(tmp_path, data, checkpoints):
    """Without `grad_wrt`, parameters that do not require gradients are not attributed."""
    model = make_model()
    model[0].requires_grad_(False)
    scores = run_all(make_traker(tmp_path, model=model), data, checkpoints)
    assert relative(scores, closed_form(checkpoints, data, ["2.weight", "2.bias"])) < 2e-3


def test_a_gradient_computer_with_the_three_documented_methods(tmp_path, data, checkpoints):
    class Jacobian(AbstractGradientComputer):
        def __init__(self, model: Any, task: Any, grad_dim: Any, dtype: Any, device: Any) -> None:
            super().__init__(model, task, grad_dim, dtype, device)

        def load_model_params(self, model: torch.nn.Module) -> None:
            self.weights = {name: value.detach() for name, value in model.named_parameters()}

        def compute_per_sample_grad(self, batch: Any) -> Tensor:
            def outputs(weights: dict[str, Tensor]) -> Tensor:
                logits = torch.func.functional_call(self.model, weights, (batch[0],))
                p = logits.softmax(1).gather(1, batch[1][:, None]).squeeze(1)
                return p.log() - (1 - p).log()

            jacobian = torch.func.jacrev(outputs)(self.weights)
            return torch.cat([part.flatten(1) for part in jacobian.values()], dim=1)

        def compute_loss_grad(self, batch: Any) -> Tensor:
            return self.modelout_fn.get_out_to_loss_grad(self.model, self.weights, {}, batch)

    scores = run_all(make_traker(tmp_path, gradient_computer=Jacobian), data, checkpoints)
    assert relative(scores, closed_form(checkpoints, data)) < 2e-3
    with pytest.raises(ValueError, match="grad_wrt"):
        make_traker(tmp_path / "other", gradient_computer=Jacobian, grad_wrt=["0.bias"])
    with pytest.raises(ValueError, match="'loss'"):
        make_traker(tmp_path / "other", gradient_computer=Jacobian, task="loss")
    with pytest.raises(ConfigMismatchError, match="gradient_computer"):
        make_traker(tmp_path)


def test_an_overridden_gradient_is_not_bypassed(tmp_path, data, checkpoints):
    """The built-in computers stream blocks; a subclass that changes the gradients must still have its say."""

    class Doubled(FunctionalGradientComputer):
        def compute_per_sample_grad(self, batch: Any) -> dict[str, Tensor]:
            return {name: 2 * value for name, value in super().compute_per_sample_grad(batch).items()}

    class Shifted(BasicProjector):
        def project(self, grads: Any, model_id: int) -> Tensor:
            return super().project(grads, model_id) + 1000

    found = []
    for computer, projector in (
        (FunctionalGradientComputer, BasicProjector),
        (Doubled, BasicProjector),
        (FunctionalGradientComputer, Shifted),
    ):
        traker = make_traker(
            tmp_path / f"{computer.__name__}{projector.__name__}",
            gradient_computer=computer,
            projector=projector(43, 8, 0, "rademacher", "cpu"),
        )
        traker.load_checkpoint(checkpoints[0], 0)
        featurize(traker, data)
        found.append(traker.saver.read_grads().clone())
    assert torch.allclose(found[1], 2 * found[0], rtol=1e-5)
    assert torch.allclose(found[2], found[0] + 1000 / 43**0.5, atol=1e-3)


def test_a_projector_of_ones_own(tmp_path, data, checkpoints):
    class Fixed(AbstractProjector):
        def __init__(self) -> None:
            super().__init__(grad_dim=43, proj_dim=10, seed=5, proj_type="fixed", device="cpu")
            self.matrix = torch.randn(43, 10, generator=torch.Generator().manual_seed(5))

        def project(self, grads: Any, model_id: int) -> Tensor:
            if isinstance(grads, dict):
                grads = torch.cat([grad.flatten(1) for grad in grads.values()], dim=1)
            return grads @ self.matrix

    projector = Fixed()
    traker = make_traker(tmp_path, projector=projector)
    assert traker.proj_dim == 10
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    exact = exact_gradients(checkpoints[0], *data)[0][:N].float()
    assert torch.allclose(traker.saver.read_grads(), exact @ projector.matrix / 43**0.5, atol=1e-5)
    with pytest.raises(ValueError, match="grad_dim=20"):
        make_traker(tmp_path / "other", projector=projector, grad_wrt=["2.weight", "0.bias"])
    with pytest.raises(ConfigMismatchError, match="projection"):
        make_traker(tmp_path, projector=BasicProjector(43, 10, 5, "rademacher", "cpu"))
    with pytest.raises(ValueError, match="another projection"):
        traker.init_projector(None, 10, 32)


def test_the_sparse_map_gets_every_block_once(tmp_path, data, checkpoints):
    """Its sink keeps sums between blocks, and calls `accumulate` of a subclass that overrides it."""

    class Doubled(SparseProjector):
        def accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
            super().accumulate(out, 2 * block, start, model_id)

    exact = exact_gradients(checkpoints[0], *data)[0][:N].float() / 43**0.5
    for factor, projector in enumerate((SparseProjector, Doubled), start=1):
        traker = make_traker(tmp_path / projector.__name__, projector=projector(43, 16, seed=1, device="cpu"))
        traker.load_checkpoint(checkpoints[0], 3)
        featurize(traker, data)
        expected = SparseProjector(43, 16, seed=1, device="cpu").project(factor * exact, model_id=3)
        assert torch.allclose(traker.saver.read_grads(), expected, atol=1e-5)


def test_a_projector_that_does_not_know_its_size(tmp_path, data, checkpoints):
    class Whole(NoOpProjector):
        pass

    for projector in (NoOpProjector(device="cpu"), Whole(device="cpu")):
        traker = make_traker(tmp_path / type(projector).__name__, projector=projector)
        assert traker.proj_dim == 43 and projector.grad_dim == 0  # what was given stays as it was
        traker.load_checkpoint(checkpoints[0], 0)
        featurize(traker, data)
        exact = exact_gradients(checkpoints[0], *data)[0][:N].float() / 43**0.5
        assert torch.allclose(traker.saver.read_grads(), exact, atol=1e-5)


def test_a_score_computer_of_ones_own(tmp_path, data, checkpoints):
    class Ridge(AbstractScoreComputer):
        def get_xtx(self, grads: Tensor) -> Tensor:
            return grads.T @ grads

        def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
            return grads @ torch.linalg.inv(xtx + LAMBDA * torch.eye(len(xtx)))

        def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
            accumulator += features @ target_grads.T

    traker = make_traker(tmp_path, score_computer=Ridge, lambda_reg=0.0)
    scores = run_all(traker, data, checkpoints)
    assert relative(scores, closed_form(checkpoints, data, normalized=False)) < 2e-3
    with pytest.raises(ValueError, match="lambda_reg"):
        make_traker(tmp_path, score_computer=Ridge)
    # features of another score computer are not taken for this one's
    with pytest.raises(IncompleteStoreError, match="finalize_features"):
        make_traker(tmp_path).finalize_scores("test")


class MemorySaver(AbstractSaver):
    """The smallest saver that the contract of the `trak` API allows: a dictionary of tensors."""

    def __init__(self, train_set_size: int, proj_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shape = (train_set_size, proj_dim)
        self.stores: dict[int, dict[str, Tensor]] = {}
        self.saved: dict[str, Tensor] = {}

    def register_model_id(self, model_id: int, _allow_featurizing_already_registered: bool = False) -> None:
        self.model_ids[model_id] = {"featurized": 0, "finalized": 0}
        self.init_store(model_id)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        pass

    def init_store(self, model_id: int) -> None:
        n, _ = self.shape
        self.stores[model_id] = {
            "grads": torch.zeros(self.shape),
            "features": torch.zeros(self.shape),
            "out_to_loss": torch.zeros(n, 1),
            "is_featurized": torch.zeros(n, 1, dtype=torch.int32),
        }
        self.load_current_store(model_id)

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        self.experiments[exp_name] = {"num_targets": num_targets}
        self.stores[model_id].setdefault(f"{exp_name}_grads", torch.zeros(num_targets, self.shape[1]))
        self.load_current_store(model_id)

    def load_current_store(self, model_id: int, exp_name: str | None = None, exp_num_targets: int | None = -1) -> None:
        self.current_store = self.stores[model_id]
        self.current_model_id = model_id

    def save_scores(self, exp_name: str) -> None:
        self.saved[exp_name] = self.current_store[f"{exp_name}_scores"].clone()

    def del_grads(self, model_id: int, target: bool = False) -> None:
        self.stores[model_id]["grads"] = torch.zeros(0)


def test_a_saver_of_ones_own(tmp_path, data, checkpoints):
    traker = make_traker(tmp_path, saver=MemorySaver)
    scores = run_all(traker, data, checkpoints)
    assert relative(scores, closed_form(checkpoints, data)) < 2e-3
    assert torch.equal(traker.saver.saved["test"], scores)
    with pytest.raises(IncompleteStoreError, match="is not in"):
        traker.finalize_scores("unknown")
    with pytest.raises(CheckpointMismatchError):
        traker.load_checkpoint(checkpoints[1], 0)


def test_no_device_is_touched_before_the_first_batch(tmp_path, data, checkpoints):
    if torch.cuda.is_available():
        pytest.skip("only a machine without CUDA can tell")
    traker = make_traker(tmp_path, device="cuda:0")
    traker.load_checkpoint(checkpoints[0], 0)
    with pytest.raises(ValueError, match=r"cuda:0.*device='cpu'"):
        featurize(traker, data)


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_resumed_with_the_same_batches_is_bit_identical(tmp_path, data, checkpoints):
    batches = [range(0, 15), range(15, 22), range(22, N)]
    results = []
    for name, pieces in (("whole", [batches]), ("pieces", [batches[:1], batches[:2], batches])):
        for piece in pieces:
            traker = make_traker(tmp_path / name, projector=None, proj_dim=16)
            traker.load_checkpoint(checkpoints[0], 0)
            featurize(traker, data, piece)
        traker.finalize_features()
        results.append(run_scores(traker, data, checkpoints[:1]))
    assert torch.equal(results[0], results[1])
    assert digests(tmp_path / "whole") == digests(tmp_path / "pieces")
    # scored again from a fresh object
    traker = make_traker(tmp_path / "pieces", projector=None, proj_dim=16)
    assert torch.equal(traker.finalize_scores("test"), results[0])
    assert torch.equal(run_scores(traker, data, checkpoints[:1], "again"), results[0])


def test_resumed_with_other_batches_computes_only_what_is_missing(tmp_path, data, checkpoints):
    """The gradients of a partly saved batch must go to the rows of their own samples."""
    computed: list[int] = []

    class Counting(FunctionalGradientComputer):
        def stream(self, batch: Any, sink: Any, side: Any = "train") -> Any:
            computed.append(len(batch[0]))
            return super().stream(batch, sink, side)

        def compute_per_sample_grad(self, batch: Any) -> Any:
            raise AssertionError("not needed")

    def start(path: Path) -> TRAKer:
        traker = make_traker(path, gradient_computer=Counting)
        traker.load_checkpoint(checkpoints[0], 0)
        return traker

    whole = start(tmp_path / "whole")
    featurize(whole, data)
    expected = whole.saver.read_grads().clone()
    traker = start(tmp_path / "parts")
    featurize(traker, data, [range(3, 11), [30, 7 + 9, 2]])  # type: ignore[list-item]
    traker = start(tmp_path / "parts")
    computed.clear()
    featurize(traker, data, [range(0, 13), range(13, 14), range(14, N)])
    assert computed == [4, 1, 24]
    assert torch.allclose(traker.saver.read_grads(), expected, rtol=1e-5, atol=1e-6)
    computed.clear()
    featurize(start(tmp_path / "parts"), data)
    assert computed == []


def test_targets_are_resumed_too(tmp_path, data, checkpoints):
    x, y = data
    expected = run_all(make_traker(tmp_path / "whole"), data, checkpoints[:1])
    traker = make_traker(tmp_path / "parts")
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", checkpoints[0], 0, M)
    traker.score((x[N + 1 : N + 4], y[N + 1 : N + 4]), inds=[1, 2, 3])
    with pytest.raises(IncompleteStoreError, match=r"lacks 3 of 6 targets.*\[0, 4, 5\]"):
        traker.finalize_scores("test")
    traker = make_traker(tmp_path / "parts")
    assert torch.allclose(run_scores(traker, data, checkpoints[:1]), expected, rtol=1e-4, atol=1e-6)
    others = x.flip(0), y.flip(0)  # other targets under the same name replace them, as in `trak`
    fresh = make_traker(tmp_path / "fresh")
    fresh.load_checkpoint(checkpoints[0], 0)
    featurize(fresh, data)
    fresh.finalize_features()
    assert torch.equal(run_scores(traker, others, checkpoints[:1]), run_scores(fresh, others, checkpoints[:1]))


def featurize_two_by_two(path: Path) -> None:
    """Featurize until a kill in the middle."""
    data, checkpoint = torch.load(path / "input.pt", weights_only=True)
    traker = make_traker(path / "run", projector=None, proj_dim=512)
    traker.load_checkpoint(checkpoint, 0)
    for i in range(0, N, 2):
        traker.featurize((data[0][i : i + 2], data[1][i : i + 2]), num_samples=2)
        if i == 12:
            signal.signal(signal.SIGVTALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.003)  # of processor time


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_killed_and_resumed(tmp_path, data, checkpoints):
    """After SIGKILL in the middle of featurizing, the same script gives the bits of an undisturbed run."""
    torch.save((data, checkpoints[0]), tmp_path / "input.pt")
    job = Job(tmp_path / "report.json", featurize_two_by_two, tmp_path)
    assert job.wait() is None and job.process.exitcode == -signal.SIGKILL

    def continued(name: str) -> TRAKer:
        traker = make_traker(tmp_path / name, projector=None, proj_dim=512)
        traker.load_checkpoint(checkpoints[0], 0)
        return traker

    traker = continued("run")
    done = traker.saver.featurized()
    assert done[:14].all() and not done.all()
    with pytest.raises(IncompleteStoreError, match="lacks"):
        traker.finalize_features()
    results = []
    for name in ("run", "whole"):
        traker = continued(name)
        featurize(traker, data, [range(i, i + 2) for i in range(0, N, 2)])
        results.append(traker.saver.read_grads().clone())
    assert torch.equal(results[0], results[1])


# -- calls out of order -----------------------------------------------------------------------------------------------


def test_calls_out_of_order_raise_at_once(tmp_path, data, checkpoints):
    """Scoring before finalizing must not end in scores that are NaN."""
    x, y = data
    batch = (x[:2], y[:2])
    traker = make_traker(tmp_path)
    for call in (
        lambda: traker.featurize(batch, num_samples=2),
        lambda: traker.score(batch, num_samples=2),
        lambda: traker.finalize_features(),
        lambda: traker.finalize_features([0]),
        lambda: traker.start_scoring_checkpoint("test", checkpoints[0], 0, M),
        lambda: traker.finalize_scores("test"),
    ):
        with pytest.raises(IncompleteStoreError, match=r"[Ee]xpected"):
            call()
    traker.load_checkpoint(checkpoints[0], 0)
    with pytest.raises(IncompleteStoreError, match=r"lacks 40 of 40 train rows"):
        traker.finalize_features()
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    with pytest.raises(IncompleteStoreError, match="start_scoring_checkpoint"):
        traker.score(batch, num_samples=2)
    before = digests(tmp_path)
    with pytest.raises(IncompleteStoreError, match=r"not finalized.*finalize_features"):
        traker.start_scoring_checkpoint("test", checkpoints[0], 0, M)
    assert digests(tmp_path) == before
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", checkpoints[0], 0, M)
    with pytest.raises(IncompleteStoreError, match="load_checkpoint"):
        traker.featurize(batch, num_samples=2)
    with pytest.raises(IncompleteStoreError, match="has no gradients of the targets"):
        traker.finalize_scores("test")


def test_no_checkpoint_at_all(tmp_path):
    traker = make_traker(tmp_path)
    with pytest.raises(
        IncompleteStoreError, match=rf"{re.escape(str(tmp_path))} has no model ids\. .*load_checkpoint"
    ):
        traker.finalize_features()
    with pytest.raises(IncompleteStoreError, match="No model ids were given"):
        traker.finalize_features([])


def test_allow_skip(tmp_path, data, checkpoints, caplog):
    """`allow_skip` leaves out a checkpoint whose targets are missing, and says so."""
    traker = make_traker(tmp_path)
    expected = run_all(traker, data, checkpoints[:2])
    traker.load_checkpoint(checkpoints[2], 2)
    featurize(traker, data)
    traker.finalize_features()
    with pytest.raises(IncompleteStoreError, match=r"Model id 2 .*allow_skip"):
        traker.finalize_scores("test")
    with caplog.at_level(logging.WARNING, "hf_trak.traker"):
        found = traker.finalize_scores("test", allow_skip=True)
    assert "Model id 2" in caplog.text
    assert torch.equal(found, expected)
    assert torch.equal(traker.finalize_scores("test", model_ids=[0, 1]), expected)
    assert relative(traker.finalize_scores("test", model_ids=[1]), closed_form(checkpoints[1:2], data)) < 2e-3
    with pytest.raises(IncompleteStoreError, match="at least one"):
        traker.finalize_scores("test", model_ids=[2], allow_skip=True)
    with pytest.raises(IncompleteStoreError, match=r"\[5\]"):
        traker.finalize_scores("test", model_ids=[5], allow_skip=True)


@pytest.mark.parametrize("delete", [False, True])
def test_finalizing_twice(tmp_path, data, checkpoints, delete):
    """A second `finalize_features` changes nothing, and the projector works after its memory was freed."""
    traker = make_traker(tmp_path, projector=BasicSingleBlockProjector(43, 43, 0, "rademacher", "cpu"), lambda_reg=0.1)
    expected = run_all(traker, data, checkpoints[:2])
    traker.finalize_features(del_grads=delete)
    traker.finalize_features([1, 0, 1], del_grads=delete)
    assert torch.equal(run_scores(traker, data, checkpoints[:2], "second"), expected)
    # rows whose gradients were deleted are not computed again
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    traker.finalize_features()
    fresh = make_traker(tmp_path, projector=BasicSingleBlockProjector(43, 43, 0, "rademacher", "cpu"), lambda_reg=0.1)
    fresh.finalize_features()
    assert torch.equal(run_scores(fresh, data, checkpoints[:2], "third"), expected)


def test_another_lambda_needs_features_of_its_own(tmp_path, data, checkpoints):
    run_all(make_traker(tmp_path), data, checkpoints[:1])
    traker = make_traker(tmp_path, lambda_reg=0.5)
    with pytest.raises(IncompleteStoreError, match=r"finalized with .*0.001.*0.5"):
        traker.finalize_scores("test")
    traker.finalize_features()
    assert relative(traker.finalize_scores("test"), closed_form(checkpoints[:1], data, lam=0.5)) < 2e-3
    traker.finalize_features(del_grads=True)
    with pytest.raises(IncompleteStoreError, match="were deleted"):
        make_traker(tmp_path).finalize_features()


# -- what must not be mixed -------------------------------------------------------------------------------------------


class OtherTask(ImageClassificationModelOutput):
    pass


@pytest.mark.parametrize(
    "change, key",
    [
        ({"use_half_precision": True}, "feature_dtype"),
        ({"train_set_size": N + 1}, "train_size"),
        ({"task": "iterative_image_classification"}, "task"),
        ({"task": OtherTask()}, "task"),
        ({"task": ImageClassificationModelOutput(temperature=2.0)}, "task"),
        ({"grad_wrt": ["0.weight"]}, "parameters"),
        ({"projector_seed": 1}, "projection"),
        ({"projector": BasicProjector(43, 8, 0, "normal", "cpu")}, "projection"),
        ({"proj_dim": 16}, "proj_dim"),
    ],
    ids=without_addresses,
)
def test_a_store_of_another_configuration_is_refused(tmp_path, data, checkpoints, change, key):
    """Dtype, random seed, projection, task, parameters and sizes are compared when a directory is opened again."""
    base = {"projector": None, "proj_dim": 8}
    traker = make_traker(tmp_path, **base)
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    before = digests(tmp_path)
    with pytest.raises(ConfigMismatchError, match=rf"(?s)\n  {key}.*: saved .*, given "):
        make_traker(tmp_path, **{**base, **change})
    with pytest.raises(ConfigMismatchError, match=key):
        make_traker(tmp_path, **{**base, **change}, load_from_save_dir=False)
    assert digests(tmp_path) == before
    same = {"projector": BasicSingleBlockProjector(43, 8, 0, "rademacher", "cpu"), "proj_dim": 99}
    make_traker(
        tmp_path, **{**base, **same, "task": ImageClassificationModelOutput()}
    )  # other words for the same thing


def test_a_model_id_has_one_set_of_weights(tmp_path, data, checkpoints):
    """Neither can two checkpoints share an id, nor can targets be scored with another checkpoint's weights."""
    traker = make_traker(tmp_path)
    run_all(traker, data, checkpoints[:1])
    before = digests(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="Model id 0"):
        traker.load_checkpoint(checkpoints[1], 0)
    with pytest.raises(IncompleteStoreError, match="load_checkpoint"):  # the other weights are in the model now
        featurize(traker, data)
    with pytest.raises(CheckpointMismatchError, match="Model id 0"):
        traker.start_scoring_checkpoint("test", checkpoints[1], 0, M)
    with pytest.raises(IncompleteStoreError, match="start_scoring"):
        traker.score((data[0][:1], data[1][:1]), num_samples=1)
    with pytest.raises(CheckpointMismatchError, match="Model id 0"):
        make_traker(tmp_path).load_checkpoint(checkpoints[1], 0)
    assert digests(tmp_path) == before


def test_weights_changed_behind_the_back_are_noticed(tmp_path, data, checkpoints):
    """As by a script that loads the next checkpoint into the model and forgets `load_checkpoint`."""
    model = make_model()
    traker = make_traker(tmp_path, model=model)
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data, [range(8)])
    model.load_state_dict(checkpoints[1])
    with pytest.raises(CheckpointMismatchError, match="changed since"):
        featurize(traker, data, [range(8, 16)])
    model.load_state_dict(checkpoints[0])
    featurize(traker, data, [range(8, 16)])
    assert traker.saver.featurized().sum() == 16


def test_registered_ids_without_loading_from_the_directory(tmp_path, data, checkpoints):
    first = make_traker(tmp_path)
    first.load_checkpoint(checkpoints[0], 0)
    featurize(first, data, [range(10)])
    second = make_traker(tmp_path, load_from_save_dir=False)
    second.load_checkpoint(checkpoints[1], 1)
    with pytest.raises(ModelIDException, match="load_from_save_dir=True"):
        second.load_checkpoint(checkpoints[0], 0)
    with pytest.raises(CheckpointMismatchError):
        second.load_checkpoint(checkpoints[1], 0, _allow_featurizing_already_registered=True)
    second = make_traker(tmp_path, load_from_save_dir=False)
    second.load_checkpoint(checkpoints[0], 0, _allow_featurizing_already_registered=True)
    assert second.saver.featurized().sum() == 10
    featurize(second, data)
    second.finalize_features([0])


def test_an_experiment_keeps_its_number_of_targets(tmp_path, data, checkpoints):
    traker = make_traker(tmp_path)
    run_all(traker, data, checkpoints[:1])
    before = digests(tmp_path)
    for opened in (traker, make_traker(tmp_path)):
        with pytest.raises(ConfigMismatchError, match=r"(?s)test.*6.*7"):
            opened.start_scoring_checkpoint("test", checkpoints[0], 0, M + 1)
    assert digests(tmp_path) == before


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["train", "target"])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "exactly one"),
        ({"inds": [0, 1], "num_samples": 2}, "exactly one"),
        ({"inds": [0]}, r"1 row numbers, but the batch has 2"),
        ({"inds": [0, 1, 2]}, r"3 row numbers, but the batch has 2"),
        ({"num_samples": 3}, r"`num_samples` is 3, but the batch has 2"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": True}, "num_samples"),
        ({"inds": [1, 1]}, r"\[1\] more than once"),
        ({"inds": [-1, 0]}, r"\[-1\]"),
        ({"inds": [0, N]}, rf"\[{N}\]"),
        ({"inds": [0.0, 1.0]}, "integers"),
        ({"inds": torch.tensor([True, False])}, "integers"),
    ],
    ids=without_addresses,
)
def test_bad_rows(tmp_path, data, checkpoints, stage, arguments, message):
    traker = make_traker(tmp_path)
    traker.load_checkpoint(checkpoints[0], 0)
    if stage == "target":
        featurize(traker, data)
        traker.finalize_features()
        traker.start_scoring_checkpoint("test", checkpoints[0], 0, M)
    call = traker.featurize if stage == "train" else traker.score
    x, y = data
    call((x[3:4], y[3:4]), num_samples=1)
    before = digests(tmp_path)
    with pytest.raises((ValueError, TypeError), match=message):
        call((x[:2], y[:2]), **arguments)
    assert digests(tmp_path) == before
    call((x[:2], y[:2]), num_samples=2)  # a failed call does not move the sequence
    done = traker.saver.featurized() if stage == "train" else traker.saver.scored()
    assert done.nonzero()[0].tolist()[:3] == [0, 1, 2] and (stage == "target") <= (done.sum() == 3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"task": "image_clasification"}, "image_clasification"),
        ({"grad_wrt": ["0.weight", "nothing"]}, "nothing"),
        ({"grad_wrt": "0.weight"}, "list"),
        ({"train_set_size": 0}, "train_set_size"),
        ({"train_set_size": 2.5}, "train_set_size"),
        ({"projector": None, "proj_dim": -3}, "proj_dim"),
        ({"lambda_reg": -1.0}, "lambda_reg"),
        ({"lambda_reg": float("nan")}, "lambda_reg"),
        ({"gradient_computer": object()}, "class"),
    ],
    ids=without_addresses,
)
def test_bad_arguments_leave_nothing_behind(tmp_path, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_traker(tmp_path / "store", **changes)
    assert not (tmp_path / "store").exists()


def test_bad_checkpoints_and_ids(tmp_path, data, checkpoints):
    traker = make_traker(tmp_path)
    before = digests(tmp_path)
    for model_id in (-1, "0", 1.0, True):
        with pytest.raises(ValueError, match="model_id"):
            traker.load_checkpoint(checkpoints[0], model_id)
    with pytest.raises(ValueError, match="does not fit"):
        traker.load_checkpoint({"0.weight": checkpoints[0]["0.weight"]}, 0)
    with pytest.raises(IncompleteStoreError, match="load_checkpoint"):
        featurize(traker, data)
    with pytest.raises(TypeError, match="sequence of tensors"):
        traker.load_checkpoint(checkpoints[0], np.int64(0))
        traker.featurize(data[0][:2], num_samples=2)
    assert set(digests(tmp_path)) - set(before) <= {
        "0.json",
        *(f"0/{name}" for name in ("id_metadata.json", "_is_featurized.mmap", "features.mmap", "grads.mmap")),
        "0/out_to_loss.mmap",
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "/tmp/x", ".x", "a\\b", "nul\0"])
def test_experiment_names_cannot_leave_the_directory(tmp_path, data, checkpoints, name):
    traker = make_traker(tmp_path / "store")
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    traker.finalize_features()
    before = digests(tmp_path)
    with pytest.raises(ValueError, match="exp_name"):
        traker.start_scoring_checkpoint(name, checkpoints[0], 0, M)
    with pytest.raises(ValueError, match="exp_name"):
        traker.finalize_scores(name)
    assert digests(tmp_path) == before


def test_a_gradient_that_is_not_finite_names_its_sample(tmp_path, data, checkpoints):
    x, y = data[0].clone(), data[1]
    x[13] = float("nan")
    traker = make_traker(tmp_path)
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data, [range(4)])
    before = digests(tmp_path)
    with pytest.raises(NonFiniteError, match="sample 13 "):
        traker.featurize((x[10:16], y[10:16]), inds=range(10, 16))
    assert digests(tmp_path) == before


def test_a_gradient_that_half_precision_cannot_hold_is_refused(tmp_path, data, checkpoints):
    """A cast to float16 overflows above 65504 and vanishes below 6e-8."""
    x, y = data
    traker = make_traker(tmp_path, use_half_precision=True)
    large = {name: value * (1e4 if name == "2.weight" else 0) for name, value in checkpoints[0].items()}
    large["0.bias"] = checkpoints[0]["0.bias"]
    traker.load_checkpoint(large, 0)
    before = digests(tmp_path)
    scale = 1e5 * torch.ones(3, D)
    with pytest.raises(NonFiniteError, match=r"sample [5-7] .*float16.*float32"):
        traker.featurize((scale * x[:3].sign(), y[:3]), inds=[5, 6, 7])
    assert digests(tmp_path) == before
    small = {name: value * 1e-9 for name, value in checkpoints[0].items()}
    small["2.bias"] = torch.tensor([60.0, 0.0, -60.0])
    model = make_model()
    traker = make_traker(tmp_path, use_half_precision=True, model=model, grad_wrt=None)
    tiny = make_traker(tmp_path / "tiny", use_half_precision=True, grad_wrt=["0.weight"])
    tiny.load_checkpoint(small, 0)
    with pytest.warns(UserWarning, match="use_half_precision=False"):
        tiny.featurize((x[:4], y[:4]), num_samples=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traker.load_checkpoint(checkpoints[0], 1)
        featurize(traker, data)


def test_a_singular_system_is_an_error(tmp_path, data, checkpoints):
    """λ = 0 with fewer rows than features, or with rows of too low a rank, must not end in garbage or NaN."""
    traker = make_traker(tmp_path, lambda_reg=0.0)
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    before = digests(tmp_path)
    with pytest.raises(SingularGramError, match=r"lambda_reg|λ"):
        traker.finalize_features()
    assert digests(tmp_path) == before
    with pytest.raises(IncompleteStoreError, match="not finalized"):
        traker.start_scoring_checkpoint("test", checkpoints[0], 0, M)


def test_corrupted_gradients_are_refused(tmp_path, data, checkpoints):
    traker = make_traker(tmp_path)
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    path = tmp_path / "0" / "grads.mmap"
    content = bytearray(path.read_bytes())
    content[-600] ^= 4
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"grads\.mmap.*checksum.*[Dd]elete"):
        make_traker(tmp_path).finalize_features()
    path.write_bytes(content[:300])
    with pytest.raises(StoreError, match=r"grads\.mmap.*[Dd]elete"):
        make_traker(tmp_path).finalize_features()
    path.unlink()
    (tmp_path / "0" / "_is_featurized.mmap").unlink()
    traker = make_traker(tmp_path)
    traker.load_checkpoint(checkpoints[0], 0)
    featurize(traker, data)
    traker.finalize_features()
    assert relative(run_scores(traker, data, checkpoints[:1]), closed_form(checkpoints[:1], data)) < 2e-3


@pytest.mark.slow
def test_samples_do_not_depend_on_their_batch(tmp_path, data, checkpoints):
    """Neither the size nor the composition of its batch changes a sample's features."""
    found = []
    for name, batches in (("one", [range(N)]), ("many", [[i] for i in range(N)]), ("back", [range(N - 1, -1, -1)])):
        traker = make_traker(tmp_path / name)
        traker.load_checkpoint(checkpoints[0], 0)
        featurize(traker, data, batches)
        found.append(traker.saver.read_grads())
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert torch.allclose(found[0], found[2], rtol=1e-4, atol=1e-6)


def test_a_functional_task_of_ones_own(tmp_path, data, checkpoints):
    class Margin(AbstractModelOutput):
        @staticmethod
        def get_output(model: Any, weights: Any, buffers: Any, image: Tensor, label: Tensor) -> Tensor:
            logits = torch.func.functional_call(model, (weights, buffers), (image.unsqueeze(0),))
            p = logits.softmax(1).gather(1, label.reshape(1, 1)).squeeze()
            return p.log() - (1 - p).log()

        def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
            logits = torch.func.functional_call(model, (weights, buffers), (batch[0],))
            return (
                (1 - logits.softmax(1).gather(1, batch[1][:, None])).clone().detach()
            )  # (B, 1), as some scripts have it

    scores = run_all(make_traker(tmp_path, task=Margin()), data, checkpoints)
    assert relative(scores, closed_form(checkpoints, data)) < 2e-3


def test_errors_share_a_base_class():
    for error in (
        CheckpointMismatchError,
        ConfigMismatchError,
        IncompleteStoreError,
        ModelIDException,
        NonFiniteError,
    ):
        assert issubclass(error, HfTrakError)
    assert BasicSingleBlockScoreComputer is not BasicScoreComputer
