"""Counts what torch does: launches of operators, waits of the host, bytes and floating point operations.

A launch is one operator of ATen that computes something. Sums with indices and convolutions are several kernels on a
GPU, and cuDNN converts layouts: these are not counted.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

WAITING = {"_local_scalar_dense", "nonzero", "unique_consecutive", "_unique2", "unique_dim", "equal", "masked_select"}
"""Operators of ATen whose results reach Python, or whose results' sizes depend on values."""

_NOT_LAUNCHED = {"_local_scalar_dense", "_unsafe_view", "lift_fresh", "resize_", "set_"}
_PREFIXES_NOT_LAUNCHED = ("empty", "new_empty", "sym_")
_WRITE_ONLY = {"copy_", "zero_", "fill_"}
_PICKING = {"index", "index_select", "gather", "embedding"}
"""Operators that read as much of their source as they return."""

_PLACING = {"index_put_": 2, "index_add_": 3, "scatter_": 3, "scatter_add_": 3}
"""Operators that write as much as they are given, and where they are given it."""


@dataclass
class Counts:
    """What a GPU was made to do.

    Attributes:
        launches: operators and kernels, by name.
        waits: times that the host waits for the device, by name.
        read, written: bytes of the arguments and the results of launches.
        allocated: bytes of new memory.
        flops: floating point operations of products, convolutions and attention.
        work: bytes and operations of each launch.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    allocated: int = 0
    flops: int = 0
    work: list[tuple[int, int]] = field(default_factory=list)


class Counting(TorchDispatchMode):
    """Counts operators while it is entered.

    Attributes:
        total: everything.
        sections: what was done within [`Counting.section`], by name; the innermost one counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = Counts()
        self.sections: dict[str, Counts] = {}
        self._open: list[Counts] = [self.total]

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count what is done in this context under a name, too."""
        self._open.append(self.sections.setdefault(name, Counts()))
        try:
            yield
        finally:
            self._open.pop()

    def add(self, add: Callable[[Counts], None]) -> None:
        """Change the counts of everything and those of the open section."""
        for counts in {id(counts): counts for counts in (self.total, self._open[-1])}.values():
            add(counts)

    def wait(self, name: str) -> None:
        """Count a wait of the host."""
        self.add(lambda counts: counts.waits.update([name]))

    def launch(self, name: str, read: int, written: int, flops: int = 0) -> None:
        """Count a launch."""

        def add(counts: Counts) -> None:
            counts.launches[name] += 1
            counts.read[name] += read
            counts.written[name] += written
            counts.flops += flops
            counts.work.append((read + written, flops))

        self.add(add)

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "aten":
            return result
        name = func.__name__.split(".")[0]
        if name in WAITING or any(mask.dtype in (torch.bool, torch.uint8) for mask in _indices(name, args)):
            self.wait(name)
        allocated = _allocated(args, kwargs, result)
        self.add(lambda counts: setattr(counts, "allocated", counts.allocated + allocated))
        if is_launched(func, result):
            read, written = _traffic(func, name, args, kwargs, result)
            self.launch(name, read, written, _flops(func, args, kwargs, result))
        return result


def is_launched(func: Any, result: Any) -> bool:
    """Tell whether an operator of ATen computes something on the device: it is no view and only allocates nothing."""
    name = func.__name__.split(".")[0]
    if func.is_view or name in _NOT_LAUNCHED or name.startswith(_PREFIXES_NOT_LAUNCHED):
        return False
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return any(tensor.numel() for tensor in tensors)


def bytes_of(tensor: Tensor) -> int:
    """Count the bytes of a tensor's own elements: those of an expanded one are counted once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


def _indices(name: str, args: Any) -> list[Tensor]:
    given = args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple) else []
    return [index for index in given if index is not None]


def _allocated(args: Any, kwargs: Any, result: Any) -> int:
    known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    fresh = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(result)
        if isinstance(leaf, Tensor)
    }
    return sum(size for storage, size in fresh.items() if storage not in known)


def _traffic(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Count the bytes that an operator reads and writes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    mutated = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    placed = bytes_of(args[_PLACING[name]]) if name in _PLACING and isinstance(args[_PLACING[name]], Tensor) else None
    written = 0
    read = {argument: given.get(argument.name) for argument in func._schema.arguments}
    for argument in mutated:
        target = read[argument]
        if name in _WRITE_ONLY or argument.kwarg_only:
            read[argument] = None
        tensors = [leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor)]
        written += sum(map(bytes_of, tensors))
    if not mutated:
        written = sum(bytes_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    if placed is not None:
        written, read[func._schema.arguments[0]] = placed, args[_PLACING[name]]
    if name in _PICKING:
        read[func._schema.arguments[0]] = result
    tensors = [leaf for leaf in tree_leaves(list(read.values())) if isinstance(leaf, Tensor)]
    return sum(map(bytes_of, tensors)), written


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    name = func.__name__.split(".")[0]
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    if name == "convolution_backward":  # torch counts the weights' part once per group too often
        grad, x, weight = args[:3]
        positions = (x if args[7] else grad).shape[2:].numel()  # `transposed`
        return 2 * x.shape[0] * positions * weight.numel() * sum(args[10][:2])  # `output_mask`
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0
