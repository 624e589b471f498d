"""Products of features and target gradients, in one piece or block by block: the `trak` API's `get_matrix_mult`."""

import itertools

import torch
from torch import Tensor

from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.memory import free_bytes
from hf_trak.runtime.transfers import download


def get_matrix_mult(
    features: Tensor,
    target_grads: Tensor,
    target_dtype: torch.dtype | None = None,
    batch_size: int = 8096,
    use_blockwise: bool = False,
) -> Tensor:
    """Compute features · target_gradsᵀ, with sums in at least float32.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Features of the train examples.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Projected gradients of the targets.
        target_dtype (`torch.dtype`, *optional*):
            Dtype of the result. By default that of `features`.
        batch_size (`int`, *optional*, defaults to 8096):
            Rows and columns of the result per block, where it is computed block by block.
        use_blockwise (`bool`, *optional*, defaults to `False`):
            Compute block by block even if the result fits into the memory of the device.

    Returns:
        `torch.Tensor` of shape `(n, m)`: on the device of `features`, or on the CPU where it is computed block by
        block.

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
    """Compute features · target_gradsᵀ in blocks on the device of `features`, and collect them on the CPU.

    A block is computed while the blocks before it are on their way to the CPU, see `hf_trak.runtime.transfers`.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Features of the train examples.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Projected gradients of the targets.
        target_dtype (`torch.dtype`):
            Dtype of the result.
        bs (`int`):
            Rows and columns of a block.

    Returns:
        `torch.Tensor` of shape `(n, m)`, on the CPU.

    Raises:
        TypeError: `bs` is not an integer.
        ValueError: the shapes do not fit, or `bs` is below 1.
    """
    _check_factors(features, target_grads)
    bs = checked_int(bs, "bs", 1)
    result = torch.empty(features.shape[0], target_grads.shape[0], dtype=target_dtype)
    blocks = itertools.product(_slices(features.shape[0], bs), _slices(target_grads.shape[0], bs))
    products = (
        (get_matrix_mult_standard(features[rows], target_grads[columns], target_dtype), result[rows, columns])
        for rows, columns in blocks
    )
    download(products, features.device)
    return result


def get_matrix_mult_standard(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> Tensor:
    """Compute features · target_gradsᵀ in one product on the device of `features`, with sums in at least float32.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Features of the train examples.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Projected gradients of the targets.
        target_dtype (`torch.dtype`):
            Dtype of the result.

    Returns:
        `torch.Tensor` of shape `(n, m)`.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_factors(features, target_grads)
    dtype = torch.promote_types(torch.promote_types(features.dtype, target_grads.dtype), torch.float32)
    return (features.to(dtype) @ target_grads.to(device=features.device, dtype=dtype).T).to(target_dtype)


def get_output_memory(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> int:
    """Count the bytes of features · target_gradsᵀ in `target_dtype`.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Left factor.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Right factor.
        target_dtype (`torch.dtype`):
            Dtype of the product.

    Returns:
        `int`: n · m times the size of an element.
    """
    return features.shape[0] * target_grads.shape[0] * target_dtype.itemsize


def get_free_memory(device: torch.device | str) -> int:
    """Return how many bytes torch can still allocate on a device.

    Args:
        device (`torch.device` or `str`):
            A GPU or the CPU.

    Returns:
        `int`: free memory of the GPU plus what torch's allocator holds unused, or the free memory of the system.

    Raises:
        ValueError: the free memory of this kind of device is not known.
    """
    return free_bytes(device)


def _check_factors(features: Tensor, target_grads: Tensor) -> None:
    if features.ndim != 2 or target_grads.ndim != 2 or features.shape[1] != target_grads.shape[1]:
        raise ValueError(
            f"The factors have shapes {tuple(features.shape)} and {tuple(target_grads.shape)}. Expected (n, k) and "
            "(m, k)."
        )


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
