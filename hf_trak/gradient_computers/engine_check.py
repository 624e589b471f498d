"""The self-check, second half: an engine's gradients of the first batch beside those of two samples taken alone."""

from dataclasses import dataclass, field

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

"""Bytes of a batch's gradients up to which a checked pass is kept."""


@dataclass
class KeptPass:
    """Blocks of one pass over a batch.

    Attributes:
        blocks: their first columns, and the blocks or their factors.
        outputs: the other results of the pass; `None` as long as it has not come to its end.
        held_bytes: bytes of the blocks.
    """

    blocks: list[tuple[int, Tensor | OuterBlock]] = field(default_factory=list)
    outputs: BatchOutputs | None = None
    held_bytes: int = 0

    def keep(self, start: int, block: Tensor | OuterBlock) -> None:
        """Copy a block, unless there are too many bytes by now."""
        parts = (block,) if isinstance(block, Tensor) else (block.left, block.right)
        self.held_bytes += sum(part.numel() * part.element_size() for part in parts)
        if self.held_bytes > KEPT_BYTES:
            self.blocks.clear()
            return
        copies = [part.clone() for part in parts]
        self.blocks.append((start, copies[0] if isinstance(block, Tensor) else OuterBlock(*copies)))

    def hand_on(self, sink: GradientSink, device: torch.device | str | None) -> BatchOutputs | None:
        """Push the blocks into the sink.

        Args:
            sink: the one whose `takes_outer` the pass was asked for.
            device: where it wants them; `None` leaves them where they are.

        Returns:
            [`BatchOutputs`] or `None`: `None` if the pass was not kept, and nothing was pushed.
        """
        if self.outputs is None or self.held_bytes > KEPT_BYTES:
            return None
        for start, block in self.blocks:
            if isinstance(block, Tensor):
                sink(start, block.to(device=device))
            else:
                assert isinstance(sink, OuterSink)  # no one else is given factors
                sink.add_outer(start, block.left.to(device=device), block.right.to(device=device))
        return self.outputs


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
    """Subtracts an engine's gradients from the reference, block by block in place, and keeps them if asked to."""

    def __init__(self, reference: Reference, kept: KeptPass | None) -> None:
        self.reference = reference
        self.kept = kept
        self.residual = reference.gradients.clone()
        self._rows = torch.tensor(reference.rows)

    def __call__(self, start: int, block: Tensor) -> None:
        if self.kept is not None:
            self.kept.keep(start, block)
        picked = block[self._rows.to(block.device)]
        if self.reference.sketch is not None:
            self.reference.sketch.add(self.residual, start, -picked)
        else:
            self.residual[:, start : start + block.shape[1]] -= picked.to(self.residual.device, self.residual.dtype)


class _CheckingOuterSink(_CheckingSink):
    """One that takes factors where the sink does that the gradients are meant for."""

    def __init__(self, reference: Reference, kept: KeptPass, takes_outer: TakesOuter) -> None:
        super().__init__(reference, kept)
        self.takes_outer = takes_outer

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        assert self.kept is not None
        self.kept.keep(start, OuterBlock(left, right))
        rows = self._rows.to(left.device)
        block = OuterBlock(left[rows], right[rows]).dense()
        self.residual[:, start : start + block.shape[1]] -= block.to(self.residual.device, self.residual.dtype)


def check_against(
    reference: Reference,
    computer: AbstractGradientComputer,
    samples: Samples,
    engine: str,
    independence: BatchIndependence,
    sink: GradientSink | None = None,
) -> KeptPass | None:
    """Compare an engine's gradients on the whole batch with the reference.

    Args:
        reference: gradients of samples alone.
        computer: the engine.
        samples: the samples, and their batch.
        engine: name of the engine, for the error message.
        independence: the check that samples do not mix.
        sink: where the gradients of the batch are meant to go, if the pass is to be kept. Otherwise the comparison
            needs no memory beyond the reference.

    Returns:
        [`KeptPass`] or `None`: the pass, if it was to be kept.

    Raises:
        GradientEngineError: they differ; names the worst parameter, its module, and the remedies.
        SamplesMixedError: f of a sample depends on the others.
    """
    kept = None if sink is None or reference.sketch is not None else KeptPass()
    checking = _CheckingSink(reference, kept)
    if kept is not None and isinstance(sink, OuterSink):
        checking = _CheckingOuterSink(reference, kept, sink.takes_outer)
    batch, side, model = samples.batch, samples.side, computer.model
    outputs = computer.stream(batch, checking, side)
    if isinstance(computer, HookedGradientComputer):
        independence.shown_by(outputs.output)
    if kept is not None:
        kept.outputs = outputs
    if not (reference.gradients.isfinite().all() and reference.output.isfinite().all()):
        return kept  # nothing to compare; the consumer of the gradients names the sample that is not finite
    residual = checking.residual
    worst = worst_parameter(reference.layout, residual, reference.gradients, reference.tolerance)
    if worst is None:
        return kept
    independence.require()
    if not (worst.error <= _KINK and _is_in_batch(reference, residual, computer, batch, side)):
        owner = worst.name.rpartition(".")[0]
        module = dict(model.named_modules()).get(owner, model)
        raise GradientEngineError(
            f"The {engine} engine gives another gradient for parameter {worst.name!r} of module {owner!r} "
            f"({type(module).__name__}) than plain autograd on the sample alone: relative error {worst.error:.1e}, "
            f"allowed {worst.allowed:.0e}. {REMEDY}"
        )
    return kept


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
