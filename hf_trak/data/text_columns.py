"""Rows of the trainer of sentence-transformers: their task and their columns of texts.

Nothing of sentence-transformers is imported: a trainer is known by the name of its class, and asked for its settings.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from datasets import Dataset

from hf_trak.data.rows import forward_columns
from hf_trak.modelout_functions.base import BatchedModelOutput, Collator, WrappingCollator
from hf_trak.modelout_functions.embedding_pairs import EmbeddingPairsModelOutput
from hf_trak.modelout_functions.embeddings import EmbeddingLossModelOutput
from hf_trak.modelout_functions.text_pairs import TextPairsModelOutput
from hf_trak.modelout_functions.tokens import ROLE_MASKS
from hf_trak.runtime.progress import no_progress_bars


class ColumnsCollator(WrappingCollator):
    """A data collator with the names of the dataset columns that it needs, whatever the model's `forward` takes."""

    decides_labels = True
    """Whether masks of completions count only where the collator returns them, as for the trainer that it is of."""

    def __init__(self, collator: Collator, columns: tuple[str, ...]) -> None:
        """
        Args:
            collator: the data collator.
            columns: names of columns.
        """
        super().__init__(collator)
        self.columns = columns


def signature_columns(trainer: Any) -> tuple[str, ...]:
    """List the columns that a trainer keeps: the inputs of the model's `forward`, or those that the trainer names.

    TRL's trainers name columns from which their collators make the model's inputs: images and messages, or pairs of
    answers (`chosen_ids`, `rejected_ids`).

    Args:
        trainer: a `transformers.Trainer`. It keeps the list for itself, as at the start of a training.
    """
    choose = getattr(trainer, "_set_signature_columns_if_needed", None)
    if choose is None:
        return ()
    choose()
    return tuple(getattr(trainer, "_signature_columns", None) or ())


def trainer_collator(trainer: Any) -> Collator:
    """Return the data collator of a trainer, together with the columns that it needs beside those of `forward`.

    Args:
        trainer: a `transformers.Trainer`.
    """
    own, given = signature_columns(trainer), getattr(trainer.train_dataset, "column_names", None) or ()
    masked = not set(ROLE_MASKS).isdisjoint(given)
    if set(own) <= set(forward_columns(trainer.model, trainer.args.label_names)) and not masked:
        return trainer.data_collator
    return ColumnsCollator(trainer.data_collator, own)


_OWN_TASK = "Pass `task=`, a task of your own (`BatchedModelOutput`)."

_PACKAGE, _EMBEDDINGS, _PAIRS = "sentence_transformers", "SentenceTransformerTrainer", "CrossEncoderTrainer"

_RANKING = (
    "MultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
)

_ROWS = ("CosineSimilarityLoss", "ContrastiveLoss", "TripletLoss")

_SIMILARITIES = {"cos_sim": "cosine", "dot_score": "dot"}

_OF_BATCHES = (
    "CoSENTLoss", "AnglELoss", "OnlineContrastiveLoss", "BatchAllTripletLoss", "BatchHardTripletLoss",
    "BatchSemiHardTripletLoss", "BatchHardSoftMarginTripletLoss", "MegaBatchMarginLoss",
)  # fmt: skip

_OF_LISTS = ("LambdaLoss", "ListMLELoss", "ListNetLoss", "PListMLELoss", "RankNetLoss", "ADRMSELoss")

_PAIRS_OF_BATCHES = ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss")

_ALONE = "so that a row has no loss of its own"

_WHY = {
    **dict.fromkeys(_OF_BATCHES, f", which compares the rows of a batch with each other, {_ALONE}"),
    **dict.fromkeys(_OF_LISTS, ", whose rows are lists of documents, which have no task here"),
    **dict.fromkeys(_PAIRS_OF_BATCHES, f", which takes the texts of other rows of a batch for negatives, {_ALONE}"),
}
"""Why there is no task for a loss."""


def is_trainer_of_texts(trainer: Any, name: str) -> bool:
    """Tell whether a trainer is that of a name in sentence-transformers, or derives from it."""
    return any(cls.__name__ == name and cls.__module__.partition(".")[0] == _PACKAGE for cls in type(trainer).__mro__)


def refuse(owner: Any, name: str, fine: bool, expected: str, remedy: str) -> None:
    """Refuse a setting of a trainer or its loss, unless it is fine.

    Args:
        owner: what has the setting.
        name: name of its attribute.
        fine: whether there is a task for it.
        expected: what would be.
        remedy: what to do.

    Raises:
        ValueError: it is not fine.
    """
    if not fine:
        raise ValueError(
            f"`{name}` of the {type(owner).__name__} is {getattr(owner, name)!r}. Expected {expected}, for which "
            f"there is a task. {remedy}"
        )


def _name_of(loss: Any) -> str:
    """Name the class of a loss, with its module unless it is one of sentence-transformers."""
    cls = type(loss)
    return cls.__name__ if cls.__module__.partition(".")[0] == _PACKAGE else f"{cls.__module__}.{cls.__name__}"


def embedding_task(trainer: Any) -> BatchedModelOutput | None:
    """Make the task of a trainer of embeddings, with the settings of its loss.

    Args:
        trainer: any trainer.

    Returns:
        The task; `None` for any other trainer.

    Raises:
        ValueError: the loss is none that a task here has.
    """
    if not is_trainer_of_texts(trainer, _EMBEDDINGS):
        return None
    if any(type(module).__name__ == "Router" for module in trainer.model.modules()):
        raise ValueError(
            "The model has a `Router` module, which sends columns of texts on different ways. Expected one way for "
            "all texts. Pass `task=`, a task of your own (`BatchedModelOutput`)."
        )
    loss = trainer.loss
    name = _name_of(loss)
    if name in _RANKING:
        return _ranking(trainer, loss)
    if name in _ROWS:
        return _of_rows(loss, name)
    raise _without_task(
        loss,
        [_RANKING[0], *_ROWS],
        "Pass the task of a loss that asks for the same of the embeddings (`task=EmbeddingPairsModelOutput(...)`, "
        "`EmbeddingLossModelOutput(...)`), or one of your own.",
    )


def _without_task(loss: Any, known: list[str], remedy: str) -> ValueError:
    name = _name_of(loss)
    given = f"a mapping of the losses of {list(loss)}" if isinstance(loss, Mapping) else f"a {name}"
    return ValueError(f"The loss of the trainer is {given}{_WHY.get(name, '')}. Expected one of {known}. {remedy}")


def _ranking(trainer: Any, loss: Any) -> BatchedModelOutput:
    similarity = _SIMILARITIES.get(getattr(loss.similarity_fct, "__name__", ""))
    refuse(loss, "similarity_fct", similarity is not None, f"one of {list(_SIMILARITIES)}", _OWN_TASK)
    alike = getattr(loss, "hardness_mode", None) is None or loss.hardness_strength <= 0
    remedy = "Pass `task=EmbeddingPairsModelOutput(...)`, which weighs all negatives alike."
    refuse(loss, "hardness_mode", alike, "None", remedy)
    processes = trainer.args.world_size if getattr(loss, "gather_across_devices", False) else 1
    return EmbeddingPairsModelOutput(
        scale=float(loss.scale),
        similarity=similarity,  # type: ignore[arg-type]  # one of the two names
        batch_size=max(2, trainer.args.per_device_train_batch_size * processes),
        directions=tuple(loss.directions),
        partition=loss.partition_mode,
    )


def _of_rows(loss: Any, name: str) -> BatchedModelOutput:
    if name == "CosineSimilarityLoss":
        for setting, plain in (("loss_fct", "MSELoss"), ("cos_score_transformation", "Identity")):
            refuse(loss, setting, type(getattr(loss, setting)).__name__ == plain, f"{plain}()", _OWN_TASK)
        return EmbeddingLossModelOutput("cosine_similarity")
    settings = loss.get_config_dict()
    metric = str(settings["distance_metric"]).rpartition(".")[2].lower()
    distances: dict[str, Any] = {"cosine_distance": "cosine", "cosine": "cosine"}
    distance = distances.get(metric, metric)
    if distance not in ("cosine", "euclidean", "manhattan"):
        raise ValueError(
            f"`distance_metric` of the loss is {settings['distance_metric']!r}. Expected the cosine, Euclidean or "
            "Manhattan distance of sentence-transformers. Pass `task=`, a task of your own (`BatchedModelOutput`)."
        )
    if name == "TripletLoss":
        return EmbeddingLossModelOutput("triplet", distance, float(loss.triplet_margin))
    return EmbeddingLossModelOutput("contrastive", distance, float(loss.margin))


class TextColumns(ColumnsCollator):
    """The collator of a trainer of embeddings, which is given the columns of the training rows in their order.

    It takes every column for a text, and their order for their meaning: rows of targets may be dictionaries in another
    order, and with other columns beside. Of these, only such as `negative` and `negative_1` are texts, too.
    """

    every_column = True

    def __init__(self, trainer: Any) -> None:
        """
        Args:
            trainer: a trainer of embeddings.
        """
        super().__init__(trainer.data_collator, ())
        labels = set(getattr(trainer.data_collator, "valid_label_columns", ()))
        given = getattr(trainer.train_dataset, "column_names", None)
        names = list(given) if isinstance(given, list) else []
        self.labels = tuple(sorted(labels))
        self.texts = tuple(name for name in names if name not in labels)

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch.

        Raises:
            ValueError: a row lacks the first column of texts or the second.
        """
        if not rows or not isinstance(rows[0], Mapping) or not self.texts:
            return self.collator(rows)
        negatives = sorted(name for name in rows[0] if name.startswith("negative") and name not in self.texts)
        kept = [name for name in (*self.texts, *negatives, *self.labels) if name in rows[0]]
        if missing := [name for name in self.texts[:2] if name not in kept]:
            raise ValueError(
                f"A row has the columns {list(rows[0])}, and not {missing}. Expected the texts of the training rows, "
                f"{list(self.texts)}; only negatives may be left out. Rename the columns."
            )
        return self.collator([{name: row[name] for name in kept} for row in rows])


_LOSSES = {
    "BinaryCrossEntropyLoss": ("binary_cross_entropy", "bce_with_logits_loss", "BCEWithLogitsLoss"),
    "CrossEntropyLoss": ("cross_entropy", "ce_loss", "CrossEntropyLoss"),
    "MSELoss": ("mse", "loss_fct", "MSELoss"),
    "MarginMSELoss": ("margin_mse", "loss_fct", "MSELoss"),
}

"""By the class of a loss: its name here, its attribute with a loss of torch, and the class of that."""

_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}


def pair_task(trainer: Any) -> BatchedModelOutput | None:
    """Make the task of a trainer of cross-encoders, with the settings of its loss.

    Args:
        trainer: any trainer.

    Returns:
        The task; `None` for any other trainer.

    Raises:
        ValueError: the loss is none that a task here has.
    """
    if not is_trainer_of_texts(trainer, _PAIRS):
        return None
    loss = trainer.loss
    name = _name_of(loss)
    if name not in _LOSSES:
        remedy = "Pass `task=`, a `TextPairsModelOutput(...)` or a task of your own (`BatchedModelOutput`)."
        raise _without_task(loss, list(_LOSSES), remedy)
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
    remedy = "Give the loss one number, for the one logit of the model."
    refuse(loss, "pos_weight", weight is None or weight.numel() == 1, "one number", remedy)
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


_TOKENS = "input_ids"

_RAW = ("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs")

_TURNS = {"messages": {"role"}, "prompt": {"role"}, "conversations": {"from", "value"}}
"""Columns that an `SFTTrainer` takes chats from, and what it tells them by in the first turn."""


class SFTCollator(ColumnsCollator):
    """The collator of an `SFTTrainer`, which also takes rows that are not tokens yet."""

    def __init__(self, trainer: Any) -> None:
        """
        Args:
            trainer: a `trl.SFTTrainer` of texts.
        """
        names = dict.fromkeys([*signature_columns(trainer), trainer.args.dataset_text_field, *_RAW])
        super().__init__(trainer.data_collator, tuple(names))
        self.trainer = trainer
        self.every_column = trainer._formatting_func is not None  # which may read any of them

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch. Raises as [`ready`] does."""
        return self.collator(self.ready(rows))

    @property
    def prompt_settings(self) -> dict[str, Any]:
        """Return the arguments that let [`tokenize_prompt`] do as the trainer does."""
        return {"template": self.trainer.chat_template, "text_column": self.trainer.args.dataset_text_field}

    def ready(self, rows: list[Any]) -> list[Any]:
        """Return rows of tokens, which they may be already.

        Raises:
            ValueError: a row has no columns that the trainer takes, or no answer, the preparation leaves rows out, or
                several processes would have to prepare them together.
        """
        if not rows or not isinstance(rows[0], Mapping) or _TOKENS in rows[0]:
            return rows
        trainer = self.trainer
        if trainer.accelerator.num_processes > 1:
            raise ValueError(
                f"Rows with {sorted(rows[0])} are no tokens yet, and one of {trainer.accelerator.num_processes} "
                "processes cannot prepare them alone. Expected rows with `input_ids`. Give the trainer these rows as "
                "`eval_dataset`, and pass `trainer.eval_dataset`."
            )
        for row in rows:
            if not self.every_column:
                _check_taken(row, trainer.args.dataset_text_field)
            _check_answered(row, trainer.args.assistant_only_loss)
        args = copy(trainer.args)
        args.shuffle_dataset = False  # rows keep their numbers
        with no_progress_bars():
            given = Dataset.from_list([dict(row) for row in rows])
            made = trainer._prepare_dataset(
                given, trainer.processing_class, args, False, trainer._formatting_func, "eval"
            )
        if len(made) != len(rows):
            raise ValueError(
                f"The {type(trainer).__name__} makes {len(made)} rows of {len(rows)}. Expected one for each. Leave "
                "out rows that its `max_length` drops."
            )
        return list(made)


def _check_taken(row: Mapping[str, Any], text: str) -> None:
    """Refuse a row that the trainer's preparation finds no text in."""
    given = {name: value for name, value in row.items() if value is not None}
    lists = {name: one for name, one in given.items() if isinstance(one, list | tuple) and one}
    turns = {name: one[0] for name, one in lists.items() if isinstance(one[0], Mapping)}
    if any(isinstance(given.get(name), str) for name in (text, "prompt")):
        return
    if not any(keys <= set(turns.get(name, ())) for name, keys in _TURNS.items()):
        found = "".join(f" (turns of {name!r} have {sorted(turn)})" for name, turn in turns.items())
        raise ValueError(
            f"A row has the columns {sorted(given)}{found}, and `SFTTrainer` finds no text in them. Expected "
            "`messages` or `prompt` with turns of `role` and `content`, `conversations` with turns of `from` and "
            f"`value`, or a text in `prompt` or `{text}`. Rename the column or the keys of its turns."
        )


def _check_answered(row: Mapping[str, Any], assistant_only: bool) -> None:
    """Refuse a row with a prompt and no answer."""
    turns = row.get("messages")
    if row.get("prompt") is not None:
        answered = row.get("completion") is not None
    else:
        answered = not assistant_only or turns is None or any(turn.get("role") == "assistant" for turn in turns)
    if not answered:
        raise ValueError(
            f"A row has the columns {sorted(name for name, value in row.items() if value is not None)} and no answer, "
            "so that it has no labels. Expected a completion, or a turn of the assistant. Let the model answer: pass "
            "`attributor.predict(rows, max_new_tokens=...)`."
        )


def collator_of(trainer: Any) -> Collator:
    """Return the data collator of a trainer, which takes raw rows where the trainer knows how to prepare them.

    Args:
        trainer: a `transformers.Trainer`.
    """
    if is_trainer_of_texts(trainer, _EMBEDDINGS):
        return TextColumns(trainer)
    if is_trainer_of_texts(trainer, _PAIRS):
        return PairColumns(trainer)
    own = any(cls.__name__ == "SFTTrainer" and cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)
    if own and not trainer._is_vision_dataset and hasattr(trainer, "_formatting_func"):
        return SFTCollator(trainer)
    return trainer_collator(trainer)
