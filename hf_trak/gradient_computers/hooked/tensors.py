"""Tensors among the arguments and results of a call, and the mark of those that were computed from the sample."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a call, including those in lists and tuples."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            for item in value:
                if isinstance(item, Tensor):
                    yield item


def replace_tensors(value: Any, replacement: Callable[[Tensor], Any]) -> Any:
    """Replace a tensor, or every tensor in a list or tuple; return anything else as it is."""
    if isinstance(value, Tensor):
        return replacement(value)
    if type(value) in (tuple, list) and any(isinstance(item, Tensor) for item in value):
        return type(value)(replacement(item) if isinstance(item, Tensor) else item for item in value)
    return value


def outputs_of(result: Any) -> list[Tensor]:
    """Return the tensors that a function returned, alone or in a list or tuple."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [item for item in result if isinstance(item, Tensor)]
    return []


def is_data(tensor: Tensor) -> bool:
    """Tell whether a tensor, in the pass of one sample, was computed from the sample."""
    return getattr(tensor, "_hf_trak_data", False)


def mark_data(result: Any) -> None:
    """Mark the tensors of a result as computed from the sample."""
    for tensor in outputs_of(result):
        tensor._hf_trak_data = True  # type: ignore[attr-defined]
