"""The projections as operators of torch: `torch.ops.hf_trak.*_accumulate(out, block, …)`, each `out += block @ R`, and
`sjlt_accumulate_outer` for blocks in factored form.

On CUDA tensors they run the kernels of `hf_trak.kernels`, on the CPU the torch implementation of the same map, which
is the reference. Only `out` is changed. Arguments have been checked by [`BlockProjector.accumulate`]; there are no
gradients through a projection.
"""

from typing import Literal

import torch
from torch import Tensor

from hf_trak.projectors.dense import NormalProjector, RademacherProjector
from hf_trak.projectors.sparse import SparseProjector, segment_bounds


@torch.library.custom_op("hf_trak::sjlt_accumulate", mutates_args=("out",), device_types="cuda")
def sjlt_accumulate(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    """The map `sjlt-1`; arguments as in [`SparseProjector`] and [`BlockProjector.accumulate`]."""
    from hf_trak.kernels.runtime import CUDA
    from hf_trak.kernels.self_check import require_right_sjlt
    from hf_trak.kernels.sparse import accumulate_sjlt

    require_right_sjlt(CUDA, block.dtype, block.device)
    target = _rows(out)
    accumulate_sjlt(CUDA, target, _rows(block), start, seed, model_id, segment_bounds(out.shape[1], nonzeros))
    if target is not out:
        out.copy_(target)


@sjlt_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    projector = SparseProjector(start + block.shape[1], out.shape[1], seed, nonzeros=nonzeros)
    projector.accumulate(out, block, start, model_id)


@sjlt_accumulate.register_fake
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    return None


@torch.library.custom_op("hf_trak::sjlt_accumulate_outer", mutates_args=("out",), device_types="cuda")
def sjlt_accumulate_outer(
    out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, nonzeros: int
) -> None:
    """The map `sjlt-1` of Σ_t left[b, t, :] ⊗ right[b, t, :], flattened, which is never formed on a GPU.

    `left` is `(B, T, I)`, `right` `(B, T, J)`, of one dtype. The elements of the sum are float32, whatever that is.
    """
    from hf_trak.kernels.outer import accumulate_outer
    from hf_trak.kernels.runtime import CUDA
    from hf_trak.kernels.self_check import require_right_outer

    require_right_outer(CUDA, left.dtype, left.shape[1], left.device)
    target = _rows(out)
    accumulate_outer(CUDA, target, left, right, start, seed, model_id, segment_bounds(out.shape[1], nonzeros))
    if target is not out:
        out.copy_(target)


@sjlt_accumulate_outer.register_kernel("cpu")
def _(out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    block = torch.bmm(left.float().transpose(1, 2), right.float()).flatten(1)
    projector = SparseProjector(start + block.shape[1], out.shape[1], seed, nonzeros=nonzeros)
    projector.accumulate(out, block, start, model_id)


@sjlt_accumulate_outer.register_fake
def _(out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, nonzeros: int) -> None:
    return None


@torch.library.custom_op("hf_trak::rademacher_accumulate", mutates_args=("out",), device_types="cuda")
def rademacher_accumulate(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int) -> None:
    """The map `rademacher-1`; `terms` is 2, or 1 to round float32 gradients to bfloat16 (without effect on a CPU)."""
    _dense("rademacher", out, block, start, seed, model_id, terms)


@rademacher_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int) -> None:
    RademacherProjector(start + block.shape[1], out.shape[1], seed).accumulate(out, block, start, model_id)


@rademacher_accumulate.register_fake
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int, terms: int) -> None:
    return None


@torch.library.custom_op("hf_trak::normal_accumulate", mutates_args=("out",), device_types="cuda")
def normal_accumulate(out: Tensor, block: Tensor, start: int, seed: int, model_id: int) -> None:
    """The map `normal-1`."""
    _dense("normal", out, block, start, seed, model_id, 2)


@normal_accumulate.register_kernel("cpu")
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int) -> None:
    NormalProjector(start + block.shape[1], out.shape[1], seed).accumulate(out, block, start, model_id)


@normal_accumulate.register_fake
def _(out: Tensor, block: Tensor, start: int, seed: int, model_id: int) -> None:
    return None


def _dense(
    distribution: Literal["rademacher", "normal"],
    out: Tensor,
    block: Tensor,
    start: int,
    seed: int,
    model_id: int,
    terms: int,
) -> None:
    # Imported when there is a CUDA tensor to project, not with the package.
    from hf_trak.kernels.dense import accumulate_dense
    from hf_trak.kernels.runtime import CUDA
    from hf_trak.kernels.self_check import checked_instruction

    instruction = checked_instruction(CUDA, distribution, block.dtype, block.shape[0], block.device, terms)
    target = _rows(out)
    accumulate_dense(CUDA, distribution, target, _rows(block), start, seed, model_id, terms, instruction)
    if target is not out:
        out.copy_(target)


def _rows(matrix: Tensor) -> Tensor:
    """The matrix itself if the elements of its rows lie side by side, as kernels expect, or else a copy."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()
