"""Pairs of texts that a cross-encoder scores together, trained with a loss of each row alone.

A row is an anchor with one other text, or with C of them: a positive and negatives. With z the logits of its pairs, y
its label, and w the weight of positives:

| loss | L |
|---|---|
| `binary_cross_entropy` | −w y log σ(z) − (1 − y) log(1 − σ(z)) |
| `cross_entropy` | −log softmax(z)_y |
| `mse` | (z − y)² |
| `margin_mse` (Hofstätter et al. 2020) | mean over negatives of (z_positive − z_negative − y)² |

f = −L with q = 1, as in the task `loss`, for training rows and for targets.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hf_trak.modelout_functions.base import Batch, Side, checked_choice
from hf_trak.modelout_functions.completions import check_finite
from hf_trak.modelout_functions.embeddings import TOKENS, EmbeddingModelOutput, as_texts, labels_of_texts, row_labels

TextPairsLoss = Literal["binary_cross_entropy", "cross_entropy", "mse", "margin_mse"]
Activation = Literal["identity", "sigmoid"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda logits: logits, "sigmoid": torch.sigmoid}


class TextPairsModelOutput(EmbeddingModelOutput):
    """Task of cross-encoders of sentence-transformers whose loss is a mean over rows: f is minus that of the row."""

    def __init__(
        self,
        loss: TextPairsLoss = "binary_cross_entropy",
        activation: Activation = "identity",
        pos_weight: float | None = None,
    ) -> None:
        """
        Args:
            loss (`str`, *optional*, defaults to `"binary_cross_entropy"`):
                `"binary_cross_entropy"`, `"cross_entropy"`, `"mse"` or `"margin_mse"`.
            activation (`str`, *optional*, defaults to `"identity"`):
                What is applied to the logits before the loss: `"identity"` or `"sigmoid"`.
            pos_weight (`float`, *optional*):
                w of the first. `None` is 1.

        Raises:
            ValueError: a name is unknown, or `pos_weight` is given for another loss.
        """
        super().__init__()
        self.loss = checked_choice(loss, "loss", TextPairsLoss)
        self.activation = checked_choice(activation, "activation", Activation)
        if pos_weight is not None and loss != "binary_cross_entropy":
            raise ValueError(f"`pos_weight` is {pos_weight!r} for the loss {loss!r}. Expected None. Leave it out.")
        self.pos_weight = None if pos_weight is None else float(pos_weight)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the loss of every row, differentiable, shape `(B,)`.

        Raises:
            TypeError: the model returned no `scores`.
            ValueError: numbers of texts, logits or labels do not fit the loss.
        """
        logits = self._logits(model_output, batch)
        if self.loss == "cross_entropy":
            return cross_entropy(logits[:, 0], row_labels(batch, logits[:, 0, 0]).long(), reduction="none")
        if logits.shape[2] != 1:
            raise ValueError(
                f"The model has {logits.shape[2]} logits. Expected one for the loss {self.loss!r}. Use the loss "
                "'cross_entropy', or a model with `num_labels=1`."
            )
        scores = logits[..., 0]
        if self.loss == "margin_mse":
            margins = scores[:, :1] - scores[:, 1:]
            return (margins - _margins(batch, margins)).square().mean(dim=1)
        labels = row_labels(batch, scores[:, 0])
        if self.loss == "mse":
            return (scores[:, 0] - labels).square()
        weight = None if self.pos_weight is None else scores.new_tensor(self.pos_weight)
        return binary_cross_entropy_with_logits(scores[:, 0], labels, pos_weight=weight, reduction="none")

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return -self.per_sample_loss(model_output, batch)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            losses = self.per_sample_loss(model_output, batch)
            check_finite(losses, "The loss")
            return torch.ones_like(losses)

    def _logits(self, model_output: Any, batch: Batch) -> Tensor:
        """Return the activated logits of every row, `(B, C, L)`, at least float32."""
        tokens = as_texts(batch)[TOKENS]
        found = model_output.get("scores") if isinstance(model_output, Mapping) else None
        if not isinstance(found, Tensor):
            raise TypeError(
                f"The model returned a {type(model_output).__name__} without `scores`. Expected a mapping with them. "
                "Pass the `CrossEncoder` itself."
            )
        rows, pairs = tokens.shape[:2]
        least = 2 if self.loss == "margin_mse" else 1
        if pairs < least or (pairs > 1 and least == 1):
            raise ValueError(
                f"The rows have {pairs + 1} texts. Expected {'3 or more' if least == 2 else '2'} for the loss "
                f"{self.loss!r}. Give the trainer, and targets, rows of that many texts."
            )
        found = found.to(torch.promote_types(found.dtype, torch.float32)).reshape(rows, pairs, -1)
        return _ACTIVATIONS[self.activation](found)


def _margins(batch: Batch, like: Tensor) -> Tensor:
    """Return the margin of every negative, `(B, C − 1)`, where labels are margins, or scores of all texts."""
    rows, negatives = like.shape
    sizes = (rows * negatives, rows * (negatives + 1))
    found = labels_of_texts(batch, sizes, f"{negatives} margins or {negatives + 1} scores per row")
    given = found.reshape(rows, -1).to(like.dtype)
    return given if given.shape[1] == negatives else given[:, :1] - given[:, 1:]
