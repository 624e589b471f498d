"""The first-batch check: what must not become a silently wrong gradient."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers import make_gradient_computer, per_sample_gradients
from hf_trak.gradient_computers.per_sample import FunctionOutput
from hf_trak.gradient_computers.rules import LayerCall, register_layer_rule, unregister_layer_rule


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
    computer = make_gradient_computer("auto", model, FunctionOutput(output, model))
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
    computer = make_gradient_computer("auto", model, FunctionOutput(output, model))
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
    computer = make_gradient_computer("hooked", model, FunctionOutput(output, model))
    computer.stream(batch, lambda start, block: None)
    first = len(forwards)
    computer.stream(batch, lambda start, block: None)
    assert len(forwards) == first + 1


def test_a_batch_of_one_is_followed_by_a_check_of_a_larger_one(clean_registry: None) -> None:
    register_layer_rule(Scale, parameters=("scale",))(wrong_sample)
    model, batch = scaled()
    computer = make_gradient_computer("hooked", model, FunctionOutput(output, model))
    computer.stream((batch[0][:1],), lambda start, block: None)
    with pytest.raises(GradientEngineError, match="Scale"):
        computer.stream(batch, lambda start, block: None)


def test_samples_that_are_not_finite_are_left_to_the_consumer() -> None:
    """The check compares what can be compared, and looks again at the next batch if nothing could."""
    model, batch = mlp()
    batch[0][0] = torch.nan
    found = per_sample_gradients(model, batch, output, "auto")
    assert found["0.weight"][0].isnan().any() and found["0.weight"][1:].isfinite().all()
    computer = make_gradient_computer("auto", model, FunctionOutput(output, model))
    computer.stream((torch.full((3, 6), torch.nan),), lambda start, block: None)
    assert not computer._checked
    computer.stream((torch.randn(3, 6),), lambda start, block: None)
    assert computer._checked
