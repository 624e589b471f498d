"""`BasicSingleBlockProjector` and `BasicProjector` of the seeds: names and signatures over this library's dense maps.

They give the features of [`RademacherProjector`] or [`NormalProjector`] with the same seed, model id and k. The
originals' matrices depend on the block size and on the device's generator, and collide at large k; these do not.
"""

from typing import Any

import torch
from torch import Tensor

from hf_trak.projectors.base import BlockProjector, ProjectionType
from hf_trak.projectors.checks import check_integer
from hf_trak.projectors.dense import NormalProjector, RademacherProjector


class BasicSingleBlockProjector(BlockProjector):
    """Keeps the whole matrix of the last model id and multiplies by it. Needs 4 · P · k bytes; meant for tests."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            grad_dim, proj_dim, seed, device: see [`BlockProjector`].
            proj_type: `rademacher` or `normal`.
            dtype: dtype of what `project` returns; sums are accumulated in float32.
            model_id: without effect: the argument of `project` counts.

        Raises:
            TypeError, ValueError: as [`BlockProjector`]; an unknown `proj_type`, a `dtype` that is not floating.
        """
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        if proj_type not in tuple(ProjectionType):
            raise ValueError(f"`proj_type` is '{proj_type}'. Expected 'rademacher' or 'normal'.")
        if not dtype.is_floating_point:
            raise ValueError(f"`dtype` is {dtype}. Expected a floating point type.")
        self.dtype = dtype
        dense = RademacherProjector if proj_type == ProjectionType.rademacher else NormalProjector
        self._map: RademacherProjector | NormalProjector = dense(
            self.grad_dim, self.proj_dim, self.seed, device=device
        )
        self.algorithm = self._map.algorithm
        self._matrix: tuple[int, torch.device, Tensor] | None = None

    @property
    def scale(self) -> float:
        """1/√k, see [`BlockProjector`]."""
        return self._map.scale

    def free_memory(self) -> None:
        """Drop the matrix. Safe at any time; the next `project` generates it again."""
        self._matrix = None

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        if self._matrix is None or self._matrix[:2] != (model_id, block.device):
            self._matrix = None  # free the old one first
            matrix = self._map.matrix(0, self.grad_dim, model_id, block.device)
            self._matrix = (model_id, block.device, matrix)
        out.addmm_(block.to(torch.float32), self._matrix[2][start : start + block.shape[1]])

    def project(self, grads: Any, model_id: int) -> Tensor:
        """See [`BlockProjector.project`]; the result has dtype `dtype`."""
        return super().project(grads, model_id).to(self.dtype)


class BasicProjector(BlockProjector):
    """Generates the matrix in tiles and never keeps it."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device,
        block_size: int = 100,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            block_size: how many columns the original generates at a time, at least 1. Without effect here: tiles have
                the size that suits the device, and R does not depend on it.
            grad_dim, proj_dim, seed, proj_type, device, dtype, model_id: see [`BasicSingleBlockProjector`].
        """
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        if proj_type not in tuple(ProjectionType):
            raise ValueError(f"`proj_type` is '{proj_type}'. Expected 'rademacher' or 'normal'.")
        if not dtype.is_floating_point:
            raise ValueError(f"`dtype` is {dtype}. Expected a floating point type.")
        self.block_size = check_integer("block_size", block_size, 1, 2**63)
        self.dtype = dtype
        dense = RademacherProjector if proj_type == ProjectionType.rademacher else NormalProjector
        self._map: RademacherProjector | NormalProjector = dense(
            self.grad_dim, self.proj_dim, self.seed, device=device
        )
        self.algorithm = self._map.algorithm

    @property
    def scale(self) -> float:
        """1/√k, see [`BlockProjector`]."""
        return self._map.scale

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        self._map.accumulate(out, block, start, model_id)

    def project(self, grads: Any, model_id: int) -> Tensor:
        """See [`BlockProjector.project`]; the result has dtype `dtype`."""
        return super().project(grads, model_id).to(self.dtype)
