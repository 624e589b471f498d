"""`CudaProjector` and `ChunkedCudaProjector` of the `trak` API, over this library's dense maps and CUDA kernels.

They give the features of [`RademacherProjector`] or [`NormalProjector`] with the same seed, model id and k. Those run
on CUDA kernels too, without limits on the size of a gradient; the classes here are for scripts that name them.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trak.projectors.base import AbstractProjector, BlockProjector, ProjectionType, blocks_for, blocks_of
from hf_trak.projectors.checks import (
    check_cuda,
    check_grad_dim,
    check_model_id,
    check_proj_dim,
    check_proj_type,
    check_seed,
    require_finite,
    same_device,
)
from hf_trak.projectors.dense import NormalProjector, RademacherProjector
from hf_trak.runtime.checks import checked_int, required


class _OverDenseMap(BlockProjector):
    """Checked arguments and one of the dense maps, shared by the classes below."""

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
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        check_proj_type(type(self), proj_type, (ProjectionType.rademacher, ProjectionType.normal))
        if not dtype.is_floating_point:
            raise ValueError(f"`dtype` is {dtype}. Expected a floating point type, such as torch.float32.")
        self.dtype = dtype
        self.model_id = check_model_id(model_id)
        kind = RademacherProjector if proj_type == ProjectionType.rademacher else NormalProjector
        self._dense = kind(self.grad_dim, self.proj_dim, self.seed, device=device)
        self.algorithm = self._dense.algorithm

    @property
    def scale(self) -> float:
        """Return 1/√k, see [`BlockProjector`]."""
        return self._dense.scale

    def project(self, grads: Any, model_id: int) -> Tensor:
        """Project whole gradients as [`BlockProjector.project`] does; the result has dtype `dtype`."""
        return super().project(grads, model_id).to(self.dtype)

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        self._dense.accumulate(out, block, start, model_id)


class CudaProjector(_OverDenseMap):
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
        self.max_batch_size = checked_int(max_batch_size, "max_batch_size", 1)


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


class BasicSingleBlockProjector(_OverDenseMap):
    """Dense projection that keeps the whole matrix of the last model id (`trak` API).

    Needs 4 · P · k bytes; meant for tests.
    """

    _matrix: tuple[int, torch.device, Tensor] | None = None

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


_BATCH_SIZES = (8, 16, 32)

_SEEDS_PER_MODEL = 10_000  # as the `trak` package calls fast_jl


class FastJlProjector(AbstractProjector):
    """Projection by the package `fast_jl` (extra `fast-jl`). Used only where it is named.

    It is not the map of the other projectors, and not even one map: its random matrix depends on the number of
    multiprocessors of the GPU, so that features made on two GPU models cannot be used together.
    """

    algorithm = "fast_jl"

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device,
        max_batch_size: int = 32,
    ) -> None:
        """
        Args:
            grad_dim (`int`):
                P, length of a gradient vector, at least 1.
            proj_dim (`int`):
                k, a multiple of 512.
            seed (`int`):
                Seed of the random matrix, at least 0.
            proj_type (`str` or `ProjectionType`):
                Distribution of the entries, `"rademacher"` or `"normal"`.
            device (`str` or `torch.device`):
                A CUDA device.
            max_batch_size (`int`, *optional*, defaults to 32):
                8, 16 or 32, whatever the GPU's shared memory allows.

        Raises:
            ModuleNotFoundError: `fast_jl` is not installed.
            TypeError: a number is not an integer.
            ValueError: an argument is not one of those described above.
        """
        super().__init__(check_grad_dim(grad_dim), check_proj_dim(proj_dim), check_seed(seed), proj_type, device)
        check_cuda(type(self), device)
        check_proj_type(type(self), proj_type, (ProjectionType.rademacher, ProjectionType.normal))
        if self.proj_dim % 512:
            raise ValueError(
                f"`proj_dim` is {proj_dim}. fast_jl takes multiples of 512: pass one, or use another projector, which "
                "takes any number."
            )
        self.max_batch_size = checked_int(max_batch_size, "max_batch_size", 1)
        if self.max_batch_size not in _BATCH_SIZES:
            raise ValueError(f"`max_batch_size` is {max_batch_size}. Expected one of {_BATCH_SIZES}.")
        message = (
            "fast_jl is not installed. It needs the CUDA toolkit to build (before 13, or with TORCH_CUDA_ARCH_LIST "
            "set for the GPU): `pip install fast-jl`. `CudaProjector` needs neither."
        )
        self._module = required("fast_jl", message)
        warnings.warn(
            "The random matrix of fast_jl depends on the GPU model: features made with it cannot be extended or "
            "compared on another one. `CudaProjector` and `RademacherProjector` have no such limit.",
            stacklevel=2,
        )

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project whole gradients, see [`AbstractProjector.project`]; a mapping is concatenated first.

        Raises:
            TypeError: `model_id` is not an integer.
            ValueError: the gradients do not have P columns, or `model_id` is out of range.
        """
        blocks = blocks_for(self, grads)
        whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        fitting = next((size for size in _BATCH_SIZES if whole.shape[0] <= size), _BATCH_SIZES[-1])
        name = f"project_{ProjectionType(self.proj_type)}_{min(fitting, self.max_batch_size)}"
        multiprocessors = torch.cuda.get_device_properties(whole.device).multi_processor_count
        seed = self.seed + _SEEDS_PER_MODEL * check_model_id(model_id)
        with torch.cuda.device(whole.device):  # fast_jl has no guard of its own
            return getattr(self._module, name)(whole.contiguous(), self.proj_dim, seed, multiprocessors)
