"""What an engine changes for the time of one pass, as context managers that put everything back, also on
exceptions."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PACKS = "support_avx512bf16_for_cpu"  # an attribute of every `bitsandbytes.nn.Linear4bit`


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
def mask_code_traceable() -> Iterator[None]:
    """Let the mask code of transformers run under `torch.func.vmap`.

    It looks for all-true masks with `.all()`, which has no meaning under vmap; told that it is being traced, it builds
    the full mask instead, which gives the same values. The answer holds inside this context alone.
    """
    replaced: list[tuple[Any, str, Any]] = []
    utils = sys.modules.get("transformers.utils.import_utils")
    try:
        for name, answer in (("is_tracing", _yes), ("torch_compilable_check", _unchecked)):
            original: Any = getattr(utils, name, None)
            if original is None:  # transformers is not loaded, or does not have this function
                continue
            for module in [m for key, m in sys.modules.items() if key.startswith("transformers.")]:
                # `is` on the module's own dict: attribute access would trigger transformers' lazy imports
                if getattr(module, "__dict__", {}).get(name) is original and module is not utils:
                    replaced.append((module, name, original))
                    setattr(module, name, answer)
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _yes(tensor: Any = None) -> bool:
    return True


def _unchecked(cond: Any, msg: Any, error_type: type[Exception] = ValueError) -> None:
    """Data-dependent input checks cannot run under vmap; an ordinary forward pass makes them."""


@contextmanager
def problem_type_fixed(model: torch.nn.Module, labels: Any) -> Iterator[None]:
    """Set `config.problem_type`, which the sequence-classification loss otherwise writes during its first call.

    Under vmap that write would be decided by a tensor of one sample. The rule is that of transformers.
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
    """The settings under which every engine, and what engines are compared with, runs the model.

    - Decoders build no key-value caches. One pass over a batch has no use for a cache, and it changes results:
      transformers keeps the documents of a packed row apart only where there is none. All configurations of the model
      are meant, also those that another one holds (`text_config`) and that no module has for its own.
    - The 4-bit layers of bitsandbytes keep their weights as they are. On CPUs with bfloat16 instructions they
      otherwise rewrite them for inference when their input needs no gradient: that rounds the scales, and no gradient
      passes through such a layer any more.

    Raises:
        ValueError: if such a layer has been rewritten before.
    """
    _check_not_packed(model)
    saved: list[tuple[Any, str, Any]] = []
    try:
        for config in _configs(model):
            value = getattr(config, "use_cache", None)
            if isinstance(value, int) and value:  # a method of that name is none of ours
                saved.append((config, "use_cache", value))
                config.use_cache = False
        for module in model.modules():
            if module.__dict__.get(PACKS):
                saved.append((module, PACKS, module.__dict__[PACKS]))
                setattr(module, PACKS, False)
        yield
    finally:
        for holder, name, value in saved:
            setattr(holder, name, value)


def _check_not_packed(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if PACKS in module.__dict__:
            state = getattr(getattr(module, "weight", None), "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                raise ValueError(
                    f"bitsandbytes has rewritten the 4-bit weights of {name!r} for inference, so no gradient passes "
                    f"through it. Load the model again, and before any evaluation on the CPU set `{PACKS} = False` "
                    "on its 4-bit layers."
                )


def _configs(model: torch.nn.Module) -> list[Any]:
    """The configurations of all modules, and those that these hold, each once."""
    found: dict[int, Any] = {}
    # an attribute that is not there is expensive to ask a module for, and a model has thousands of modules
    left = [m.config for m in model.modules() if "config" in m.__dict__ or hasattr(type(m), "config")]
    while left:
        config = left.pop()
        if id(config) not in found and hasattr(config, "__dict__"):
            found[id(config)] = config
            left += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return list(found.values())
