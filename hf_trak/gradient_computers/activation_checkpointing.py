"""Activation checkpointing of transformers, which the library itself does in training mode only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_trak._compat import class_if_imported

_FUNCTION = "_gradient_checkpointing_func"


@contextmanager
def checkpointed_layers(model: torch.nn.Module) -> Iterator[None]:
    """Checkpoint the layers for which that was enabled, though the model is in evaluation mode.

    `model.gradient_checkpointing_enable()` and `gradient_checkpointing=True` of a trainer mark layers of transformers
    (`GradientCheckpointingLayer`) to keep their inputs alone and to run again in the backward pass. The layers do so
    only while their `training` is true. Attribution differentiates in evaluation mode, without dropout, and needs the
    same memory. Here a layer is in training mode until it hands its forward pass to the function that checkpoints it,
    and the forward pass itself runs in evaluation mode. Modules inside a layer keep their modes throughout.

    A layer runs again with the same weights and without randomness, so gradients have the same values. Checkpoints are
    never reentrant: reentrant ones need inputs that require a gradient, which models with frozen parameters lack.

    Args:
        model: the model. Layers in training mode, and those that are not marked, are left as they are.
    """
    kind = class_if_imported("transformers.modeling_layers", "GradientCheckpointingLayer")
    marked = [
        module
        for module in (model.modules() if kind is not None else ())
        if isinstance(module, kind)
        and not module.training
        and getattr(module, "gradient_checkpointing", False)
        and callable(module.__dict__.get(_FUNCTION))
    ]
    before = [getattr(module, _FUNCTION) for module in marked]
    try:
        for module, function in zip(marked, before, strict=True):
            setattr(module, _FUNCTION, _in_evaluation_mode(module, function))
            module.training = True
        yield
    finally:
        for module, function in zip(marked, before, strict=True):
            setattr(module, _FUNCTION, function)
            module.training = False


def _in_evaluation_mode(module: torch.nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Have a layer run in evaluation mode, in the forward pass and again in the backward pass.

    Of its inputs only the first, the activations, goes through the checkpoint, which may keep it elsewhere. The second
    run sees a copy of what goes through. The others are shared by layers (masks, relative positions, the states of an
    encoder) and may be computed from parameters, which the hooked engine recognizes by the tensor itself.
    """

    def function(forward: Callable[..., Any], *args: Any) -> Any:
        def evaluated(*activations: Any) -> Any:
            before, module.training = module.training, False
            try:
                return forward(*activations, *args[1:])
            finally:
                module.training = before

        return checkpoint(evaluated, *args[:1], use_reentrant=False)

    return function
