"""Gradient computers: a model, a task and a batch in; blocks of per-sample gradients out.

`base` has the contract, and `layout` the order of the parameters. The engines are `hooked/` (one pass over the batch),
`functional` (vmap) and `iterative` (one sample at a time). `auto` chooses among them, and checks the choice on the
first batch against plain autograd (`self_check`, `tolerance`, `padding`). `sharded` is the hooked engine on models
that are divided over processes, `sharded_check` its check. `environment` has what engines change for one pass,
`activation_checkpointing` among it. `per_sample` is the public function without tasks. Start reading at `auto`, or at
the map in `hooked/__init__`.

The package imports tasks (`hf_trak.modelout_functions`), free memory and `_compat`. It knows no files and no
projections.
"""

from collections.abc import Iterable

import torch

from hf_trak.gradient_computers.auto import ENGINES, AutoGradientComputer, engines_of
from hf_trak.gradient_computers.base import AbstractGradientComputer, BatchOutputs, GradientSink, batch_size_of
from hf_trak.gradient_computers.functional import FunctionalGradientComputer
from hf_trak.gradient_computers.hooked.batched_op import BatchedOp, register_op_handler, unregister_op_handler
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.gradient_computers.hooked.rules import LayerCall, register_layer_rule, unregister_layer_rule
from hf_trak.gradient_computers.iterative import IterativeGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot
from hf_trak.gradient_computers.per_sample import per_sample_gradients
from hf_trak.modelout_functions.base import AbstractModelOutput

__all__ = [
    "ENGINES",
    "AbstractGradientComputer",
    "AutoGradientComputer",
    "BatchOutputs",
    "BatchedOp",
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
    "register_op_handler",
    "unregister_layer_rule",
    "unregister_op_handler",
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
    """Make a gradient computer by name. It checks itself on the first batch.

    Args:
        engine (`str`):
            `"auto"` tries the engines of [`ENGINES`] in order. A name takes that one alone, and raises where it fails
            the check.
        model (`torch.nn.Module`):
            The model.
        task ([`AbstractModelOutput`]):
            The model output function.
        grad_wrt (`Iterable[str]`, *optional*):
            Names of the parameters to attribute. `None` takes those with `requires_grad`.
        dtype (`torch.dtype`, *optional*):
            Dtype of the gradients. `None` keeps that of the parameters.
        device (`torch.device` or `str`, *optional*):
            Device of the gradients. `None` keeps that of the parameters.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to compare two samples of the first batch with plain autograd on each alone.
        max_block_bytes (`int`, *optional*):
            Bytes of a block of gradients at which the hooked engine cuts large parameters into slices. `None` is
            32 MiB, and 256 MiB on a GPU.

    Returns:
        [`AutoGradientComputer`]: the gradient computer.

    Raises:
        ValueError: an unknown engine; `max_block_bytes` is not positive; `grad_wrt` does not fit the model.
    """
    return AutoGradientComputer(
        model, task, None, dtype, device, grad_wrt, engines_of(engine), self_check, max_block_bytes
    )
