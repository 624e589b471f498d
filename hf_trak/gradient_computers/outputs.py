"""Calling a model for a task, and checking that the task gives one number per sample."""

from collections.abc import Mapping
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
