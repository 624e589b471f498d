"""Random vectors for solvers from the counter generator, a function of the seed and the checkpoint alone.

They come from streams of their own, so that they share no bits with projections, rotations and labels: key and counter
are laid out as in `hf_trak.kernels.philox`, with the row of the matrix as position.
"""

import math

import torch
from torch import Tensor

from hf_trak.kernels.philox import MASK32, Stream, Word, packed_words, philox_4x32, sign_tensor

_SIGNS_PER_CALL = 128
_NORMALS_PER_CALL = 4
_ROWS_TOGETHER = 1 << 14


def random_signs(rows: int, columns: int, seed: int, model_id: int) -> Tensor:
    """Generate independent signs ±1, `(rows, columns)`, float32, with the same bits everywhere.

    Args:
        rows: number of rows.
        columns: number of columns, of which 128 come from one call of the generator.
        seed: the seed, in [0, 2⁶³).
        model_id: id of the checkpoint, in [0, 2³²).
    """
    result = torch.empty(rows, columns)
    for first in range(0, rows, _ROWS_TOGETHER):
        part = result[first : first + _ROWS_TOGETHER]
        for block in range(-(-columns // _SIGNS_PER_CALL)):
            left = block * _SIGNS_PER_CALL
            signs = sign_tensor(packed_words(_words(first, len(part), block, seed, model_id, Stream.SOLVER_SIGNS_1)))
            part[:, left : left + _SIGNS_PER_CALL] = signs[:, : columns - left]
    return result


def random_normals(rows: int, columns: int, seed: int, model_id: int) -> Tensor:
    """Generate independent standard normal numbers, `(rows, columns)`, float64, by the method of Box and Muller.

    The arguments are those of [`random_signs`]. Bits depend on the logarithm and the cosine of the machine.
    """
    parts = []
    for block in range(-(-columns // _NORMALS_PER_CALL)):
        words = [word.double() for word in _words(0, rows, block, seed, model_id, Stream.SOLVER_NORMALS_1)]
        for first, second in ((words[0], words[1]), (words[2], words[3])):
            radius = (-2 * ((first + 1) / 2.0**32).log()).sqrt()
            angle = second * (2 * math.pi / 2.0**32)
            parts += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(parts[:columns], dim=1)


def _words(
    start: int, count: int, block: int, seed: int, model_id: int, stream: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counter: tuple[Word, Word, Word, Word] = (
        torch.arange(start, start + count, dtype=torch.int64), 0, block | (stream << 24), model_id,
    )  # fmt: skip
    return philox_4x32(counter, (seed & MASK32, seed >> 32))
