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
    """`values`, if it has shape `(size,)`.

    Args:
        values: what the task returned.
        size: samples in the batch that it was called with: one, where an engine takes them one at a time.
        task: for the error message, which names the user's function where the task is made of one.

    Raises:
        ValueError: it has another shape, or is no tensor.
    """
    if not isinstance(values, Tensor) or values.shape != (size,):
        shape = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
        who = "`output_fn`" if hasattr(task, "output_fn") else f"The task {type(task).__name__}"
        single = "one sample (engines may take those of a batch one at a time)"
        raise ValueError(
            f"{who} returned {shape[:200]} for {single if size == 1 else f'a batch of {size} samples'}. Expected a "
            f"tensor of shape ({size},), one scalar per sample: of several outputs choose one for each, as "
            "`logits.gather(1, labels[:, None]).squeeze(1)` does, or add them up; do not average over the batch."
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
