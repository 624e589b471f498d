"""Blocks of per-sample gradients that are passed on as two factors, to sinks that need no single element of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

TakesOuter = Callable[[Tensor, Tensor], bool]
"""Predicate on two factors `(B, T, I)` and `(B, T, J)`: pass this gradient on as factors instead of a dense block?"""


def every_factor(left: Tensor, right: Tensor) -> bool:
    """The predicate of sinks that need factors wherever a gradient has them, at any price.

    Given as `takes_outer`, it makes convolutions unfold their inputs, too. Only convolutions that see one channel each
    still form their gradients: their factors say nothing.
    """
    return True


@dataclass(frozen=True)
class OuterBlock:
    """The block `(B, I · J)` of Σ_t left[b, t, i] · right[b, t, j], flattened over (i, j).

    Attributes:
        left: `(B, T, I)`.
        right: `(B, T, J)`.
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the dense block, `(B, I · J)`."""
        return self.left.shape[0], self.left.shape[2] * self.right.shape[2]

    def joined(self, fold: int) -> "OuterBlock":
        """Add up every `fold` rows of a `(B · fold, I · J)` block: their factors are put side by side."""
        size = self.left.shape[0] // fold
        return OuterBlock(
            self.left.reshape(size, -1, self.left.shape[2]), self.right.reshape(size, -1, self.right.shape[2])
        )

    def dense(self) -> Tensor:
        """Form the block, `(B, I · J)`."""
        return torch.bmm(self.left.transpose(1, 2), self.right).flatten(1)


@runtime_checkable
class OuterSink(Protocol):
    """A [`GradientSink`] that can take blocks as two factors, such as [`ProjectionSink`]."""

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Tell whether to pass on the factors `(B, T, I)` and `(B, T, J)` of a block rather than the block."""

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Take a block by its factors; `start` is the position of its first column."""
