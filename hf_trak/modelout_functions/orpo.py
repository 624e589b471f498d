"""Odds ratio preference optimization (ORPO, Hong et al., arXiv 2403.07691).

With p(y) the geometric mean of the probabilities of the tokens of an answer, and the log odds ratio

    h = log [p(y_c) / (1 − p(y_c))] − log [p(y_r) / (1 − p(y_r))]                   (Equation 4 of the paper)
    L = −(1/T) Σ_t log π(x_t) − β log σ(h)                                          (Equations 6 and 7)

the first sum being over all T predicted tokens of prompt and chosen answer, as TRL computes it. L is no function of h
alone, so the train side is f = −L with q = 1, as in the task `loss`, and the target side is f = h: which rows made
the model prefer the chosen answer.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, Side
from hf_trak.modelout_functions.completions import COMPLETION_MASK, as_named, checked_positive
from hf_trak.modelout_functions.pairs import PairModelOutput


class ORPOModelOutput(PairModelOutput):
    """The task `orpo`: f = −L of training rows, and the log odds ratio of targets."""

    def __init__(self, beta: float = 0.1) -> None:
        """
        Args:
            beta (`float`, *optional*, defaults to 0.1):
                β, the weight of the odds ratio (λ in the paper).

        Raises:
            ValueError: it is not positive.
        """
        super().__init__()
        self.beta = checked_positive(beta, "beta")

    @property
    def through_loss(self) -> bool:
        """Whether the train side is minus the loss itself."""
        return True

    def margin(self, model_output: Any, batch: Batch, side: Side) -> Tensor:
        wanted = _predicted(batch) if side == "train" else None
        return _log_odds_ratio(*self.token_log_probs(model_output, batch, wanted=wanted))

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        log_probs, mask = self.token_log_probs(model_output, batch, wanted=_predicted(batch))
        seen = as_named(batch)["attention_mask"][:, 0, 1:] != 0
        chosen = torch.where(seen, log_probs[:, 0], 0.0).sum(dim=1) / seen.sum(dim=1).clamp(min=1)
        return self.beta * self.loss_of(_log_odds_ratio(log_probs, mask)) - chosen

    def check(self, model_output: Any, batch: Batch) -> None:
        self.check_completions(as_named(batch)[COMPLETION_MASK][..., 1:] != 0)


def _predicted(batch: Batch) -> Tensor:
    """Mark the tokens whose log-probabilities are in the loss, `(B, 2, T)`: prompts of chosen answers, too."""
    entries = as_named(batch)
    marked = (entries[COMPLETION_MASK] != 0).clone()
    marked[:, 0] |= entries["attention_mask"][:, 0] != 0
    return marked


def _log_odds_ratio(log_probs: Tensor, mask: Tensor) -> Tensor:
    means = torch.where(mask, log_probs, 0.0).sum(dim=2) / mask.sum(dim=2).clamp(min=1)
    log_odds = means - _log1mexp(means)
    return log_odds[:, 0] - log_odds[:, 1]


def _log1mexp(values: Tensor) -> Tensor:
    """Compute log(1 − eˣ) for x < 0, by the form that does not cancel (Mächler 2012, "Accurately computing
    log(1 − exp(−|a|))"). Each form gets harmless arguments where the other is taken, or its gradient would be NaN."""
    small = values < -math.log(2)
    far, near = torch.where(small, values, -1.0), torch.where(small, -1.0, values)
    return torch.where(small, torch.log1p(-torch.exp(far)), torch.log(-torch.expm1(near)))
