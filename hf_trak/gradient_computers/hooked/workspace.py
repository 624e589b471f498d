"""Bounded scratch memory in which blocks of per-sample gradients are built."""

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK_BYTES, _BLOCK_BYTES_OF_GPUS = 2**25, 2**28


def default_block_bytes(device: torch.device) -> int:
    """Bytes of a block where nobody says: what a CPU's cache profits from, or as much work as keeps a GPU busy
    while the next kernels are started.
    """
    return _BLOCK_BYTES_OF_GPUS if device.type == "cuda" else _BLOCK_BYTES


TakesOuter = Callable[[Tensor, Tensor], bool]
"""Says of two factors `(B, T, I)` and `(B, T, J)` whether their block is to stay in factored form, see `OuterSink`."""


class Workspace:
    """One reusable buffer per device and dtype, so that blocks do not cost a fresh allocation each.

    On CPUs the first touch of freshly mapped memory costs more than the product that fills it.

    Attributes:
        takes_outer: what the sink says of factors. `None`: blocks are always formed.
    """

    def __init__(self, max_block_bytes: int = _BLOCK_BYTES) -> None:
        """
        Args:
            max_block_bytes: bytes of a block `(B, n)` at which parameters are cut into slices. A block is never
                smaller than one row of the parameter.

        Raises:
            ValueError: not a positive number.
        """
        if max_block_bytes <= 0:
            raise ValueError(f"`max_block_bytes` is {max_block_bytes}; expected a positive number of bytes.")
        self.max_block_bytes = max_block_bytes
        self.takes_outer: TakesOuter | None = None
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def rows(self, size: int, row_elements: int, dtype: torch.dtype, total: int) -> int:
        """How many rows of `row_elements` elements go into one block for `size` samples, between 1 and `total`."""
        row_bytes = max(size * row_elements * dtype.itemsize, 1)
        return max(1, min(total, self.max_block_bytes // row_bytes))

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Uninitialized memory of a shape, with the dtype and device of `like`, valid until the next call."""
        key = (like.device, like.dtype)
        numel = torch.Size(shape).numel()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            self._buffers[key] = buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        return buffer[:numel].view(shape)

    def free(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()
