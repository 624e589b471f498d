"""`TokenModelOutput`: labels beside input tokens, for `causal_lm`, `masked_lm` and `token_classification`."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DataCollatorWithPadding

from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.base import Batch, Collator, WrappingCollator
from hf_trak.modelout_functions.batches import find_logits, takes_positions, unwrapped, with_positions
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.margins import sliced_margin
from hf_trak.modelout_functions.tokens import (
    IGNORED,
    ROLE_MASKS,
    TARGET_WEIGHTS,
    TOKEN_COLUMNS,
    as_mapping,
    check_tokens,
    input_labels,
    token_logits,
    without_labels,
)


class TokenColumnsCollator(WrappingCollator):
    """A data collator that also carries [`tokens.TOKEN_COLUMNS`], and `labels` where the inner one cannot."""

    draws_nothing = True

    def __init__(self, collator: Collator, beside: str) -> None:
        """
        Args:
            collator: the inner collator.
            beside: the column whose entries the others are aligned with: `input_ids`, or `labels` for
                sequence-to-sequence models.
        """
        super().__init__(collator)
        self.beside = beside

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch.

        Raises:
            ValueError: a column has another number of entries than the row has tokens.
        """
        if not rows or not isinstance(rows[0], Mapping):
            return self.collator(rows)
        if getattr(self.collator, "decides_labels", False):
            left_out = set(ROLE_MASKS).difference(self.collator.columns)  # type: ignore[attr-defined]
            rows = [{name: value for name, value in row.items() if name not in left_out} for row in rows]
        names = [name for name in TOKEN_COLUMNS if name in rows[0]]
        # `DataCollatorWithPadding` pads what the tokenizer made and fails on labels of different lengths.
        if isinstance(self.collator, DataCollatorWithPadding) and isinstance(rows[0].get("labels"), Sequence | Tensor):
            names.insert(0, "labels")
        if not names:
            return self.collator(rows)
        columns = {name: [_entries(row, name, i) for i, row in enumerate(rows)] for name in names}
        tokens = [len(row[self.beside]) if row.get(self.beside) is not None else None for row in rows]
        batch = self.collator([{name: value for name, value in row.items() if name not in columns} for row in rows])
        for name, column in columns.items():
            batch[name] = self._padded(name, column, tokens, batch)
        return batch

    def _padded(self, name: str, column: list[list[Any]], tokens: list[int | None], batch: Any) -> Tensor:
        reference = batch.get(self.beside)
        free = not isinstance(reference, Tensor)  # an encoder-decoder may have more or fewer labels than inputs
        width = max(map(len, column)) if free else reference.shape[1]
        if not free and reference.shape[0] == 1 < len(column):  # one sequence of all rows, which is cut later
            column, tokens = [list(chain.from_iterable(column))], [sum(count or 0 for count in tokens)]
        if not free:
            for i, (entries, count) in enumerate(zip(column, tokens, strict=True)):
                if len(entries) not in (count, width):
                    raise ValueError(
                        f"Row {i} of the batch has {len(entries)} entries in `{name}`, but {count} in "
                        f"`{self.beside}`. Expected the same number. Make both with one call of the tokenizer."
                    )
        fill, dtype = IGNORED if name == "labels" else 0, torch.float32 if name == TARGET_WEIGHTS else torch.long
        padded = torch.full((len(column), width), fill, dtype=dtype)
        for i, entries in enumerate(column):
            start = width - len(entries) if self._left(i, batch) else 0
            padded[i, start : start + len(entries)] = torch.as_tensor(entries, dtype=dtype)
        return padded

    def _left(self, row: int, batch: Any) -> bool:
        """Tell from its attention mask, or else from the tokenizer, whether a row is padded on the left."""
        mask = batch.get("attention_mask")
        if self.beside == "input_ids" and isinstance(mask, Tensor) and mask.ndim == 2:
            return bool(mask[row, 0] == 0)
        tokenizer = getattr(self.collator, "tokenizer", None) or getattr(self.collator, "processing_class", None)
        return getattr(tokenizer, "padding_side", "right") == "left"


def _entries(row: Mapping[str, Any], name: str, index: int) -> list[Any]:
    value = row.get(name)
    if value is None or not hasattr(value, "__len__"):
        raise ValueError(
            f"Row {index} of the batch has {value!r} in `{name}`. Expected a list with one entry per token. Fill the "
            "column in every row, or remove it."
        )
    return list(value)


SEQUENCE_NAMES = ("input_ids", "attention_mask", "labels")


class TokenModelOutput(AggregatedModelOutput):
    """Base class of tasks with f = Σ_t w_t m_t over the label tokens of a sequence.

    Batches are mappings, or `(input_ids, attention_mask, labels)`.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    batch_columns: tuple[str, ...] = TOKEN_COLUMNS
    beside = "input_ids"
    head: ClassVar[str]
    """The `AutoModelFor…` class whose models have the head that the task needs."""

    _positions: bool = False
    _prepended: int = 0

    def collator(self, collator: Collator) -> Collator:
        return TokenColumnsCollator(collator, self.beside)

    def bind(self, model: torch.nn.Module) -> None:
        self._positions = takes_positions(model)
        self._prepended = prepended_tokens(model)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = without_labels(as_mapping(batch, SEQUENCE_NAMES))
        return (), with_positions(inputs) if self._positions else inputs

    def labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the label of every position `(B, T)`, and a mask of those that count `(B, T)`."""
        return input_labels(batch)

    def labelled(self, batch: Batch) -> Tensor:
        return self.labels(as_mapping(batch, SEQUENCE_NAMES))[1]

    def predictions(self, model_output: Any, labels: Tensor) -> Tensor:
        """Return the logits that predict the labels `(B, T)`: `(B, T′, C)`, those of the last T′ ≤ T labels."""
        return token_logits(model_output, labels, self.head, self._prepended)

    def unit_margins(self, model_output: Any, batch: Batch) -> Tensor:
        labels = self.labels(as_mapping(batch, SEQUENCE_NAMES))[0]
        logits = self.predictions(model_output, labels)
        first = labels.shape[1] - logits.shape[1]
        return _with_zeros(sliced_margin(logits, labels[:, first:]), first)

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute Σ_t √w_t log p(ŷ_t) for tokens ŷ_t drawn from the predictions at the labels, `(B,)`."""
        valid = self._counted(batch)
        logits = self.predictions(model_output, self.labels(as_mapping(batch, SEQUENCE_NAMES))[0])
        first = valid.shape[1] - logits.shape[1]
        values = _with_zeros(draws.log_likelihoods(logits, valid[:, first:]), first)
        return self.weighted_by_roots(values, valid, batch)

    def check(self, model_output: Any, batch: Batch) -> None:
        labels, valid = self.labels(as_mapping(batch, SEQUENCE_NAMES))
        check_tokens(labels, valid, token_logits(model_output, labels, self.head, self._prepended).shape[2])


def _with_zeros(values: Tensor, first: int) -> Tensor:
    """Put zeros, which never count, before the values, so that the columns are those of all labels."""
    return torch.nn.functional.pad(values, (first, 0)) if first else values


def prepended_tokens(model: torch.nn.Module) -> int:
    """Count the virtual tokens that PEFT's prompt tuning puts in front of the input and leaves in the logits."""
    config: Any = getattr(unwrapped(model)[0], "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False) or config.peft_type == "PREFIX_TUNING":
        return 0
    return int(config.num_virtual_tokens)


class CausalLMModelOutput(TokenModelOutput):
    """The task `causal_lm`: f = Σ_t w_t m_t, with m_t the margin of label token t under the logits of position t − 1.

    Labels stand beside the inputs, not shifted, as everywhere in `transformers`. The first token of a sequence has
    nothing to be predicted from and never counts, but behind the virtual tokens of prompt tuning, and neither does the
    first one after left padding. A sample has the same f, q and gradients with padding on either side as without any.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    head: ClassVar[str] = "AutoModelForCausalLM"

    def labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        labels, valid = super().labels(batch)
        attention = batch.get("attention_mask")
        seen = torch.ones_like(valid)
        if isinstance(attention, Tensor) and attention.ndim == 2:
            seen = attention != 0
        before = torch.nn.functional.pad(seen[:, :-1], (1, 0), value=self._prepended > 0)
        return labels, valid & before

    def predictions(self, model_output: Any, labels: Tensor) -> Tensor:
        logits = super().predictions(model_output, labels)
        if self._prepended:  # whose last virtual token predicts position 0
            return find_logits(model_output)[:, self._prepended - 1 : -1]
        return logits[:, :-1]  # position 0 has no prediction


class MaskedLMModelOutput(TokenModelOutput):
    """The task `masked_lm`: f = Σ_t w_t m_t over the masked tokens, those whose label is not -100.

    The choice of masked tokens is part of the sample. Where a collator draws it anew for every batch, each row has
    `num_draws` choices with seeds of their own, over which features are means. [`hf_trak.data.language.mask_tokens`]
    fixes one choice in the dataset.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    head: ClassVar[str] = "AutoModelForMaskedLM"


class TokenClassificationModelOutput(TokenModelOutput):
    """The task `token_classification`: f = Σ_t w_t m_t over the tokens whose label is not -100.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    head: ClassVar[str] = "AutoModelForTokenClassification"
