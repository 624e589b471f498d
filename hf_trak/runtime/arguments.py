"""Calls with wrong arguments: errors that name the nearest argument, as those of the command line do."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def named_arguments(cls: C) -> C:
    """Explain wrong arguments of the public methods of a class and of its constructor, see [`explained`]."""
    for name, value in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, classmethod):
            setattr(cls, name, classmethod(explained(value.__func__)))
        elif inspect.isfunction(value):
            setattr(cls, name, explained(value))
    return cls


def explained(function: F) -> F:
    """Let a function explain calls with wrong arguments. Errors of calls with right ones stay as they are."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            problem = _problem(function, args, kwargs)
            if problem is None:
                raise
        raise TypeError(problem)

    return cast(F, call)


def _problem(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the arguments of a call; `None` if they fit."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        reason = str(error)
    else:
        return None
    name = function.__name__ if function.__name__ != "__init__" else function.__qualname__.rpartition(".")[0]
    kinds = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    names = [one.name for one in kinds if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if unknown := [given for given in kwargs if given not in names]:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f" (did you mean `{near[0]}`?)" if near else ""
        return f"`{name}` has no argument `{unknown[0]}`{hint}. Expected some of {names}. Correct the name."
    needed = [one.name for one in kinds if one.default is one.empty and one.name in names]
    places = [one for one in signature.parameters if one not in kwargs]
    absent = [one for one in needed if one in places[len(args) :]]
    if absent:
        return f"`{name}` is called without {' and '.join(f'`{one}`' for one in absent)}. Expected {names}. Pass it."
    return f"`{name}` is called with {len(args)} arguments without a name ({reason}). Expected {names}. Name them."
