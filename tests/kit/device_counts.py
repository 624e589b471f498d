"""Counts what a batch makes a GPU do, on a machine without one: launches, waits, bytes and operations.

[`as_on_a_gpu`] has the library take the ways that it takes for CUDA tensors, while torch's operators run on the CPU,
and [`hf_trak.runtime.counting.Counting`] counts them; a kernel of this library is one launch, too.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from hf_trak._compat import unseen_by_modes
from hf_trak.gradient_computers.hooked import computer, hooked_pass, hooks, tracker, workspace
from hf_trak.gradient_computers.hooked.rules import conv, embedding
from hf_trak.kernels import ops
from hf_trak.kernels.arguments import OuterArguments, ReduceArguments, SjltArguments
from hf_trak.kernels.runtime import Launch
from hf_trak.kernels.sources import INPUT_TYPES, outer_kernel, sjlt_kernel
from hf_trak.kernels.sparse import TILE
from hf_trak.projectors import base, dense
from hf_trak.runtime.counting import Counting, bytes_of
from hf_trak.store import codes


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
