"""The projectors of the dense maps: independent ±1 (`rademacher`, the paper's) or standard normal (`normal`) entries.

`hf_trak/kernels/torch_dense.py` computes them in torch operators, `reference.py` defines them entry by entry.
"""

import math

import torch
from torch import Tensor

from hf_trak import _ops
from hf_trak.kernels.backend import float32_terms
from hf_trak.kernels.torch_dense import DenseMap, NormalMap, RademacherMap
from hf_trak.projectors.base import BlockProjector, ProjectionType
from hf_trak.projectors.checks import check_model_id, check_proj_type
from hf_trak.runtime.checks import checked_int


class _DenseProjector(BlockProjector):
    """Scale, torch operators and whole matrices, the same for both dense maps."""

    _map: DenseMap

    @property
    def scale(self) -> float:
        """1/√k: the entries of the unscaled R have variance 1."""
        return 1.0 / math.sqrt(self.proj_dim)

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        self._map.accumulate(out, block, start, model_id)

    def matrix(self, start: int, n: int, model_id: int, device: str | torch.device = "cpu") -> Tensor:
        """Generate rows of the unscaled R, for tests and for matrices that fit in memory.

        Args:
            start (`int`):
                First row, 0 ≤ start < P.
            n (`int`):
                Number of rows, 0 ≤ n ≤ P − start.
            model_id (`int`):
                Id of the checkpoint, 0 ≤ model_id < 2³².
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Device of the result.

        Returns:
            `torch.Tensor` of shape `(n, k)`, float32.

        Raises:
            TypeError: a number is not an integer.
            ValueError: the rows do not lie in [0, P).
        """
        start = checked_int(start, "start", 0, self.grad_dim - 1)
        n = checked_int(n, "n", 0, self.grad_dim - start)
        return self._map.matrix(start, n, check_model_id(model_id), device)


class RademacherProjector(_DenseProjector):
    """Dense random projection with entries ±1 (TRAK paper, arXiv 2303.14186, Section 3.2).

    R[i, j] is bit j mod 128 of the generator's output at row i and column block ⌊j / 128⌋; the bits are independent.
    All 128 bits of a call are used. The matrix for a smaller k is a prefix of the one for a larger k.
    """

    algorithm = "rademacher-1"

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType = ProjectionType.rademacher,
        device: str | torch.device = "cpu",
    ) -> None:
        """
        Args:
            grad_dim (`int`):
                P, length of a gradient vector, 1 ≤ P < 2⁶³.
            proj_dim (`int`):
                k, length of a projected gradient, 1 ≤ k ≤ 2²⁴.
            seed (`int`, *optional*, defaults to 0):
                Seed of the random matrix, 0 ≤ seed < 2⁶³.
            proj_type (`str` or `ProjectionType`, *optional*, defaults to `"rademacher"`):
                Name of the map; no other one is accepted.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Device on which [`~BlockProjector.project`] expects gradients. Not touched before the first batch.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is outside its range, or `proj_type` is another map.
        """
        check_proj_type(type(self), proj_type, (ProjectionType.rademacher,))
        super().__init__(grad_dim, proj_dim, seed, ProjectionType.rademacher, device)
        self._map = RademacherMap(self.proj_dim, self.seed)

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        _ops.rademacher_accumulate(out, block, start, self.seed, model_id, float32_terms())


class NormalProjector(_DenseProjector):
    """Dense random projection with independent standard normal entries, by Box and Muller's method.

    One call of the generator gives four rows of a column. The random bits are the same everywhere; the values agree
    between devices to the accuracy of their `log`, `cos` and `sin` (a few units in the last place).
    """

    algorithm = "normal-1"

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType = ProjectionType.normal,
        device: str | torch.device = "cpu",
    ) -> None:
        """
        Args:
            grad_dim (`int`):
                P, length of a gradient vector, 1 ≤ P < 2⁶³.
            proj_dim (`int`):
                k, length of a projected gradient, 1 ≤ k ≤ 2²⁴.
            seed (`int`, *optional*, defaults to 0):
                Seed of the random matrix, 0 ≤ seed < 2⁶³.
            proj_type (`str` or `ProjectionType`, *optional*, defaults to `"normal"`):
                Name of the map; no other one is accepted.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Device on which [`~BlockProjector.project`] expects gradients. Not touched before the first batch.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is outside its range, or `proj_type` is another map.
        """
        check_proj_type(type(self), proj_type, (ProjectionType.normal,))
        super().__init__(grad_dim, proj_dim, seed, ProjectionType.normal, device)
        self._map = NormalMap(self.proj_dim, self.seed)

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        _ops.normal_accumulate(out, block, start, self.seed, model_id)


Dense = RademacherProjector | NormalProjector


def dense_projector(
    proj_type: str | ProjectionType, grad_dim: int, proj_dim: int, seed: int, device: str | torch.device
) -> Dense:
    """Build the projector of a dense map by its name, `rademacher` or `normal`, for classes that wrap one."""
    kind = RademacherProjector if proj_type == ProjectionType.rademacher else NormalProjector
    return kind(grad_dim, proj_dim, seed, device=device)
