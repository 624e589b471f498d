"""Rows of the trainer of cross-encoders of sentence-transformers: their task, and their pairs of texts.

Nothing of sentence-transformers is imported: a trainer is known by the name of its class, and asked for its settings.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hf_trak.data.text_columns import TextColumns, is_trainer_of_texts
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.modelout_functions.text_pairs import TextPairsModelOutput

_LOSSES = {
    "BinaryCrossEntropyLoss": ("binary_cross_entropy", "bce_with_logits_loss", "BCEWithLogitsLoss"),
    "CrossEntropyLoss": ("cross_entropy", "ce_loss", "CrossEntropyLoss"),
    "MSELoss": ("mse", "loss_fct", "MSELoss"),
    "MarginMSELoss": ("margin_mse", "loss_fct", "MSELoss"),
}
"""By the class of a loss: its name here, its attribute with a loss of torch, and the class of that."""
_OF_LISTS = ("LambdaLoss", "ListMLELoss", "ListNetLoss", "PListMLELoss", "RankNetLoss", "ADRMSELoss")
_OF_BATCHES = ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss")
_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}


def is_pair_trainer(trainer: Any) -> bool:
    """Tell whether a trainer is a `CrossEncoderTrainer`, or derives from it."""
    return is_trainer_of_texts(trainer, "CrossEncoderTrainer")


def pair_task(trainer: Any) -> BatchedModelOutput | None:
    """Make the task of a trainer of cross-encoders, with the settings of its loss.

    Args:
        trainer: any trainer.

    Returns:
        The task; `None` for any other trainer.

    Raises:
        ValueError: the loss is none that a task here has.
    """
    if not is_pair_trainer(trainer):
        return None
    loss = trainer.loss
    name = type(loss).__name__
    if name not in _LOSSES:
        given = f"a mapping of the losses of {list(loss)}" if isinstance(loss, Mapping) else f"a {name}"
        why = ""
        if name in _OF_LISTS:
            why = ", whose rows are lists of documents, which have no task here"
        elif name in _OF_BATCHES:
            why = (
                ", which takes the texts of other rows of a batch for negatives, so that a row has no loss of its own"
            )
        raise ValueError(
            f"The loss of the trainer is {given}{why}. Expected one of {list(_LOSSES)}. Pass `task=`, a "
            "`TextPairsModelOutput(...)` or a task of your own (`BatchedModelOutput`)."
        )
    task, attribute, expected = _LOSSES[name]
    inner = getattr(loss, attribute)
    changed = [
        f"{setting}={value!r}"
        for setting, value, plain in (
            ("reduction", inner.reduction, "mean"),
            ("weight", getattr(inner, "weight", None), None),
            ("label_smoothing", getattr(inner, "label_smoothing", 0.0), 0.0),
        )
        if value is not plain and (isinstance(value, torch.Tensor) or value != plain)
    ]
    activation = type(loss.activation_fn).__name__
    if type(inner).__name__ != expected or changed or activation not in _ACTIVATIONS:
        given = f"{type(inner).__name__}({', '.join(changed)}) after {activation}"
        raise ValueError(
            f"The loss of the trainer is a {name} with {given}. Expected {expected}() after one of "
            f"{list(_ACTIVATIONS)}. Pass `task=`, a task of your own (`BatchedModelOutput`)."
        )
    weight = getattr(loss, "pos_weight", None)
    if weight is not None and weight.numel() != 1:
        raise ValueError(
            f"`pos_weight` of the loss has {weight.numel()} numbers. Expected one, for the one logit of the model. "
            "Give the loss one number."
        )
    return TextPairsModelOutput(
        task,  # type: ignore[arg-type]  # one of the names of the table
        _ACTIVATIONS[activation],  # type: ignore[arg-type]
        None if weight is None else float(weight),
    )


class PairColumns(TextColumns):
    """The collator of a trainer of cross-encoders, and the tokens of its pairs, which the trainer's loss would make.

    The first column of texts is paired with each of the others. Tokens are named by the column of the other text.
    """

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch.

        Raises:
            ValueError: a row lacks the first column of texts or the second, or a column holds something else.
        """
        batch = super().__call__(rows)
        settings = {name: batch.pop(name, None) for name in ("prompt", "task")}
        batch.pop("dataset_name", None)
        columns = [name for name in batch if name != "label"]
        made: dict[str, Any] = {}
        for name in columns:
            if other := [text for text in batch[name] if not isinstance(text, str)]:
                raise ValueError(
                    f"The column {name!r} holds a {type(other[0]).__name__}. Expected texts, one per row and column. "
                    "Give every document a row or a column of its own."
                )
        for name in columns[1:]:
            pairs = list(zip(batch[columns[0]], batch[name], strict=True))
            tokens = self.collator.preprocess_fn(pairs, **settings)  # type: ignore[attr-defined]
            made.update({f"{name}_{key}": value for key, value in tokens.items()})
        if (label := batch.get("label")) is not None:
            made["label"] = torch.stack(label) if isinstance(label, list) else label
        return made
