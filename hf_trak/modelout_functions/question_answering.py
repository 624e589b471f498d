"""Extractive question answering: the positions of the first and the last token of the answer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.aggregated import TARGET_MASK, TARGET_WEIGHTS, AggregatedModelOutput
from hf_trak.modelout_functions.base import Batch
from hf_trak.modelout_functions.batches import entry_of, first_marked, looked_at, mapping_of
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.margins import margin

ENDS = ("start_positions", "end_positions")


class QuestionAnsweringModelOutput(AggregatedModelOutput):
    """The task `question_answering`: f = Σ w_t m_t over the two ends of the answer, margins over all positions.

    Batches have `start_positions` and `end_positions` `(B,)`. A position beyond the sequence, which tokenizers give to
    answers that were truncated away, is no label, as in the models' own loss. Padding is no possible answer: its
    logits do not count here. In the models' own loss they do, so that loss depends on the amount of padding.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    batch_columns = (TARGET_MASK, TARGET_WEIGHTS, *ENDS)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {name: value for name, value in _mapping(batch).items() if name not in self.batch_columns}

    def labelled(self, batch: Batch) -> Tensor:
        return _places(_mapping(batch))[2]

    def unit_margins(self, model_output: Any, batch: Batch) -> Tensor:
        positions, real, valid = _places(_mapping(batch))
        # Ends that do not count get the first real position, so that no margin is infinite.
        safe = torch.where(valid, positions, real.long().argmax(dim=1, keepdim=True))
        return margin(_real_logits(model_output, real), safe)

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute Σ √w_t log p(ŷ_t) for both ends ŷ_t drawn from the predictions over real positions, `(B,)`."""
        valid, real = self._counted(batch), _places(_mapping(batch))[1]
        logits = _real_logits(model_output, real)
        # Real positions go first: a draw depends on their order and not on the padding before them.
        order = (~real).long().argsort(dim=1, stable=True).unsqueeze(1).expand_as(logits)
        return self.weighted_by_roots(draws.log_likelihoods(logits.gather(2, order), valid), valid, batch)

    def check(self, model_output: Any, batch: Batch) -> None:
        positions, real, valid = _places(_mapping(batch))
        padding = (positions >= 0) & (positions < real.shape[1]) & ~valid
        for wrong, reason in ((positions < 0, "negative"), (padding, "padding")):
            if seen := first_marked(wrong):
                sample, end = seen
                raise ValueError(
                    f"`{ENDS[end]}` of sample {sample} is {int(looked_at(positions)[sample, end])}, which is "
                    f"{reason}. Expected the position of a token of the sequence, or its length or more for an answer "
                    "that was truncated away. Count positions in the padded sequence."
                )


def _places(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Read the two ends `(B, 2)`, a mask of real tokens `(B, T)`, and a mask of ends that are inside `(B, 2)`."""
    if missing := [name for name in ENDS if not isinstance(batch.get(name), Tensor)]:
        raise ValueError(
            f"The batch has the keys {list(batch)}, not {missing}. Expected the positions of the answer's first and "
            "last token, shape (B,). Keep these columns in the dataset and the data collator."
        )
    size = batch[ENDS[0]].shape[0]
    positions = torch.stack([batch[name].reshape(size) for name in ENDS], dim=1)
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = mask != 0
    else:
        inputs = next((batch[name] for name in ("input_ids", "inputs_embeds") if name in batch), None)
        if inputs is None:
            raise ValueError(
                f"The batch has the keys {list(batch)}. Expected `attention_mask`, `input_ids` or `inputs_embeds`, "
                "which tell the number of positions."
            )
        real = torch.ones(inputs.shape[:2], dtype=torch.bool, device=positions.device)
    inside = (positions >= 0) & (positions < real.shape[1])
    return positions, real, inside & real.gather(1, torch.where(inside, positions, 0))


def _real_logits(model_output: Any, real: Tensor) -> Tensor:
    """Find the logits of both ends, `(B, 2, T)`, in float32 or wider, with the lowest possible ones for padding."""
    ends = [entry_of(model_output, name) for name in ("start_logits", "end_logits")]
    if not all(isinstance(end, Tensor) and end.shape == real.shape for end in ends):
        keys = list(model_output) if isinstance(model_output, Mapping) else type(model_output).__name__
        raise ValueError(
            f"The model returned {keys}. Expected `start_logits` and `end_logits` of shape {tuple(real.shape)}. Load "
            "the model with `AutoModelForQuestionAnswering`, or pass a task of your own (`FunctionModelOutput`)."
        )
    logits = torch.stack([end for end in ends if end is not None], dim=1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.where(real.unsqueeze(1), wide, torch.finfo(wide.dtype).min / 4)


def _mapping(batch: Batch) -> Mapping[str, Any]:
    return mapping_of(batch, f"with the model's inputs, {ENDS[0]} and {ENDS[1]}.")
