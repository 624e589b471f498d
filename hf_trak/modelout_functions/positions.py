"""Position ids that do not depend on padding.

A model that numbers positions from the left edge gives a left-padded sequence other positions than the same sequence
alone, so its gradients would depend on the other rows of the batch. `generate` numbers the real tokens instead, and so
does this module.
"""

import inspect
from typing import Any

import torch

from hf_trak._compat import class_if_imported
from hf_trak.weights.wrappers import without_wrappers


def unwrapped(model: torch.nn.Module) -> tuple[Any, Any]:
    """Take off the wrappers of `accelerate`, `torch.compile` and data parallelism, and then PEFT's.

    Returns:
        The model without the former, which may be one of PEFT's, and the model inside of that.
    """
    outer: Any = without_wrappers(model)
    return outer, outer.get_base_model() if hasattr(outer, "get_base_model") else outer


def takes_positions(model: torch.nn.Module) -> bool:
    """Tell whether a model takes `position_ids` counted from 0 over the real tokens, as it would number them itself.

    Models that number positions in a way of their own do not (RoBERTa from the input ids, Qwen-VL in three
    dimensions), and neither does PEFT's prompt learning, which refuses position ids.
    """
    outer, inner = unwrapped(model)
    if getattr(getattr(outer, "active_peft_config", None), "is_prompt_learning", False):
        return False
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return False
    mixin = class_if_imported("transformers.generation.utils", "GenerationMixin")
    if mixin is not None and isinstance(inner, mixin):
        own = type(inner)._prepare_position_ids_for_generation
        if own is not mixin._prepare_position_ids_for_generation:
            return False
    return not any(hasattr(module, "create_position_ids_from_input_ids") for module in inner.modules())


def with_positions(inputs: dict[str, Any]) -> dict[str, Any]:
    """Add `position_ids` `(B, T)`, counted over what `attention_mask` `(B, T)` leaves, unless there are some."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or inputs.get("position_ids") is not None:
        return inputs
    return {**inputs, "position_ids": ((mask != 0).long().cumsum(dim=1) - 1).clamp(min=0)}
