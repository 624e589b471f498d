"""The additions of the sparse map by a compiled function, `cuda_ext/cpu/sjlt.c`, where it is available."""

from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from hf_trak.kernels.cpu_functions import CompiledFunction

_ARGUMENTS = (
    c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p,
)  # fmt: skip


class CompiledAddition(CompiledFunction):
    """The function that adds blocks to the accumulators of the sparse map."""

    def __init__(self) -> None:
        super().__init__("sjlt", "sjlt_add", _ARGUMENTS, _is_right)

    def usable(self, block: Tensor) -> bool:
        """Tell whether a block `(B, n)` can be added by the function: float32, consecutive columns, on a CPU."""
        if block.dtype != torch.float32 or block.device.type != "cpu" or (block.shape[1] > 1 and block.stride(1) != 1):
            return False
        return self.is_there(block.numel())

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
        self(
            sums.data_ptr(), sums.stride(0), block.data_ptr(), block.stride(0), block.shape[0], block.shape[1], first,
            signs.data_ptr(), offsets.data_ptr(), steps.data_ptr(),
        )  # fmt: skip


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
