"""Classes and objects that users plug into `TRAKer`: how they are made, what they can do, what identifies them."""

import inspect
from collections.abc import Mapping
from typing import Any

from hf_trak.projectors import NoOpProjector
from hf_trak.traker.gradient_pipeline import can_accumulate, is_ours
from hf_trak.traker.score_computers import BasicScoreComputer, BasicSingleBlockScoreComputer

# Classes that have moved keep the names under which directories know them.
_RECORDED_NAMES: dict[type, str] = {
    cls: f"hf_trak.score_computers.basic.{cls.__qualname__}"
    for cls in (BasicScoreComputer, BasicSingleBlockScoreComputer)
}


def construct(cls: Any, required: Mapping[str, Any], optional: Mapping[str, tuple[Any, Any]]) -> Any:
    """Make an object of a class that was given; `optional` arguments, with their neutral values, go to classes that
    take them.

    Raises:
        TypeError: what was given is not a class.
        ValueError: an optional argument has another than its neutral value, and the class does not take it.
    """
    if not isinstance(cls, type) and not callable(cls):
        raise TypeError(
            f"Expected a class, but an object of type {type(cls).__name__} was given. Pass the class itself."
        )
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = dict(required)
    for name, (value, neutral) in optional.items():
        if takes_any or name in parameters:
            arguments[name] = value
        elif value != neutral:
            raise ValueError(
                f"`{name}` is {value!r}, but {getattr(cls, '__name__', cls)} takes no such argument. Expected "
                f"{neutral!r} with this class. Add the argument to its constructor, or leave it out."
            )
    return cls(**arguments)


def projection_identity(projector: Any) -> dict[str, Any]:
    """What identifies a projection. The library's own are known by their algorithm, whichever class computes it."""
    own = can_accumulate(projector) and is_ours(type(projector))
    identity = {
        "class": None if own else class_name(type(projector)),
        "algorithm": getattr(projector, "algorithm", None),
    }
    for name in ("nonzeros", "proj_type", "seed"):
        value = getattr(projector, name, None)
        identity[name] = value if value is None or isinstance(value, int) else str(value)
    if isinstance(projector, NoOpProjector):
        identity |= {"proj_type": None, "seed": None}
    return identity


def class_name(cls: type) -> str:
    """Name of a class in the identity of a directory."""
    return _RECORDED_NAMES.get(cls, f"{cls.__module__}.{cls.__qualname__}")
