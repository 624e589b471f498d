"""The identity of a model apart from its weights: configs, the settings of its modules, and code of the user.

The same weights give other features with another `layer_norm_eps`, activation, `lora_alpha` or number of heads, which
no fingerprint of weights shows. The identity is plain JSON, small, and readable where two of them differ.
"""

import functools
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from hf_trak.identity.config_identity import adapters_identity, config_identity
from hf_trak.identity.function_identity import same_function
from hf_trak.identity.module_settings import ModuleSettings
from hf_trak.identity.own_code import name_of
from hf_trak.identity.row_digest import update_digest

VERSIONED = (
    *("torch", "transformers", "peft", "accelerate", "numpy", "torchvision", "open_clip_torch", "timm"),
    *("flash_attn", "mamba_ssm", "causal_conv1d", "kernels", "bitsandbytes"),
)
"""Packages that influence what a model computes, by their names in package registries."""

_MAX_COMBINATIONS = 100
_WRAPPERS = frozenset({"OptimizedModule", "DistributedDataParallel", "DataParallel"})
"""Classes of torch that only call the one module within."""


def model_identity(model: torch.nn.Module) -> dict[str, Any]:
    """Describe what a model computes apart from its weights. Takes some 10 µs per module.

    Training or evaluation mode, devices, precision, gradient checkpointing, attention implementations, and state that
    `forward` writes are left out; see `module_settings.VOLATILE` and `config_identity.VOLATILE` for the reasons. The
    contents of other objects of libraries within a module are not noticed.

    Returns:
        Plain JSON. `model`: the class. `config`: the part of the config that `forward` may read. `inner_configs`: by
        path, configs of models of `transformers` inside a model of another kind. `adapters`: PEFT configs by name.
        `modules`: for each class of module, its settings (public attributes that are numbers, texts, functions, or
        containers of them) as compact JSON, with the number of modules that have them. `order`: a digest of the
        sequence of modules and their settings. `code`: identities of classes of a user, and of methods that a user put
        into classes of a library. `versions`: see [`versions`].
    """
    while type(model).__name__ in _WRAPPERS:
        model = next(iter(model._modules.values()))  # type: ignore[assignment]
    settings = ModuleSettings(model)
    numbers: dict[tuple[Any, tuple[str, ...]], int] = {}
    kinds: list[tuple[Any, str]] = []  # class of module and settings as compact JSON, in order of appearance
    order: list[int] = []
    inner: set[int] = set()
    for module, is_within in _modules(model):
        key = type(module), settings.key(module)
        number = numbers.setdefault(key, len(kinds))
        if number == len(kinds):
            kinds.append((key[0], json.dumps(settings.read(module), sort_keys=True, separators=(",", ":"))))
        order.append(number)
        if not is_within and module is not model and _has_config(module):
            inner.add(id(module))
    by_class: dict[str, Counter[str]] = {}
    for number, count in Counter(order).items():
        cls, text = kinds[number]
        by_class.setdefault(name_of(cls), Counter())[text] += count
    return {
        "model": name_of(type(model)),
        "config": config_identity(getattr(model, "config", None)),
        "inner_configs": _inner_configs(model, inner) if inner else {},
        "adapters": adapters_identity(model),
        "modules": {name: _bounded(by_class[name]) for name in sorted(by_class)},
        "order": _order(order, [f"{name_of(cls)} {text}" for cls, text in kinds]),
        "code": settings.code({cls for cls, _ in kinds}),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the minor version of Python, and the versions without build tag of installed [`VERSIONED`] packages."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def version_changes(saved: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """List what differs between two results of [`versions`], one line for each package that both have."""
    return [
        f"{name}: saved {saved[name]}, given {given[name]}"
        for name in saved
        if name in given and saved[name] != given[name]
    ]


def model_changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """List what differs between two identities of models, one line for each difference; empty if nothing does.

    If versions of libraries differ, only the settings and the classes of modules that both have are compared, since a
    new version may add some. The versions themselves are not compared, see [`version_changes`].

    Args:
        saved, given: results of [`model_identity`].
    """
    same_versions = saved.get("versions") == given.get("versions")
    lines = []
    if saved["model"] != given["model"]:
        lines.append(f"model: saved {saved['model']}, given {given['model']}")
    for part in ("config", "inner_configs", "adapters"):
        lines += _differences(part, saved[part], given[part], same_versions)
    before, after = saved["modules"], given["modules"]
    for name in sorted({*before, *after}):
        if same_versions or (name in before and name in after):
            lines += _module_changes(name, before.get(name, {}), after.get(name, {}), same_versions)
    if not lines and same_versions and saved["order"] != given["order"]:
        lines.append("modules: the same ones, with the same settings, in another order")
    for name in sorted({*saved["code"], *given["code"]}):
        if same_function(saved["code"].get(name), given["code"].get(name)) is False:
            where = [kind for kind, each in (("saved", saved), ("given", given)) if name in each["code"]]
            said = "other code" if len(where) == 2 else f"code of a user, in the {where[0]} model alone"
            lines.append(f"{name}: {said}")
    return lines


def _modules(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, bool]]:
    """Yield all modules, each once, parents first, and whether each is part of a module that has a config.

    Takes linear time whatever the depth.
    """
    seen: set[int] = set()
    todo = [(model, False)]
    while todo:
        module, is_within = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if type(module).__name__ not in _WRAPPERS:
            yield module, is_within
        children = [child for child in module._modules.values() if child is not None]
        if children:
            is_within = is_within or _has_config(module)
            todo.extend((child, is_within) for child in reversed(children))


def _has_config(module: torch.nn.Module) -> bool:
    return callable(getattr(getattr(module, "config", None), "to_dict", None))


def _order(numbers: Sequence[int], kinds: Sequence[str]) -> str:
    """Hash the sequence of modules. Kinds with the same text count as one."""
    first: dict[str, int] = {}
    same = np.array([first.setdefault(kind, len(first)) for kind in kinds])
    digest = xxhash.xxh3_128()
    update_digest(digest, (list(first), same[np.array(numbers, np.int64)]))
    return digest.hexdigest()


def _inner_configs(model: torch.nn.Module, inner: set[int]) -> dict[str, Any]:
    """Return, by path, the configs of models inside a model that has none."""
    found = ((path, module) for path, module in model.named_modules() if id(module) in inner)
    return {path: config_identity(module.config) for path, module in found}


def _bounded(counts: Counter[str]) -> dict[str, int]:
    """Keep at most a hundred combinations of settings, and replace the others by a digest."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown, others = ordered[:_MAX_COMBINATIONS], ordered[_MAX_COMBINATIONS:]
    if not others:
        return dict(shown)
    digest = xxhash.xxh3_128_hexdigest("\n".join(f"{count} {text}" for text, count in others).encode())
    return {**dict(shown), json.dumps({"others": digest}): sum(count for _, count in others)}


def _differences(path: str, saved: Any, given: Any, strict: bool) -> list[str]:
    if _is_function(saved) or _is_function(given):
        return _function_change(path, saved, given)
    if isinstance(saved, dict) and isinstance(given, dict):
        lines = []
        for key in [*saved, *(key for key in given if key not in saved)]:
            if key in saved and key in given:
                lines += _differences(f"{path}.{key}", saved[key], given[key], strict)
            elif strict:
                first, second = (_short(each[key]) if key in each else "nothing" for each in (saved, given))
                lines.append(f"{path}.{key}: saved {first}, given {second}")
        return lines
    if same_function(saved, given) is not False:
        return []
    return [f"{path}: saved {_short(saved)}, given {_short(given)}"]


def _is_function(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and value.keys() <= {"name", "code", "python"}


def _function_change(path: str, saved: Any, given: Any) -> list[str]:
    if same_function(saved, given) is not False:
        return []
    first, second = (value["name"] if _is_function(value) else _short(value) for value in (saved, given))
    return [
        f"{path}: other code or content ({first})" if first == second else f"{path}: saved {first}, given {second}"
    ]


def _module_changes(name: str, saved: Mapping[str, int], given: Mapping[str, int], strict: bool) -> list[str]:
    """List modules of one class that have other settings, matching old and new ones by what they share."""
    if saved == given:
        return []
    before, after = (Counter(each) for each in (saved, given))
    gone, new = before - after, after - before
    lines = []
    for old in sorted(gone, key=lambda text: (-gone[text], text)):
        while gone[old] > 0 and any(count > 0 for count in new.values()):
            nearest = min((text for text in new if new[text] > 0), key=lambda text: len(_between(old, text, True)))
            count = min(gone[old], new[nearest])
            gone[old] -= count
            new[nearest] -= count
            if differing := _between(old, nearest, strict):
                lines.append(f"{name} × {count}: {'; '.join(differing)}")
    for kind, left in (("saved", gone), ("given", new)):
        if strict and (count := sum(left.values())):
            lines.append(f"{name} × {count}: only in the {kind} model")
    return lines


def _between(saved: str, given: str, strict: bool) -> list[str]:
    return [line.removeprefix(".") for line in _differences("", json.loads(saved), json.loads(given), strict)]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}…"
