"""The self-check, first half: the gradients of two samples of the first batch, each taken alone by plain autograd.

The second half, in `engine_check`, compares an engine with them.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_trak._compat import BatchNormBase
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import BatchOutputs, SplitBatch, gradients_of, model_output
from hf_trak.gradient_computers.environment import differentiating
from hf_trak.gradient_computers.iterative import IterativeGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.padding import RowAlone
from hf_trak.gradient_computers.tolerance import (
    SCALE,
    SKETCHED_FROM,
    GradientSketch,
    PrecisionObserver,
    Tolerance,
    each_gradient,
    norms_of,
    rounded_at_random,
)
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side

REMEDY = (
    "Remedies: call model.eval() (train-mode BatchNorm and dropout mix samples or are random), use a task without "
    "terms that mix samples (in-batch negatives), register or correct the layer rule of that module, or choose "
    'engine="iterative".'
)


class SamplesMixedError(GradientEngineError):
    """f itself, or its gradient, depends on the other samples of the batch, so that no engine can help."""


@dataclass(frozen=True)
class Samples:
    """The samples of a batch that are checked.

    Attributes:
        batch: the batch.
        side: whether its samples are training examples or targets.
        rows: their positions in it, ascending.
        apart: the one of them that differs when it is collated alone, if there is one.
    """

    batch: Batch
    side: Side
    rows: tuple[int, ...]
    apart: RowAlone | None = None

    @classmethod
    def of(cls, batch: Batch, side: Side, apart: RowAlone | None = None) -> "Samples":
        """Choose the first and the last sample. One that is collated alone takes the place of the last."""
        rows = {0, SplitBatch.of(batch).size - 1}
        if apart is not None and apart.row not in rows:
            rows = {0, apart.row}
        return cls(batch, side, tuple(sorted(rows)), apart)

    def alone(self, row: int) -> Batch:
        """Make a batch of one sample: the one that the collator makes, where that is known to differ."""
        return self.apart.batch if self.apart is not None and row == self.apart.row else self.within(row)

    def within(self, *rows: int) -> Batch:
        """Make a batch of some samples, as they are in the whole batch."""
        return SplitBatch.of(self.batch).picked(rows)


@dataclass(frozen=True)
class Reference:
    """Results of plain autograd for some samples of a batch, each taken alone.

    Attributes:
        rows: positions of the samples in the batch.
        gradients: `(rows, P)`, or sketches of them.
        output: f, `(rows,)`.
        tolerance: the errors that rounding explains.
        layout: the places of the parameters in `gradients`.
        sketch: makes the sketches; `None` for whole gradients.
    """

    rows: tuple[int, ...]
    gradients: Tensor
    output: Tensor
    tolerance: Tolerance
    layout: ParameterLayout
    sketch: GradientSketch | None = None


def reference_of(plain: IterativeGradientComputer, samples: Samples, observe: bool = True) -> Reference | None:
    """Take the gradients of samples alone, and check that they can be repeated and do not depend on padding.

    A sample whose gradient is not finite is left out: it cannot be compared, and the consumer of the gradients will
    name it.

    Args:
        plain: takes the gradients, in the dtype of the parameters.
        samples: the samples.
        observe: whether to look for half precision inside of the model, which takes a third of the time. A later
            batch is taken to have none where an earlier one had none.

    Returns:
        `Reference` or `None`: `None` if no gradient is finite.

    Raises:
        GradientEngineError: the same sample gives two different gradients (dropout), or a BatchNorm is in training
        mode.
        SamplesMixedError: f or a gradient depends on the padding.
    """
    _require_frozen_statistics(plain.model, SplitBatch.of(samples.batch).size)
    pieces, outputs, finite = [], [], []
    sketched = plain.layout.total >= SKETCHED_FROM and isinstance(plain.modelout_fn, BatchedModelOutput)
    sketch = GradientSketch(plain.layout) if sketched else None
    before = _generator_states()
    observer = PrecisionObserver()
    with observer if observe else nullcontext():
        for row in samples.rows:
            gradient, output = _taken(plain, samples.alone(row), samples.side, sketch)
            if bool(torch.isfinite(gradient).all()):
                finite.append(row)
                pieces.append(gradient)
                outputs.append(output)
    if not finite:
        return None
    drawn = not all(map(torch.equal, before, _generator_states()))
    tolerance = Tolerance.of(plain.model, outputs[0], observer.dtypes)
    if isinstance(plain.modelout_fn, BatchedModelOutput):
        terms = [plain.modelout_fn.terms(samples.alone(row)) for row in finite]
        if all(term is not None for term in terms):
            tolerance = replace(tolerance, terms=torch.cat([term for term in terms if term is not None]))
    layout = plain.layout if sketch is None else sketch.layout
    reference = Reference(tuple(finite), torch.cat(pieces), torch.cat(outputs), tolerance, layout, sketch)
    if drawn or any(module.training for module in plain.model.modules()):
        _require_repeatable(plain, samples, reference)
    within = _reference_within(plain, samples, reference)
    if tolerance.to_be_measured:
        reference = replace(reference, tolerance=_measured(plain, samples, within))
    if samples.apart is not None and samples.apart.row in reference.rows:
        _check_apart(samples.apart, reference, within)
    return reference


@dataclass(frozen=True)
class Deviation:
    """A parameter whose gradient is wrong.

    Attributes:
        name: its name.
        error: the relative error.
        allowed: the relative error that rounding explains.
    """

    name: str
    error: float
    allowed: float


def worst_parameter(
    layout: ParameterLayout, residual: Tensor, reference: Tensor, tolerance: Tolerance
) -> Deviation | None:
    """Find the parameter with the largest relative error that rounding does not explain, `None` if there is none.

    Args:
        layout: the parameters.
        residual: `(rows, P)`, the differences.
        reference: `(rows, P)`, the right gradients.
        tolerance: the errors that rounding explains.
    """
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


def _require_frozen_statistics(model: torch.nn.Module, rows: int) -> None:
    """Raise `GradientEngineError` if a batch norm uses the statistics of the batch."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, BatchNormBase)]
    training = [name for name, module in norms if module.training]
    bare = [name for name, module in norms if not module.training and module.running_mean is None]
    if bare and rows > 1:
        raise GradientEngineError(
            f"The BatchNorm layers {_some(bare)} keep no statistics (`track_running_stats=False`), and take those of "
            "the batch in evaluation mode, too. Expected a sample to be normalized by itself. Attribute a model with "
            "statistics, or one with GroupNorm or LayerNorm."
        )
    if training:
        raise GradientEngineError(
            f"The BatchNorm layers {_some(training)} are in training mode: the gradient of a sample then depends on "
            "the other samples of its batch. Call model.eval() first."
        )


def _generator_states() -> list[Tensor]:
    """Return the states of torch's generators, which a model that draws random numbers advances."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _require_repeatable(plain: IterativeGradientComputer, samples: Samples, reference: Reference) -> None:
    """Raise `GradientEngineError` if a second pass gives a sample another gradient."""
    model = plain.model
    again, _ = _taken(plain, samples.alone(reference.rows[0]), samples.side, reference.sketch)
    first = reference.gradients[:1]
    worst = worst_parameter(reference.layout, again - first, first, reference.tolerance.coarsest)
    if worst is not None:
        random = [n for n, m in model.named_modules() if type(m).__name__.lower().find("drop") >= 0 and m.training]
        if not any(module.training for module in model.modules()):
            raise GradientEngineError(
                f"The gradient of {worst.name!r} for one sample differs: {type(model).__name__} draws random numbers "
                "in evaluation mode, too, such as masks or points. Expected the same output for the same input. Give "
                "it what it draws as an input where its `forward` takes that (`noise` of ViTMAE), or fix the "
                "generator in its `forward`."
            )
        raise GradientEngineError(
            f"The gradient of {worst.name!r} for one and the same sample differs between two passes: the model is "
            f"random. In training mode: {_some(random) or type(model).__name__}. Call model.eval() first."
        )


def _reference_within(plain: IterativeGradientComputer, samples: Samples, reference: Reference) -> Reference:
    """Take the same samples, still one at a time, but padded as they are in their batch."""
    if samples.apart is None or samples.apart.row not in reference.rows:
        return reference
    index = reference.rows.index(samples.apart.row)
    gradients, output = reference.gradients.clone(), reference.output.clone()
    gradient, f = _taken(plain, samples.within(samples.apart.row), samples.side, reference.sketch)
    gradients[index], output[index] = gradient[0], f[0]
    return replace(reference, gradients=gradients, output=output)


def _check_apart(apart: RowAlone, reference: Reference, within: Reference) -> None:
    """Compare a sample collated alone with the same sample in its batch.

    Raises:
        SamplesMixedError: they differ.
    """
    residual = within.gradients - reference.gradients
    worst = worst_parameter(reference.layout, residual, reference.gradients, reference.tolerance)
    if worst is None and not outputs_differ(reference, within.output):
        return
    index = reference.rows.index(apart.row)
    what = f"f is {float(within.output[index]):.6g} in the batch and {float(reference.output[index]):.6g} alone"
    if worst is not None:
        what += f", the gradient of {worst.name!r} has a relative error of {worst.error:.1e}, allowed "
        what += f"{worst.allowed:.0e}"
    if apart.changed:
        raise SamplesMixedError(
            f"The data collator makes other values of {list(apart.changed)} of row {apart.row} of the batch than of "
            f"that row alone: {what}. Expected the same values, padded or not. Use a dataset and a collator that draw "
            "nothing at random (keep one draw as a column of the dataset) and normalize every row by itself (for "
            "audio: a feature extractor that returns an attention mask)."
        )
    raise SamplesMixedError(
        f"The model's result for row {apart.row} of the batch depends on how far the data collator pads it, and so "
        f"on the other rows: {what}. Expected the same as for the row alone. Use `per_device_batch_size=1`, rows of "
        "one length, or a processor or data collator that returns an attention mask."
    )


def outputs_differ(reference: Reference, output: Tensor) -> bool:
    """Tell whether f differs by more than rounding explains; a NaN equals a NaN."""
    limits = reference.tolerance.output_limits(reference.output)
    within = (output - reference.output).abs() <= limits
    same = (output == reference.output) | (output.isnan() & reference.output.isnan())
    return not bool((within | same).all())


def _measured(plain: IterativeGradientComputer, samples: Samples, within: Reference) -> Tolerance:
    """Measure the changes that other rounding makes in the gradients and in f, for the tolerance of half precision.

    Args:
        plain: takes gradients.
        samples: the samples.
        within: their gradients, padded as in the batch.
    """
    noise, output_noise = [], []
    for index, row in enumerate(within.rows):
        gradient, output = _otherwise_rounded(plain, samples, row, within.sketch)
        change = gradient.to(within.gradients) - within.gradients[index : index + 1]
        noise.append(norms_of(within.layout, change)[0])
        output_noise.append((output.to(within.output) - within.output[index : index + 1]).abs())
    return replace(within.tolerance, noise=torch.cat(noise), output_noise=torch.cat(output_noise))


def _otherwise_rounded(
    plain: IterativeGradientComputer, samples: Samples, row: int, sketch: GradientSketch | None
) -> tuple[Tensor, Tensor]:
    """Take gradient `(1, P)`, or its sketch, and f `(1,)` of a sample with other rounding, see the module `tolerance`.

    The sample is put into a batch with a copy of itself: the batch has another size, but no other samples, on which
    the result must not depend.
    """
    task, model = plain.modelout_fn, plain.model
    if not isinstance(task, BatchedModelOutput) or task.row_by_row:  # it takes one sample at a time
        with rounded_at_random(model):
            return _taken(plain, samples.within(row), samples.side)
    pair = samples.within(row, row)
    if sketch is not None:
        with rounded_at_random(model):
            sums, f = _sketched(plain, pair, samples.side, sketch, SCALE)
        return sums / SCALE, f
    parameters = plain.model_params
    wanted = {id(p) for p in parameters}
    with differentiating(model, wanted), rounded_at_random(model):
        f = model_output(task, model, pair, samples.side)[:1]
        taken = gradients_of(f.sum() * SCALE, parameters) if f.requires_grad else [None] * len(parameters)
    home = parameters[0].device
    pieces = [p.new_zeros(p.numel()) if g is None else g.flatten() for g, p in zip(taken, parameters, strict=True)]
    return torch.cat([piece.to(home) for piece in pieces])[None] / SCALE, f.detach()


def _taken(
    plain: IterativeGradientComputer, single: Batch, side: Side, sketch: GradientSketch | None = None
) -> tuple[Tensor, Tensor]:
    """Take the gradient `(1, P)`, or its sketch, and f `(1,)` of a batch of one."""
    if sketch is not None:
        return _sketched(plain, single, side, sketch)
    kept: list[Tensor] = []
    outputs: BatchOutputs = plain.stream(single, lambda start, block: kept.append(block), side)
    return kept[0], outputs.output


def _sketched(
    plain: IterativeGradientComputer, batch: Batch, side: Side, sketch: GradientSketch, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Take the sketch of the gradient of `scale` times f `(1,)` of the first sample, and f itself."""
    task, model = plain.modelout_fn, plain.model
    assert isinstance(task, BatchedModelOutput)
    slots = {slot.name: slot for slot in plain.layout.slots}
    parameters = {name: p for name, p in model.named_parameters() if name in slots}
    sums = sketch.empty(1)
    wanted = {id(p) for p in parameters.values()}
    with differentiating(model, wanted):
        f = model_output(task, model, batch, side)[:1]
        if f.requires_grad:
            each_gradient(
                f.sum() * scale,
                parameters,
                lambda name, gradient: sketch.add(sums, slots[name].offset, gradient.reshape(1, -1)),
            )
    return sums, f.detach()


def _some(names: list[str]) -> str:
    """Name the first three, and count the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
