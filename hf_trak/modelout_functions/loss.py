"""The formulation of the seed notebook: loss gradients on the train side, margin gradients on the target side.

Sign. Up-weighting example i by ε moves the minimizer of the loss by −ε H⁻¹ ∇ℓ(z_i), and so the margin of a target t by
−ε ∇ℓ(z_i)ᵀ H⁻¹ ∇m(t). A positive score must mark a helpful example, one that raises the margin, so the train side
carries −∇ℓ = ∇ log p_y, and q ≡ 1. (The Gram matrix does not see the sign.) With ℓ = softplus(−m) one has −∇ℓ = (1 −
p_y) ∇m: the scores are those of the classification tasks with q moved inside the features, and inside the Gram matrix.
"""

from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, Side
from hf_trak.modelout_functions.batches import logits_of, split_batch
from hf_trak.modelout_functions.classification import ClassificationModelOutput
from hf_trak.modelout_functions.margins import log_likelihood, margin


class LossModelOutput(ClassificationModelOutput):
    """`loss`: f is minus the per-sample cross-entropy loss for training examples, the margin for targets; q ≡ 1.

    The functional form, `get_output`, has no notion of a side and gives the train side.
    """

    def __init__(self) -> None:
        super().__init__(temperature=1.0)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        labels = split_batch(batch)[2]
        logits = logits_of(model_output, labels)
        return log_likelihood(logits, labels) if side == "train" else margin(logits, labels)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return torch.ones_like(super().out_to_loss_grad(model_output, batch, side))
