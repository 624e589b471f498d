"""The settings of the modules of a model: numbers, texts and functions that `forward` may read beside weights."""

import argparse
import dataclasses
import enum
import functools
import inspect
import json
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from hf_trak.identity.config_identity import by_name
from hf_trak.identity.function_identity import identity_of
from hf_trak.identity.own_code import assigned_by, assigned_in_init, is_library, is_own_class, name_of
from hf_trak.identity.row_digest import update_digest

VOLATILE = by_name({
    "dropout and batch norm; features are computed in evaluation mode": "training",
    "compared by itself": "forward peft_config",
    "follows from the place of a module": "layer_idx layer_id",
    "where, not what": "device",
    "saves memory, computes the same": "gradient_checkpointing activation_checkpointing",
    "saves memory, in open_clip and timm": "grad_checkpointing",
    "where weights were found": "name_or_path",
    "labels of the Hub's model card": "model_tags",
    "not read by `forward`": "generation_config",
})  # fmt: skip
"""Attributes of modules that are left out, with the reason."""

LIBRARY_VOLATILE = by_name({
    "compared by itself": "config",
    "what an adapter layer of PEFT was made from: its settings are beside it": "kwargs",
    "names of parameters, whose values are given": "all_tied_weights_keys",
    "of rotary embeddings: those of the config, in the order of a set": "layer_types",
    "rotary embeddings note the longest sequence so far": "max_seq_len_cached",
    "models of images note the positions of the last batch": "rope_deltas",
    "saves memory, computes the same": "chunk_size_feed_forward",
    "another implementation of the same computation": "kernel_config attn_implementation",
    "another implementation of the same computation, in timm": "fused_attn",
    "where weights were found, in timm": "pretrained_cfg default_cfg",
    "where, not what": "device_map hf_device_map model_parallel",
    "where, not what, in PEFT": "ephemeral_gpu_offload",
    "weights are given": "initializer_range init_std",
    "PEFT leaves it on the model after `generate`; `forward` does not call it": "prepare_inputs_for_generation",
    "`Trainer` leaves it on a model that FSDP2 divides; `forward` does not call it": "generate",
})  # fmt: skip
"""Attributes that are left out of modules of libraries only."""

PRIVATE = frozenset({"_active_adapter", "_disable_adapters", "_adapters_disabled"})
"""Attributes of library modules that are compared although their names begin with an underscore."""

NOTES = {"bitsandbytes.autograd._functions.MatmulLtState": ("has_fp16_weights", "threshold")}
"""Objects in which layers of libraries note their passes, and what of them is a setting."""

_MAX_ITEMS = 64
_MAX_LEVELS = 4
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_FORWARD = frozenset({"forward"})
_PLAIN = frozenset({bool, int, float, str, type(None)})
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial, type, np.ufunc)
_LEFT_OUT = object()


class ModuleSettings:
    """Reads settings of the modules of one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        """
        Args:
            model: the model that is attributed. References to it in code are identified by its class alone.
        """
        self.model = model
        self._identities: dict[int, tuple[Any, Any]] = {}

    def key(self, module: torch.nn.Module) -> tuple[str, ...]:
        """Return settings as texts, quickly. Modules of one class with the same texts have the same settings."""
        cls: Any = type(module)
        own = is_own_class(cls)
        texts: list[str] = []
        for name, value in vars(module).items():
            if _is_compared(cls, name):
                if type(value) in _PLAIN or (type(value) is tuple and set(map(type, value)) <= _PLAIN):
                    texts += name, repr(value)
                elif (plain := self._plain(value, own)) is not _LEFT_OUT:
                    texts += name, json.dumps(plain, sort_keys=True)
        if beside := self._beside(module, own):
            texts.append(json.dumps(beside, sort_keys=True))
        return tuple(texts)

    def read(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return settings by name, as plain JSON."""
        cls: Any = type(module)
        own = is_own_class(cls)
        found = {name: self._plain(value, own) for name, value in vars(module).items() if _is_compared(cls, name)}
        return {name: value for name, value in found.items() if value is not _LEFT_OUT} | self._beside(module, own)

    def code(self, classes: Iterable[Any]) -> dict[str, Any]:
        """Return identities of code of the user: classes of modules, and a `forward` put into a library's class."""
        found = {}
        for cls in classes:
            if is_own_class(cls):
                found[name_of(cls)] = identity_of(cls, self.model)
            elif _is_own_function(forward := inspect.unwrap(cls.forward)):
                found[f"{name_of(cls)}.forward"] = identity_of(forward, self.model)
        return dict(sorted(found.items()))

    def _beside(self, module: torch.nn.Module, own: bool) -> dict[str, Any]:
        """Describe what changes the computation and is not an attribute: a `forward` set on the module, hooks, and
        buffers that the state dict leaves out."""
        found: dict[str, Any] = {}
        attributes = vars(module)
        if (given := attributes.get("forward")) is not None:
            forward = inspect.unwrap(getattr(given, "__func__", given))  # accelerate wraps it for mixed precision
            if forward is not inspect.unwrap(type(module).forward) and _is_own_function(forward):
                found["forward"] = self._identity(forward)
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            if attributes[kind]:
                hooks = [getattr(hook, "__func__", hook) for hook in attributes[kind].values()]
                if chosen := [self._identity(hook) for hook in hooks if _is_own_function(hook)]:
                    found[kind[1:]] = chosen
        if own:
            for name in sorted(module._non_persistent_buffers_set):
                if (buffer := module._buffers.get(name)) is not None:
                    found[name] = _digest_of(buffer)
        return found

    def _identity(self, value: Any) -> Any:
        if id(value) not in self._identities:  # one object may be an attribute of every module
            self._identities[id(value)] = value, identity_of(value, self.model)
        return self._identities[id(value)][1]

    def _plain(self, value: Any, own: bool, level: int = 0) -> Any:
        """Return a setting as plain JSON, or `_LEFT_OUT` for a value that is not a setting.

        Args:
            value: an attribute of a module, or an item of one.
            own: whether the class of the module belongs to a user.
            level: number of containers around the value.
        """
        if type(value) is float and not math.isfinite(value):
            return repr(value)
        if type(value) in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            return f"{name_of(type(value))}.{value.name}"
        if isinstance(value, Mapping | list | tuple | set | frozenset) and level < _MAX_LEVELS:
            return self._container(value, own, level + 1)
        if isinstance(value, types.MethodType):
            return self._identity(value.__func__)
        if isinstance(value, _FUNCTIONS):
            return self._identity(value)
        if isinstance(value, Tensor) and own:
            return _digest_of(value)
        if isinstance(value, torch.nn.Module) or callable(getattr(value, "to_dict", None)):
            return name_of(type(value)) if level else _LEFT_OUT  # modules and configs are compared by themselves
        if (chosen := NOTES.get(name_of(type(value)))) is not None:
            return {name: getattr(value, name, None) for name in chosen}
        if _is_settings_object(value):
            return self._identity(value)
        return name_of(type(value)) if level else _LEFT_OUT

    def _container(self, value: Any, own: bool, level: int) -> Any:
        if len(value) > _MAX_ITEMS:
            return self._identity(value)
        if isinstance(value, Mapping):
            return {str(key): self._plain(item, own, level) for key, item in value.items()}
        items = [self._plain(item, own, level) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items


@functools.cache
def _is_compared(cls: Any, name: str) -> bool:
    """Tell whether an attribute of a class of module is a setting."""
    if name in _OF_EVERY_MODULE or name in VOLATILE:
        return False
    public = name[:1] != "_" or name in PRIVATE
    if not is_own_class(cls):
        return public and name not in LIBRARY_VOLATILE
    return (public or name in assigned_in_init(cls)) and name not in assigned_by(cls, _FORWARD)


def _is_own_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and not is_library(value.__globals__.get("__name__"))


def _is_settings_object(value: Any) -> bool:
    cls: Any = type(value)
    plain = isinstance(value, argparse.Namespace | types.SimpleNamespace) or dataclasses.is_dataclass(value)
    return plain or is_own_class(cls)


def _digest_of(value: Tensor) -> str:
    """Hash a tensor that is in no state dict, at the precision of bfloat16, since models may be cast to it."""
    digest = xxhash.xxh3_64()
    if not value.is_meta:
        update_digest(digest, value.to(torch.bfloat16) if value.is_floating_point() else value)
    return f"{tuple(value.shape)} {digest.hexdigest()}"
