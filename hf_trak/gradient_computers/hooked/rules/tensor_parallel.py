"""Linear layers and embeddings that tensor parallelism divides: every process has the gradient of its own slice.

`tp_plan` of transformers replaces `forward` of a layer by one that takes and returns plain tensors: whole ones, or
this process' slice of the last dimension. Which of the two it is shows in their sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hf_trak._compat import own_parameters
from hf_trak.gradient_computers.hooked.rules.embedding import embedding_pieces
from hf_trak.gradient_computers.hooked.rules.linear import linear_pieces
from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, Piece, RegisteredRule, common, over_tokens
from hf_trak.gradient_computers.hooked.workspace import every_factor
from hf_trak.runtime.sharding import is_sharded_tensor, runs_of, slice_indices


class GatheringSlices:
    """Given as `takes_outer`: factors are wanted wherever a gradient has them, and whole ones in every process."""

    def __init__(self, total: Callable[[Tensor], Tensor]) -> None:
        """
        Args:
            total: sums a tensor over the processes that hold the slices.
        """
        self.total = total

    def __call__(self, left: Tensor, right: Tensor) -> bool:
        return every_factor(left, right)

    def whole(self, tensor: Tensor, held: Tensor | None, size: int) -> Tensor:
        """Put the slices of the last dimension together, unless the tensor has come whole. All processes call this."""
        if held is None or tensor.shape[-1] == size:
            return tensor
        padded = tensor.new_zeros(*tensor.shape[:-1], size)
        padded[..., held.to(tensor.device)] = tensor
        return self.total(padded)


def tensor_parallel_rule(module: nn.Module) -> RegisteredRule | None:
    """Find the rule of a layer that tensor parallelism divides; `None` if it does not, or if there is no rule."""
    divided = any(is_sharded_tensor(parameter) for parameter in own_parameters(module).values())
    if not divided or "forward" not in vars(module):
        return None
    if isinstance(module, nn.Linear):
        return RegisteredRule(_linear, frozenset({"weight", "bias"}), False, None)
    if isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq:
        return RegisteredRule(_embedding, frozenset({"weight"}), False, None, on_host=True)
    return None


def placed(
    name: str, start: int, block: Tensor, held: Sequence[Tensor | None], shape: Sequence[int]
) -> Iterator[Piece]:
    """Move columns of the gradient of a slice to their places in the gradient of the whole parameter.

    Args:
        name: name of the parameter.
        start: position of the first column in the flattened slice.
        block: `(B, n)`; n and `start` are multiples of what one index before the divided dimension takes.
        held: the indices of the slice along each dimension; `None` for all of them. One dimension is divided at most.
        shape: shape of the whole parameter.
    """
    divided = [dim for dim, indices in enumerate(held) if indices is not None]
    if not divided:
        yield name, start, block
        return
    dim = divided[0]
    indices, inner = held[dim], prod(shape[dim + 1 :])
    assert indices is not None and len(divided) == 1
    if dim == 0:
        first = start // inner
        for index, low, high in runs_of(indices[first : first + block.shape[1] // inner]):
            yield name, index * inner, block[:, low * inner : high * inner]
        return
    # what is held lies apart in the flattened parameter: the whole goes out, with zeros for the parts of the others
    part = block.reshape(block.shape[0], -1, len(indices), inner)
    padded = part.new_zeros(part.shape[0], part.shape[1], shape[dim], inner)
    padded.index_copy_(2, indices.to(part.device), part)
    yield name, start // (len(indices) * inner) * shape[dim] * inner, padded.flatten(1)


def _sliced(tensor: Tensor, held: Tensor | None, whole: int) -> Tensor:
    """Return this process' slice of the last dimension of a tensor that may have come as the slice alone."""
    if held is None or tensor.shape[-1] == len(held):
        return tensor
    assert tensor.shape[-1] == whole
    return tensor[..., held.to(tensor.device)]


def _linear(call: LayerCall) -> Iterator[Piece]:
    """Yield the gradient of this process' rows, or columns, of the weight of `nn.Linear`, and of its bias."""
    x, grad = common(call.x, call.grad)
    weight: Any = own_parameters(call.module)["weight"]
    held = slice_indices(weight)
    shape = weight.shape
    gathering = call.takes_outer
    if isinstance(gathering, GatheringSlices):
        x, grad = gathering.whole(x, held[1], shape[1]), gathering.whole(grad, held[0], shape[0])
        wanted = {"weight": "weight" in call.wanted, "bias": "bias" in call.wanted}
        yield from linear_pieces(x, grad, call.workspace, **wanted, takes_outer=gathering)
        return
    grad, x = _sliced(grad, held[0], shape[0]), _sliced(x, held[1], shape[1])
    if "bias" in call.wanted:
        yield from placed("bias", 0, over_tokens(grad), held[:1], shape[:1])
    if "weight" in call.wanted:
        for _, start, block in linear_pieces(x, grad, call.workspace, bias=False):
            assert isinstance(block, Tensor)
            yield from placed("weight", start, block, held, shape)


def _embedding(call: LayerCall) -> Iterator[Piece]:
    """Yield the gradient of this process' rows, or columns, of the table of `nn.Embedding`."""
    module: Any = call.module
    table: Any = own_parameters(module)["weight"]
    rows, columns = slice_indices(table)
    count, width = table.shape
    grad = call.grad
    if isinstance(call.takes_outer, GatheringSlices):
        grad, rows, columns = call.takes_outer.whole(grad, columns, width), None, None
    if columns is not None and grad.shape[-1] == width:
        mask = torch.zeros(width, dtype=grad.dtype, device=grad.device)
        mask[columns.to(grad.device)] = 1
        grad = grad * mask
    for name, start, block in embedding_pieces(call.x, grad, call.workspace, count, module.padding_idx):
        assert isinstance(block, Tensor)
        if rows is None:
            yield name, start, block
            continue
        for first, low, high in runs_of(rows):
            begin, end = max(start, first * width), min(start + block.shape[1], (first + high - low) * width)
            if begin < end:
                yield name, begin, block[:, begin - start : end - start]
