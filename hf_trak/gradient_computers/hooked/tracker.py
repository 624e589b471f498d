"""Follow parameters that are used outside of layers with a rule: class tokens, position tables, layer scales, tied
heads.

During the forward pass every call of a torch function goes through [`ParameterTracker`]. A value computed from
parameters alone (a "parameter value": a transposed weight, a table of relative position biases) has no batch
dimension, and is followed with a small autograd graph of its own. Where it meets the batch (an addition, a product,
`F.linear`), a handler sees to it that its gradient arrives per sample, before broadcasting sums it over the batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_trak._compat import opened_attention
from hf_trak.gradient_computers.hooked import op_handlers  # noqa: F401  # registers the handlers of the library
from hf_trak.gradient_computers.hooked.autograd_functions import Trap
from hf_trak.gradient_computers.hooked.batch_axis import UnsupportedError
from hf_trak.gradient_computers.hooked.batched_op import HANDLERS, BatchedOp, OpHandler, ParameterCall
from hf_trak.gradient_computers.hooked.hooked_pass import HookedPass
from hf_trak.gradient_computers.hooked.traces import (
    Lookup,
    OpKey,
    OpTrace,
    ParameterUnsupportedError,
    RestartError,
    Tracked,
    is_data,
    mark_data,
    outputs_of,
    tensors_in,
)
from hf_trak.gradient_computers.hooked.width_traces import step_of
from hf_trak.runtime.transfers import copied_to_host

_CASTS = {Tensor.to, Tensor.type_as}
"""Functions that take no more from their other argument than its dtype and device."""


class ParameterTracker(TorchFunctionMode):
    """See every call of a torch function during one [`HookedPass`], and take apart those with a parameter value."""

    def __init__(self, hooked_pass: HookedPass) -> None:
        """
        Args:
            hooked_pass: the pass.
        """
        super().__init__()
        self.hooked_pass = hooked_pass

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        hooked_pass = self.hooked_pass
        if hooked_pass.bypass_depth or not hooked_pass.recording():
            return func(*args, **kwargs)
        if hooked_pass.steps is not None:
            hooked_pass.steps.append(step_of(func, args, kwargs))
        if func is F.multi_head_attention_forward:
            with self:  # its projections are seen one by one
                return opened_attention(*args, **kwargs)
        tracked = hooked_pass.tracked
        for tensor in tensors_in(args, kwargs):
            if id(tensor) in tracked:
                try:
                    return self._parameter_operation(func, args, kwargs)
                except (RestartError, UnsupportedError) as error:
                    if not hooked_pass.postpone(error):
                        raise
                    return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if hooked_pass.tracing and any(is_data(t) for t in tensors_in(args, kwargs)):
            mark_data(result)
        return result

    def _parameter_operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with a parameter value among its arguments, in one of three ways.

        Raises:
            RestartError: whether it meets the batch is other than it seemed from one sample. The model trace now says
                so, and the pass of one sample has to be made again.
            ParameterUnsupportedError: it mixes parameters with the batch, and has no handler that can take it apart.
        """
        call = self._numbered(func, args, kwargs)
        # 1. Nothing can take it apart, as an earlier pass has found out: an error only if a gradient comes back.
        message = self.hooked_pass.model_trace.trapped.get(call.id)
        if message is not None:
            return self._trapped(call, message)
        # 2. It meets the batch: one sample is traced through it, and in a batch its handler takes over.
        handler = self._handler_of(call)
        if handler is not None:
            return self._trace_batched(call) if self.hooked_pass.tracing else self._handle(call, handler)
        # 3. It computes from parameters alone, and gives another parameter value.
        return self._extend_graph(call)

    def _numbered(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParameterCall:
        """Name the call so that the pass of one sample and that of a batch can tell it by the same name."""
        tracked = self.hooked_pass.tracked
        found = {id(t): tracked[id(t)] for t in tensors_in(args, kwargs) if id(t) in tracked}
        roots = tuple(sorted({root for value in found.values() for root in value.roots}))
        key: OpKey = (roots, name_of(func))
        index = self.hooked_pass.counters[key]
        length = 0 if self.hooked_pass.tracing else len(self.hooked_pass.sample_trace.ops.get(key, ()))
        if length and index >= length:  # a checkpointed block runs again in the backward pass
            index %= length
        return ParameterCall(func, args, kwargs, found, key, index)

    def _handler_of(self, call: ParameterCall) -> OpHandler | None:
        """Return the handler of an operation that meets the batch, `None` if there is none or it does not meet it."""
        registered, known = HANDLERS.get(call.func), self.hooked_pass.model_trace
        if registered is None:
            return None
        # for one sample alone: it meets the batch if another argument was computed from the sample
        if (
            self.hooked_pass.tracing
            and call.id not in known.unbatched_ops
            and any(is_data(t) for t in tensors_in(call.args, call.kwargs))
        ):
            known.batched_ops.add(call.id)
        return registered.handler if call.id in known.batched_ops else None

    def _trapped(self, call: ParameterCall, message: str) -> Any:
        """Run an operation that cannot be taken apart; the gradient of a parameter value in it raises `message`."""
        hooked_pass = self.hooked_pass
        hooked_pass.counters[call.key] += 1

        def trap(tensor: Tensor) -> Tensor:
            if id(tensor) not in call.found:
                return tensor
            value = call.plain(tensor)
            return value if hooked_pass.tracing else Trap.apply(hooked_pass.anchor(value.device), value, message)

        result = call.run(trap)
        if hooked_pass.tracing:
            mark_data(result)
        return result

    def _trace_batched(self, call: ParameterCall) -> Any:
        """Run an operation that meets the batch for one sample, and note its tensors."""
        self.hooked_pass.counters[call.key] += 1
        inputs = [call.plain(t) for t in tensors_in(call.args, call.kwargs)]
        trace = OpTrace.of(inputs, [])  # before the call, which may change them in place
        result = call.run(call.plain)
        trace.outputs = OpTrace.of([], outputs_of(result)).outputs
        self.hooked_pass.sample_trace.ops[call.key].append(trace)
        mark_data(result)
        return result

    def _handle(self, call: ParameterCall, handler: OpHandler) -> Any:
        """Let the handler run an operation that meets the batch.

        Raises:
            ParameterUnsupportedError: the handler cannot.
            RestartError: the operation does not meet the batch after all.
        """
        hooked_pass, known = self.hooked_pass, self.hooked_pass.model_trace
        hooked_pass.counters[call.key] += 1
        try:
            op = BatchedOp(hooked_pass, call, hooked_pass.sample_trace.op(call.key, call.index))
            if op.meets_batch():
                return handler(op)
        except UnsupportedError as error:
            raise ParameterUnsupportedError(call.roots, f"{call.name}: {error}", call.id) from error
        known.batched_ops.discard(call.id)
        known.unbatched_ops.add(call.id)
        raise RestartError

    def _extend_graph(self, call: ParameterCall) -> Any:
        """Run an operation on parameters alone within their small graph, and follow its results.

        Raises:
            ParameterUnsupportedError: a result has another shape than for one sample alone, so the operation does mix
                parameters with the batch, and it has no handler.
            RestartError: the same, and it has a handler.
        """
        hooked_pass = self.hooked_pass
        before = {id(known.value): (known, known.value._version) for known in call.found.values()}
        with hooked_pass.small_graph(), torch.enable_grad():
            result = call.run(call.with_graph)
        outputs = outputs_of(result)
        if not outputs:  # a size, a dtype: not counted as a call
            return result
        hooked_pass.counters[call.key] += 1
        if hooked_pass.tracing:
            hooked_pass.sample_trace.ops[call.key].append(OpTrace.of([], outputs))
            # A class token joined with the sample is data, although it only shows in a batch that the token was
            # expanded: without the mark, every layer behind it would be found out in two passes of its own.
            if call.func not in _CASTS and any(is_data(t) for t in tensors_in(call.args, call.kwargs)):
                mark_data(result)
        else:
            traced = hooked_pass.sample_trace.op(call.key, call.index).outputs
            if any(tensor.shape != alone.trace.shape for tensor, alone in zip(outputs, traced, strict=True)):
                self._require_handler(call)
                hooked_pass.model_trace.batched_ops.add(call.id)
                raise RestartError
        lookup = via = None
        if not hooked_pass.tracing:
            lookup, via = _lookup_of(call), _rows_of(call)
        for tensor in outputs:
            known, version = before.get(id(tensor), (None, 0))
            if known is not None and tensor._version == version:  # what it was, as after `to` the device where it is
                hooked_pass.tracked[id(tensor)] = known
                continue
            if tensor.requires_grad and tensor.is_floating_point():
                hooked_pass.track(tensor, call.roots, lookup, via)
        return result

    def _require_handler(self, call: ParameterCall) -> None:
        if call.func not in HANDLERS or call.id in self.hooked_pass.model_trace.unbatched_ops:
            raise ParameterUnsupportedError(call.roots, f"{call.name} mixes parameters with the batch", call.id)


def _lookup_of(call: ParameterCall) -> Lookup | None:
    """Find out whether an operation does nothing but look rows of one parameter up."""
    names: tuple[str, ...]
    if call.func is F.embedding:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    elif call.func is Tensor.__getitem__ and _is_integers(call.args[1]):
        names = ("weight", "input")
    else:
        return None
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    table, ids = call.found.get(id(given["weight"])), given["input"]
    if table is None or not table.is_parameter or table.value.ndim != 2:
        return None
    if given.get("max_norm") or given.get("scale_grad_by_freq"):
        return None
    return Lookup(
        copied_to_host(ids) or partial(Tensor.detach, ids.clone()), table.value.shape[0], given.get("padding_idx")
    )


def _is_integers(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)


def _rows_of(call: ParameterCall) -> Tracked | None:
    """Return the looked-up rows that an operation is computed from, if it is computed from nothing else."""
    found = {id(known.value): known for known in (known.via or known for known in call.found.values())}
    known = next(iter(found.values()))
    return known if len(found) == 1 and known.lookup is not None else None


def name_of(function: Callable[..., Any]) -> str:
    """Return a readable name of a torch function."""
    return getattr(function, "__name__", repr(function))
