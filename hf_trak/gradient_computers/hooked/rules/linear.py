"""Linear layers: y = x Wᵀ + b, and the transposed `Conv1D` of the GPT-2 family, y = x W + b."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, Piece, common, over_tokens, register_layer_rule
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, TakesOuter, Workspace


def outer_pieces(
    name: str, left: Tensor, right: Tensor, workspace: Workspace, takes_outer: TakesOuter | None = None
) -> Iterator[Piece]:
    """Yield slices of Σ_t left[b, t, i] · right[b, t, j], flattened over (i, j).

    The sum over tokens is contracted by one batched product per slice of i: that needs B · I · J products per token
    and nothing of size T × I × J. (The other order, outer products per token first, would be T times the memory.)

    Args:
        name: name of the parameter of shape `(I, J)`.
        left: `(B, T, I)`.
        right: `(B, T, J)`.
        workspace: where the slices are written.
        takes_outer: predicate on `left` and `right`. Where it holds, the whole is passed on as one [`OuterBlock`].
    """
    if takes_outer is not None and takes_outer(left, right):
        yield name, 0, OuterBlock(left, right)
        return
    size, terms, height = left.shape
    width = right.shape[2]
    step = workspace.rows_of_products(terms, size, width, left, height)
    for low in range(0, height, step):
        part = left[:, :, low : low + step].transpose(1, 2)
        block = workspace.empty((size, part.shape[1], width), left)
        product = torch.mul if terms == 1 else torch.bmm  # the same numbers, in half the time
        yield name, low * width, product(part, right, out=block).view(size, -1)


def linear_pieces(
    x: Tensor,
    grad: Tensor,
    workspace: Workspace,
    weight: bool = True,
    bias: bool = True,
    transposed: bool = False,
    takes_outer: TakesOuter | None = None,
) -> Iterator[Piece]:
    """Yield the per-sample gradients of `weight` and `bias` of a linear map over the last dimension.

    Args:
        x: `(B, *, in)`.
        grad: `(B, *, out)`.
        workspace: where the slices are written.
        weight, bias: which of the two are wanted.
        transposed: whether the weight is `(in, out)` instead of `(out, in)`.
        takes_outer: see [`LayerCall`].
    """
    x, grad = common(x, grad)
    if bias:
        yield "bias", 0, over_tokens(grad)
    if weight:
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        grad = grad.reshape(grad.shape[0], -1, grad.shape[-1])
        left, right = (x, grad) if transposed else (grad, x)
        yield from outer_pieces("weight", left, right, workspace, takes_outer)


@register_layer_rule(nn.Linear)
def linear(call: LayerCall) -> Iterator[Piece]:
    """Compute dW[b] = Σ_t grad[b, t, :] ⊗ x[b, t, :] and db[b] = Σ_t grad[b, t, :]."""
    return _linear_map(call, transposed=False)


@register_layer_rule(Conv1D)
def conv1d(call: LayerCall) -> Iterator[Piece]:
    """Compute dW[b] = Σ_t x[b, t, :] ⊗ grad[b, t, :] and db[b] = Σ_t grad[b, t, :]."""
    return _linear_map(call, transposed=True)


def _linear_map(call: LayerCall, transposed: bool) -> Iterator[Piece]:
    weight, bias = "weight" in call.wanted, "bias" in call.wanted
    return linear_pieces(call.x, call.grad, call.workspace, weight, bias, transposed, call.takes_outer)
