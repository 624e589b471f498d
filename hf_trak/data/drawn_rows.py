"""Deterministic batches of randomly transformed rows: the same rows and draw number give the same batch.

A collator draws for a whole batch at once, so that what a row gets would depend on the rows beside it. So each row is
read and collated alone, with seeds of its own (`generators`), and the batches of single rows are joined (`joining`).
"""

import copy
import functools
import logging
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trak.identity.own_code import global_references
from hf_trak.modelout_functions.base import FieldBatch

logger = logging.getLogger(__name__)

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_MOST_OBJECTS = 2000

_NOT_LOOKED_INTO = (torch.nn.Module, torch.Tensor, np.ndarray, types.ModuleType, type, str, bytes, int, float)

_SIDES = {"train": 0, "target": 1}


def held_generators(*values: Any) -> list[Generator]:
    """List generators that functions and objects hold: in attributes, closures, and the globals that code loads.

    Args:
        values: collators, transforms and datasets. At most 2,000 objects are looked at, and none of modules, arrays
            and tensors.
    """
    left, seen, found = list(values), set[int](), []
    while left and len(seen) < _MOST_OBJECTS:
        value = left.pop(0)
        if id(value) in seen or isinstance(value, (*_NOT_LOOKED_INTO, random.SystemRandom)):
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            found.append(value)
        else:
            left += _within(value)
    return found


def _within(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        names = {path[0] for path in global_references(value.__code__)}
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *defaults, *(value.__globals__[name] for name in sorted(names) if name in value.__globals__)]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping | list | tuple):
        entries = value.values() if isinstance(value, Mapping) else value
        return list(entries) if len(value) <= _MOST_OBJECTS else []
    if not type(value).__module__.startswith(("datasets.", "pyarrow", "transformers.tokenization", "tokenizers")):
        calls = [vars(kind).get("__call__") for kind in type(value).__mro__]
        code = [call for call in calls if isinstance(call, types.FunctionType)]
        return [*getattr(value, "__dict__", {}).values(), *code]
    transform = (getattr(value, "_format_kwargs", None) or {}).get("transform")  # `Dataset.set_transform`
    return [] if transform is None else [transform]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def set_generators(seed: int, side: str, row: int, draw: int, own: Sequence[Generator] = ()) -> None:
    """Set the generators of torch, numpy and Python, and others, for one draw of one row.

    Args:
        seed: seed of the run.
        side: `"train"` or `"target"`, whose draws are independent.
        row: number of the row in its dataset.
        draw: number of the draw.
        own: generators of the user.
    """
    sequence = np.random.SeedSequence((seed, _SIDES[side], row, draw))
    words = sequence.generate_state(4 + 2 * len(own), np.uint64)
    torch.default_generator.manual_seed(int(words[0]))
    np.random.seed(words[1:3].view(np.uint32))
    random.seed(int(words[3]))
    for place, generator in enumerate(own):
        first, second = words[4 + 2 * place : 6 + 2 * place]
        if isinstance(generator, torch.Generator):
            generator.manual_seed(int(first))
        elif isinstance(generator, np.random.Generator):
            kind = type(generator.bit_generator)
            generator.bit_generator.state = kind(np.random.SeedSequence((int(first), int(second)))).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(words[4 + 2 * place : 6 + 2 * place].view(np.uint32))
        else:
            generator.seed(int(first))


@contextmanager
def generators_kept(own: Sequence[Generator] = ()) -> Iterator[None]:
    """Put the generators of torch (on the CPU), numpy and Python, and others, back at the end."""
    saved = torch.get_rng_state(), np.random.get_state(), random.getstate(), [_state(one) for one in own]
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        np.random.set_state(saved[1])
        random.setstate(saved[2])
        for generator, state in zip(own, saved[3], strict=True):
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.set_state(state)


def _state(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


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


_KNOWN_DATASETS = 16

_MIXING_DRAWS = 8
"""Batches in which mixing is looked for, since collators may mix a share of them."""


def _first_differs(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.ndim):
        return False
    return one.shape[0] == 2 and not torch.equal(one[0], other[0])


def rows_at(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Return rows of a dataset, all at once where it can do so."""
    fetch = getattr(dataset, "__getitems__", None)
    return [dataset[number] for number in numbers] if fetch is None else fetch(list(numbers))


class RowDraws:
    """The number and the seed of the draws of random rows, and what is known of datasets: whether their rows are
    random.

    Attributes:
        seed (`int`): seed of the run.
        count (`int`): number of draws of each random row.
    """

    def __init__(self, seed: int = 0, count: int = 1) -> None:
        """
        Args:
            seed: seed of the run.
            count: number of draws of each random row.
        """
        self.seed = seed
        self.count = count
        self._known: dict[int, tuple[Any, bool]] = {}

    def known(self, dataset: Any) -> bool | None:
        """Tell whether rows of a dataset are drawn at random; `None` if nobody has found out."""
        found = self._known.get(id(dataset))
        return None if found is None else found[1]

    def remember(self, dataset: Any, drawn: bool) -> None:
        """Keep what was found out about a dataset, which is kept alive with it."""
        self._known.pop(id(dataset), None)
        self._known[id(dataset)] = dataset, drawn
        if len(self._known) > _KNOWN_DATASETS:
            del self._known[next(iter(self._known))]


class DrawnRows:
    """A dataset of batches, whose keys are lists of `(row, draw)`."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], sources: Sequence[Any], seed: int, side: str
    ) -> None:
        """
        Args:
            dataset: the rows.
            collate: makes a batch of rows.
            sources: what may hold random generators of its own: collators and datasets.
            seed: seed of the run.
            side: `"train"` or `"target"`.
        """
        self._dataset = dataset
        self._collate = collate
        self._sources = tuple(sources)
        self._seed = seed
        self._side = side
        self._began = False
        self._last: dict[int, Any] = {}

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Make the batch of some rows, each in one of its draws.

        Args:
            keys: pairs of row and draw.

        Raises:
            ValueError: the batches of single rows cannot be joined.
        """
        own = held_generators(*self._sources)
        with generators_kept(own):
            if not self._began:  # a generator may be made by the first call, as by collators with a seed
                self._drawn(keys[0][0])
                own = held_generators(*self._sources)
                self._began = True
            rows, singles = [], []
            for row, draw in keys:
                set_generators(self._seed, self._side, row, draw, own)
                value, single = self._drawn(row)
                rows.append(value)
                singles.append(single)
            if getattr(self._dataset, "sequential", False):
                self._last = {row: value for (row, _), value in zip(keys, rows, strict=True)}
            return joined(singles, lambda: self._collate([copy.copy(value) for value in rows]))

    def alike(self, row: int) -> Any:
        """Make the batch of a row alone with the same random numbers for every row: equal rows give equal batches."""
        if not self._began:
            self.__getitems__([(row, 0)])
        own = held_generators(*self._sources)
        with generators_kept(own):
            set_generators(self._seed, self._side, 0, 0, own)
            return self._drawn(row)[1]

    def check_apart(self, rows: Sequence[int]) -> None:
        """Check that a row comes out of the collator as its own, whichever row is beside it, for the same draw.

        Rows of several sizes are left to the check of the gradients, since padding changes what is drawn.

        Args:
            rows: three rows.

        Raises:
            ValueError: the collator mixes rows, as Mixup does; names the entries of the batch.
        """
        own = held_generators(*self._sources)
        with generators_kept(own):
            first, *others = (rows_at(self._dataset, [row])[0] for row in rows)
            try:
                mixed = self._mixed(first, others, own)
            except Exception as error:  # of a collator that takes rows of one size alone, or single rows
                logger.debug("Rows %s make no batch of two: %r", rows, error)
                return
        if mixed:
            raise ValueError(
                f"The data collator mixes rows, such as by Mixup or CutMix: {', '.join(map(_name, mixed))} of row "
                f"{rows[0]} depend on the row beside it. Expected a batch whose rows are each its own, since a "
                "mixture has no training row to attribute to. Pass a `data_collator` that mixes none."
            )

    def _mixed(self, first: Any, others: Sequence[Any], own: Sequence[Generator]) -> list[tuple[Any, ...]]:
        """Name the entries of a row that differ beside two others, again and again for the same seeds."""

        def beside(other: Any, draw: int) -> dict[tuple[Any, ...], Any]:
            set_generators(self._seed, self._side, 0, draw, own)
            return dict(_leaves(self._collate([copy.copy(first), copy.copy(other)])))

        def differing(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[tuple[Any, ...]]:
            return [path for path, value in one.items() if _first_differs(value, other.get(path))]

        for draw in range(_MIXING_DRAWS):
            made = [beside(other, draw) for other in others]
            if mixed := differing(*made):
                pairs = [*zip(made, others, strict=True)] * _MIXING_DRAWS
                again = [(one, beside(other, draw)) for one, other in pairs]
                # what no seed repeats is refused when it comes to it
                return [] if any(differing(*pair) for pair in again) else mixed
        return []

    def _drawn(self, row: int) -> tuple[Any, Any]:
        """Read a row, and collate it alone."""
        # a stream need not start again for every draw
        value = self._last[row] if row in self._last else rows_at(self._dataset, [row])[0]
        try:
            return value, self._collate([copy.copy(value)])
        except Exception as error:
            error.add_note("Rows come at random, so that each is collated alone, with seeds of its own.")
            raise
