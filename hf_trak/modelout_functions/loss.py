"""TRAK with loss gradients on the train side and margin gradients on the target side.

Sign. Up-weighting example i by ε moves the minimizer of the loss by −ε H⁻¹ ∇ℓ(z_i), and so the margin of a target t by
−ε ∇ℓ(z_i)ᵀ H⁻¹ ∇m(t). A positive score must mark a helpful example, one that raises the margin, so the train side
carries −∇ℓ = ∇ log p_y, and q ≡ 1. (The Gram matrix does not see the sign.) With ℓ = softplus(−m) one has −∇ℓ = (1 −
p_y) ∇m: the scores are those of the classification tasks with q moved inside the features, and inside the Gram matrix.

The same holds for every task whose loss can be computed sample by sample: the train side is −∇ℓ, the target side ∇f.
"""

import json
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side, WrappingModelOutput
from hf_trak.modelout_functions.classification import ClassificationModelOutput, RegressionModelOutput
from hf_trak.modelout_functions.function import task_identity
from hf_trak.modelout_functions.inference import TASKS_OF_MODELS, known_task


@runtime_checkable
class HasLoss(Protocol):
    """A task that can compute the training loss of every sample."""

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Return the loss of every sample, differentiable, shape `(B,)`."""


class LossModelOutput(WrappingModelOutput):
    """The task `loss`: f is minus the per-sample loss for training examples, the model output for targets; q ≡ 1.

    The functional form, `get_output`, has no notion of a side and gives the train side.
    """

    def __init__(self, of: BatchedModelOutput | None = None) -> None:
        """
        Args:
            of (`BatchedModelOutput`, *optional*):
                Task whose loss and model output are taken, with a method `per_sample_loss(model_output, batch) ->
                (B,)`: any of this library's but `clip` and `siglip`, or your own. `None` takes the task that fits the
                model, and classification where no task is known for it.

        Raises:
            TypeError: the task has no such method.
        """
        super().__init__()
        self.of = None if of is None else json.dumps(task_identity(_checked(of)), sort_keys=True)
        self._given = of is not None
        self._task: BatchedModelOutput = ClassificationModelOutput() if of is None else of

    @property
    def of_task(self) -> BatchedModelOutput:
        """Return the task whose loss is taken."""
        return self._task

    def bind(self, model: torch.nn.Module) -> None:
        if not self._given:
            name = known_task(model)
            self._task = _checked(ClassificationModelOutput() if name is None else TASKS_OF_MODELS[name]())
        super().bind(model)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "target":
            return self._task.output(model_output, batch, side)
        assert isinstance(self._task, HasLoss)
        return -self._task.per_sample_loss(model_output, batch)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return torch.ones_like(self._task.out_to_loss_grad(model_output, batch, side))


class MinusLossModelOutput(LossModelOutput):
    """Minus the loss of a task, for training rows and for targets: the targets of a question about their loss."""

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return super().output(model_output, batch, "train")


class GaussNewtonModelOutput(LossModelOutput):
    """The task `gauss_newton`: training rows are −∇ℓ/√q with the weight √q, so that XᵀX is a Gauss-Newton matrix.

    The Gauss-Newton matrix of a loss is Σ h ∇f ∇fᵀ, with h the second derivative of a row's loss by f. For the
    softmax, h is about q = 1 − p_y (its mean over labels y drawn from the model is 1 − Σ_c p_c², the trace of the
    softmax's Hessian), while the gradient of the loss is q ∇f: so √h ∇f is −∇ℓ/√q. A Gram matrix of ∇ℓ itself (the
    "empirical Fisher", see Kunstner et al. 2019, arXiv 1905.12558) would weigh rows by q², one of ∇f, as in the TRAK
    paper, weighs all alike.

    For tasks whose q lies in [0, 1]: those with a margin, or several. Regression has h = 1: its own task does this.
    The loss of a trainer has its own h, see [`TrainerLossModelOutput`].
    """

    def bind(self, model: torch.nn.Module) -> None:
        """Learn which model the next batches go through.

        Args:
            model (`torch.nn.Module`):
                The model.

        Raises:
            TypeError: the task is regression.
        """
        super().bind(model)
        if isinstance(self._task, RegressionModelOutput):
            raise TypeError(
                "The task 'gauss_newton' was given a regression, whose q has a sign. Expected a task of "
                "probabilities. Use 'regression': its XᵀX is the Gauss-Newton matrix already."
            )

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        found = super().output(model_output, batch, side)
        return found if side == "target" else found / self._roots(model_output, batch).to(found)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "target":
            return super().out_to_loss_grad(model_output, batch, side)
        return self._roots(model_output, batch)

    def _roots(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute √q of every sample, away from the zero of rows that the model predicts with certainty."""
        weights = getattr(self._task, "gauss_newton_weight", self._task.out_to_loss_grad)
        return weights(model_output, batch).detach().float().clamp(min=_LEAST_Q).sqrt()


_LEAST_Q = 1e-12
"""Gradients of rows with a smaller q are rounding in float32, and stay so."""


def _checked(task: Any) -> BatchedModelOutput:
    if not isinstance(task, BatchedModelOutput) or not isinstance(task, HasLoss):
        raise TypeError(
            f"The task {type(task).__name__} has no loss per sample. Expected a batched task with a method "
            "`per_sample_loss(model_output, batch) -> (B,)`, a loss with `reduction='none'`. Use the task itself "
            "instead of 'loss', or write a subclass with that method."
        )
    return task
