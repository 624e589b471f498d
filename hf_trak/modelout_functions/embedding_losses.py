"""Embeddings of texts, trained with a loss of each row alone, as sentence-transformers has them.

With u, v, w the embeddings of a row's texts, y its label, cos and d their cosine and distance, and m a margin:

| loss | L | f of a target |
|---|---|---|
| `cosine_similarity` | (cos(u, v) − y)² | −L |
| `contrastive` (Hadsell, Chopra, LeCun 2006) | ½ [y d(u, v)² + (1 − y) max(0, m − d(u, v))²] | (1 − 2y) d(u, v) |
| `triplet` | max(0, d(u, v) − d(u, w) + m) | d(u, w) − d(u, v) |

The train side is f = −L with q = 1, as in the task `loss`. Losses with a hinge have no gradient where the row is
beyond the margin: such a row has taught the model nothing, but it can be a target, whose f has no hinge.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pairwise_distance, relu

from hf_trak.modelout_functions.base import Batch, Side
from hf_trak.modelout_functions.batches import LABEL_NAMES
from hf_trak.modelout_functions.completions import check_finite
from hf_trak.modelout_functions.embeddings import EmbeddingModelOutput

EmbeddingLoss = Literal["cosine_similarity", "contrastive", "triplet"]
Distance = Literal["cosine", "euclidean", "manhattan"]

_DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda one, other: 1 - cosine_similarity(one, other, dim=-1),
    "euclidean": lambda one, other: pairwise_distance(one, other, 2.0),
    "manhattan": lambda one, other: pairwise_distance(one, other, 1.0),
}
_TEXTS = {"cosine_similarity": 2, "contrastive": 2, "triplet": 3}


class EmbeddingLossModelOutput(EmbeddingModelOutput):
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
        for name, value, known in (("loss", loss, EmbeddingLoss), ("distance", distance, Distance)):
            if value not in get_args(known):
                raise ValueError(f"`{name}` is {value!r}. Expected one of {list(get_args(known))}.")
        self.loss = loss
        self.distance = distance
        self.margin = float(margin)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the loss of every row, differentiable, shape `(B,)`."""
        texts = self._texts(model_output, batch)
        if self.loss == "cosine_similarity":
            return (cosine_similarity(texts[0], texts[1], dim=-1) - _labels(batch, texts[0])).square()
        near = self._far(texts[0], texts[1])
        if self.loss == "triplet":
            return relu(near - self._far(texts[0], texts[2]) + self.margin)
        labels = _labels(batch, texts[0])
        return 0.5 * (labels * near.square() + (1 - labels) * relu(self.margin - near).square())

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "train" or self.loss == "cosine_similarity":
            return -self.per_sample_loss(model_output, batch)
        texts = self._texts(model_output, batch)
        near = self._far(texts[0], texts[1])
        if self.loss == "triplet":
            return self._far(texts[0], texts[2]) - near
        return (1 - 2 * _labels(batch, texts[0])) * near

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            losses = self.per_sample_loss(model_output, batch)
            check_finite(losses, "The loss")
            return torch.ones_like(losses)

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


def _labels(batch: Batch, like: Tensor) -> Tensor:
    found = next((batch[name] for name in LABEL_NAMES if name in batch), None) if isinstance(batch, Mapping) else None
    if not isinstance(found, Tensor) or found.numel() != like.shape[0]:
        given = f"labels of the shape {tuple(found.shape)}" if isinstance(found, Tensor) else "no labels"
        raise ValueError(
            f"The batch has {given} for {like.shape[0]} row(s). Expected one number per row. Give rows, and targets, "
            "a column `label` or `score`."
        )
    return found.reshape(like.shape[0]).to(like.dtype)
