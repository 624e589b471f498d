"""Masked language models: the masked tokens are predicted from all others."""

from typing import ClassVar

from hf_trak.modelout_functions.token_tasks import TokenModelOutput


class MaskedLMModelOutput(TokenModelOutput):
    """The task `masked_lm`: f = Σ_t w_t m_t over the masked tokens, those whose label is not -100.

    The choice of masked tokens is part of the sample. Where a collator draws it anew for every batch, each row has
    `num_draws` choices with seeds of their own, over which features are means. [`hf_trak.data.language.mask_tokens`]
    fixes one choice in the dataset.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    head: ClassVar[str] = "AutoModelForMaskedLM"
