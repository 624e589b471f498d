"""Extractive question answering: where the answer begins and where it ends."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.aggregated import TARGET_MASK, TARGET_WEIGHTS, AggregatedModelOutput
from hf_trak.modelout_functions.base import Batch
from hf_trak.modelout_functions.batches import looked_at
from hf_trak.modelout_functions.margins import margin

ENDS = ("start_positions", "end_positions")


class QuestionAnsweringModelOutput(AggregatedModelOutput):
    """`question_answering`: f = Σ w_t m_t over the two ends of the answer, margins over the positions of the sequence.

    Batches have `start_positions` and `end_positions` `(B,)`. A position beyond the sequence, as tokenizers give it
    for answers that were truncated away, is no label, as in the models' own loss. Padding cannot be answered with: its
    logits do not count, where the models' own loss, which depends on how much padding there is, lets them.
    """

    batch_columns = (TARGET_MASK, TARGET_WEIGHTS, *ENDS)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {name: value for name, value in _mapping(batch).items() if name not in self.batch_columns}

    def unit_margins(self, model_output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, labels, real = self._read(model_output, _mapping(batch))
        inside = (labels >= 0) & (labels < real.shape[1])
        safe = torch.where(inside, labels, 0)
        valid = inside & real.gather(1, safe)
        # A real position for those that do not count, so that no margin is infinite.
        safe = torch.where(valid, safe, real.long().argmax(dim=1, keepdim=True))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lowest = torch.finfo(wide.dtype).min / 4
        return margin(torch.where(real.unsqueeze(1), wide, lowest), safe), valid

    def check(self, model_output: Any, batch: Batch) -> None:
        labels, real = self._read(model_output, _mapping(batch))[1:]
        inside = (labels >= 0) & (labels < real.shape[1])
        padding = inside & ~real.gather(1, torch.where(inside, labels, 0))
        for wrong, reason in ((labels < 0, "negative"), (padding, "padding")):
            seen = looked_at(wrong)
            if bool(seen.any()):
                sample, end = seen.nonzero()[0].tolist()
                raise ValueError(
                    f"`{ENDS[end]}` of sample {sample} is {int(looked_at(labels)[sample, end])}, which is {reason}. "
                    "Expected the position of a token of the sequence, or its length or more for an answer that was "
                    "truncated away. Count positions in the padded sequence."
                )

    def _read(self, model_output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `(B, 2, T)`, positions `(B, 2)`, and which of the T positions are no padding `(B, T)`."""
        ends = [
            model_output.get(name) if isinstance(model_output, Mapping) else getattr(model_output, name, None)
            for name in ("start_logits", "end_logits")
        ]
        if not all(isinstance(end, Tensor) and end.ndim == 2 for end in ends):
            keys = list(model_output) if isinstance(model_output, Mapping) else type(model_output).__name__
            raise ValueError(
                f"The model returned {keys}. Expected `start_logits` and `end_logits` of shape (B, tokens). Load the "
                "model with `AutoModelForQuestionAnswering`, or pass a task of your own (`FunctionModelOutput`)."
            )
        logits = torch.stack([end for end in ends if end is not None], dim=1)
        if missing := [name for name in ENDS if not isinstance(batch.get(name), Tensor)]:
            raise ValueError(
                f"The batch has the keys {list(batch)}, not {missing}. Expected the positions of the answer's first "
                "and last token, shape (B,). Keep these columns in the dataset and the data collator."
            )
        labels = torch.stack([batch[name].reshape(logits.shape[0]) for name in ENDS], dim=1)
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == (logits.shape[0], logits.shape[2]):
            return logits, labels, mask != 0
        return logits, labels, torch.ones_like(logits[:, 0], dtype=torch.bool)


def _mapping(batch: Batch) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    raise TypeError(
        f"The batch is a {type(batch).__name__}. Expected a mapping with the model's inputs, {ENDS[0]} and {ENDS[1]}."
    )
