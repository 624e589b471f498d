"""Random generators that collators and transforms draw from, and seeds for them.

A seed belongs to a row and a draw: it is computed from `(seed, side, row, draw)` by numpy's `SeedSequence`, whose
results do not change between versions. It depends on nothing that was drawn before, so that a row comes out the same
in any batch, process and order.
"""

import functools
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hf_trak.identity.bytecode import global_references

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
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _MOST_OBJECTS else []
    if isinstance(value, list | tuple):
        return list(value) if len(value) <= _MOST_OBJECTS else []
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
            if isinstance(generator, torch.Generator):
                generator.set_state(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, np.random.RandomState):
                generator.set_state(state)
            else:
                generator.setstate(state)


def _state(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()
