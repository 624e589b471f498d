"""`CudaProjector` and `ChunkedCudaProjector` of the `trak` API, over this library's dense maps and CUDA kernels.

They give the features of [`RademacherProjector`] or [`NormalProjector`] with the same seed, model id and k. Those run
on CUDA kernels too, without limits on the size of a gradient; the classes here are for scripts that name them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trak.projectors.base import AbstractProjector, BlockProjector, ProjectionType, blocks_of
from hf_trak.projectors.checks import check_cuda, check_proj_type, require_finite, same_device
from hf_trak.projectors.dense import dense_projector
from hf_trak.runtime.checks import checked_int


class CudaProjector(BlockProjector):
    """Dense projection by CUDA kernels (`trak` API).

    Runs on GPUs of compute capability 7.5 and later, with CUDA 12 of 7.0 and later.
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device,
        max_batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            grad_dim (`int`):
                P, length of a gradient vector, 1 ≤ P < 2⁶³.
            proj_dim (`int`):
                k, length of a projected gradient, 1 ≤ k ≤ 2²⁴; it need not be a multiple of anything.
            seed (`int`):
                Seed of the random matrix, 0 ≤ seed < 2⁶³.
            proj_type (`str` or `ProjectionType`):
                Distribution of the entries, `"rademacher"` or `"normal"`.
            device (`str` or `torch.device`):
                A CUDA device. Not touched before the first batch.
            max_batch_size (`int`):
                At least 1, and without effect: the kernels take batches of any size at once. An argument of the
                `trak` API.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is outside its range, `device` is not a CUDA device, or `proj_type` is unknown.
        """
        check_cuda(type(self), device)
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        check_proj_type(type(self), proj_type, (ProjectionType.rademacher, ProjectionType.normal))
        self.max_batch_size = checked_int(max_batch_size, "max_batch_size", 1)
        self._dense = dense_projector(proj_type, self.grad_dim, self.proj_dim, self.seed, device)
        self.algorithm = self._dense.algorithm

    @property
    def scale(self) -> float:
        """1/√k, see [`BlockProjector`]."""
        return self._dense.scale

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        self._dense.accumulate(out, block, start, model_id)


class ChunkedCudaProjector:
    """Projection in chunks of parameters, each by a projector of its own, whose results are added (`trak` API).

    [`CudaProjector`] takes gradients of any size, so that chunks are needed only for projectors with limits, such as
    [`FastJlProjector`].
    """

    def __init__(
        self,
        projector_per_chunk: Sequence[AbstractProjector],
        max_chunk_size: int,
        params_per_chunk: Sequence[int],
        feat_bs: int,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            projector_per_chunk (`Sequence[AbstractProjector]`):
                One projector per chunk, all with the same k.
            max_chunk_size (`int`):
                Largest number of parameters of a chunk.
            params_per_chunk (`Sequence[int]`):
                Number of parameters of every chunk, as from `utils.get_parameter_chunk_sizes`.
            feat_bs (`int`):
                Largest batch size.
            device (`str` or `torch.device`):
                A CUDA device. Not touched before the first batch.
            dtype (`torch.dtype`):
                Dtype of the buffer that a chunk is copied into for a projector that takes no blocks.

        Raises:
            TypeError: `feat_bs` is not an integer.
            ValueError: `device` is not a CUDA device, or the chunks do not fit the projectors or the limit.
        """
        check_cuda(type(self), device)
        if len(projector_per_chunk) != len(params_per_chunk) or not params_per_chunk:
            raise ValueError(
                f"There are {len(projector_per_chunk)} projectors for {len(params_per_chunk)} chunks. Expected one "
                "projector per chunk, and at least one."
            )
        for index, (projector, size) in enumerate(zip(projector_per_chunk, params_per_chunk, strict=True)):
            if not 1 <= size <= max_chunk_size or projector.grad_dim != size:
                raise ValueError(
                    f"Chunk {index} has {size} parameters, but its projector was made for {projector.grad_dim}. "
                    f"Expected the same number, at most max_chunk_size={max_chunk_size}."
                )
        if len({projector.proj_dim for projector in projector_per_chunk}) > 1:
            raise ValueError("The projectors have different `proj_dim`. Expected one, since their results are added.")
        self.projector_per_chunk = list(projector_per_chunk)
        self.proj_dim = self.projector_per_chunk[0].proj_dim
        self.proj_type = self.projector_per_chunk[0].proj_type
        self.grad_dim = sum(params_per_chunk)
        self.max_chunk_size = max_chunk_size
        self.params_per_chunk = list(params_per_chunk)
        self.feat_bs = checked_int(feat_bs, "feat_bs", 1)
        self.device = device
        self.dtype = dtype
        self._buffer: Tensor | None = None

    def allocate_input(self) -> None:
        """Allocate the buffer `(feat_bs, max_chunk_size)` that a chunk is copied into, unless there is one."""
        self._input()

    def _input(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.zeros(self.feat_bs, self.max_chunk_size, dtype=self.dtype, device=self.device)
        return self._buffer

    def free_memory(self) -> None:
        """Drop the buffer and the caches of the projectors. The next `project` works as before."""
        self._buffer = None
        for projector in self.projector_per_chunk:
            projector.free_memory()

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project whole gradients, see [`AbstractProjector.project`]; the result is float32.

        Raises:
            ValueError: the gradients are not `(B, P)` on `device` with B ≤ `feat_bs`.
            NonFiniteError: a gradient holds NaN or infinity, or its projection overflows; names the row.
        """
        blocks = blocks_of(grads)
        batch_size, total = blocks[0].shape[0], sum(block.shape[1] for block in blocks)
        if total != self.grad_dim or batch_size > self.feat_bs or not same_device(blocks[0].device, self.device):
            raise ValueError(
                f"The gradients are {batch_size} × {total} on {blocks[0].device}. Expected at most {self.feat_bs} × "
                f"{self.grad_dim} on {self.device}."
            )
        out = torch.zeros(batch_size, self.proj_dim, dtype=torch.float32, device=blocks[0].device)
        pending = list(reversed(blocks))
        for projector, size in zip(self.projector_per_chunk, self.params_per_chunk, strict=True):
            # Take columns from the blocks until the chunk is full. A block projector gets each piece as it is; for
            # any other one, the pieces are gathered in the buffer.
            filled = 0
            while filled < size:
                block = pending.pop()
                piece = block[:, : size - filled]
                if piece.shape[1] < block.shape[1]:
                    pending.append(block[:, piece.shape[1] :])
                if isinstance(projector, BlockProjector):
                    projector.accumulate(out, piece, filled, model_id)
                else:
                    self._input()[:batch_size, filled : filled + piece.shape[1]] = piece
                filled += piece.shape[1]
            if not isinstance(projector, BlockProjector):
                out += projector.project(self._input()[:batch_size, :size].contiguous(), model_id)
        require_finite(out)
        return out
