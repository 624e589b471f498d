"""The changes of an engine for the time of one pass: context managers that put everything back, also on exceptions."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hf_trak._compat import class_if_imported, keeping_4bit_weights, packed_4bit_layer

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
    with _kept(marked, _FUNCTION), _kept(marked, "training"):
        for module in marked:
            setattr(module, _FUNCTION, _in_evaluation_mode(module, getattr(module, _FUNCTION)))
            module.training = True
        yield


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


@contextmanager
def _kept(owners: Iterable[Any], name: str) -> Iterator[None]:
    """Return a context after which an attribute of each owner is what it was before."""
    saved = [(owner, getattr(owner, name)) for owner in owners]
    try:
        yield
    finally:
        for owner, value in saved:
            setattr(owner, name, value)


@contextmanager
def removing(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks when the block ends."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def gradients_set_aside(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Return a context in which parameters begin without a gradient. Afterwards they have those from before."""
    parameters = list(parameters)
    with _kept(parameters, "grad"):
        for parameter in parameters:
            parameter.grad = None
        yield


def require_graph() -> None:
    """Refuse a mode in which every gradient would be zero.

    Raises:
        ValueError: `torch.inference_mode()` is entered.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Gradients are asked for within `torch.inference_mode()`, where torch records none. Expected a call "
            "outside of it. Leave that region first, or use `torch.no_grad()` in its place."
        )


@contextmanager
def only_differentiating(model: torch.nn.Module, wanted: Collection[int]) -> Iterator[None]:
    """Give `requires_grad` to the parameters whose `id` is in `wanted`, and to no other.

    Raises:
        ValueError: see [`require_graph`].
    """
    require_graph()
    changed = [one for one in model.parameters() if one.requires_grad != (id(one) in wanted)]
    with _kept(changed, "requires_grad"):
        for parameter in changed:
            parameter.requires_grad_(id(parameter) in wanted)
        yield


@contextmanager
def differentiating(model: torch.nn.Module, wanted: Collection[int]) -> Iterator[None]:
    """Record a graph of what the model computes, as every engine that takes gradients from such a graph does.

    It sets `requires_grad` as [`only_differentiating`] does, and the model runs under [`pass_settings`] and with the
    layers checkpointed that the model has marked, see [`checkpointed_layers`].

    Args:
        model: the model.
        wanted: the `id` of each parameter that is to be differentiated.
    """
    with only_differentiating(model, wanted), pass_settings(model), checkpointed_layers(model), torch.enable_grad():
        yield


@contextmanager
def problem_type_fixed(model: torch.nn.Module, labels: Any) -> Iterator[None]:
    """Set `config.problem_type`, which the sequence-classification loss otherwise writes during its first call.

    Under vmap a tensor of one sample would decide what is written. The rule is that of transformers.

    Args:
        model: the model.
        labels: the labels of the batch; nothing is set without them.
    """
    config = getattr(model, "config", None)
    if labels is None or config is None or getattr(config, "problem_type", "absent") is not None:
        yield
        return
    if getattr(config, "num_labels", None) == 1:
        kind = "regression"
    elif isinstance(labels, torch.Tensor) and labels.dtype in (torch.long, torch.int):
        kind = "single_label_classification"
    else:
        kind = "multi_label_classification"
    with _kept([config], "problem_type"):
        config.problem_type = kind
        yield


@contextmanager
def pass_settings(model: torch.nn.Module) -> Iterator[None]:
    """Run the model under the settings that are common to every engine and to all that engines are compared with.

    - Decoders build no key-value caches. One pass over a batch has no use for a cache, and it changes results:
      transformers keeps the documents of a packed row apart only without one. This applies to all
      configurations of the model, also to one that is held by another (`text_config`) and belongs to no module.
    - Compiled code is set aside (`model.compile()`, `torch.compile`): hooks and functional transforms would have it
      compiled anew, for minutes, and it computes the same.
    - The 4-bit layers of bitsandbytes keep their weights as they are, see [`keeping_4bit_weights`].

    Raises:
        ValueError: such a layer has rewritten its weights before.
    """
    packed = packed_4bit_layer(model)
    if packed is not None:
        name, setting = packed
        raise ValueError(
            f"bitsandbytes has rewritten the 4-bit weights of {name!r} for inference, so no gradient passes through "
            f"it. Load the model again, and before any evaluation on the CPU set `{setting} = False` on its 4-bit "
            "layers."
        )
    # a method of that name is none of ours
    caching = [one for one in _configs(model) if isinstance(getattr(one, "use_cache", None), int) and one.use_cache]
    # a process without the compiler has compiled nothing, and to import it takes a second
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with _kept(caching, "use_cache"), keeping_4bit_weights(model), eager:
        for config in caching:
            config.use_cache = False
        yield


def _configs(model: torch.nn.Module) -> list[Any]:
    """Collect the configurations of all modules, and those that these hold, each once."""
    found: dict[int, Any] = {}
    # an attribute that is not there is expensive to ask a module for, and a model has thousands of modules
    left = [m.config for m in model.modules() if "config" in m.__dict__ or hasattr(type(m), "config")]
    while left:
        config = left.pop()
        if id(config) not in found and hasattr(config, "__dict__"):
            found[id(config)] = config
            left += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return list(found.values())
