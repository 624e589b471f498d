"""Checks of the arguments of projectors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_trak.kernels.philox import MODEL_ID_LIMIT, SEED_LIMIT
from hf_trak.runtime.checks import check_finite_rows, checked_int

MAX_GRAD_DIM = 2**63 - 1
"""Largest P: positions fill 63 bits of the counter."""

MAX_PROJ_DIM = 2**24
"""Largest k: the columns of the dense normal map are numbered with 24 bits of the counter."""

BLOCK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_seed(seed: object) -> int:
    """Return `seed` as an `int` in [0, 2⁶³). Raises as [`checked_int`]."""
    return checked_int(seed, "seed", 0, SEED_LIMIT - 1)


def check_model_id(model_id: object) -> int:
    """Return `model_id` as an `int` in [0, 2³²). Raises as [`checked_int`]."""
    return checked_int(model_id, "model_id", 0, MODEL_ID_LIMIT - 1)


def check_grad_dim(grad_dim: object) -> int:
    """Return `grad_dim` as an `int` in [1, 2⁶³). Raises as [`checked_int`]."""
    return checked_int(grad_dim, "grad_dim", 1, MAX_GRAD_DIM)


def check_proj_dim(proj_dim: object) -> int:
    """Return `proj_dim` as an `int` in [1, 2²⁴]. Raises as [`checked_int`]."""
    return checked_int(proj_dim, "proj_dim", 1, MAX_PROJ_DIM)


def check_proj_type(cls: type, given: object, expected: Sequence[str]) -> None:
    """Raise `ValueError` unless `given` is one of the names of maps that a class has."""
    if given not in expected:
        raise ValueError(
            f"`proj_type` is {str(given)!r}. Expected {' or '.join(repr(str(name)) for name in expected)} for a "
            f"{cls.__name__}. Pass that name, or use the class of another map."
        )


def check_cuda(cls: type, device: str | torch.device) -> None:
    """Raise `ValueError` unless `device` is a CUDA device."""
    if torch.device(device).type != "cuda":
        raise ValueError(
            f"`device` is '{device}', but {cls.__name__} needs a CUDA device. Use `SparseProjector` or "
            "`BasicProjector`, which work on any device."
        )


def check_block(out: Tensor, block: Tensor, start: object, grad_dim: int, proj_dim: int) -> int:
    """Check the arguments of `accumulate` and return `start` as an `int`.

    Raises:
        TypeError: `start` is not an integer.
        ValueError: shapes, dtypes or devices do not fit, or the block does not lie in [0, P).
    """
    if block.ndim != 2 or out.ndim != 2:
        raise ValueError(
            f"`block` has shape {tuple(block.shape)} and `out` {tuple(out.shape)}. Expected (B, n) and (B, k)."
        )
    if out.shape != (block.shape[0], proj_dim):
        raise ValueError(
            f"`out` has shape {tuple(out.shape)}. Expected {(block.shape[0], proj_dim)}: the block's batch size and k."
        )
    if out.dtype != torch.float32:
        raise ValueError(f"`out` is {out.dtype}. Sums are accumulated in float32: pass a float32 tensor.")
    if block.dtype not in BLOCK_DTYPES:
        raise ValueError(
            f"`block` is {block.dtype}. Expected one of {', '.join(map(str, BLOCK_DTYPES))}: convert the gradients."
        )
    if block.device != out.device:
        raise ValueError(f"`block` is on {block.device} and `out` on {out.device}. Expected one device.")
    first = checked_int(start, "start", 0, MAX_GRAD_DIM)
    if first + block.shape[1] > grad_dim:
        raise ValueError(
            f"The block covers columns {first} to {first + block.shape[1]}, which do not lie in [0, {grad_dim}), "
            "the columns of the gradient vector. Check `start`, and the `grad_dim` of the projector."
        )
    return first


def check_factors(out: Tensor, left: Tensor, right: Tensor, start: object, grad_dim: int, proj_dim: int) -> int:
    """Check the arguments of `accumulate_outer` and return `start` as an `int`.

    Raises:
        TypeError: `start` is not an integer.
        ValueError: shapes, dtypes or devices do not fit, or the matrix does not lie in [0, P).
    """
    if left.ndim != 3 or right.ndim != 3 or left.shape[:2] != right.shape[:2]:
        raise ValueError(
            f"`left` has shape {tuple(left.shape)} and `right` {tuple(right.shape)}. Expected (B, T, I) and (B, T, J)."
        )
    if left.dtype != right.dtype or left.device != right.device:
        raise ValueError(
            f"`left` is {left.dtype} on {left.device} and `right` {right.dtype} on {right.device}. Expected one dtype "
            "and one device."
        )
    # An expanded view stands for the product, with the dtype and the device of its factors; no memory is taken for it.
    product = left.new_empty(1).expand(left.shape[0], left.shape[2] * right.shape[2])
    return check_block(out, product, start, grad_dim, proj_dim)


def same_device(actual: torch.device, wanted: str | torch.device) -> bool:
    """Tell whether a tensor's device is the wanted one; `cuda` without an index means any CUDA device."""
    wanted = torch.device(wanted)
    return actual.type == wanted.type and (wanted.index is None or actual.index in (None, wanted.index))


def require_finite(features: Tensor) -> None:
    """Check projected gradients: one cheap look at `(B, k)` instead of a second pass over `(B, P)`.

    Every coordinate of a gradient enters at least one feature with a nonzero weight, and NaN or infinity stays what it
    is under additions, so a non-finite gradient always shows.

    Args:
        features (`torch.Tensor` of shape `(B, k)`):
            Projected gradients.

    Raises:
        NonFiniteError: a feature is NaN or infinite; names the first such row.
    """
    check_finite_rows(
        features,
        "projected gradient",
        remedy="The gradient itself is not finite, or too large for float32: look at the loss of this example, or "
        "take gradients in float32 instead of float16.",
    )
