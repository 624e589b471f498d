"""The self-check on a sharded model: the engine's gradients of two samples beside those of plain autograd.

Each sample goes through the model alone, with weight gradients, in the process that has it. In the others, f counts
zero times, so that what FSDP2 reduces over processes is the gradient of that sample. No process holds a whole
gradient: both sides are compared in a small sketch of every parameter (signs drawn for all elements, added up in
`WIDTH` sums), whose norm is that of the gradient up to some percent.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import BatchOutputs, GradientSink, SplitBatch, one_per_sample, run_model
from hf_trak.gradient_computers.environment import differentiating, removing
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.padding import CollatedAlone
from hf_trak.gradient_computers.self_check import REMEDY
from hf_trak.gradient_computers.tolerance import Tolerance
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side
from hf_trak.runtime.lockstep import Lockstep
from hf_trak.runtime.sharding import RowDivision, flat_spans, reshard
from hf_trak.runtime.zero import is_zero

WIDTH = 64
_CHUNK = 1 << 16


class CheckedEngine(Protocol):
    """The engine as the check uses it."""

    model: torch.nn.Module
    modelout_fn: AbstractModelOutput
    layout: ParameterLayout
    division: RowDivision
    lockstep: Lockstep
    collated_alone: CollatedAlone | None

    def stream_unchecked(self, batch: Batch, sink: GradientSink, side: Side) -> BatchOutputs:
        """Stream the gradients of a batch."""

    def completing(self) -> AbstractContextManager[None]:
        """Return a context for one forward pass, which gathers what others wait for if the pass fails."""

    def gathering(self) -> AbstractContextManager[None]:
        """Return a context for a forward and a backward pass, in which ZeRO-3 has layers gathered as they compute."""

    def gradient_share(self, name: str, gradient: Tensor) -> float:
        """Return the factor on this process' part of a reduced gradient; zero where another process counts for it."""


class GradientSketch:
    """Sketches `(parameters, WIDTH)` of one gradient, to which parts are added in any order."""

    def __init__(self, layout: ParameterLayout) -> None:
        """
        Args:
            layout: the attributed parameters.
        """
        self._layout = layout
        self._places = {slot.name: index for index, slot in enumerate(layout.slots)}
        self.sums = torch.zeros(len(layout.slots), WIDTH, dtype=torch.float64)

    def add(self, name: str, start: int, values: Tensor) -> None:
        """Add the elements of a parameter's flattened gradient from position `start`."""
        index = self._places[name]
        values = values.detach().to("cpu", torch.float64).reshape(-1)
        while values.numel():
            chunk, within = divmod(start, _CHUNK)
            part, values = values[: _CHUNK - within], values[_CHUNK - within :]
            row = torch.zeros(_CHUNK, dtype=torch.float64)
            row[within : within + part.numel()] = part
            self.sums[index] += (row * self._signs(index, chunk)).view(-1, WIDTH).sum(0)
            start += part.numel()

    def _signs(self, index: int, chunk: int) -> Tensor:
        generator = torch.Generator().manual_seed((index << 32) + chunk)
        return torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.float64) * 2 - 1

    def add_columns(self, start: int, values: Tensor) -> None:
        """Add columns of the whole gradient vector, which may belong to several parameters."""
        for slot in self._layout.slots:
            first, last = max(start, slot.offset), min(start + values.numel(), slot.offset + slot.numel)
            if first < last:
                self.add(slot.name, first - slot.offset, values[first - start : last - start])


def check_together(computer: CheckedEngine, batch: Batch, side: Side, asking: Sequence[int]) -> None:
    """Compare the gradients of two samples of the processes that ask for it. All processes call this together.

    Args:
        computer: the engine.
        batch: the batch of this process.
        side: whether its samples are training examples or targets.
        asking: ranks of the processes that ask.

    Raises:
        GradientEngineError: gradients or f differ, in the process that has the sample.
    """
    owners = sorted({computer.division.of_rank[rank] for rank in asking})[:2]
    size = SplitBatch.of(batch).size
    turns = [(owner, 0 if turn == 0 else size - 1) for turn, owner in enumerate([owners[0], owners[-1]])]
    if len(owners) == 1 and size == 1:
        turns[1] = (owners[0], 0)
    references = [_reference(computer, batch, side, owner, row) for owner, row in turns]
    found = [GradientSketch(computer.layout) for _ in turns]

    def sink(start: int, block: Tensor) -> None:
        for (owner, row), sketch in zip(turns, found, strict=True):
            if owner == computer.division.index:
                sketch.add_columns(start, block[row])

    outputs = computer.stream_unchecked(batch, sink, side).output
    for sketch in found:  # all of them before one is compared, since the other processes add theirs
        computer.lockstep.add(sketch.sums)
    for (owner, row), (expected, f), sketch in zip(turns, references, found, strict=True):
        if owner == computer.division.index:
            _compare(computer, expected, sketch.sums, f, outputs[row])


def _compare(computer: CheckedEngine, expected: Tensor, found: Tensor, f: Tensor, together: Tensor) -> None:
    tolerance = Tolerance.of(computer.model, f).coarsest
    if not (expected.isfinite().all() and f.isfinite()):
        return  # nothing to compare; the consumer of the gradients names the row that is not finite
    if not abs(float(together - f)) <= float(tolerance.output_limits(f[None])[0]):
        raise GradientEngineError(
            f"The model output of a sample depends on the other samples of its batch, or is random: {float(together)} "
            f"in the batch, {float(f)} alone. {REMEDY}"
        )
    norms, errors = expected.norm(dim=1)[None], (found - expected).norm(dim=1)[None]
    limits = tolerance.limits(norms, norms.norm(dim=1))
    wrong = ~(errors <= limits)
    if bool(wrong.any()):
        index = int((errors - limits).nan_to_num(torch.inf).argmax())
        name = computer.layout.slots[index].name
        relative = float(errors[0, index] / norms[0, index].clamp_min(1e-30))
        raise GradientEngineError(
            f"The hooked engine gives another gradient for parameter {name!r} of the sharded model than plain "
            f"autograd on the sample alone: relative error {relative:.1e}. {REMEDY}"
        )


def _reference(computer: CheckedEngine, batch: Batch, side: Side, owner: int, row: int) -> tuple[Tensor, Tensor]:
    """Take the gradient of one sample of one group by plain autograd.

    Returns:
        Its sketch, in every process, and f of the sample (in its group).
    """
    model, task, layout = computer.model, computer.modelout_fn, computer.layout
    assert isinstance(task, BatchedModelOutput)
    mine = owner == computer.division.index
    row = row if mine else 0
    split = SplitBatch.of(batch)
    single = split.rows(row, row + 1)
    if mine and computer.collated_alone is not None:
        single = computer.collated_alone(row)
    reshard(model)
    parameters = {name: p for name, p in model.named_parameters() if name in set(layout.names)}
    wanted = {id(p) for p in parameters.values()}
    with _own_gradients(parameters), differentiating(model, wanted), computer.gathering():
        with computer.completing():
            result = run_model(task, model, single)
            f = one_per_sample(task.output(result, single, side), 1, task)
        if is_zero(model):
            sketch = _sketched_as_they_come((f * float(mine)).sum(), computer, parameters)
        else:
            (f * float(mine)).sum().backward()
            reshard(model)
            sketch = _sketched(computer, parameters)
    return computer.lockstep.add(sketch.sums), f.detach()[0]


def _sketched(computer: CheckedEngine, parameters: dict[str, Any]) -> GradientSketch:
    """Sketch the part of the reduced gradients that this process counts for."""
    sketch = GradientSketch(computer.layout)
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            continue
        factor = computer.gradient_share(name, gradient)
        if not factor:
            continue
        for start, values in flat_spans(gradient):
            sketch.add(name, start, values.double() * factor)
    return sketch


def _sketched_as_they_come(f: Tensor, computer: CheckedEngine, parameters: dict[str, Any]) -> GradientSketch:
    """Sketch whole gradients of f as they come, without keeping any. DeepSpeed would reduce kept ones for its
    optimizer."""
    sketch = GradientSketch(computer.layout)

    def taking(name: str) -> Callable[[Tensor], Tensor]:
        def take(gradient: Tensor) -> Tensor:
            sketch.add(name, 0, gradient)
            return gradient.new_zeros(()).expand_as(gradient)

        return take

    handles = [parameter.register_hook(taking(name)) for name, parameter in parameters.items()]
    with removing(handles):
        torch.autograd.grad(f, list(parameters.values()), allow_unused=True)
    return sketch


@contextmanager
def _own_gradients(parameters: dict[str, Any]) -> Iterator[None]:
    """Set the gradients that parameters have aside."""
    saved = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = saved[name]
