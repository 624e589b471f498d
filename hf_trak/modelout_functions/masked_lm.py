"""Masked language models: the masked tokens are predicted from all others."""

from typing import ClassVar

from hf_trak.modelout_functions.token_tasks import TokenModelOutput


class MaskedLMModelOutput(TokenModelOutput):
    """The task `masked_lm`: f = Σ_t w_t m_t over the masked tokens, those whose label is not -100.

    The choice of masked tokens is part of the sample. A collator that draws them anew for every batch makes another
    sample each time; fix them in the dataset with [`hf_trak.data.language.mask_tokens`].

    Takes the arguments of [`AggregatedModelOutput`].
    """

    head: ClassVar[str] = "AutoModelForMaskedLM"
