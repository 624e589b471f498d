"""The part of a model's config, and of the configs of its adapters, that `forward` may read."""

import argparse
import dataclasses
import enum
import math
import types
from collections.abc import Mapping
from typing import Any

VOLATILE = {
    "_name_or_path": "where weights were found",
    "name_or_path": "the same",
    "_commit_hash": "the same",
    "architectures": "the class is compared",
    "auto_map": "where remote code was found; the code is compared",
    "custom_pipelines": "the same",
    "transformers_version": "versions are compared by themselves",
    "transformers.js_config": "for another library",
    "torch_dtype": "weights have their dtype",
    "dtype": "the same",
    "use_cache": "gradients are taken without a cache",
    "output_hidden_states": "adds outputs, changes none",
    "output_attentions": "the same",
    "output_router_logits": "the same",
    "return_dict": "the form of outputs",
    "id2label": "names of classes; their number is that of the weights",
    "label2id": "the same",
    "problem_type": "set by the first call of a classifier, and read for its own loss alone",
    "finetuning_task": "information",
    "task_specific_params": "for generation",
    "tokenizer_class": "information; rows are compared as the model gets them",
    "processor_class": "the same",
    "prefix": "the same",
    "license": "information",
    "gradient_checkpointing": "saves memory, computes the same",
    "activation_checkpointing": "the same",
    "chunk_size_feed_forward": "the same",
    "_attn_implementation": "another implementation of the same computation",
    "_attn_implementation_internal": "the same",
    "_attn_implementation_autoset": "the same",
    "attn_implementation": "the same",
    "_experts_implementation": "the same",
    "_experts_implementation_internal": "the same",
    "experts_implementation": "the same",
    "initializer_range": "weights are given",
    "initializer_factor": "the same",
    "init_std": "the same",
    "suppress_tokens": "for generation",
    "begin_suppress_tokens": "the same",
    "bos_token_id": "for generation, and set to the tokenizer's by `Trainer`",
    "forced_bos_token_id": "for generation",
    "forced_eos_token_id": "the same",
    "forced_decoder_ids": "the same",
}
"""Keys of configs that are left out at every level, with the reason."""

ADAPTER_VOLATILE = {
    "base_model_name_or_path": "where weights were found",
    "revision": "the same",
    "peft_version": "versions are compared by themselves",
    "auto_mapping": "information",
    "inference_mode": "which parameters are trained is known from the parameters",
    "init_lora_weights": "weights are given",
    "init_weights": "the same",
    "loftq_config": "the same",
    "eva_config": "the same",
    "corda_config": "the same",
    "lora_ga_config": "the same",
    "runtime_config": "where, not what",
}
"""Keys of PEFT configs that are left out, with the reason."""


def config_identity(config: Any) -> dict[str, Any]:
    """Return the content of a config as plain JSON, without [`VOLATILE`] keys; empty if it cannot be read.

    Args:
        config: a config of `transformers`, a dataclass, a namespace or a mapping.
    """
    content = _without(_content(config), VOLATILE)
    # `Trainer` sets this to that of the tokenizer, for generation. Inner configs (CLIP's text tower) keep theirs. If a
    # classifier reads it, rows that are computed again show a change.
    content.pop("eos_token_id", None)
    return content


def adapters_identity(model: Any) -> dict[str, Any]:
    """Return the PEFT configs of a model by the names of adapters, without [`ADAPTER_VOLATILE`] keys."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return {}
    return {str(name): _without(_content(config), ADAPTER_VOLATILE) for name, config in sorted(configs.items())}


def _content(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        content: Any = dict(config)
    elif callable(getattr(config, "to_dict", None)):
        content = config.to_dict()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        content = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    elif isinstance(config, argparse.Namespace | types.SimpleNamespace):
        content = vars(config)
    else:
        return {}
    return content


def _without(content: Mapping[Any, Any], left_out: Mapping[str, str]) -> dict[str, Any]:
    kept = {str(key): value for key, value in content.items() if key not in left_out}
    return {key: _plain(kept[key], left_out) for key in sorted(kept)}


def _plain(value: Any, left_out: Mapping[str, str]) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, left_out) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, left_out) for item in value), key=repr)
    if content := _content(value):
        return _without(content, left_out)
    if isinstance(value, Mapping):
        return {}
    return f"{type(value).__module__}.{type(value).__qualname__}"
