"""Batches of one row each, joined to the batch that a collator would make of these rows.

A collator pads rows to the longest one of their batch. Which end it pads, and with what, shows in a batch that it
makes of all rows together: beyond its own length, a row holds one value there. That batch is made only where rows
differ in size, and nothing else of it is used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trak.modelout_functions.records import FieldBatch

_REMEDY = "Pad rows to one length (`padding='max_length'`), or set `per_device_batch_size=1`."


def joined(singles: Sequence[Any], together: Callable[[], Any]) -> Any:
    """Join batches of one row each.

    Args:
        singles: the batches: mappings, sequences, or tensors, all of one form.
        together: returns the batch that the collator makes of all rows at once, which shows how it pads.

    Returns:
        One batch, a `dict` where they are mappings.

    Raises:
        ValueError: they cannot be joined; names the entry and the remedy.
    """
    if len(singles) == 1:
        return singles[0]
    leaves = [dict(_leaves(single)) for single in singles]
    if any(list(one) != list(leaves[0]) for one in leaves):
        raise ValueError(
            f"Rows were collated alone, since the data collator draws at random, and their batches have the entries "
            f"{list(leaves[0])} and {next(list(one) for one in leaves if list(one) != list(leaves[0]))}. Expected the "
            f"same ones for every row. Set `per_device_batch_size=1`."
        )
    values = {path: [one[path] for one in leaves] for path in leaves[0]}
    pattern: dict[tuple[Any, ...], Any] = {}
    if any(_is_uneven(column) for column in values.values()):
        pattern = dict(_leaves(together()))
    made = {path: _row_by_row(path, column, pattern.get(path)) for path, column in values.items()}
    uneven = [path for path, value in made.items() if value is None]
    if uneven:
        made |= _padded({path: values[path] for path in uneven}, pattern, values)
    return _rebuilt(singles[0], made)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the entries of a batch that are neither mappings nor sequences of tensors, with their paths."""
    if isinstance(value, Mapping):
        for name in value:
            yield from _leaves(value[name], (*path, name))
    elif isinstance(value, list | tuple) and any(isinstance(item, Tensor | Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, (*path, place))
    else:
        yield path, torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype != object else value


def _rebuilt(like: Any, made: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...] = ()) -> Any:
    """Put joined entries into the form of a batch."""
    if path in made:
        return made[path]
    if isinstance(like, Mapping):
        values = {name: _rebuilt(like[name], made, (*path, name)) for name in like}
        return FieldBatch(values) if isinstance(like, FieldBatch) else values
    items = [_rebuilt(item, made, (*path, place)) for place, item in enumerate(like)]
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _is_uneven(column: Sequence[Any]) -> bool:
    tensors = [value for value in column if isinstance(value, Tensor) and value.ndim > 0]
    return len(tensors) == len(column) and any(
        one.shape[1:] != tensors[0].shape[1:] or one.shape[0] != 1 for one in tensors
    )


def _row_by_row(path: tuple[Any, ...], column: Sequence[Any], whole: Any) -> Any:
    """Join entries that need no padding; `None` for those that do.

    Raises:
        ValueError: the entries are not the rows' own.
    """
    first = column[0]
    if isinstance(first, Tensor) and first.ndim > 0:
        total = sum(one.shape[0] for one in column)
        even = all(one.shape[1:] == first.shape[1:] for one in column)
        if even and (total == len(column) or (isinstance(whole, Tensor) and whole.shape[0] == total)):
            return torch.cat(list(column))
        if all(one.shape[0] == 1 for one in column):
            return None
    elif isinstance(first, list | tuple) and all(len(one) == 1 for one in column):
        return [one[0] for one in column]
    elif all(_same(one, first) for one in column):
        return first
    raise ValueError(
        f"The entry {_name(path)} of a batch is not one of each row, and the data collator draws at random, so that "
        f"rows are collated alone. Expected tensors whose first dimension counts rows, or the same value for every "
        f"row. Set `per_device_batch_size=1`."
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def _padded(
    columns: Mapping[tuple[Any, ...], Sequence[Tensor]],
    pattern: Mapping[tuple[Any, ...], Any],
    values: Mapping[tuple[Any, ...], Sequence[Any]],
) -> dict[tuple[Any, ...], Tensor]:
    """Pad entries to the size of the largest row, at the end and with the values that the pattern shows.

    Raises:
        ValueError: the pattern shows no such padding.
    """
    sizes = {path: _largest(column) for path, column in columns.items()}
    best: tuple[int, dict[tuple[Any, ...], Any]] | None = None
    for at_end in (True, False):
        fills: dict[tuple[Any, ...], Any] = {}
        agreeing = 0
        for path, column in columns.items():
            whole, size = pattern.get(path), sizes[path]
            if size is None or not isinstance(whole, Tensor) or whole.shape != (len(column), *size):
                break
            found = _padding(whole, column, at_end)
            if found is None:
                break
            fills[path] = found
            agreeing += sum(
                bool((whole[row][_place(one, size, at_end)] == one[0]).all()) for row, one in enumerate(column)
            )
        if len(fills) == len(columns) and (best is None or agreeing > best[0]):
            best = agreeing, {path: (fill, at_end) for path, fill in fills.items()}
    if best is None:
        shapes = {_name(path): [tuple(one.shape) for one in values[path]][:4] for path in columns}
        raise ValueError(
            f"The data collator draws at random, so that rows are collated alone, and rows of the sizes {shapes} "
            f"cannot be joined as it does. Expected padding at one end with one value. {_REMEDY}"
        )
    made = {}
    for path, column in columns.items():
        (fill, at_end), size = best[1][path], sizes[path]
        assert size is not None
        result = column[0].new_empty((len(column), *size))
        result[...] = fill
        for row, one in enumerate(column):
            result[row][_place(one, size, at_end)] = one[0]
        made[path] = result
    return made


def _largest(column: Sequence[Tensor]) -> torch.Size | None:
    """Find the size that holds every row; `None` if rows differ in the number of dimensions."""
    if len({one.ndim for one in column}) > 1:
        return None
    return torch.Size(map(max, zip(*(one.shape[1:] for one in column), strict=True)))


def _place(single: Tensor, size: torch.Size, at_end: bool) -> tuple[slice, ...]:
    """Say where a row lies within its place in a batch that is padded at the end, or before the row."""
    pairs = zip(single.shape[1:], size, strict=True)
    return tuple(slice(0, own) if at_end else slice(whole - own, whole) for own, whole in pairs)


def _padding(whole: Tensor, column: Sequence[Tensor], at_end: bool) -> Tensor | None:
    """Find the one value that a batch holds outside of its rows; `None` if there are several."""
    outside = torch.ones(whole.shape, dtype=torch.bool)
    for row, one in enumerate(column):
        outside[row][_place(one, whole.shape[1:], at_end)] = False
    beyond = whole[outside]
    return beyond[0] if len(beyond) and bool((beyond == beyond[0]).all()) else None


def _name(path: tuple[Any, ...]) -> str:
    return f"`{'.'.join(map(str, path))}`" if path else "itself"
