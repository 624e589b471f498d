"""Calling a model for a task, and checking that the task gives one number per sample."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput


def call_model(
    task: BatchedModelOutput,
    model: torch.nn.Module,
    batch: Batch,
    weights: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> Any:
    """One forward pass of a batch, with the model's own weights or with those given."""
    args, kwargs = task.model_inputs(batch)
    if weights is None:
        return model(*args, **kwargs)
    return torch.func.functional_call(model, (dict(weights), dict(buffers or {})), args, kwargs)


def one_per_sample(values: Tensor, size: int, task: AbstractModelOutput) -> Tensor:
    """`values`, if it has shape `(size,)`. Raises `ValueError` otherwise."""
    if not isinstance(values, Tensor) or values.shape != (size,):
        given = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"The task {type(task).__name__} returned {given} for a batch of {size}; expected a tensor of shape "
            f"({size},), one scalar per sample. Do not average over the batch in the task."
        )
    return values


def gradients_of(f: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Plain autograd's gradients of a scalar, `None` for parameters that it does not depend on.

    Reentrant activation checkpointing refuses `autograd.grad`; there, gradients are accumulated in `.grad`, which is
    put back as it was.
    """
    try:
        return list(torch.autograd.grad(f, parameters, allow_unused=True, retain_graph=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        f.backward()
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
