"""What identifies a task in a feature store."""

from collections.abc import Callable
from typing import Any

from hf_trak.modelout_functions.base import AbstractModelOutput


def task_identity(task: AbstractModelOutput) -> dict[str, Any]:
    """Class and settings of a task, as plain JSON: two tasks of the same identity define the same f and q.

    Settings are the public attributes that are numbers, strings or functions; functions go by module and name, so
    an edit of a function's body is not seen.
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
