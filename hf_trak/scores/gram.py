"""XᵀX with the same bits for any number of processes and any order of shards.

Floating-point addition depends on its order, integer addition does not. So every shard's XᵀX is scaled by powers of
two until it fits, rounded to integers, and those are added: float64 holds integers up to 2⁵³ exactly. With c_i a
power of two above √(Σ_s ‖x_i‖²), the Cauchy–Schwarz inequality bounds every entry, and every partial sum, of
(X/c)ᵀ(X/c) by 1; times 2⁵² it stays below 2⁵³. Each shard is rounded by at most c_i c_j 2⁻⁵³, about what adding in
float64 rounds. (This is the pre-rounding of Demmel & Nguyen, Fast Reproducible Floating-Point Summation, ARITH 2013,
with one fold.)
"""

import torch
from torch import Tensor

from hf_trak.scores.ridge import check_finite_rows

_HALF_BITS = 26


def column_squares(features: Tensor, start: int = 0) -> Tensor:
    """‖x_i‖² of every column of a shard `(rows, k)`. Shape `(k,)`, float64.

    Raises:
        NonFiniteError: a row is not finite; names it.
    """
    check_finite_rows(features, "feature vector", start)
    return features.to(torch.float64).square().sum(dim=0)


class GramSum:
    """The sum of XᵀX over shards. Sums of different processes may be added to each other, in any order."""

    def __init__(self, largest_squares: Tensor, shards: int) -> None:
        """
        Args:
            largest_squares: for each column the largest [`column_squares`] of any shard `(k,)`, the same in all
                processes. Its device is the one that products are computed on.
            shards: number of all shards.
        """
        _, exponents = torch.frexp((largest_squares * shards).sqrt())
        powers = ((exponents.long() + 1023) << 52).view(torch.float64)  # 2**exponents; `torch.pow` may be off by a bit
        self.scale = torch.where(largest_squares > 0, powers, 1.0)
        k = largest_squares.shape[0]
        self.integers = torch.zeros(k, k, dtype=torch.float64, device=largest_squares.device)
        self._product = torch.empty_like(self.integers)

    def add(self, features: Tensor) -> None:
        """Take in a shard `(rows, k)`."""
        wide = features.to(device=self.scale.device, dtype=torch.float64) * (2.0**_HALF_BITS / self.scale)
        torch.mm(wide.T, wide, out=self._product)
        self.integers += self._product.round_()

    def result(self) -> Tensor:
        """XᵀX `(k, k)`, float64. Call it once, last."""
        unit = self.scale * 2.0**-_HALF_BITS
        return self.integers.mul_(unit.unsqueeze(1)).mul_(unit)
