"""Adapters of PEFT as checkpoints: their tensors in a model, and how their files are loaded.

An adapter file (`adapter_model.safetensors`) holds a few of a model's weights, under names without that of the
adapter. The base model is neither copied nor written to, which would be impossible for a quantized one.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak._compat import class_if_imported
from hf_trak.runtime.sharding import is_sharded
from hf_trak.runtime.zero import can_gather, is_partitioned, without_engine

_NOT_COMPUTED = re.compile(
    "base_model_name_or_path|revision|peft_version|auto_mapping|inference_mode|task_type|runtime_config"  # information
    "|tokenizer_name_or_path|fan_in_fan_out"  # the second of which PEFT finds out itself
    "|.*dropout.*|.*init.*|(loftq|eva|corda|lora_ga)_config"  # of the training
    "|total_step|tfinal|deltaT|beta[12]|orth_reg_weight"
    "|r|rank_pattern|bias|.*modules.*|layers_.*|target_parameters|trainable_token_indices"  # in the weights
)
"""Keys of PEFT configs that are none of what an adapter computes from its weights, or that the weights show."""


def is_adapter(model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> bool:
    """Tell whether these are the weights of an adapter for a `PeftModel`, rather than those of the whole model.

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


def _active_adapter(model: Any) -> str:
    """Return the name of the active adapter.

    Raises:
        ValueError: several adapters are active.
    """
    name = model.active_adapter
    names = [name] if isinstance(name, str) else list(name)
    if len(names) != 1:
        raise ValueError(
            f"The adapters {names} are active. Expected one, which checkpoints are loaded into. Call "
            "`model.set_adapter(name)`."
        )
    return names[0]


def adapter_state_dict(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights of the active adapter, under the names that they have in its files."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=_active_adapter(model))


def load_adapter(model: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load the weights of an adapter file, which must fit, into the active adapter."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, dict(state_dict), adapter_name=_active_adapter(model))


def check_adapter_config(model: torch.nn.Module, checkpoint: Any) -> None:
    """Refuse an adapter that computes something else from its weights than the active one, such as by `lora_alpha`.

    Args:
        model: the model to load it into.
        checkpoint: a `PeftModel`, a file, or a directory with `adapter_config.json`. Others have no config.

    Raises:
        ValueError: their configs differ.
    """
    given = _adapter_config(checkpoint)
    if given is None or (own := _adapter_config(model)) is None:
        return
    compared = [key for key in sorted({*given} & {*own}) if not _NOT_COMPUTED.fullmatch(key)]
    changed = {key: (given[key], own[key]) for key in compared if (given[key] or None) != (own[key] or None)}
    if changed:
        shown = ", ".join(f"`{key}={other!r}` ({mine!r} in the model)" for key, (other, mine) in changed.items())
        raise ValueError(
            f"The adapter of a checkpoint has {shown}. Expected what the active adapter has, since weights alone are "
            "loaded. Make an attributor of each, with a model of its own."
        )


def _adapter_config(checkpoint: Any) -> dict[str, Any] | None:
    """Return the config of an adapter as plain JSON; `None` if there is none."""
    if hasattr(checkpoint, "peft_config"):
        if not isinstance(name := getattr(checkpoint, "active_adapter", None), str):
            return None  # a base model that knows of its adapters, or several active ones
        config = checkpoint.peft_config[name].to_dict()
        return json.loads(json.dumps(config, default=lambda one: sorted(one) if isinstance(one, set) else str(one)))
    if not isinstance(checkpoint, str | os.PathLike):
        return None
    path = Path(checkpoint)
    path = (path if path.is_dir() else path.parent) / "adapter_config.json"
    return json.loads(path.read_bytes()) if path.is_file() else None


def adapter_tensors(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters and buffers that [`load_adapter`] writes to, with their names."""
    written = {tensor.data_ptr() for tensor in adapter_state_dict(model).values()}
    # A prompt is saved as the output of its encoder, which is a copy of the encoder's embedding.
    written |= {tensor.data_ptr() for tensor in getattr(model, "prompt_encoder", torch.nn.Module()).parameters()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if tensor.data_ptr() in written]


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_quantized(model: torch.nn.Module) -> bool:
    """Tell whether the weights of a model, or those of the base below its adapters, are quantized."""
    base = _base_of(model)
    return bool(getattr(base, "is_quantized", False)) or getattr(base, "hf_quantizer", None) is not None


def check_not_quantized(model: torch.nn.Module, what: str, remedy: str) -> None:
    """Refuse a model whose weights, or those of the base below its adapters, are quantized.

    Args:
        model: the model.
        what: the request that needs other weights, as the beginning of the error message.
        remedy: what to do instead, as its end.

    Raises:
        ValueError: weights are quantized.
    """
    base = _base_of(model)
    if is_quantized(base):
        raise ValueError(
            f"{what}, but the weights of the {type(base).__name__} are quantized, so they can neither be cast nor "
            f"replaced. {remedy}"
        )


_REMEDY = (
    "Supported: a copy of the model in every process; for a model too large for one device, FSDP2 (`fully_shard`), "
    "which is `fsdp_version: 2` of accelerate, ZeRO-3 of a running DeepSpeed, or one process and "
    "`from_pretrained(..., device_map='auto')` over its devices. Load the saved weights that way and pass that model "
    "(`accelerator.save_model`, or `accelerator.get_state_dict` and `save_pretrained`, write the full weights)."
)


def check_placement(model: torch.nn.Module) -> None:
    """Refuse anything but a module, and modules whose parameters are sharded in a way that is not supported, or not
    loaded.

    Raises:
        TypeError: `model` is not a module, but a name, a `Trainer`, or something else; or it is TorchScript.
        ValueError: FSDP1, or ZeRO-3 whose processes are gone, keeps only a part of a parameter in this process, a
            parameter is on the meta device (offloaded to CPU or disk, or never loaded), or an adapter is merged.
            Names the parameter and the supported way.
    """
    if not isinstance(model, torch.nn.Module):
        given = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        raise TypeError(
            f"`model` is {given}. Expected the trained model itself, a `torch.nn.Module`. Load it with "
            "`AutoModelFor….from_pretrained(name)`; from a `Trainer`, use `TrakAttributor.from_trainer(trainer)`."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"`model` is TorchScript, {type(model).__name__}, whose layers cannot be looked into. Expected the module "
            "that `torch.jit.script` or `torch.jit.trace` was given. Make it from its class, and load its "
            "`state_dict()`."
        )
    if hasattr(model, "peft_config"):
        merged = [name for name, module in model.named_modules() if getattr(module, "merged", False) is True]
        if merged:
            raise ValueError(
                f"The adapter is merged into the base model ({merged[0]!r}), where its weights have no gradient. "
                "Expected it beside the base model. Call `model.unmerge_adapter()`."
            )
    fsdp1 = class_if_imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, module in model.named_modules() if fsdp1 is not None else ():
        if isinstance(module, fsdp1):
            raise ValueError(
                f"The module {name or type(model).__name__!r} is wrapped in FullyShardedDataParallel, which keeps "
                f"a shard of its parameters in each process. {_REMEDY}"
            )
    sharded = is_sharded(model)
    for name, parameter in model.named_parameters():
        if is_partitioned(parameter) and not can_gather():
            raise ValueError(
                f"The parameter {name!r} is partitioned by DeepSpeed ZeRO-3, whose processes are not connected. "
                f"{_REMEDY}"
            )
        if parameter.is_meta and not sharded:  # `check_plan` says it of those, to all processes
            raise ValueError(
                f"The parameter {name!r} is on the meta device: `device_map` has offloaded it to the CPU or the disk, "
                "or it was never loaded. Expected every parameter on a device. Give `device_map` more memory "
                "(`max_memory`), a smaller dtype, or more devices."
            )


def without_wrappers(model: Any) -> Any:
    """Take off wrappers in whatever order.

    They are `torch.compile`, `DataParallel`, `DistributedDataParallel` and DeepSpeed's engine. They prepend
    `_orig_mod.` and `module.` to the names of parameters, and split batches or compile code. That is no use to
    per-sample gradients. The model inside is the one that was trained.

    Args:
        model (`torch.nn.Module`):
            The model. Anything else is returned as it is.
    """
    # `is_compiled_module` of accelerate imports the compiler for this, which takes a second
    compiled = class_if_imported("torch._dynamo.eval_frame", "OptimizedModule")
    while True:
        inner = without_engine(model)
        if inner is not model:
            model = inner
        elif isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif compiled is not None and isinstance(model, compiled):
            model = model._orig_mod
        elif isinstance(model, torch.nn.Module) and "_orig_mod" in vars(model):  # accelerate's regional compilation
            model = vars(model)["_orig_mod"]
        else:
            return model
