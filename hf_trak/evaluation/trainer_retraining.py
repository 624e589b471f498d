"""Retraining with `transformers.Trainer`, and the outputs of the trained model on the targets."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from hf_trak._compat import accelerate_state_set_aside, collator_of_used_columns
from hf_trak.data.drawn_rows import rows_at
from hf_trak.data.preferences import PreparingCollator, kind_of, prepared_rows, training_rows
from hf_trak.data.rows import Collator, RowBatches, batch_rows, default_collator, forward_columns, row_count
from hf_trak.data.text_columns import collator_of
from hf_trak.data.trainer_tasks import task_of
from hf_trak.errors import HfTrakError
from hf_trak.gradient_computers.base import one_per_sample, run_model
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.identity.collation import random_state_kept
from hf_trak.modelout_functions import AbstractModelOutput, get_task, infer_task
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.modelout_functions.batches import evaluating
from hf_trak.modelout_functions.inference import known_task
from hf_trak.runtime.checks import checked_int

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


@dataclass(eq=False)
class _NumberedRows(Dataset[Any]):
    """The rows of a dataset with their numbers."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _NumberedRow:
        return _NumberedRow(int(index), self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[_NumberedRow]:
        rows = zip(indices, rows_at(self.dataset, indices), strict=True)
        return [_NumberedRow(int(index), row) for index, row in rows]


@dataclass(eq=False)
class _NumberedCollator:
    """Collates rows as they are without numbers, and adds the numbers to the batch."""

    collator: Callable[[list[Any]], Any]

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
        if (numbers := inputs.pop(_KEPT, None)) is None:  # a batch of an evaluation
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
                f"The `labels` of a training batch are {shown}. Expected whole numbers, one entry or list per row, "
                "with -100 ignored by the loss. For other losses pass `row_losses(model_output, batch)`, the "
                "loss of every row."
            )
        return labels

    def _check_normalization(
        self, model: torch.nn.Module, inputs: Any, labels: Tensor, num_items: Tensor | int | None
    ) -> None:
        """Compare the loss of a batch with those of its two halves, without dropout or any change of the model."""
        first = torch.arange(len(labels), device=labels.device) < len(labels) // 2
        parts = [labels, _masked(labels, first), _masked(labels, ~first)]
        with evaluating(model), torch.random.fork_rng(devices=[labels.device] if labels.is_cuda else []):
            losses = [self.original(model, {**inputs, "labels": part}, False, num_items) for part in parts]
        whole, one, other = map(float, losses)
        bound = _ROUNDINGS * torch.finfo(losses[0].dtype).eps * max(abs(whole), abs(one), abs(other))

        def fits(normalization: Normalization) -> bool:
            total, *shares = map(normalization, parts)
            return all(shares) and abs((shares[0] * one + shares[1] * other) / total - whole) <= bound

        fitting = [normalization for normalization in self.normalizations if fits(normalization)]
        if not fitting and all(map(_count, parts)):  # a half without labels has no mean
            raise ValueError(
                f"The loss of a batch is {whole:.6g}, those of its two halves are {one:.6g} and {other:.6g}. Expected "
                "a sum or a mean over labels that ignores -100. For other losses pass "
                "`row_losses(model_output, batch)`, the loss of every row."
            )
        self.normalizations = fitting or self.normalizations


def _masked(labels: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept.reshape(-1, *[1] * (labels.ndim - 1)), labels, torch.full_like(labels, IGNORED))


def _count(labels: Tensor) -> int:
    return int(labels.ne(IGNORED).sum())


def _count_shifted(labels: Tensor) -> int:
    """Count the labels that a decoder predicts: all but the first of each row."""
    return _count(labels[..., 1:]) if labels.ndim > 1 else 0


def _one(labels: Tensor) -> int:
    """Return the denominator of a loss that does not depend on how many labels are left."""
    return 1


Normalization = Callable[[Tensor], int]

"""From labels to the number that the sum of their losses is divided by, up to a constant."""


NORMALIZATIONS: tuple[Normalization, ...] = (_one, _count, _count_shifted)


_LAUNCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass(eq=False, repr=False)
class TrainerRetraining:
    """A training with `Trainer` for [`retrain_on_subsets`]: trains on a subset and returns f on every target.

    ```python
    def make_trainer(rows, seed):
        args = TrainingArguments("retraining", num_train_epochs=3, seed=seed, save_strategy="no")
        return Trainer(MyModel(config), args, train_dataset=rows)


    retrained = retrain_on_subsets(
        random_subsets(len(train_dataset), 100), TrainerRetraining(make_trainer, train_dataset, targets), "lds"
    )
    ```

    Args:
        make_trainer (`Callable`):
            `make_trainer(rows, seed)` returns a `Trainer` of a fresh model for these rows. Everything is seeded
            before it is called; `seed` is for `TrainingArguments`.
        train_dataset (`Dataset`):
            The training rows.
        eval_dataset (`Dataset`):
            The targets.
        task (`str`, `AbstractModelOutput` or `Callable`, *optional*):
            The model output function, which is that of the attribution. By default it follows from the model, or
            else from the trainer, as in `TrakAttributor.from_trainer`.
        data_collator (`Callable`, *optional*):
            Collates targets. By default that of the trainer.
        batch_size (`int`, *optional*, defaults to 64):
            Targets per batch.
        drop (`str`, *optional*, defaults to `"rows"`):
            `"rows"` trains on the rows of the subset alone. `"mask"` trains on all rows with the same order and
            batches, and the others weigh zero in the loss, see [`mask_rows`].
        seed (`int`, *optional*):
            One seed for every training, so that trainings differ by their rows alone. By default each training
            has a seed of its own.
        row_losses (`Callable`, *optional*):
            `row_losses(model_output, batch) -> (B,)`, for `drop="mask"` with a loss that ignores no label, such as
            that of a regression.
        perturbation (`float`, *optional*, defaults to 0.0):
            Relative size ε of a change of the initial weights: every trainable weight is multiplied by 1 + ε·x,
            with x standard normal and drawn from each training's own seed. On a CPU a repeat with one `seed` gives
            the same bits, which hides how far training enlarges tiny differences; with ε = 1e-6, a few roundings
            of float32, repeats show it.

    Raises:
        TypeError, ValueError: as of `TrakAttributor`.
        ValueError: `drop` is no such name, `row_losses` is given without `drop="mask"`, or `perturbation` is not
            a finite number of at least 0.
    """

    make_trainer: Callable[[Any, int], Any]
    train_dataset: Any
    eval_dataset: Any
    task: str | AbstractModelOutput | Callable[..., Tensor] | None = None
    data_collator: Collator | None = None
    batch_size: int = 64
    drop: Literal["rows", "mask"] = "rows"
    seed: int | None = None
    row_losses: RowLosses | None = None
    perturbation: float = 0.0

    def __post_init__(self) -> None:
        if self.drop not in ("rows", "mask"):
            raise ValueError(f"`drop` is {self.drop!r}. Expected 'rows' or 'mask'.")
        if self.row_losses is not None and self.drop != "mask":
            raise ValueError(
                f"`row_losses` is given with `drop={self.drop!r}`. Expected it with 'mask' only, which weighs rows."
            )
        self.seed = self.seed if self.seed is None else checked_int(self.seed, "seed", 0)
        if not isinstance(self.perturbation, int | float) or not 0 <= self.perturbation < float("inf"):
            raise ValueError(
                f"`perturbation` is {self.perturbation!r}. Expected a finite number of at least 0, such as 1e-6."
            )
        self.perturbation = float(self.perturbation)
        for name in ("train_dataset", "eval_dataset"):
            row_count(getattr(self, name), name)

    def __call__(self, rows: np.ndarray, seed: int) -> np.ndarray:
        """Train on these rows, and return f of every target, `(m,)`, float64."""
        own_seed, seed = seed, seed if self.seed is None else self.seed
        from transformers import set_seed  # imports models of transformers, for seconds

        with training_alone():
            set_seed(seed)
            trainer = self.make_trainer(self.train_dataset if self.drop == "mask" else self._selected(rows), seed)
            with random_state_kept():
                task, collator, targets = self._asked(trainer)
            if self.perturbation:
                _perturb(trainer.model, self.perturbation, own_seed)
            if self.drop == "mask":
                kept = np.zeros(len(self.train_dataset), dtype=bool)
                kept[rows] = True
                mask_rows(trainer, kept, self.row_losses)
            trainer.train()
            model, unused = trainer.accelerator.unwrap_model(trainer.model), trainer.args.remove_unused_columns
            return model_outputs(model, targets, task, collator, self.batch_size, unused)

    def _asked(self, trainer: Any) -> tuple[Any, Collator, Any]:
        """Return the task of the targets, their collator, and the targets as it takes them.

        A task that does not follow from the model is that of the trainer, with its settings, as in `from_trainer`.
        """
        collator, model = self.data_collator or trainer.data_collator, trainer.accelerator.unwrap_model(trainer.model)
        kind, task = kind_of(trainer), self.task
        if task is None and (kind is not None or known_task(model) is None):
            own = collator_of(trainer) if kind is None else PreparingCollator(trainer)
            task = task_of(trainer, model, training_rows(trainer), own, None)
        return task, collator, self.eval_dataset if kind is None else prepared_rows(trainer, self.eval_dataset)

    @property
    def protocol(self) -> dict[str, Any]:
        """Describe trainings of this kind as plain JSON: `drop`, `seed` and `perturbation`."""
        return {"drop": self.drop, "seed": self.seed, "perturbation": self.perturbation}

    def _selected(self, rows: np.ndarray) -> Any:
        chosen = [int(row) for row in rows]
        select = getattr(self.train_dataset, "select", None)
        return Subset(self.train_dataset, chosen) if select is None else select(chosen)


def _perturb(model: nn.Module, size: float, seed: int) -> None:
    """Multiply every trainable weight by 1 + size · x, x standard normal. Global generators are left as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.mul_((1 + size * noise).to(parameter.device, parameter.dtype))


def model_outputs(
    model: nn.Module,
    dataset: Any,
    task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
    data_collator: Collator | None = None,
    batch_size: int = 64,
    remove_unused_columns: bool = True,
) -> np.ndarray:
    """Compute f(z; θ) of every row, with the model in eval mode; its own mode is restored.

    Args:
        model (`torch.nn.Module`):
            The model, on its device.
        dataset (`Dataset`):
            The m rows.
        task (`str`, `AbstractModelOutput` or `Callable`, *optional*):
            The model output function. By default it follows from the model.
        data_collator (`Callable`, *optional*):
            Turns rows into a batch. By default it is chosen as by `Trainer`.
        batch_size (`int`, *optional*, defaults to 64):
            Rows per batch.
        remove_unused_columns (`bool`, *optional*, defaults to `True`):
            Whether to drop dataset columns that the model does not accept, as `Trainer` does.

    Returns:
        `np.ndarray` of shape `(m,)`, float64: the outputs.

    Raises:
        ValueError: the task cannot be inferred, is not a batched one, or needs reference rows (CLIP).
    """
    chosen = get_task(infer_task(model) if task is None else task)
    if not isinstance(chosen, BatchedModelOutput) or chosen.reference_rows(row_count(dataset, "dataset")):
        raise ValueError(
            f"`task` is {type(chosen).__name__}. Expected a task of one batched forward pass without reference rows. "
            "For others, pass a `retrain` function of your own that returns the outputs."
        )
    collator = chosen.collator(data_collator or default_collator(dataset))
    columns = [*forward_columns(model), *chosen.batch_columns] if remove_unused_columns else None
    device = next(model.parameters()).device
    batches = RowBatches(dataset, collator, columns=columns, device=device)
    found = []
    chosen.bind(model)
    with evaluating(model), pass_settings(model):
        for numbers, batch in batches.iterate(batch_rows(0, len(dataset), batch_size)):
            values = chosen.output(run_model(chosen, model, batch), batch, "target")
            found.append(one_per_sample(values, len(numbers), chosen).double().cpu())
    return torch.cat(found).numpy()


@contextmanager
def training_alone() -> Iterator[None]:
    """Make `Trainer` and `Accelerator` see one process, so that each process of a launch trains a model of its own, on
    its own device.
    """
    if not torch.distributed.is_initialized():
        yield
        return
    device = PartialState().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    environment = {name: os.environ.pop(name) for name in _LAUNCH_VARIABLES if name in os.environ}
    try:
        with accelerate_state_set_aside():
            PartialState(cpu=device.type == "cpu")
            yield
    finally:
        os.environ.update(environment)
