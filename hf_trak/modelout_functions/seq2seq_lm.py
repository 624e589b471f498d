"""Sequence-to-sequence language models: labels of their own length, predicted from the inputs and earlier labels."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trak.modelout_functions.aggregated import TARGET_MASK, TARGET_WEIGHTS
from hf_trak.modelout_functions.base import Batch
from hf_trak.modelout_functions.batches import unwrapped
from hf_trak.modelout_functions.token_tasks import SEQUENCE_NAMES, TokenModelOutput
from hf_trak.modelout_functions.tokens import IGNORED, as_mapping, given_labels, without_labels


class Seq2SeqLMModelOutput(TokenModelOutput):
    """The task `seq2seq_lm`: f = Σ_t w_t m_t over the label tokens of the decoder.

    Without `decoder_input_ids` in the batch, the decoder reads the labels shifted to the right, as the model itself
    would shift them. Labels that are padded on the left are moved to the left edge first, so that the first one is
    predicted from the start token as it is in training. `target_mask` and `target_weights` stand beside the labels.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    batch_columns = (TARGET_MASK, TARGET_WEIGHTS)
    beside = "labels"
    head: ClassVar[str] = "AutoModelForSeq2SeqLM"

    _shift: Callable[[Tensor], Tensor] | None = None

    def bind(self, model: torch.nn.Module) -> None:
        self._shift = _shifting(unwrapped(model)[1])

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = as_mapping(batch, SEQUENCE_NAMES)
        inputs = without_labels(batch)
        if inputs.get("decoder_input_ids") is None and inputs.get("decoder_inputs_embeds") is None:
            if self._shift is None:
                raise ValueError(
                    "The batch has no `decoder_input_ids`, and the task knows no model that would make them from "
                    "the labels. Expected either. Call `task.bind(model)` with a sequence-to-sequence model whose "
                    "config has `decoder_start_token_id` and `pad_token_id`, or use "
                    "`DataCollatorForSeq2Seq(model=model)`."
                )
            inputs["decoder_input_ids"] = self._shift(self.labels(batch)[0])
        return (), inputs

    def label_weights(self, batch: Batch) -> Tensor:
        lead = self._lead(batch)
        return _moved(super().label_weights(batch), None if lead is None else -lead)

    def unit_column(self, batch: Batch, name: str, valid: Tensor) -> Tensor | None:
        column = super().unit_column(batch, name, valid)
        assert isinstance(batch, Mapping) or column is None
        return column if column is None else _moved(column, self._lead(batch))

    def labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if (labels := given_labels(batch)) is None:
            raise ValueError(
                f"The batch has the keys {list(batch)}, and so no labels. Expected `labels` (B, tokens) with the ids "
                f"of the target text, {IGNORED} for padding. Tokenize it with `tokenizer(text_target=...)` and "
                "collate with `DataCollatorForSeq2Seq`, or pass `attributor.predict(rows)`."
            )
        labels = _moved(labels, self._lead(batch))
        return labels, labels != IGNORED

    def _lead(self, batch: Any) -> Tensor | None:
        """Count the padding labels on the left of every row, `(B, 1)`; `None` if the batch has decoder inputs."""
        batch = as_mapping(batch, SEQUENCE_NAMES)
        if batch.get("decoder_input_ids") is not None or batch.get("decoder_inputs_embeds") is not None:
            return None
        labels = given_labels(batch)
        assert labels is not None
        return ((labels != IGNORED).long().cumsum(dim=1) == 0).sum(dim=1, keepdim=True)


def _moved(rows: Tensor, lead: Tensor | None) -> Tensor:
    """Rotate every row to the left by its own number of entries, `lead` `(B, 1)`."""
    if lead is None:
        return rows
    width = rows.shape[1]
    return rows.gather(1, (torch.arange(width, device=rows.device) + lead) % width)


def _shifting(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function that turns labels into decoder inputs, or `None` where the model does not define one.

    It is the model's own method, or else puts the start token first and the padding token in place of [`IGNORED`].
    """
    if (own := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is not None:
        return lambda labels: own(labels=labels)
    config = getattr(model, "config", None)
    start, pad = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    if start is None or pad is None:
        return None

    def shift(labels: Tensor) -> Tensor:
        before = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=start)
        return before.masked_fill(before == IGNORED, pad)

    return shift
