"""The projector of the sparse map `sjlt`: s entries ±1 per row of R, at a cost that does not depend on k.

`hf_trak/kernels/torch_sparse.py` describes the map and computes it in torch operators, `reference.py` defines it entry
by entry.
"""

import math

import torch
from torch import Tensor

from hf_trak import _ops
from hf_trak.kernels.backend import kernels_wanted
from hf_trak.kernels.outer import worthwhile
from hf_trak.kernels.torch_sparse import SparseMap
from hf_trak.projectors.base import BlockProjector, ProjectionSink, ProjectionType
from hf_trak.projectors.checks import check_proj_type
from hf_trak.runtime.checks import checked_int


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
        """1/√s: every row of the unscaled R has norm √s."""
        return 1.0 / math.sqrt(self.nonzeros)

    def free_memory(self) -> None:
        """Drop the cached bits (one bit per coordinate and nonzero, at most 64 MiB of them)."""
        self._map.free_memory()

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> ProjectionSink:
        """Open the block form for a whole batch, see [`BlockProjector.sink`].

        With torch operators it folds the accumulators once per batch instead of once per block. A subclass that
        overrides `accumulate` gets a sink that calls it for every block.
        """
        if kernels_wanted(torch.device(device)) or self._accumulates_its_own_way():
            return ProjectionSink(self, batch_size, model_id, device)
        return _SparseSink(self, self._map, batch_size, model_id, device)

    def _accumulates_its_own_way(self) -> bool:
        """Tell whether a subclass, or whoever set an attribute of this object, replaced a method of the map."""
        methods = ((self.accumulate, BlockProjector.accumulate), (self._accumulate, SparseProjector._accumulate))
        return any(getattr(given, "__func__", None) is not own for given, own in methods)

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        self._map.accumulate(out, block, start, model_id)

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        _ops.sjlt_accumulate(out, block, start, self.seed, model_id, self.nonzeros)

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Tell whether the CUDA kernel for factors is faster here, see [`BlockProjector.takes_outer`].

        It is for sums of few outer products. A subclass that overrides `accumulate` gets blocks, never factors.
        """
        if not kernels_wanted(left.device) or self._accumulates_its_own_way():
            return False
        return worthwhile(left, right, self.segments)

    def _accumulate_outer(self, out: Tensor, left: Tensor, right: Tensor, start: int, model_id: int) -> None:
        if self.takes_outer(left, right):
            _ops.sjlt_accumulate_outer(out, left, right, start, self.seed, model_id, self.nonzeros)
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
