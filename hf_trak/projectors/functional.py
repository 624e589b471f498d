"""Random projections as functions of tensors: `sjlt(x, k)`, `rademacher(x, k)` and `normal(x, k)`.

They compute `x @ R · scale` with the same maps as the projectors, for sketching anything: R is never stored, and it is
the same on every device. Gradients of any order flow through them, forward and backward, and they work under
`torch.func.vmap`, with FakeTensors and in `torch.compile`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hf_trak import _ops
from hf_trak.projectors.checks import check_model_id, check_proj_dim, check_seed
from hf_trak.runtime.checks import checked_int

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sjlt(x: Tensor, k: int, seed: int = 0, nonzeros: int = 1, model_id: int = 0, scaled: bool = True) -> Tensor:
    """Project the last dimension by a sparse Johnson–Lindenstrauss map, with a cost that does not depend on k.

    Source: Kane & Nelson, "Sparser Johnson-Lindenstrauss transforms", J. ACM 61 (2014), the block construction.

    Args:
        x (`torch.Tensor` of shape `(..., n)`):
            What to project, float32, bfloat16 or float16.
        k (`int`):
            Number of outputs, 1 ≤ k ≤ 2²⁴.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random matrix, 0 ≤ seed < 2⁶³.
        nonzeros (`int`, *optional*, defaults to 1):
            s, the number of entries ±1 per row of R, 1 ≤ s ≤ k. The variance of inner products falls with it, and time
            rises.
        model_id (`int`, *optional*, defaults to 0):
            A second number to draw independent matrices with, 0 ≤ model_id < 2³².
        scaled (`bool`, *optional*, defaults to `True`):
            Whether to divide by √s, so that inner products keep their expected value.

    Returns:
        `torch.Tensor` of shape `(..., k)`: float32.

    Raises:
        TypeError: a number is not an integer, or `x` no tensor.
        ValueError: a number is outside its range, or `x` has no dimension or another dtype.
    """
    k = check_proj_dim(k)
    nonzeros = checked_int(nonzeros, "nonzeros", 1, k)
    return _projected(x, k, "sjlt", seed, model_id, nonzeros, 1 / math.sqrt(nonzeros) if scaled else 1.0)


def rademacher(x: Tensor, k: int, seed: int = 0, model_id: int = 0, scaled: bool = True) -> Tensor:
    """Project the last dimension by a dense matrix of independent ±1.

    Source: the projection of the TRAK paper (arXiv 2303.14186, Section 3.2).

    Args:
        x (`torch.Tensor` of shape `(..., n)`):
            What to project, float32, bfloat16 or float16.
        k (`int`):
            Number of outputs, 1 ≤ k ≤ 2²⁴.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random matrix, 0 ≤ seed < 2⁶³.
        model_id (`int`, *optional*, defaults to 0):
            A second number to draw independent matrices with, 0 ≤ model_id < 2³².
        scaled (`bool`, *optional*, defaults to `True`):
            Whether to divide by √k, so that inner products keep their expected value.

    Returns:
        `torch.Tensor` of shape `(..., k)`: float32.

    Raises:
        TypeError: a number is not an integer, or `x` no tensor.
        ValueError: a number is outside its range, or `x` has no dimension or another dtype.
    """
    k = check_proj_dim(k)
    return _projected(x, k, "rademacher", seed, model_id, 1, 1 / math.sqrt(k) if scaled else 1.0)


def normal(x: Tensor, k: int, seed: int = 0, model_id: int = 0, scaled: bool = True) -> Tensor:
    """Project the last dimension by a dense matrix of independent standard normal entries.

    Args:
        x (`torch.Tensor` of shape `(..., n)`):
            What to project, float32, bfloat16 or float16.
        k (`int`):
            Number of outputs, 1 ≤ k ≤ 2²⁴.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random matrix, 0 ≤ seed < 2⁶³.
        model_id (`int`, *optional*, defaults to 0):
            A second number to draw independent matrices with, 0 ≤ model_id < 2³².
        scaled (`bool`, *optional*, defaults to `True`):
            Whether to divide by √k, so that inner products keep their expected value.

    Returns:
        `torch.Tensor` of shape `(..., k)`: float32.

    Raises:
        TypeError: a number is not an integer, or `x` no tensor.
        ValueError: a number is outside its range, or `x` has no dimension or another dtype.
    """
    k = check_proj_dim(k)
    return _projected(x, k, "normal", seed, model_id, 1, 1 / math.sqrt(k) if scaled else 1.0)


def _projected(x: Tensor, k: int, name: str, seed: int, model_id: int, nonzeros: int, scale: float) -> Tensor:
    """Check the arguments, and call the operator on rows `(B, n)`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` is a {type(x).__name__}. Expected a `torch.Tensor`. Convert it with `torch.as_tensor`.")
    if x.ndim == 0 or x.dtype not in _DTYPES:
        raise ValueError(
            f"`x` has shape {tuple(x.shape)} and dtype {x.dtype}. Expected at least one dimension, and one of "
            f"{', '.join(map(str, _DTYPES))}. Convert it, for example with `x.float()`."
        )
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty(x.shape[:-1].numel(), 0)
    settings = (name, check_seed(seed), check_model_id(model_id), nonzeros)
    # Inside somebody's autocast region products would silently be rounded to bf16.
    with torch.autocast(x.device.type, enabled=False):
        # A registered operator has no forward-mode derivative, and a compiler takes no function that has one.
        if torch.compiler.is_compiling():
            found = _ops.project(rows, k, *settings)
        else:
            found = _Projection.apply(rows, k, *settings, False)
        return (found if scale == 1 else found * scale).reshape(*x.shape[:-1], k)


class _Projection(torch.autograd.Function):
    """The operators `project` and `project_transposed` with derivatives in both modes."""

    @staticmethod
    def forward(rows: Tensor, size: int, *settings: Any) -> Tensor:
        *of_map, transposed = settings
        return (_ops.project_transposed if transposed else _ops.project)(rows, size, *of_map)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, ctx.size, *ctx.of_map, ctx.transposed = inputs
        ctx.width, ctx.dtype = rows.shape[-1], rows.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        found = _Projection.apply(gradient, ctx.width, *ctx.of_map, not ctx.transposed).to(ctx.dtype)
        return found, None, *[None] * len(ctx.of_map), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _Projection.apply(tangent, ctx.size, *ctx.of_map, ctx.transposed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], rows: Tensor, *rest: Any) -> tuple[Tensor, int]:
        # Rows of all samples are rows of one call, since each row is mapped by itself.
        assert in_dims[0] is not None  # nothing else can be batched
        samples = rows.movedim(in_dims[0], 0)
        return _Projection.apply(samples.flatten(0, 1), *rest).unflatten(0, samples.shape[:2]), 0
