"""Token classification: one class per labelled token."""

from typing import ClassVar

from hf_trak.modelout_functions.token_tasks import TokenModelOutput


class TokenClassificationModelOutput(TokenModelOutput):
    """The task `token_classification`: f = Σ_t w_t m_t over the tokens whose label is not -100.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    head: ClassVar[str] = "AutoModelForTokenClassification"
