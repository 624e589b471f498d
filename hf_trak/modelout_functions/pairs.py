"""Pairs of a chosen and a rejected answer: one row of the dataset, two sequences of the model.

Collators of trainers lay the B chosen answers of a batch above the B rejected ones, `(2 B, T)`. Here a batch is
`(B, 2, T)`, so that one sample is one pair, and the gradient of a pair is that of both of its sequences together.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithPadding, default_data_collator

from hf_trak.modelout_functions.base import Batch, Collator, Side, WrappingCollator
from hf_trak.modelout_functions.completions import COMPLETION_MASK, CompletionModelOutput, check_finite, images_once
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.tokens import IGNORED

REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns of the log-probabilities of both answers under the reference model."""

PAIR_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids", *REFERENCES, "margin")
SEQUENCE_COLUMNS = tuple(
    f"{answer}_{name}" for answer in ("chosen", "rejected") for name in ("input_ids", "attention_mask", "labels")
)
"""Columns of rows with whole sequences, as ORPO's trainer makes them."""


class PairCollator(WrappingCollator):
    """A data collator that makes batches `(B, 2, T)` of pairs, whatever the inner one makes of them."""

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch.

        Raises:
            ValueError: the inner collator makes something else of pairs.
        """
        batch = self.collator(rows)
        if not isinstance(batch, Mapping):
            return batch
        if "chosen_input_ids" in batch:
            return _joined(batch, padding_token(self.collator))
        return _stacked(batch, len(rows))


def is_default(collator: Any) -> bool:
    """Tell whether a collator is one that `Trainer` takes by default, which pads `input_ids` or nothing."""
    return collator is default_data_collator or isinstance(collator, DataCollatorWithPadding)


def padding_token(collator: Any) -> int:
    """Return the token that a collator pads with; 0, which masks cover, where it names none."""
    if (named := getattr(collator, "pad_token_id", None)) is None:
        named = getattr(getattr(collator, "tokenizer", None), "pad_token_id", None)
    return 0 if named is None else int(named)


def _stacked(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Turn `(2 B, …)`, chosen answers first, into `(B, 2, …)`, with the images of each pair once."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.shape[0] != 2 * count:
        given = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(
            f"The data collator made `input_ids` of {given} from {count} pairs. Expected twice as many sequences as "
            "there are pairs, the chosen answers first. Use the collator of the trainer."
        )
    images = images_once(batch)
    pairs = {
        name: torch.stack(value.chunk(2), dim=1)
        for name, value in batch.items()
        if name not in images and isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 2 * count
    }
    rest = {name: value for name, value in batch.items() if name not in pairs}
    return {"input_ids": pairs.pop("input_ids"), **pairs, **rest, **images}


def _joined(batch: Mapping[str, Any], fill: int) -> dict[str, Any]:
    """Put `chosen_…` and `rejected_…`, padded each on its own, beside each other."""

    def both(name: str, value: int) -> Tensor:
        sides = [batch[f"{answer}_{name}"] for answer in ("chosen", "rejected")]
        width = max(side.shape[1] for side in sides)
        padded = [torch.nn.functional.pad(side, (0, width - side.shape[1]), value=value) for side in sides]
        return torch.stack(padded, dim=1)

    made = {"input_ids": both("input_ids", fill), "attention_mask": both("attention_mask", 0)}
    return {**made, COMPLETION_MASK: (both("labels", IGNORED) != IGNORED).long()}


def _padded_pairs(rows: Sequence[Mapping[str, Any]], fill: int) -> dict[str, Any]:
    """Pad rows with `prompt_ids` (if there are any), `chosen_ids` and `rejected_ids` on the right."""
    if missing := [name for name in ("chosen_ids", "rejected_ids") if rows and name not in rows[0]]:
        raise ValueError(
            f"The rows have {sorted(rows[0])}, and not {missing}. Expected tokens of both answers. Take the rows from "
            "a trainer of preferences (`TrakAttributor.from_trainer`), or tokenize them."
        )
    prompts = [list(row.get("prompt_ids", ())) for row in rows for _ in range(2)]
    answers = [list(row[name]) for row in rows for name in ("chosen_ids", "rejected_ids")]
    batch = padded_completions(prompts, answers, fill)
    made: dict[str, Any] = {name: value.view(len(rows), 2, -1) for name, value in batch.items()}
    for name in (*REFERENCES, "margin"):
        if name in rows[0]:
            made[name] = torch.tensor([float(row[name]) for row in rows])
    return made


def padded_completions(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], fill: int
) -> dict[str, Tensor]:
    """Join prompts and completions, and pad them on the right.

    Args:
        prompts, completions: tokens, n of each.
        fill: the token of the padding.

    Returns:
        `input_ids`, `attention_mask` and `completion_mask`, `(n, T)` each.
    """

    def padded(lists: list[list[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(each, dtype=torch.long) for each in lists], True, value)

    both = list(zip(prompts, completions, strict=True))
    return {
        "input_ids": padded([[*prompt, *answer] for prompt, answer in both], fill),
        "attention_mask": padded([[1] * (len(prompt) + len(answer)) for prompt, answer in both], 0),
        COMPLETION_MASK: padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in both], 0),
    }


class PairModelOutput(CompletionModelOutput):
    """Base class of tasks of pairs: f is the margin h by which the model prefers the chosen answer.

    A loss that is no function of h is attributed as the task `loss` does: the train side is f = −L with q = 1, the
    target side h. Subclasses say so by `through_loss`.
    """

    batch_columns = (*PAIR_COLUMNS, *SEQUENCE_COLUMNS)
    own_columns: ClassVar[tuple[str, ...]] = (COMPLETION_MASK, *REFERENCES, "margin")

    through_loss: bool = False
    """Whether the train side is minus the loss itself."""

    def collator(self, collator: Collator) -> Collator:
        if is_default(collator):
            return partial(_padded_pairs, fill=padding_token(collator))
        return PairCollator(collator)

    @abstractmethod
    def margin(self, model_output: Any, batch: Batch, side: Side) -> Tensor:
        """Compute h of every pair, `(B,)`, differentiable."""

    def loss_of(self, margin: Tensor) -> Tensor:
        """Compute the loss of every pair from h, `(B,)`: that of the Bradley-Terry model, −log σ(h)."""
        return torch.nn.functional.softplus(-margin)

    def q_of(self, margin: Tensor) -> Tensor:
        """Compute −∂L/∂h of every pair, `(B,)`."""
        return torch.sigmoid(-margin)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the loss of every pair, differentiable, shape `(B,)`."""
        return self.loss_of(self.margin(model_output, batch, "train"))

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "train" and self.through_loss:
            return -self.per_sample_loss(model_output, batch)
        return self.margin(model_output, batch, side)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            self.check_completions(batch)
            margin = self.margin(model_output, batch, side)
            check_finite(margin, "The margin")
            return torch.ones_like(margin) if self.through_loss else self.q_of(margin)


class LikelihoodPairs(PairModelOutput):
    """Base class of tasks of pairs whose loss is −log σ(h), the likelihood of the label "chosen"."""

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute log σ(±h) of every pair for a label drawn with the probability σ(h), differentiable, `(B,)`.

        Raises:
            TypeError: the loss is another one.
        """
        if not self.is_likelihood:
            raise TypeError(
                f"The loss of {type(self).__name__} is no likelihood with these settings, so that labels cannot be "
                'drawn from the model. Expected the loss −log σ(h). Use `curvature.labels="empirical"`.'
            )
        margin = self.margin(model_output, batch, "train")
        drawn = draws.uniforms(torch.ones_like(margin, dtype=torch.bool).unsqueeze(1)).squeeze(1)
        sign = torch.where(drawn < torch.sigmoid(margin.detach()), 1.0, -1.0)
        return torch.nn.functional.logsigmoid(sign * margin)

    @property
    def is_likelihood(self) -> bool:
        """Tell whether the loss is −log σ(h)."""
        return not self.through_loss
