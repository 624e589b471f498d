"""The operators that hf_trak registers with torch: `torch.ops.hf_trak.*_accumulate` and `torch.ops.hf_trak.hadamard`.

The first add `block @ R` for one random map to `out`, in place; `sjlt_accumulate_outer` takes the block as factors.
The last rotates rows of features in place. On CUDA tensors they launch the kernels of `hf_trak.kernels`, on the CPU
they run the same map in torch operators, which is what the kernels are compared with.

This module is the only one that registers operators. It stands above `hf_trak.kernels` and below `hf_trak.codes` and
`hf_trak.projectors`, which check the arguments and call the functions here. There are no gradients through them.
"""

import torch
from torch import Tensor

from hf_trak.kernels import hadamard as hadamard_kernel
from hf_trak.kernels import torch_hadamard
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


@torch.library.custom_op("hf_trak::sjlt_accumulate", mutates_args=("out",), device_types="cuda")
def sjlt_accumulate(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    """Add a block's projection by the map `sjlt-1`.

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


@sjlt_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    SparseMap(start + block.shape[1], out.shape[1], seed, nonzeros).accumulate(out, block, start, model_id)


@sjlt_accumulate.register_fake
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    return None


@torch.library.custom_op("hf_trak::sjlt_accumulate_outer", mutates_args=("out",), device_types="cuda")
def sjlt_accumulate_outer(
    out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, nonzeros: int
) -> None:
    """Add the projection of Σ_t left[b, t, :] ⊗ right[b, t, :], flattened, by the map `sjlt-1`.

    The sum is never formed on a GPU. Its elements are float32, whatever the dtype of the factors.

    Args:
        out (`torch.Tensor` of shape `(B, k)`):
            Sums, float32, changed in place.
        left (`torch.Tensor` of shape `(B, T, I)`), right (`torch.Tensor` of shape `(B, T, J)`):
            The factors, of one dtype.
        start, seed, model_id, nonzeros (`int`):
            As in `sjlt_accumulate`.
    """
    require_right_outer(CUDA, left.dtype, left.shape[1], left.device)
    target = _rows(out)
    accumulate_outer(CUDA, target, left, right, start, seed, model_id, segment_bounds(out.shape[1], nonzeros))
    if target is not out:
        out.copy_(target)


@sjlt_accumulate_outer.register_kernel("cpu")
def _(out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    block = sum_of_outer_products(left, right)
    SparseMap(start + block.shape[1], out.shape[1], seed, nonzeros).accumulate(out, block, start, model_id)


@sjlt_accumulate_outer.register_fake
def _(out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    return None


@torch.library.custom_op("hf_trak::rademacher_accumulate", mutates_args=("out",), device_types="cuda")
def rademacher_accumulate(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int) -> None:
    """Add a block's projection by the map `rademacher-1`.

    Args:
        out, block, start, seed, model_id:
            As in `sjlt_accumulate`.
        terms (`int`):
            Number of bfloat16 terms of a float32 gradient: 2, or 1 to round it. Without effect on a CPU.
    """
    _dense("rademacher", out, block, start, seed, model_id, terms)


@rademacher_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int) -> None:
    RademacherMap(out.shape[1], seed).accumulate(out, block, start, model_id)


@rademacher_accumulate.register_fake
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int) -> None:
    return None


@torch.library.custom_op("hf_trak::normal_accumulate", mutates_args=("out",), device_types="cuda")
def normal_accumulate(out: Tensor, block: Tensor, start: int, seed: int, model_id: int) -> None:
    """Add a block's projection by the map `normal-1`; arguments as in `sjlt_accumulate`."""
    _dense("normal", out, block, start, seed, model_id, 2)


@normal_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int) -> None:
    NormalMap(out.shape[1], seed).accumulate(out, block, start, model_id)


@normal_accumulate.register_fake
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int) -> None:
    return None


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


@hadamard.register_fake
def _(rows: Tensor, signs: Tensor, size: int, starts: list[int]) -> None:
    return None


def _dense(
    distribution: Distribution,
    out: Tensor,
    block: Tensor,
    start: int,
    seed: int,
    model_id: int,
    terms: int,
) -> None:
    instruction = checked_instruction(CUDA, distribution, block.dtype, block.shape[0], block.device, terms)
    target = _rows(out)
    accumulate_dense(CUDA, distribution, target, _rows(block), start, seed, model_id, terms, instruction)
    if target is not out:
        out.copy_(target)


def _rows(matrix: Tensor) -> Tensor:
    """Return the matrix itself if the elements of its rows lie side by side, as kernels expect, or else a copy."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()
