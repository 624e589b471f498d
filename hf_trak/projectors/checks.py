"""Checks of what users hand to projectors, with errors that say what was given and what to do."""

import operator

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError
from hf_trak.projectors.philox import MODEL_ID_LIMIT, SEED_LIMIT

MAX_PROJ_DIM = 2**24
"""Largest k: the columns of the dense normal map are numbered with 24 bits of the counter."""

BLOCK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an `int` in [low, high).

    Raises:
        TypeError: `value` is not an integer (a bool and a float with an integral value are not).
        ValueError: it is outside the range.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` is {value!r} ({type(value).__name__}). Expected an integer.")
    number = operator.index(value)
    if not low <= number < high:
        raise ValueError(f"`{name}` is {number}. Expected {low} <= {name} < {high}.")
    return number


def check_seed(seed: object) -> int:
    """`seed` as an `int` in [0, 2⁶³)."""
    return check_integer("seed", seed, 0, SEED_LIMIT)


def check_model_id(model_id: object) -> int:
    """`model_id` as an `int` in [0, 2³²)."""
    return check_integer("model_id", model_id, 0, MODEL_ID_LIMIT)


def check_grad_dim(grad_dim: object) -> int:
    """`grad_dim` as an `int` in [1, 2⁶³)."""
    return check_integer("grad_dim", grad_dim, 1, 2**63)


def check_proj_dim(proj_dim: object) -> int:
    """`proj_dim` as an `int` in [1, 2²⁴]."""
    return check_integer("proj_dim", proj_dim, 1, MAX_PROJ_DIM + 1)


def check_block(out: Tensor, block: Tensor, start: object, grad_dim: int, proj_dim: int) -> int:
    """Check the arguments of `accumulate`; returns `start` as an `int`.

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
    first = check_integer("start", start, 0, 2**63)
    if first + block.shape[1] > grad_dim:
        raise ValueError(
            f"The block covers columns {first} to {first + block.shape[1]}, which do not lie in [0, {grad_dim}), "
            "the columns of the gradient vector. Check `start`, and the `grad_dim` of the projector."
        )
    return first


def check_factors(out: Tensor, left: Tensor, right: Tensor, start: object, grad_dim: int, proj_dim: int) -> int:
    """Check the arguments of `accumulate_outer`; returns `start` as an `int`.

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
    # nothing of this shape is made: it stands for the product, with the dtype and the device of its factors
    product = left.new_empty(1).expand(left.shape[0], left.shape[2] * right.shape[2])
    return check_block(out, product, start, grad_dim, proj_dim)


def same_device(actual: torch.device, wanted: str | torch.device) -> bool:
    """Whether a tensor's device is the wanted one; `cuda` without an index means any CUDA device."""
    wanted = torch.device(wanted)
    return actual.type == wanted.type and (wanted.index is None or actual.index in (None, wanted.index))


def require_finite(features: Tensor, rows: str = "row") -> None:
    """Check projected gradients: one cheap look at `(B, k)` instead of a second pass over `(B, P)`.

    Every coordinate of a gradient enters at least one feature with a nonzero weight, and NaN or infinity stays what it
    is under additions, so a non-finite gradient always shows.

    Args:
        features: `(B, k)`.
        rows: what a row is called in the error message.

    Raises:
        NonFiniteError: naming the rows that hold NaN or infinity.
    """
    finite = torch.isfinite(features).all(dim=1)
    if not finite.all():
        bad = (~finite).nonzero().flatten().tolist()
        shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
        raise NonFiniteError(
            f"{len(bad)} of {features.shape[0]} projected gradients hold NaN or infinity ({rows} {shown}). "
            "The gradients themselves are not finite, or too large for float32. Look at the loss of these "
            "examples, or take gradients in float32 instead of float16."
        )
