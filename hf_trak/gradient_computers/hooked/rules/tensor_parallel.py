"""Linear layers and embeddings that tensor parallelism divides: every process has the gradient of its own slice.

`tp_plan` of transformers replaces `forward` of a layer by one that takes and returns plain tensors: whole ones, or
this process' slice of the last dimension. Which of the two it is shows in their sizes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_trak._compat import own_parameters
from hf_trak.gradient_computers.hooked.rules.embedding import embedding_pieces
from hf_trak.gradient_computers.hooked.rules.linear import linear_pieces
from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, Piece, RegisteredRule, common, over_tokens
from hf_trak.runtime.sharding import is_sharded_tensor


def tensor_parallel_rule(module: nn.Module) -> RegisteredRule | None:
    """Find the rule of a layer that tensor parallelism divides; `None` if it does not, or if there is no rule."""
    divided = any(is_sharded_tensor(parameter) for parameter in own_parameters(module).values())
    if not divided or "forward" not in vars(module):
        return None
    if isinstance(module, nn.Linear):
        return RegisteredRule(_linear, frozenset({"weight", "bias"}), False, None)
    if isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq:
        return RegisteredRule(_embedding, frozenset({"weight"}), False, None)
    return None


def _own_range(parameter: Any, dim: int) -> range | None:
    """Return the indices of a dimension that tensor parallelism gives to this process; `None` for all of them.

    Where FSDP2 divides the slices again and has not gathered them, its dimensions of the mesh are the outer ones.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = parameter.device_mesh
    inner = mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 else mesh
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, inner, parameter.placements[-1:])
    held = range(offset[dim], offset[dim] + shape[dim])
    return None if len(held) == parameter.shape[dim] else held


def _sliced(tensor: Tensor, held: range | None, whole: int) -> Tensor:
    """Return this process' slice of the last dimension of a tensor that may have come as the slice alone."""
    if held is None or tensor.shape[-1] == len(held):
        return tensor
    assert tensor.shape[-1] == whole
    return tensor[..., held.start : held.stop]


def _linear(call: LayerCall) -> Iterator[Piece]:
    """Yield the gradient of this process' rows, or columns, of the weight of `nn.Linear`, and of its bias."""
    x, grad = common(call.x, call.grad)
    weight: Any = own_parameters(call.module)["weight"]
    rows, columns = _own_range(weight, 0), _own_range(weight, 1)
    height, width = weight.shape
    grad, x = _sliced(grad, rows, height), _sliced(x, columns, width)
    first = 0 if rows is None else rows.start
    if "bias" in call.wanted:
        yield "bias", first, over_tokens(grad)
    if "weight" not in call.wanted:
        return
    for _, start, block in linear_pieces(x, grad, call.workspace, bias=False):
        assert isinstance(block, Tensor)
        if columns is None:
            yield "weight", first * width + start, block
            continue
        # columns lie apart in the flattened weight: whole rows go out, with zeros for the columns of the others
        part = block.view(block.shape[0], -1, len(columns))
        padded = part.new_zeros(part.shape[0], part.shape[1], width)
        padded[:, :, columns.start : columns.stop] = part
        yield "weight", (start // len(columns)) * width, padded.flatten(1)


def _embedding(call: LayerCall) -> Iterator[Piece]:
    """Yield the gradient of this process' rows, or columns, of the table of `nn.Embedding`."""
    module: Any = call.module
    table: Any = own_parameters(module)["weight"]
    rows, columns = _own_range(table, 0), _own_range(table, 1)
    count, width = table.shape
    grad = call.grad
    if columns is not None and grad.shape[-1] == width:
        mask = torch.zeros(width, dtype=grad.dtype, device=grad.device)
        mask[columns.start : columns.stop] = 1
        grad = grad * mask
    for name, start, block in embedding_pieces(call.x, grad, call.workspace, count, module.padding_idx):
        assert isinstance(block, Tensor)
        if rows is not None:
            low, high = max(start, rows.start * width), min(start + block.shape[1], rows.stop * width)
            if low >= high:
                continue
            block, start = block[:, low - start : high - start], low
        yield name, start, block
