"""`EmbeddingModelOutput`: rows of several texts. A model turns each text into one vector.

A batch is `(B, C, T)`: one sample is one row of C texts (anchor, positive, negatives), so that the gradient of a row
is that of all of its texts together. The model of `sentence-transformers` is given `(B · C, T)`, the texts of a row
next to each other, as a mapping, and returns one with `sentence_embedding`.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad, pairwise_distance, relu

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Collator, Side, WrappingCollator, checked_choice
from hf_trak.modelout_functions.batches import LABEL_NAMES, mapping_of
from hf_trak.modelout_functions.completions import check_finite

TOKENS = "input_ids"

_SUFFIX = f"_{TOKENS}"

_PROMPT = "prompt_length"

"""Number of tokens of a prompt, which some pooling modules leave out."""


class TextsCollator(WrappingCollator):
    """A data collator that lays the texts of every row beside each other, `(B, C, T)`."""

    every_column = True

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch.

        Raises:
            ValueError: the inner collator makes something else of them.
        """
        batch = self.collator(rows)
        if not isinstance(batch, Mapping):
            return batch
        model = _model_behind(self.collator)
        fill = getattr(getattr(model, "tokenizer", None), "pad_token_id", None)
        if model is not None and all(getattr(module, "include_prompt", True) for module in model.modules()):
            batch = {name: value for name, value in batch.items() if not name.endswith(f"_{_PROMPT}")}
        return stacked_texts(batch, 0 if fill is None else int(fill))


def stacked_texts(batch: Mapping[str, Any], fill: int = 0) -> dict[str, Any]:
    """Stack the texts of every row, padded on the right to the longest one of the batch.

    Args:
        batch: `<column>_input_ids`, `<column>_attention_mask` and the like, `(B, T)` each, and labels.
        fill: the token of the padding.

    Returns:
        `input_ids`, `attention_mask` and the like, `(B, C, T)` each, and labels under their own name.

    Raises:
        ValueError: there are no texts, or columns that cannot share a pass through the model.
    """
    if not (columns := [name.removesuffix(_SUFFIX) for name in batch if name.endswith(_SUFFIX)]):
        raise ValueError(
            f"The data collator made a batch with {list(batch)}, and no column of tokens (`<column>{_SUFFIX}`). "
            "Expected texts, tokenized by the collator of a `SentenceTransformerTrainer`. Use "
            "`SentenceTransformerDataCollator(model.preprocess)`."
        )
    texts = [_entries(batch, column, columns) for column in columns]
    made: dict[str, Any] = {}
    for name in texts[0]:
        values = [text.get(name) for text in texts]
        made[name] = _stacked(name, values, columns, fill if name == TOKENS else 0)
    if other := sorted({name for text in texts for name in text} - set(made)):
        raise ValueError(_uneven(f"`{other[0]}` of only some of the columns {columns}"))
    labels = {name: value for name, value in batch.items() if name in LABEL_NAMES}
    return {**made, **labels}


def _entries(batch: Mapping[str, Any], column: str, columns: list[str]) -> dict[str, Any]:
    """Return the entries of one column by their names without that of the column."""
    longer = tuple(f"{other}_" for other in columns if other.startswith(f"{column}_"))
    its = [name for name in batch if name.startswith(f"{column}_") and not name.startswith(longer)]
    found = {name[len(column) + 1 :]: batch[name] for name in its}
    if found.get("modality", "text") != "text" or "task" in found:
        named = "task" if "task" in found else "modality"
        raise ValueError(
            f"The column `{column}` has the {named} {found[named]!r}. Expected texts that all take the same way "
            "through the model. Models with a `Router`, and images or sound, have no task here: pass a task of your "
            "own (`BatchedModelOutput`)."
        )
    return {name: value for name, value in found.items() if name != "modality"}


def _stacked(name: str, values: list[Any], columns: list[str], fill: int) -> Any:
    if all(isinstance(value, Tensor) and value.ndim == 2 for value in values):
        width = max(value.shape[1] for value in values)
        return torch.stack([pad(value, (0, width - value.shape[1]), value=fill) for value in values], dim=1)
    if any(isinstance(value, Tensor) for value in values) or any(value != values[0] for value in values):
        shown = [tuple(value.shape) if isinstance(value, Tensor) else value for value in values]
        raise ValueError(_uneven(f"`{name}` of {shown} for the columns {columns}"))
    return values[0]


def _uneven(given: str) -> str:
    return (
        f"The data collator made {given}. Expected columns of texts that are tokenized alike, since they share a pass "
        "through the model. Pass a task of your own (`BatchedModelOutput`), or prompts of one length."
    )


def _model_behind(collator: Any) -> Any:
    """Return the model whose `preprocess` a collator calls; `None` where it calls another function."""
    while collator is not None:
        if (model := getattr(getattr(collator, "preprocess_fn", None), "__self__", None)) is not None:
            return model
        collator = getattr(collator, "collator", None)
    return None


class EmbeddingModelOutput(BatchedModelOutput):
    """Base class of tasks whose samples are rows of texts, and whose f is a function of their embeddings."""

    def collator(self, collator: Collator) -> Collator:
        return collator if isinstance(collator, TextsCollator) else TextsCollator(collator)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entries = as_texts(batch)
        features = {
            name: value.flatten(0, 1) if isinstance(value, Tensor) and value.ndim == 3 else value
            for name, value in entries.items()
            if name not in LABEL_NAMES
        }
        return (features,), {}

    def embeddings(self, model_output: Any, batch: Batch) -> Tensor:
        """Return the embeddings of every row, `(B, C, d)`, at least float32, differentiable.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch.

        Raises:
            TypeError: the model returned no embeddings.
            ValueError: their number is not that of the texts.
        """
        tokens = as_texts(batch)[TOKENS]
        found = model_output.get("sentence_embedding") if isinstance(model_output, Mapping) else None
        if not isinstance(found, Tensor):
            raise TypeError(
                f"The model returned a {type(model_output).__name__} without `sentence_embedding`. Expected a mapping "
                "with one vector per text. Load the model as `SentenceTransformer`, with a pooling module."
            )
        if found.ndim != 2 or found.shape[0] != tokens.shape[0] * tokens.shape[1]:
            raise ValueError(
                f"The model returned embeddings of the shape {tuple(found.shape)} for {tokens.shape[0]} row(s) of "
                f"{tokens.shape[1]} texts. Expected one vector per text. Add a pooling module to the model."
            )
        return found.to(torch.promote_types(found.dtype, torch.float32)).unflatten(0, (-1, tokens.shape[1]))


def as_texts(batch: Batch) -> Mapping[str, Any]:
    """Return a batch of rows of texts.

    Raises:
        TypeError: it is no mapping.
        ValueError: it has no tokens of the shape `(B, C, T)`.
    """
    entries = mapping_of(batch, f"with `{TOKENS}`. Use the data collator of the `SentenceTransformerTrainer`.")
    tokens = entries.get(TOKENS)
    if not isinstance(tokens, Tensor) or tokens.ndim != 3:
        given = f"`{TOKENS}` of the shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else list(entries)
        raise ValueError(
            f"The batch has {given}. Expected `{TOKENS}` of the shape (rows, texts, tokens). Use the data collator of "
            "the `SentenceTransformerTrainer`."
        )
    return entries


_BASE, _PRIMES = 1_000_003, (2_147_483_647, 2_147_483_629)


def text_digests(batch: Batch) -> Tensor:
    """Compute numbers that are equal for texts of equal tokens, whatever their padding.

    They are polynomials of the tokens modulo two primes, which together make 62 bits: two of a million texts have the
    same number with a probability of 10⁻⁷.

    Args:
        batch: `input_ids`, and `attention_mask` if there is padding, `(B, C, T)` each.

    Returns:
        `(B, C)`, int64.
    """
    entries = as_texts(batch)
    tokens = entries[TOKENS]
    mask = entries.get("attention_mask")
    kept = torch.ones_like(tokens) if mask is None else (mask != 0).long()
    places = (kept.cumsum(dim=-1) - 1).clamp(min=0)
    halves = []
    for prime in _PRIMES:
        powers = [1]
        for _ in range(1, tokens.shape[-1]):
            powers.append(powers[-1] * _BASE % prime)
        factors = torch.tensor(powers, device=tokens.device)[places]
        halves.append((((tokens + 1) % prime) * factors % prime * kept).sum(dim=-1) % prime)
    return (halves[0] << 31) ^ halves[1]


EmbeddingLoss = Literal["cosine_similarity", "contrastive", "triplet"]

Distance = Literal["cosine", "euclidean", "manhattan"]


_DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda one, other: 1 - cosine_similarity(one, other, dim=-1),
    "euclidean": lambda one, other: pairwise_distance(one, other, 2.0),
    "manhattan": lambda one, other: pairwise_distance(one, other, 1.0),
}

_TEXTS = {"cosine_similarity": 2, "contrastive": 2, "triplet": 3}


class TextLossModelOutput(EmbeddingModelOutput):
    """A task of texts whose f on training rows is minus the loss, so that q is 1."""

    @abstractmethod
    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the training loss of every row, `(B,)`."""

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            losses = self.per_sample_loss(model_output, batch)
            check_finite(losses, "The loss")
            return torch.ones_like(losses)


class EmbeddingLossModelOutput(TextLossModelOutput):
    """Task of embedding models whose loss is a mean over rows: f is minus the loss of the row, q ≡ 1."""

    def __init__(
        self, loss: EmbeddingLoss = "cosine_similarity", distance: Distance = "cosine", margin: float = 0.5
    ) -> None:
        """
        Args:
            loss (`str`, *optional*, defaults to `"cosine_similarity"`):
                `"cosine_similarity"`, `"contrastive"` or `"triplet"`.
            distance (`str`, *optional*, defaults to `"cosine"`):
                d of the last two: `"cosine"` for 1 − cos, `"euclidean"` or `"manhattan"`.
            margin (`float`, *optional*, defaults to 0.5):
                m of the last two.

        Raises:
            ValueError: a name is unknown.
        """
        super().__init__()
        self.loss = checked_choice(loss, "loss", EmbeddingLoss)
        self.distance = checked_choice(distance, "distance", Distance)
        self.margin = float(margin)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the loss of every row, differentiable, shape `(B,)`."""
        texts = self._texts(model_output, batch)
        if self.loss == "cosine_similarity":
            return (cosine_similarity(texts[0], texts[1], dim=-1) - row_labels(batch, texts[0])).square()
        near = self._far(texts[0], texts[1])
        if self.loss == "triplet":
            return relu(near - self._far(texts[0], texts[2]) + self.margin)
        labels = row_labels(batch, texts[0])
        return 0.5 * (labels * near.square() + (1 - labels) * relu(self.margin - near).square())

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "train" or self.loss == "cosine_similarity":
            return -self.per_sample_loss(model_output, batch)
        texts = self._texts(model_output, batch)
        near = self._far(texts[0], texts[1])
        if self.loss == "triplet":
            return self._far(texts[0], texts[2]) - near
        return (1 - 2 * row_labels(batch, texts[0])) * near

    def _far(self, one: Tensor, other: Tensor) -> Tensor:
        return _DISTANCES[self.distance](one, other)

    def _texts(self, model_output: Any, batch: Batch) -> tuple[Tensor, ...]:
        embeddings = self.embeddings(model_output, batch)
        wanted = _TEXTS[self.loss]
        if embeddings.shape[1] != wanted:
            raise ValueError(
                f"The rows have {embeddings.shape[1]} column(s) of texts. Expected {wanted} for the loss "
                f"{self.loss!r}. Give the trainer, and targets, rows of that many texts."
            )
        with torch.autocast(embeddings.device.type, enabled=False):
            return embeddings.unbind(dim=1)


def labels_of_texts(batch: Batch, sizes: tuple[int, ...], expected: str) -> Tensor:
    """Return the labels of rows of texts.

    Args:
        batch: the batch.
        sizes: how many numbers there may be.
        expected: what they have to be, for the error message.

    Raises:
        ValueError: there are none, or another number of them.
    """
    found = next((batch[name] for name in LABEL_NAMES if name in batch), None) if isinstance(batch, Mapping) else None
    if not isinstance(found, Tensor) or found.numel() not in sizes:
        given = f"labels of the shape {tuple(found.shape)}" if isinstance(found, Tensor) else "no labels"
        raise ValueError(
            f"The batch has {given}. Expected {expected}. Give rows, and targets, a column `label` or `score`."
        )
    return found


def row_labels(batch: Batch, like: Tensor) -> Tensor:
    """Return one label per row of texts, `(B,)`, see [`labels_of_texts`]."""
    rows = len(like)
    return labels_of_texts(batch, (rows,), f"one number for each of {rows} row(s)").reshape(rows).to(like.dtype)
