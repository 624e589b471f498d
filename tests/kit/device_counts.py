"""Counts what a batch makes a GPU do, on a machine without one: launches, waits, bytes and operations.

[`as_on_a_gpu`] has the library take the ways that it takes for CUDA tensors, while torch's operators run on the CPU,
and [`Counting`] counts them. A launch is one operator of ATen that computes something, or one kernel of this library.
Sums with indices and convolutions are several kernels on a GPU, and cuDNN converts layouts: these are not counted.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hf_trak._compat import unseen_by_modes
from hf_trak.gradient_computers.hooked import computer, hooked_pass, hooks, tracker, workspace
from hf_trak.gradient_computers.hooked.rules import conv, embedding
from hf_trak.kernels import ops
from hf_trak.kernels.arguments import OuterArguments, ReduceArguments, SjltArguments
from hf_trak.kernels.runtime import Launch
from hf_trak.kernels.sources import INPUT_TYPES, outer_kernel, sjlt_kernel
from hf_trak.kernels.sparse import TILE
from hf_trak.projectors import base, dense
from hf_trak.store import codes

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


class CountedRuntime:
    """A [`hf_trak.kernels.runtime.Runtime`] that counts launches and computes nothing."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Return that of an H200."""
        return 9, 0

    def launch(self, launch: Launch, device: torch.device) -> None:
        """Count a launch, with the bytes that it reads and writes."""
        arguments: Any = launch.arguments
        out = arguments.to.rows * arguments.to.columns * 4
        partials = out * launch.grid[1] * (launch.grid[2] if arguments.to.columns <= TILE else 1)
        written, added = (partials, 0) if arguments.to.partials else (out, out)
        if isinstance(arguments, SjltArguments):
            size = next(dtype.itemsize for dtype in INPUT_TYPES if sjlt_kernel(dtype) == launch.kernel)
            read = arguments.to.rows * arguments.columns * size + added
        elif isinstance(arguments, OuterArguments):
            size = next(
                dtype.itemsize
                for dtype in INPUT_TYPES
                for tokens in range(1, 9)
                if outer_kernel(dtype, tokens) == launch.kernel
            )
            read = arguments.to.rows * arguments.tokens * (arguments.height + arguments.width) * size + added
        elif isinstance(arguments, ReduceArguments):
            read, written = out * (arguments.slots + 1), out
        else:
            raise NotImplementedError(f"`{launch.kernel.expression}` has no count of bytes yet.")
        self.counting.launch(launch.kernel.file, read, written)


@contextmanager
def as_on_a_gpu(counting: Counting, values: Callable[[Tensor], np.ndarray] | None = None) -> Iterator[None]:
    """Have the library choose as for CUDA tensors in this context, its kernels counted instead of run.

    What is done for the gradients of a layer is in the section of its name.

    Args:
        counting: counts waits and the library's kernels; enter it within this context for torch's operators.
        values: gives the numbers of a tensor that is copied to the host, for tensors that have none
            (`FakeTensorMode`).
    """
    emit, to_numpy = hooks._RuleHandler._emit, Tensor.numpy

    def emitted(handler: Any, *args: Any) -> None:
        with counting.section(handler.name):
            emit(handler, *args)

    on_host: dict[int, np.ndarray] = {}
    kept: list[Tensor] = []

    def waiting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = on_host.get(tensor.untyped_storage()._cdata)
            if found is None:
                counting.wait(name)
            if name == "numpy" and found is not None and values:
                return (
                    np.broadcast_to(found, tensor.shape) if found.ndim < tensor.ndim else found.reshape(tensor.shape)
                )
            return original(tensor, *args, **kwargs)

        return call

    def copied_to_host(source: Tensor) -> Callable[[], Tensor]:
        counting.launch("copy to host", bytes_of(source), bytes_of(source))
        with unseen_by_modes():
            numbers = values(source) if values else to_numpy(source.detach()).copy()
            copy = torch.empty_like(source) if values else torch.from_numpy(numbers)
            on_host[copy.untyped_storage()._cdata] = numbers
        kept.append(copy)  # its memory stays its own
        return lambda: copy

    def sent_to_device(source: Tensor, device: torch.device) -> Tensor:
        counting.launch("copy to device", bytes_of(source), bytes_of(source))
        return source

    replaced: list[tuple[Any, str, Any]] = [
        (Tensor, "is_cuda", property(lambda tensor: True)),
        *((Tensor, name, waiting(name)) for name in ("cpu", "tolist", "numpy")),
        *((module, "kernels_wanted", lambda device: True) for module in (base, dense, ops, codes)),
        *((ops, f"require_right_{name}", lambda *_: None) for name in ("sjlt", "outer", "hadamard")),
        (ops, "CUDA", CountedRuntime(counting)),
        (computer, "default_block_bytes", lambda device: workspace.default_block_bytes(torch.device("cuda"))),
        (workspace, "_FEW_TERMS", 0),
        (conv, "_one_by_one", conv._as_groups),
        *((module, "copied_to_host", copied_to_host) for module in (hooked_pass, tracker)),
        (embedding, "sent_to_device", sent_to_device),
        (hooks._RuleHandler, "_emit", emitted),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
