"""Module hooks of one pass: which calls of which layers are captured, and what a captured call gives in the backward
pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis, UnsupportedError
from hf_trak.gradient_computers.hooked.op_handlers import aligned_rows, sum_rows
from hf_trak.gradient_computers.hooked.replay import Replay
from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, RegisteredRule, find_rule, pieces_of
from hf_trak.gradient_computers.hooked.session import ModuleUnsupportedError, Session
from hf_trak.gradient_computers.hooked.tracker import OpTrace, RestartError, is_data, mark_data, tensors_in


class LayerHooks:
    """Registers hooks for a [`Session`] and takes them away again."""

    def __init__(self, model: nn.Module, session: Session, selected: dict[int, str]) -> None:
        """
        Args:
            model: the model.
            session: the pass.
            selected: names of the attributed parameters by `id`.
        """
        self.model = model
        self.session = session
        self.selected = selected
        self._open: list[tuple[nn.Module, str, int]] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks are on the model inside this context."""
        handles: list[RemovableHandle] = []
        session = self.session
        try:
            for name, module in self.model.named_modules():
                own = {n: self.selected[id(p)] for n, p in module._parameters.items() if id(p) in self.selected}
                rule = find_rule(module, frozenset(own)) if own else None
                if name in session.knowledge.replayed:
                    handler: _Handler = _ReplayHandler(self, name, module)
                elif rule is not None:
                    handler = _RuleHandler(self, name, module, rule, own)
                elif session.calibrating:
                    handler = _DataMarker()
                else:
                    continue
                handles += [
                    module.register_forward_pre_hook(handler.before, with_kwargs=True),
                    # first in line, so that it sees what the layer itself computed; called on exceptions, too, because
                    # activation checkpointing ends a recomputation by one
                    module.register_forward_hook(handler.after, with_kwargs=True, prepend=True, always_call=True),
                ]
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Handler:
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        raise NotImplementedError


class _DataMarker(_Handler):
    """Carries the mark "computed from the sample" through modules whose inner operations the tracker cannot see."""

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        # a parameter value has a graph, anything else of this pass has none
        fresh = isinstance(result, Tensor) and not is_data(result) and not result.requires_grad
        if fresh and any(is_data(t) for t in tensors_in(args, kwargs)):
            mark_data(result)


class _RuleHandler(_Handler):
    """A layer with a rule."""

    def __init__(
        self, hooks: LayerHooks, name: str, module: nn.Module, rule: RegisteredRule, own: dict[str, str]
    ) -> None:
        self.session = hooks.session
        self.name = name
        self.module = module
        self.rule = rule
        self.own = own
        self.stack: list[int | None] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        session, known = self.session, self.session.knowledge
        if session.inside or not session.recording():
            self.stack.append(None)
            return
        index = session.next_index(self.name)
        call = (self.name, index)
        unknown = session.calibrating and call not in known.carrying and call not in known.batchless
        if unknown and not any(is_data(t) for t in tensors_in(args, kwargs)):
            # no input comes from the sample: the call is probably made once for the whole batch
            known.batchless.add(call)
        if not session.calibrating and index >= len(session.profile.calls[self.name]):
            index = self._repeated(index)
            call = (self.name, index)
        self.stack.append(index)
        if call not in known.batchless:
            session.inside += 1

    def _repeated(self, index: int) -> int:
        """The trace for a call that one sample alone did not make: a checkpointed layer is called again."""
        traces = self.session.profile.calls[self.name]
        if not traces:
            raise ModuleUnsupportedError(self.name, "was not called for one sample alone")
        return index % len(traces)

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        session, known = self.session, self.session.knowledge
        index = self.stack.pop()
        if index is None:
            return None
        call = (self.name, index)
        batchless = call in known.batchless
        if not batchless:
            session.inside -= 1
        tensors = list(tensors_in(args, kwargs))
        if not isinstance(result, Tensor):  # the layer raised an exception
            return None
        # a call without a batch leaves the tracker on: it must not take what is looked up here for the model's own
        with session.bypassed():
            if session.calibrating:
                session.profile.calls[self.name].append(OpTrace.of(tensors, [result]))
                if not batchless:
                    mark_data(result)
                return None
            x_axis, out_axis = self._axes(session.profile.calls[self.name][index], tensors, result)
        if batchless != (out_axis is None):
            (known.carrying if batchless else known.batchless).add(call)
            (known.batchless if batchless else known.carrying).discard(call)
            raise RestartError
        if out_axis is None or x_axis is None:
            return None

        def receive(grad: Tensor, kept: tuple[Tensor, ...]) -> None:
            # Rules and sinks work on plain tensors; without this every operation and every look at a shape would go
            # through the tracker in Python.
            with torch._C.DisableTorchFunction():
                self._emit(kept[0], x_axis, grad, out_axis)

        return session.capture(result, (tensors[0],), receive)

    def _axes(
        self, trace: OpTrace, tensors: list[Tensor], result: Tensor
    ) -> tuple[BatchAxis | None, BatchAxis | None]:
        try:
            x_axis = trace.inputs[0].axis_of(tensors[0], self.session.size)
            out_axis = trace.outputs[0].axis_of(result, self.session.size)
        except UnsupportedError as error:
            raise ModuleUnsupportedError(self.name, str(error)) from error
        if (x_axis is None) != (out_axis is None):
            raise ModuleUnsupportedError(self.name, "has a batch dimension only in its input or only in its output")
        return x_axis, out_axis

    def _emit(self, x: Tensor, x_axis: BatchAxis, grad: Tensor, grad_axis: BatchAxis) -> None:
        session = self.session
        assert session.emit is not None
        x, grad = aligned_rows(x, x_axis, grad, grad_axis, self.rule.rows)
        call = LayerCall(self.module, x, grad, frozenset(self.own), session.workspace)
        pieces = (piece for piece in pieces_of(self.rule.rule(call)) if piece[0] in self.own)
        for name, start, block in sum_rows(pieces, session.size, grad_axis.fold if self.rule.rows else 1):
            if block.shape[0] != session.size:
                raise GradientEngineError(
                    f"The layer rule for {type(self.module).__name__} returned {tuple(block.shape)} for parameter "
                    f"{name!r} of module {self.name!r}; expected {session.size} rows, one per sample."
                )
            session.emit(self.own[name], start, block)


class _ReplayHandler(_Handler):
    """A module that is evaluated again, sample by sample, in the backward pass."""

    def __init__(self, hooks: LayerHooks, name: str, module: nn.Module) -> None:
        self.session = hooks.session
        self.name = name
        names = {id(p): hooks.selected[id(p)] for p in module.parameters() if id(p) in hooks.selected}
        self.replay = Replay(module, name, names, hooks.session)
        self.stack: list[int | None] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        session = self.session
        if session.inside or not session.recording():
            self.stack.append(None)
            return
        self.stack.append(session.next_index(self.name))
        session.inside += 1

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        session = self.session
        index = self.stack.pop()
        if index is None:
            return None
        session.inside -= 1
        if result is None:
            return None
        inputs, outputs = self.replay.tensors_of((args, kwargs)), self.replay.tensors_of(result)
        if session.calibrating:
            with session.bypassed():
                session.profile.calls[self.name].append(OpTrace.of(inputs, outputs))
            for tensor in outputs:
                mark_data(tensor)
            return None
        if any(id(t) in session.tracked for t in inputs):
            raise ModuleUnsupportedError(self.name, "takes a value computed from parameters alone")
        traces = session.profile.calls[self.name]
        if not traces:
            raise ModuleUnsupportedError(self.name, "was not called for one sample alone")
        return self.replay.capture(args, kwargs, result, traces[index % len(traces)])
