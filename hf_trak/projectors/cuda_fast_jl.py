"""The kernels of the package `fast_jl`, for comparison with features that other tools made with it."""

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.projectors.base import AbstractProjector, ProjectionType, blocks_of
from hf_trak.projectors.checks import (
    check_cuda,
    check_grad_dim,
    check_model_id,
    check_proj_dim,
    check_proj_type,
    check_seed,
)
from hf_trak.runtime.checks import checked_int

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
        self._module = _fast_jl()
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
        blocks = blocks_of(grads)
        whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        if whole.shape[1] != self.grad_dim:
            raise ValueError(f"The gradients have {whole.shape[1]} columns. Expected grad_dim={self.grad_dim}.")
        fitting = next((size for size in _BATCH_SIZES if whole.shape[0] <= size), _BATCH_SIZES[-1])
        name = f"project_{ProjectionType(self.proj_type)}_{min(fitting, self.max_batch_size)}"
        multiprocessors = torch.cuda.get_device_properties(whole.device).multi_processor_count
        seed = self.seed + _SEEDS_PER_MODEL * check_model_id(model_id)
        with torch.cuda.device(whole.device):  # fast_jl has no guard of its own
            return getattr(self._module, name)(whole.contiguous(), self.proj_dim, seed, multiprocessors)


def _fast_jl() -> Any:
    try:
        return importlib.import_module("fast_jl")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "fast_jl is not installed. It needs the CUDA toolkit to build (before 13, or with TORCH_CUDA_ARCH_LIST "
            "set for the GPU): `pip install 'hf_trak[fast-jl]'`. `CudaProjector` needs neither.",
            name="fast_jl",
        ) from error
