"""Operations in which parameter values meet the batch, and the registry of the functions that handle them.

A handler receives a [`BatchedOp`] and returns the result of the operation, built so that the gradients of the
parameter values arrive per sample, before broadcasting sums them over the batch. There are two ways to do that:

- values that are broadcast (added, multiplied) are expanded along the batch dimension first, [`BatchedOp.per_sample`],
  so that autograd itself keeps the samples apart;
- weights of linear maps, convolutions, lookups and norms are used as they are, and a formula takes the per-sample
  gradient from the input and the output gradient, [`BatchedOp.through_rule`].
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis
from hf_trak.gradient_computers.hooked.hooked_pass import HookedPass
from hf_trak.gradient_computers.hooked.rules.registry import Piece, RuleResult, pieces_of
from hf_trak.gradient_computers.hooked.traces import (
    OpCallId,
    OpKey,
    OpTrace,
    ParameterUnsupportedError,
    Tracked,
    outputs_of,
    replace_tensors,
    tensors_in,
)
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, TakesOuter, Workspace


def aligned_rows(
    x: Tensor, x_axis: BatchAxis, grad: Tensor, grad_axis: BatchAxis, rows: bool
) -> tuple[Tensor, Tensor]:
    """Bring the batch of an input and an output gradient to the front.

    Args:
        x: the input.
        x_axis: its batch dimension.
        grad: the gradient of the output.
        grad_axis: the batch dimension of the output.
        rows: whether the rule takes one leading dimension, see [`RegisteredRule`].

    Returns:
        Both as `(B, *)`; folded rows as `(B, fold, *)`, or as `(B · fold, *)` if `rows`.
    """
    x, grad = x_axis.rows_first(x), grad_axis.rows_first(grad)
    if rows:
        x = x.flatten(0, 1) if x_axis.fold > 1 else x
        grad = grad.flatten(0, 1) if grad_axis.fold > 1 else grad
    return x, grad


def sum_rows(pieces: Iterable[Piece], size: int, fold: int) -> Iterator[Piece]:
    """Add up the rows of each sample: pieces of `(size · fold, n)` become `(size, n)`."""
    for name, start, block in pieces:
        if fold == 1:
            yield name, start, block
        elif isinstance(block, OuterBlock):
            yield name, start, block.joined(fold)
        else:
            yield name, start, block.view(size, fold, -1).sum(1)


@dataclass(frozen=True)
class ParameterCall:
    """One call of a torch function with a parameter value among its arguments.

    Attributes:
        func: the torch function.
        args, kwargs: its arguments.
        found: the parameter values among them, by `id` of the tensor.
        key: the parameters that they come from, and the name of the function.
        index: how many calls with that key came before in this pass.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: dict[int, Tracked]
    key: OpKey
    index: int

    @property
    def id(self) -> OpCallId:
        """Return what the same call has in common in all passes."""
        return self.key, self.index

    @property
    def roots(self) -> tuple[str, ...]:
        """Return the names of the parameters that the values come from."""
        return self.key[0]

    @property
    def name(self) -> str:
        """Return the name of the torch function."""
        return self.key[1]

    def run(self, replacement: Callable[[Tensor], Tensor]) -> Any:
        """Call the function with every tensor among its arguments replaced."""
        args = (replace_tensors(a, replacement) for a in self.args)
        return self.func(*args, **{k: replace_tensors(v, replacement) for k, v in self.kwargs.items()})

    def with_graph(self, tensor: Tensor) -> Tensor:
        """Return a parameter value with its small graph, and any other tensor as it is."""
        tracked = self.found.get(id(tensor))
        return tensor if tracked is None else tracked.value

    def plain(self, tensor: Tensor) -> Tensor:
        """Return a parameter value without its small graph, and any other tensor as it is."""
        tracked = self.found.get(id(tensor))
        return tensor if tracked is None else tracked.value.detach()


class BatchedOp:
    """One operation of a batched pass in which parameter values and the batch come together.

    Attributes:
        func (`Callable`): the torch function.
        args (`tuple`), kwargs (`dict`): its arguments.
        tensors (`list[torch.Tensor]`): the tensors among them, in order.
        size (`int`): B, the number of samples.
        call (`ParameterCall`): the call as the tracker sees it.
        trace (`OpTrace`): the same call for one sample alone.
        hooked_pass (`HookedPass`): the pass.
    """

    def __init__(self, hooked_pass: HookedPass, call: ParameterCall, trace: OpTrace) -> None:
        """
        Args:
            hooked_pass: the pass.
            call: the call.
            trace: the same call for one sample alone.

        Raises:
            ParameterUnsupportedError: that one had another number of tensors among its arguments.
        """
        self.hooked_pass = hooked_pass
        self.call = call
        self.trace = trace
        self.func = call.func
        self.args = call.args
        self.kwargs = call.kwargs
        self.size = hooked_pass.size
        self.tensors = list(tensors_in(call.args, call.kwargs))
        if len(self.tensors) != len(trace.inputs):
            raise self.unsupported("was called with other arguments for one sample alone")

    @property
    def workspace(self) -> Workspace:
        """Return the scratch memory for blocks of gradients."""
        return self.hooked_pass.blocks.workspace

    @property
    def takes_outer(self) -> TakesOuter | None:
        """Return the predicate that tells which blocks to pass on as two factors, see [`LayerCall`]."""
        return self.hooked_pass.blocks.takes_outer

    def unsupported(self, reason: str) -> ParameterUnsupportedError:
        """Return the error for a handler to raise where it cannot handle the operation; it names the parameters.

        The smallest module around the operation is then differentiated sample by sample.
        """
        return ParameterUnsupportedError(self.call.roots, f"{self.call.name} {reason}")

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def tracked(self, tensor: Tensor | None) -> Tracked | None:
        """Return the parameter value behind an argument, `None` if it is none."""
        return self.call.found.get(id(tensor))

    def axis(self, tensor: Tensor) -> BatchAxis | None:
        """Find the batch dimension of an argument, `None` if it has none.

        Raises:
            UnsupportedError: the tensor is no argument, or its batch dimension cannot be told.
        """
        for candidate, traced in zip(self.tensors, self.trace.inputs, strict=True):
            if candidate is tensor:
                return traced.axis_of(tensor, self.size, self.hooked_pass.sample_trace.orders)
        raise self.unsupported("has an argument that was not traced")

    def output_axis(self, output: Tensor) -> BatchAxis | None:
        """Find the batch dimension of the result, `None` if it has none.

        Raises:
            UnsupportedError: it cannot be told.
        """
        return self.trace.outputs[0].axis_of(output, self.size, self.hooked_pass.sample_trace.orders)

    def meets_batch(self) -> bool:
        """Tell whether the batch is in an argument, or may come into being in the result."""
        if any(self.axis(t) is not None for t in self.tensors if self.tracked(t) is None):
            return True
        return HANDLERS[self.func].creates_batch

    def run(self, replacement: Callable[[Tensor], Tensor]) -> Any:
        """Call the torch function with every tensor among its arguments replaced."""
        return self.call.run(replacement)

    def plain(self, tensor: Tensor) -> Tensor:
        """Return a parameter value without its small graph, and any other tensor as it is."""
        return self.call.plain(tensor)

    def track(self, value: Tensor) -> Tracked:
        """Follow a tensor that the handler has computed from the parameter values alone."""
        return self.hooked_pass.track(value, self.call.roots)

    def per_sample(self, tracked: Tracked, axis: BatchAxis, rank: int) -> Tensor:
        """Expand a parameter value along the batch dimension, see [`HookedPass.per_sample`]."""
        return self.hooked_pass.per_sample(tracked, axis, rank)

    def without_batch(self) -> Any:
        """Run the operation within the small graph of parameter values: its result has no batch dimension."""
        with self.hooked_pass.small_graph():
            result = self.run(self.call.with_graph)
        for tensor in outputs_of(result):
            self.track(tensor)
        return result

    def through_rule(
        self,
        x: Tensor,
        weights: dict[str, Tensor | None],
        pieces: Callable[[Tensor, Tensor], RuleResult],
        rows: bool = False,
        on_host: bool = False,
    ) -> Any:
        """Run the operation with plain weights, and take their gradients by a formula in the backward pass.

        Args:
            x (`torch.Tensor`): the argument that carries the batch.
            weights (`dict[str, torch.Tensor | None]`): the weight arguments, by the names that the formula gives them.
            pieces (`Callable`): `pieces(x, grad)`, both batch first, gives the gradients as a layer rule does: a dict
                of `(B, *shape)`, or an iterable of [`Piece`]s.
            rows (`bool`, *optional*, defaults to `False`): whether the operation takes exactly one leading dimension,
                see [`RegisteredRule`].
            on_host (`bool`, *optional*, defaults to `False`): whether the formula takes `x` in host memory.

        Returns:
            `torch.Tensor`: the result of the operation.

        Raises:
            UnsupportedError: `x` is a parameter value, or input or result have no batch dimension.
        """
        targets = {name: t for name, weight in weights.items() if (t := self.tracked(weight)) is not None}
        if self.tracked(x) is not None or len(targets) != len(self.call.found):
            raise self.unsupported("takes a parameter as its input")
        x_axis = self.axis(x)
        if x_axis is None:
            raise self.unsupported("has no batch dimension in its input")
        out = self.run(self.plain)
        out_axis = self.output_axis(out)
        if out_axis is None:
            raise self.unsupported("has no batch dimension in its result")

        def receive(grad: Tensor, kept: tuple[Tensor, ...]) -> None:
            result = pieces(*aligned_rows(kept[0], x_axis, grad, out_axis, rows))
            wanted = (piece for piece in pieces_of(result) if piece[0] in targets)
            self.hooked_pass.deposit_pieces(targets, sum_rows(wanted, self.size, out_axis.fold if rows else 1))

        return self.hooked_pass.capture(out, (x,), receive, on_host)


OpHandler = Callable[[BatchedOp], Any]

"""Returns the result of the operation."""


@dataclass(frozen=True)
class RegisteredHandler:
    """A handler, and whether the batch dimension may come into being in its operation (`token.expand(B, 1, D)`)."""

    handler: OpHandler
    creates_batch: bool


HANDLERS: dict[Callable[..., Any], RegisteredHandler] = {}

"""The handlers by torch function. Those of the library are in `op_handlers`."""


def register_op_handler(
    *functions: Callable[..., Any], creates_batch: bool = False
) -> Callable[[OpHandler], OpHandler]:
    """Decorate a function that handles operations in which parameter values meet the batch.

    The self-check of the engine compares its gradients with plain autograd on the first batch.

    Args:
        functions (`Callable`): the torch functions (`torch.prelu`), methods of tensors (`torch.Tensor.expand`)
            included. A later registration replaces an earlier one.
        creates_batch (`bool`, *optional*, defaults to `False`): whether the batch dimension may come into being in the
            operation, so that no argument has it.

    Returns:
        `Callable`: the decorator, which returns the function as it is.
    """

    def decorator(handler: OpHandler) -> OpHandler:
        for function in functions:
            HANDLERS[function] = RegisteredHandler(handler, creates_batch)
        return handler

    return decorator


def unregister_op_handler(*functions: Callable[..., Any]) -> None:
    """Forget the handlers of these torch functions.

    Raises:
        KeyError: one of them has no handler.
    """
    for function in functions:
        del HANDLERS[function]
