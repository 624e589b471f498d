"""Traces of one sample at widths at which no sample was traced.

Text is padded to the longest row of its batch, so that nearly every batch has a width of its own. To trace a sample
at each takes a third of the time of a small model. But what a trace says about a width is mostly what it says about
any other: the same calls in the same order, with the batch in the same dimensions, of tensors whose sizes are linear
in the width. Once samples of a few widths have shown that, the trace at another width is computed, and the batch must
confirm it:

- every tensor that the engine looks at has exactly the size that was computed, times B in the batch's dimension;
- the model calls the same layers and torch functions, in an order that was seen in a batch with a traced sample. It
  includes the arguments that say how dimensions are reordered.

A model that takes another way at some widths, or whose sizes are not linear (chunks, strides), fails to confirm: a
sample is then traced as before, and what the pass had noted about the model is forgotten. Either way the gradients
have the same bits, because a trace only says where the batch is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis, TensorTrace
from hf_trak.gradient_computers.hooked.traces import OpTrace, SampleTrace, TracedTensor

Steps = tuple[Any, ...]
"""Layers and torch functions of a forward pass, in order."""

LEAST_WIDTHS = 2
"""Widths at which a sample is traced before a trace is computed."""

MOST_FAILURES = 4
"""Traces that are not confirmed, after which none is computed any more: each costs a forward pass."""

_MOST_KEPT = 32
_UNKNOWN = torch.Size([-1])
_ROUNDING = 1e-6

_REORDERING_NAMES = "transpose permute movedim moveaxis swapaxes swapdims einsum stack cat concat unbind"
_REORDERING = {
    getattr(space, name)
    for space in (torch, Tensor)
    for name in _REORDERING_NAMES.split()
    if callable(getattr(space, name, None))
}


def step_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Name a call of a torch function: the function, and how it reorders dimensions."""
    if func not in _REORDERING:
        return func
    return func, *(_numbers(value) for value in (*args, *kwargs.values()))


def _numbers(value: Any) -> Any:
    """Return numbers and words as they are, and nothing of tensors."""
    if isinstance(value, int | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(_numbers(item) for item in value if not isinstance(item, Tensor))
    return None


@dataclass(frozen=True)
class WidthObservation:
    """A sample that was traced.

    Attributes:
        sizes: sizes of the tensors of the sample's batch, without B.
        trace: the trace, after a batch has shown where it is.
    """

    sizes: tuple[int, ...]
    trace: SampleTrace


@dataclass
class WidthFamily:
    """Batches that differ in the sizes of their tensors alone.

    Attributes:
        observations: the samples that were traced.
        orders: the steps of batches after them.
        alike: whether all traces have the same calls with the batch in the same dimensions.
        failures: traces that were computed and not confirmed.
    """

    observations: list[WidthObservation] = field(default_factory=list)
    orders: set[Steps] = field(default_factory=set)
    alike: bool = True
    failures: int = 0

    def learn(self, sizes: tuple[int, ...], trace: SampleTrace, steps: Steps) -> None:
        """Note a sample that was traced, and the steps of the batch after it."""
        self.orders.add(steps)
        if self.observations and not _alike(self.observations[0].trace, trace):
            self.alike = False
        if len(self.observations) < _MOST_KEPT:
            self.observations.append(WidthObservation(sizes, trace))

    def foretell(self, sizes: tuple[int, ...]) -> SampleTrace | None:
        """Compute the trace of a sample, `None` if the samples so far do not determine it."""
        if not self.alike or self.failures >= MOST_FAILURES or len(self.observations) < LEAST_WIDTHS:
            return None
        rows = [observation.sizes for observation in self.observations]
        # sizes that are the same in all tensors (ids, mask, labels) are one variable
        columns = sorted(set(zip(*rows, sizes, strict=True)))
        table = torch.tensor([[1] * (len(rows) + 1), *columns], dtype=torch.float64).T
        varying = [0, *(i for i in range(1, table.shape[1]) if len(set(table[:, i].tolist())) > 1)]
        table = table[:, varying]
        if torch.linalg.matrix_rank(table[:-1]) < table.shape[1]:
            return None
        return _fitted([observation.trace for observation in self.observations], table)


def family_of(families: dict[Any, WidthFamily], signature: tuple[Any, ...]) -> tuple[WidthFamily, tuple[int, ...]]:
    """Find the family of a kind of batches, and the sizes by which the kind differs from others of it.

    Args:
        families: the families of a model's batches; a new one is added.
        signature: `(side, training, ((key, shape of a sample, dtype), …), constants)`.
    """
    side, training, tensors, constants = signature
    ranks = tuple((key, len(shape), dtype) for key, shape, dtype in tensors)
    family = families.setdefault((side, training, ranks, constants), WidthFamily())
    return family, tuple(size for _, shape, _ in tensors for size in shape)


def _tensors(trace: SampleTrace) -> list[TracedTensor]:
    """List all tensors of a trace, in a fixed order."""
    calls = [call for calls in (*trace.calls.values(), *trace.ops.values()) for call in calls]
    return [tensor for call in calls for tensor in (*call.inputs, *call.outputs)]


def _outline(trace: SampleTrace) -> list[Any]:
    """Name the calls of a trace, with the numbers of their tensors."""
    return [
        (key, [(len(call.inputs), len(call.outputs)) for call in calls])
        for key, calls in (*trace.calls.items(), *trace.ops.items())
    ]


def _alike(one: SampleTrace, other: SampleTrace) -> bool:
    """Tell whether two traces have the same calls, with the batch in the same dimensions."""
    if _outline(one) != _outline(other):
        return False
    return all(_fits(a, b) for a, b in zip(_tensors(one), _tensors(other), strict=True))


def _fits(one: TracedTensor, other: TracedTensor) -> bool:
    if len(one.trace.shape) != len(other.trace.shape):
        return False
    if not (one.resolved and other.resolved) or one.axis is None or other.axis is None:
        return one.resolved != other.resolved or one.axis == other.axis
    folded = one.axis.fold > 1 and other.axis.fold > 1  # a single row is neither first nor last
    return one.axis.dim == other.axis.dim and (not folded or one.axis.major == other.axis.major)


def _fitted(traces: list[SampleTrace], table: Tensor) -> SampleTrace | None:
    """Compute the trace at the sizes in the last row of a table from those at the others.

    Args:
        traces: traces that are alike.
        table: `(traces + 1, 1 + variables)`, ones and the sizes of the samples.

    Returns:
        `SampleTrace` or `None`: `None` if the sizes of a tensor that matters are not linear in those of the samples.
    """
    records = [_tensors(trace) for trace in traces]
    shapes = torch.tensor([[size for t in tensors for size in t.trace.shape] for tensors in records]).double()
    coefficients = torch.linalg.lstsq(table[:-1], shapes).solution
    exact = ((table[:-1] @ coefficients - shapes).abs() <= _ROUNDING * (1 + shapes)).all(0)
    values = table[-1] @ coefficients
    sizes = values.round()
    exact &= ((values - sizes).abs() <= _ROUNDING * (1 + values.abs())) & (sizes >= 0)
    rest, known = iter(sizes.long().tolist()), iter(exact.tolist())
    made: list[TracedTensor] = []
    for same in zip(*records, strict=True):
        shape = torch.Size(next(rest) for _ in same[0].trace.shape)
        linear = min([next(known) for _ in shape], default=True)  # all of them, also after the first that is not
        if not linear and same[0].resolved:
            return None
        made.append(_carried_over(same, shape if linear else _UNKNOWN))
    return _like(traces[0], iter(made))


def _carried_over(same: tuple[TracedTensor, ...], shape: torch.Size) -> TracedTensor:
    """Make the trace of a tensor of this shape, with the batch where it is at other widths."""
    traced = TracedTensor(TensorTrace(shape, None))
    if not all(tensor.resolved for tensor in same):
        return traced
    axes = [tensor.axis for tensor in same]
    if axes[0] is None:
        traced.resolved = True
        return traced
    dim, fold = axes[0].dim, shape[axes[0].dim]
    orders = {axis.major for axis in axes if axis is not None and axis.fold > 1}
    if fold > 1 and len(orders) != 1:
        return traced  # no sample has shown in which order rows are: the batch will not confirm this
    traced.axis = BatchAxis(dim, fold, fold == 1 or orders.pop())
    traced.resolved = True
    return traced


def _like(pattern: SampleTrace, tensors: Iterator[TracedTensor]) -> SampleTrace:
    """Make a trace with the calls of another one, and with other tensors."""

    def made(call: OpTrace) -> OpTrace:
        inputs = [next(tensors) for _ in call.inputs]
        return OpTrace(inputs, [next(tensors) for _ in call.outputs])

    trace = SampleTrace(foretold=True)
    trace.calls.update((name, [made(call) for call in calls]) for name, calls in pattern.calls.items())
    trace.ops.update((key, [made(call) for call in calls]) for key, calls in pattern.ops.items())
    return trace
