"""Bounded scratch memory in which blocks of per-sample gradients are built."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

_BLOCK_BYTES, _BLOCK_BYTES_OF_GPUS = 2**25, 2**28

BLOCK_BYTES_VARIABLE = "HF_TRAK_MAX_BLOCK_BYTES"

"""Environment variable with the bytes of a block; it changes features by rounding only."""

_CACHED_BYTES = 2**23

_FEW_TERMS = 32


def default_block_bytes(device: torch.device) -> int:
    """Choose the bytes of a block for a device.

    Returns:
        Those of the environment variable `HF_TRAK_MAX_BLOCK_BYTES`. By default 32 MiB, which a CPU's cache profits
        from, or 256 MiB on a GPU, enough work to keep it busy while the next kernels are started.

    Raises:
        ValueError: the variable is no positive number.
    """
    if given := os.environ.get(BLOCK_BYTES_VARIABLE):
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(
                f"The environment variable `{BLOCK_BYTES_VARIABLE}` is {given!r}. Expected a positive number of "
                "bytes. Correct it, or unset it for the default."
            )
        return int(given)
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
        return self._rows(size * row_elements * dtype.itemsize, total, self.max_block_bytes)

    def rows_of_products(self, terms: int, size: int, row_elements: int, like: Tensor, total: int) -> int:
        """Count them for a sum of `terms` outer products.

        A sum of few terms takes as long as writing it. On a CPU it gets blocks of at most 8 MiB, which stay in the
        cache until they have been projected: with 1, 4, 16 and 32 terms these took 2.5, 3.5, 1.4 and 1.0 times less
        than blocks of 32 MiB. From 64 terms on, larger blocks are the faster ones, since their products are.
        """
        cached = like.device.type == "cpu" and terms <= _FEW_TERMS
        most = min(self.max_block_bytes, _CACHED_BYTES) if cached else self.max_block_bytes
        return self._rows(size * row_elements * like.dtype.itemsize, total, most)

    @staticmethod
    def _rows(row_bytes: int, total: int, most_bytes: int) -> int:
        return max(1, min(total, most_bytes // max(row_bytes, 1)))

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


TakesOuter = Callable[[Tensor, Tensor], bool]

"""Predicate on two factors `(B, T, I)` and `(B, T, J)`: pass this gradient on as factors instead of a dense block?"""


def every_factor(left: Tensor, right: Tensor) -> bool:
    """The predicate of sinks that need factors wherever a gradient has them, at any price.

    Given as `takes_outer`, it makes convolutions unfold their inputs, too. Only convolutions that see one channel each
    still form their gradients: their factors say nothing.
    """
    return True


@dataclass(frozen=True)
class OuterBlock:
    """The block `(B, I · J)` of Σ_t left[b, t, i] · right[b, t, j], flattened over (i, j).

    Attributes:
        left: `(B, T, I)`.
        right: `(B, T, J)`.
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the dense block, `(B, I · J)`."""
        return self.left.shape[0], self.left.shape[2] * self.right.shape[2]

    def joined(self, fold: int) -> "OuterBlock":
        """Add up every `fold` rows of a `(B · fold, I · J)` block: their factors are put side by side."""
        size = self.left.shape[0] // fold
        return OuterBlock(
            self.left.reshape(size, -1, self.left.shape[2]), self.right.reshape(size, -1, self.right.shape[2])
        )

    def dense(self) -> Tensor:
        """Form the block, `(B, I · J)`."""
        return torch.bmm(self.left.transpose(1, 2), self.right).flatten(1)


@runtime_checkable
class OuterSink(Protocol):
    """A [`GradientSink`] that can take blocks as two factors, such as [`ProjectionSink`]."""

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Tell whether to pass on the factors `(B, T, I)` and `(B, T, J)` of a block rather than the block."""

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Take a block by its factors; `start` is the position of its first column."""
