"""Handlers of the operations that models apply to parameter values outside of layers with a rule.

One small function per kind of operation, see `batched_op` for what a handler does.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis
from hf_trak.gradient_computers.hooked.batched_op import BatchedOp, OpHandler, register_op_handler
from hf_trak.gradient_computers.hooked.rules.conv import ConvGeometry, bias_pieces, conv_pieces
from hf_trak.gradient_computers.hooked.rules.embedding import embedding_pieces
from hf_trak.gradient_computers.hooked.rules.linear import linear_pieces
from hf_trak.gradient_computers.hooked.rules.norm import (
    channel_scale_and_shift,
    running_scale_and_shift,
    scale_and_shift,
)
from hf_trak.gradient_computers.hooked.rules.registry import Piece

_T = torch.Tensor
_NAMES = """
    add sub subtract mul multiply div divide true_divide pow where maximum minimum fmax fmin addcmul addcdiv lerp rsub
    atan2 logaddexp copysign hypot remainder fmod add_ sub_ mul_ div_ addcmul_ addcdiv_ __add__ __radd__ __iadd__
    __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __rdiv__ __itruediv__ __idiv__
    __pow__ __rpow__ __mod__
"""
_BROADCASTING = [getattr(space, name) for space in (torch, _T) for name in _NAMES.split() if hasattr(space, name)]


@register_op_handler(*_BROADCASTING)
def broadcasting(op: BatchedOp) -> Any:
    """Run an elementwise operation: expand the parameter values along the batch dimension of the result.

    Register it for any other torch function that broadcasts its arguments.

    Raises:
        ParameterUnsupportedError: no argument has a batch dimension, or two have it in different dimensions.
    """
    rank = max(t.ndim for t in op.tensors)
    axis = None
    for tensor in op.tensors:
        own = op.axis(tensor) if op.tracked(tensor) is None else None
        if own is not None:
            # broadcasting lines dimensions up from the last one
            shifted = BatchAxis(own.dim + rank - tensor.ndim, own.fold, own.major)
            if axis is not None and axis != shifted:
                raise op.unsupported(f"combines tensors with the batch in dimensions {axis.dim} and {shifted.dim}")
            axis = shifted
    if axis is None:
        raise op.unsupported("has no argument with a batch dimension")
    return _with_values_expanded(op, axis, rank)


@register_op_handler(F.scaled_dot_product_attention)
def attention(op: BatchedOp) -> Any:
    """Run attention on parameter values. As query, key, value or bias, all have the batch in dimension 0.

    Raises:
        ParameterUnsupportedError: one has it in another dimension.
    """
    axes = [op.axis(t) for t in op.tensors if op.tracked(t) is None]
    if any(axis is not None and axis.dim != 0 for axis in axes):
        raise op.unsupported("has the batch in another dimension than the first")
    axis = next(axis for axis in axes if axis is not None)
    return _with_values_expanded(op, axis, max(t.ndim for t in op.tensors))


def _with_values_expanded(op: BatchedOp, axis: BatchAxis, rank: int) -> Any:
    """Run the operation with all its parameter values expanded along the batch dimension."""

    def expand(tensor: Tensor) -> Tensor:
        tracked = op.tracked(tensor)
        return tensor if tracked is None else op.per_sample(tracked, axis, rank)

    return op.run(expand)


@register_op_handler(_T.expand, _T.expand_as, _T.broadcast_to, torch.broadcast_to, creates_batch=True)
def expanding(op: BatchedOp) -> Any:
    """Make the batch dimension come into being: `cls_token.expand(batch_size, -1, -1)`.

    Raises:
        ParameterUnsupportedError: a parameter is not what is expanded, but gives the shape.
    """
    tracked = op.tracked(op.args[0])
    if tracked is None or len(op.call.found) > 1:
        raise op.unsupported("expands to the shape of a parameter")
    out = op.run(op.plain)
    axis = op.output_axis(out)
    if axis is None:
        return op.without_batch()
    # first everything but the batch dimension, within the small graph of parameter values
    alone = list(out.shape)
    alone[axis.dim] = 1
    base = tracked.value.expand(alone)
    return op.per_sample(op.track(base), axis, base.ndim)


@register_op_handler(_T.repeat, torch.tile, _T.tile, creates_batch=True)
def repeating(op: BatchedOp) -> Any:
    """Handle `query.repeat(batch_size, 1, 1)`: whole copies one after the other, so that a sample's rows are
    neighbours.

    Raises:
        ParameterUnsupportedError: the copies cannot be assigned to samples.
    """
    tracked = op.tracked(op.args[0])
    assert tracked is not None
    out = op.run(op.plain)
    axis = op.output_axis(out)
    if axis is None:
        return op.without_batch()
    times = list(op.args[1]) if isinstance(op.args[1], tuple | list) else list(op.args[1:])
    size = op.size
    if times[axis.dim] % size or (axis.fold > 1 and axis.dim != 0) or len(times) != out.ndim:
        raise op.unsupported("repeats along the batch in a way that cannot be followed")
    # first the copies within one sample, then those for the samples
    times[axis.dim] //= size
    base = tracked.value.repeat(times)
    if axis.fold == 1:  # contiguous, as copies are
        return op.per_sample(op.track(base), axis, base.ndim).contiguous()
    base = base.unsqueeze(0)
    expanded = op.per_sample(op.track(base), BatchAxis(0), base.ndim)
    return expanded.flatten(0, 1)


@register_op_handler(F.linear)
def linear(op: BatchedOp) -> Any:
    """Handle `F.linear(x, weight, bias)`: projections of attention modules, tied heads."""
    return _linear_map(op, op.argument(0, "input"), op.argument(1, "weight"), op.argument(2, "bias"), False)


@register_op_handler(torch.addmm, _T.addmm)
def addmm(op: BatchedOp) -> Any:
    """Handle `addmm(bias, x, weight)`.

    Raises:
        ParameterUnsupportedError: with scaling factors, or with a matrix to add.
    """
    bias, x, weight = op.args[:3]
    if op.kwargs or bias.ndim != 1:
        raise op.unsupported("with scaling factors or a matrix to add")
    return _linear_map(op, x, weight, bias, True)


@register_op_handler(torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm, torch.bmm, _T.bmm, _T.__rmatmul__)
def matmul(op: BatchedOp) -> Any:
    """Handle `x @ W`. With a matrix W this is a linear map; anything else is a broadcast over leading dimensions.

    Raises:
        ParameterUnsupportedError: the batch is in one of the last two dimensions.
    """
    left, right = op.args[:2]
    if op.func is _T.__rmatmul__:
        left, right = right, left
    if op.tracked(left) is None and right.ndim == 2:
        return _linear_map(op, left, right, None, True)
    tracked, other = (right, left) if op.tracked(left) is None else (left, right)
    axis = op.axis(other) if op.tracked(other) is None else None
    rank = max(left.ndim, right.ndim)
    # the batch has to be in a dimension over which the product broadcasts: neither of the last two
    if axis is None or axis.dim + rank - other.ndim >= rank - 2 or op.func in (torch.mm, _T.mm):
        raise op.unsupported("contracts or lines up a parameter with the batch dimension")
    shifted = BatchAxis(axis.dim + rank - other.ndim, axis.fold, axis.major)
    expanded = op.per_sample(op.call.found[id(tracked)], shifted, rank)
    return op.run(lambda t: expanded if t is tracked else op.plain(t))


def _linear_map(op: BatchedOp, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Any:
    """Run y = x Wᵀ + b, or y = x W + b if `transposed`, and take the gradients of weight and bias by the rule."""
    has_weight, has_bias = op.tracked(weight) is not None, op.tracked(bias) is not None

    def pieces(x: Tensor, grad: Tensor) -> Iterator[Piece]:
        return linear_pieces(x, grad, op.workspace, has_weight, has_bias, transposed, op.takes_outer)

    return op.through_rule(x, {"weight": weight, "bias": bias}, pieces)


@register_op_handler(F.embedding)
def embedding(op: BatchedOp) -> Any:
    """Handle `F.embedding(ids, table)`.

    Raises:
        ParameterUnsupportedError: with `max_norm` or `scale_grad_by_freq`.
    """
    ids, table = op.argument(0, "input"), op.argument(1, "weight")
    if op.argument(3, "max_norm") is not None or op.argument(5, "scale_grad_by_freq", False):
        raise op.unsupported("with max_norm or scale_grad_by_freq")
    padding, rows = op.argument(2, "padding_idx"), table.shape[0]

    def pieces(ids: Tensor, grad: Tensor) -> Iterator[Piece]:
        return embedding_pieces(ids, grad, op.workspace, rows, padding)

    return op.through_rule(ids, {"weight": table}, pieces, on_host=True)


def _conv(dims: int) -> OpHandler:
    """Make the handler of `F.conv1d`, `F.conv2d` or `F.conv3d`: `conv(x, weight, bias, stride, padding, …)`."""

    def handler(op: BatchedOp) -> Any:
        x, weight, bias = op.argument(0, "input"), op.argument(1, "weight"), op.argument(2, "bias")
        stride, padding, dilation = (
            _sizes(op.argument(position, name, default), dims)
            for position, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
        )
        if padding is None or x.ndim != dims + 2:
            raise op.unsupported("with string padding or without a batch dimension")
        geometry = ConvGeometry(stride, padding, dilation, op.argument(6, "groups", 1))

        def pieces(x: Tensor, grad: Tensor) -> Iterator[Piece]:
            if op.tracked(bias) is not None:
                yield from bias_pieces(grad)
            if op.tracked(weight) is not None:
                yield from conv_pieces(x, grad, weight.shape, geometry, op.workspace, op.takes_outer)

        return op.through_rule(x, {"weight": weight, "bias": bias}, pieces, rows=True)

    return handler


def _sizes(value: Any, dims: int) -> Any:
    """Return one number per spatial dimension; `None` for a padding that is given as a word other than "valid"."""
    if isinstance(value, str):
        return None if value != "valid" else [0] * dims
    return [value] * dims if isinstance(value, int) else list(value)


for _dims, _function in enumerate((F.conv1d, F.conv2d, F.conv3d), 1):
    register_op_handler(_function)(_conv(_dims))


@register_op_handler(F.layer_norm, torch.layer_norm)
def layer_norm(op: BatchedOp) -> Any:
    """Handle `layer_norm(x, shape, weight, bias, eps)`."""
    x, shape = op.args[0], list(op.argument(1, "normalized_shape"))
    weight, bias, eps = op.argument(2, "weight"), op.argument(3, "bias"), op.argument(4, "eps", 1e-5)

    def pieces(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        return scale_and_shift(F.layer_norm(x, shape, None, None, eps), grad, len(shape))

    return op.through_rule(x, {"weight": weight, "bias": bias}, pieces)


@register_op_handler(F.rms_norm, torch.rms_norm)
def rms_norm(op: BatchedOp) -> Any:
    """Handle `rms_norm(x, shape, weight, eps)`."""
    x, shape = op.args[0], list(op.argument(1, "normalized_shape"))
    weight, eps = op.argument(2, "weight"), op.argument(3, "eps")

    def pieces(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        return scale_and_shift(F.rms_norm(x, shape, None, eps), grad, len(shape))

    return op.through_rule(x, {"weight": weight}, pieces)


@register_op_handler(F.group_norm, torch.group_norm)
def group_norm(op: BatchedOp) -> Any:
    """Handle `group_norm(x, groups, weight, bias, eps)`."""
    x, groups = op.args[0], op.argument(1, "num_groups")
    weight, bias, eps = op.argument(2, "weight"), op.argument(3, "bias"), op.argument(4, "eps", 1e-5)

    def pieces(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        return channel_scale_and_shift(F.group_norm(x, groups, None, None, eps), grad)

    return op.through_rule(x, {"weight": weight, "bias": bias}, pieces, rows=True)


@register_op_handler(F.batch_norm)
def batch_norm(op: BatchedOp) -> Any:
    """Handle `batch_norm(x, mean, variance, weight, bias, training, momentum, eps)` with running statistics.

    Raises:
        ParameterUnsupportedError: with the statistics of the batch, which mix samples.
    """
    x, mean, variance = op.args[0], op.argument(1, "running_mean"), op.argument(2, "running_var")
    weight, bias, eps = op.argument(3, "weight"), op.argument(4, "bias"), op.argument(7, "eps", 1e-5)
    if op.argument(5, "training", False) or mean is None:
        raise op.unsupported("with the statistics of the batch mixes samples (call model.eval())")

    def pieces(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        return running_scale_and_shift(x, grad, mean, variance, eps)

    return op.through_rule(x, {"weight": weight, "bias": bias}, pieces, rows=True)
