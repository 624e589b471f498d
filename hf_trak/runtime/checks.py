"""Checks of numbers given as arguments: one rule for the whole library of what counts as an integer.

Python's `int` and anything that converts to it without loss (NumPy's integers, integer tensors of one element) do;
`bool` does not, since `True` for a count is a mistake, and neither does a float with an integral value.
"""

import importlib
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_trak.errors import NonFiniteError

if TYPE_CHECKING:  # slow to import, and not needed to check integers
    import torch
    from torch import Tensor


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


def checked_positive(value: float, name: str, remedy: str = "") -> float:
    """Return an argument that has to be positive and finite.

    Args:
        value (`float`):
            The argument.
        name (`str`):
            Its name, for the error message.
        remedy (`str`, *optional*, defaults to `""`):
            A sentence about what to do, added to the error message.

    Raises:
        ValueError: it is not.
    """
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"`{name}` is {value!r}. Expected a positive finite number. {remedy}".rstrip())
    return float(value)


def required(name: str, message: str) -> Any:
    """Import a module of a package that may not be installed.

    Args:
        name (`str`):
            The module.
        message (`str`):
            What needs it, and how to install it.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(message, name=name) from error


INSPECT = (
    "Inspect that example and the checkpoint's weights, or take gradients in float32 (float16 overflows above 65504)."
)


def non_finite_rows(values: "Tensor") -> list[int]:
    """Find the rows that hold a NaN or an infinity.

    Args:
        values (`torch.Tensor` of shape `(rows, ...)`):
            Rows of any real dtype.

    Returns:
        `list[int]`: their indices, ascending; empty if every value is finite.
    """
    # A NaN or an infinity makes the sum one. So may large finite numbers, whose rows are then looked at one by one.
    if math.isfinite(values.sum().item()):
        return []
    finite = values.isfinite().reshape(values.shape[0], -1).all(dim=1)
    return (~finite).nonzero().flatten().tolist()


def check_finite_rows(
    values: "Tensor", what: str, rows: int | Sequence[int] = 0, *, unit: str = "row", remedy: str = INSPECT
) -> None:
    """Check that every value is finite.

    Args:
        values (`torch.Tensor` of shape `(rows, ...)`):
            Rows of any real dtype.
        what (`str`):
            What a row is, such as `"projected gradient"`, for the message.
        rows (`int` or `Sequence[int]`, *optional*, defaults to 0):
            Number of the first row, or the numbers of all of them, for the message.
        unit (`str`, *optional*, defaults to `"row"`):
            What the number counts, such as `"sample"`, for the message.
        remedy (`str`, *optional*):
            The sentence of the message that says what to do.

    Raises:
        NonFiniteError: a value is NaN or infinite; names the first such row and says how many more there are.
    """
    bad = non_finite_rows(values)
    if bad:
        number = rows + bad[0] if isinstance(rows, int) else rows[bad[0]]
        more = f" (and of {len(bad) - 1} more of these {values.shape[0]})" if len(bad) > 1 else ""
        raise NonFiniteError(
            f"The {what} of {unit} {number}{more} is NaN or infinite. Expected finite numbers. {remedy}"
        )


def free_bytes(device: "torch.device | str") -> int:
    """Return how many bytes can still be allocated on a device.

    Args:
        device (`torch.device` or `str`): the device.

    Returns:
        `int`: for an accelerator, its free memory plus what torch's allocator holds unused; for an Apple GPU, what is
        left of the recommended maximum; for the CPU, the memory that the system can give without swapping.

    Raises:
        ValueError: torch does not tell the free memory of this kind of device.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        psutil = importlib.import_module("psutil")  # not at the top: the package for the Hub's `kernels` has no psutil
        return int(psutil.virtual_memory().available)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "mem_get_info"):
        unused = backend.memory_reserved(device) - backend.memory_allocated(device)
        return backend.mem_get_info(device)[0] + unused
    raise ValueError(
        f"The free memory of {device} is not known. Expected the CPU, an Apple GPU, or an accelerator whose memory "
        "torch tells, such as CUDA. Choose the sizes of blocks and chunks yourself."
    )


def byte_size(count: float) -> str:
    """Write a number of bytes for people, for example `1.5 GiB`.

    Args:
        count (`float`): number of bytes.
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:,.0f} {units[0]}" if units[0] == "B" else f"{count:,.1f} {units[0]}"
