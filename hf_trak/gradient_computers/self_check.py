"""The first-batch check: the gradients of two samples of the batch must be those of each sample alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import AbstractGradientComputer, BatchOutputs
from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.gradient_computers.environment import only_differentiating, without_caches
from hf_trak.gradient_computers.iterative import IterativeGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.outputs import call_model, gradients_of, one_per_sample
from hf_trak.gradient_computers.tolerance import SCALE, PrecisionObserver, Tolerance, norms_of, rounded_at_random
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side

REMEDY = (
    "Remedies: call model.eval() (train-mode BatchNorm and dropout mix samples or are random), use a task "
    "without terms "
    'that mix samples (in-batch negatives), register a layer rule for that module, or choose engine="iterative".'
)


class SamplesMixedError(GradientEngineError):
    """f itself, or its gradient, depends on the company that a sample keeps: no engine can help."""


@dataclass(frozen=True)
class Samples:
    """The samples of a batch that are looked at.

    Attributes:
        batch: the batch.
        side: whether its samples are training examples or targets.
        rows: their positions in it, ascending.
        padded: of those rows that the collator pads, the batches that it makes of each alone.
    """

    batch: Batch
    side: Side
    rows: tuple[int, ...]
    padded: Mapping[int, Batch] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, side: Side, padded: Mapping[int, Batch] | None = None) -> "Samples":
        """The first and the last sample; where one is known to be padded, that one and the first or the last."""
        padded = padded or {}
        last = SplitBatch.of(batch).size - 1
        rows = {0, last} if set(padded) <= {0, last} else {0, *padded}
        return cls(batch, side, tuple(sorted(rows)), padded)

    def alone(self, row: int) -> Batch:
        """One sample as a batch of its own, without padding where it is known without."""
        return self.padded[row] if row in self.padded else self.within(row)

    def within(self, *rows: int) -> Batch:
        """Samples as a batch of their own, padded as they are in the whole batch."""
        split = SplitBatch.of(self.batch)
        return split.rebuild({key: tensor[list(rows)] for key, tensor in split.mapped.items()})


@dataclass(frozen=True)
class Reference:
    """Plain autograd's answer for some samples of a batch, each taken alone: gradients `(rows, P)` and f `(rows,)`."""

    rows: tuple[int, ...]
    gradients: Tensor
    output: Tensor
    tolerance: Tolerance


def reference_of(plain: IterativeGradientComputer, samples: Samples) -> Reference | None:
    """Gradients of samples taken alone, after checking that they can be repeated and do not depend on padding.

    A sample whose gradient is not finite is left out: it cannot be compared, and whoever uses the gradients will name
    it.

    Args:
        plain: takes the gradients, in the dtype of the parameters.
        samples: which.

    Returns:
        The gradients, or `None` if none is finite.

    Raises:
        GradientEngineError: the same sample gives two different gradients (dropout), or a BatchNorm is in training
        mode.
        SamplesMixedError: f or a gradient depends on the padding.
    """
    _require_frozen_statistics(plain.model)
    pieces, outputs, finite = [], [], []
    with PrecisionObserver() as observer:
        for row in samples.rows:
            gradient, output = _taken(plain, samples.alone(row), samples.side)
            if bool(torch.isfinite(gradient).all()):
                finite.append(row)
                pieces.append(gradient)
                outputs.append(output)
    if not finite:
        return None
    tolerance = Tolerance.of(plain.model, outputs[0], observer.dtypes)
    reference = Reference(tuple(finite), torch.cat(pieces), torch.cat(outputs), tolerance)
    if any(module.training for module in plain.model.modules()):
        _require_repeatable(plain, samples, reference)
    padded = _padded_reference(plain, samples, reference)
    if tolerance.to_be_measured:
        measured = _measured(plain, samples, padded)
        reference = replace(reference, tolerance=measured)
    if padded is not reference:
        _check_padding(plain.layout, samples, reference, padded)
    return reference


def check_company(
    reference: Reference, task: BatchedModelOutput, batch: Batch, side: Side, model: torch.nn.Module
) -> None:
    """Compare f of the samples within the batch with f of each of them alone.

    Whatever is wrong with the batch itself (labels that are no classes) shows here, in an ordinary forward pass, and
    not while an engine is tried.

    Raises:
        SamplesMixedError: they differ; no engine can help.
    """
    size = SplitBatch.of(batch).size
    with torch.no_grad(), without_caches(model):
        result = call_model(task, model, batch)
        together = one_per_sample(task.output(result, batch, side), size, task)
        task.out_to_loss_grad(result, batch, side)
    picked = together[torch.tensor(reference.rows, device=together.device)].to(reference.output)
    if _outputs_differ(reference, picked):
        raise SamplesMixedError(
            f"The model output of a sample depends on the other samples of its batch: {picked.tolist()} in the batch, "
            f"{reference.output.tolist()} alone. {REMEDY}"
        )


def check_against(
    reference: Reference,
    computer: AbstractGradientComputer,
    batch: Batch,
    side: Side,
    model: torch.nn.Module,
    engine: str,
) -> None:
    """Compare an engine's gradients on the whole batch with the reference.

    The comparison subtracts block by block in place, so that it needs no memory beyond the reference.

    Raises:
        GradientEngineError: they differ; names the worst parameter, its module, and the remedies.
    """
    rows = torch.tensor(reference.rows)
    residual = reference.gradients.clone()

    def sink(start: int, block: Tensor) -> None:
        residual[:, start : start + block.shape[1]] -= block[rows.to(block.device)].to(residual.device, residual.dtype)

    computer.stream(batch, sink, side)
    if not (reference.gradients.isfinite().all() and reference.output.isfinite().all()):
        return  # nothing to compare; whoever receives the features names the sample that is not finite
    worst = worst_parameter(computer.layout, residual, reference.gradients, reference.tolerance)
    if worst is not None:
        owner = worst.name.rpartition(".")[0]
        module = dict(model.named_modules()).get(owner, model)
        raise GradientEngineError(
            f"The {engine} engine gives another gradient for parameter {worst.name!r} of module {owner!r} "
            f"({type(module).__name__}) than plain autograd on the sample alone: relative error {worst.error:.1e}, "
            f"allowed {worst.allowed:.0e}. {REMEDY}"
        )


@dataclass(frozen=True)
class Deviation:
    """A parameter whose gradient is off: its name, the relative error, and what would have been allowed."""

    name: str
    error: float
    allowed: float


def worst_parameter(
    layout: ParameterLayout, residual: Tensor, reference: Tensor, tolerance: Tolerance
) -> Deviation | None:
    """The parameter with the largest relative error that rounding does not explain, or `None`."""
    errors, _ = norms_of(layout, residual)
    norms, totals = norms_of(layout, reference)
    tiny = torch.finfo(torch.float32).tiny
    sizes = (norms + tolerance.share * totals[:, None]).clamp_min(tiny)
    limits = tolerance.limits(norms, totals).clamp_min(tolerance.relative * tiny)
    wrong = ~(errors <= limits)
    if not bool(wrong.any()):
        return None
    ratios = (errors / sizes).nan_to_num(torch.inf).masked_fill(~wrong, -1.0)
    row, column = divmod(int(ratios.argmax()), ratios.shape[1])
    return Deviation(
        layout.slots[column].name,
        float(errors[row, column] / sizes[row, column]),
        float((limits / sizes)[row, column]),
    )


def _require_frozen_statistics(model: torch.nn.Module) -> None:
    training = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
    ]
    if training:
        raise GradientEngineError(
            f"The BatchNorm layers {_some(training)} are in training mode: what a sample's gradient is then depends "
            "on the other samples of its batch. Call model.eval() first."
        )


def _require_repeatable(plain: IterativeGradientComputer, samples: Samples, reference: Reference) -> None:
    model = plain.model
    again, _ = _taken(plain, samples.alone(reference.rows[0]), samples.side)
    first = reference.gradients[:1]
    worst = worst_parameter(plain.layout, again - first, first, reference.tolerance.coarsest)
    if worst is not None:
        random = [n for n, m in model.named_modules() if type(m).__name__.lower().find("drop") >= 0 and m.training]
        raise GradientEngineError(
            f"The gradient of {worst.name!r} for one and the same sample differs between two passes: the model is "
            f"random. In training mode: {_some(random) or type(model).__name__}. Call model.eval() first."
        )


def _padded_reference(plain: IterativeGradientComputer, samples: Samples, reference: Reference) -> Reference:
    """The same samples, still one at a time, but padded as they are in their batch."""
    if not set(samples.padded) & set(reference.rows):
        return reference
    gradients, output = reference.gradients.clone(), reference.output.clone()
    for index, row in enumerate(reference.rows):
        if row in samples.padded:
            gradients[index : index + 1], output[index : index + 1] = _taken(plain, samples.within(row), samples.side)
    return replace(reference, gradients=gradients, output=output)


def _check_padding(layout: ParameterLayout, samples: Samples, reference: Reference, padded: Reference) -> None:
    """Compare samples alone with the same samples alone and padded. Raises `SamplesMixedError` if they differ."""
    residual = padded.gradients - reference.gradients
    worst = worst_parameter(layout, residual, reference.gradients, reference.tolerance)
    if worst is None and not _outputs_differ(reference, padded.output):
        return
    row = next(row for row in reference.rows if row in samples.padded)
    index = reference.rows.index(row)
    what = f"f is {float(padded.output[index]):.6g} with padding and {float(reference.output[index]):.6g} without"
    if worst is not None:
        what += (
            f", the gradient of {worst.name!r} changes by {worst.error:.1%} (rounding explains {worst.allowed:.1%})"
        )
    raise SamplesMixedError(
        f"What the model makes of row {row} of the batch depends on how far the data collator pads it, and so on "
        f"the other rows: {what}. Expected the same as for the row alone. Use `per_device_batch_size=1`, or a "
        "processor or data collator that returns an attention mask and draws nothing at random."
    )


def _outputs_differ(reference: Reference, output: Tensor) -> bool:
    limits = reference.tolerance.output_limits(reference.output)
    within = (output - reference.output).abs() <= limits
    same = (output == reference.output) | (output.isnan() & reference.output.isnan())
    return not bool((within | same).all())


def _measured(plain: IterativeGradientComputer, samples: Samples, padded: Reference) -> Tolerance:
    """The tolerance of half precision: what other rounding changes in the gradients and in f.

    Args:
        plain: takes gradients.
        samples: the samples.
        padded: their gradients, padded as in the batch.
    """
    noise, output_noise = [], []
    for index, row in enumerate(padded.rows):
        gradient, output = _otherwise_rounded(plain, samples, row)
        change = gradient.to(padded.gradients) - padded.gradients[index : index + 1]
        noise.append(norms_of(plain.layout, change)[0])
        output_noise.append((output.to(padded.output) - padded.output[index : index + 1]).abs())
    return replace(padded.tolerance, noise=torch.cat(noise), output_noise=torch.cat(output_noise))


def _otherwise_rounded(plain: IterativeGradientComputer, samples: Samples, row: int) -> tuple[Tensor, Tensor]:
    """Gradient `(1, P)` and f `(1,)` of a sample beside another one, see the module `tolerance`."""
    task, model = plain.modelout_fn, plain.model
    if not isinstance(task, BatchedModelOutput):  # it takes one sample at a time
        with rounded_at_random(model):
            return _taken(plain, samples.within(row), samples.side)
    others = [other for other in (*samples.rows, 0, SplitBatch.of(samples.batch).size - 1) if other != row]
    pair = samples.within(row, *others[:1])
    parameters = plain.model_params
    wanted = {id(p) for p in parameters}
    with only_differentiating(model, wanted), without_caches(model), torch.enable_grad(), rounded_at_random(model):
        result = call_model(task, model, pair)
        f = one_per_sample(task.output(result, pair, samples.side), SplitBatch.of(pair).size, task)[:1]
        taken = gradients_of(f.sum() * SCALE, parameters) if f.requires_grad else [None] * len(parameters)
    home = parameters[0].device
    pieces = [p.new_zeros(p.numel()) if g is None else g.flatten() for g, p in zip(taken, parameters, strict=True)]
    return torch.cat([piece.to(home) for piece in pieces])[None] / SCALE, f.detach()


def _taken(plain: AbstractGradientComputer, single: Batch, side: Side) -> tuple[Tensor, Tensor]:
    """Gradient `(1, P)` and f `(1,)` of a batch of one."""
    kept: list[Tensor] = []
    outputs: BatchOutputs = plain.stream(single, lambda start, block: kept.append(block), side)
    return kept[0], outputs.output


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
