"""Launches of `hadamard.cu` for rounds of the rotation `hadamard-1`.

How a round is cut into passes over memory depends on its size alone, and does not change a bit of the result.
"""

import ctypes
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from hf_trak.errors import KernelError
from hf_trak.kernels.arguments import fields_of
from hf_trak.kernels.runtime import Launch, Runtime
from hf_trak.kernels.sources import HADAMARD

TILE_BITS = 14
"""A block of threads holds a tile of 2¹⁴ numbers, as in `hadamard.cu`."""

_MAX_HIGH_BITS = 9  # then lines have 32 numbers, whose signs are one word and whose bytes are one access to memory
_SHARED_BYTES = 4 << TILE_BITS
_MAX_SPAN = 2**32  # elements that a tile may reach over


class HadamardArguments(ctypes.Structure):
    """Arguments of `hadamard.cu`."""

    _fields_ = (
        *fields_of(ctypes.c_void_p, "rows", "signs"),
        *fields_of(ctypes.c_int64, "count", "stride"),
        *fields_of(ctypes.c_uint32, "words", "size_bits", "high_bits", "first_bit"),
        *fields_of(ctypes.c_uint32, "first_round", "rounds", "low_bits"),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class Pass:
    """One pass over memory: the last steps of a round, or some of them, and then rounds that begin."""

    first_bit: int
    """The steps before the rounds have the distances 2^first_bit, 2^(first_bit + 1), …"""

    high_bits: int
    """Number of these steps."""

    first_round: int
    """The first round that begins in this pass."""

    rounds: int
    """Number of rounds that begin."""

    low_bits: int
    """Number of steps of each of them, with the distances 1, 2, 4, …"""


def plan_passes(size_bits: int, rounds: int) -> list[Pass]:
    """Plan the passes for rounds on the same block of 2^size_bits columns.

    A block that fits into a tile takes one pass. In others, a tile that ends a round begins the next one: its lines
    are columns side by side, whose first steps need no others.
    """
    if size_bits <= TILE_BITS:
        return [Pass(TILE_BITS, 0, 0, rounds, size_bits)]
    passes = [Pass(TILE_BITS, 0, 0, 1, TILE_BITS)]
    done = TILE_BITS  # steps of the current round
    for following in range(1, rounds + 1):
        while done < size_bits:
            high = min(size_bits - done, _MAX_HIGH_BITS)
            begins = done + high == size_bits and following < rounds
            passes.append(Pass(done, high, following, int(begins), TILE_BITS - high if begins else 0))
            done += high
        done = passes[-1].low_bits
    return passes


def rotate_blocks(runtime: Runtime, rows: Tensor, signs: Tensor, size: int, starts: list[int]) -> None:
    """Replace blocks of columns, one after another, by H·D·x / √p: the rounds of `hadamard-1`.

    Args:
        rows: `(rows, k)`, float32, columns side by side, changed in place.
        signs: `(rounds, ⌈p / 32⌉)`, int32, contiguous: bit c mod 32 of word ⌊c / 32⌋ is the sign of column c.
        size: p, the number of columns of a block: a power of two below 2³¹.
        starts: the first column of the block, for each round.

    Raises:
        KernelError: the rows are too far apart.
    """
    if rows.shape[0] == 0:
        return
    count, stride = rows.shape[0], rows.stride(0)
    size_bits = size.bit_length() - 1
    tiles = -(-count // (1 << (TILE_BITS - size_bits))) if size_bits <= TILE_BITS else count << (size_bits - TILE_BITS)
    if size_bits < TILE_BITS and stride << (TILE_BITS - size_bits) >= _MAX_SPAN:
        raise KernelError(
            f"Rows of {size} numbers lie {stride} numbers apart. Expected fewer than 2³² numbers between the first "
            f"and the last of {1 << (TILE_BITS - size_bits)} rows. Copy them with `.contiguous()`."
        )
    signs = _repeated(signs, size)
    first = 0
    for start, equal in groupby(starts):
        rounds = len(list(equal))
        for planned in plan_passes(size_bits, rounds):
            arguments = HadamardArguments(
                rows[:, start:].data_ptr(),
                signs.data_ptr(),
                count,
                stride,
                signs.shape[1],
                size_bits,
                planned.high_bits,
                planned.first_bit,
                first + planned.first_round,
                planned.rounds,
                planned.low_bits,
                size**-0.5,
            )
            runtime.launch(Launch(HADAMARD, (tiles, 1, 1), _SHARED_BYTES, arguments), rows.device)
        first += rounds


def _repeated(signs: Tensor, size: int) -> Tensor:
    """Repeat the signs of rows of fewer than 32 numbers until they fill a word."""
    if size >= 32:
        return signs
    ones = sum(1 << bit for bit in range(0, 32, size))
    words = (signs.to(torch.int64) & ((1 << size) - 1)) * ones
    return (words - ((words >> 31) << 32)).to(torch.int32)
