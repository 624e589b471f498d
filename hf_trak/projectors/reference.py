"""The random maps, defined entry by entry. Slow on purpose: plain Python, to be checked by hand.

Everything here is a pure function of (seed, model id, algorithm, i, j), where i is the position of a coordinate in the
concatenation of the selected parameters (`named_parameters()` order) and j one of the k outputs. Backends must
reproduce signs and indices to the bit.

Generator
    `philox(position, block, stream, seed, model_id)` gives four 32-bit words w₀ … w₃: Philox4x32-10 with key
    (seed mod 2³², ⌊seed / 2³²⌋) and counter (position mod 2³², ⌊position / 2³²⌋, stream · 2²⁴ + block, model_id).
    "Bit t of a call" (0 ≤ t < 128) is bit t mod 32 of word ⌊t / 32⌋, bit 0 the least significant. A sign is +1 for a
    0 bit and −1 for a 1 bit. A draw from {0, …, n − 1} out of a word w is ⌊w · n / 2³²⌋ (uniform up to n / 2³²).

`rademacher-1` (stream 1)
    R[i, j] is the sign from bit j mod 128 of the call at position i, block ⌊j / 128⌋.

`normal-1` (stream 2)
    The call at position p, block j gives four entries, R[4p, j] … R[4p + 3, j]: with u = (⌊w₀ / 2⁸⌋ + 1) / 2²⁴ and
    v = ⌊w₁ / 2⁸⌋ / 2²⁴ the first two are √(−2 ln u) cos 2πv and √(−2 ln u) sin 2πv; the last two come from w₂ and w₃
    in the same way. Computed in float32.

`sjlt-1` (streams 3, 4, 5), s nonzeros per row
    The outputs are cut into s consecutive segments, of sizes ⌊k / s⌋ and, for the first k mod s of them, one more.
    Row i has one nonzero entry in each. For segment c of size m, let K be the smallest multiple of m with K ≥ 10240.
    - sign: bit i mod 128 of the call at position ⌊i / 128⌋, block c, stream 3.
    - place: chunk ⌊i / 8192⌋ has, from its call at stream 4, block c, an offset r = a draw from {0, …, K − 1} out of
      w₀ and a step d = 512 + a draw from {0, …, 127} out of w₁. With i mod 8192 = 512·a + b the coordinate has place
      p = (r + a·d + b) mod K.
    - fold: group g = ⌊p / m⌋ has a rotation ρ(g) = a draw from {0, …, m − 1} out of w₀ of the call at position g,
      block c, stream 5, except ρ(0) = 0. The output is the segment's first one plus (p mod m + ρ(g)) mod m.

`factored-1` (streams 8, 9), p and the shapes of the parameters
    A matrix of I × J elements is large if 2 p · (I + J + p) ≤ I · J. A parameter of at least three dimensions whose
    last two make a large matrix is a stack of these. Otherwise one of at least two dimensions is a matrix with the
    first as rows and all others as columns, if that is large. Such a matrix G, whose first element is at position o,
    becomes the p × p numbers LᵀGM / p.
    - L[i, c] is the sign from bit c mod 128 of the call at position o + i, block ⌊c / 128⌋, stream 8.
    - M[j, d] is the sign from bit d mod 128 of the call at position o + j, block ⌊d / 128⌋, stream 9.
    The reduced vector has these numbers, row by row, in the place of the matrix, and all other elements as they are.
    It is mapped by `sjlt-1` with the same seed, model id and s.

`none-1`
    R is the identity, k = P.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_trak.kernels.philox import draw, philox, sign


def rademacher_entry(i: int, j: int, seed: int, model_id: int) -> int:
    """Return R[i, j] of `rademacher-1`."""
    return sign(philox(i, j // 128, 1, seed, model_id), j % 128)


def normal_entry(i: int, j: int, seed: int, model_id: int) -> float:
    """Return R[i, j] of `normal-1`, in double precision."""
    words = philox(i // 4, j, 2, seed, model_id)
    pair = i % 4 // 2 * 2
    radius = math.sqrt(-2 * math.log(((words[pair] >> 8) + 1) / 2**24))
    angle = 2 * math.pi * (words[pair + 1] >> 8) / 2**24
    return radius * (math.sin(angle) if i % 2 else math.cos(angle))


def sjlt_row(i: int, k: int, seed: int, model_id: int, nonzeros: int = 1) -> list[tuple[int, int]]:
    """Return the nonzero entries of row i of `sjlt-1`: s pairs (output, sign)."""
    entries = []
    first = 0
    for copy in range(nonzeros):
        m = k // nonzeros + (copy < k % nonzeros)
        K = -(-10240 // m) * m
        place_words = philox(i // 8192, copy, 4, seed, model_id)
        a, b = divmod(i % 8192, 512)
        place = (draw(place_words[0], K) + a * (512 + draw(place_words[1], 128)) + b) % K
        group, index = divmod(place, m)
        rotation = draw(philox(group, copy, 5, seed, model_id)[0], m) if group else 0
        output = first + (index + rotation) % m
        entries.append((output, sign(philox(i // 128, copy, 3, seed, model_id), i % 128)))
        first += m
    return entries


def matrix(
    algorithm: str, start: int, n: int, k: int, seed: int, model_id: int, nonzeros: int = 1
) -> NDArray[np.float64]:
    """Return rows `start … start + n` of the unscaled R as a dense `(n, k)` array.

    Args:
        algorithm: `rademacher-1`, `normal-1` or `sjlt-1`.

    Raises:
        ValueError: an unknown algorithm.
    """
    result = np.zeros((n, k))
    dense: dict[str, Callable[[int, int, int, int], float]] = {
        "rademacher-1": rademacher_entry,
        "normal-1": normal_entry,
    }
    if algorithm in dense:
        for row in range(n):
            for j in range(k):
                result[row, j] = dense[algorithm](start + row, j, seed, model_id)
    elif algorithm == "sjlt-1":
        for row in range(n):
            for output, value in sjlt_row(start + row, k, seed, model_id, nonzeros):
                result[row, output] = value
    else:
        raise ValueError(f"Unknown algorithm '{algorithm}'. Expected 'rademacher-1', 'normal-1' or 'sjlt-1'.")
    return result


def factored_sizes(shape: Sequence[int], p: int) -> tuple[int, int] | None:
    """Return the sizes I and J of the matrices of a parameter in `factored-1`, or `None` if it is none of large
    matrices."""
    for height, width in ([shape[-2:]] if len(shape) > 2 else []) + [(shape[0], math.prod(shape[1:]))]:
        if len(shape) > 1 and 2 * p * (height + width + p) <= height * width:
            return height, width
    return None


def two_sided(o: int, height: int, width: int, p: int, seed: int, model_id: int) -> NDArray[np.float64]:
    """Return the map of a matrix at position o to its p × p numbers in `factored-1`, as a dense `(I · J, p · p)`
    array."""
    left, right = (
        np.array(
            [[sign(philox(o + i, c // 128, stream, seed, model_id), c % 128) for c in range(p)] for i in range(n)]
        )
        for stream, n in ((8, height), (9, width))
    )
    return np.kron(left, right) / p


def factored_matrix(
    shapes: Sequence[Sequence[int]], p: int, k: int, seed: int, model_id: int, nonzeros: int = 1
) -> NDArray[np.float64]:
    """Return the unscaled R of `factored-1` as a dense `(P, k)` array."""
    rows: list[NDArray[np.float64]] = []
    position, reduced = 0, 0
    for shape in shapes:
        sizes, stop = factored_sizes(shape, p), position + math.prod(shape)
        while position < stop:
            n, size = (math.prod(sizes), p * p) if sizes else (stop - position, stop - position)
            sparse = matrix("sjlt-1", reduced, size, k, seed, model_id, nonzeros)
            rows.append(two_sided(position, *sizes, p, seed, model_id) @ sparse if sizes else sparse)
            position += n
            reduced += size
    return np.concatenate(rows)
