"""Bounded scratch memory in which blocks of per-sample gradients are built."""

import torch
from torch import Tensor

_BLOCK_BYTES, _BLOCK_BYTES_OF_GPUS = 2**25, 2**28


def default_block_bytes(device: torch.device) -> int:
    """Choose the bytes of a block for a device.

    Returns:
        32 MiB, which a CPU's cache profits from, or 256 MiB on a GPU, enough work to keep it busy while the next
        kernels are started.
    """
    return _BLOCK_BYTES_OF_GPUS if device.type == "cuda" else _BLOCK_BYTES


class Workspace:
    """One reusable buffer per device and dtype, so that blocks do not cost a fresh allocation each.

    On CPUs the first touch of freshly mapped memory costs more than the product that fills it.
    """

    def __init__(self, max_block_bytes: int = _BLOCK_BYTES) -> None:
        """
        Args:
            max_block_bytes: bytes of a block `(B, n)` at which parameters are cut into slices. A block is never
                smaller than one row of the parameter.

        Raises:
            ValueError: `max_block_bytes` is not positive.
        """
        if max_block_bytes <= 0:
            raise ValueError(f"`max_block_bytes` is {max_block_bytes}; expected a positive number of bytes.")
        self.max_block_bytes = max_block_bytes
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def rows(self, size: int, row_elements: int, dtype: torch.dtype, total: int) -> int:
        """Count the rows of `row_elements` elements that fit into one block for `size` samples: 1 to `total`."""
        row_bytes = max(size * row_elements * dtype.itemsize, 1)
        return max(1, min(total, self.max_block_bytes // row_bytes))

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialized memory of a shape, with dtype and device of `like`, valid until the next call."""
        key = (like.device, like.dtype)
        numel = torch.Size(shape).numel()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            self._buffers[key] = buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        return buffer[:numel].view(shape)

    def free(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()
