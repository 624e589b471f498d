"""What an engine changes for the time of one pass: context managers that put everything back, also on exceptions."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hf_trak._compat import keeping_4bit_weights, packed_4bit_layer
from hf_trak.gradient_computers.activation_checkpointing import checkpointed_layers


@contextmanager
def only_differentiating(model: torch.nn.Module, wanted: Collection[int]) -> Iterator[None]:
    """Give `requires_grad` to the parameters whose `id` is in `wanted`, and to no other."""
    saved = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in saved:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, flag in saved:
            parameter.requires_grad_(flag)


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
    config.problem_type = kind
    try:
        yield
    finally:
        config.problem_type = None


@contextmanager
def pass_settings(model: torch.nn.Module) -> Iterator[None]:
    """Run the model under the settings that every engine, and all that engines are compared with, has in common.

    - Decoders build no key-value caches. One pass over a batch has no use for a cache, and it changes results:
      transformers keeps the documents of a packed row apart only where there is none. This applies to all
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
    saved: list[tuple[Any, Any]] = []
    try:
        for config in _configs(model):
            value = getattr(config, "use_cache", None)
            if isinstance(value, int) and value:  # a method of that name is none of ours
                saved.append((config, value))
                config.use_cache = False
        # a process without the compiler has compiled nothing, and to import it takes a second
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with keeping_4bit_weights(model), eager:
            yield
    finally:
        for config, value in saved:
            config.use_cache = value


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
