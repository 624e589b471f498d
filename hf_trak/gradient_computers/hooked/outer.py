"""Blocks of per-sample gradients in factored form, for sinks that have no need of their elements."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


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
        """Of the block."""
        return self.left.shape[0], self.left.shape[2] * self.right.shape[2]

    def joined(self, fold: int) -> "OuterBlock":
        """`(B · fold, I · J)` with every `fold` rows added up: their factors side by side."""
        size = self.left.shape[0] // fold
        return OuterBlock(
            self.left.reshape(size, -1, self.left.shape[2]), self.right.reshape(size, -1, self.right.shape[2])
        )

    def dense(self) -> Tensor:
        """The block itself."""
        return torch.bmm(self.left.transpose(1, 2), self.right).flatten(1)


@runtime_checkable
class OuterSink(Protocol):
    """A [`GradientSink`] that may take blocks in factored form, such as [`ProjectionSink`]."""

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Whether this block had better come by its factors `(B, T, I)` and `(B, T, J)`."""

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Take it; `start` is the position of its first column."""
