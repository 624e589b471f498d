"""The projectors of the dense maps: independent ±1 (`rademacher`, the paper's) or standard normal (`normal`) entries.

`hf_trak/kernels/torch_dense.py` computes them in torch operators, `reference.py` defines them entry by entry.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.kernels import ops as _ops
from hf_trak.kernels.arguments import float32_terms, kernels_wanted
from hf_trak.kernels.outer import worthwhile
from hf_trak.kernels.torch_dense import DenseMap, NormalMap, RademacherMap
from hf_trak.kernels.torch_sparse import SparseMap
from hf_trak.projectors.base import BlockProjector, ProjectionSink, ProjectionType, blocks_for
from hf_trak.projectors.checks import check_block, check_model_id, check_proj_type, check_seed
from hf_trak.runtime.checks import checked_int


class _DenseProjector(BlockProjector):
    """Constructor, scale, torch operators and whole matrices, the same for both dense maps."""

    _name: ProjectionType
    _kind: type[DenseMap]

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType | None = None,
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
            proj_type (`str` or `ProjectionType`, *optional*):
                Name of the map; no other one is accepted.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Device on which [`~BlockProjector.project`] expects gradients. Not touched before the first batch.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is outside its range, or `proj_type` is another map.
        """
        check_proj_type(type(self), self._name if proj_type is None else proj_type, (self._name,))
        super().__init__(grad_dim, proj_dim, seed, self._name, device)
        self._map = self._kind(self.proj_dim, self.seed)

    @property
    def scale(self) -> float:
        """Return 1/√k: the entries of the unscaled R have variance 1."""
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
    _name, _kind = ProjectionType.rademacher, RademacherMap

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        _ops.rademacher_accumulate(out, block, start, self.seed, model_id, float32_terms())


class NormalProjector(_DenseProjector):
    """Dense random projection with independent standard normal entries, by Box and Muller's method.

    One call of the generator gives four rows of a column. The random bits are the same everywhere; the values agree
    between devices to the accuracy of their `log`, `cos` and `sin` (a few units in the last place).
    """

    algorithm = "normal-1"
    _name, _kind = ProjectionType.normal, NormalMap

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        _ops.normal_accumulate(out, block, start, self.seed, model_id)


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
        """Return 1: the identity preserves inner products."""
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
        blocks = blocks_for(self, grads)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


class SparseProjector(BlockProjector):
    """Sparse random projection (`sjlt`).

    R has s = `nonzeros` entries ±1 in every row, one in each of s segments of the outputs, and zeros elsewhere (Kane
    and Nelson, "Sparser Johnson-Lindenstrauss transforms", J. ACM 61, 2014).
    """

    algorithm = "sjlt-1"

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType = "sjlt",
        device: str | torch.device = "cpu",
        nonzeros: int = 1,
    ) -> None:
        """
        Args:
            grad_dim (`int`):
                P, length of a gradient vector, 1 ≤ P < 2⁶³.
            proj_dim (`int`):
                k, length of a projected gradient, 1 ≤ k ≤ 2²⁴.
            seed (`int`, *optional*, defaults to 0):
                Seed of the random matrix, 0 ≤ seed < 2⁶³.
            proj_type (`str`, *optional*, defaults to `"sjlt"`):
                Name of the map; no other one is accepted.
            device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
                Device on which [`~BlockProjector.project`] expects gradients. Not touched before the first batch.
            nonzeros (`int`, *optional*, defaults to 1):
                s, 1 ≤ s ≤ k. Time grows with it; larger s makes rare large errors rarer.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is outside its range, or `proj_type` is another map.
        """
        check_proj_type(type(self), proj_type, ("sjlt",))
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        self.nonzeros = checked_int(nonzeros, "nonzeros", 1, self.proj_dim)
        self._map = SparseMap(self.grad_dim, self.proj_dim, self.seed, self.nonzeros)
        self.segments = self._map.segments

    @property
    def scale(self) -> float:
        """Return 1/√s: every row of the unscaled R has norm √s."""
        return 1.0 / math.sqrt(self.nonzeros)

    def free_memory(self) -> None:
        """Drop the cached bits (one bit per coordinate and nonzero, at most 64 MiB of them)."""
        self._map.free_memory()

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> ProjectionSink:
        """Open the block form for a whole batch, see [`BlockProjector.sink`].

        With torch operators it folds the accumulators once per batch instead of once per block. A subclass that
        overrides `accumulate` gets a sink that calls it for every block.
        """
        if kernels_wanted(torch.device(device)) or self._accumulates_its_own_way(SparseProjector):
            return ProjectionSink(self, batch_size, model_id, device)
        return _SparseSink(self, self._map, batch_size, model_id, device)

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        self._map.accumulate(out, block, start, model_id)

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        _ops.launch_sjlt(out, block, start, self.seed, model_id, self.nonzeros)

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Tell whether the CUDA kernel for factors is faster here, see [`BlockProjector.takes_outer`].

        It is for sums of few outer products. A subclass that overrides `accumulate` gets blocks, never factors.
        """
        if not kernels_wanted(left.device) or self._accumulates_its_own_way(SparseProjector):
            return False
        return worthwhile(left, right, self.segments)

    def _accumulate_outer(self, out: Tensor, left: Tensor, right: Tensor, start: int, model_id: int) -> None:
        if self.takes_outer(left, right):
            _ops.launch_sjlt_outer(out, left, right, start, self.seed, model_id, self.nonzeros)
        else:
            super()._accumulate_outer(out, left, right, start, model_id)


class _SparseSink(ProjectionSink):
    """Keeps the K accumulators of every segment until all blocks have come."""

    def __init__(
        self, projector: SparseProjector, sparse: SparseMap, batch_size: int, model_id: int, device: str | torch.device
    ) -> None:
        super().__init__(projector, batch_size, model_id, device)
        self._map = sparse
        self._sums = [sparse.empty_sums(batch_size, copy, device) for copy in range(len(sparse.segments))]

    def _add(self, start: int, block: Tensor) -> None:
        for copy, sums in enumerate(self._sums):
            self._map.add_to_sums(sums, block, start, self.model_id, copy)

    def _finish(self) -> None:
        for copy, (sums, (first, last)) in enumerate(zip(self._sums, self._map.segments, strict=True)):
            self._map.fold(self._out[:, first:last], sums, self.model_id, copy)
        self._sums.clear()
