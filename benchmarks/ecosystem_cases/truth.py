"""The loss of a row as people train on it, without anything of hf_trak: what every case is compared with."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, default_collate

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions.loss import HasLoss, LossModelOutput

RowLoss = Callable[[int], torch.Tensor]


def of_trainer(trainer: Any, args: TrakConfig, train_dataset: Any = None, **options: Any) -> TrakAttributor:
    """The attributor of a trainer, whose truth is `compute_loss` on rows that its own loader and collator made."""
    own = TrakAttributor.from_trainer(trainer, args, train_dataset=train_dataset, **options)
    given = trainer.train_dataset if train_dataset is None else train_dataset

    def loss(row: int) -> torch.Tensor:
        batches = own.features.featurizer().batches(own.train_dataset)
        # of rows that a collator draws at random, only hf_trak knows which draw it has taken
        return loss_of_trainer(trainer, given, row, batches.alone(row) if batches.drawn else None)

    return with_truth(own, loss)


def without_truth(trainer: Any, args: TrakConfig, train_dataset: Any = None) -> TrakAttributor:
    """The attributor of a trainer whose loss compares rows, so that a row alone has none."""
    return TrakAttributor.from_trainer(trainer, args, train_dataset=train_dataset)


def of_model(model: Any, args: TrakConfig, rows: Any, collator: Any = None, **options: Any) -> TrakAttributor:
    """Make the attributor of a model of transformers. Its truth is the loss that `Trainer` would train it by."""
    own = TrakAttributor(model, args, train_dataset=rows, data_collator=collator, **options)
    plain = hf.TrainingArguments(
        args.output_dir, use_cpu=True, report_to=[], remove_unused_columns=args.remove_unused_columns
    )
    trainer = hf.Trainer(own.model, plain, own.features.data_collator, rows)
    return with_truth(own, lambda row: loss_of_trainer(trainer, rows, row))


def of_plain_trainer(model: Any, args: TrakConfig, rows: Any, collator: Any = None, **options: Any) -> TrakAttributor:
    """The attributor of a `Trainer` of a model, rows and a collator."""
    own = hf.TrainingArguments(
        f"{args.output_dir}-out", use_cpu=True, report_to=[], remove_unused_columns=args.remove_unused_columns
    )
    return of_trainer(hf.Trainer(model, own, collator, rows), args, **options)


def of_loop(model: Any, args: TrakConfig, rows: Any, **options: Any) -> TrakAttributor:
    """The attributor of a classifier trained in a loop, whose truth is the cross-entropy of a row."""
    own = TrakAttributor(model, args, train_dataset=rows, **options)

    def loss(row: int) -> torch.Tensor:
        pixels, labels = default_collate([rows[row]])
        return cross_entropy(model(pixels), labels)

    return with_truth(own, loss)


def with_truth(own: TrakAttributor, loss: RowLoss) -> TrakAttributor:
    """Keep the loss of a row beside the attributor."""
    own.loss_of = loss  # type: ignore[attr-defined]
    return own


def by_loss(own: TrakAttributor) -> TrakAttributor:
    """Take the side of the training rows for features, as exact scores do: minus the loss."""
    if isinstance(own.task, HasLoss) and hasattr(own, "loss_of"):
        own.features.task = LossModelOutput(of=own.task)
    return own


def loss_of_trainer(trainer: Any, rows: Any, row: int, inputs: Any = None) -> torch.Tensor:
    """`compute_loss` on a row that the trainer's own loader and collator made alone, or on `inputs`.

    Where the loss counts items, it is given 1: the sum over the labels of the row, not their mean. A mean over the
    labels of a batch, which does not count, weighs them alike as well: it is multiplied by the labels of the row.
    """
    if inputs is None:
        alone = rows.select([row]) if hasattr(rows, "select") else Subset(rows, [row])
        inputs = next(iter(trainer.get_eval_dataloader(alone)))
    items = trainer.get_batch_samples(iter([dict(inputs)]), 1, trainer.args.device)[1]

    def computed(count: float) -> torch.Tensor:
        given = None if items is None else torch.tensor(count)
        return trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=given)

    loss, labels = computed(1.0), inputs.get("labels")
    of_tokens = isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point()
    if of_tokens and torch.equal(loss, computed(2.0)):
        first = int(trainer._loss_shifts_labels)  # nothing predicts the first token of a causal model
        loss = loss * (labels[:, first:] != -100).sum()
    return loss
