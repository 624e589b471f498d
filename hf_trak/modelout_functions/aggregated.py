"""Tasks whose samples have several labels (tokens, classes, the two ends of an answer): one margin each, aggregated.

With m_t the margin of label t, log p_t / (1 − p_t), and w_t its weight (1, or 1/T for the mean over T labels):

    f = Σ_t w_t m_t            (`unit_output="margin"`, the default)
    f = Σ_t w_t log p_t        (`unit_output="log_likelihood"`, minus the loss)

The loss L = −Σ_t w_t log p_t = Σ_t w_t softplus(−m_t) is no function of the sum f alone, so ∂L/∂f is taken along the
direction in which all margins move alike, m_t → m_t + δ:

    q = −(dL/dδ) / (df/dδ) = (1/T) Σ_t (1 − p_t)

the mean of 1 − p_t for the sum and for the mean alike: −∇L = Σ_t w_t (1 − p_t) ∇m_t ≈ q ∇f. For one label per sample
this is the q of classification (TRAK paper, arXiv 2303.14186, Section 3.3). For the log-likelihood f = −L and q = 1.

Sum is the default because training does the same: `Trainer`'s loss weighs every token of a batch alike, so that an
example of many tokens pulls harder than one of few.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side, checked_choice
from hf_trak.modelout_functions.batches import looked_at

Aggregation = Literal["sum", "mean"]
UnitOutput = Literal["margin", "log_likelihood"]

TARGET_MASK = "target_mask"
"""Column of 0 and 1 beside the labels: labels with 0 are left out, as if they did not exist."""

TARGET_WEIGHTS = "target_weights"
"""Column of numbers beside the labels, which replace the weights w_t of the aggregation."""


class AggregatedModelOutput(BatchedModelOutput):
    """Base class of tasks with several labels per sample. Subclasses define the labels and their margins."""

    batch_columns: tuple[str, ...] = (TARGET_MASK, TARGET_WEIGHTS)

    beside: ClassVar[str | None] = None
    """The dataset column with as many entries as a row has labels, for labels that are a list of varying length."""

    def __init__(self, aggregation: Aggregation = "sum", unit_output: UnitOutput = "margin") -> None:
        """
        Args:
            aggregation (`str`, *optional*, defaults to `"sum"`):
                `"sum"` or `"mean"` over the labels of a sample.
            unit_output (`str`, *optional*, defaults to `"margin"`):
                What is aggregated, `"margin"` or `"log_likelihood"`.

        Raises:
            ValueError: an argument is another word.
        """
        super().__init__()
        self.aggregation = checked_choice(aggregation, "aggregation", Aggregation)
        self.unit_output = checked_choice(unit_output, "unit_output", UnitOutput)

    @abstractmethod
    def labelled(self, batch: Batch) -> Tensor:
        """Mark the places of every sample that hold a label, `(B, T)`, boolean, before masks and weights."""

    @abstractmethod
    def unit_margins(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the differentiable margin of every label, `(B, T)`. Places without a label get any finite number."""

    @abstractmethod
    def check(self, model_output: Any, batch: Batch) -> None:
        """Check the values of the labels. Raises `ValueError` if the model cannot have been trained on one of them."""

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        margins, valid = self.unit_margins(model_output, batch), self._counted(batch)
        values = margins if self.unit_output == "margin" else torch.nn.functional.logsigmoid(margins)
        return (torch.where(valid, values, 0.0) * self._weights(batch, valid, values)).sum(dim=1)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        self.check(model_output, batch)
        with torch.no_grad():
            margins, valid = self.unit_margins(model_output, batch), self._counted(batch)
            if side == "target" and not _MAY_BE_EMPTY.get():
                _check_targets(valid)
            counts = valid.sum(dim=1)
            if self.unit_output == "log_likelihood":
                return (counts > 0).to(margins.dtype)
            return torch.where(valid, torch.sigmoid(-margins), 0.0).sum(dim=1) / counts.clamp(min=1)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute L = −Σ_t w_t log p_t of every sample, differentiable, shape `(B,)`."""
        margins, valid = self.unit_margins(model_output, batch), self._counted(batch)
        losses = torch.nn.functional.softplus(-margins)
        return (torch.where(valid, losses, 0.0) * self._weights(batch, valid, losses)).sum(dim=1)

    def label_weights(self, batch: Batch) -> Tensor:
        """Return w_t of every label of a batch, the weight of its margin in f: `(B, T)`. It is 0 without a label."""
        valid = self._counted(batch)
        return self._weights(batch, valid, valid.new_zeros((), dtype=torch.float32))

    def weighted_by_roots(self, values: Tensor, valid: Tensor, batch: Batch) -> Tensor:
        """Compute Σ_t √w_t v_t over the labels that count, `(B,)`. See `sampled` for the roots.

        Args:
            values: v_t, `(B, T)`.
            valid: marks the labels that count, `(B, T)`.
            batch: the batch.
        """
        return (torch.where(valid, values, 0.0) * self._weights(batch, valid, values).sqrt()).sum(dim=1)

    def _counted(self, batch: Batch) -> Tensor:
        valid = self.labelled(batch)
        for name in (TARGET_MASK, TARGET_WEIGHTS):
            if (column := self.unit_column(batch, name, valid)) is not None:
                valid = valid & (column != 0)
        return valid

    def _weights(self, batch: Batch, valid: Tensor, like: Tensor) -> Tensor:
        if (weights := self.unit_column(batch, TARGET_WEIGHTS, valid)) is not None:
            return weights.to(like.dtype) * valid
        if self.aggregation == "sum":
            return valid.to(like.dtype)
        return valid.to(like.dtype) / valid.sum(dim=1, keepdim=True).clamp(min=1)

    def unit_column(self, batch: Batch, name: str, valid: Tensor) -> Tensor | None:
        """Return a column of one number per label, `(B, T)`, or `None` if the batch has no column of that name.

        Raises:
            ValueError: the shape of the column is not that of the labels.
        """
        column = batch.get(name) if isinstance(batch, Mapping) else None
        if column is None:
            return None
        if not isinstance(column, Tensor) or column.shape != valid.shape:
            raise ValueError(
                f"`{name}` has the shape {tuple(getattr(column, 'shape', ()))}. Expected {tuple(valid.shape)}, one "
                "number per label. Give every row as many entries as it has labels."
            )
        return column


def labels_of(task: AbstractModelOutput) -> AggregatedModelOutput | None:
    """Find the task that adds up the labels of a target, also inside of a loss.

    Args:
        task: the model output function.

    Returns:
        The task, or the one that a loss takes for targets; `None` where a target has one number.
    """
    inner: Any = task
    while inner is not None and not isinstance(inner, AggregatedModelOutput):
        inner = getattr(inner, "of_task", None)
    return inner


_MAY_BE_EMPTY = ContextVar("targets that may be without labels", default=False)


@contextmanager
def targets_may_be_empty(allowed: bool) -> Iterator[None]:
    """Let targets be without labels: one draw of a random row (masked tokens) may have none, and others some."""
    token = _MAY_BE_EMPTY.set(allowed)
    try:
        yield
    finally:
        _MAY_BE_EMPTY.reset(token)


def _check_targets(valid: Tensor) -> None:
    """Refuse targets without labels: their f is 0 for every model, so there is nothing to attribute."""
    empty = looked_at(~valid.any(dim=1))
    if bool(empty.any()):
        raise ValueError(
            f"Sample {int(empty.nonzero()[0])} of {len(empty)} targets has no label: all are -100 or masked. Expected "
            "at least one. Was its answer cut off by truncation, or is the span that was asked for not in it?"
        )
