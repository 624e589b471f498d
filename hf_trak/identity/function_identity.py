"""The identity of a user's function or object in a store: its name, and a digest of its code.

The digest does not cover names that are looked up by text (`getattr`, `globals()[name]`), modules that are imported
inside a function, data that code reads from files, attributes of objects of libraries other than plain public ones
(the rows of a `DataFrame`), and code of libraries that changes under the same name (their versions are recorded
elsewhere).
"""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hf_trak.identity.code_digest import CodeDigest
from hf_trak.identity.own_code import name_of

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The minor version of Python, with which bytecode changes."""


def function_identity(value: Any, model: torch.nn.Module | None = None) -> dict[str, str]:
    """Identify a function, class, or object by its name and, unless it belongs to a library, by its content.

    Args:
        value: a function, method, partial, class, callable object, tensor, or any other object.
        model: the model that is attributed. References to it, to a part or a tensor of it are identified by the class
            alone, since its weights change from checkpoint to checkpoint and have an identity of their own.

    Returns:
        `{"name": "module.function", "code": "<32 hex digits>", "python": "3.11"}`, without `python` if the digest
        covers no bytecode, and without `code` if the name says everything. Compare with [`same_function`].
    """
    digest = CodeDigest(value, model)
    identity = {"name": name_of(value)}
    if not digest.is_name:
        identity["code"] = digest.hexdigest
        if digest.has_bytecode:
            identity["python"] = PYTHON_VERSION
    return identity


def identity_of(value: Any, model: torch.nn.Module | None = None) -> Any:
    """Return `None`, numbers and texts as they are, and the [`function_identity`] of anything else."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    return function_identity(value, model)


def same_function(saved: Any, given: Any) -> bool | None:
    """Whether two identities are of the same function, or two JSON values with identities in them are the same.

    Functions with the same code are the same, whatever their names.

    Returns:
        `None` if the answer is unknown, since two versions of Python compiled the code of that name.
    """
    if isinstance(saved, dict) and isinstance(given, dict):
        if "name" in saved and "name" in given and ("code" in saved or "code" in given):
            return _same_code(saved, given)
        if saved.keys() != given.keys():
            return False
        return _all_same([same_function(value, given[key]) for key, value in saved.items()])
    if isinstance(saved, list | tuple) and isinstance(given, list | tuple):
        if len(saved) != len(given):
            return False
        return _all_same([same_function(a, b) for a, b in zip(saved, given, strict=True)])
    if isinstance(saved, str) and isinstance(given, str) and saved[:1] == given[:1] == "{" and saved != given:
        try:
            return same_function(json.loads(saved), json.loads(given))  # the task inside `loss`
        except ValueError:
            return False
    return type(saved) is type(given) and bool(saved == given)


def _same_code(saved: Mapping[str, Any], given: Mapping[str, Any]) -> bool | None:
    if "code" in saved and saved["code"] == given.get("code"):
        return True
    versions = saved.get("python"), given.get("python")
    cannot_say = None not in versions and versions[0] != versions[1] and saved["name"] == given["name"]
    return None if cannot_say else False


def _all_same(answers: list[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers else True
