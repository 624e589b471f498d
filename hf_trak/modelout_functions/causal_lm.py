"""Causal language models: every label token is predicted from the tokens before it."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch
from hf_trak.modelout_functions.sliced_margins import sliced_margin
from hf_trak.modelout_functions.token_tasks import SEQUENCE_NAMES, TokenModelOutput
from hf_trak.modelout_functions.tokens import as_mapping


class CausalLMModelOutput(TokenModelOutput):
    """The task `causal_lm`: f = Σ_t w_t m_t, with m_t the margin of label token t under the logits of position t − 1.

    Labels stand beside the inputs, not shifted, as everywhere in `transformers`. The first token of a sequence has
    nothing to be predicted from and never counts, and neither does the first one after left padding. A sample has the
    same f, q and gradients with padding on either side as without any.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    head: ClassVar[str] = "AutoModelForCausalLM"

    def labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        labels, valid = super().labels(batch)
        attention = batch.get("attention_mask")
        seen = torch.ones_like(valid)
        if isinstance(attention, Tensor) and attention.ndim == 2:
            seen = attention != 0
        before = torch.nn.functional.pad(seen[:, :-1], (1, 0), value=False)
        return labels, valid & before

    def predictions(self, model_output: Any, labels: Tensor) -> Tensor:
        return super().predictions(model_output, labels)[:, :-1]  # position 0 has no prediction

    def unit_margins(self, model_output: Any, batch: Batch) -> Tensor:
        labels = self.labels(as_mapping(batch, SEQUENCE_NAMES))[0]
        margins = sliced_margin(self.predictions(model_output, labels), labels[:, 1:])
        return torch.nn.functional.pad(margins, (1, 0))  # zeros, which never count
