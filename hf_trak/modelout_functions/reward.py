"""Reward models, trained on pairs (Bradley-Terry model; Christiano et al., arXiv 1706.03741; Touvron et al., arXiv
2307.09288, Equation 2).

With r the reward of an answer and m the margin by which the chosen one is known to be better, 0 where a row has none,

    h = r(y_c) − r(y_r) − m        L = −log σ(h)        f = h        q = σ(−h)

as for classification (TRAK paper, arXiv 2303.14186, Section 3.3). With a coefficient c that keeps rewards near zero
(Eisenstein et al., arXiv 2312.09244), L = −log σ(h) + c (r(y_c) + r(y_r))² is no function of h: the train side is −L
with q = 1, and the target side h.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, Side
from hf_trak.modelout_functions.batches import find_logits
from hf_trak.modelout_functions.completions import COMPLETION_MASK, as_named, checked_positive, column_of
from hf_trak.modelout_functions.pairs import LikelihoodPairs

_REMEDY = "Load the model with `AutoModelForSequenceClassification` and `num_labels=1`."


class RewardModelOutput(LikelihoodPairs):
    """The task `reward`: f = h, the difference of the rewards of the chosen and the rejected answer."""

    head: ClassVar[str] = "AutoModelForSequenceClassification"

    def __init__(self, center_rewards_coefficient: float | None = None) -> None:
        """
        Args:
            center_rewards_coefficient (`float`, *optional*):
                c. `None` leaves the term out.

        Raises:
            ValueError: the coefficient is not positive.
        """
        super().__init__()
        given = center_rewards_coefficient
        self.center_rewards_coefficient = (
            None if given is None else checked_positive(given, "center_rewards_coefficient")
        )

    @property
    def through_loss(self) -> bool:
        """Whether the train side is minus the loss itself."""
        return self.center_rewards_coefficient is not None

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, Mapping):
            batch = {name: value for name, value in batch.items() if name != COMPLETION_MASK}
        return super().model_inputs(batch)

    def margin(self, model_output: Any, batch: Batch, side: Side) -> Tensor:
        rewards = self._rewards(model_output, batch)
        difference = rewards[:, 0] - rewards[:, 1]
        if as_named(batch).get("margin") is None:
            return difference
        return difference - column_of(batch, "margin", difference, "Give every row a number, or remove the column.")

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        loss = super().per_sample_loss(model_output, batch)
        if self.center_rewards_coefficient is None:
            return loss
        return loss + self.center_rewards_coefficient * self._rewards(model_output, batch).sum(dim=1).square()

    def _rewards(self, model_output: Any, batch: Batch) -> Tensor:
        """Return the rewards of both answers, `(B, 2)`."""
        logits = find_logits(model_output, _REMEDY)
        count = as_named(batch)["input_ids"].shape[0]
        if logits.numel() != 2 * count:
            raise ValueError(
                f"The model returned logits of the shape {tuple(logits.shape)} for {count} pair(s). Expected one "
                f"reward per answer, {(2 * count, 1)}. {_REMEDY}"
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(count, 2)
