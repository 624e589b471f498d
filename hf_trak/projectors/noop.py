"""The identity map."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.projectors.base import BlockProjector, ProjectionType, blocks_of
from hf_trak.projectors.checks import check_block, check_model_id, check_seed
from hf_trak.runtime.checks import checked_int


class NoOpProjector(BlockProjector):
    """The identity, R = I and k = P: `project(grads)` is `grads` (`trak` API).

    For models so small that whole gradients can be kept.
    """

    algorithm = "none-1"

    def __init__(
        self,
        grad_dim: int = 0,
        proj_dim: int = 0,
        seed: int = 0,
        proj_type: str | ProjectionType = "na",
        device: str | torch.device = "cuda",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            grad_dim (`int`, *optional*, defaults to 0):
                P, length of a gradient vector; 0 takes the length that the gradients have.
            proj_dim (`int`, *optional*, defaults to 0):
                P or 0; an argument because the `trak` API has it.
            seed (`int`, *optional*, defaults to 0):
                Without effect, like the next two: arguments of the `trak` API.
            proj_type (`str` or `ProjectionType`, *optional*, defaults to `"na"`):
                Without effect.
            device (`str` or `torch.device`, *optional*, defaults to `"cuda"`):
                Without effect: gradients stay on their device.

        Raises:
            TypeError: `grad_dim`, `proj_dim` or `seed` is not an integer.
            ValueError: `proj_dim` differs from `grad_dim`, or a number is negative.
        """
        self.grad_dim = checked_int(grad_dim, "grad_dim", 0)
        self.proj_dim = checked_int(proj_dim, "proj_dim", 0) or self.grad_dim
        if self.proj_dim != self.grad_dim:
            raise ValueError(
                f"`proj_dim` is {proj_dim} and `grad_dim` {grad_dim}, but the identity keeps the dimension. "
                "Leave `proj_dim` out, or choose a projector that reduces it."
            )
        self.seed = check_seed(seed)
        self.proj_type = proj_type
        self.device = device

    @property
    def scale(self) -> float:
        """1: the identity preserves inner products."""
        return 1.0

    def accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        """Add a block as it is, `out[:, start : start + n] += block`; see [`BlockProjector.accumulate`]."""
        width = self.grad_dim or out.shape[-1]
        start = check_block(out, block, start, width, width)
        check_model_id(model_id)
        self._accumulate(out.detach(), block.detach(), start, model_id)

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        out[:, start : start + block.shape[1]] += block

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Return the gradients as they are: a tensor itself, a mapping concatenated to `(B, P)`.

        Raises:
            TypeError: `model_id` is not an integer.
            ValueError: the gradients do not have P columns.
        """
        check_model_id(model_id)
        blocks = blocks_of(grads)
        total = sum(block.shape[1] for block in blocks)
        if self.grad_dim and total != self.grad_dim:
            raise ValueError(
                f"The gradients have {total} columns, but this NoOpProjector was made for grad_dim={self.grad_dim}. "
                "Pass the gradients of exactly the parameters that were counted."
            )
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
