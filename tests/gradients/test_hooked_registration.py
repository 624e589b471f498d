"""Rules and handlers registered from outside the library, as docs/contributing.md describes them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers import (
    BatchedOp,
    HookedGradientComputer,
    per_sample_gradients,
    register_op_handler,
    unregister_op_handler,
)
from hf_trak.gradient_computers.hooked import batched_op
from hf_trak.gradient_computers.hooked.op_handlers import broadcasting
from hf_trak.gradient_computers.per_sample import function_task


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Handlers that a test registers are gone after it."""
    before = dict(batched_op.HANDLERS)
    yield
    batched_op.HANDLERS.clear()
    batched_op.HANDLERS.update(before)


class Slope(nn.Module):
    """A parameter value, not a parameter, goes into the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.log_slope = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.log_slope.exp())


def prelu(op: BatchedOp) -> Any:
    x, slope = op.argument(0, "input"), op.argument(1, "weight")
    return op.through_rule(
        x, {"slope": slope}, lambda x, grad: {"slope": (grad * x.clamp(max=0)).flatten(2).sum(2)}, rows=True
    )


def model_of(layer: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(5, 6, 3), layer, nn.Conv1d(6, 2, 1)).eval(), torch.randn(4, 5, 9)


def squares(output: Tensor, batch: Any) -> Tensor:
    return output.square().flatten(1).sum(1)


def replayed(model: nn.Module, x: Tensor) -> list[str]:
    """Compare all gradients with autograd; the names of modules that were evaluated sample by sample."""
    found = per_sample_gradients(model, x, squares, "hooked", self_check=False)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for i in range(len(x)):
        truth = torch.autograd.grad(squares(model(x[i : i + 1]), None).sum(), parameters)
        for name, gradient in zip(names, truth, strict=True):
            torch.testing.assert_close(found[name][i], gradient)
    computer = HookedGradientComputer(model, function_task(squares, model), None, None, None)
    computer.stream((x,), lambda start, block: None)
    return list(computer._model_trace.replayed)


def test_a_handler_takes_the_place_of_the_replay() -> None:
    model, x = model_of(Slope())
    assert replayed(model, x) == ["1"]
    assert register_op_handler(F.prelu)(prelu) is prelu
    assert replayed(model, x) == []
    unregister_op_handler(F.prelu)
    assert replayed(model, x) == ["1"]
    with pytest.raises(KeyError):
        unregister_op_handler(F.prelu)


def test_a_handler_that_declines_leaves_the_module_to_the_replay() -> None:
    def declining(op: BatchedOp) -> Any:
        raise op.unsupported("is not for today")

    register_op_handler(F.prelu)(declining)
    model, x = model_of(Slope())
    assert replayed(model, x) == ["1"]


def test_a_wrong_handler_is_found_out() -> None:
    def doubled(op: BatchedOp) -> Any:
        slope = op.argument(1, "weight")
        formula = lambda x, grad: {"slope": 2 * (grad * x.clamp(max=0)).flatten(2).sum(2)}  # noqa: E731
        return op.through_rule(op.args[0], {"slope": slope}, formula, rows=True)

    register_op_handler(F.prelu)(doubled)
    model, x = model_of(Slope())
    with pytest.raises(GradientEngineError, match=r"gives another gradient.*'1\.log_slope'"):
        per_sample_gradients(model, x, squares, "hooked")


class Power(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(1 + torch.rand(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.xlogy(x.square(), self.base)


def test_an_elementwise_operation_takes_the_handler_of_all_others() -> None:
    model, x = model_of(Power())
    assert replayed(model, x) == ["1"]
    register_op_handler(torch.special.xlogy)(broadcasting)
    assert replayed(model, x) == []


class Token(nn.Module):
    """The batch dimension comes into being in an operation on a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.repeat_interleave(self.token, x.shape[0], 0), x], 2)


def repeated(op: BatchedOp) -> Any:
    out = op.run(op.plain)
    axis = op.output_axis(out)
    tracked = op.tracked(op.args[0])
    return op.without_batch() if axis is None else op.per_sample(tracked, axis, out.ndim)


def test_a_handler_in_whose_operation_the_batch_comes_into_being() -> None:
    model, x = model_of(Token())
    assert replayed(model, x) == ["1"]
    register_op_handler(torch.repeat_interleave, creates_batch=True)(repeated)
    assert replayed(model, x) == []
    register_op_handler(torch.repeat_interleave)(repeated)  # without saying so, it seems to have no batch at all
    assert replayed(model, x) == ["1"]
