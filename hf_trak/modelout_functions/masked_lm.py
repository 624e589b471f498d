"""Masked language models."""

from typing import ClassVar

from hf_trak.modelout_functions.token_tasks import TokenModelOutput


class MaskedLMModelOutput(TokenModelOutput):
    """`masked_lm`: f = Σ_t w_t m_t over the masked tokens, those whose label is not -100.

    Which tokens are masked is part of the sample. A collator that draws them anew for every batch makes another sample
    each time; fix them in the dataset with [`hf_trak.data.language.mask_tokens`].
    """

    head: ClassVar[str] = "AutoModelForMaskedLM"
