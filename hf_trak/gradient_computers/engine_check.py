"""The self-check, second half: an engine's gradients of the first batch beside those of two samples taken alone."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import (
    AbstractGradientComputer,
    BatchOutputs,
    GradientSink,
    SplitBatch,
    gradients_of,
    model_output,
    one_per_sample,
    run_model,
)
from hf_trak.gradient_computers.environment import differentiating, pass_settings
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, OuterSink, TakesOuter
from hf_trak.gradient_computers.self_check import (
    REMEDY,
    Reference,
    Samples,
    SamplesMixedError,
    outputs_differ,
    worst_parameter,
)
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.deferred_logits import in_chunks

KEPT_BYTES = 2**26

"""Bytes of a batch's gradients up to which they are kept until they are checked."""


@dataclass
class KeptPass:
    """Blocks of one pass over a batch, which wait until the pass is checked.

    Attributes:
        sink: where they are meant to go. The pass is asked for what it takes.
        device: where it wants them; `None` leaves them where they are.
        blocks: their first columns, and the blocks or their factors.
        outputs: the other results of the pass; `None` as long as it has not come to its end.
        held_bytes: bytes of the blocks.
    """

    sink: GradientSink
    device: torch.device | str | None
    blocks: list[tuple[int, Tensor | OuterBlock]] = field(default_factory=list)
    outputs: BatchOutputs | None = None
    held_bytes: int = 0

    def begin(self) -> None:
        """Forget what came of another pass."""
        self.blocks, self.outputs, self.held_bytes = [], None, 0

    def take(self, start: int, block: Tensor | OuterBlock) -> None:
        """Copy a block, unless there are too many bytes by now."""
        parts = (block,) if isinstance(block, Tensor) else (block.left, block.right)
        self.held_bytes += sum(part.numel() * part.element_size() for part in parts)
        if self.held_bytes > KEPT_BYTES:
            self.blocks.clear()
            return
        copies = [part.clone() for part in parts]
        self.blocks.append((start, copies[0] if isinstance(block, Tensor) else OuterBlock(*copies)))

    def hand_on(self) -> BatchOutputs | None:
        """Push the blocks into the sink.

        Returns:
            [`BatchOutputs`] or `None`: `None` if the pass was not kept, and nothing was pushed.
        """
        if self.outputs is None or self.held_bytes > KEPT_BYTES:
            return None
        for start, block in self.blocks:
            self._push(start, block)
        return self.outputs

    def _push(self, start: int, block: Tensor | OuterBlock) -> None:
        if isinstance(block, Tensor):
            self.sink(start, block.to(device=self.device))
        else:
            assert isinstance(self.sink, OuterSink)  # no one else is given factors
            self.sink.add_outer(start, block.left.to(device=self.device), block.right.to(device=self.device))


@runtime_checkable
class RenewableSink(Protocol):
    """A [`GradientSink`] that can forget what it was given, such as the blocks of an engine that is refused."""

    def renew(self) -> None:
        """Begin anew."""


@dataclass
class ForwardedPass(KeptPass):
    """Blocks of one pass over a batch, which go on to a [`RenewableSink`] while the pass is checked.

    Attributes:
        failure: the error of the sink, which is no engine's.
        begun: whether the sink has a block.
    """

    failure: Exception | None = None
    begun: bool = False

    def begin(self) -> None:
        """Have the sink forget what came of another pass."""
        super().begin()
        if self.begun:
            assert isinstance(self.sink, RenewableSink)  # others are given no such pass
            self.sink.renew()

    def take(self, start: int, block: Tensor | OuterBlock) -> None:
        """Push a block into the sink."""
        self.begun = True
        try:
            self._push(start, block)
        except Exception as error:
            self.failure = error
            raise


_KINK = 0.05

"""Relative error of a parameter's gradient that the slopes of single units may explain, see [`_is_in_batch`]."""


def check_batch_independence(
    reference: Reference, task: BatchedModelOutput, batch: Batch, side: Side, model: torch.nn.Module
) -> None:
    """Compare f of the samples within the batch with f of each of them alone.

    An error in the batch itself (labels that are no classes) shows here, in an ordinary forward pass, and not while an
    engine is tried.

    Args:
        reference: f of samples alone.
        task: the task.
        batch: the whole batch.
        side: whether its samples are training examples or targets.
        model: the model.

    Raises:
        SamplesMixedError: they differ, so that no engine can help.
    """
    size = SplitBatch.of(batch).size
    with torch.no_grad(), pass_settings(model):
        result = run_model(task, model, batch)
        together = one_per_sample(task.output(result, batch, side), size, task)
        task.out_to_loss_grad(result, batch, side)
    picked = together[torch.tensor(reference.rows, device=together.device)].to(reference.output)
    if outputs_differ(reference, picked):
        raise SamplesMixedError(
            f"The model output of a sample depends on the other samples of its batch: {picked.tolist()} in the batch, "
            f"{reference.output.tolist()} alone. {REMEDY}"
        )


@dataclass
class BatchIndependence:
    """[`check_batch_independence`], made at most once for a batch, and only where it is needed.

    An engine that passes the whole batch through the model shows the same by its own f.

    Attributes:
        reference: f of samples alone.
        samples: the samples, and their batch.
        task: the task; one without a batched form takes samples one at a time, and cannot mix them.
        model: the model.
        known: whether the check was made, or f has shown the same.
    """

    reference: Reference
    samples: Samples
    task: AbstractModelOutput
    model: torch.nn.Module
    known: bool = False

    def require(self) -> None:
        """Make the check, unless it was made.

        Raises:
            SamplesMixedError: f of a sample depends on the others.
        """
        task, batch, side = self.task, self.samples.batch, self.samples.side
        alone = SplitBatch.of(batch).size == 1
        if not self.known and not alone and isinstance(task, BatchedModelOutput) and not task.row_by_row:
            in_chunks(self.model, lambda: check_batch_independence(self.reference, task, batch, side, self.model))
        self.known = True

    def shown_by(self, output: Tensor) -> None:
        """Take f `(B,)` of a pass of the whole batch in place of the check; where it differs, make the check.

        Raises:
            SamplesMixedError: f of a sample depends on the others.
        """
        rows = torch.tensor(self.reference.rows, device=output.device)
        if not self.known and outputs_differ(self.reference, output[rows].to(self.reference.output)):
            self.require()
        self.known = True


class _CheckingSink:
    """Subtracts an engine's gradients from the reference, block by block in place, and hands them on if asked to."""

    def __init__(self, reference: Reference, kept: KeptPass | None) -> None:
        self.reference = reference
        self.kept = kept
        self.residual = reference.gradients.clone()
        self._rows = torch.tensor(reference.rows)

    def __call__(self, start: int, block: Tensor) -> None:
        self._compare(start, block[self._rows.to(block.device)])
        if self.kept is not None:
            self.kept.take(start, block)

    def _compare(self, start: int, picked: Tensor) -> None:
        if self.reference.sketch is not None:
            self.reference.sketch.add(self.residual, start, -picked)
        else:
            self.residual[:, start : start + picked.shape[1]] -= picked.to(self.residual.device, self.residual.dtype)


class _CheckingOuterSink(_CheckingSink):
    """One that takes factors where the sink does that the gradients are meant for."""

    def __init__(self, reference: Reference, kept: KeptPass, takes_outer: TakesOuter) -> None:
        super().__init__(reference, kept)
        self.takes_outer = takes_outer

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        assert self.kept is not None
        rows, width = self._rows.to(left.device), right.shape[2]
        step = max(1, KEPT_BYTES // (4 * len(rows) * width))
        for low in range(0, left.shape[2], step):
            picked = OuterBlock(left[rows, :, low : low + step], right[rows]).dense()
            self._compare(start + low * width, picked)
        self.kept.take(start, OuterBlock(left, right))


def check_against(
    reference: Reference,
    computer: AbstractGradientComputer,
    samples: Samples,
    engine: str,
    independence: BatchIndependence,
    kept: KeptPass | None = None,
) -> None:
    """Compare an engine's gradients on the whole batch with the reference.

    Args:
        reference: gradients of samples alone.
        computer: the engine.
        samples: the samples, and their batch.
        engine: name of the engine, for the error message.
        independence: the check that samples do not mix.
        kept: takes the gradients of the batch, if they are wanted beyond the comparison.

    Raises:
        GradientEngineError: they differ; names the worst parameter, its module, and the remedies.
        SamplesMixedError: f of a sample depends on the others.
    """
    checking = _CheckingSink(reference, kept)
    if kept is not None:
        kept.begin()
        if isinstance(kept.sink, OuterSink):
            checking = _CheckingOuterSink(reference, kept, kept.sink.takes_outer)
    batch, side, model = samples.batch, samples.side, computer.model
    outputs = computer.stream(batch, checking, side)
    if isinstance(computer, HookedGradientComputer):
        independence.shown_by(outputs.output)
    if kept is not None:
        kept.outputs = outputs
    if not (reference.gradients.isfinite().all() and reference.output.isfinite().all()):
        return  # nothing to compare; the consumer of the gradients names the sample that is not finite
    residual = checking.residual
    worst = worst_parameter(reference.layout, residual, reference.gradients, reference.tolerance)
    if worst is None:
        return
    independence.require()
    if not (worst.error <= _KINK and _is_in_batch(reference, residual, computer, batch, side)):
        owner = worst.name.rpartition(".")[0]
        module = dict(model.named_modules()).get(owner, model)
        raise GradientEngineError(
            f"The {engine} engine gives another gradient for parameter {worst.name!r} of module {owner!r} "
            f"({type(module).__name__}) than plain autograd on the sample alone: relative error {worst.error:.1e}, "
            f"allowed {worst.allowed:.0e}. {REMEDY}"
        )


def _is_in_batch(
    reference: Reference, residual: Tensor, computer: AbstractGradientComputer, batch: Batch, side: Side
) -> bool:
    """Tell whether plain autograd, on single outputs of the whole batch, has the gradients of the engine.

    Kernels round otherwise for a batch than for a sample alone. Where the input of a ReLU is about zero, this decides
    its slope, and changes the gradient by as much as one unit has of it. That samples do not mix was checked before.

    Args:
        reference: gradients of samples alone.
        residual: what is missing from them to those of the engine, `(rows, P)`.
        computer: the engine.
        batch: the whole batch.
        side: whether its samples are training examples or targets.
    """
    task, model, layout = computer.modelout_fn, computer.model, computer.layout
    if reference.tolerance.ceiling is not None or reference.sketch is not None:
        return False  # half precision, whose rounding is measured, or a model too large for whole gradients
    if not isinstance(task, BatchedModelOutput) or task.row_by_row:
        return False
    parameters = dict(model.named_parameters())
    wanted = [parameters[name] for name in layout.names]
    errors = residual.clone()
    with differentiating(model, {id(one) for one in wanted}):
        output = in_chunks(model, lambda: model_output(task, model, batch, side))
        for place, row in enumerate(reference.rows):
            errors[place] -= reference.gradients[place]
            gradients = gradients_of(output[row], wanted)
            for slot, gradient in zip(layout.slots, gradients, strict=True):
                if gradient is not None:
                    part = slice(slot.offset, slot.offset + slot.numel)
                    errors[place, part] += gradient.flatten().to(errors.device, errors.dtype)
    return worst_parameter(layout, errors, reference.gradients, reference.tolerance) is None
