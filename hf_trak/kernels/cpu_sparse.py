"""The additions of the sparse map by a compiled function, `cuda_ext/cpu/sjlt.c`, where it is available."""

import ctypes
import logging
import os
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from hf_trak.kernels.backend import VARIABLE
from hf_trak.kernels.cpu_compiler import compiled

logger = logging.getLogger(__name__)

_WORTH_COMPILING = 2**27
"""Numbers that torch operators add first, about .1 s: compiling takes longer than a small model's projections."""

_LOCK = threading.Lock()
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (
    _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER,
)  # fmt: skip


class CompiledAddition:
    """The compiled function of this process: looked for on the disk at first, and compiled when that pays.

    The function and the torch operators give the same bits, so that either may be used for any block. Before its first
    use the function is compared with torch on a small case, and left alone if the results differ.
    """

    def __init__(self) -> None:
        self._function: Callable[..., None] | None = None
        self._looked = self._compiled = False
        self._numbers = 0

    def usable(self, block: Tensor) -> bool:
        """Tell whether a block `(B, n)` can be added by the function.

        It can where it is float32 with consecutive columns, on a CPU, unless `HF_TRAK_BACKEND` is `torch`.
        """
        if block.dtype != torch.float32 or block.device.type != "cpu" or (block.shape[1] > 1 and block.stride(1) != 1):
            return False
        if os.environ.get(VARIABLE) == "torch":
            return False
        if self._function is None and not self._compiled:
            self._look(block.numel())
        return self._function is not None

    def add(self, sums: Tensor, block: Tensor, first: int, signs: Tensor, offsets: Tensor, steps: Tensor) -> None:
        """Add a block to the accumulators.

        Args:
            sums: `(B, K + span)`, float32, consecutive columns, changed in place.
            block: `(B, n)`, one that is [`~CompiledAddition.usable`].
            first: place of the first column in the region.
            signs: packed bits of the region, int32.
            offsets: of every chunk of the region, int64.
            steps: of every chunk of the region, int64.
        """
        assert self._function is not None
        self._function(
            sums.data_ptr(), sums.stride(0), block.data_ptr(), block.stride(0), block.shape[0], block.shape[1], first,
            signs.data_ptr(), offsets.data_ptr(), steps.data_ptr(),
        )  # fmt: skip

    def _look(self, numbers: int) -> None:
        """Load the function from the disk, or compile it when enough numbers have been added without it."""
        with _LOCK:
            self._numbers += numbers
            worth = self._numbers >= _WORTH_COMPILING
            if self._compiled or (self._looked and not worth):
                return
            self._looked, self._compiled = True, worth
            library = compiled("sjlt", compile_now=worth)
            if library is None:
                return
            self._compiled = True
            function = library.sjlt_add
            function.argtypes, function.restype = _ARGUMENTS, None
            if _is_right(function):
                self._function = function
            else:
                logger.warning(
                    "The compiled projection gives other results than torch, and is not used. Please report this with "
                    "the name and the version of the C compiler."
                )


def _is_right(function: Callable[..., None]) -> bool:
    """Compare the function with its definition on two chunks, from the middle of a run to the middle of another."""
    generator = torch.Generator().manual_seed(0)
    n, first = 3 * 4096, 700
    block = torch.randn(2, n, generator=generator)
    signs = torch.randint(-(2**31), 2**31, (2 * 8192 // 32,), generator=generator).to(torch.int32)
    offsets, steps = torch.tensor([31, 5]), torch.tensor([513, 600])
    sums = torch.zeros(2, 16384)
    function(
        sums.data_ptr(), sums.stride(0), block.data_ptr(), block.stride(0), 2, n, first, signs.data_ptr(),
        offsets.data_ptr(), steps.data_ptr(),
    )  # fmt: skip
    places = torch.arange(first, first + n)
    minus = (signs[places // 32] >> (places % 32)) & 1
    chunk, run = places // 8192, places % 8192 // 512
    targets = offsets[chunk] + run * steps[chunk] + places % 512
    expected = torch.zeros_like(sums)
    for one in range(2):  # within a chunk every target is hit once
        mine = chunk == one
        expected[:, targets[mine]] += block[:, mine] * (1 - 2 * minus[mine])
    return torch.equal(sums, expected)


compiled_addition = CompiledAddition()
