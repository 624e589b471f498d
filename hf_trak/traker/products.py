"""Products of feature matrices and target gradients, whole or block by block: the `trak` API's `get_matrix_mult`."""

import itertools
import os

import torch
from torch import Tensor

from hf_trak.runtime.transfers import download


def get_matrix_mult(
    features: Tensor,
    target_grads: Tensor,
    target_dtype: torch.dtype | None = None,
    batch_size: int = 8096,
    use_blockwise: bool = False,
) -> Tensor:
    """features · target_gradsᵀ, accumulated in at least float32.

    Args:
        features: `(n, k)`.
        target_grads: `(m, k)`.
        target_dtype: dtype of the result; `None` takes that of `features`.
        batch_size: rows and columns of the result per block, for blockwise products.
        use_blockwise: compute block by block even if the result fits into the memory of the device.

    Returns:
        `(n, m)`: on the device of `features`, or on the CPU where it is computed blockwise.

    Raises:
        ValueError: the shapes do not fit.
    """
    target_dtype = features.dtype if target_dtype is None else target_dtype
    if not use_blockwise and (
        features.device.type == "cpu"
        or get_output_memory(features, target_grads, target_dtype) < get_free_memory(features.device)
    ):
        return get_matrix_mult_standard(features, target_grads, target_dtype)
    return get_matrix_mult_blockwise(features, target_grads, target_dtype, batch_size)


def get_matrix_mult_blockwise(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype, bs: int) -> Tensor:
    """features · target_gradsᵀ in blocks of `bs` × `bs`, computed on the device of `features`, collected on the CPU.

    A block is computed while the ones before it are on their way to the CPU, see `hf_trak.runtime.transfers`.

    Args:
        features, target_grads, target_dtype: as in [`get_matrix_mult`], but `target_dtype` has to be given.
        bs: rows and columns of a block.

    Returns:
        `(n, m)` on the CPU.

    Raises:
        ValueError: the shapes do not fit, or `bs` is below 1.
    """
    _check_factors(features, target_grads)
    if bs < 1:
        raise ValueError(f"The block size is {bs}. Expected a number of rows ≥ 1.")
    result = torch.empty(features.shape[0], target_grads.shape[0], dtype=target_dtype)
    blocks = itertools.product(_slices(features.shape[0], bs), _slices(target_grads.shape[0], bs))
    products = (
        (get_matrix_mult_standard(features[rows], target_grads[columns], target_dtype), result[rows, columns])
        for rows, columns in blocks
    )
    download(products, features.device)
    return result


def get_matrix_mult_standard(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> Tensor:
    """features · target_gradsᵀ in one product, on the device of `features`. Args as in [`get_matrix_mult`].

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_factors(features, target_grads)
    dtype = torch.promote_types(torch.promote_types(features.dtype, target_grads.dtype), torch.float32)
    return (features.to(dtype) @ target_grads.to(device=features.device, dtype=dtype).T).to(target_dtype)


def get_output_memory(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> int:
    """Bytes of the result of features · target_gradsᵀ in `target_dtype`."""
    return features.shape[0] * target_grads.shape[0] * target_dtype.itemsize


def get_free_memory(device: torch.device | str) -> int:
    """Bytes that torch can still allocate: free memory of the GPU plus what its allocator holds unused, or free RAM.

    Raises:
        ValueError: the free memory of this kind of device is not known.
    """
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type == "cpu" and {"SC_PAGE_SIZE", "SC_AVPHYS_PAGES"} <= os.sysconf_names.keys():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    raise ValueError(
        f"The free memory of {device} is not known on this system. Expected a CUDA or MPS device, or the CPU on "
        "Linux. Choose block sizes yourself (`use_blockwise=True, batch_size=…`)."
    )


def _check_factors(features: Tensor, target_grads: Tensor) -> None:
    if features.ndim != 2 or target_grads.ndim != 2 or features.shape[1] != target_grads.shape[1]:
        raise ValueError(
            f"The factors have shapes {tuple(features.shape)} and {tuple(target_grads.shape)}. Expected (n, k) and "
            "(m, k)."
        )


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
