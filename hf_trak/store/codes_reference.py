"""Rotation and codes, defined entry by entry. Slow on purpose: plain Python, to be checked by hand.

`hadamard-1` (stream 7)
    A rotation of rows of k numbers. Let p be the largest power of two with p ≤ k. If p = k, rounds 0, 1
    and 2 rotate all entries; otherwise rounds 0, 2 and 4 rotate the first p entries, and rounds 1, 3 and 5 the last p.
    A round turns x₀ … x_{p−1} into y = H·D·x / √p: entry i is
    multiplied by the sign from bit i mod 128 of the call of the generator at position ⌊i / 128⌋, block = number of the
    round (see `hf_trak.projectors.reference`), then by the float32 nearest to 1/√p, and H is the Hadamard matrix of
    Sylvester, H[i, j] = (−1)^(number of bits set in i AND j). In float32, H is applied as log₂ p steps of additions
    and subtractions, with distances 1, 2, 4, …, p/2, so that every device rounds alike.

`levels-1`, b ∈ {8, 4, 2, 1} bits
    Entry y of a rotated row becomes the level u = min(max(⌊y / s + 2ᵇ⁻¹⌋, 0), 2ᵇ − 1), which stands for
    v = u − (2ᵇ − 1) / 2. The step s is max|y| / 127.5 for 8 bits, and 0.3352·σ, 0.9957·σ and σ for 4, 2 and 1 bits
    with σ = √(Σ y² / k): the steps with the least mean squared error for normal numbers (Max, "Quantizing for minimum
    distortion", IRE Transactions on Information Theory 6, 1960). The *scale* of the row is Σ y² / Σ y·v, so that the
    decoded row, scale · v, has the inner product Σ y² with the row itself. It follows that inner products with other
    rows have the right expectation over rotations (as in RaBitQ, arXiv 2405.12497, for 1 bit). A row of zeros has
    levels and scale 0.

    Sums are those of pairs: to k numbers, zeros are added up to a power of two, and the upper half is added to the
    lower half until one number is left, in float64. Step and scale are rounded to float32; y / s and the rest of u are
    computed in float32.

Packing
    Levels fill bytes from the lowest bit: byte j holds the levels j·(8/b) … (j+1)·(8/b) − 1. Bits after the last level
    are 0.
"""

import math

import numpy as np
from numpy.typing import NDArray

from hf_trak.kernels.philox import philox, sign

STREAM = 7


def rotated(row: NDArray[np.float32], seed: int, model_id: int) -> NDArray[np.float32]:
    """Compute `hadamard-1` of one row of k numbers."""
    values = [np.float32(value) for value in row]
    size = 1 << (len(values).bit_length() - 1)
    rounds = 3 * ([0] if size == len(values) else [0, len(values) - size])
    for number, first in enumerate(rounds):
        scale = np.float32(1 / math.sqrt(size))
        part = [
            value * np.float32(sign(philox(i // 128, number, STREAM, seed, model_id), i % 128)) * scale
            for i, value in enumerate(values[first : first + size])
        ]
        distance = 1
        while distance < size:
            part = [
                part[i - distance] - part[i] if i & distance else part[i] + part[i + distance] for i in range(size)
            ]
            distance *= 2
        values[first : first + size] = part
    return np.array(values, dtype=np.float32)


def pair_sum(values: list[float]) -> float:
    """Add pairs: the upper half is added to the lower half until one number is left."""
    padded = [*values, *[0.0] * ((1 << (len(values) - 1).bit_length()) - len(values))]
    while len(padded) > 1:
        half = len(padded) // 2
        padded = [padded[i] + padded[i + half] for i in range(half)]
    return padded[0]


def levels(row: NDArray[np.float32], bits: int) -> tuple[list[int], np.float32]:
    """Compute `levels-1` of one rotated row: the levels u and the scale."""
    squares = pair_sum([float(y) ** 2 for y in row])
    if squares == 0:
        return [0] * len(row), np.float32(0)
    sigma = math.sqrt(squares / len(row))
    largest = max(abs(float(y)) for y in row)
    step = np.float32({8: largest / 127.5, 4: 0.3352 * sigma, 2: 0.9957 * sigma, 1: sigma}[bits])
    top = 2**bits - 1
    found = [min(max(math.floor(y / step + np.float32(2 ** (bits - 1))), 0), top) for y in row]
    product = pair_sum([float(y) * (u - top / 2) for y, u in zip(row, found, strict=True)])
    return found, np.float32(squares / product)


def packed(found: list[int], bits: int) -> bytes:
    """Pack levels in bytes."""
    per_byte = 8 // bits
    padded = [*found, *[0] * (-len(found) % per_byte)]
    return bytes(
        sum(level << (bits * place) for place, level in enumerate(padded[start : start + per_byte]))
        for start in range(0, len(padded), per_byte)
    )
