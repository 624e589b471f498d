"""Levels of 8, 4, 2 or 1 bits in bytes, and back."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

BITS = (8, 4, 2, 1)


def packed_bytes(columns: int, bits: int) -> int:
    """Number of bytes that hold so many levels."""
    return -(-columns * bits // 8)


def pack(levels: Tensor, bits: int) -> Tensor:
    """Pack levels into bytes, each from its lowest bit; bits after the last level are 0.

    Args:
        levels: `(rows, k)`, uint8, below 2ᵇ.
        bits: b, a divisor of 8.

    Returns:
        `(rows, ⌈k·b / 8⌉)`, uint8.
    """
    if bits == 8:
        return levels.contiguous()
    per_byte = 8 // bits
    rows, k = levels.shape
    if k % per_byte:
        levels = torch.nn.functional.pad(levels, (0, -k % per_byte))
    places = levels.reshape(rows, -1, per_byte)
    result = places[..., 0].clone()
    for place in range(1, per_byte):
        result |= places[..., place] << (bits * place)
    return result


def level_values(bits: int) -> Tensor:
    """The number v = u − (2ᵇ − 1) / 2 that each level u stands for: `(2ᵇ,)`, float32."""
    return torch.arange(2**bits, dtype=torch.float32) - (2**bits - 1) / 2


@cache
def _table(bits: int, device: torch.device) -> Tensor:
    """The values of the levels in each byte: `(256, 8 / b)`, float32."""
    places = torch.arange(0, 8, bits)
    found = (torch.arange(256).unsqueeze(1) >> places) & (2**bits - 1)
    return level_values(bits)[found].to(device)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return the numbers that packed levels stand for.

    Args:
        packed: `(rows, ⌈columns·b / 8⌉)`, uint8.
        bits: b.
        columns: number of levels per row.

    Returns:
        `(rows, columns)`, float32, without the scale of the row.
    """
    if bits == 8:
        return packed[:, :columns].to(torch.float32).sub_(127.5)
    # One row of the table, of 8/b numbers, for every byte.
    table, places = _table(bits, packed.device), packed.reshape(-1)
    if packed.device.type != "cpu":
        values = table.index_select(0, places.int())
    elif bits == 4:
        # Two numbers are one word for torch, which takes words faster than NumPy does.
        values = table.view(torch.int64).squeeze(1).index_select(0, places.int()).view(torch.float32)
    else:
        # NumPy copies rows of 16 or 32 bytes up to four times as fast as torch. No index is out of range.
        values = torch.from_numpy(np.take(table.numpy(), places.numpy(), axis=0, mode="clip"))
    return values.view(packed.shape[0], -1)[:, :columns]


def padding_is_zero(packed: Tensor, bits: int, columns: int) -> bool:
    """Tell whether the bits after the last level of every row are 0."""
    left = columns * bits % 8
    return left == 0 or not bool((packed[:, -1] >> left).any())
