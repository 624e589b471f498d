"""Rows of the trainer of sentence-transformers: their task and their columns of texts.

Nothing of sentence-transformers is imported: a trainer is known by the name of its class, and asked for its settings.
"""

from collections.abc import Mapping
from typing import Any

from hf_trak.data.trainer_columns import ColumnsCollator
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.modelout_functions.embedding_losses import EmbeddingLossModelOutput
from hf_trak.modelout_functions.embedding_pairs import EmbeddingPairsModelOutput

_PACKAGE = "sentence_transformers"
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
"""Losses that compare the rows of a batch with each other, so that a row has none of its own."""


def is_trainer_of_texts(trainer: Any, name: str) -> bool:
    """Tell whether a trainer is that of a name in sentence-transformers, or derives from it."""
    return any(cls.__name__ == name and cls.__module__.partition(".")[0] == _PACKAGE for cls in type(trainer).__mro__)


def is_embedding_trainer(trainer: Any) -> bool:
    """Tell whether a trainer is a `SentenceTransformerTrainer`, or derives from it."""
    return is_trainer_of_texts(trainer, "SentenceTransformerTrainer")


def embedding_task(trainer: Any) -> BatchedModelOutput | None:
    """Make the task of a trainer of embeddings, with the settings of its loss.

    Args:
        trainer: any trainer.

    Returns:
        The task; `None` for any other trainer.

    Raises:
        ValueError: the loss is none that a task here has.
    """
    if not is_embedding_trainer(trainer):
        return None
    if any(type(module).__name__ == "Router" for module in trainer.model.modules()):
        raise ValueError(
            "The model has a `Router` module, which sends columns of texts on different ways. Expected one way for "
            "all texts. Pass `task=`, a task of your own (`BatchedModelOutput`)."
        )
    loss = trainer.loss
    name = type(loss).__name__
    if name in _RANKING:
        return _ranking(trainer, loss)
    if name in _ROWS:
        return _of_rows(loss, name)
    given = f"a mapping of the losses of {list(loss)}" if isinstance(loss, Mapping) else f"a {name}"
    why = ", which compares the rows of a batch with each other, so that a row has no loss of its own"
    raise ValueError(
        f"The loss of the trainer is {given}{why if name in _OF_BATCHES else ''}. Expected one of "
        f"{[_RANKING[0], *_ROWS]}. Pass the task of a loss that asks for the same of the embeddings "
        "(`task=EmbeddingPairsModelOutput(...)`, `EmbeddingLossModelOutput(...)`), or one of your own."
    )


def _ranking(trainer: Any, loss: Any) -> BatchedModelOutput:
    similarity = _SIMILARITIES.get(getattr(loss.similarity_fct, "__name__", ""))
    if similarity is None:
        raise ValueError(
            f"`similarity_fct` of the loss is {loss.similarity_fct!r}. Expected one of {list(_SIMILARITIES)}. Pass "
            "`task=`, a task of your own (`BatchedModelOutput`)."
        )
    if getattr(loss, "hardness_mode", None) is not None and loss.hardness_strength > 0:
        raise ValueError(
            f"`hardness_mode` of the loss is {loss.hardness_mode!r}. Expected None, for which there is a task. Pass "
            "`task=EmbeddingPairsModelOutput(...)`, which weighs all negatives alike."
        )
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
        parts = (type(loss.loss_fct).__name__, type(loss.cos_score_transformation).__name__)
        if parts != ("MSELoss", "Identity"):
            raise ValueError(
                f"`loss_fct` and `cos_score_transformation` of the loss are {parts}. Expected ('MSELoss', "
                "'Identity'). Pass `task=`, a task of your own (`BatchedModelOutput`)."
            )
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
                f"{list(self.texts)}, of which only negatives may be left out. Rename the columns."
            )
        return self.collator([{name: row[name] for name in kept} for row in rows])
