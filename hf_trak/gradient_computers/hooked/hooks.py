"""Module hooks of one pass. They choose the calls to capture, and take the gradients of these in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_trak._compat import own_parameters, unseen_by_modes
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.environment import removing
from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis, UnsupportedError
from hf_trak.gradient_computers.hooked.batched_op import aligned_rows, sum_rows
from hf_trak.gradient_computers.hooked.hooked_pass import BlockOutput, HookedPass
from hf_trak.gradient_computers.hooked.replay import Replay
from hf_trak.gradient_computers.hooked.rules.linear import linear, linear_pieces
from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, RegisteredRule, find_rule, pieces_of
from hf_trak.gradient_computers.hooked.rules.tensor_parallel import tensor_parallel_rule
from hf_trak.gradient_computers.hooked.traces import (
    LayerCallId,
    ModuleUnsupportedError,
    OpTrace,
    RestartError,
    is_data,
    mark_data,
    tensors_in,
)
from hf_trak.modelout_functions.deferred_logits import DeferredLogits, NotDeferrableError


def emit_slice(own: dict[str, str], blocks: BlockOutput, size: int, first: int, grad: Tensor, hidden: Tensor) -> None:
    """Emit the per-sample gradients of some rows of a head.

    Both sequences of a pair are one sample.

    Args:
        own: names, in the model, of the attributed parameters of the head, by their names in it.
        blocks: where they go.
        size: B, the number of samples.
        first: the first row.
        grad: `(B · sequences, T, rows)`, gradient of what the head returns for these words.
        hidden: `(B · sequences, T, d)`, its inputs.
    """
    grad, hidden = (tensor.reshape(size, -1, tensor.shape[-1]) for tensor in (grad, hidden))
    pieces = linear_pieces(
        hidden, grad, blocks.workspace, "weight" in own, "bias" in own, takes_outer=blocks.takes_outer
    )
    with unseen_by_modes():  # rules and sinks work on plain tensors
        for name, start, block in pieces:
            before = first * hidden.shape[-1] if name == "weight" else first
            blocks.emit(own[name], before + start, block)


def receive_deferred(
    hooked_pass: HookedPass,
    rule: RegisteredRule,
    own: dict[str, str],
    logits: DeferredLogits,
    axes: tuple[BatchAxis, BatchAxis],
) -> None:
    """Have the gradients of a head emitted in the backward pass of the margins of its logits.

    Args:
        hooked_pass: the pass.
        rule: the rule of the head.
        own: names, in the model, of the attributed parameters of the head, by their names in it.
        logits: what the head returned.
        axes: batch dimensions of its input and of its output.

    Raises:
        NotDeferrableError: the batch is not in the first dimension, sequences of a sample are not next to each
            other, or linear layers were given another rule.
    """
    if axes[0] != axes[1] or axes[0] != BatchAxis(0, axes[0].fold):
        raise NotDeferrableError("the batch is not in the first dimension of the hidden states")
    if rule.rule is not linear:
        raise NotDeferrableError("the rule of linear layers was replaced")

    def receive(first: int, grad: Tensor, hidden: Tensor) -> None:
        hooked_pass.received(lambda: emit_slice(own, hooked_pass.blocks, hooked_pass.size, first, grad, hidden))

    logits.head.receive = receive


@dataclass(eq=False)
class LayerHooks:
    """Registers hooks for a [`HookedPass`] and takes them away again.

    Attributes:
        model: the model.
        hooked_pass: the pass.
        selected: names of the attributed parameters by `id`.
    """

    model: nn.Module
    hooked_pass: HookedPass
    selected: dict[int, str]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Return a context in which the hooks are on the model."""
        handles: list[RemovableHandle] = []
        with removing(handles):
            for name, module in self.model.named_modules():
                handler = self._handler_for(name, module)
                if handler is None:
                    continue
                before, after = self._postponing(handler.before), self._postponing(handler.after)
                handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    # first in line, so that it sees what the layer itself computed; called on exceptions, too, because
                    # activation checkpointing ends a recomputation by one
                    module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True),
                ]
            yield

    def _postponing(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a hook so that a pass that other processes make, too, runs to its end before its error is raised."""
        hooked_pass = self.hooked_pass
        if not hooked_pass.postpones:
            return hook

        def run(*args: Any) -> Any:
            if hooked_pass.postponed is not None:
                return None
            try:
                return hook(*args)
            except (RestartError, UnsupportedError) as error:
                if not hooked_pass.postpone(error):
                    raise
                return None

        return run

    def _handler_for(self, name: str, module: nn.Module) -> "_DataMarker | _RuleHandler | _ReplayHandler | None":
        own = {n: self.selected[id(p)] for n, p in own_parameters(module).items() if id(p) in self.selected}
        rule = (find_rule(module, frozenset(own)) or tensor_parallel_rule(module)) if own else None
        if name in self.hooked_pass.model_trace.replayed:
            return _ReplayHandler(self, name, module)
        if rule is not None:
            return _RuleHandler(self.hooked_pass, name, module, rule, own)
        return _DataMarker() if self.hooked_pass.tracing else None


class _DataMarker:
    """Carries the mark "computed from the sample" through modules whose inner operations the tracker cannot see."""

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        # a parameter value has a graph, anything else of this pass has none
        fresh = isinstance(result, Tensor) and not is_data(result) and not result.requires_grad
        if fresh and any(is_data(t) for t in tensors_in(args, kwargs)):
            mark_data(result)


@dataclass(eq=False)
class _RuleHandler:
    """A layer with a rule.

    Attributes:
        hooked_pass: the pass.
        name: name of the layer in the model.
        module: the layer.
        rule: its rule.
        own: names, in the model, of the attributed parameters of the layer, by their names in it.
        stack: one entry per call that has begun and not ended; `None` for a call that is not looked at.
    """

    hooked_pass: HookedPass
    name: str
    module: nn.Module
    rule: RegisteredRule
    own: dict[str, str]
    stack: list[int | None] = field(default_factory=list)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hooked_pass, known = self.hooked_pass, self.hooked_pass.model_trace
        if hooked_pass.bypass_depth or not hooked_pass.recording():
            self.stack.append(None)
            return
        index = hooked_pass.next_index(self.name)
        call: LayerCallId = (self.name, index)
        unknown = hooked_pass.tracing and call not in known.batched_calls and call not in known.unbatched_calls
        if unknown and not any(is_data(t) for t in tensors_in(args, kwargs)):
            # no input comes from the sample: the call is probably made once for the whole batch
            known.unbatched_calls.add(call)
        if not hooked_pass.tracing:
            index = hooked_pass.sample_trace.place(self.name, index)
            call = (self.name, index)
        self.stack.append(index)
        if call not in known.unbatched_calls:
            hooked_pass.bypass_depth += 1  # the rule covers all that happens inside of the layer

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        hooked_pass = self.hooked_pass
        # 1. Undo what `before` did.
        index = self.stack.pop()
        if index is None:
            return None
        unbatched = (self.name, index) in hooked_pass.model_trace.unbatched_calls
        if not unbatched:
            hooked_pass.bypass_depth -= 1
        tensors = list(tensors_in(args, kwargs))
        if not isinstance(result, Tensor):  # the layer raised an exception
            return None
        # looks at shapes, and the capture, are none of the model's own operations, and cost less without the tracker
        with unseen_by_modes():
            return self._seen(index, unbatched, tensors, result)

    def _seen(self, index: int, unbatched: bool, tensors: list[Tensor], result: Tensor) -> Any:
        """Take note of a call, or see to it that its gradient is taken."""
        hooked_pass, known = self.hooked_pass, self.hooked_pass.model_trace
        call: LayerCallId = (self.name, index)
        # 2. For one sample, note the tensors; for a batch, find out where it is in them.
        if hooked_pass.tracing:
            hooked_pass.sample_trace.calls[self.name].append(OpTrace.of(tensors, [result]))
            if not unbatched:
                mark_data(result)
            return None
        x_axis, out_axis = self._axes(hooked_pass.sample_trace.calls[self.name][index], tensors, result)
        # 3. Start again if the call sees the batch and seemed not to, or the other way round.
        if unbatched != (out_axis is None):
            (known.batched_calls if unbatched else known.unbatched_calls).add(call)
            (known.unbatched_calls if unbatched else known.batched_calls).discard(call)
            raise RestartError
        if out_axis is None or x_axis is None:
            return None

        if isinstance(result, DeferredLogits):
            receive_deferred(hooked_pass, self.rule, self.own, result, (x_axis, out_axis))
            return None

        # 4. Keep the input until the gradient of the output arrives.
        def receive(grad: Tensor, kept: tuple[Tensor, ...]) -> None:
            with unseen_by_modes():  # rules and sinks work on plain tensors, without a detour through the tracker
                self._emit(kept[0], x_axis, grad, out_axis)

        return hooked_pass.capture(result, (tensors[0],), receive, self.rule.on_host)

    def _axes(
        self, trace: OpTrace, tensors: list[Tensor], result: Tensor
    ) -> tuple[BatchAxis | None, BatchAxis | None]:
        """Find the batch dimensions of the first input and of the output."""
        try:
            size, orders = self.hooked_pass.size, self.hooked_pass.sample_trace.orders
            x_axis = trace.inputs[0].axis_of(tensors[0], size, orders)
            out_axis = trace.outputs[0].axis_of(result, size, orders)
        except UnsupportedError as error:
            raise ModuleUnsupportedError(self.name, str(error)) from error
        if (x_axis is None) != (out_axis is None):
            raise ModuleUnsupportedError(self.name, "has a batch dimension only in its input or only in its output")
        return x_axis, out_axis

    def _emit(self, x: Tensor, x_axis: BatchAxis, grad: Tensor, grad_axis: BatchAxis) -> None:
        """Apply the rule, and hand on the gradients of the attributed parameters."""
        size, blocks = self.hooked_pass.size, self.hooked_pass.blocks
        x, grad = aligned_rows(x, x_axis, grad, grad_axis, self.rule.rows)
        call = LayerCall(self.module, x, grad, frozenset(self.own), blocks.workspace, blocks.takes_outer)
        pieces = (piece for piece in pieces_of(self.rule.rule(call)) if piece[0] in self.own)
        for name, start, block in sum_rows(pieces, size, grad_axis.fold if self.rule.rows else 1):
            if block.shape[0] != size:
                raise GradientEngineError(
                    f"The layer rule for {type(self.module).__name__} returned {tuple(block.shape)} for parameter "
                    f"{name!r} of module {self.name!r}; expected {size} rows, one per sample."
                )
            blocks.emit(self.own[name], start, block)


class _ReplayHandler:
    """A module that is evaluated again, sample by sample, in the backward pass."""

    def __init__(self, hooks: LayerHooks, name: str, module: nn.Module) -> None:
        """
        Args:
            hooks: the hooks of the pass.
            name: name of the module in the model.
            module: the module.
        """
        self.hooked_pass = hooks.hooked_pass
        self.name = name
        names = {id(p): hooks.selected[id(p)] for p in module.parameters() if id(p) in hooks.selected}
        self.replay = Replay(module, name, names, hooks.hooked_pass)
        self.stack: list[int | None] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hooked_pass = self.hooked_pass
        if hooked_pass.bypass_depth or not hooked_pass.recording():
            self.stack.append(None)
            return
        self.stack.append(hooked_pass.next_index(self.name))
        hooked_pass.bypass_depth += 1

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        hooked_pass = self.hooked_pass
        index = self.stack.pop()
        if index is None:
            return None
        hooked_pass.bypass_depth -= 1
        if result is None:  # the module raised an exception
            return None
        inputs, outputs = self.replay.tensors_of((args, kwargs)), self.replay.tensors_of(result)
        if hooked_pass.tracing:
            with hooked_pass.bypassed():
                hooked_pass.sample_trace.calls[self.name].append(OpTrace.of(inputs, outputs))
            for tensor in outputs:
                mark_data(tensor)
            return None
        if any(id(t) in hooked_pass.tracked for t in inputs):
            raise ModuleUnsupportedError(self.name, "takes a value computed from parameters alone")
        place = hooked_pass.sample_trace.place(self.name, index)
        return self.replay.capture(args, kwargs, result, hooked_pass.sample_trace.calls[self.name][place])
