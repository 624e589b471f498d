"""Reproducible sums of XᵀX: the same bits for any number of processes and any order of shards.

The result of a floating-point sum depends on the order of its terms; the result of an integer sum does not. So the
XᵀX of every shard is scaled by powers of two and rounded to integers, which are then added. float64 holds integers up
to 2⁵³ exactly.

Scale: let c_i be a power of two above √(S · max_s ‖x_i‖²), where x_i is column i, s runs over the S shards, and the
norm is that of the column within a shard. Then Σ_s ‖x_i‖² ≤ c_i², and by the Cauchy–Schwarz inequality every entry,
and every partial sum, of (X/c)ᵀ(X/c) is at most 1 in size; multiplied by 2⁵² it stays below 2⁵³.

Error: every shard adds at most c_i c_j 2⁻⁵³ to the error of entry (i, j), about as much as a float64 addition does.
This is the pre-rounding of Demmel & Nguyen, Fast Reproducible Floating-Point Summation, ARITH 2013, with one fold.
"""

import torch
from torch import Tensor

from hf_trak.runtime.finite import check_finite_rows

_HALF_BITS = 26


def column_squares(features: Tensor, start: int = 0) -> Tensor:
    """Squared norms ‖x_i‖² of the columns of a shard.

    Args:
        features: the shard, `(rows, k)`.
        start: index of its first row, for the error message.

    Returns:
        `(k,)`, float64.

    Raises:
        NonFiniteError: a row is not finite; names it.
    """
    check_finite_rows(features, "feature vector", start)
    return features.to(torch.float64).square().sum(dim=0)


class GramSum:
    """Accumulates XᵀX over shards in integers.

    The `integers` of several processes with the same `scale` may be added in any order.
    """

    def __init__(self, largest_squares: Tensor, shards: int) -> None:
        """
        Args:
            largest_squares: maximum over all shards of [`column_squares`], `(k,)`, the same in all processes. Products
                are computed on its device.
            shards: number of shards in all processes together.
        """
        _, exponents = torch.frexp((largest_squares * shards).sqrt())
        powers = ((exponents.long() + 1023) << 52).view(torch.float64)  # 2**exponents; `torch.pow` may be off by a bit
        self.scale = torch.where(largest_squares > 0, powers, 1.0)
        k = largest_squares.shape[0]
        self.integers = torch.zeros(k, k, dtype=torch.float64, device=largest_squares.device)
        self._product = torch.empty_like(self.integers)

    def add(self, features: Tensor) -> None:
        """Add XᵀX of a shard `(rows, k)`."""
        wide = features.to(device=self.scale.device, dtype=torch.float64) * (2.0**_HALF_BITS / self.scale)
        torch.mm(wide.T, wide, out=self._product)
        self.integers += self._product.round_()

    def result(self) -> Tensor:
        """Scale the integers back to XᵀX `(k, k)`, float64. This overwrites them, so call it once, at the end."""
        unit = self.scale * 2.0**-_HALF_BITS
        return self.integers.mul_(unit.unsqueeze(1)).mul_(unit)
