"""The Walsh–Hadamard transform in torch operators, with the same bits on every device."""

import torch
from torch import Tensor


def hadamard_rows(rows: Tensor) -> Tensor:
    """Multiply rows by the Hadamard matrix of Sylvester, H[i, j] = (−1)^(bits set in i AND j), without a scale.

    log₂ p steps with distances 1, 2, …, p/2 replace pairs (a, b) by (a + b, a − b) (Fino & Algazi, IEEE Transactions
    on Computers 25, 1976). Each is one addition of two float32 numbers, so that the result is the same wherever it is
    computed.

    Args:
        rows: `(rows, p)`, float32, p a power of two. It is overwritten.

    Returns:
        `(rows, p)`, float32.
    """
    count, size = rows.shape
    # Seen as a matrix (high, low), a row has its small distances within rows of that matrix. They are done on its
    # transpose, so that every addition runs over at least min(high, low) neighbours in memory.
    low = 1 << ((size.bit_length() - 1) // 2)
    high = size // low
    turned = rows.view(count, high, low).transpose(1, 2).contiguous()
    turned = _steps(turned.view(count, size), torch.empty_like(rows), high)
    straight = turned.view(count, low, high).transpose(1, 2).contiguous().view(count, size)
    return _steps(straight, torch.empty_like(rows), low)


def _steps(source: Tensor, target: Tensor, run: int) -> Tensor:
    """Do the steps of all distances that are multiples of `run`; returns `source` or `target`, and overwrites both."""
    count, size = source.shape
    distance = run
    while distance < size:
        given, made = (one.view(count, size // (2 * distance), 2, distance) for one in (source, target))
        torch.add(given[:, :, 0], given[:, :, 1], out=made[:, :, 0])
        torch.sub(given[:, :, 0], given[:, :, 1], out=made[:, :, 1])
        source, target = target, source
        distance *= 2
    return source
