"""What the loss of a trainer depends on beside model and rows, for the identity of the task `trainer_loss`."""

from typing import Any

from hf_trak.identity.own_code import attribute_names, stored_attributes

_PLAIN = bool | int | float | str | None


def loss_settings(trainer: Any) -> dict[str, Any]:
    """Collect what the loss of a trainer depends on beside model and rows, for the identity of its task.

    Args:
        trainer (`transformers.Trainer`):
            The trainer.

    Returns:
        `dict`: the method and those that it mentions, the function of the loss, the factor of label smoothing, and the
        attributes and arguments of the trainer that these methods read.
    """
    methods = _mentioned_methods(trainer)
    codes = [code for code in map(_code_of, methods.values()) if code is not None]
    read = set[str]().union(*map(attribute_names, codes))
    read -= _of_every_trainer(trainer).union(*map(stored_attributes, codes))
    smoother, kept = getattr(trainer, "label_smoother", None), dict[str, Any]()
    for values in (*map(vars, _own_classes(trainer)), vars(trainer)):
        kept |= {name: values[name] for name in sorted(read & set(values)) if not _is_method(values[name])}
    arguments = {name: value for name, value in vars(trainer.args).items() if name in read}
    return {
        "methods": methods,
        "function": getattr(trainer, "compute_loss_func", None),
        "label_smoothing": None if smoother is None else float(smoother.epsilon),
        "attributes": kept,
        "arguments": {name: value for name, value in sorted(arguments.items()) if isinstance(value, _PLAIN)},
    }


def own_methods(trainer: Any) -> list[str]:
    """List the methods behind the loss of a trainer, such as `Mine._compute_loss`, that are neither TRL's nor known.

    Args:
        trainer (`transformers.Trainer`):
            The trainer.
    """
    found = _mentioned_methods(trainer)
    return [f"`{name}`" for name, one in found.items() if one.__module__.partition(".")[0] != "trl"]


def reads_mode(trainer: Any) -> bool:
    """Tell whether methods behind the loss of a trainer ask if the model is in training.

    Args:
        trainer (`transformers.Trainer`):
            The trainer.
    """
    methods = _mentioned_methods(trainer).values()
    return any("training" in attribute_names(_code_of(one)) for one in methods)


def _own_classes(trainer: Any) -> list[type]:
    """List the classes of a trainer below those of transformers, most derived last."""
    known = ("transformers", "builtins", "abc", "typing")
    return [cls for cls in reversed(type(trainer).__mro__) if cls.__module__.partition(".")[0] not in known]


def _is_method(value: Any) -> bool:
    return isinstance(value, property) or _code_of(value) is not None


def _code_of(function: Any) -> Any:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _mentioned_methods(trainer: Any) -> dict[str, Any]:
    """Collect `compute_loss` of all classes of a trainer, and every method that it mentions, by class and name."""
    owners = [*((cls.__qualname__, vars(cls)) for cls in _own_classes(trainer)), ("the trainer", vars(trainer))]
    taken: dict[str, Any] = {}
    seen, left = {"compute_loss"}, ["compute_loss"]
    while left:
        name = left.pop()
        for owner, members in owners:
            if name in members and (code := _code_of(members[name])) is not None:
                taken[f"{owner}.{name}"] = getattr(members[name], "__func__", members[name])
                left += sorted(attribute_names(code) - seen)
                seen |= attribute_names(code)
    return dict(sorted(taken.items()))


def _of_every_trainer(trainer: Any) -> set[str]:
    """List the attributes that the class of transformers assigns itself, which are no settings of a loss."""
    base = next((cls for cls in type(trainer).__mro__ if cls.__module__ == "transformers.trainer"), object)
    codes = [code for code in map(_code_of, vars(base).values()) if code is not None]
    return set[str]().union(*map(stored_attributes, codes))
