"""Classes and objects that users plug into `TRAKer`: how they are made, and what they can do."""

import inspect
from collections.abc import Mapping
from typing import Any

from hf_trak.gradient_computers import AbstractGradientComputer
from hf_trak.modelout_functions import AbstractModelOutput, LossModelOutput
from hf_trak.projectors import BasicProjector, BlockProjector, ProjectionType
from hf_trak.runtime.checks import checked_int


def construct(cls: Any, required: Mapping[str, Any], optional: Mapping[str, tuple[Any, Any]]) -> Any:
    """Make an object of a class that a user gave.

    Args:
        cls: the class, or a function that returns an object.
        required: arguments that every such class takes, by name.
        optional: `(value, neutral value)` of arguments that the class need not take. A class without such an argument
            works as long as the argument has its neutral value.

    Raises:
        TypeError: what was given is not a class.
        ValueError: an optional argument does not have its neutral value, and the class does not take it.
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


def default_projector(num_params: int, proj_dim: int, seed: int, device: Any) -> BasicProjector:
    """Make the projector of a run whose user gave none: a Rademacher projection, as the `trak` API has it."""
    return BasicProjector(
        grad_dim=num_params,
        proj_dim=checked_int(proj_dim, "proj_dim", 1, type_error=ValueError),
        seed=seed,
        proj_type=ProjectionType.rademacher,
        device=device,
    )


def is_ours(function: Any) -> bool:
    """Tell whether a class or function belongs to this library."""
    return getattr(function, "__module__", "").startswith("hf_trak.")


def can_stream(computer: Any) -> bool:
    """Tell whether `stream` gives the same gradients as the methods that the `trak` API documents.

    It does not for a subclass that overrides only those methods, whose gradients must not be bypassed.
    """
    if not isinstance(computer, AbstractGradientComputer) or type(computer).stream is AbstractGradientComputer.stream:
        return False
    overridden = not (is_ours(type(computer).compute_per_sample_grad) and is_ours(type(computer).compute_loss_grad))
    return not (overridden and is_ours(type(computer).stream))


def can_accumulate(projector: Any) -> bool:
    """Tell whether `accumulate` gives the same features as `project`, which a subclass may have overridden alone."""
    return isinstance(projector, BlockProjector) and (
        is_ours(type(projector).project) or not is_ours(type(projector).accumulate)
    )


def require_both_sides(computer: Any, task: AbstractModelOutput) -> None:
    """Raise `ValueError` if the task takes other gradients for targets, and the computer cannot tell them apart."""
    if isinstance(task, LossModelOutput) and not can_stream(computer):
        raise ValueError(
            "The task 'loss' takes other gradients for targets than for train examples, which "
            f"{type(computer).__name__} cannot tell apart. Use FunctionalGradientComputer or "
            "IterativeGradientComputer, or give your class a method `stream`."
        )


def require_size(projector: Any, num_params: int) -> None:
    """Raise `ValueError` if a projector was made for gradients of another length than `num_params`."""
    made_for = getattr(projector, "grad_dim", 0)
    if made_for not in (0, None, num_params):
        raise ValueError(
            f"The {type(projector).__name__} was made for gradients of {made_for} elements, but {num_params} are "
            f"attributed. Make it with grad_dim={num_params}, or choose other parameters (`grad_wrt`)."
        )
