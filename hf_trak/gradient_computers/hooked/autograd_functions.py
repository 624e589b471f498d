"""The nodes that one pass of the hooked engine puts into the autograd graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError


class Keep(torch.autograd.Function):
    """Holds tensors as autograd holds what it saves: checked for changes in place, recomputed under checkpointing.

    Nothing depends on its result; the tensors are read from its node.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)  # a zero would be a kernel per layer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("nothing depends on this value")


class PerSample(torch.autograd.Function):
    """A parameter value expanded along the batch dimension; its gradient, not yet summed over the batch, is handed
    on."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, shape: list[int], receive: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.receive = receive
        return value.expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.receive(grads[0])
        return None, None, None, None


class Trap(torch.autograd.Function):
    """A parameter value in an operation that cannot be taken apart: an error if a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, message: str) -> Tensor:
        ctx.message = message
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise GradientEngineError(ctx.message)
