"""The counter-based generator in plain Python, to be checked by hand; `philox.py` is the same for tensors.

`philox(position, block, stream, seed, model_id)` gives four 32-bit words, see the table in `philox.py`. Bit t of a
call (0 ≤ t < 128) is bit t mod 32 of word ⌊t / 32⌋, bit 0 the least significant.
"""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 2**32 - 1


def philox_4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python ints (Salmon et al. 2011, figure 2 and section 5)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(_MULTIPLIERS[0] * c0, 2**32)
        high1, low1 = divmod(_MULTIPLIERS[1] * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def philox(position: int, block: int, stream: int, seed: int, model_id: int) -> tuple[int, int, int, int]:
    """The generator with the key and counter layout of this library."""
    return philox_4x32_10(
        (position & _MASK, position >> 32, stream << 24 | block, model_id), (seed & _MASK, seed >> 32)
    )


def sign(words: tuple[int, int, int, int], bit: int) -> int:
    """±1 from bit `bit` of 128."""
    return 1 - 2 * (words[bit // 32] >> bit % 32 & 1)


def draw(word: int, n: int) -> int:
    """A number in {0, …, n − 1} out of a 32-bit word."""
    return word * n >> 32
