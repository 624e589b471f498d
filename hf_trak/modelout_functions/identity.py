"""`task_identity`: the class and settings that identify a task in a feature store."""

from collections.abc import Callable
from typing import Any

import torch

from hf_trak.identity.function_identity import function_identity, identity_of
from hf_trak.identity.own_code import assigned_by, assigned_in_init, is_own_class, name_of
from hf_trak.modelout_functions.base import AbstractModelOutput

_ON_BATCHES = frozenset(
    {"bind", "prepare", "restore", "references", "reference_rows", "collator", "model_inputs", "output"}
    | {"out_to_loss_grad", "get_output", "get_out_to_loss_grad"}
)
"""Methods that are called between construction and the last batch: what they assign is state, not a setting."""


def task_identity(task: AbstractModelOutput, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Describe class and settings of a task as plain JSON: two tasks of the same identity define the same f and q.

    Settings are the public attributes, and for a user's own class also the private ones that its `__init__` assigns.
    Attributes that the task assigns when it is bound to a model or given a batch are left out. Numbers, texts,
    sequences and mappings are described by their values, tasks by their own identity, and anything else (functions,
    tensors, …) by [`~hf_trak.identity.function_identity.function_identity`], with everything that a user's function
    refers to. A user's class has its `code`, too. Compare identities with
    [`~hf_trak.identity.function_identity.same_function`], because bytecode differs between versions of Python.

    Args:
        task: any task.
        model: the attributed model, whose weights are no part of the task even if a function refers to them.

    Returns:
        `{"class": "module.Class", "settings": {…}}`, and `"code"` for a class of a user.
    """
    cls: Any = type(task)
    settings = {
        name: _setting(value, model) for name, value in sorted(vars(task).items()) if _is_setting_name(cls, name)
    }
    identity = {"class": name_of(cls), "settings": settings}
    return {**identity, "code": function_identity(cls, model)} if is_own_class(cls) else identity


def _is_setting_name(cls: Any, name: str) -> bool:
    if not is_own_class(cls):
        return not name.startswith("_")
    return (not name.startswith("_") or name in assigned_in_init(cls)) and name not in assigned_by(cls, _ON_BATCHES)


def _setting(value: Any, model: torch.nn.Module | None) -> Any:
    if isinstance(value, AbstractModelOutput):
        return task_identity(value, model)
    if type(value) in (list, tuple):
        return [_setting(item, model) for item in value]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _setting(item, model) for key, item in value.items()}
    return identity_of(value, model)


def task_identity_v1(task: AbstractModelOutput) -> dict[str, Any]:
    """Describe a task as stores of format 1 do, to compare them with it. Not for new files.

    Functions are described by module and name, so an edit of one's body goes unnoticed; sequences and tensors are left
    out.
    """
    settings: dict[str, Any] = {}
    for name, value in sorted(vars(task).items()):
        if name.startswith("_"):
            continue
        if value is None or isinstance(value, bool | int | float | str):
            settings[name] = value
        elif isinstance(value, Callable):  # type: ignore[arg-type]
            settings[name] = _name(value)
    return {"class": _name(type(task)), "settings": settings}


def _name(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{name}" if name else _name(type(value))
