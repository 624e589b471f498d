"""The first-batch check: what must not become a silently wrong gradient."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_trak.errors import GradientEngineError, NonFiniteError, PeerProcessError
from hf_trak.gradient_computers import (
    FunctionalGradientComputer,
    HookedGradientComputer,
    IterativeGradientComputer,
    ParameterLayout,
    make_gradient_computer,
    per_sample_gradients,
)
from hf_trak.gradient_computers.base import SplitBatch, saved_activation_bytes
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.gradient_computers.hooked.rules import LayerCall, register_layer_rule, unregister_layer_rule
from hf_trak.gradient_computers.padding import RowAlone, likely_padded
from hf_trak.gradient_computers.per_sample import function_task, inputs_taken_by
from hf_trak.gradient_computers.self_check import worst_parameter
from hf_trak.gradient_computers.tolerance import PrecisionObserver, Tolerance, rounded_at_random
from hf_trak.modelout_functions.function import FunctionModelOutput


def output(result: Tensor, batch: Any) -> Tensor:
    return result[:, 0] - result.logsumexp(1)


def mlp() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).eval(), (torch.randn(5, 6),)


class Scale(nn.Module):
    """A layer type of the user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def right(call: LayerCall) -> dict[str, Tensor]:
    return {"scale": (call.grad * call.x).flatten(1, -2).sum(1) if call.x.ndim > 2 else call.grad * call.x}


def wrong_sample(call: LayerCall) -> dict[str, Tensor]:
    """Right gradients, each given to the next sample: their sum over the batch is right."""
    return {"scale": right(call)["scale"].roll(1, 0)}


def wrong_size(call: LayerCall) -> dict[str, Tensor]:
    return {"scale": right(call)["scale"][:-1]}


def scaled() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Scale(8), nn.Linear(8, 4)), (torch.randn(5, 6),)


@pytest.fixture
def clean_registry() -> Iterator[None]:
    yield
    unregister_layer_rule(Scale)


def truth(model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
    rows = []
    for i in range(len(batch[0])):
        f = output(model(batch[0][i : i + 1]), batch).sum()
        rows.append(torch.autograd.grad(f, list(model.parameters())))
    names = [name for name, _ in model.named_parameters()]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def test_a_rule_of_the_users_own_is_used(clean_registry: None) -> None:
    calls = []

    @register_layer_rule(Scale, parameters=("scale",))
    def rule(call: LayerCall) -> dict[str, Tensor]:
        calls.append(call.x.shape)
        return right(call)

    model, batch = scaled()
    found = per_sample_gradients(model, batch, output, "hooked", self_check=False)
    assert calls == [(5, 8)]
    torch.testing.assert_close(found["1.scale"], truth(model, batch)["1.scale"])


def test_a_gradient_given_to_the_wrong_sample_is_caught(clean_registry: None) -> None:
    """The sum over the batch is right, so only a comparison per sample can tell."""
    register_layer_rule(Scale, parameters=("scale",))(wrong_sample)
    model, batch = scaled()
    unchecked = per_sample_gradients(model, batch, output, "hooked", self_check=False)
    expected = truth(model, batch)
    torch.testing.assert_close(unchecked["1.scale"].sum(0), expected["1.scale"].sum(0))
    with pytest.raises(GradientEngineError, match=r"'1\.scale' of module '1' \(Scale\).*eval\(\)"):
        per_sample_gradients(model, batch, output, "hooked")


def test_auto_falls_back_and_says_so_once(clean_registry: None, caplog: pytest.LogCaptureFixture) -> None:
    register_layer_rule(Scale, parameters=("scale",))(wrong_sample)
    model, batch = scaled()
    computer = make_gradient_computer("auto", model, function_task(output, model))
    total = torch.zeros(5, computer.layout.total)

    def sink(start: int, block: Tensor) -> None:
        total[:, start : start + block.shape[1]] += block

    with caplog.at_level(logging.INFO, logger="hf_trak"):
        computer.stream(batch, sink)
        computer.stream(batch, lambda start, block: None)
    assert computer.engine == "functional"
    torch.testing.assert_close(total, torch.cat([g.flatten(1) for g in truth(model, batch).values()], 1))
    said = [record.getMessage() for record in caplog.records if "functional engine" in record.getMessage()]
    assert len(said) == 1 and "1.scale" in said[0]


def test_a_rule_that_returns_too_few_rows(clean_registry: None) -> None:
    register_layer_rule(Scale, parameters=("scale",))(wrong_size)
    model, batch = scaled()
    with pytest.raises(GradientEngineError, match="expected 5 rows, one per sample"):
        per_sample_gradients(model, batch, output, "hooked", self_check=False)


@pytest.mark.parametrize("engine", ["auto", "hooked", "functional", "iterative"])
def test_train_mode_batch_norm(engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    before = model[1].running_mean.clone()
    with pytest.raises(GradientEngineError, match=r"BatchNorm layers 1 are in training mode.*eval\(\)"):
        per_sample_gradients(model, (torch.randn(5, 6),), output, engine)
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize("engine", ["auto", "hooked", "functional", "iterative"])
def test_dropout_left_on(engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 4))
    with pytest.raises(GradientEngineError, match=r"random.*In training mode: 1.*eval\(\)"):
        per_sample_gradients(model, (torch.randn(5, 6),), output, engine)


@pytest.mark.parametrize("engine", ["auto", "hooked", "functional", "iterative"])
def test_in_batch_negatives(engine: str) -> None:
    """A contrastive output: every sample is compared with the others of its batch."""

    def contrastive(result: Tensor, batch: Any) -> Tensor:
        similar = result @ result.T
        return similar.diagonal() - similar.logsumexp(1)

    model, batch = mlp()
    with pytest.raises(GradientEngineError, match=r"depends on the other samples.*in-batch negatives"):
        per_sample_gradients(model, batch, contrastive, engine)


def test_gradients_that_mix_although_outputs_do_not() -> None:
    """f is that of the sample alone, its gradient is not: a layer that normalizes the gradient over the batch."""

    class MixingGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] - grads[0].mean(0) * 0.5 if len(grads[0]) > 1 else grads[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(MixingGradient.apply(self.first(x)))

    torch.manual_seed(0)
    model, batch = Model(), (torch.randn(5, 6),)
    with pytest.raises(GradientEngineError, match=r"first\.weight"):
        per_sample_gradients(model, batch, output, "hooked")
    computer = make_gradient_computer("auto", model, function_task(output, model))
    computer.stream(batch, lambda start, block: None)
    assert computer.engine == "iterative"


def test_a_parameter_that_no_hook_saw() -> None:
    """Used inside a custom autograd function: its gradient would silently be zero."""

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grads[0] * weight, (grads[0] * x).sum(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.hidden = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return Multiply.apply(self.linear(x), self.hidden)

    torch.manual_seed(0)
    model, batch = Model(), (torch.randn(5, 6),)
    with pytest.raises(GradientEngineError, match="'hidden'"):
        per_sample_gradients(model, batch, output, "hooked")
    found = per_sample_gradients(model, batch, output, "auto")
    torch.testing.assert_close(found["hidden"], truth(model, batch)["hidden"])


def test_later_batches_are_not_checked_again() -> None:
    model, batch = mlp()
    forwards = []
    model.register_forward_hook(lambda module, args, result: forwards.append(len(args[0])))
    computer = make_gradient_computer("hooked", model, function_task(output, model))
    computer.stream(batch, lambda start, block: None)
    first = len(forwards)
    computer.stream(batch, lambda start, block: None)
    assert len(forwards) == first + 1


def test_a_batch_of_one_is_followed_by_a_check_of_a_larger_one(clean_registry: None) -> None:
    register_layer_rule(Scale, parameters=("scale",))(wrong_sample)
    model, batch = scaled()
    computer = make_gradient_computer("hooked", model, function_task(output, model))
    computer.stream((batch[0][:1],), lambda start, block: None)
    with pytest.raises(GradientEngineError, match="Scale"):
        computer.stream(batch, lambda start, block: None)


def test_samples_that_are_not_finite_are_left_to_the_consumer() -> None:
    """The check compares what can be compared, and looks again at the next batch if nothing could."""
    model, batch = mlp()
    batch[0][0] = torch.nan
    found = per_sample_gradients(model, batch, output, "auto")
    assert found["0.weight"][0].isnan().any() and found["0.weight"][1:].isfinite().all()
    computer = make_gradient_computer("auto", model, function_task(output, model))
    computer.stream((torch.full((3, 6), torch.nan),), lambda start, block: None)
    assert not computer._checked
    computer.stream((torch.randn(3, 6),), lambda start, block: None)
    assert computer._checked


# --- engines that fail ----------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, *engines: type) -> None:
    def stream(*args: Any, **kwargs: Any) -> Any:
        raise error

    for engine in engines:
        monkeypatch.setattr(engine, "stream", stream)


@pytest.mark.parametrize("error", [KeyError("lost"), IndexError("range"), AssertionError(), AttributeError("gone")])
def test_any_failure_of_an_engine_leads_to_the_next(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, error, HookedGradientComputer)
    model, batch = mlp()
    with caplog.at_level(logging.DEBUG, logger="hf_trak"):
        found = per_sample_gradients(model, batch, output, "auto")
    torch.testing.assert_close(found["0.weight"], truth(model, batch)["0.weight"])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "slower functional engine" in warnings[0]
    assert f"hooked: {type(error).__name__}: {error}" in warnings[0]
    assert error in [record.exc_info[1] for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("engine", ["hooked", "functional"])
def test_an_engine_chosen_by_name_says_how_it_failed(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = KeyError("lost")
    failing(monkeypatch, error, HookedGradientComputer, FunctionalGradientComputer)
    model, batch = mlp()
    with pytest.raises(GradientEngineError, match=f"The {engine} engine failed on Sequential.*KeyError") as caught:
        per_sample_gradients(model, batch, output, engine)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(),
        NonFiniteError("row 3"),
        PeerProcessError("rank 1"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        TimeoutError("an alarm of the user's"),
        OSError(28, "No space left on device"),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "hooked"])
def test_what_is_not_the_engines_fault_ends_the_search(
    error: BaseException, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, error, HookedGradientComputer)
    model, batch = mlp()
    with pytest.raises(type(error)) as caught:
        per_sample_gradients(model, batch, output, engine)
    assert caught.value is error


def test_when_all_fail_each_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The iterative engine is the reference, too; only what it does with the whole batch may fail."""
    failing(monkeypatch, KeyError("lost"), HookedGradientComputer, FunctionalGradientComputer)
    run = IterativeGradientComputer._run

    def of_one(self: Any, batch: Any, side: Any) -> Any:
        if len(batch[0]) > 1:
            raise RuntimeError("too many")
        return run(self, batch, side)

    monkeypatch.setattr(IterativeGradientComputer, "_run", of_one)
    model, batch = mlp()
    with pytest.raises(GradientEngineError) as caught:
        per_sample_gradients(model, batch, output, "auto")
    for reason in ("hooked: KeyError", "functional: KeyError", "iterative: RuntimeError: too many"):
        assert reason in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("engine", ["auto", "hooked", "functional", "iterative"])
def test_an_error_of_the_task_stays_what_it_is(engine: str) -> None:
    """A label that is no class, in a sample that is not one of the two: not the engines' failure."""

    class Checked(FunctionModelOutput):
        def out_to_loss_grad(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
            if bool((batch[0] > 100).any()):
                raise ValueError("sample 2 has no label")
            return super().out_to_loss_grad(model_output, batch, side)

    model, batch = mlp()
    batch[0][2, 0] = 101.0
    computer = make_gradient_computer(engine, model, Checked(output, model_inputs_fn=inputs_taken_by(model)))
    with pytest.raises(ValueError, match="sample 2 has no label"):
        computer.stream(batch, lambda start, block: None)


# --- caches ---------------------------------------------------------------------------------------------------------


class Config:
    def __init__(self, use_cache: Any, **parts: Any) -> None:
        self.use_cache = use_cache
        self.__dict__.update(parts)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def test_caches_are_off_inside_and_as_they_were_outside() -> None:
    """In the configuration of every module, and in those that only another configuration knows."""
    text, inner = Config(True), Config(True)
    whole = Config(True, text_config=text, thinker=Config(None, text_config=inner))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.config, model[0].config, model[1].config = whole, text, Config(False)
    with pytest.raises(KeyError), pass_settings(model):
        assert not any((whole.use_cache, text.use_cache, inner.use_cache, model[1].config.use_cache))
        assert whole.thinker.use_cache is None
        raise KeyError
    assert whole.use_cache is text.use_cache is inner.use_cache is True
    assert model[1].config.use_cache is False


# --- tolerances -----------------------------------------------------------------------------------------------------


def test_precision_is_seen_where_it_is_used() -> None:
    """Autocast inside `forward`, whose output is float32 again."""

    class Inside(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight, self.dtype = nn.Parameter(torch.randn(3, 6)), dtype

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", self.dtype):
                return nn.functional.linear(x, self.weight).float()

    x = torch.randn(2, 6)
    for dtype in (torch.bfloat16, torch.float16):
        model = Inside(dtype)
        with PrecisionObserver() as observer:
            y = model(x)
        assert y.dtype == torch.float32 and observer.dtypes == {dtype}
        tolerance = Tolerance.of(model, y, observer.dtypes)
        assert tolerance.relative == 4 * torch.finfo(dtype).eps and tolerance.to_be_measured
        assert tolerance.ceiling is not None and tolerance.ceiling <= 0.3
    model, batch = mlp()
    with PrecisionObserver() as observer:
        y = model(batch[0])
    assert not observer.dtypes and Tolerance.of(model, y) == Tolerance(1e-3)


def test_random_rounding_changes_the_last_bit_and_nothing_else() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64).bfloat16(), torch.randn(50, 64).bfloat16()
    plain = model(x)
    state = torch.get_rng_state()
    with rounded_at_random(model):
        first = model(x)
    with rounded_at_random(model):
        second = model(x)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(first, second)
    assert torch.equal(model(x), plain)  # no hook is left
    change = ((first - plain).float() / plain.float()).abs()
    assert 0 < float((change > 0).float().mean()) < 0.6
    assert float(change.max()) <= torch.finfo(torch.bfloat16).eps
    exact = nn.Linear(4, 4)
    with rounded_at_random(exact):
        changed = exact(x[:, :4].float())
    assert torch.equal(changed, exact(x[:, :4].float()))


def test_measured_noise_widens_a_tolerance_up_to_its_ceiling() -> None:
    norms, totals = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([2.0**0.5])
    base = Tolerance(0.03, 0.01, ceiling=0.3)
    limits = base.limits(norms, totals)
    assert torch.allclose(limits, 0.03 * (norms + 0.01 * totals))
    measured = Tolerance(0.03, 0.01, ceiling=0.3, noise=torch.tensor([[0.01, 1.0, 1e-4]]))
    found = measured.limits(norms, totals)
    assert torch.allclose(found, torch.tensor([[0.08, 0.3 * (1 + 0.1 * 2**0.5), 8e-4]]))
    assert bool((found <= base.coarsest.limits(norms, totals) + 1e-6).all())


def test_a_wrong_rule_is_refused_where_rounding_changes_everything(clean_registry: None) -> None:
    """Noise without bounds must not excuse an engine."""

    class Chaos(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(3000 * x)

    torch.manual_seed(0)
    register_layer_rule(Scale, parameters=("scale",))(wrong_sample)
    model = nn.Sequential(nn.Linear(6, 8), Chaos(), Scale(8), nn.Linear(8, 4)).bfloat16()
    with pytest.raises(GradientEngineError, match=r"gives another gradient.*'2\.scale'"):
        per_sample_gradients(model, (torch.randn(5, 6).bfloat16(),), output, "hooked", ["2.scale"])


def test_the_worst_parameter_of_gradients_that_float32_cannot_square() -> None:
    layout = ParameterLayout.from_model(nn.Linear(3, 2))
    gradients = torch.full((2, 8), 1e22)
    residual = torch.zeros(2, 8)
    assert worst_parameter(layout, residual, gradients, Tolerance(1e-3)) is None
    residual[1, 7] = 1e21
    worst = worst_parameter(layout, residual, gradients, Tolerance(1e-3))
    assert worst is not None and worst.name == "bias" and 0.05 < worst.error < 0.1 and worst.allowed == 1e-3
    residual[0, 0] = torch.nan
    worst = worst_parameter(layout, residual, gradients, Tolerance(1e-3))
    assert worst is not None and worst.name == "weight"


def test_sparse_tensors_count_by_what_they_store() -> None:
    """Activations that autograd saves may be sparse."""
    dense, values = torch.randn(6, 4), torch.randn(3, requires_grad=True)
    indices = torch.tensor([[0, 1, 2], [0, 3, 5]])

    def forward() -> Tensor:
        return torch.sparse.mm(torch.sparse_coo_tensor(indices, values, (4, 6)), dense)

    assert saved_activation_bytes(forward) >= 3 * 4


# --- padding --------------------------------------------------------------------------------------------------------


def test_rows_that_may_be_padded() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 5, 0, 0], [0, 0, 0, 3, 4], [5, 4, 3, 6, 1]])
    assert likely_padded(SplitBatch.of({"input_ids": ids, "attention_mask": mask})) == [2, 1]
    assert likely_padded(SplitBatch.of({"input_ids": ids})) == [2, 1]
    frames = torch.randn(3, 5, 2)
    frames[1, 3:] = 0.0
    assert likely_padded(SplitBatch.of({"frames": frames, "label": torch.zeros(3)})) == [1]
    assert likely_padded(SplitBatch.of({"images": torch.zeros(3, 3, 8, 8), "label": torch.zeros(3)})) == []


def test_what_a_row_is_alone() -> None:
    batch = {"x": torch.tensor([[1.0, 2.0, 0.0], [torch.nan, 4.0, 5.0], [0.0, 7.0, 8.0]]), "y": torch.arange(3)}
    split = SplitBatch.of(batch)

    def of(row: int, x: list[float], y: int) -> RowAlone | None:
        return RowAlone.of(split, row, {"x": torch.tensor([x]), "y": torch.tensor([y])})

    assert of(1, [torch.nan, 4.0, 5.0], 1) is None
    behind, before = of(0, [1.0, 2.0], 0), of(2, [7.0, 8.0], 2)
    assert behind is not None and behind.padded and behind.changed == ()
    assert before is not None and before.padded and before.changed == ()
    other = of(0, [1.0, 3.0], 1)
    assert other is not None and other.padded and other.changed == ("x", "y")
    same_length = of(1, [3.0, 4.0, 5.0], 1)
    assert same_length is not None and not same_length.padded and same_length.changed == ("x",)
    assert RowAlone.of(split, 0, {"x": torch.ones(2, 2), "y": torch.ones(2)}) is None


class Rounding(nn.Module):
    """Adds what a kernel for batches might round otherwise, which turns one of many units on."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (2e-7 if len(x) > 1 else 0.0)


def kinked(units: int) -> tuple[nn.Module, tuple[Tensor]]:
    """One unit has an input of −1e-7 for every sample, and all others are far from zero."""
    torch.manual_seed(0)
    layer = nn.Linear(6, units)
    with torch.no_grad():
        layer.weight[0], layer.bias[0] = 0.0, -1e-7
        layer.bias[1:] = 5.0
    head = nn.Linear(units, 4)
    return nn.Sequential(layer, Rounding(), nn.ReLU(), head).eval(), (torch.randn(5, 6),)


def test_a_unit_that_rounding_turns_on_is_no_error_of_the_engine() -> None:
    """Gradients of a sample alone and within its batch differ by one unit, and plain autograd says the same."""
    model, batch = kinked(20_000)
    alone, found = truth(model, batch), per_sample_gradients(model, batch, output, "hooked")
    error = (found["0.bias"] - alone["0.bias"]).norm(dim=1) / alone["0.bias"].norm(dim=1)
    assert float(error.min()) > 1e-3, "more than the check allows"
    assert float(error.max()) < 0.05


def test_an_error_as_small_as_that_is_still_found(clean_registry: None) -> None:
    register_layer_rule(Scale, parameters=("scale",))(lambda call: {"scale": 1.01 * right(call)["scale"]})
    model, batch = scaled()
    with pytest.raises(GradientEngineError, match=r"'1\.scale'.*relative error 9\.\de-03"):
        per_sample_gradients(model, batch, output, "hooked")


def test_a_unit_that_is_much_of_the_gradient_is_an_error() -> None:
    """One of ten units: no rounding of the size that is explained."""
    model, batch = kinked(10)
    with pytest.raises(GradientEngineError, match=r"relative error [1-9]"):
        per_sample_gradients(model, batch, output, "hooked")


def test_batch_norm_without_statistics_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4)).eval()
    with pytest.raises(GradientEngineError, match=r"BatchNorm layers 1 keep no statistics .*GroupNorm"):
        per_sample_gradients(model, (torch.randn(5, 6),), output, "auto")


class Masking(nn.Module):
    """Draws a mask in evaluation mode, too, as ViTMAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * (torch.rand_like(x) < 0.5))


def test_a_model_that_is_random_in_evaluation_mode_is_not_told_to_call_eval() -> None:
    with pytest.raises(GradientEngineError, match="Masking draws random numbers in evaluation mode") as caught:
        per_sample_gradients(Masking().eval(), (torch.randn(5, 6),), output, "auto")
    assert "eval()" not in str(caught.value)
