"""Training with rows left out of the loss alone: every batch keeps its rows, and left-out rows weigh zero.

Retraining *on a subset* changes more than the rows: batches are composed otherwise, there are fewer steps, dropout and
augmentation draw other numbers. Two trainings with other randomness differ more than a few rows do, which hides what
these rows did. Here order, batches and random numbers stay as they are without the change, and the loss of a batch is

    L = Σ_{i in batch} w_i ℓ_i / N,      w_i = 0 for left-out rows, 1 for the others,

with N the number of rows (or label tokens) of the *whole* batch, so that the other rows weigh what they weighed. A
training without left-out rows is the training itself, to the bit.

Left-out rows still pass through the model. What the model computes over a batch (batch normalization) sees them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_trak._compat import collator_of_used_columns
from hf_trak.errors import HfTrakError

RowLosses = Callable[[Any, Mapping[str, Any]], Tensor]
"""`row_losses(model_output, batch) -> (B,)`: the loss of every row of a batch."""

IGNORED = -100
"""The label that cross-entropy ignores, in torch and in transformers."""

_KEPT = "hf_trak_kept_rows"
_ROUNDINGS = 64
"""Units of rounding by which the loss of a batch and those of its halves may differ: sums of the same numbers."""


def mask_rows(trainer: Any, kept: np.ndarray, row_losses: RowLosses | None = None) -> None:
    """Change a `Trainer` before `train()` so that some rows of its training dataset weigh zero.

    Labels of left-out rows become -100, and the loss is brought to the normalization of the whole batch. How a loss is
    normalized (over the tokens of all accumulated batches, or as the mean of a batch) is found by splitting the first
    batch, and some later ones, in halves. A loss that is neither is refused. With `row_losses` the loss is their sum
    over the kept rows, divided by the number of rows of the batch.

    Args:
        trainer (`transformers.Trainer`):
            The trainer of the *whole* training dataset.
        kept (`np.ndarray`):
            Boolean, `(n,)`: true for rows that count.
        row_losses (`Callable`, *optional*):
            `row_losses(model_output, batch) -> (B,)`, for losses that ignore no label, such as that of a regression.

    Raises:
        ValueError: `kept` has not one entry per row, the dataset has no rows by number, or rows are grouped by length.
    """
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__len__") or kept.shape != (len(dataset),):
        count = len(dataset) if hasattr(dataset, "__len__") else "no known number of"
        raise ValueError(
            f"`kept` has the shape {kept.shape} for a training dataset of {count} rows. Expected one entry per row, "
            "and a dataset with rows by number. Train on the whole dataset in `make_trainer(rows, seed)`."
        )
    if getattr(trainer.args, "train_sampling_strategy", None) == "group_by_length":
        raise ValueError(
            "`train_sampling_strategy` is 'group_by_length'. Expected an order that does not look into the rows, "
            "since they are numbered here. Use 'random'."
        )
    loss = _MaskedLoss(trainer, torch.from_numpy(np.ascontiguousarray(kept, dtype=bool)), row_losses)
    trainer.data_collator = _NumberedCollator(collator_of_used_columns(trainer))
    trainer.train_dataset = _NumberedRows(dataset)
    trainer.compute_loss = loss


@dataclass(frozen=True)
class _NumberedRow:
    """A row and its number. Not a mapping, so that `Trainer` removes no columns from it."""

    number: int
    row: Any


class _NumberedRows(Dataset[Any]):
    """The rows of a dataset with their numbers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _NumberedRow:
        return _NumberedRow(int(index), self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[_NumberedRow]:
        fetch = getattr(self.dataset, "__getitems__", None)
        rows = [self.dataset[index] for index in indices] if fetch is None else fetch(indices)
        return [_NumberedRow(int(index), row) for index, row in zip(indices, rows, strict=True)]


class _NumberedCollator:
    """Collates rows as they are without numbers, and adds the numbers to the batch."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, features: list[Any]) -> Any:
        if not isinstance(features[0], _NumberedRow):  # rows of an evaluation dataset
            return self.collator(features)
        batch = self.collator([feature.row for feature in features])
        if not hasattr(batch, "keys"):
            raise HfTrakError(
                f"The collator returns a {type(batch).__name__}. Expected a mapping with `labels`, as models of "
                "transformers take it. Give names to what the rows hold."
            )
        batch[_KEPT] = torch.tensor([feature.number for feature in features])
        return batch


class _MaskedLoss:
    """`Trainer.compute_loss` with rows that weigh zero."""

    def __init__(self, trainer: Any, kept: Tensor, row_losses: RowLosses | None) -> None:
        self.trainer = trainer
        self.original = trainer.compute_loss
        self.kept = kept
        self.row_losses = row_losses
        self.normalizations: list[Normalization] = list(NORMALIZATIONS)
        """Those that all batches that were looked at agree with."""
        self.batches = 0

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        numbers = inputs.pop(_KEPT, None)
        if numbers is None:  # a batch of an evaluation
            return self.original(model, inputs, return_outputs, num_items_in_batch)
        kept = self.kept.to(numbers.device)[numbers]
        if self.row_losses is not None:
            return self._weighted(model, inputs, kept, return_outputs, num_items_in_batch is not None)
        labels = self._labels(inputs, len(kept))
        # As losses of rows become more different, a wrong guess shows: so not the first batch alone is looked at.
        self.batches += 1
        if len(kept) > 1 and self.batches & (self.batches - 1) == 0:
            self._check_normalization(model, inputs, labels, num_items_in_batch)
        if bool(kept.all()):
            return self.original(model, inputs, return_outputs, num_items_in_batch)
        # With no row left the mean is undefined: the whole loss, times zero, has the same gradient of zero.
        some = bool(kept.any())
        masked = _masked(labels, kept) if some else labels
        found = self.original(model, {**inputs, "labels": masked}, return_outputs, num_items_in_batch)
        share = self.normalizations[0](masked) / self.normalizations[0](labels) if some else 0.0
        if return_outputs:
            return found[0] * share, found[1]
        return found * share

    def _weighted(self, model: torch.nn.Module, inputs: Any, kept: Tensor, return_outputs: bool, counted: bool) -> Any:
        outputs = model(**inputs)
        losses = self.row_losses(outputs, inputs) if self.row_losses is not None else outputs[0]
        if losses.shape != kept.shape:
            raise ValueError(
                f"`row_losses` returned the shape {tuple(losses.shape)} for {len(kept)} rows. Expected "
                f"({len(kept)},): the loss of every row, before any mean."
            )
        loss = torch.where(kept, losses, torch.zeros_like(losses)).sum() / len(kept)
        # `Trainer` divides the mean of a batch by the number of accumulated batches, unless it has counted labels.
        if counted and self.trainer.model_accepts_loss_kwargs:
            loss = loss / self.trainer.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _labels(self, inputs: Any, rows: int) -> Tensor:
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape[:1] != (rows,):
            shown = "absent" if labels is None else f"{getattr(labels, 'dtype', type(labels).__name__)}"
            raise ValueError(
                f"The `labels` of a training batch are {shown}. Expected whole numbers, one entry or list per row, of "
                "which -100 is ignored by the loss. For other losses pass `row_losses(model_output, batch)`, the "
                "loss of every row."
            )
        return labels

    def _check_normalization(
        self, model: torch.nn.Module, inputs: Any, labels: Tensor, num_items: Tensor | int | None
    ) -> None:
        """Compare the loss of a batch with those of its two halves, without dropout or any change of the model."""
        first = torch.arange(len(labels), device=labels.device) < len(labels) // 2
        parts = [labels, _masked(labels, first), _masked(labels, ~first)]
        training = model.training
        try:
            model.eval()
            with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(labels)):
                losses = [self.original(model, {**inputs, "labels": part}, False, num_items) for part in parts]
        finally:
            model.train(training)
        whole, one, other = map(float, losses)
        bound = _ROUNDINGS * torch.finfo(losses[0].dtype).eps * max(abs(whole), abs(one), abs(other))

        def fits(normalization: Normalization) -> bool:
            total, *shares = map(normalization, parts)
            return all(shares) and abs((shares[0] * one + shares[1] * other) / total - whole) <= bound

        fitting = [normalization for normalization in self.normalizations if fits(normalization)]
        if not fitting and all(map(_count, parts)):  # a half without labels has no mean
            raise ValueError(
                f"The loss of a batch is {whole:.6g}, those of its two halves are {one:.6g} and {other:.6g}. Expected "
                "a sum or a mean over labels, of which -100 is ignored. For other losses pass "
                "`row_losses(model_output, batch)`, the loss of every row."
            )
        self.normalizations = fitting or self.normalizations


def _masked(labels: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept.reshape(-1, *[1] * (labels.ndim - 1)), labels, torch.full_like(labels, IGNORED))


def _count(labels: Tensor) -> int:
    return int(labels.ne(IGNORED).sum())


def _count_shifted(labels: Tensor) -> int:
    """Labels that a decoder predicts: all but the first of each row."""
    return _count(labels[..., 1:]) if labels.ndim > 1 else 0


def _one(labels: Tensor) -> int:
    """The denominator of a loss that is divided by a number that does not depend on the labels that are left."""
    return 1


Normalization = Callable[[Tensor], int]
"""From labels to the number that the sum of their losses is divided by, up to a constant."""

NORMALIZATIONS: tuple[Normalization, ...] = (_one, _count, _count_shifted)


def _cuda_devices(tensor: Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.device.type == "cuda" else []
