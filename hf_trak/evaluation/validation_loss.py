"""The mean loss of a validation set as one target, so that a score is what a training row did to that loss.

With whole gradients, or a replay, this costs as much as a single target. Outputs of tasks are other quantities: that
of a regression is the prediction, which may be too high or too low.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_trak._compat import counted_items
from hf_trak.data.preferences import kind_of, prepared_rows
from hf_trak.data.reference_log_probs import REFERRING, with_references
from hf_trak.data.rows import batch_rows
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.question import Question
from hf_trak.gradient_computers.base import run_model
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.modelout_functions.batches import evaluating
from hf_trak.modelout_functions.classification import RegressionModelOutput
from hf_trak.modelout_functions.loss import HasLoss, MinusLossModelOutput
from hf_trak.modelout_functions.row_loss import RowLossModelOutput
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.scores.groups import ALL


def rows_with_loss(features: FeaturizedModel, eval_dataset: Any) -> Any:
    """Return validation rows with all that their loss needs: log-probabilities of a reference model for preferences.

    Args:
        features: the model, and its trainer if it has one.
        eval_dataset: the validation rows, as people have them or prepared.
    """
    trainer, args = features.trainer, features.args
    if kind_of(trainer) not in REFERRING:
        return eval_dataset
    return with_references(trainer, prepared_rows(trainer, eval_dataset), args.output_dir, args.use_cpu)


def loss_question(features: FeaturizedModel, eval_dataset: Any) -> Question:
    """Ask about minus the mean loss of all validation rows.

    Args:
        features: the model and its training rows.
        eval_dataset: the validation rows.

    Raises:
        TypeError: the task has no loss of every row.
        All that [`FeaturizedModel.question`] raises.
    """
    require_loss(features)
    return replace(features.question(eval_dataset, group_by=ALL, featurized=False), of_loss=True)


def has_loss(features: FeaturizedModel) -> bool:
    """Tell whether the task has a loss of every row, which depends on no other rows as that of KTO does."""
    task = features.task
    alone = not task.reference_rows(features.train_size)
    return alone and isinstance(task, HasLoss) and isinstance(task, BatchedModelOutput)


def require_loss(features: FeaturizedModel) -> None:
    """Refuse a task without a loss of every row.

    Raises:
        TypeError: the task has none.
    """
    if not has_loss(features):
        raise TypeError(
            f"The task {type(features.task).__name__} has no loss of every row alone. Expected a task with "
            "`per_sample_loss(model_output, batch) -> (B,)`. Name such a task, or write that method."
        )


def _items(features: FeaturizedModel, task: AggregatedModelOutput, batch: Any) -> float:
    """Count the labels of a batch as its trainer does, which may count a first one that no token comes before."""
    items = None if features.trainer is None else counted_items(features.trainer, [batch])
    return float(task.label_weights(batch).sum()) if items is None else items


def validation_losses(features: FeaturizedModel, eval_dataset: Any) -> tuple[np.ndarray, float]:
    """Compute the loss of every validation row by the task, divided by a scale `(m,)`, and this scale.

    The mean of what is returned is the loss of all rows as a batch of the trainer has it. Losses of tokens are sums
    over the labels of a row, whose mean number, as the trainer counts them, is the scale. That of a regression is
    ½ (ŷ − y)², where the model has no ½. What a batch divides a trainer's own loss by (labels, weights of classes,
    nothing) is found from the batch.

    Args:
        features: the model and its task.
        eval_dataset: the m validation rows.
    """
    task, model, m = features.task, features.model, len(eval_dataset)
    batches = features.featurizer().batches(eval_dataset, "target")
    cuts = list(batch_rows(0, m, features.args.batch_size))
    if isinstance(task, TrainerLossModelOutput):
        with evaluating(model):
            losses = np.array([task.computed(model, batches.alone(row)).item() for row in range(m)])
            weights = list[float]()
            for rows, batch in batches.iterate(cuts):
                whole = task.of_batch(model, batch, task.items([batch])).item()
                weights.append(losses[rows].sum() / whole if whole else len(rows))
        scale = float(np.nansum(weights)) / m  # a batch without labels has no loss
        return losses / scale, scale
    scale = 0.5 if isinstance(task, RegressionModelOutput) else 1.0
    if isinstance(task, AggregatedModelOutput):
        scale = sum(_items(features, task, batches.collated(list(cut))) for cut in cuts) / m
    minus = MinusLossModelOutput(of=task)  # type: ignore[arg-type]  # `loss_question` has looked
    minus.bind(model)
    if isinstance(task, RowLossModelOutput):  # the model may return one loss for all rows of a batch
        cuts = list(batch_rows(0, m, 1))
    featurizer, found = features.featurizer(minus), np.empty(m)
    with evaluating(model), pass_settings(model), torch.no_grad():
        for rows, batch in featurizer.batches(eval_dataset, "target").iterate(cuts):
            given = featurizer.in_dtype_of_model(batch)
            found[rows] = minus.output(run_model(minus, model, given), given, "target").double().cpu()
    return -found / scale, scale
