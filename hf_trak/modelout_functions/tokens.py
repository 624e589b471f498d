"""Labels, masks beside them and logits in batches of token sequences.

A token is a label if all of these agree:

* `labels`: -100 is no label. Without `labels`, the input tokens that a mask marks are the labels.
* `completion_mask`, `assistant_masks` (columns of TRL datasets): 0 on tokens of the prompt or of the user.
* `attention_mask`: padding is no label, even where a collator copied it into `labels`.

A row is one sample. In a *packed* row (several documents in one) every label counts, and the score is that of the row.
Tokens that were *truncated* away do not take part in the score. A training row that lost all its labels contributes
nothing to training, has f = 0 and q = 0, and scores exactly 0; such a target is an error.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.aggregated import TARGET_MASK, TARGET_WEIGHTS
from hf_trak.modelout_functions.base import Batch
from hf_trak.modelout_functions.batches import LABEL_NAMES, as_sequence, find_logits, first_marked, looked_at

IGNORED = -100
"""The label of tokens that are not to be predicted, as everywhere in the ecosystem."""

ROLE_MASKS = ("completion_mask", "assistant_masks")
"""Columns of TRL's datasets: 1 on the tokens that the model is trained to produce."""

TOKEN_COLUMNS = (*ROLE_MASKS, TARGET_MASK, TARGET_WEIGHTS)
"""Columns of one entry per label token that no model takes."""


def as_mapping(batch: Batch, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return a batch as a mapping.

    Args:
        batch: a mapping, or a sequence of as many tensors as there are names, or of two: the first and the last.
        names: the names of a sequence's tensors, in their order.

    Raises:
        TypeError: the batch is neither a mapping nor a sequence.
        ValueError: the batch is a sequence of another length.
    """
    if isinstance(batch, Mapping):
        return batch
    items = as_sequence(batch, f"({', '.join(names)})")
    if len(items) == len(names):
        return dict(zip(names, items, strict=True))
    if len(items) == 2:
        return {names[0]: items[0], names[-1]: items[1]}
    raise ValueError(
        f"The batch is a sequence of {len(items)} tensor(s). Expected ({', '.join(names)}), or ({names[0]}, "
        f"{names[-1]}). For a model with other inputs, pass a mapping of names to tensors."
    )


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch without labels and without columns that only the task reads: the model's inputs."""
    return {name: value for name, value in batch.items() if name not in LABEL_NAMES and name not in TOKEN_COLUMNS}


def given_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the labels of a batch, `(B, T)`, or `None` if it has none.

    Raises:
        TypeError: the labels are no tensor.
        ValueError: they are ambiguous, not integers, or not one per token.
    """
    found = [name for name in LABEL_NAMES if batch.get(name) is not None]
    if len(found) > 1:
        raise ValueError(
            f"The batch has both {' and '.join(found)}. Expected one of them. Remove the other in the data collator."
        )
    if not found:
        return None
    labels = batch[found[0]]
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"`{found[0]}` is a {type(labels).__name__}. Expected a tensor of integers of shape (B, tokens). Use a "
            "data collator that pads labels, for example `DataCollatorForSeq2Seq` or "
            "`DataCollatorForTokenClassification`."
        )
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.ndim != 2:
        raise ValueError(
            f"`{found[0]}` has the shape {tuple(labels.shape)} and the dtype {labels.dtype}. Expected integers of "
            f"shape (B, tokens), one label per token, {IGNORED} for tokens without one. For one label per sequence "
            "use the task 'text_classification'."
        )
    return labels


def input_labels(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the labels beside the input tokens, `(B, T)`, and a mask of those that count, `(B, T)`.

    Raises:
        TypeError: the labels are no tensor.
        ValueError: there are neither labels nor a mask that marks inputs as labels, or the numbers of labels, masks
            and inputs differ.
    """
    labels, inputs = given_labels(batch), batch.get("input_ids")
    masks = {name: batch[name] for name in ROLE_MASKS if batch.get(name) is not None}
    if labels is None:
        if inputs is None or not (masks or batch.get(TARGET_MASK) is not None):
            raise ValueError(
                f"The batch has the keys {list(batch)}, and so no labels. Expected `labels` with one token id per "
                f"input token ({IGNORED} without one), or `input_ids` with one of {list(ROLE_MASKS)}. For "
                "text whose every token is to be predicted use `DataCollatorForLanguageModeling(tokenizer, "
                "mlm=False)`, for prompts alone `attributor.predict(rows)`, and for chats `hf_trak.data.language`."
            )
        labels = inputs
    if inputs is not None and inputs.shape != labels.shape:
        raise ValueError(
            f"The labels have the shape {tuple(labels.shape)}, the inputs {tuple(inputs.shape)}. Expected one label "
            f"per input token. Fill up with {IGNORED}, on the side on which the inputs are padded."
        )
    valid = labels != IGNORED
    attention = batch.get("attention_mask")
    if isinstance(attention, Tensor) and attention.ndim == 2:
        masks["attention_mask"] = attention
    for name, mask in masks.items():
        if not isinstance(mask, Tensor) or mask.shape != labels.shape:
            raise ValueError(
                f"`{name}` has the shape {tuple(getattr(mask, 'shape', ()))}, the labels {tuple(labels.shape)}. "
                "Expected one entry per token. Tokenize and pad both together."
            )
        valid = valid & (mask != 0)
    return labels, valid


def token_logits(model_output: Any, labels: Tensor, head: str, prepended: int = 0) -> Tensor:
    """Find the logits `(B, T, C)` of a batch whose labels are `(B, T)`.

    Args:
        model_output: what the model returned.
        labels: the labels.
        head: the `AutoModelFor…` class with the head that is needed, for error messages.
        prepended: number of tokens that the model itself puts in front (prompt tuning), whose logits are dropped.

    Raises:
        TypeError: no logits are found.
        ValueError: no logits are found, or they have another shape.
    """
    remedy = f"Load the model with `{head}`, or pass a task of your own (`FunctionModelOutput`)."
    logits = find_logits(model_output, remedy)
    if logits.ndim == 3 and prepended and logits.shape[1] == labels.shape[1] + prepended:
        logits = logits[:, prepended:]
    if logits.ndim != 3 or logits.shape[:2] != labels.shape or logits.shape[2] < 2:
        raise ValueError(
            f"The model returned logits of the shape {tuple(logits.shape)} for labels of the shape "
            f"{tuple(labels.shape)}. Expected {(*labels.shape, 'classes')}. {remedy}"
        )
    return logits


def check_tokens(labels: Tensor, valid: Tensor, classes: int) -> None:
    """Raise `ValueError` if a label that counts (`valid`, `(B, T)`) is no class of the model."""
    if outside := first_marked(valid & ((labels < 0) | (labels >= classes))):
        sample, token = outside
        raise ValueError(
            f"Token {token} of sample {sample} has the label {int(looked_at(labels)[sample, token])}, but the model "
            f"has {classes} classes. Expected 0 … {classes - 1}, or {IGNORED} for no label. Do tokenizer "
            "and model belong together?"
        )
