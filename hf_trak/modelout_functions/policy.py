"""Policies trained on their own rollouts: GRPO (arXiv 2402.03300) and PPO (arXiv 1707.06347), from stored rollouts.

A rollout is a prompt, the completion that the policy wrote, and its advantage A: how much better its reward was than
that of others. With w_t = 1 over the tokens of the completion, or 1/T for their mean, and a policy that has not moved
since the rollout (ratio 1, nothing clipped), the loss is the policy gradient's,

    f = Σ_t w_t log π(y_t)        L = −A f        q = −∂L/∂f = A                    (task `grpo`)

Like regression's, q has a sign: rollouts with negative advantages push their completion down. The features are scores
of the policy, ∇ log π, so XᵀX estimates the Fisher information of the policy, and the one step that TRAK takes is a
natural policy gradient.

With a policy that has moved (ratio ρ_t = π(y_t) / π_old(y_t)), one advantage per token, or a penalty for leaving the
reference policy, the loss is no function of f:

    L = −Σ_t w_t [min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t) − β k_t],   k_t = π_ref/π − log(π_ref/π) − 1   (task `ppo`)

with k_t from Schulman, "Approximating KL divergence" (2020). The train side is −L with q = 1, as in the task `loss`,
and the target side Σ_t w_t log π(y_t): which rollouts made the policy write this.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, Collator, Side, WrappingCollator, checked_choice
from hf_trak.modelout_functions.completions import (
    COMPLETION_MASK,
    CompletionModelOutput,
    as_named,
    check_finite,
    column_of,
)
from hf_trak.modelout_functions.pairs import is_default, padded_completions, padding_token
from hf_trak.runtime.checks import checked_positive

TokenWeights = Literal["sum", "mean"]

ADVANTAGE, OLD, REFERENCE = "advantage", "old_logps", "ref_logps"
_PER_TOKEN = (ADVANTAGE, OLD, REFERENCE)


class RolloutCollator(WrappingCollator):
    """Collate rollouts of a trainer.

    Trainers of policies collate prompts alone, so theirs is not called. It is only asked for its padding token, and to
    make tokens of rows, if it has a method `ready(rows)`.
    """

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        """Collate rows into a batch.

        Raises:
            ValueError: a row has no completion, or a list that is not as long as it.
        """
        ready = getattr(self.collator, "ready", None)
        return _padded_rollouts(rows if ready is None else ready(rows), padding_token(self.collator))


def _padded_rollouts(rows: Sequence[Any], fill: int) -> dict[str, Tensor]:
    """Pad `prompt_ids`, `completion_ids`, and what rows have per token of the completion, on the right."""
    for place, row in enumerate(rows):
        _check_row(row, place)
    completions = [list(row["completion_ids"]) for row in rows]
    prompts = [list(row.get("prompt_ids") or ()) for row in rows]
    batch = padded_completions(prompts, completions, fill)
    width = batch["input_ids"].shape[1]
    for name in _PER_TOKEN:
        values: list[Any] = [row.get(name) for row in rows]
        if any(value is None for value in values):
            continue
        if not _is_list(values[0]):
            batch[name] = torch.tensor([float(value) for value in values])
            continue
        pairs = zip(prompts, values, strict=True)
        given = [[0.0] * len(before) + list(map(float, value)) for before, value in pairs]
        batch[name] = torch.tensor([row + [0.0] * (width - len(row)) for row in given])
    return batch


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | Tensor) and not (isinstance(value, Tensor) and value.ndim == 0)


def _check_row(row: Any, place: int) -> None:
    if not isinstance(row, Mapping) or row.get("completion_ids") is None:
        given = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(
            f"Row {place} of the batch has {given}, and no `completion_ids`. Expected rollouts: `prompt_ids`, "
            "`completion_ids` and `advantage`. Store them during the training, or give `prompt` and `completion` to "
            "`TrakAttributor.from_trainer(trainer, train_dataset=rollouts)`."
        )
    tokens = len(row["completion_ids"])
    for name in _PER_TOKEN:
        value: Any = row.get(name)
        if _is_list(value) and len(value) != tokens:
            raise ValueError(
                f"Row {place} of the batch has {len(value)} entries in `{name}` and {tokens} in `completion_ids`. "
                "Expected one per token of the completion."
            )


class PolicyModelOutput(CompletionModelOutput):
    """Base class of tasks of rollouts."""

    batch_columns = ("prompt_ids", "completion_ids", *_PER_TOKEN)
    own_columns: ClassVar[tuple[str, ...]] = (COMPLETION_MASK, *_PER_TOKEN)

    def __init__(self, aggregation: TokenWeights = "mean", temperature: float = 1.0) -> None:
        """
        Args:
            aggregation (`str`, *optional*, defaults to `"mean"`):
                `"mean"` or `"sum"` over the tokens of a completion, as in the loss of the training.
            temperature (`float`, *optional*, defaults to 1.0):
                The temperature of the sampling, by which the training divides logits.

        Raises:
            ValueError: an argument is out of range.
        """
        super().__init__()
        self.aggregation = checked_choice(aggregation, "aggregation", TokenWeights)
        self.temperature = checked_positive(temperature, "temperature")

    def collator(self, collator: Collator) -> Collator:
        if is_default(collator):
            return partial(_padded_rollouts, fill=padding_token(collator))
        return RolloutCollator(collator)

    def weighted(self, values: Tensor, mask: Tensor) -> Tensor:
        """Compute Σ_t w_t v_t of values `(B, T − 1)` over the tokens that `mask` marks, `(B,)`."""
        sums = torch.where(mask, values, 0.0).sum(dim=1)
        return sums / mask.sum(dim=1).clamp(min=1) if self.aggregation == "mean" else sums

    def log_likelihood(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute Σ_t w_t log π(y_t) of every rollout, differentiable, `(B,)`."""
        return self.weighted(*self.token_log_probs(model_output, batch, self.temperature))


class GRPOModelOutput(PolicyModelOutput):
    """The task `grpo`: f = Σ_t w_t log π(y_t) of a rollout, q = its advantage.

    Takes the arguments of [`PolicyModelOutput`].
    """

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return self.log_likelihood(model_output, batch)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            self.check_completions(batch)
            values = self.log_likelihood(model_output, batch)
            check_finite(values, "The log-probability")
            if side == "target":  # no score depends on it, and targets may come without an advantage
                return torch.ones_like(values)
            advantages = self._advantages(batch, values)
            check_finite(advantages, "The advantage")
            return advantages

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the loss of every rollout, differentiable, shape `(B,)`."""
        values = self.log_likelihood(model_output, batch)
        return -self._advantages(batch, values) * values

    def _advantages(self, batch: Batch, like: Tensor) -> Tensor:
        return column_of(batch, ADVANTAGE, like, "For one advantage per token use the task 'ppo'.")


class PPOModelOutput(PolicyModelOutput):
    """The task `ppo`: minus the clipped loss of training rows, and the log-probability of targets."""

    def __init__(
        self,
        aggregation: TokenWeights = "mean",
        temperature: float = 1.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        weighted_kl: bool = False,
    ) -> None:
        """
        Args:
            aggregation (`str`, *optional*, defaults to `"mean"`):
                `"mean"` or `"sum"` over the tokens of a completion, as in the loss of the training.
            temperature (`float`, *optional*, defaults to 1.0):
                The temperature of the sampling, by which the training divides logits.
            epsilon (`float`, *optional*, defaults to 0.2):
                ε, beyond which ratios are clipped. It matters only for rows with `old_logps`.
            epsilon_high (`float`, *optional*):
                ε above 1. The default is `epsilon`.
            beta (`float`, *optional*, defaults to 0.0):
                β, the weight of the divergence from the reference policy, for which rows have `ref_logps`.
            weighted_kl (`bool`, *optional*, defaults to `False`):
                Multiply k_t by ρ_t, which makes up for the policy that wrote the rollout (DeepSeek-V3.2, arXiv
                2512.02556). It is TRL's `use_bias_correction_kl`.

        Raises:
            ValueError: an argument is out of range.
        """
        super().__init__(aggregation, temperature)
        self.epsilon = checked_positive(epsilon, "epsilon")
        self.epsilon_high = self.epsilon if epsilon_high is None else checked_positive(epsilon_high, "epsilon_high")
        if not 0 <= beta < float("inf"):
            raise ValueError(f"`beta` is {beta}. Expected a finite number of at least 0.")
        self.beta = float(beta)
        self.weighted_kl = bool(weighted_kl)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "target":
            return self.log_likelihood(model_output, batch)
        return -self.per_sample_loss(model_output, batch)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            self.check_completions(batch)
            values = self.output(model_output, batch, side)
            check_finite(values, "The loss" if side == "train" else "The log-probability")
            return torch.ones_like(values)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the loss of every rollout, differentiable, shape `(B,)`."""
        log_probs, mask = self.token_log_probs(model_output, batch, self.temperature)
        advantages, old = self._advantages(batch, log_probs), as_named(batch).get(OLD)
        before = log_probs.detach() if old is None else self._per_token(batch, OLD, log_probs)
        ratios = torch.where(mask, log_probs - before, 0.0).exp()
        clipped = ratios.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        gains = torch.minimum(ratios * advantages, clipped * advantages)
        if self.beta > 0:
            distance = torch.where(mask, self._per_token(batch, REFERENCE, log_probs) - log_probs, 0.0)
            divergence = distance.exp() - distance - 1
            gains = gains - self.beta * (divergence * ratios if self.weighted_kl else divergence)
        return -self.weighted(gains, mask)

    def _advantages(self, batch: Batch, like: Tensor) -> Tensor:
        given = as_named(batch).get(ADVANTAGE)
        if isinstance(given, Tensor) and given.ndim == 1:
            return given.to(like.dtype).unsqueeze(1)
        return self._per_token(batch, ADVANTAGE, like)

    def _per_token(self, batch: Batch, name: str, like: Tensor) -> Tensor:
        """Return a column of one number per token `(B, T)` at the predicted tokens, `(B, T − 1)`."""
        column = as_named(batch).get(name)
        if not isinstance(column, Tensor) or column.ndim != 2 or column.shape[1] != like.shape[1] + 1:
            given = tuple(column.shape) if isinstance(column, Tensor) else column
            raise ValueError(
                f"`{name}` of the batch is {given}. Expected one number per token of every completion. Store it with "
                "the rollout."
            )
        return column[:, 1:].to(like.dtype)
