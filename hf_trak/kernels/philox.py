"""Philox4x32-10, the counter-based generator behind every random projection of this library.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC'11, doi 10.1145/2063384.2063405). A
64-bit key and a 128-bit counter go through ten rounds of multiplications and xors; for a fixed key the result is a
bijection of the counter. There is no state: any word of any matrix can be computed by itself, in any order, anywhere.

Use of the bits, the same for every map (`hf_trak/projectors/reference.py` defines the maps themselves):

| word | content |
|---|---|
| key 0, key 1 | low and high 32 bits of the seed, 0 ≤ seed < 2⁶³ |
| counter 0, counter 1 | low and high 32 bits of a position, 0 ≤ position < 2⁶³ |
| counter 2 | stream number (upper 8 bits), column block or copy (lower 24 bits) |
| counter 3 | model id, 0 ≤ model_id < 2³²; in the stream of labels the place of a label in its row |

No two combinations of (seed, model id, stream, position, column block) share key and counter, so no two checkpoints,
seeds, maps or parameters share random bits. The layout guarantees this, not a hash.

Labels drawn from a model (`hf_trak/modelout_functions/draws.py`) and samples of rows (`hf_trak/scores/gram_sample.py`)
are no maps: their position is a row of the dataset.
"""

from enum import IntEnum

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)

KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

ROUNDS = 10

MASK32 = 0xFFFFFFFF


SEED_LIMIT = 2**63

MODEL_ID_LIMIT = 2**32


Word = int | Tensor

"""A 32-bit word: a Python int, or an int64 tensor of values in [0, 2³²)."""


class Stream(IntEnum):
    """Stream numbers, one per use of random bits. A changed map gets a new number, and a new version in its name."""

    RADEMACHER_1 = 1
    NORMAL_1 = 2
    SJLT_1_SIGNS = 3
    SJLT_1_PLACES = 4
    SJLT_1_FOLDS = 5
    LABELS_1 = 6
    HADAMARD_1 = 7
    FACTORED_1_LEFT = 8
    FACTORED_1_RIGHT = 9
    SOLVER_SIGNS_1 = 128
    SOLVER_NORMALS_1 = 129
    GRAM_ROWS_1 = 130


def philox_4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply ten rounds of Philox to counters that broadcast against each other.

    Args:
        counter: four words, at least one of them a tensor. The first two rounds run on the unbroadcast shapes.
        key: two 32-bit ints.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2³²).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low, high = MULTIPLIERS
    keys = [((k0 + r * KEY_STEPS[0]) & MASK32, (k1 + r * KEY_STEPS[1]) & MASK32) for r in range(ROUNDS)]
    # int64 products wrap around at 2⁶⁴ and shifts are arithmetic: masks remove the copies of the sign bit.
    for k0, k1 in keys[:2]:
        product0, product1 = c0 * low, c2 * high
        c0, c1 = ((product1 >> 32) ^ c1 ^ k0) & MASK32, product1 & MASK32
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & MASK32, product0 & MASK32
    device = next(c.device for c in (c0, c1, c2, c3) if isinstance(c, Tensor))
    words = (torch.as_tensor(c, device=device) for c in (c0, c1, c2, c3))
    w0, w1, w2, w3 = (word.contiguous() for word in torch.broadcast_tensors(*words))
    p0, p1 = torch.empty_like(w0), torch.empty_like(w0)
    for k0, k1 in keys[2:]:
        torch.mul(w0, low, out=p0)
        torch.mul(w2, high, out=p1)
        torch.bitwise_right_shift(p1, 32, out=w0).bitwise_xor_(w1).bitwise_xor_(k0).bitwise_and_(MASK32)
        torch.bitwise_right_shift(p0, 32, out=w2).bitwise_xor_(w3).bitwise_xor_(k1).bitwise_and_(MASK32)
        # The low halves become words unmasked: they are xored next, and the mask then clears what is above 32 bits.
        w1, p1 = p1, w1
        w3, p0 = p0, w3
    return w0, w1.bitwise_and_(MASK32), w2, w3.bitwise_and_(MASK32)


def philox_words(
    start: int,
    n: int,
    seed: int,
    model_id: int,
    stream: Stream,
    column_blocks: Word = 0,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Generate the words at positions `start … start + n` of a stream, with the key and counter layout of this module.

    Args:
        start: first position.
        n: number of positions, start + n ≤ 2⁶³.
        seed: seed in [0, 2⁶³).
        model_id: id of the checkpoint in [0, 2³²).
        stream: use of the bits.
        column_blocks: column block in [0, 2²⁴), an int or a 1-D int64 tensor of them.
        device: device to compute on.

    Returns:
        Four int64 tensors, `(n,)`, or `(n, number of column blocks)` for a tensor of column blocks.
    """
    positions = torch.arange(n, dtype=torch.int64, device=device) + start
    if isinstance(column_blocks, Tensor):
        positions = positions[:, None]
    high: Word = positions >> 32
    if start >> 32 == (start + n - 1) >> 32:
        high = start >> 32  # a plain int keeps the first round on one row
    counter = (positions & MASK32, high, column_blocks | (int(stream) << 24), model_id)
    return philox_4x32(counter, (seed & MASK32, seed >> 32))


def packed_words(words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Stack four int64 words into an int32 tensor `(…, 4)` with the same bits."""
    packed = torch.empty((*words[0].shape, 4), dtype=torch.int32, device=words[0].device)
    for index, word in enumerate(words):
        packed[..., index] = word  # the conversion keeps the low 32 bits
    return packed


def sign_tensor(words: Tensor, workspace: Tensor | None = None) -> Tensor:
    """Expand packed bits into ±1: bit b of word w becomes entry 32·w + b, +1 for a 0 and −1 for a 1.

    Args:
        words: int32, `(…, m)`.
        workspace: int32, at least 32 times as many elements, to write into; reused memory is faster than fresh memory.

    Returns:
        float32, `(…, 32·m)`, in the workspace if there is one.
    """
    shape = (*words.shape, 32)
    if workspace is None:
        bits = torch.empty(shape, dtype=torch.int32, device=words.device)
    else:
        bits = workspace[: 32 * words.numel()].view(shape)
    shifts = torch.arange(31, -1, -1, dtype=torch.int32, device=words.device)
    torch.bitwise_left_shift(words.unsqueeze(-1), shifts, out=bits)
    # 0x3F800000 is 1.0: the bit in question sits in the sign position and everything below comes from the constant.
    bits.bitwise_and_(-(2**31)).bitwise_or_(0x3F800000)
    return bits.view(torch.float32).flatten(-2)


def philox_4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute Philox4x32-10 on Python ints (Salmon et al. 2011, figure 2 and section 5)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = divmod(MULTIPLIERS[0] * c0, 2**32)
        high1, low1 = divmod(MULTIPLIERS[1] * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def philox(position: int, block: int, stream: int, seed: int, model_id: int) -> tuple[int, int, int, int]:
    """Run the generator with the key and counter layout of this library."""
    return philox_4x32_10(
        (position & MASK32, position >> 32, stream << 24 | block, model_id), (seed & MASK32, seed >> 32)
    )


def sign(words: tuple[int, int, int, int], bit: int) -> int:
    """Return ±1 from bit `bit` of 128."""
    return 1 - 2 * (words[bit // 32] >> bit % 32 & 1)


def draw(word: int, n: int) -> int:
    """Draw a number in {0, …, n − 1} out of a 32-bit word."""
    return word * n >> 32
