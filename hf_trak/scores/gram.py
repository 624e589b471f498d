"""Reproducible sums of XᵀX and XᵀP: the same bits for any number of processes and any order of shards.

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

from hf_trak.runtime.checks import check_finite_rows

_HALF_BITS = 26


def column_squares(features: Tensor, start: int = 0) -> Tensor:
    """Compute the squared norms ‖x_i‖² of the columns of a shard.

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


def power_above(squares: Tensor) -> Tensor:
    """Return the least powers of two above the square roots of numbers, in float64. Zeros give 1."""
    _, exponents = torch.frexp(squares.sqrt())
    powers = ((exponents.long() + 1023) << 52).view(torch.float64)  # 2**exponents; `torch.pow` may be off by a bit
    return torch.where(squares > 0, powers, 1.0)


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
        self.scale = power_above(largest_squares * shards)
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


class ProductSum:
    """Accumulates Σ_s X_sᵀ P_s over pieces s of rows in integers, as [`GramSum`] does with P = X.

    With a scale c_i for column i of X and d_j for column j of P, so that Σ_s ‖x_i‖² ≤ c_i² and Σ_s ‖p_j‖² ≤ d_j²,
    entries and partial sums of (X/c)ᵀ(P/d) are at most 1 in size, again by the Cauchy–Schwarz inequality. Each piece
    adds at most c_i d_j 2⁻⁵³ to the error of entry (i, j).
    """

    def __init__(self, left_scale: Tensor, right_scale: Tensor) -> None:
        """
        Args:
            left_scale: c `(k,)`, powers of two, the same in all processes. Products are computed on its device.
            right_scale: d `(r,)`, powers of two, the same in all processes.
        """
        self.left_scale = left_scale
        self.right_scale = right_scale
        shape = len(left_scale), len(right_scale)
        self.integers = torch.zeros(shape, dtype=torch.float64, device=left_scale.device)

    def add(self, left: Tensor, right: Tensor, strip: int) -> None:
        """Add X_sᵀ P_s, in strips of so many columns of X, which bound the memory.

        Args:
            left: X_s, `(rows, k)`, float64.
            right: P_s, `(rows, r)`, float64.
            strip: columns of X that are multiplied at a time.
        """
        scaled = right * (2.0**_HALF_BITS / self.right_scale)
        factors = 2.0**_HALF_BITS / self.left_scale
        for first in range(0, left.shape[1], strip):
            part = slice(first, first + strip)
            self.integers[part] += ((left[:, part] * factors[part]).T @ scaled).round_()

    def result(self) -> Tensor:
        """Scale the integers back to Σ_s X_sᵀ P_s `(k, r)`, float64. This overwrites them, so call it once."""
        unit = (self.left_scale * 2.0**-_HALF_BITS).unsqueeze(1)
        return self.integers.mul_(unit).mul_(self.right_scale * 2.0**-_HALF_BITS)
