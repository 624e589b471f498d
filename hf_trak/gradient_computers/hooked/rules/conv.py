"""Convolutions in one to three dimensions, transposed ones included."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hf_trak.gradient_computers.hooked.rules.linear import outer_pieces
from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, Piece, common, register_layer_rule
from hf_trak.gradient_computers.hooked.workspace import Workspace

Sizes = Sequence[int]

FEW_POSITIONS = 128
"""Output positions up to which unfolding the input is the cheaper order."""


def conv_pieces(
    x: Tensor,
    grad: Tensor,
    shape: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    workspace: Workspace,
) -> Iterator[Piece]:
    """Slices of the per-sample weight gradient of `grad = ∂f/∂conv(x, W)`.

    Args:
        x: `(N, in, *)`.
        grad: `(N, out, *)`.
        shape: of the weight, `(out, in / groups, *kernel)`.
        stride, padding, dilation: one number per spatial dimension, zero padding on both sides.
        groups: channel groups.
        workspace: where slices are written.

    Chosen by shape (measured on two cores, ResNet-18 layers):

    * kernels that tile the input (1×1, patch embeddings) are linear maps of patches: a reshape and one batched
      product;
    * few positions L (the last stages of a CNN): the result is larger than everything that goes into it, and
      materializing the unfolded input `(N, in · kernel, L)` for one batched product is up to six times as fast as
      convolving;
    * many positions: unfolding would multiply the activations by the kernel's size and cost up to four times as much
      as contracting over positions first. On CPUs that is one backward convolution per sample; with channel groups,
      and on GPUs, where launches count, a single one in which every sample is a group of channels of its own.
    """
    x, grad = common(x, grad)
    outs, kernel = shape[0], list(shape[2:])
    positions = torch.Size(grad.shape[2:]).numel()
    whole = list(stride) == kernel and set(dilation) == {1}
    if groups == 1 and not any(padding) and (whole or set(kernel) == {1}):
        patches = _tile(x, grad.shape[2:], stride, kernel)
    elif groups == 1 and len(kernel) == 2 and positions <= FEW_POSITIONS:
        patches = F.unfold(x, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))
    else:
        geometry = list(stride), list(padding), list(dilation)
        row = torch.Size(shape[1:]).numel()
        # slices of output channels exist only where every one of them sees all input channels
        step = workspace.rows(x.shape[0], row, grad.dtype, outs) if groups == 1 else outs
        contract = _one_by_one if groups == 1 and x.device.type == "cpu" else _as_groups
        for low in range(0, outs, step):
            block = contract(x, grad[:, low : low + step], list(shape[1:]), geometry, groups, workspace)
            yield "weight", low * row, block
        return
    yield from outer_pieces("weight", grad.flatten(2).transpose(1, 2), patches.transpose(1, 2), workspace)


def _tile(x: Tensor, positions: Sizes, stride: Sizes, kernel: list[int]) -> Tensor:
    """Non-overlapping patches as `(N, in · kernel, L)`, in the order of the weight's elements."""
    dims = len(kernel)
    if set(kernel) == {1}:
        cut = tuple(slice(0, (n - 1) * s + 1, s) for n, s in zip(positions, stride, strict=True))
        return x[(slice(None), slice(None), *cut)].flatten(2)
    x = x[(slice(None), slice(None), *(slice(0, n * k) for n, k in zip(positions, kernel, strict=True)))]
    split = [part for n, k in zip(positions, kernel, strict=True) for part in (n, k)]
    x = x.reshape(x.shape[0], x.shape[1], *split)
    order = [0, 1, *(3 + 2 * d for d in range(dims)), *(2 + 2 * d for d in range(dims))]
    return x.permute(order).reshape(x.shape[0], -1, torch.Size(positions).numel())


Geometry = tuple[list[int], list[int], list[int]]


def _weight_gradient(x: Tensor, grad: Tensor, weight_shape: list[int], geometry: Geometry, groups: int) -> Tensor:
    """The weight gradient of one ordinary convolution, summed over its batch."""
    stride, padding, dilation = geometry
    weight = x.new_empty(weight_shape)  # only its shape is read
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, [False, True, False]
    )[1]


def _one_by_one(
    x: Tensor, grad: Tensor, row_shape: list[int], geometry: Geometry, groups: int, workspace: Workspace
) -> Tensor:
    size, rows = grad.shape[:2]
    block = workspace.empty((size, rows, *row_shape), grad)
    for i in range(size):
        block[i] = _weight_gradient(x[i : i + 1], grad[i : i + 1], [rows, *row_shape], geometry, groups)
    return block.view(size, -1)


def _as_groups(
    x: Tensor, grad: Tensor, row_shape: list[int], geometry: Geometry, groups: int, workspace: Workspace
) -> Tensor:
    size, rows = grad.shape[:2]
    merged, merged_grad = x.reshape(1, -1, *x.shape[2:]), grad.reshape(1, size * rows, *grad.shape[2:])
    shape = [size * rows, *row_shape]
    return _weight_gradient(merged, merged_grad, shape, geometry, groups * size).view(size, -1)


def bias_pieces(grad: Tensor) -> Iterator[Piece]:
    """The shift of every channel: the sum over positions."""
    yield "bias", 0, grad.flatten(2).sum(2)


@register_layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, rows=True)
def conv(call: LayerCall) -> Iterator[Piece]:
    """dW[b] = correlation of x[b] with grad[b]; padding modes other than zeros are applied to x first."""
    module = call.module
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if "bias" in call.wanted:
        yield from bias_pieces(call.grad)
    if "weight" not in call.wanted:
        return
    x, padding = padded(call.x, module.padding, module.padding_mode, module._reversed_padding_repeated_twice)
    yield from conv_pieces(
        x,
        call.grad,
        module.weight.shape,
        module.stride,
        padding,
        module.dilation,
        module.groups,
        call.workspace,
    )


def padded(x: Tensor, padding: Sizes | str, mode: str, sides: list[int]) -> tuple[Tensor, list[int]]:
    """The input and the symmetric zero padding that is left to do. `sides`: both sides of every dimension, last
    first."""
    if mode != "zeros":
        return F.pad(x, sides, mode=mode), [0] * (len(sides) // 2)
    if not isinstance(padding, str):
        return x, list(padding)
    if padding == "valid":
        return x, [0] * (len(sides) // 2)
    return F.pad(x, sides), [0] * (len(sides) // 2)


@register_layer_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, rows=True)
def conv_transpose(call: LayerCall) -> Iterator[Piece]:
    """The transpose of a convolution: input and output gradient change places, the weight is `(in, out / groups,
    *)`."""
    module = call.module
    assert isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    if "bias" in call.wanted:
        yield from bias_pieces(call.grad)
    if "weight" in call.wanted:
        padding = [int(p) for p in module.padding]
        yield from conv_pieces(
            call.grad,
            call.x.to(call.grad.dtype),
            module.weight.shape,
            module.stride,
            padding,
            module.dilation,
            module.groups,
            call.workspace,
        )
