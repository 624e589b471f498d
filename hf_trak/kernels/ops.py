"""The operators that hf_trak registers with torch, `torch.ops.hf_trak.*`.

`*_accumulate` add `block @ R` for one random map to `out`, in place; `sjlt_accumulate_outer` takes a block's factors.
`hadamard` rotates rows of features in place. On CUDA tensors they launch the kernels of `hf_trak.kernels`, on the CPU
they run the same map in torch operators, which is what the kernels are compared with. There are no gradients through
these. `project` and `project_transposed` return x R and y Rᵀ, and each is the other's derivative; both also work under
`torch.func.vmap` and `torch.compile`.

This module is the only one that registers operators. Tensors go in and out; it is the entry of
`hf_trak.projectors`, which check the arguments and call the functions here.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_trak.kernels import hadamard as hadamard_kernel
from hf_trak.kernels import torch_hadamard
from hf_trak.kernels.arguments import float32_terms, kernels_wanted
from hf_trak.kernels.dense import Distribution, accumulate_dense
from hf_trak.kernels.outer import accumulate_outer
from hf_trak.kernels.runtime import CUDA
from hf_trak.kernels.self_check import (
    checked_instruction,
    require_right_hadamard,
    require_right_outer,
    require_right_sjlt,
)
from hf_trak.kernels.sparse import accumulate_sjlt
from hf_trak.kernels.torch_dense import NormalMap, RademacherMap
from hf_trak.kernels.torch_sparse import SparseMap, segment_bounds, sum_of_outer_products


def launch_sjlt(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    """Add a block's projection by the map `sjlt-1`, on a GPU.

    A batch brings hundreds of blocks, most of them small: whoever has tensors at hand calls this function, and not the
    operator, whose way through torch's dispatcher takes the host longer than a small block takes the GPU.

    Args:
        out (`torch.Tensor` of shape `(B, k)`):
            Sums, float32, changed in place.
        block (`torch.Tensor` of shape `(B, n)`):
            Columns of the gradients, float32, bfloat16 or float16, on the device of `out`.
        start (`int`):
            Position of the first column in the gradient vector.
        seed (`int`):
            Seed of the random matrix.
        model_id (`int`):
            Id of the checkpoint.
        nonzeros (`int`):
            Number of entries ±1 in a row of R.
    """
    require_right_sjlt(CUDA, block.dtype, block.device)
    target = _rows(out)
    accumulate_sjlt(CUDA, target, _rows(block), start, seed, model_id, segment_bounds(out.shape[1], nonzeros))
    if target is not out:
        out.copy_(target)


sjlt_accumulate = torch.library.custom_op(
    "hf_trak::sjlt_accumulate", launch_sjlt, mutates_args=("out",), device_types="cuda"
)


@sjlt_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    SparseMap(start + block.shape[1], out.shape[1], seed, nonzeros).accumulate(out, block, start, model_id)


def launch_sjlt_outer(
    out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, nonzeros: int
) -> None:
    """Add the projection of Σ_t left[b, t, :] ⊗ right[b, t, :], flattened, by the map `sjlt-1`, on a GPU.

    The sum is never formed on a GPU. Its elements are float32, whatever the dtype of the factors.

    Args:
        out (`torch.Tensor` of shape `(B, k)`):
            Sums, float32, changed in place.
        left (`torch.Tensor` of shape `(B, T, I)`), right (`torch.Tensor` of shape `(B, T, J)`):
            The factors, of one dtype.
        start, seed, model_id, nonzeros (`int`):
            As in `launch_sjlt`.
    """
    require_right_outer(CUDA, left.dtype, left.shape[1], left.device)
    target = _rows(out)
    accumulate_outer(CUDA, target, left, right, start, seed, model_id, segment_bounds(out.shape[1], nonzeros))
    if target is not out:
        out.copy_(target)


sjlt_accumulate_outer = torch.library.custom_op(
    "hf_trak::sjlt_accumulate_outer", launch_sjlt_outer, mutates_args=("out",), device_types="cuda"
)


@sjlt_accumulate_outer.register_kernel("cpu")
def _(out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    block = sum_of_outer_products(left, right)
    SparseMap(start + block.shape[1], out.shape[1], seed, nonzeros).accumulate(out, block, start, model_id)


@torch.library.custom_op("hf_trak::rademacher_accumulate", mutates_args=("out",), device_types="cuda")
def rademacher_accumulate(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int) -> None:
    """Add a block's projection by the map `rademacher-1`.

    Args:
        out, block, start, seed, model_id:
            As in `launch_sjlt`.
        terms (`int`):
            Number of bfloat16 terms of a float32 gradient: 2, or 1 to round it. Without effect on a CPU.
    """
    _dense("rademacher", out, block, start, seed, model_id, terms)


@rademacher_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int) -> None:
    RademacherMap(out.shape[1], seed).accumulate(out, block, start, model_id)


@torch.library.custom_op("hf_trak::normal_accumulate", mutates_args=("out",), device_types="cuda")
def normal_accumulate(out: Tensor, block: Tensor, start: int, seed: int, model_id: int) -> None:
    """Add a block's projection by the map `normal-1`; arguments as in `launch_sjlt`."""
    _dense("normal", out, block, start, seed, model_id, 2)


@normal_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int) -> None:
    NormalMap(out.shape[1], seed).accumulate(out, block, start, model_id)


@torch.library.custom_op("hf_trak::hadamard", mutates_args=("rows",), device_types="cuda")
def hadamard(rows: Tensor, signs: Tensor, size: int, starts: list[int]) -> None:
    """Replace blocks of columns, one after another, by H·D·x / √p: the rounds of the rotation `hadamard-1`.

    The bits of the result do not depend on the device.

    Args:
        rows (`torch.Tensor` of shape `(B, k)`):
            Rows of features, float32, changed in place.
        signs (`torch.Tensor` of shape `(rounds, ⌈p / 32⌉)`):
            The signs D of every round, packed, int32: bit c mod 32 of word ⌊c / 32⌋ is that of column c, 1 for −1.
        size (`int`):
            p, the number of columns of a block, a power of two.
        starts (`list[int]`):
            First column of the block, for every round.
    """
    require_right_hadamard(CUDA, size, rows.device)
    target = _rows(rows)
    hadamard_kernel.rotate_blocks(CUDA, target, signs.contiguous(), size, starts)
    if target is not rows:
        rows.copy_(target)


@hadamard.register_kernel("cpu")
def _(rows: Tensor, signs: Tensor, size: int, starts: list[int]) -> None:
    torch_hadamard.rotate_blocks(rows, signs, size, starts)


@torch.library.custom_op("hf_trak::project", mutates_args=())
def project(x: Tensor, k: int, name: str, seed: int, model_id: int, nonzeros: int) -> Tensor:
    """Project rows by the unscaled R of a map, x R.

    Args:
        x (`torch.Tensor` of shape `(B, n)`):
            Rows, float32, bfloat16 or float16.
        k (`int`):
            Number of columns of R.
        name (`str`):
            `"sjlt"`, `"rademacher"` or `"normal"`.
        seed, model_id, nonzeros (`int`):
            As in `launch_sjlt`.

    Returns:
        `torch.Tensor` of shape `(B, k)`, float32.
    """
    out = x.new_zeros(x.shape[0], k, dtype=torch.float32)
    if not x.numel():
        return out
    if not kernels_wanted(x.device):
        _map(name, x.shape[1], k, seed, nonzeros).accumulate(out, x, 0, model_id)
    elif name == "sjlt":
        sjlt_accumulate(out, x, 0, seed, model_id, nonzeros)
    elif name == "rademacher":
        rademacher_accumulate(out, x, 0, seed, model_id, float32_terms())
    else:
        normal_accumulate(out, x, 0, seed, model_id)
    return out


@project.register_fake
def _(x: Tensor, k: int, name: str, seed: int, model_id: int, nonzeros: int) -> Tensor:
    return x.new_empty(x.shape[0], k, dtype=torch.float32)


@torch.library.custom_op("hf_trak::project_transposed", mutates_args=())
def project_transposed(y: Tensor, n: int, name: str, seed: int, model_id: int, nonzeros: int) -> Tensor:
    """Multiply rows by the transpose of the unscaled R of a map, y Rᵀ.

    Args:
        y (`torch.Tensor` of shape `(B, k)`):
            Rows, float32, bfloat16 or float16.
        n (`int`):
            Number of rows of R.
        name, seed, model_id, nonzeros:
            As in `project`.

    Returns:
        `torch.Tensor` of shape `(B, n)`, float32.
    """
    if not n or not y.numel():
        return y.new_zeros(y.shape[0], n, dtype=torch.float32)
    return _map(name, n, y.shape[1], seed, nonzeros).transposed(y.float(), 0, n, model_id)


@project_transposed.register_fake
def _(y: Tensor, n: int, name: str, seed: int, model_id: int, nonzeros: int) -> Tensor:
    return y.new_empty(y.shape[0], n, dtype=torch.float32)


def _keep_for_project(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, *ctx.map = inputs
    ctx.width, ctx.dtype = x.shape[1], x.dtype


def _derive_project(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return project_transposed(gradient, ctx.width, *ctx.map).to(ctx.dtype), None, None, None, None, None


def _derive_transposed(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return project(gradient, ctx.width, *ctx.map).to(ctx.dtype), None, None, None, None, None


def _vmapped(operator: Any) -> Any:
    """Make the vmap rule of an operator. Rows of all samples are rows of one call, since each row is mapped by
    itself."""

    def of_samples(info: Any, in_dims: tuple[int | None, ...], rows: Tensor, *rest: Any) -> tuple[Tensor, int]:
        samples = rows.movedim(in_dims[0], 0)  # type: ignore[arg-type]  # nothing else can be batched
        return operator(samples.flatten(0, 1), *rest).unflatten(0, samples.shape[:2]), 0

    return of_samples


project.register_autograd(_derive_project, setup_context=_keep_for_project)

project_transposed.register_autograd(_derive_transposed, setup_context=_keep_for_project)

project.register_vmap(_vmapped(project))

project_transposed.register_vmap(_vmapped(project_transposed))


@lru_cache(maxsize=8)
def _map(name: str, n: int, k: int, seed: int, nonzeros: int) -> SparseMap | RademacherMap | NormalMap:
    """Make a map, or take one of the last ones, with the random bits that it keeps."""
    if name == "sjlt":
        return SparseMap(n, k, seed, nonzeros)
    return RademacherMap(k, seed) if name == "rademacher" else NormalMap(k, seed)


def _dense(
    distribution: Distribution, out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int
) -> None:
    instruction = checked_instruction(CUDA, distribution, block.dtype, block.shape[0], block.device, terms)
    target = _rows(out)
    accumulate_dense(CUDA, distribution, target, _rows(block), start, seed, model_id, terms, instruction)
    if target is not out:
        out.copy_(target)


def _rows(matrix: Tensor) -> Tensor:
    """Return the matrix itself if the elements of its rows lie side by side, as kernels expect, or else a copy."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()
