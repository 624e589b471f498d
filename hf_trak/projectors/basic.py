"""`BasicSingleBlockProjector` and `BasicProjector` of the `trak` API, over this library's dense maps.

They give the features of [`RademacherProjector`] or [`NormalProjector`] with the same seed, model id and k. The
matrices of the original classes depend on the block size and on the device's generator, and collide at large k; these
do not.
"""

from typing import Any

import torch
from torch import Tensor

from hf_trak.projectors.base import BlockProjector, ProjectionType
from hf_trak.projectors.checks import check_model_id, check_proj_type
from hf_trak.projectors.dense import dense_projector
from hf_trak.runtime.checks import checked_int


class _OverDenseMap(BlockProjector):
    """Checked arguments and one of the dense maps, shared by the two classes below."""

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
        check_proj_type(type(self), proj_type, (ProjectionType.rademacher, ProjectionType.normal))
        if not dtype.is_floating_point:
            raise ValueError(f"`dtype` is {dtype}. Expected a floating point type, such as torch.float32.")
        self.dtype = dtype
        self.model_id = check_model_id(model_id)
        self._dense = dense_projector(proj_type, self.grad_dim, self.proj_dim, self.seed, device)
        self.algorithm = self._dense.algorithm

    @property
    def scale(self) -> float:
        """1/√k, see [`BlockProjector`]."""
        return self._dense.scale

    def project(self, grads: Any, model_id: int) -> Tensor:
        """Project whole gradients as [`BlockProjector.project`] does; the result has dtype `dtype`."""
        return super().project(grads, model_id).to(self.dtype)


class BasicSingleBlockProjector(_OverDenseMap):
    """Dense projection that keeps the whole matrix of the last model id (`trak` API).

    Needs 4 · P · k bytes; meant for tests.
    """

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
            grad_dim (`int`):
                P, length of a gradient vector, 1 ≤ P < 2⁶³.
            proj_dim (`int`):
                k, length of a projected gradient, 1 ≤ k ≤ 2²⁴.
            seed (`int`):
                Seed of the random matrix, 0 ≤ seed < 2⁶³.
            proj_type (`str` or `ProjectionType`):
                Distribution of the entries, `"rademacher"` or `"normal"`.
            device (`str` or `torch.device`):
                Device on which `project` expects gradients.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
                Dtype of what `project` returns; sums are accumulated in float32.
            model_id (`int`, *optional*, defaults to 0):
                Checkpoint whose matrix `generate_sketch_matrix` gives. `project` takes its own.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is outside its range, `proj_type` is unknown, or `dtype` is not floating point.
        """
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, model_id)
        self._matrix: tuple[int, torch.device, Tensor] | None = None

    def generate_sketch_matrix(self) -> Tensor:
        """Return R of the constructor's `model_id`, `(P, k)`, float32, on `device`."""
        return self._dense.matrix(0, self.grad_dim, self.model_id, torch.device(self.device))

    def free_memory(self) -> None:
        """Drop the matrix. Safe at any time; the next `project` generates it again."""
        self._matrix = None

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        if self._matrix is None or self._matrix[:2] != (model_id, block.device):
            self._matrix = None  # free the old one first
            matrix = self._dense.matrix(0, self.grad_dim, model_id, block.device)
            self._matrix = (model_id, block.device, matrix)
        out.addmm_(block.to(torch.float32), self._matrix[2][start : start + block.shape[1]])


class BasicProjector(_OverDenseMap):
    """Dense projection that generates the matrix in tiles and never keeps it (`trak` API)."""

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
            grad_dim (`int`):
                P, length of a gradient vector, 1 ≤ P < 2⁶³.
            proj_dim (`int`):
                k, length of a projected gradient, 1 ≤ k ≤ 2²⁴.
            seed (`int`):
                Seed of the random matrix, 0 ≤ seed < 2⁶³.
            proj_type (`str` or `ProjectionType`):
                Distribution of the entries, `"rademacher"` or `"normal"`.
            device (`str` or `torch.device`):
                Device on which `project` expects gradients.
            block_size (`int`, *optional*, defaults to 100):
                Number of columns of R in the blocks of `generate_sketch_matrix`, at least 1. R itself does not depend
                on it, and `project` works in tiles of the size that suits the device.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
                Dtype of what `project` returns; sums are accumulated in float32.
            model_id (`int`, *optional*, defaults to 0):
                Checkpoint whose matrix `generate_sketch_matrix` gives. `project` takes its own.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is outside its range, `proj_type` is unknown, or `dtype` is not floating point.
        """
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, model_id)
        self.block_size = checked_int(block_size, "block_size", 1)

    def get_generator_states(self) -> list[tuple[int, int]]:
        """Return what `generate_sketch_matrix` takes for each block: its range of columns, `(first, last)`.

        The generator is counter-based and has no other state.
        """
        return [
            (first, min(first + self.block_size, self.proj_dim)) for first in range(0, self.proj_dim, self.block_size)
        ]

    def generate_sketch_matrix(self, generator_state: tuple[int, int]) -> Tensor:
        """Return columns `first … last` of R of the constructor's `model_id`, `(P, last - first)`, float32."""
        first, last = generator_state
        return self._dense.matrix(0, self.grad_dim, self.model_id, torch.device(self.device))[:, first:last]

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        self._dense.accumulate(out, block, start, model_id)
