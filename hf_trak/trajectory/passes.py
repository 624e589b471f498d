"""Passes over the rows of one step: their gradients, the loss as it was trained, and products with its curvature.

The loss of a step is Σ_i c_i ℓ_i over its rows. A trainer that counts labels divides the sum over all tokens by
their number in all accumulated batches; others take the mean of each batch, over tokens or over rows. Which of these
it was is found from the loss that the model returned in the first step, and compared in the steps that follow.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hf_trak.errors import HfTrakError, NonFiniteError
from hf_trak.gradient_computers.base import AbstractGradientComputer, SplitBatch, run_model
from hf_trak.gradient_computers.environment import problem_type_fixed
from hf_trak.gradient_computers.gauss_newton import GaussNewton, Hessian
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.base import BatchedModelOutput, Side
from hf_trak.modelout_functions.classification import RegressionModelOutput
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.trajectory.dropout import DropoutMasks
from hf_trak.trajectory.record import MicroBatch, is_known

CurvatureForm = Literal["hessian", "gauss-newton"]

Normalization = Literal["items", "labels", "nothing"]
"""What sums of losses are divided by: `num_items_in_batch`, the labels of their own batch, one per row or more, or
nothing."""

ROW_BYTES = 2**29
"""Memory for the gradients of rows that are held at a time."""

ROW_COPIES = 16
"""Bytes for each number of a gradient, with what engines hold beside it."""

_AGREEMENT, _HALF_AGREEMENT = 1e-3, 2e-2
"""By how much the loss of a batch may differ from what the model returned, relative to it; the second for training in
bfloat16, whose weights are kept in float32, and whose replay computes in float32."""


@dataclass(frozen=True)
class RowGradients:
    """Gradients of some rows of a step.

    Attributes:
        rows (`list[int]`): their numbers.
        gradients (`torch.Tensor`): c_i ∇ℓ_i, `(B, P)`.
        loss (`float`): their part of the loss of the step.
    """

    rows: list[int]
    gradients: Tensor
    loss: float


class StepPasses:
    """Computes what a step needs of the model, which it finds with the weights of the step in it."""

    def __init__(
        self,
        model: torch.nn.Module,
        task: BatchedModelOutput,
        layout: ParameterLayout,
        computer: AbstractGradientComputer,
        batches: Callable[[Sequence[Sequence[int]]], Iterator[tuple[list[int], Any]]],
        bf16: bool = False,
        trained: TrainerLossModelOutput | None = None,
    ) -> None:
        """
        Args:
            model: the model, in eval mode.
            task: the training rows' side, minus the loss of each. For a run with dropout it takes masks.
            layout: the trained parameters.
            computer: the gradient computer of this task.
            batches: collates lists of row numbers, and yields `(rows, batch)` for each.
            bf16: whether the training computed in bfloat16.
            trained: the trainer's own loss, which tells what sums are divided by where the record does not.
        """
        self.model, self.task, self.layout, self.computer = model, task, layout, computer
        own = getattr(task, "of_task", None)
        self._own = own if isinstance(own, TrainerLossModelOutput) else None
        self._batches, self._trained = batches, self._own or trained
        self.normalization: Normalization | None = None
        self._parameters = dict(model.named_parameters())
        self._masks = DropoutMasks(model, task, bf16)
        self._agreement = _HALF_AGREEMENT if bf16 else _AGREEMENT
        self._weighted = _WeightedLoss(task)
        self._curvatures: dict[CurvatureForm, GaussNewton] = {
            "gauss-newton": GaussNewton(model, self._weighted, layout),
            "hessian": Hessian(model, self._weighted, layout),
        }

    def put(self, weights: Tensor) -> None:
        """Write weights `(P,)` into the model."""
        with torch.no_grad():
            for slot in self.layout.slots:
                own = self._parameters[slot.name]
                own.copy_(weights[slot.offset : slot.offset + slot.numel].reshape(slot.shape))

    def end(self, weights: Tensor) -> None:
        """Leave the model with these weights, and without hooks."""
        self._masks.close()
        self.put(weights)

    def _drawn(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, list[int], Any]]:
        """Yield passes with their rows and batches, with the masks of their dropout."""
        for passed, (rows, batch) in zip(batches, self._batches([one.rows for one in batches]), strict=True):
            yield passed, rows, batch if passed.random is None else self._masks.drawn(batch, passed.random)

    # -- rows --------------------------------------------------------------------------------------------------------

    def rows(self, batches: Sequence[MicroBatch]) -> Iterator[RowGradients]:
        """Compute the gradients of the rows of a step, as many at a time as fit into [`ROW_BYTES`].

        Raises:
            HfTrakError: the loss of a batch is not what the model returned in the training.
            NonFiniteError: a gradient is NaN or infinite.
        """
        together = max(1, ROW_BYTES // (self.layout.total * ROW_COPIES))
        for passed, rows, batch in self._drawn(batches):
            split = SplitBatch.of_rows(batch, len(rows))
            shares = self.shares(passed, batch)
            for first in range(0, len(rows), together):
                last = min(first + together, len(rows))
                part = batch if last - first == len(rows) else split.rows(first, last)
                found, losses = self.gradients(part, last - first, "train")
                found.mul_(-passed.scale * shares[first:last].unsqueeze(1))
                if not bool(torch.isfinite(found.sum())):
                    raise NonFiniteError(
                        f"A gradient of the training rows {rows[first:last]} is NaN or infinite. Expected finite "
                        "numbers. Look at these rows, and compute in float32."
                    )
                yield RowGradients(rows[first:last], found, passed.scale * float((shares[first:last] * losses).sum()))

    def fits(self, rows: int) -> bool:
        """Tell whether the gradients of so many rows may be held at a time."""
        return rows * self.layout.total * ROW_COPIES <= ROW_BYTES

    def gradients(self, batch: Any, size: int, side: Side) -> tuple[Tensor, Tensor]:
        """Compute the gradients of f of every sample, `(B, P)`, and −f, `(B,)`, float64."""
        weight = self._parameters[self.layout.names[0]]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        sink = _Rows(torch.zeros(size, self.layout.total, dtype=dtype, device=weight.device))
        outputs = self.computer.stream(batch, sink, side)
        return sink.rows, -outputs.output.double()

    def shares(self, passed: MicroBatch, batch: Any) -> Tensor:
        """Return the factors of rows in the loss of their pass, `(B,)`, float64.

        Args:
            passed: the pass, as it was recorded.
            batch: its rows, collated.

        Raises:
            HfTrakError: the loss is not what the model returned in the training.
            ValueError: the trainer's own loss is no weighted sum over rows.
        """
        if self._own is not None:
            with torch.no_grad(), problem_type_fixed(self.model, _labels(batch)):
                outputs = run_model(self.task, self.model, batch)
            found = self._own.shares(outputs, batch, passed.items if is_known(passed.items) else None)
            if found is not None:
                return found
        if self.normalization is None:
            self._find_normalization(passed, batch)
        return self._shares(self.normalization, passed, batch)

    def _shares(self, normalization: Normalization | None, passed: MicroBatch, batch: Any) -> Tensor:
        """Return the factors of rows in the loss of their own pass, `(B,)`, float64."""
        counts = label_counts(self.task, batch)
        sums = torch.ones_like(counts)
        task = getattr(self.task, "of_task", self.task)
        if isinstance(task, AggregatedModelOutput):  # a row's loss may be a sum over its labels, or their mean
            sums = counts / task.label_weights(batch).double().sum(1).clamp(min=1e-12)
        elif isinstance(task, RegressionModelOutput):  # ½ (ŷ − y)², where transformers takes (ŷ − y)²
            sums = 2 * sums
        if normalization == "nothing":
            return sums
        return sums / (passed.items if normalization == "items" else counts.sum())

    def losses(self, batch: Any) -> Tensor:
        """Compute the loss of every row, `(B,)`."""
        size = len(label_counts(self.task, batch))
        split = SplitBatch.of_rows(batch, size)
        parts = [split.rows(row, row + 1) for row in range(size)] if self.task.row_by_row else [batch]
        with torch.no_grad(), problem_type_fixed(self.model, _labels(batch)):
            found = [self.task.output(run_model(self.task, self.model, part), part) for part in parts]
        return -torch.cat(found).double()

    def _find_normalization(self, passed: MicroBatch, batch: Any) -> None:
        """Find what the trainer's loss was divided by, at the weights of the first step."""
        items = passed.items if is_known(passed.items) else None
        if not is_known(passed.loss):  # of a loss of the trainer's own, or a run without a record
            if self._trained is None:
                self.normalization = "labels" if items is None else "items"
                return
            with torch.no_grad():
                passed = replace(passed, loss=float(self._trained.of_batch(self.model, batch, items)))
        losses = self.losses(batch)
        given: list[Normalization] = [] if items is None else ["items"]
        tried: dict[Normalization, float] = {}
        every: tuple[Normalization, ...] = (*given, "labels", "nothing")
        for one in every:
            tried[one] = float((self._shares(one, passed, batch) * losses).sum())
        nearest = min(every, key=lambda one: abs(tried[one] - passed.loss))
        if abs(tried[nearest] - passed.loss) <= self._agreement * max(abs(passed.loss), 1e-6):
            self.normalization = nearest
            return
        shown = ", ".join(f"{value:.6g} (divided by {name})" for name, value in tried.items())
        raise HfTrakError(
            f"The loss of the first batch was {passed.loss:.6g} in the training, and is now {shown}. Expected the "
            "same loss for the same rows and weights. Give the training dataset, collator and task of the run, in "
            "their order."
        )

    # -- curvature ---------------------------------------------------------------------------------------------------

    def curvature(
        self,
        batches: Sequence[MicroBatch],
        chosen: Sequence[Sequence[int]],
        directions: Sequence[Tensor],
        form: CurvatureForm,
    ) -> list[Tensor]:
        """Multiply groups of directions by the curvature of the loss of some rows of a step.

        Args:
            batches: the passes of the step.
            chosen: the places of these rows in each of them.
            directions: `(m, P)` each.
            form: the Hessian, or the Gauss-Newton matrix.

        Returns:
            Σ c_i ∇²ℓ_i γ over these rows, `(m, P)` each.

        Raises:
            GradientEngineError: the model cannot be differentiated twice.
        """
        totals = [torch.zeros_like(one) for one in directions]
        wanted = [(one, places) for one, places in zip(batches, chosen, strict=True) if places]
        for (_, places), (passed, _, batch) in zip(wanted, self._drawn([one for one, _ in wanted]), strict=True):
            factors, split = self.shares(passed, batch) * passed.scale, SplitBatch.of(batch)
            for part in [[place] for place in places] if self.task.row_by_row else [places]:
                self._weighted.factors = factors[torch.tensor(part, device=factors.device)]
                found = self._curvatures[form].of_groups(split.picked(part), directions)
                for total, one in zip(totals, found, strict=True):
                    total += one
        return totals


class _WeightedLoss(BatchedModelOutput):
    """Minus the loss of every row, multiplied by a factor of its own."""

    def __init__(self, task: BatchedModelOutput) -> None:
        super().__init__()
        self.task = task
        self.factors = torch.ones(1)

    def model_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.task.model_inputs(batch)

    def output(self, model_output: Any, batch: Any, side: Side = "train") -> Tensor:
        found = self.task.output(model_output, batch, side)
        return found * self.factors.to(found)

    def out_to_loss_grad(self, model_output: Any, batch: Any, side: Side = "train") -> Tensor:
        return self.task.out_to_loss_grad(model_output, batch, side)


class _Rows:
    """Collects the blocks of a batch as whole gradients. Columns that come twice add up."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __call__(self, start: int, block: Tensor) -> None:
        self.rows[:, start : start + block.shape[1]] += block.detach()

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        return False


def _labels(batch: Any) -> Any:
    return batch.get("labels") if hasattr(batch, "get") else None


def label_counts(task: BatchedModelOutput, batch: Any) -> Tensor:
    """Count the labels of every row of a batch that its loss is a sum over, `(B,)`, float64: 1 for any other loss."""
    task = getattr(task, "of_task", task)
    if isinstance(task, AggregatedModelOutput):
        return task.label_weights(batch).ne(0).sum(1).double()
    if isinstance(task, TrainerLossModelOutput) and (counts := task.label_counts(batch)) is not None:
        return counts.double()
    split = SplitBatch.of(batch)
    return torch.ones(split.size, dtype=torch.float64, device=next(iter(split.mapped.values())).device)
