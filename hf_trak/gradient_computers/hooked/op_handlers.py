"""Where parameter values meet the batch: one small function per kind of operation, in a registry.

Two ways. Values that are broadcast (added, multiplied) are expanded along the batch dimension first, so that autograd
itself keeps the samples apart. Weights of linear maps, convolutions, lookups and norms are used as they are, and the
rule of the corresponding layer takes the per-sample gradient from the input and the output gradient.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis, UnsupportedError
from hf_trak.gradient_computers.hooked.outer import OuterBlock
from hf_trak.gradient_computers.hooked.rules.conv import bias_pieces, conv_pieces
from hf_trak.gradient_computers.hooked.rules.embedding import embedding_pieces
from hf_trak.gradient_computers.hooked.rules.linear import linear_pieces
from hf_trak.gradient_computers.hooked.rules.norm import (
    channel_scale_and_shift,
    running_scale_and_shift,
    scale_and_shift,
)
from hf_trak.gradient_computers.hooked.rules.registry import Piece, pieces_of
from hf_trak.gradient_computers.hooked.tracker import OpTrace, Tracked, outputs_of, replace_tensors, tensors_in

if TYPE_CHECKING:
    from hf_trak.gradient_computers.hooked.session import Session


class Contact:
    """One call in which parameter values and the batch come together."""

    def __init__(
        self,
        session: "Session",
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: dict[int, Tracked],
        roots: tuple[str, ...],
        trace: OpTrace,
    ) -> None:
        self.session = session
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.found = found
        self.roots = roots
        self.trace = trace
        self.tensors = list(tensors_in(args, kwargs))
        if len(self.tensors) != len(trace.inputs):
            raise self.unsupported("was called with other arguments for one sample alone")

    def unsupported(self, reason: str) -> UnsupportedError:
        """The error that names the parameters."""
        from hf_trak.gradient_computers.hooked.session import ParameterUnsupportedError

        return ParameterUnsupportedError(self.roots, f"{name_of(self.func)} {reason}")

    def tracked(self, tensor: Tensor | None) -> Tracked | None:
        """The parameter value behind an argument, `None` if it is none."""
        return self.found.get(id(tensor))

    def axis(self, tensor: Tensor) -> BatchAxis | None:
        """The batch dimension of an argument."""
        for candidate, traced in zip(self.tensors, self.trace.inputs, strict=True):
            if candidate is tensor:
                return traced.axis_of(tensor, self.session.size)
        raise self.unsupported("has an argument that was not traced")

    def meets_batch(self) -> bool:
        """Whether any argument or the result has a batch dimension, as far as the trace tells."""
        if any(self.axis(t) is not None for t in self.tensors if self.tracked(t) is None):
            return True
        return self.func in EXPANDING

    def call(self, replacement: Callable[[Tensor], Tensor]) -> Any:
        """The operation itself, with tensors replaced."""
        args = (replace_tensors(a, replacement) for a in self.args)
        return self.func(*args, **{k: replace_tensors(v, replacement) for k, v in self.kwargs.items()})

    def plain(self, tensor: Tensor) -> Tensor:
        """A tensor without the graph of parameter values."""
        tracked = self.tracked(tensor)
        return tensor if tracked is None else tracked.value.detach()

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def through_rule(
        self, x: Tensor, weights: dict[str, Tensor | None], pieces: Callable[[Tensor, Tensor], Any], rows: bool = False
    ) -> Any:
        """Run the operation with plain weights; in the backward pass `pieces(x, grad)`, batch first, gives the
        gradients.

        Args:
            x: the argument that carries the batch.
            weights: the weight arguments under the names that the pieces have.
            pieces: a rule's result.
            rows: see [`RegisteredRule`].
        """
        session = self.session
        targets = {name: t for name, weight in weights.items() if (t := self.tracked(weight)) is not None}
        if self.tracked(x) is not None or len(targets) != len(self.found):
            raise self.unsupported("takes a parameter as its input")
        x_axis = self.axis(x)
        if x_axis is None:
            raise self.unsupported("has no batch dimension in its input")
        out = self.call(self.plain)
        out_axis = self.trace.outputs[0].axis_of(out, session.size)
        if out_axis is None:
            raise self.unsupported("has no batch dimension in its result")

        def receive(grad: Tensor, kept: tuple[Tensor, ...]) -> None:
            result = pieces(*aligned_rows(kept[0], x_axis, grad, out_axis, rows))
            wanted = (piece for piece in pieces_of(result) if piece[0] in targets)
            session.deposit_pieces(targets, sum_rows(wanted, session.size, out_axis.fold if rows else 1))

        return session.capture(out, (x,), receive)


def aligned_rows(
    x: Tensor, x_axis: BatchAxis, grad: Tensor, grad_axis: BatchAxis, rows: bool
) -> tuple[Tensor, Tensor]:
    """Input and output gradient with the batch first; with folded rows in one dimension if `rows`."""
    x, grad = x_axis.rows_first(x), grad_axis.rows_first(grad)
    if rows:
        x = x.flatten(0, 1) if x_axis.fold > 1 else x
        grad = grad.flatten(0, 1) if grad_axis.fold > 1 else grad
    return x, grad


def sum_rows(pieces: Iterable[Piece], size: int, fold: int) -> Iterable[Piece]:
    """Pieces of `(B · fold, n)` as `(B, n)`."""
    for name, start, block in pieces:
        if fold == 1:
            yield name, start, block
        elif isinstance(block, OuterBlock):
            yield name, start, block.joined(fold)
        else:
            yield name, start, block.view(size, fold, -1).sum(1)


Handler = Callable[[Contact], Any]
CONTACTS: dict[Any, Handler] = {}
EXPANDING: set[Any] = set()


def contact(*functions: Any) -> Callable[[Handler], Handler]:
    """Decorator: handle these torch functions."""

    def decorator(handler: Handler) -> Handler:
        for function in functions:
            CONTACTS[function] = handler
        return handler

    return decorator


def name_of(function: Any) -> str:
    """A readable name of a torch function."""
    return getattr(function, "__name__", repr(function))


_T = torch.Tensor
_NAMES = """
    add sub subtract mul multiply div divide true_divide pow where maximum minimum fmax fmin addcmul addcdiv lerp rsub
    atan2 logaddexp copysign hypot remainder fmod add_ sub_ mul_ div_ addcmul_ addcdiv_ __add__ __radd__ __iadd__
    __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __rdiv__ __itruediv__ __idiv__
    __pow__ __rpow__ __mod__
"""
_BROADCASTING = [getattr(space, name) for space in (torch, _T) for name in _NAMES.split() if hasattr(space, name)]


@contact(*_BROADCASTING)
def broadcasting(op: Contact) -> Any:
    """Elementwise operations: expand the parameter values along the batch dimension of the result."""
    rank = max(t.ndim for t in op.tensors)
    axis = None
    for tensor in op.tensors:
        own = op.axis(tensor) if op.tracked(tensor) is None else None
        if own is not None:
            shifted = BatchAxis(own.dim + rank - tensor.ndim, own.fold, own.major)
            if axis is not None and axis != shifted:
                raise op.unsupported(f"combines tensors with the batch in dimensions {axis.dim} and {shifted.dim}")
            axis = shifted
    if axis is None:
        raise op.unsupported("has no argument with a batch dimension")

    def expand(tensor: Tensor) -> Tensor:
        tracked = op.tracked(tensor)
        return tensor if tracked is None else op.session.per_sample(tracked, axis, rank)

    return op.call(expand)


@contact(F.scaled_dot_product_attention)
def attention(op: Contact) -> Any:
    """Attention with a parameter value as query, key, value or bias: all have the batch in dimension 0."""
    axes = [op.axis(t) for t in op.tensors if op.tracked(t) is None]
    if any(axis is not None and axis.dim != 0 for axis in axes):
        raise op.unsupported("has the batch in another dimension than the first")
    axis = next(axis for axis in axes if axis is not None)
    rank = max(t.ndim for t in op.tensors)

    def expand(tensor: Tensor) -> Tensor:
        tracked = op.tracked(tensor)
        return tensor if tracked is None else op.session.per_sample(tracked, axis, rank)

    return op.call(expand)


@contact(_T.expand, _T.expand_as, _T.broadcast_to, torch.broadcast_to)
def expanding(op: Contact) -> Any:
    """The batch dimension comes into being: `cls_token.expand(batch_size, -1, -1)`."""
    tracked = op.tracked(op.args[0])
    if tracked is None or len(op.found) > 1:
        raise op.unsupported("expands to the shape of a parameter")
    shape = op.call(op.plain)
    axis = op.trace.outputs[0].axis_of(shape, op.session.size)
    if axis is None:
        return _without_batch(op)
    alone = list(shape.shape)
    alone[axis.dim] = 1
    base = tracked.value.expand(alone)
    return op.session.per_sample(op.session.track(base, tracked.roots), axis, base.ndim)


@contact(_T.repeat, torch.tile, _T.tile)
def repeating(op: Contact) -> Any:
    """`query.repeat(batch_size, 1, 1)`: copies, one after the other, so that the rows of one copy are neighbours."""
    tracked = op.tracked(op.args[0])
    assert tracked is not None
    out = op.call(op.plain)
    axis = op.trace.outputs[0].axis_of(out, op.session.size)
    if axis is None:
        return _without_batch(op)
    times = list(op.args[1]) if isinstance(op.args[1], tuple | list) else list(op.args[1:])
    size = op.session.size
    if times[axis.dim] % size or (axis.fold > 1 and axis.dim != 0) or len(times) != out.ndim:
        raise op.unsupported("repeats along the batch in a way that cannot be followed")
    times[axis.dim] //= size
    base = tracked.value.repeat(times)
    if axis.fold == 1:  # contiguous, as copies are
        return op.session.per_sample(op.session.track(base, tracked.roots), axis, base.ndim).contiguous()
    base = base.unsqueeze(0)
    expanded = op.session.per_sample(op.session.track(base, tracked.roots), BatchAxis(0), base.ndim)
    return expanded.flatten(0, 1)


EXPANDING.update([_T.expand, _T.expand_as, _T.broadcast_to, torch.broadcast_to, _T.repeat, torch.tile, _T.tile])


def _without_batch(op: Contact) -> Any:
    """The same operation within the graph of parameter values."""
    result = op.call(lambda t: op.found[id(t)].value if id(t) in op.found else t)
    for tensor in outputs_of(result):
        op.session.track(tensor, op.roots)
    return result


@contact(F.linear)
def linear(op: Contact) -> Any:
    """`F.linear(x, weight, bias)`: projections of attention modules, tied heads."""
    x, weight, bias = op.argument(0, "input"), op.argument(1, "weight"), op.argument(2, "bias")
    has = op.tracked(weight) is not None, op.tracked(bias) is not None
    return op.through_rule(
        x, {"weight": weight, "bias": bias}, lambda x, grad: linear_pieces(x, grad, op.session.workspace, *has)
    )


@contact(torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm, torch.bmm, _T.bmm, _T.__rmatmul__)
def matmul(op: Contact) -> Any:
    """`x @ W` with a matrix W is a linear map; anything else is a broadcast over leading dimensions."""
    left, right = op.args[:2]
    if op.func is _T.__rmatmul__:
        left, right = right, left
    if op.tracked(left) is None and right.ndim == 2:
        return op.through_rule(
            left,
            {"weight": right},
            lambda x, grad: linear_pieces(x, grad, op.session.workspace, bias=False, transposed=True),
        )
    tracked, other = (right, left) if op.tracked(left) is None else (left, right)
    axis = op.axis(other) if op.tracked(other) is None else None
    rank = max(left.ndim, right.ndim)
    if axis is None or axis.dim + rank - other.ndim >= rank - 2 or op.func in (torch.mm, _T.mm):
        raise op.unsupported("contracts or lines up a parameter with the batch dimension")
    shifted = BatchAxis(axis.dim + rank - other.ndim, axis.fold, axis.major)
    expanded = op.session.per_sample(op.found[id(tracked)], shifted, rank)
    return op.call(lambda t: expanded if t is tracked else op.plain(t))


@contact(torch.addmm, _T.addmm)
def addmm(op: Contact) -> Any:
    """`addmm(bias, x, weight)`."""
    bias, x, weight = op.args[:3]
    if op.kwargs or bias.ndim != 1:
        raise op.unsupported("with scaling factors or a matrix to add")
    has = op.tracked(weight) is not None, op.tracked(bias) is not None
    return op.through_rule(
        x,
        {"weight": weight, "bias": bias},
        lambda x, grad: linear_pieces(x, grad, op.session.workspace, *has, transposed=True),
    )


@contact(F.embedding)
def embedding(op: Contact) -> Any:
    """`F.embedding(ids, table)`; `max_norm` and `scale_grad_by_freq` are refused."""
    ids, table = op.argument(0, "input"), op.argument(1, "weight")
    if op.argument(3, "max_norm") is not None or op.argument(5, "scale_grad_by_freq", False):
        raise op.unsupported("with max_norm or scale_grad_by_freq")
    padding, rows = op.argument(2, "padding_idx"), table.shape[0]
    return op.through_rule(
        ids,
        {"weight": table},
        lambda ids, grad: embedding_pieces(ids, grad, op.session.workspace, rows, padding),
    )


def _conv(dims: int) -> Handler:
    def handler(op: Contact) -> Any:
        x, weight, bias = op.argument(0, "input"), op.argument(1, "weight"), op.argument(2, "bias")
        stride, padding, dilation = (
            _sizes(op.argument(position, name, default), dims)
            for position, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
        )
        if padding is None or x.ndim != dims + 2:
            raise op.unsupported("with string padding or without a batch dimension")
        groups = op.argument(6, "groups", 1)

        def pieces(x: Tensor, grad: Tensor) -> Iterable[Piece]:
            if op.tracked(bias) is not None:
                yield from bias_pieces(grad)
            if op.tracked(weight) is not None:
                workspace = op.session.workspace
                yield from conv_pieces(x, grad, weight.shape, stride, padding, dilation, groups, workspace)

        return op.through_rule(x, {"weight": weight, "bias": bias}, pieces, rows=True)

    return handler


def _sizes(value: Any, dims: int) -> Any:
    if isinstance(value, str):
        return None if value != "valid" else [0] * dims
    return [value] * dims if isinstance(value, int) else list(value)


for _dims, _function in enumerate((F.conv1d, F.conv2d, F.conv3d), 1):
    contact(_function)(_conv(_dims))


@contact(F.layer_norm, torch.layer_norm)
def layer_norm(op: Contact) -> Any:
    """`layer_norm(x, shape, weight, bias, eps)`."""
    x, shape = op.args[0], list(op.argument(1, "normalized_shape"))
    weight, bias, eps = op.argument(2, "weight"), op.argument(3, "bias"), op.argument(4, "eps", 1e-5)

    def pieces(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        return scale_and_shift(F.layer_norm(x, shape, None, None, eps), grad, len(shape))

    return op.through_rule(x, {"weight": weight, "bias": bias}, pieces)


@contact(F.rms_norm, torch.rms_norm)
def rms_norm(op: Contact) -> Any:
    """`rms_norm(x, shape, weight, eps)`."""
    x, shape = op.args[0], list(op.argument(1, "normalized_shape"))
    weight, eps = op.argument(2, "weight"), op.argument(3, "eps")

    def pieces(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        return scale_and_shift(F.rms_norm(x, shape, None, eps), grad, len(shape))

    return op.through_rule(x, {"weight": weight}, pieces)


@contact(F.group_norm, torch.group_norm)
def group_norm(op: Contact) -> Any:
    """`group_norm(x, groups, weight, bias, eps)`."""
    x, groups = op.args[0], op.argument(1, "num_groups")
    weight, bias, eps = op.argument(2, "weight"), op.argument(3, "bias"), op.argument(4, "eps", 1e-5)

    def pieces(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        return channel_scale_and_shift(F.group_norm(x, groups, None, None, eps), grad)

    return op.through_rule(x, {"weight": weight, "bias": bias}, pieces, rows=True)


@contact(F.batch_norm)
def batch_norm(op: Contact) -> Any:
    """`batch_norm(x, mean, variance, weight, bias, training, momentum, eps)` with running statistics."""
    x, mean, variance = op.args[0], op.argument(1, "running_mean"), op.argument(2, "running_var")
    weight, bias, eps = op.argument(3, "weight"), op.argument(4, "bias"), op.argument(7, "eps", 1e-5)
    if op.argument(5, "training", False) or mean is None:
        raise op.unsupported("with the statistics of the batch mixes samples (call model.eval())")

    def pieces(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        return running_scale_and_shift(x, grad, mean, variance, eps)

    return op.through_rule(x, {"weight": weight, "bias": bias}, pieces, rows=True)
