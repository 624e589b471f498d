"""`SampledLikelihood`: labels drawn from the model, for the Fisher information.

With ŷ_t drawn from the model's prediction p_t at place t, and f̂ = Σ_t √w_t log p_t(ŷ_t),

    E[∇f̂ ∇f̂ᵀ] = Σ_t w_t E[∇ log p_t(ŷ_t) ∇ log p_t(ŷ_t)ᵀ] = Σ_t w_t F_t,

because the score terms of different places are uncorrelated and have the mean 0. F_t is the Fisher information at t,
so this is the generalized Gauss-Newton matrix of the loss −Σ_t w_t log p_t(y_t) (Martens, arXiv 1412.1193, Section 9).
The roots matter for a mean over tokens: with w_t = 1/T itself, rows would count the less the longer they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side, WrappingModelOutput
from hf_trak.modelout_functions.batches import first_marked, looked_at
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.loss import LossModelOutput

ROW_COLUMN = "trak_row"
"""Name of the column with the row number of every sample, `(B,)`, int64."""


def with_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Add the row numbers to a batch: under the key [`ROW_COLUMN`] of a mapping, as the last item of a sequence.

    Args:
        batch: the batch, with labels.
        rows: row number of every sample.

    Returns:
        A new batch with the tensors of the given one.

    Raises:
        ValueError: the batch has such a column already; there is not one number per sample.
    """
    if isinstance(batch, Mapping) and ROW_COLUMN in batch:
        raise ValueError(
            f"The batch has a column {ROW_COLUMN!r} of its own. Expected that name to be free for the row numbers. "
            "Rename the column of the dataset."
        )
    items: list[Any] = list(batch.values() if isinstance(batch, Mapping) else batch)
    first = next((item for item in items if isinstance(item, Tensor) and item.ndim > 0), None)
    if first is None or first.shape[0] != len(rows):
        size = "no tensor with samples" if first is None else f"{first.shape[0]} sample(s)"
        raise ValueError(f"The batch has {size}, but {len(rows)} row number(s) are given. Expected one per sample.")
    column = torch.tensor(list(rows), dtype=torch.int64, device=first.device)
    return {**dict(batch.items()), ROW_COLUMN: column} if isinstance(batch, Mapping) else (*items, column)


@runtime_checkable
class CanSample(Protocol):
    """A task that can draw the labels of every sample from the model's prediction."""

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Return Σ_t √w_t log p(ŷ_t) of every sample with ŷ drawn by `draws`, differentiable, shape `(B,)`."""


class SampledLikelihood(WrappingModelOutput):
    """The task whose train side is the log-likelihood of labels that are drawn from the model, with q ≡ 1.

    Batches come from [`with_rows`], on both sides. A draw depends on the seed, the row number, the place of the label
    in its row, the prediction, and whether it is the first or the second one, see `draws`. Where two predictions of a
    row differ by rounding, the draws may differ at rare places: compare engines on the given labels, as the inner task
    does, and not on drawn ones.
    """

    def __init__(self, of: BatchedModelOutput, seed: int, second: bool = False) -> None:
        """
        Args:
            of (`BatchedModelOutput`):
                The task whose labels are drawn, with a method `sampled_log_likelihood(model_output, batch, draws) ->
                (B,)`. For the task `loss`, it is the one inside.
            seed (`int`):
                Seed of the draws in [0, 2⁶³).
            second (`bool`, *optional*, defaults to `False`):
                Draw again, independently of the first draws.

        Raises:
            TypeError: the task has no such method.
            ValueError: the seed is outside its range.
        """
        super().__init__()
        Draws(seed, torch.empty(0))  # refuses a seed out of range
        self.of = self._task = of
        self.seed = seed
        self.second = second
        self._sampler = _sampler_of(of)

    def bind(self, model: torch.nn.Module) -> None:
        super().bind(model)
        self._sampler = _sampler_of(self.of)  # the task `loss` may have chosen another one for this model

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return super().model_inputs(_taken_apart(batch)[0])

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        """Compute Σ_t √w_t log p(ŷ_t) of every training example, and the inner task's f of every target.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch of [`with_rows`].
            side (`Side`, *optional*, defaults to `"train"`):
                Whether the samples are training examples or targets.

        Returns:
            `torch.Tensor` of shape `(B,)`: differentiable.
        """
        inner, rows = _taken_apart(batch)
        if side == "target":
            return self.of.output(model_output, inner, side)
        return self._sampler.sampled_log_likelihood(model_output, inner, Draws(self.seed, rows, self.second))

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        inner, rows = _taken_apart(batch)
        if side == "train" and isinstance(self._sampler, AggregatedModelOutput):
            self._sampler.check(model_output, inner)  # its q would cost a second pass over the logits
            _check_weights(self._sampler.label_weights(inner))
        else:
            self.of.out_to_loss_grad(model_output, inner, side)
        return torch.ones_like(rows, dtype=torch.float32)


def _sampler_of(task: AbstractModelOutput) -> CanSample:
    """Return the task that draws: `task` itself, or the one inside of the task `loss`."""
    task = task._task if isinstance(task, LossModelOutput) else task
    if not isinstance(task, BatchedModelOutput) or not isinstance(task, CanSample):
        raise TypeError(
            f"The labels of the task {type(task).__name__} cannot be drawn from the model. Expected a batched task "
            "with a method `sampled_log_likelihood(model_output, batch, draws) -> (B,)`. Use "
            '`curvature.labels="empirical"`, which takes the labels of the data, or give the task that method.'
        )
    return task


def _taken_apart(batch: Batch) -> tuple[Batch, Tensor]:
    """Separate a batch of [`with_rows`] into the batch that it was made of, and the row numbers `(B,)`."""
    if isinstance(batch, Mapping):
        rows = batch.get(ROW_COLUMN)
        inner: Batch = {name: value for name, value in batch.items() if name != ROW_COLUMN}
    else:
        rows, inner = (batch[-1] if batch else None), tuple(batch[:-1])
    if not isinstance(rows, Tensor) or rows.ndim != 1 or rows.dtype != torch.int64:
        what = f"the keys {list(batch)}" if isinstance(batch, Mapping) else f"{len(batch)} item(s)"
        raise ValueError(
            f"The batch has {what}, and no row numbers. Expected a column {ROW_COLUMN!r}, or a last item, of shape "
            "(B,) and dtype int64. Make the batch with `with_rows(batch, rows)`."
        )
    return inner, rows


def _check_weights(weights: Tensor) -> None:
    if negative := first_marked(weights < 0):
        sample, label = negative
        raise ValueError(
            f"Label {label} of sample {sample} has the weight {float(looked_at(weights)[sample, label])} in "
            "`target_weights`. Expected no negative weight of a training example, for which no Fisher information is "
            "defined. Use weights ≥ 0."
        )
