"""How per-sample gradients are taken: the engines, and the choice among them."""

from collections.abc import Iterable

import torch

from hf_trak.gradient_computers.auto import ENGINES, AutoGradientComputer, engines_of
from hf_trak.gradient_computers.base import AbstractGradientComputer, BatchOutputs, GradientSink, batch_size_of
from hf_trak.gradient_computers.functional import FunctionalGradientComputer
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.gradient_computers.hooked.rules import LayerCall, register_layer_rule
from hf_trak.gradient_computers.iterative import IterativeGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot
from hf_trak.gradient_computers.per_sample import per_sample_gradients
from hf_trak.modelout_functions.base import AbstractModelOutput

__all__ = [
    "ENGINES",
    "AbstractGradientComputer",
    "AutoGradientComputer",
    "BatchOutputs",
    "FunctionalGradientComputer",
    "GradientSink",
    "HookedGradientComputer",
    "IterativeGradientComputer",
    "LayerCall",
    "ParameterLayout",
    "ParameterSlot",
    "batch_size_of",
    "make_gradient_computer",
    "per_sample_gradients",
    "register_layer_rule",
]


def make_gradient_computer(
    engine: str,
    model: torch.nn.Module,
    task: AbstractModelOutput,
    grad_wrt: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    self_check: bool = True,
    max_block_bytes: int | None = None,
) -> AutoGradientComputer:
    """A gradient computer by name, which checks itself on the first batch.

    Args:
        engine: `"auto"` tries the engines of [`ENGINES`] in order; a name takes that one alone, and its failing the
            check is an error.
        model: the model.
        task: the model output function.
        grad_wrt: names of the parameters to attribute; `None` takes those with `requires_grad`.
        dtype: dtype of the gradients; `None` keeps that of the parameters.
        device: device of the gradients; `None` keeps that of the parameters.
        self_check: whether to compare two samples of the first batch with plain autograd on each alone.
        max_block_bytes: bytes of a block of gradients at which the hooked engine cuts large parameters into slices;
            `None` is 32 MiB, and 256 MiB on a GPU.

    Raises:
        ValueError: an unknown engine; `max_block_bytes` is not positive.
    """
    return AutoGradientComputer(
        model, task, None, dtype, device, grad_wrt, engines_of(engine), self_check, max_block_bytes
    )
