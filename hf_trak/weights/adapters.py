"""Adapters of PEFT as checkpoints: what in a model belongs to them, and how their files get into it.

An adapter file (`adapter_model.safetensors`) holds a few of a model's weights, under names without the adapter's. The
base below stays as it is: never copied, never written to, which for a quantized one would not even be possible.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def is_adapter(model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> bool:
    """Whether these are weights of an adapter for a `PeftModel`, and not of the whole model.

    Raises:
        ValueError: they are an adapter's, but the model is not a `PeftModel`.
    """
    if hasattr(model, "peft_config"):
        return not set(state_dict) <= set(model.state_dict())
    names = set(state_dict) - set(model.state_dict())
    if any(name == "prompt_embeddings" or name.startswith("base_model.model.") for name in names):
        raise ValueError(
            f"The checkpoint holds an adapter of PEFT (with the names {sorted(names)[:3]}), but the model is a "
            f"{type(model).__name__}. Expected a `PeftModel` to load it into: wrap the base model, "
            "once for all checkpoints, with `PeftModel.from_pretrained(base, checkpoint)` or `get_peft_model`."
        )
    return False


def adapter_state_dict(model: torch.nn.Module) -> dict[str, Tensor]:
    """The weights of the active adapter, by the names that they have in its files."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model)


def load_adapter(model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Put the weights of an adapter file, which must fit, into the active adapter."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, dict(state_dict))


def adapter_tensors(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that [`load_adapter`] writes to, by name."""
    written = {tensor.data_ptr() for tensor in adapter_state_dict(model).values()}
    # Prompts are saved as the output of their encoder, which is a copy of its embedding.
    written |= {tensor.data_ptr() for tensor in getattr(model, "prompt_encoder", torch.nn.Module()).parameters()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if tensor.data_ptr() in written]


def check_not_quantized(model: torch.nn.Module, what: str, remedy: str) -> None:
    """Raise `ValueError` if the model, or the base below its adapters, has quantized weights.

    Args:
        model: the model.
        what: what was asked for, as the beginning of the message.
        remedy: what to do instead.
    """
    wrapper: Any = model
    inner: Any = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper
    if getattr(inner, "is_quantized", False) or getattr(inner, "hf_quantizer", None) is not None:
        raise ValueError(
            f"{what}, but the weights of the {type(inner).__name__} are quantized, so they can neither be cast nor "
            f"replaced. {remedy}"
        )
