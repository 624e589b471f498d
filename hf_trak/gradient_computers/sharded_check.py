"""The self-check on a sharded model: the engine's gradients of two samples beside those of plain autograd.

Each sample goes through the model alone, with weight gradients, in the process that has it. In the others, f counts
zero times, so that what FSDP2 reduces over processes is the gradient of that sample. No process holds a whole
gradient: both sides are compared in a small sketch of every parameter, see `tolerance`, whose norm is that of the
gradient up to some percent.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import BatchOutputs, GradientSink, SplitBatch, model_output
from hf_trak.gradient_computers.environment import differentiating, gradients_set_aside, removing
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.padding import CollatedAlone
from hf_trak.gradient_computers.self_check import REMEDY, worst_parameter
from hf_trak.gradient_computers.tolerance import GradientSketch, Tolerance
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side
from hf_trak.runtime.lockstep import Lockstep
from hf_trak.runtime.sharding import RowDivision, flat_spans, reshard
from hf_trak.runtime.zero import is_zero


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
    sketch = GradientSketch(computer.layout)
    found = [sketch.empty(1) for _ in turns]

    def sink(start: int, block: Tensor) -> None:
        for (owner, row), sums in zip(turns, found, strict=True):
            if owner == computer.division.index:
                sketch.add(sums, start, block[row : row + 1])

    outputs = computer.stream_unchecked(batch, sink, side).output
    for sums in found:  # all of them before one is compared, since the other processes add theirs
        computer.lockstep.add(sums)
    for (owner, row), (expected, f), sums in zip(turns, references, found, strict=True):
        if owner == computer.division.index:
            _compare(computer, sketch.layout, expected, sums, f, outputs[row])


def _compare(
    computer: CheckedEngine, layout: ParameterLayout, expected: Tensor, found: Tensor, f: Tensor, together: Tensor
) -> None:
    """Compare sketches `(1, P)` of a gradient, whose places the layout has, and f of its sample.

    Raises:
        GradientEngineError: they differ by more than rounding.
    """
    tolerance = Tolerance.of(computer.model, f).coarsest
    if not (expected.isfinite().all() and f.isfinite()):
        return  # nothing to compare; the consumer of the gradients names the row that is not finite
    if not abs(float(together - f)) <= float(tolerance.output_limits(f[None])[0]):
        raise GradientEngineError(
            f"The model output of a sample depends on the other samples of its batch, or is random: {float(together)} "
            f"in the batch, {float(f)} alone. {REMEDY}"
        )
    worst = worst_parameter(layout, found - expected, expected, tolerance)
    if worst is not None:
        raise GradientEngineError(
            f"The hooked engine gives another gradient for parameter {worst.name!r} of the sharded model than plain "
            f"autograd on the sample alone: relative error {worst.error:.1e}. {REMEDY}"
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
    with gradients_set_aside(parameters.values()), differentiating(model, wanted), computer.gathering():
        with computer.completing():
            f = model_output(task, model, single, side)
        if is_zero(model):
            sums = _sketched_as_they_come((f * float(mine)).sum(), layout, parameters)
        else:
            (f * float(mine)).sum().backward()
            reshard(model)
            sums = _sketched(computer, parameters)
    return computer.lockstep.add(sums), f.detach()[0]


def _sketched(computer: CheckedEngine, parameters: dict[str, Any]) -> Tensor:
    """Sketch the part of the reduced gradients that this process counts for."""
    sketch = GradientSketch(computer.layout)
    sums = sketch.empty(1)
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            continue
        factor = computer.gradient_share(name, gradient)
        if not factor:
            continue
        offset = computer.layout.slot(name).offset
        for start, values in flat_spans(gradient):
            sketch.add(sums, offset + start, values.float()[None] * factor)
    return sums


def _sketched_as_they_come(f: Tensor, layout: ParameterLayout, parameters: dict[str, Any]) -> Tensor:
    """Sketch whole gradients of f as they come, without keeping any. DeepSpeed would reduce kept ones for its
    optimizer."""
    sketch = GradientSketch(layout)
    sums = sketch.empty(1)

    def taking(name: str) -> Callable[[Tensor], Tensor]:
        def take(gradient: Tensor) -> Tensor:
            sketch.add(sums, layout.slot(name).offset, gradient.float().reshape(1, -1))
            return gradient.new_zeros(()).expand_as(gradient)

        return take

    handles = [parameter.register_hook(taking(name)) for name, parameter in parameters.items()]
    with removing(handles):
        torch.autograd.grad(f, list(parameters.values()), allow_unused=True)
    return sums
