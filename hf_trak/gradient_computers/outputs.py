"""Forward passes for a task, and plain autograd's gradients of what comes out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions import function
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, call_model


def run_model(
    task: BatchedModelOutput,
    model: torch.nn.Module,
    batch: Batch,
    weights: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> Any:
    """Run one forward pass of a batch with the inputs that the task takes from it.

    Args:
        task: the task.
        model: the model.
        batch: the batch.
        weights, buffers: used in place of the model's own where `weights` is given.

    Returns:
        What the model returned.
    """
    args, kwargs = task.model_inputs(batch)
    return call_model(model, weights, buffers, args, kwargs)


def one_per_sample(values: Any, size: int, task: AbstractModelOutput) -> Tensor:
    """Check that a task returned one value per sample.

    Args:
        values: what the task returned.
        size: samples in the batch that it was called with: one, where an engine takes them one at a time.
        task: named in the error message.

    Returns:
        `torch.Tensor`: `values`.

    Raises:
        ValueError: it has another shape than `(size,)`, or is no tensor.
    """
    return function.one_per_sample(values, size, f"The task {type(task).__name__}")


def gradients_of(f: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients of a scalar by plain autograd.

    Reentrant activation checkpointing refuses `autograd.grad`. There, gradients are accumulated in `.grad`, which is
    put back as it was.

    Args:
        f: the scalar.
        parameters: what to differentiate with respect to.

    Returns:
        One gradient per parameter, `None` for one that `f` does not depend on.

    Raises:
        RuntimeError: autograd cannot differentiate `f`.
    """
    try:
        return list(torch.autograd.grad(f, parameters, allow_unused=True, retain_graph=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    return accumulated_gradients(f, parameters)


def accumulated_gradients(f: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients of a scalar as [`gradients_of`] does, in one backward pass under any kind of checkpointing.

    Args:
        f: the scalar.
        parameters: what to differentiate with respect to, all leaves that require a gradient.

    Returns:
        One gradient per parameter, `None` for one that `f` does not depend on.
    """
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        f.backward()
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
