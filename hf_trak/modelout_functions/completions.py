"""`CompletionModelOutput`: log-probabilities of completions behind their prompts, for preferences and policies."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput
from hf_trak.modelout_functions.batches import first_marked, mapping_of, takes_positions, with_positions
from hf_trak.modelout_functions.deferred_logits import DeferredLogits
from hf_trak.modelout_functions.margins import margins_of
from hf_trak.modelout_functions.token_tasks import prepended_tokens
from hf_trak.modelout_functions.tokens import IGNORED, token_logits

IMAGE_TENSORS = frozenset(
    {
        "pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "num_patches", "image_position_ids",
        "pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_position_ids",
    }
)  # fmt: skip

"""Names of the tensors of images and videos that processors make, with or without a dimension of rows."""


def images_once(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take the images of pairs from a batch in which they stand twice, first those of all chosen answers.

    Args:
        batch: what the collator of a trainer made of pairs.

    Returns:
        The tensors of images, half as long; nothing if the batch has no images.

    Raises:
        ValueError: the images of chosen and of rejected answers differ.
    """
    found = {}
    for name, value in batch.items():
        if name not in IMAGE_TENSORS or not isinstance(value, Tensor):
            continue
        half = len(value) // 2
        if len(value) % 2 or not torch.equal(value[:half], value[half:]):
            raise ValueError(
                f"`{name}` of the batch has the shape {tuple(value.shape)}, and its halves differ. Expected the "
                "images of the chosen answers, and behind them the same for the rejected ones. Use the collator of "
                "the trainer, without random augmentation."
            )
        found[name] = value[:half]
    return found


COMPLETION_MASK = "completion_mask"

"""1 on the tokens of the completion, 0 on those of the prompt and on padding."""


class CompletionModelOutput(BatchedModelOutput):
    """Base class of tasks whose samples are one or two sequences of a prompt and a completion.

    Batches are mappings. With one sequence per sample, `input_ids` is `(B, T)`, with two `(B, 2, T)`; the model is
    given `(B, T)` or `(2 B, T)`, both sequences of a sample next to each other. A sample has one copy of its images,
    `(B, …)`; the model is given it once for each of the sequences.
    """

    head: ClassVar[str] = "AutoModelForCausalLM"
    own_columns: ClassVar[tuple[str, ...]] = (COMPLETION_MASK,)
    """Entries of a batch that the task reads and the model is not given."""

    _positions: bool = False
    _prepended: int = 0

    def bind(self, model: torch.nn.Module) -> None:
        self._positions = takes_positions(model)
        self._prepended = prepended_tokens(model)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entries = as_named(batch)
        given = entries["input_ids"]
        inputs = {
            name: _of_sequences(name, value) if isinstance(value, Tensor) and given.ndim == 3 else value
            for name, value in entries.items()
            if name not in self.own_columns
        }
        return (), with_positions(inputs) if self._positions else inputs

    def token_log_probs(
        self, model_output: Any, batch: Batch, temperature: float = 1.0, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of every token but the first, given the tokens before it.

        Args:
            model_output: what the model returned.
            batch: the batch.
            temperature: the logits are divided by it.
            wanted: marks the tokens whose log-probabilities are needed, in the shape of `input_ids`. `None`: those
                of completions.

        Returns:
            Log-probabilities `(B, T − 1)` or `(B, 2, T − 1)`, float32 (float64 for float64 logits), differentiable,
            of other tokens any finite number; and a mask of the same shape that marks the tokens of completions.
        """
        entries = as_named(batch)
        tokens, mask = entries["input_ids"], entries[COMPLETION_MASK] != 0
        flat = tokens.flatten(0, 1) if tokens.ndim == 3 else tokens
        logits = token_logits(model_output, flat, self.head, self._prepended)
        needed = (mask if wanted is None else wanted).reshape(flat.shape)
        return _log_probs(logits, flat, needed, temperature).reshape(*tokens.shape[:-1], -1), mask[..., 1:]

    def sums(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the log-probability of every completion, `(B,)` or `(B, 2)`, differentiable.

        Args:
            model_output: what the model returned.
            batch: the batch.
        """
        log_probs, mask = self.token_log_probs(model_output, batch)
        return torch.where(mask, log_probs, 0.0).sum(dim=-1)

    def check_completions(self, batch: Batch) -> None:
        """Refuse samples with an empty completion, whose log-probability is 0 for every model.

        Args:
            batch: the batch.

        Raises:
            ValueError: a completion has no token that is predicted.
        """
        mask = as_named(batch)[COMPLETION_MASK][..., 1:] != 0
        if empty := first_marked(~mask.any(dim=-1)):
            raise ValueError(
                f"A completion of sample {empty[0]} of the batch has no token. Expected at least one. Leave the row "
                "out, or truncate it less."
            )


def as_named(batch: Batch) -> Mapping[str, Any]:
    """Return a batch that is a mapping with tokens and a mask of completions.

    Raises:
        TypeError: it is no mapping.
        ValueError: an entry is missing.
    """
    entries = mapping_of(batch, f"with `input_ids` and `{COMPLETION_MASK}`. Use the data collator of the trainer.")
    if "input_ids" not in entries:
        raise ValueError(
            f"The batch has the keys {list(entries)}, and no `input_ids`. Expected tokens of prompts and completions. "
            "See the documentation of preferences for the columns of rows."
        )
    return entries


def column_of(batch: Batch, name: str, like: Tensor, remedy: str) -> Tensor:
    """Return a column of one number per sample.

    Args:
        batch: the batch.
        name: name of the column.
        like: values `(B,)`, whose shape and dtype the column is to have.
        remedy: what to do where it is missing, for the error message.

    Raises:
        ValueError: there is no such column, or it has another shape.
    """
    column = as_named(batch).get(name)
    if not isinstance(column, Tensor) or column.shape != like.shape:
        given = f"the shape {tuple(column.shape)}" if isinstance(column, Tensor) else f"the value {column!r}"
        raise ValueError(f"`{name}` of the batch has {given}. Expected one number per sample. {remedy}")
    return column.to(like.dtype)


def check_finite(values: Tensor, what: str) -> None:
    """Raise `ValueError` if a number is NaN or infinite, naming the sample.

    Args:
        values: `(B,)`.
        what: what they are, for the error message.
    """
    if bad := first_marked(~values.isfinite()):
        raise ValueError(
            f"{what} of sample {bad[0]} is not finite. Expected a finite number. Look at that row for "
            "a missing value or an empty completion."
        )


def _of_sequences(name: str, value: Tensor) -> Tensor:
    """Give both sequences of every sample their entry: `(B, 2, …)` becomes `(2 B, …)`."""
    if name in IMAGE_TENSORS:
        return value.repeat_interleave(2, dim=0)
    return value.flatten(0, 1) if value.ndim > 1 else value


def _log_probs(logits: Tensor, tokens: Tensor, needed: Tensor, temperature: float) -> Tensor:
    logits = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    if isinstance(logits, DeferredLogits):
        return logsigmoid(margins_of(logits, torch.where(needed, tokens, IGNORED)[:, 1:]))
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -losses.view(tokens.shape[0], -1)
