"""The first-batch check: the gradients of two samples of the batch must be those of each sample alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import AbstractGradientComputer, BatchOutputs
from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.outputs import call_model, one_per_sample
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side

REMEDY = (
    "Remedies: call model.eval() (train-mode BatchNorm and dropout mix samples or are random), use a task "
    "without terms "
    'that mix samples (in-batch negatives), register a layer rule for that module, or choose engine="iterative".'
)


@dataclass(frozen=True)
class Tolerance:
    """An error e of a parameter passes if ‖e‖ ≤ relative · (‖g‖ + share · ‖all gradients of the sample‖).

    The second term is for parameters whose gradient vanishes by symmetry (the key bias of an attention layer), where
    rounding is all there is.
    """

    relative: float
    share: float = 1e-2

    @classmethod
    def of(cls, model: torch.nn.Module, output: Tensor) -> "Tolerance":
        """What rounding explains at the precision in which the model computes."""
        device = output.device.type
        floats = [p.dtype for p in model.parameters() if p.is_floating_point()] + [output.dtype]
        if torch.is_autocast_enabled(device):
            floats.append(torch.get_autocast_dtype(device))
        eps = max(torch.finfo(dtype).eps for dtype in floats)
        if eps > 1e-6:  # half precision: every layer rounds, and sums over a batch round differently from sums alone
            return cls(min(40 * eps, 0.3), 1e-1)
        if device == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
            return cls(2e-2)
        return cls(1e-3)


@dataclass(frozen=True)
class Reference:
    """Plain autograd's answer for some samples of a batch, each taken alone."""

    rows: tuple[int, ...]
    gradients: Tensor
    output: Tensor


def reference_of(
    computer: AbstractGradientComputer, layout: ParameterLayout, batch: Batch, side: Side, model: torch.nn.Module
) -> Reference | None:
    """Gradients of the first and the last sample, taken alone, after checking that they can be repeated.

    A sample whose gradient is not finite is left out: it cannot be compared, and whoever uses the gradients will name
    it.

    Returns:
        The gradients, or `None` if none is finite.

    Raises:
        GradientEngineError: the same sample gives two different gradients (dropout), or a BatchNorm is in training
        mode.
    """
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
    split = SplitBatch.of(batch)
    rows = tuple(sorted({0, split.size - 1}))
    pieces, outputs, finite = [], [], []
    for row in rows:
        gradient, output = _alone(computer, split.rows(row, row + 1), side)
        if bool(torch.isfinite(gradient).all()):
            finite.append(row)
            pieces.append(gradient)
            outputs.append(output.output)
    if not finite:
        return None
    reference = Reference(tuple(finite), torch.cat(pieces), torch.cat(outputs))
    if any(module.training for module in model.modules()):
        again, _ = _alone(computer, split.rows(finite[0], finite[0] + 1), side)
        worst = worst_parameter(
            layout, again - reference.gradients[:1], reference.gradients[:1], Tolerance.of(model, output.output)
        )
        if worst is not None:
            random = [n for n, m in model.named_modules() if type(m).__name__.lower().find("drop") >= 0 and m.training]
            raise GradientEngineError(
                f"The gradient of {worst[0]!r} for one and the same sample differs between two passes: the model is "
                f"random. In training mode: {_some(random) or type(model).__name__}. Call model.eval() first."
            )
    return reference


def check_company(
    reference: Reference, task: BatchedModelOutput, batch: Batch, side: Side, model: torch.nn.Module
) -> None:
    """Compare f of the samples within the batch with f of each of them alone.

    Raises:
        SamplesMixedError: they differ; no engine can help.
    """
    with torch.no_grad():
        together = task.output(call_model(task, model, batch), batch, side)
    size = SplitBatch.of(batch).size
    together = one_per_sample(together, size, task)
    picked = together[torch.tensor(reference.rows, device=together.device)]
    tolerance = Tolerance.of(model, together).relative
    scale = float(reference.output.abs().mean())
    if not torch.allclose(picked, reference.output.to(picked), rtol=tolerance, atol=tolerance * scale, equal_nan=True):
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
    tolerance = Tolerance.of(model, reference.output)
    worst = worst_parameter(computer.layout, residual, reference.gradients, tolerance)
    if worst is not None:
        name, error = worst
        owner = name.rpartition(".")[0]
        module = dict(model.named_modules()).get(owner, model)
        raise GradientEngineError(
            f"The {engine} engine gives another gradient for parameter {name!r} of module {owner!r} "
            f"({type(module).__name__}) than plain autograd on the sample alone: relative error {error:.1e}, allowed "
            f"{tolerance.relative:.0e}. {REMEDY}"
        )


class SamplesMixedError(GradientEngineError):
    """f itself depends on the company that a sample keeps: no engine can help."""


def worst_parameter(
    layout: ParameterLayout, residual: Tensor, reference: Tensor, tolerance: Tolerance
) -> tuple[str, float] | None:
    """The parameter with the largest relative error that rounding does not explain, or `None`."""
    total = torch.linalg.vector_norm(reference.float(), dim=1)
    worst: tuple[str, float] | None = None
    for slot in layout.slots:
        columns = slice(slot.offset, slot.offset + slot.numel)
        error = torch.linalg.vector_norm(residual[:, columns].float(), dim=1)
        size = torch.linalg.vector_norm(reference[:, columns].float(), dim=1) + tolerance.share * total
        ratio = float((error / size.clamp_min(torch.finfo(torch.float32).tiny)).max())
        if not ratio <= tolerance.relative and (worst is None or not ratio <= worst[1]):
            worst = (slot.name, ratio)
    return worst


def _alone(computer: AbstractGradientComputer, single: Batch, side: Side) -> tuple[Tensor, BatchOutputs]:
    kept: list[Tensor] = []
    output = computer.stream(single, lambda start, block: kept.append(block), side)
    return kept[0], output


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
