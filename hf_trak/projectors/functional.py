"""Random projections as functions of tensors: `sjlt(x, k)`, `rademacher(x, k)` and `normal(x, k)`.

They compute `x @ R · scale` with the same maps as the projectors, for sketching anything: R is never stored, and it is
the same on every device. `sjlt_transposed(y, n)`, `rademacher_transposed(y, n)` and `normal_transposed(y, n)` compute
`y @ Rᵀ · scale`. Gradients of any order flow through all of them, forward and backward, and they work under
`torch.func.vmap`, with FakeTensors and in `torch.compile`.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_trak.kernels import ops as _ops
from hf_trak.projectors.checks import BLOCK_DTYPES, MAX_GRAD_DIM, MAX_PROJ_DIM, check_model_id, check_seed
from hf_trak.runtime.checks import checked_int


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
    return _projected(x, k, "sjlt", seed, model_id, scaled, nonzeros)


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
    return _projected(x, k, "rademacher", seed, model_id, scaled)


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
    return _projected(x, k, "normal", seed, model_id, scaled)


def sjlt_transposed(
    y: Tensor, n: int, seed: int = 0, nonzeros: int = 1, model_id: int = 0, scaled: bool = True
) -> Tensor:
    """Multiply the last dimension by the transpose of a sparse Johnson–Lindenstrauss map, from k sums to n numbers.

    `sjlt_transposed(sjlt(x, k), n)` is an unbiased estimate of x: E[R Rᵀ] · scale² = I.

    Args:
        y (`torch.Tensor` of shape `(..., k)`):
            What to multiply, float32, bfloat16 or float16, k ≤ 2²⁴.
        n (`int`):
            Number of coordinates, that of the last dimension of the `x` that `sjlt` takes, 0 ≤ n < 2⁶³.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random matrix, 0 ≤ seed < 2⁶³.
        nonzeros (`int`, *optional*, defaults to 1):
            s, the number of entries ±1 per row of R, 1 ≤ s ≤ k.
        model_id (`int`, *optional*, defaults to 0):
            A second number to draw independent matrices with, 0 ≤ model_id < 2³².
        scaled (`bool`, *optional*, defaults to `True`):
            Whether to divide by √s, as `sjlt` does.

    Returns:
        `torch.Tensor` of shape `(..., n)`: float32.

    Raises:
        TypeError: a number is not an integer, or `y` no tensor.
        ValueError: a number is outside its range, or `y` has no dimension or another dtype.
    """
    return _transposed(y, n, "sjlt", seed, model_id, scaled, nonzeros)


def rademacher_transposed(y: Tensor, n: int, seed: int = 0, model_id: int = 0, scaled: bool = True) -> Tensor:
    """Multiply the last dimension by the transpose of a dense matrix of independent ±1.

    `rademacher_transposed(rademacher(x, k), n)` is an unbiased estimate of x: E[R Rᵀ] · scale² = I.

    Args:
        y (`torch.Tensor` of shape `(..., k)`):
            What to multiply, float32, bfloat16 or float16, k ≤ 2²⁴.
        n (`int`):
            Number of coordinates, that of the last dimension of the `x` that `rademacher` takes, 0 ≤ n < 2⁶³.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random matrix, 0 ≤ seed < 2⁶³.
        model_id (`int`, *optional*, defaults to 0):
            A second number to draw independent matrices with, 0 ≤ model_id < 2³².
        scaled (`bool`, *optional*, defaults to `True`):
            Whether to divide by √k, as `rademacher` does.

    Returns:
        `torch.Tensor` of shape `(..., n)`: float32.

    Raises:
        TypeError: a number is not an integer, or `y` no tensor.
        ValueError: a number is outside its range, or `y` has no dimension or another dtype.
    """
    return _transposed(y, n, "rademacher", seed, model_id, scaled)


def normal_transposed(y: Tensor, n: int, seed: int = 0, model_id: int = 0, scaled: bool = True) -> Tensor:
    """Multiply the last dimension by the transpose of a dense matrix of independent standard normal entries.

    `normal_transposed(normal(x, k), n)` is an unbiased estimate of x: E[R Rᵀ] · scale² = I.

    Args:
        y (`torch.Tensor` of shape `(..., k)`):
            What to multiply, float32, bfloat16 or float16, k ≤ 2²⁴.
        n (`int`):
            Number of coordinates, that of the last dimension of the `x` that `normal` takes, 0 ≤ n < 2⁶³.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random matrix, 0 ≤ seed < 2⁶³.
        model_id (`int`, *optional*, defaults to 0):
            A second number to draw independent matrices with, 0 ≤ model_id < 2³².
        scaled (`bool`, *optional*, defaults to `True`):
            Whether to divide by √k, as `normal` does.

    Returns:
        `torch.Tensor` of shape `(..., n)`: float32.

    Raises:
        TypeError: a number is not an integer, or `y` no tensor.
        ValueError: a number is outside its range, or `y` has no dimension or another dtype.
    """
    return _transposed(y, n, "normal", seed, model_id, scaled)


def _projected(x: Tensor, k: int, name: str, seed: int, model_id: int, scaled: bool, nonzeros: int = 1) -> Tensor:
    """Check the arguments, and multiply by R."""
    k = checked_int(k, "k", 1, MAX_PROJ_DIM)
    nonzeros = checked_int(nonzeros, "nonzeros", 1, k)
    _check_tensor(x, "x")
    of_map = (name, check_seed(seed), check_model_id(model_id), nonzeros)
    return _multiplied(x, k, of_map, False, _scale(name, k, nonzeros) if scaled else 1.0)


def _transposed(y: Tensor, n: int, name: str, seed: int, model_id: int, scaled: bool, nonzeros: int = 1) -> Tensor:
    """Check the arguments, and multiply by Rᵀ."""
    _check_tensor(y, "y")
    k = checked_int(y.shape[-1], "y.shape[-1]", 1, MAX_PROJ_DIM)
    nonzeros = checked_int(nonzeros, "nonzeros", 1, k)
    n = checked_int(n, "n", 0, MAX_GRAD_DIM)
    of_map = (name, check_seed(seed), check_model_id(model_id), nonzeros)
    return _multiplied(y, n, of_map, True, _scale(name, k, nonzeros) if scaled else 1.0)


def _scale(name: str, k: int, nonzeros: int) -> float:
    """Compute the factor by which products keep their expectation."""
    return 1 / math.sqrt(nonzeros if name == "sjlt" else k)


def _check_tensor(tensor: Tensor, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"`{name}` is a {type(tensor).__name__}. Expected a `torch.Tensor`. Convert it with `torch.as_tensor`."
        )
    if tensor.ndim == 0 or tensor.dtype not in BLOCK_DTYPES:
        raise ValueError(
            f"`{name}` has shape {tuple(tensor.shape)} and dtype {tensor.dtype}. Expected at least one dimension, and "
            f"one of {', '.join(map(str, BLOCK_DTYPES))}. Convert it, for example with `{name}.float()`."
        )


def _multiplied(x: Tensor, size: int, of_map: tuple[str, int, int, int], transposed: bool, scale: float) -> Tensor:
    """Call the operator on rows `(B, last)`, where its output has `size` columns."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    # Inside somebody's autocast region products would silently be rounded to bf16.
    with torch.autocast(x.device.type, enabled=False) if x.device.type != "meta" else nullcontext():
        # A registered operator has no forward-mode derivative, and a compiler takes no function that has one.
        if torch.compiler.is_compiling():
            found = (_ops.project_transposed if transposed else _ops.project)(rows, size, *of_map)
        else:
            found = _Projection.apply(rows, size, *of_map, transposed)
        return (found if scale == 1 else found * scale).reshape(*x.shape[:-1], size)


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
