"""`CudaProjector` and `ChunkedCudaProjector` of the seeds: names that scripts import.

The kernels are not part of this version. The other projectors run on GPUs with torch operators.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.projectors.base import AbstractProjector, ProjectionType

_INSTEAD = (
    "The CUDA kernels are not part of this version of hf_trak. Use `SparseProjector` (fastest), `RademacherProjector` "
    "or `NormalProjector`: they run on the GPU with torch operators."
)


class CudaProjector(AbstractProjector):
    """Projection by a CUDA kernel for compute capability ≥ 7.0 (seed API)."""

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
            grad_dim: P.
            proj_dim: k.
            seed: seed of the random matrix.
            proj_type: `rademacher` or `normal`.
            device: a CUDA device.
            max_batch_size: upper limit of the batch size that the kernel takes at once: 8, 16 or 32.

        Raises:
            ValueError: `device` is not a CUDA device.
            NotImplementedError: always, in this version.
        """
        if torch.device(device).type != "cuda":
            raise ValueError(
                f"`device` is '{device}', but CudaProjector needs a CUDA device. Use `SparseProjector` or "
                "`BasicProjector`, which work on any device."
            )
        raise NotImplementedError(_INSTEAD)

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """See [`AbstractProjector.project`].

        Raises:
            NotImplementedError: always, in this version.
        """
        raise NotImplementedError(_INSTEAD)


class ChunkedCudaProjector:
    """Projection in chunks of parameters (seed API). The other projectors take gradients of any size by themselves."""

    def __init__(
        self,
        projector_per_chunk: list[Any],
        max_chunk_size: int,
        params_per_chunk: list[int],
        feat_bs: int,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            projector_per_chunk: one [`CudaProjector`] per chunk.
            max_chunk_size: upper limit of the parameters per chunk.
            params_per_chunk: number of parameters of every chunk.
            feat_bs: batch size.
            device: a CUDA device.
            dtype: dtype of the gradients.

        Raises:
            ValueError: `device` is not a CUDA device.
            NotImplementedError: always, in this version.
        """
        if torch.device(device).type != "cuda":
            raise ValueError(
                f"`device` is '{device}', but ChunkedCudaProjector needs a CUDA device. Use `SparseProjector` or "
                "`BasicProjector`, which work on any device and need no chunks."
            )
        raise NotImplementedError(_INSTEAD)

    def allocate_input(self) -> None:
        """Allocate the buffer that a chunk is copied into. Raises `NotImplementedError` in this version."""
        raise NotImplementedError(_INSTEAD)

    def free_memory(self) -> None:
        """Drop that buffer and the caches of the projectors. Raises `NotImplementedError` in this version."""
        raise NotImplementedError(_INSTEAD)

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """See [`AbstractProjector.project`]. Raises `NotImplementedError` in this version."""
        raise NotImplementedError(_INSTEAD)
