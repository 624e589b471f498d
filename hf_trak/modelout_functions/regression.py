"""Regression: the prediction itself is the model output.

    f = ŷ,    L = ½ (ŷ − y)²,    q = −∂L/∂f = y − ŷ

For the square loss ∂²L/∂f² = 1, so XᵀX is exactly the Gauss-Newton matrix of the training loss, and TRAK's one step is
that of a linear regression (TRAK paper, arXiv 2303.14186, Section 3.1). q has a sign: it says which way the
example pulls. A positive score marks an example that pulled the target's prediction *up*; ask for `target="fit"`
to have positive scores mark those that brought it closer to its label.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.batches import LABEL_NAMES, as_sequence, find_logits, looked_at
from hf_trak.modelout_functions.draws import Draws

RegressionTarget = Literal["prediction", "fit"]

_REMEDY = (
    "Load the model with `num_labels=1`; for several outputs pass a task of your own, for example minus the loss: "
    "`FunctionModelOutput(lambda out, batch: -(out.logits - batch['labels']).square().sum(-1) / 2)`."
)


class RegressionModelOutput(BatchedModelOutput):
    """The task `regression`: one real number per sample."""

    def __init__(self, target: RegressionTarget = "prediction") -> None:
        """
        Args:
            target (`str`, *optional*, defaults to `"prediction"`):
                f on the target side: `"prediction"` for ŷ, `"fit"` for −½ (ŷ − y)².

        Raises:
            ValueError: `target` is neither of these.
        """
        super().__init__()
        if target not in get_args(RegressionTarget):
            raise ValueError(f"`target` is {target!r}. Expected one of {list(get_args(RegressionTarget))}.")
        self.target = target

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, Mapping):
            return (), {name: value for name, value in batch.items() if name not in LABEL_NAMES}
        return tuple(as_sequence(batch, "(input, …, labels)")[:-1]), {}

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "target" and self.target == "fit":
            return -self.per_sample_loss(model_output, batch)
        return _predictions(model_output)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        predictions = _predictions(model_output).detach()
        residuals = _labels(batch, predictions) - predictions
        bad = looked_at(~residuals.isfinite())
        if bool(bad.any()):
            index = int(bad.nonzero()[0])
            raise ValueError(
                f"The label of sample {index} or its prediction is not finite. Expected finite numbers. Look at that "
                "row for a missing label."
            )
        return residuals

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute ½ (ŷ − y)² of every sample, differentiable, shape `(B,)`."""
        predictions = _predictions(model_output)
        return 0.5 * (predictions - _labels(batch, predictions)).square()

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute ε ŷ of every sample with ε = ±1 drawn at even odds, differentiable, `(B,)`.

        The square loss is −log p of the normal distribution N(ŷ, 1), under which a drawn label y has the gradient
        ∇ log p(y) = (y − ŷ) ∇ŷ. Its second moment is ∇ŷ ∇ŷᵀ, which ±∇ŷ has in every draw, not only on average.
        """
        predictions = _predictions(model_output)
        uniforms = draws.uniforms(torch.ones_like(predictions, dtype=torch.bool).unsqueeze(1)).squeeze(1)
        return torch.where(uniforms < 0.5, -predictions, predictions)


def _predictions(model_output: Any) -> Tensor:
    logits = find_logits(model_output, _REMEDY)
    if logits.ndim == 2 and logits.shape[1] == 1:
        logits = logits.squeeze(1)
    if logits.ndim != 1:
        raise ValueError(
            f"The model returned predictions of the shape {tuple(logits.shape)}. Expected (B,) or (B, 1). {_REMEDY}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _labels(batch: Batch, predictions: Tensor) -> Tensor:
    found = [name for name in LABEL_NAMES if batch.get(name) is not None] if isinstance(batch, Mapping) else [-1]
    if len(found) != 1:
        raise ValueError(
            f"The batch has the keys {list(batch)}, of which {found or 'none'} hold labels. Expected exactly one of "
            f"{list(LABEL_NAMES)}, one number per sample."
        )
    labels: Any = batch[found[0]]  # type: ignore[index]
    if not isinstance(labels, Tensor) or labels.numel() != predictions.numel():
        raise ValueError(
            f"The labels have the shape {tuple(getattr(labels, 'shape', ()))} for {predictions.numel()} sample(s). "
            "Expected (B,), one number per sample."
        )
    return labels.reshape(predictions.shape).to(predictions.dtype)
