"""The Walsh–Hadamard transform in torch operators, with the same bits on every device."""

import torch
from torch import Tensor

from hf_trak.kernels.philox import sign_tensor

_CACHED_BYTES = 2**19
"""Rows that a CPU transforms together take so many bytes per thread: with their copy they fit into its cache."""

_DEVICE_BYTES = 2**27
"""The same on other devices, where it only bounds the memory."""

_RUN = 64
"""Neighbours in memory from which on an addition costs as much per number as a longer one (measured on a CPU)."""

Pair = tuple[Tensor, Tensor, Tensor, Tensor]
"""Views of one step: the lower and the upper halves of all pairs, and where their sums and differences go."""


class HadamardTransform:
    """Multiplies rows by the Hadamard matrix of Sylvester, H[i, j] = (−1)^(bits set in i AND j), without a scale.

    log₂ p steps with distances 1, 2, …, p/2 replace pairs (a, b) by (a + b, a − b) (Fino & Algazi, IEEE Transactions
    on Computers 25, 1976). Each is one addition of two float32 numbers, so that the result is the same wherever it is
    computed. Two buffers of the size of the rows and all views of them are made once, for any number of transforms.
    """

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        """
        Args:
            count: number of rows.
            size: p, a power of two.
            device: where the rows are.
        """
        source, target = (torch.empty(count, size, dtype=torch.float32, device=device) for _ in range(2))
        # Seen as a matrix (rows · high, low), the rows have their small distances within rows of that matrix. They are
        # done on its transpose, so that every addition runs over many neighbours in memory.
        low = min(size, max(_RUN, 1 << (size.bit_length() // 2)))
        lines = count * size // low
        self._given = source
        self._turn = target.view(low, lines), source.view(lines, low).t()
        self._low, source, target = _steps(target, source, lines, low)
        self._turn_back = target.view(lines, low), source.view(low, lines).t()
        self._high, self._result, _ = _steps(target, source, low, size // low)

    def __call__(self, rows: Tensor, factors: Tensor | float = 1.0) -> Tensor:
        """Transform rows.

        Args:
            rows: `(rows, p)`, float32, any strides.
            factors: `(p,)`, float32: what the columns are multiplied by before.

        Returns:
            `(rows, p)`, float32, contiguous. The next call overwrites it.
        """
        torch.mul(rows, factors, out=self._given)
        for (to, turned), steps in ((self._turn, self._low), (self._turn_back, self._high)):
            to.copy_(turned)
            for low, high, sums, differences in steps:
                torch.add(low, high, out=sums)
                torch.sub(low, high, out=differences)
        return self._result


def rotate_blocks(rows: Tensor, signs: Tensor, size: int, starts: list[int]) -> None:
    """Replace blocks of columns, one after another, by H·D·x / √p: the rounds of `hadamard-1`.

    Args:
        rows: `(rows, k)`, float32, changed in place.
        signs: `(rounds, ⌈p / 32⌉)`, int32: the signs D of each round, bit c mod 32 of word ⌊c / 32⌋ for column c.
        size: p, the number of columns of a block: a power of two.
        starts: the first column of the block, for each round.
    """
    if rows.shape[0] == 0:
        return
    scale = torch.tensor(size**-0.5, dtype=torch.float32, device=rows.device)
    factors = sign_tensor(signs)[:, :size] * scale
    on_cpu = rows.device.type == "cpu"
    group_bytes = _CACHED_BYTES * torch.get_num_threads() if on_cpu else _DEVICE_BYTES
    together = max(1, group_bytes // (4 * size))
    transform = None
    for group in rows.split(together):
        if transform is None or len(group) < together:
            transform = HadamardTransform(len(group), size, rows.device)
        for start, factor in zip(starts, factors, strict=True):
            block = group[:, start : start + size]
            block.copy_(transform(block, factor))


def _steps(source: Tensor, target: Tensor, run: int, factor: int) -> tuple[list[Pair], Tensor, Tensor]:
    """List the steps of the distances run, 2·run, … below run·factor, from one buffer into the other and back.

    Returns:
        The steps, the buffer that holds the result, and the other one.
    """
    steps = []
    distance = run
    while distance < run * factor:
        given, made = source.view(-1, 2, distance), target.view(-1, 2, distance)
        steps.append((given[:, 0], given[:, 1], made[:, 0], made[:, 1]))
        source, target = target, source
        distance *= 2
    return steps, source, target
