"""Multi-label classification: a yes or no for every class."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.aggregated import TARGET_MASK, TARGET_WEIGHTS, AggregatedModelOutput
from hf_trak.modelout_functions.base import Batch
from hf_trak.modelout_functions.batches import LABEL_NAMES, as_sequence, find_logits, looked_at
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.tokens import IGNORED

_REMEDY = (
    "Load the model with a sequence or image classification head of as many classes as the labels have, or pass a "
    "task of your own (`FunctionModelOutput`)."
)


class MultiLabelClassificationModelOutput(AggregatedModelOutput):
    """The task `multi_label_classification`: f = Σ_c w_c m_c over the classes.

    m_c is logit_c where label c is 1, and −logit_c where it is 0: log p_c / (1 − p_c) of the right answer under the
    sigmoid of `BCEWithLogitsLoss`, so L and q are those of [`aggregated`]. Labels are 0 and 1, integers or floats,
    `(B, C)`; -100 marks a class without a label. A `target_mask` column `(B, C)` restricts the target to some classes.

    Takes the arguments of [`AggregatedModelOutput`].
    """

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, Mapping):
            labels = (*LABEL_NAMES, TARGET_MASK, TARGET_WEIGHTS)
            return (), {name: value for name, value in batch.items() if name not in labels}
        return tuple(as_sequence(batch, "(input, …, labels)")[:-1]), {}

    def labelled(self, batch: Batch) -> Tensor:
        return _labels(batch) != IGNORED

    def unit_margins(self, model_output: Any, batch: Batch) -> Tensor:
        logits, labels = self._read(model_output, batch)
        return torch.where(labels > 0, logits, -logits)

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute Σ_c √w_c log p(ŷ_c) for a yes or no ŷ_c drawn for every class with a label, `(B,)`."""
        valid = self._counted(batch)
        logits = self._read(model_output, batch)[0]
        # u < sigmoid(z), in the form that is precise at both ends
        yes = torch.logit(draws.uniforms(valid)) < logits.detach()
        values = torch.nn.functional.logsigmoid(torch.where(yes, logits, -logits))
        return self.weighted_by_roots(values, valid, batch)

    def check(self, model_output: Any, batch: Batch) -> None:
        labels = self._read(model_output, batch)[1]
        strange = (labels != 0) & (labels != 1) & (labels != IGNORED)
        strange = looked_at(strange)
        if bool(strange.any()):
            sample, name = strange.nonzero()[0].tolist()
            value = looked_at(labels)[sample, name].item()
            raise ValueError(
                f"Class {name} of sample {sample} has the label {value}. Expected 0 or 1, or {IGNORED} for no label. "
                "For soft labels pass a task of your own (`FunctionModelOutput`)."
            )

    def _read(self, model_output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        labels, logits = _labels(batch), find_logits(model_output, _REMEDY)
        if logits.shape != labels.shape:
            raise ValueError(
                f"The labels have the shape {tuple(labels.shape)}, the logits {tuple(logits.shape)}. Expected (B, "
                f"classes) for both, one 0 or 1 per class. {_REMEDY}"
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), labels


def _labels(batch: Batch) -> Tensor:
    if isinstance(batch, Mapping):
        found = [name for name in LABEL_NAMES if batch.get(name) is not None]
        if len(found) != 1:
            raise ValueError(
                f"The batch has the keys {list(batch)}, of which {found or 'none'} hold labels. Expected exactly one "
                f"of {list(LABEL_NAMES)}, of shape (B, classes)."
            )
        labels: Any = batch[found[0]]
    else:
        labels = as_sequence(batch, "(input, …, labels)")[-1]
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        raise ValueError(
            f"The labels have the shape {tuple(getattr(labels, 'shape', ()))}. Expected (B, classes), one 0 or 1 per "
            "class. For one class per sample use the task 'text_classification' or 'image_classification'."
        )
    return labels
