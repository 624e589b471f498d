"""Products of rows of codes with integers by a compiled function, `cuda_ext/cpu/codes.c`, where it is available."""

from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from hf_trak.kernels.cpu_functions import CompiledFunction

_COLUMNS = 2048
"""Columns of a piece, as in the function."""

_ARGUMENTS = (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p)


def arranged(integers: Tensor, bits: int) -> Tensor:
    """Put the integers that a block of codes is multiplied with in the order of the function.

    Args:
        integers: `(m, columns)`, float64 without fractions, |q| < 2²³.
        bits: b, bits per level.

    Returns:
        Of every piece `(m, 2, columns)`, int16: q = 4096 · high + low, in the order in which levels come out of bytes.
    """
    per_byte, pieces = 8 // bits, []
    for piece in torch.nn.functional.pad(integers, (0, -integers.shape[1] % per_byte)).split(_COLUMNS, dim=1):
        ordered = piece.unflatten(1, (-1, per_byte)).transpose(1, 2).flatten(1)
        high = ((ordered + 2048) / 4096).floor_()
        pieces.append(torch.stack([high, ordered - 4096 * high], dim=1).to(torch.int16).flatten())
    return torch.cat(pieces)


class CompiledProducts(CompiledFunction):
    """The function that adds up products of levels and integers."""

    def __init__(self) -> None:
        super().__init__("codes", "codes_add", _ARGUMENTS, _is_right)

    def sums(self, blocks: Sequence[Tensor], targets: Sequence[Tensor], bits: int, m: int) -> Tensor:
        """Add up u · q over all columns, where u is the level of a row.

        Args:
            blocks: the bytes of the rows, `(rows, bytes)`, uint8, on the CPU.
            targets: of every block what [`arranged`] returns.
            bits: b.
            m: number of targets.

        Returns:
            `(rows, m)`, int64, exact.
        """
        totals = torch.zeros(len(blocks[0]), m, dtype=torch.int64)
        for block, target in zip(blocks, targets, strict=True):
            held = block if block.stride(1) == 1 else block.contiguous()
            self(totals.data_ptr(), m, held.data_ptr(), held.stride(0), *held.shape, bits, target.data_ptr())
        return totals


def _is_right(function: Callable[..., None]) -> bool:
    """Compare the function with its definition: two pieces, one row more than four, the largest numbers."""
    generator = torch.Generator().manual_seed(0)
    rows, m = 5, 3
    for bits in (1, 2, 4, 8):
        packed = torch.randint(0, 256, (rows, (_COLUMNS + 40) * bits // 8), dtype=torch.uint8, generator=generator)
        packed[0] = 255
        columns = packed.shape[1] * 8 // bits
        integers = torch.randint(1 - 2**23, 2**23, (m, columns), generator=generator).double()
        integers[:2] = torch.tensor([[2.0**23 - 1], [1 - 2.0**23]])
        totals, targets = torch.zeros(rows, m, dtype=torch.int64), arranged(integers, bits)
        function(totals.data_ptr(), m, packed.data_ptr(), packed.stride(0), *packed.shape, bits, targets.data_ptr())
        levels = packed.unsqueeze(2) >> torch.arange(0, 8, bits, dtype=torch.uint8) & 2**bits - 1
        if not torch.equal(totals.double(), levels.flatten(1).double() @ integers.T):
            return False
    return True


compiled_products = CompiledProducts()
