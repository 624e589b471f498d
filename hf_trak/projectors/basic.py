"""`BasicSingleBlockProjector` and `BasicProjector` of the seeds: names and signatures over this library's dense maps.

They give the features of [`RademacherProjector`] or [`NormalProjector`] with the same seed, model id and k. The
originals' matrices depend on the block size and on the device's generator, and collide at large k; these do not.
"""

from typing import Any

import torch
from torch import Tensor

from hf_trak.projectors.base import BlockProjector, ProjectionType
from hf_trak.projectors.checks import check_integer, check_model_id
from hf_trak.projectors.dense import NormalProjector, RademacherProjector


class _OverDenseMap(BlockProjector):
    """What the two classes of the seeds share: checked arguments, and one of the dense maps."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device,
        dtype: torch.dtype,
        model_id: int,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        if proj_type not in tuple(ProjectionType):
            raise ValueError(f"`proj_type` is '{proj_type}'. Expected 'rademacher' or 'normal'.")
        if not dtype.is_floating_point:
            raise ValueError(f"`dtype` is {dtype}. Expected a floating point type.")
        self.dtype = dtype
        self.model_id = check_model_id(model_id)
        dense = RademacherProjector if proj_type == ProjectionType.rademacher else NormalProjector
        self._map: RademacherProjector | NormalProjector = dense(
            self.grad_dim, self.proj_dim, self.seed, device=device
        )
        self.algorithm = self._map.algorithm

    @property
    def scale(self) -> float:
        """1/√k, see [`BlockProjector`]."""
        return self._map.scale

    def project(self, grads: Any, model_id: int) -> Tensor:
        """See [`BlockProjector.project`]; the result has dtype `dtype`."""
        return super().project(grads, model_id).to(self.dtype)


class BasicSingleBlockProjector(_OverDenseMap):
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
            model_id: the checkpoint whose matrix `generate_sketch_matrix` gives. `project` takes its own.

        Raises:
            TypeError, ValueError: as [`BlockProjector`]; an unknown `proj_type`, a `dtype` that is not floating.
        """
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, model_id)
        self._matrix: tuple[int, torch.device, Tensor] | None = None

    def generate_sketch_matrix(self) -> Tensor:
        """R of the constructor's `model_id`, `(P, k)`, float32, on `device`."""
        return self._map.matrix(0, self.grad_dim, self.model_id, torch.device(self.device))

    def free_memory(self) -> None:
        """Drop the matrix. Safe at any time; the next `project` generates it again."""
        self._matrix = None

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        if self._matrix is None or self._matrix[:2] != (model_id, block.device):
            self._matrix = None  # free the old one first
            matrix = self._map.matrix(0, self.grad_dim, model_id, block.device)
            self._matrix = (model_id, block.device, matrix)
        out.addmm_(block.to(torch.float32), self._matrix[2][start : start + block.shape[1]])


class BasicProjector(_OverDenseMap):
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
            block_size: columns of R in the blocks of `generate_sketch_matrix`, at least 1. R itself does not depend on
                it, and `project` works in tiles of the size that suits the device.
            grad_dim, proj_dim, seed, proj_type, device, dtype, model_id: see [`BasicSingleBlockProjector`].
        """
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, model_id)
        self.block_size = check_integer("block_size", block_size, 1, 2**63)

    def get_generator_states(self) -> list[tuple[int, int]]:
        """What `generate_sketch_matrix` takes for each block: its range of columns, `(first, last)`, since the
        generator is counter-based and has no state.
        """
        return [
            (first, min(first + self.block_size, self.proj_dim)) for first in range(0, self.proj_dim, self.block_size)
        ]

    def generate_sketch_matrix(self, generator_state: tuple[int, int]) -> Tensor:
        """Columns `first … last` of R of the constructor's `model_id`, `(P, last - first)`, float32, on `device`."""
        first, last = generator_state
        return self._map.matrix(0, self.grad_dim, self.model_id, torch.device(self.device))[:, first:last]

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        self._map.accumulate(out, block, start, model_id)
