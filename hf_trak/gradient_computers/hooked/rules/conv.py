"""Convolutions in one to three dimensions, transposed ones included."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hf_trak._compat import padding_of_both_sides
from hf_trak.gradient_computers.hooked.rules.linear import outer_pieces
from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, Piece, common, register_layer_rule
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, TakesOuter, Workspace, every_factor
from hf_trak.runtime.operator_threads import over_samples

Sizes = Sequence[int]

FEW_POSITIONS = 128
"""Output positions up to which unfolding the input is the cheaper order."""


@dataclass(frozen=True)
class ConvGeometry:
    """Stride, padding (zeros, on both sides) and dilation, one number per spatial dimension each, and the groups of
    channels."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int


def conv_pieces(
    x: Tensor,
    grad: Tensor,
    shape: Sizes,
    geometry: ConvGeometry,
    workspace: Workspace,
    takes_outer: TakesOuter | None = None,
) -> Iterator[Piece]:
    """Yield slices of the per-sample weight gradient of `grad = ∂f/∂conv(x, W)`.

    Args:
        x: `(N, in, *)`.
        grad: `(N, out, *)`.
        shape: shape of the weight, `(out, in / groups, *kernel)`.
        geometry: stride, padding, dilation and groups of the convolution.
        workspace: where slices are written.
        takes_outer: see [`LayerCall`].

    [`every_factor`] gets factors of all but depthwise convolutions. Otherwise the order of the sums is chosen by shape
    (measured on two cores with the layers of a ResNet-18):

    * kernels that tile the input (1×1, patch embeddings) are linear maps of patches: a reshape and one batched
      product;
    * few positions L (the last stages of a CNN): the result is larger than everything that goes into it, and
      materializing the unfolded input `(N, in · kernel, L)` for one batched product is up to six times as fast as
      convolving;
    * many positions: unfolding would multiply the activations by the kernel's size and cost up to four times as much
      as contracting over positions first. On CPUs that is one backward convolution per sample, on one core each; with
      channel groups, and on GPUs, where launches count, a single one in which every sample is a group of channels of
      its own.
    """
    x, grad = common(x, grad)
    outs, kernel, groups = shape[0], list(shape[2:]), geometry.groups
    stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
    positions = torch.Size(grad.shape[2:]).numel()
    whole = list(stride) == kernel and set(dilation) == {1}
    if takes_outer is every_factor and not (groups > 1 and shape[1] == 1):
        yield from _factors(x, grad, kernel, geometry)
        return
    if groups == 1 and not any(padding) and (whole or set(kernel) == {1}):
        patches = _tile(x, grad.shape[2:], stride, kernel)
    elif groups == 1 and len(kernel) == 2 and positions <= FEW_POSITIONS:
        patches = F.unfold(x, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))
    else:
        row = torch.Size(shape[1:]).numel()
        # slices of output channels exist only where every one of them sees all input channels
        step = workspace.rows(x.shape[0], row, grad.dtype, outs) if groups == 1 else outs
        contract = _one_by_one if groups == 1 and x.device.type == "cpu" else _as_groups
        for low in range(0, outs, step):
            block = contract(x, grad[:, low : low + step], list(shape[1:]), geometry, workspace)
            yield "weight", low * row, block
        return
    yield from outer_pieces("weight", grad.flatten(2).transpose(1, 2), patches.transpose(1, 2), workspace, takes_outer)


def _factors(x: Tensor, grad: Tensor, kernel: list[int], geometry: ConvGeometry) -> Iterator[Piece]:
    """Yield the gradient as factors, one pair per group of channels: output gradients and unfolded patches."""
    groups, (size, outs) = geometry.groups, grad.shape[:2]
    patches = _unfolded(x, grad.shape[2:], kernel, geometry)  # (N, in · kernel, L)
    left = grad.flatten(2).view(size, groups, outs // groups, -1).transpose(2, 3)
    right = patches.view(size, groups, patches.shape[1] // groups, -1).transpose(2, 3)
    step = (outs // groups) * right.shape[3]
    for group in range(groups):
        yield "weight", group * step, OuterBlock(left[:, group], right[:, group])


def _unfolded(x: Tensor, positions: Sizes, kernel: list[int], geometry: ConvGeometry) -> Tensor:
    """Unfold the input in any number of dimensions: `(N, in · kernel, L)`, in the order of the weight's elements."""
    dims = len(kernel)
    if dims == 2:
        stride, padding, dilation = tuple(geometry.stride), tuple(geometry.padding), tuple(geometry.dilation)
        patches = F.unfold(x, tuple(kernel), dilation, padding, stride)
        high, wide = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(x.shape[2:], padding, dilation, kernel, stride, strict=True)
        )
        patches = patches.view(*patches.shape[:2], high, wide)
        return patches[:, :, : positions[0], : positions[1]].flatten(2)
    x = F.pad(x, [pad for p in reversed(geometry.padding) for pad in (p, p)])
    for dim, (k, s, d) in enumerate(zip(kernel, geometry.stride, geometry.dilation, strict=True)):
        x = x.unfold(dim + 2, d * (k - 1) + 1, s)[..., ::d].narrow(dim + 2, 0, positions[dim])
    # (N, in, *positions, *kernel)
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    return x.permute(order).reshape(x.shape[0], -1, torch.Size(positions).numel())


def _tile(x: Tensor, positions: Sizes, stride: Sizes, kernel: list[int]) -> Tensor:
    """Cut the input into patches that do not overlap: `(N, in · kernel, L)`, in the order of the weight's elements."""
    dims = len(kernel)
    if set(kernel) == {1}:
        cut = tuple(slice(0, (n - 1) * s + 1, s) for n, s in zip(positions, stride, strict=True))
        return x[(slice(None), slice(None), *cut)].flatten(2)
    x = x[(slice(None), slice(None), *(slice(0, n * k) for n, k in zip(positions, kernel, strict=True)))]
    split = [part for n, k in zip(positions, kernel, strict=True) for part in (n, k)]
    x = x.reshape(x.shape[0], x.shape[1], *split)
    order = [0, 1, *(3 + 2 * d for d in range(dims)), *(2 + 2 * d for d in range(dims))]
    return x.permute(order).reshape(x.shape[0], -1, torch.Size(positions).numel())


def _weight_gradient(x: Tensor, grad: Tensor, weight_shape: list[int], geometry: ConvGeometry) -> Tensor:
    """Compute the weight gradient of one ordinary convolution, summed over its batch."""
    stride, padding, dilation = list(geometry.stride), list(geometry.padding), list(geometry.dilation)
    groups = geometry.groups
    weight = x.new_empty(weight_shape)  # only its shape is read
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, [False, True, False]
    )[1]


def _one_by_one(x: Tensor, grad: Tensor, row_shape: list[int], geometry: ConvGeometry, workspace: Workspace) -> Tensor:
    """Compute the weight gradients by one backward convolution per sample: `(N, rows · row)`."""
    size, rows = grad.shape[:2]
    block = workspace.empty((size, rows, *row_shape), grad)

    def contract(first: int, last: int) -> None:
        for i in range(first, last):
            block[i] = _weight_gradient(x[i : i + 1], grad[i : i + 1], [rows, *row_shape], geometry)

    over_samples(contract, size)
    return block.view(size, -1)


def _as_groups(x: Tensor, grad: Tensor, row_shape: list[int], geometry: ConvGeometry, workspace: Workspace) -> Tensor:
    """Compute them by a single backward convolution, in which every sample is a group of channels of its own."""
    size, rows = grad.shape[:2]
    merged, merged_grad = x.reshape(1, -1, *x.shape[2:]), grad.reshape(1, size * rows, *grad.shape[2:])
    shape = [size * rows, *row_shape]
    return _weight_gradient(merged, merged_grad, shape, replace(geometry, groups=geometry.groups * size)).view(
        size, -1
    )


def bias_pieces(grad: Tensor) -> Iterator[Piece]:
    """Yield the gradient of the shift of every channel: the sum over positions."""
    yield "bias", 0, grad.flatten(2).sum(2)


@register_layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, rows=True)
def conv(call: LayerCall) -> Iterator[Piece]:
    """Compute dW[b], the correlation of x[b] with grad[b]. Other padding than zeros is applied to x first."""
    module = call.module
    if "bias" in call.wanted:
        yield from bias_pieces(call.grad)
    if "weight" not in call.wanted:
        return
    x, padding = padded(call.x, module.padding, module.padding_mode, padding_of_both_sides(module))
    geometry = ConvGeometry(module.stride, padding, module.dilation, module.groups)
    yield from conv_pieces(x, call.grad, module.weight.shape, geometry, call.workspace, call.takes_outer)


def padded(x: Tensor, padding: Sizes | str, mode: str, sides: list[int]) -> tuple[Tensor, list[int]]:
    """Apply the padding that is not the same number of zeros on both sides.

    Args:
        x: `(N, in, *)`.
        padding: as of the layer: numbers, "valid" or "same".
        mode: as of the layer.
        sides: the padding of both sides of every dimension, last dimension first.

    Returns:
        The input, and the padding with zeros on both sides that is left to do.
    """
    if mode != "zeros":
        return F.pad(x, sides, mode=mode), [0] * (len(sides) // 2)
    if not isinstance(padding, str):
        return x, list(padding)
    if padding == "valid":
        return x, [0] * (len(sides) // 2)
    return F.pad(x, sides), [0] * (len(sides) // 2)


@register_layer_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, rows=True)
def conv_transpose(call: LayerCall) -> Iterator[Piece]:
    """Treat a transposed convolution. Input and output gradient change places.

    The weight is `(in, out / groups, *)`.
    """
    module = call.module
    if "bias" in call.wanted:
        yield from bias_pieces(call.grad)
    if "weight" in call.wanted:
        x, padding = call.x.to(call.grad.dtype), [int(p) for p in module.padding]
        geometry = ConvGeometry(module.stride, padding, module.dilation, module.groups)
        yield from conv_pieces(call.grad, x, module.weight.shape, geometry, call.workspace, call.takes_outer)
