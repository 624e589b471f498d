"""The blocks of a curvature: which part of the gradient vector is described by two small bases, and which by numbers.

The curvature is block-diagonal. A [`KroneckerBlock`] holds the weight of a linear map, with its bias where it has one:
its gradient is a matrix G = Σ_t left_t right_tᵀ over the positions t of a sample, and the curvature is diagonal in
the basis Q_left ⊗ Q_right (George et al. 2018, arXiv 1806.03884). Everything without such a structure (norms,
embeddings, lone biases, depthwise convolutions) is in a [`DiagonalBlock`].
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from hf_trak.store.sealed import content_digest

Part = Literal["left", "right"]


@dataclass(frozen=True)
class KroneckerBlock:
    """A matrix of parameters whose curvature has a Kronecker basis.

    Element (i, j) of the matrix is at position `start + i · stride + j` of the gradient vector. A bias is the last
    column of the matrix (`bias_part="right"`) or its last row (`"left"`): the weight of an input that is always 1.

    Attributes:
        name (`str`): name of the parameter, for messages; parts of one parameter share it.
        start (`int`): position of the first element.
        left (`int`): number of rows, without a bias.
        right (`int`): number of columns, without a bias.
        stride (`int`): distance of two rows in the gradient vector.
        bias (`int`, *optional*): position of the bias' first element.
        bias_part (`"left"` or `"right"`): the side of the inputs.
        source (`int`, *optional*): start of the factors that the gradient arrives in; `None` if it arrives as a dense
            block.
        source_left (`int`): first column of the left factor that belongs to this block.
        source_right (`int`): first column of the right factor.
    """

    name: str
    start: int
    left: int
    right: int
    stride: int
    bias: int | None = None
    bias_part: Part = "right"
    source: int | None = None
    source_left: int = 0
    source_right: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the matrix with the bias."""
        joined = self.bias is not None
        return self.left + (joined and self.bias_part == "left"), self.right + (joined and self.bias_part == "right")

    @property
    def numel(self) -> int:
        """Return the number of parameters."""
        return self.left * self.right + (0 if self.bias is None else self.bias_length)

    @property
    def bias_length(self) -> int:
        """Return the number of elements of the bias."""
        return self.left if self.bias_part == "right" else self.right

    def factors(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Cut this block's part out of the factors of its parameter, and append the input that is always 1.

        Args:
            left: `(B, T, rows of the parameter)`.
            right: `(B, T, columns of the parameter)`.

        Returns:
            `(B, T, shape[0])` and `(B, T, shape[1])`, float32.
        """
        left = left[..., self.source_left : self.source_left + self.left].float()
        right = right[..., self.source_right : self.source_right + self.right].float()
        if self.bias is None:
            return left, right
        if self.bias_part == "left":
            return torch.cat([left, left.new_ones(*left.shape[:2], 1)], 2), right
        return left, torch.cat([right, right.new_ones(*right.shape[:2], 1)], 2)

    def matrix(self, gradients: Tensor) -> Tensor:
        """Take the matrices of this block out of whole gradients `(B, P)`: `(B, *shape)`."""
        size = gradients.shape[0]
        matrix = self._view(gradients)
        if self.bias is None:
            return matrix
        bias = gradients[:, self.bias : self.bias + self.bias_length]
        if self.bias_part == "left":
            return torch.cat([matrix, bias.view(size, 1, -1)], 1)
        return torch.cat([matrix, bias.view(size, -1, 1)], 2)

    def put(self, matrix: Tensor, out: Tensor) -> None:
        """Write matrices `(B, *shape)` to their places in whole gradients `(B, P)`."""
        self._view(out).copy_(matrix[:, : self.left, : self.right])
        if self.bias is not None:
            out[:, self.bias : self.bias + self.bias_length] = self.bias_of(matrix)

    def add(self, matrix: Tensor, out: Tensor) -> None:
        """Add matrices `(B, *shape)` at their places in whole gradients `(B, P)`."""
        self._view(out).add_(matrix[:, : self.left, : self.right])
        if self.bias is not None:
            out[:, self.bias : self.bias + self.bias_length] += self.bias_of(matrix)

    def bias_of(self, matrix: Tensor) -> Tensor:
        """View the bias in matrices `(B, *shape)` of a block that has one: `(B, bias_length)`."""
        return matrix[:, -1, : self.right] if self.bias_part == "left" else matrix[:, : self.left, -1]

    def _view(self, whole: Tensor) -> Tensor:
        """View `(B, left, right)` of the weight's places in `(B, P)`."""
        size = (whole.shape[0], self.left, self.right)
        step = (whole.stride(0), self.stride * whole.stride(1), whole.stride(1))
        return whole.as_strided(size, step, whole.storage_offset() + self.start * whole.stride(1))


@dataclass(frozen=True)
class DiagonalBlock:
    """Parameters whose curvature is one number each.

    Attributes:
        name (`str`): name of the parameter.
        start (`int`): position of the first element in the gradient vector.
        numel (`int`): number of parameters.
    """

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class CurvatureBlocks:
    """All blocks of a curvature. Every attributed parameter is in exactly one of them.

    Attributes:
        kronecker (`tuple[KroneckerBlock, ...]`): in the order of their first element.
        diagonal (`tuple[DiagonalBlock, ...]`): likewise.
        repeated (`frozenset[int]`): starts of factors that arrive more than once in a batch (shared layers).
        without_gradient (`tuple[str, ...]`): parameters that had no gradient in any row of the sample.
    """

    kronecker: tuple[KroneckerBlock, ...]
    diagonal: tuple[DiagonalBlock, ...]
    repeated: frozenset[int] = frozenset()
    without_gradient: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Describe the blocks as plain JSON."""
        return {**asdict(self), "repeated": sorted(self.repeated)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "CurvatureBlocks":
        """Read what [`~CurvatureBlocks.to_json`] gave."""
        return cls(
            tuple(KroneckerBlock(**block) for block in content["kronecker"]),
            tuple(DiagonalBlock(**block) for block in content["diagonal"]),
            frozenset(content["repeated"]),
            tuple(content["without_gradient"]),
        )

    @cached_property
    def digest(self) -> str:
        """Return the identity of the division, 32 hex digits."""
        return content_digest(self.to_json())

    @property
    def numel(self) -> int:
        """Return the number of parameters in all blocks."""
        return sum(block.numel for block in self.kronecker) + sum(block.numel for block in self.diagonal)
