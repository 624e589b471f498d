"""Checks of integer arguments: one rule for the whole library of what counts as an integer.

Python's `int` and anything that converts to it without loss (NumPy's integers, integer tensors of one element) do;
`bool` does not, since `True` for a count is a mistake, and neither does a float with an integral value.
"""

import operator
from typing import Any


def is_int(value: Any, minimum: int | None = None, maximum: int | None = None) -> bool:
    """Tell whether a value is an integer, not a bool, in a range. For checks with an error message of their own.

    Args:
        value (`Any`):
            The value to look at.
        minimum (`int`, *optional*):
            Smallest value allowed.
        maximum (`int`, *optional*):
            Largest value allowed.

    Returns:
        `bool`: whether `minimum <= value <= maximum` for an integer `value`.
    """
    number = _as_int(value)
    return number is not None and _fits(number, minimum, maximum)


def checked_int(
    value: Any,
    name: str,
    minimum: int | None = None,
    maximum: int | None = None,
    *,
    remedy: str = "",
    type_error: type[Exception] = TypeError,
) -> int:
    """Return `value` as a plain `int` if it is an integer, not a bool, in a range.

    Args:
        value (`Any`):
            The argument to check.
        name (`str`):
            Name of the argument in the error message.
        minimum (`int`, *optional*):
            Smallest value allowed.
        maximum (`int`, *optional*):
            Largest value allowed.
        remedy (`str`, *optional*, defaults to `""`):
            A sentence about what to do, added to the error message.
        type_error (`type[Exception]`, *optional*, defaults to `TypeError`):
            Error for a value that is no integer. Callers that promise `ValueError` for every bad argument pass that.

    Returns:
        `int`: the value; use it in place of the argument, which may be another type of integer.

    Raises:
        TypeError: the value is not an integer (`type_error`, if another one is given).
        ValueError: the value is outside the range.
    """
    number = _as_int(value)
    expected = " ".join(filter(None, [f"Expected an integer{_range_text(minimum, maximum)}.", remedy]))
    if number is None:
        raise type_error(f"`{name}` is {value!r} ({type(value).__name__}). {expected}")
    if not _fits(number, minimum, maximum):
        raise ValueError(f"`{name}` is {number}. {expected}")
    return number


def _as_int(value: Any) -> int | None:
    dtype = str(getattr(value, "dtype", ""))  # of NumPy's and torch's scalars, without importing either
    if isinstance(value, bool) or dtype in ("bool", "torch.bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # tensors have `__index__`, and raise this unless they hold one integer
        return None


def _fits(number: int, minimum: int | None, maximum: int | None) -> bool:
    return (minimum is None or number >= minimum) and (maximum is None or number <= maximum)


def _range_text(minimum: int | None, maximum: int | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f" of at least {minimum}"
    return "" if maximum is None else f" of at most {maximum}"
