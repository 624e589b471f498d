"""Adapters of PEFT as checkpoints: their tensors in a model, and how their files are loaded.

An adapter file (`adapter_model.safetensors`) holds a few of a model's weights, under names without that of the
adapter. The base model is neither copied nor written to, which would be impossible for a quantized one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def is_adapter(model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> bool:
    """Whether these are the weights of an adapter for a `PeftModel`, rather than those of the whole model.

    Raises:
        ValueError: the weights belong to an adapter, but the model is not a `PeftModel`.
    """
    if hasattr(model, "peft_config"):
        return not set(state_dict) <= set(model.state_dict())
    names = set(state_dict) - set(model.state_dict())
    if any(name == "prompt_embeddings" or name.startswith("base_model.model.") for name in names):
        raise ValueError(
            f"The checkpoint holds an adapter of PEFT (with the names {sorted(names)[:3]}), but the model is a "
            f"{type(model).__name__}. Expected a `PeftModel` to load it into. Wrap the base model, "
            "once for all checkpoints, with `PeftModel.from_pretrained(base, checkpoint)` or `get_peft_model`."
        )
    return False


def adapter_state_dict(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights of the active adapter, under the names that they have in its files."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model)


def load_adapter(model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load the weights of an adapter file, which must fit, into the active adapter."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, dict(state_dict))


def adapter_tensors(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters and buffers that [`load_adapter`] writes to, with their names."""
    written = {tensor.data_ptr() for tensor in adapter_state_dict(model).values()}
    # A prompt is saved as the output of its encoder, which is a copy of the encoder's embedding.
    written |= {tensor.data_ptr() for tensor in getattr(model, "prompt_encoder", torch.nn.Module()).parameters()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if tensor.data_ptr() in written]


def check_not_quantized(model: torch.nn.Module, what: str, remedy: str) -> None:
    """Refuse a model whose weights, or those of the base below its adapters, are quantized.

    Args:
        model: the model.
        what: the request that needs other weights, as the beginning of the error message.
        remedy: what to do instead, as its end.

    Raises:
        ValueError: weights are quantized.
    """
    wrapper: Any = model
    inner: Any = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper
    if getattr(inner, "is_quantized", False) or getattr(inner, "hf_quantizer", None) is not None:
        raise ValueError(
            f"{what}, but the weights of the {type(inner).__name__} are quantized, so they can neither be cast nor "
            f"replaced. {remedy}"
        )
