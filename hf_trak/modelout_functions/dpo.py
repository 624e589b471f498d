"""Direct preference optimization (DPO, Rafailov et al., arXiv 2305.18290).

With π the model, π_ref the reference model, y_c and y_r the chosen and the rejected answer to a prompt,

    h = β [ (log π(y_c) − log π(y_r)) − (log π_ref(y_c) − log π_ref(y_r)) ]
    L = −log σ(h)                                                                    (Equation 7 of the paper)

is a logistic regression on h, the logit of the Bradley-Terry probability that y_c is preferred. So f = h and
q = −∂L/∂h = σ(−h) = 1 − p, as for classification (TRAK paper, arXiv 2303.14186, Section 3.3), and q ∇f is the
gradient of Equation 7. The reference is a constant that no gradient sees: rows need it for q, targets do not.

Other losses of h, by the names that TRL gives them: `hinge` (SLiC, arXiv 2305.10425), max(0, 1 − h); `ipo`
(arXiv 2310.12036, Equation 17), ((h − ½)/β)², with log-probabilities per token; `robust` (arXiv 2403.00409), −log σ
corrected for labels if the part ε of them is wrong; `sigmoid_norm`, −log σ with log-probabilities per token.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, Side, checked_choice
from hf_trak.modelout_functions.batches import find_logits
from hf_trak.modelout_functions.completions import COMPLETION_MASK, as_named, column_of
from hf_trak.modelout_functions.pairs import REFERENCES, LikelihoodPairs, PairModelOutput
from hf_trak.runtime.checks import checked_positive

DPOLoss = Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust"]


REFERENCE_REMEDY = (
    "Log-probabilities of the reference model are columns of the rows: `TrakAttributor.from_trainer` computes them, "
    "and so does `precompute_ref_log_probs=True` of the trainer."
)


class DPOModelOutput(LikelihoodPairs):
    """The task `dpo`: f = h, the logit by which the model prefers the chosen answer more than its reference does."""

    def __init__(self, beta: float = 0.1, loss_type: DPOLoss = "sigmoid", label_smoothing: float = 0.0) -> None:
        """
        Args:
            beta (`float`, *optional*, defaults to 0.1):
                β.
            loss_type (`str`, *optional*, defaults to `"sigmoid"`):
                `"sigmoid"`, `"sigmoid_norm"`, `"hinge"`, `"ipo"` or `"robust"`.
            label_smoothing (`float`, *optional*, defaults to 0.0):
                ε of `"robust"`, in [0, ½).

        Raises:
            ValueError: an argument is out of range.
        """
        super().__init__()
        self.beta = checked_positive(beta, "beta")
        self.loss_type = checked_choice(loss_type, "loss_type", DPOLoss)
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(f"`label_smoothing` is {label_smoothing}. Expected a number in [0, 0.5).")
        self.label_smoothing = label_smoothing

    @property
    def is_likelihood(self) -> bool:
        """Tell whether the loss is −log σ(h)."""
        return self.loss_type in ("sigmoid", "sigmoid_norm")

    def margin(self, model_output: Any, batch: Batch, side: Side) -> Tensor:
        sums = self.sums(model_output, batch)
        if side == "train" or all(name in as_named(batch) for name in REFERENCES):
            references = [column_of(batch, name, sums[:, 0], REFERENCE_REMEDY) for name in REFERENCES]
            sums = sums - torch.stack(references, dim=1)
        if self.loss_type in ("ipo", "sigmoid_norm"):
            sums = sums / as_named(batch)[COMPLETION_MASK].sum(dim=2).clamp(min=1)
        return self.beta * (sums[:, 0] - sums[:, 1])

    def terms(self, batch: Batch) -> Tensor | None:
        """Return 2 β (|log π_ref(y_c)| + |log π_ref(y_r)|), see [`BatchedModelOutput`]."""
        columns = [as_named(batch).get(name) for name in REFERENCES]
        found = [column.abs() for column in columns if isinstance(column, Tensor)]
        return 2 * self.beta * torch.stack(found).sum(0) if found else None

    def loss_of(self, margin: Tensor) -> Tensor:
        if self.loss_type == "hinge":
            return torch.relu(1 - margin)
        if self.loss_type == "ipo":
            return ((margin - 0.5) / self.beta).square()
        correct, wrong = (torch.nn.functional.softplus(sign * margin) for sign in (-1, 1))
        smoothing = self._smoothing
        return ((1 - smoothing) * correct - smoothing * wrong) / (1 - 2 * smoothing)

    def q_of(self, margin: Tensor) -> Tensor:
        if self.loss_type == "hinge":
            return (margin < 1).to(margin.dtype)
        if self.loss_type == "ipo":
            return -2 * (margin - 0.5) / self.beta**2
        smoothing = self._smoothing
        return ((1 - smoothing) * torch.sigmoid(-margin) + smoothing * torch.sigmoid(margin)) / (1 - 2 * smoothing)

    @property
    def _smoothing(self) -> float:
        return self.label_smoothing if self.loss_type == "robust" else 0.0


class ORPOModelOutput(PairModelOutput):
    """The task `orpo`: f = −L of training rows, and the log odds ratio of targets."""

    through_loss = True

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

    def margin(self, model_output: Any, batch: Batch, side: Side) -> Tensor:
        wanted = _predicted(batch) if side == "train" else None
        return _log_odds_ratio(*self.token_log_probs(model_output, batch, wanted=wanted))

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        log_probs, mask = self.token_log_probs(model_output, batch, wanted=_predicted(batch))
        seen = as_named(batch)["attention_mask"][:, 0, 1:] != 0
        chosen = torch.where(seen, log_probs[:, 0], 0.0).sum(dim=1) / seen.sum(dim=1).clamp(min=1)
        return self.beta * self.loss_of(_log_odds_ratio(log_probs, mask)) - chosen


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
    def through_loss(self) -> bool:  # type: ignore[override]  # the coefficient is a setting
        """Tell whether the train side is minus the loss itself."""
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

    def check_completions(self, batch: Batch) -> None:
        """Accept every batch, since a reward needs no completion."""

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
