"""`TokenModelOutput`: labels beside input tokens, for `causal_lm`, `masked_lm` and `token_classification`."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trak.modelout_functions.aggregated import AggregatedModelOutput, Aggregation, UnitOutput
from hf_trak.modelout_functions.base import Batch
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.positions import takes_positions, unwrapped, with_positions
from hf_trak.modelout_functions.sliced_margins import sliced_margin
from hf_trak.modelout_functions.token_collator import TokenColumnsCollator
from hf_trak.modelout_functions.tokens import (
    TOKEN_COLUMNS,
    as_mapping,
    check_tokens,
    input_labels,
    token_logits,
    without_labels,
)

SEQUENCE_NAMES = ("input_ids", "attention_mask", "labels")


class TokenModelOutput(AggregatedModelOutput):
    """Base class of tasks with f = Σ_t w_t m_t over the label tokens of a sequence.

    Batches are mappings, or `(input_ids, attention_mask, labels)`.
    """

    batch_columns = TOKEN_COLUMNS
    beside = "input_ids"
    head: ClassVar[str]
    """The `AutoModelFor…` class whose models have the head that the task needs."""

    def __init__(self, aggregation: Aggregation = "sum", unit_output: UnitOutput = "margin") -> None:
        """
        Args:
            aggregation (`str`, *optional*, defaults to `"sum"`):
                `"sum"` or `"mean"` over the labels of a sample.
            unit_output (`str`, *optional*, defaults to `"margin"`):
                What is aggregated, `"margin"` or `"log_likelihood"`.

        Raises:
            ValueError: an argument is another word.
        """
        super().__init__(aggregation, unit_output)
        self._positions = False
        self._prepended = 0

    def collator(self, collator: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
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
