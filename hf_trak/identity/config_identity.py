"""The part of a model's config, and of the configs of its adapters, that `forward` may read."""

import argparse
import dataclasses
import enum
import math
import types
from collections.abc import Mapping
from typing import Any


def by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Return the reason to leave out each name, from the names with each reason, divided by blanks."""
    return {name: reason for reason, text in names.items() for name in text.split()}


VOLATILE = by_name({
    "where weights were found": "_name_or_path name_or_path _commit_hash",
    "the class is compared": "architectures",
    "where remote code was found; the code is compared": "auto_map custom_pipelines",
    "versions are compared by themselves": "transformers_version",
    "for another library": "transformers.js_config",
    "weights have their dtype": "torch_dtype dtype",
    "gradients are taken without a cache": "use_cache",
    "adds outputs, changes none": "output_hidden_states output_attentions output_router_logits",
    "the form of outputs": "return_dict",
    "names of classes; their number is that of the weights": "id2label label2id",
    "set by the first call of a classifier, and read for its own loss alone": "problem_type",
    "information": "finetuning_task license",
    "information; rows are compared as the model gets them": "tokenizer_class processor_class prefix",
    "saves memory, computes the same": "gradient_checkpointing activation_checkpointing chunk_size_feed_forward",
    "another implementation of the same computation": "_attn_implementation _attn_implementation_internal "
    "_attn_implementation_autoset attn_implementation _experts_implementation _experts_implementation_internal "
    "experts_implementation",
    "weights are given": "initializer_range initializer_factor init_std",
    "for generation": "task_specific_params suppress_tokens begin_suppress_tokens forced_bos_token_id "
    "forced_eos_token_id forced_decoder_ids",
    "for generation, and set to the tokenizer's by `Trainer`": "bos_token_id",
})  # fmt: skip
"""Keys of configs that are left out at every level, with the reason."""

ADAPTER_VOLATILE = by_name({
    "where weights were found": "base_model_name_or_path revision",
    "versions are compared by themselves": "peft_version",
    "information": "auto_mapping",
    "which parameters are trained is known from the parameters": "inference_mode",
    "weights are given": "init_lora_weights init_weights loftq_config eva_config corda_config lora_ga_config",
    "where, not what": "runtime_config",
})  # fmt: skip
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
    found = {str(name): _without(_content(config), ADAPTER_VOLATILE) for name, config in sorted(configs.items())}
    for one in found.values():  # PEFT lists the same modules again each time that it loads an adapter of a classifier
        if isinstance(saved := one.get("modules_to_save"), list):
            one["modules_to_save"] = list(dict.fromkeys(saved))
    return found


def _content(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if callable(getattr(config, "to_dict", None)):
        return config.to_dict()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return vars(config) if isinstance(config, argparse.Namespace | types.SimpleNamespace) else {}


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
