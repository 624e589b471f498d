"""The task `row_loss`: minus the loss of one row, for models whose own forward computes a loss.

Speech recognition (CTC), segmentation, detection, forecasting, and models of a user have no margin of a label. What
they have is a loss L, which `model(**batch).loss` returns when the batch holds labels. As in the task `loss`, the
train side is f = −L of the row with q = 1, so that a positive score marks a row that lowers the loss of the target;
the target side is the same f.

Models return the mean or the sum over the batch, which does not tell the loss of a row. There are three ways:

* for CTC models and SegFormer the loss of every row is computed here from the logits, as these models do for a batch
  of one row;
* a function of the user, `loss_fn(model_output, batch) -> (B,)`;
* one pass for each row, for any other model. The loss may then depend on data in any way, as that of detection does,
  which matches predicted boxes with given ones.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.batches import as_sequence, entry_of, find_logits, size_of, unwrapped
from hf_trak.modelout_functions.function import OutputFn, one_per_sample

_SEGMENTATION_CLASSES = frozenset({"SegformerForSemanticSegmentation"})


class RowLossModelOutput(BatchedModelOutput):
    """The task `row_loss`: f is minus the loss of the row on both sides, and q ≡ 1."""

    def __init__(self, loss_fn: OutputFn | None = None) -> None:
        """
        Args:
            loss_fn (`Callable`, *optional*):
                `(model_output, batch) -> (B,)`, the loss of every row, differentiable. `None` takes the loss that
                the model returns.

        Raises:
            TypeError: `loss_fn` is not callable.
        """
        super().__init__()
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"`loss_fn` is {loss_fn!r}. Expected a function (model_output, batch) -> tensor (B,).")
        self.loss_fn = loss_fn
        self._of_rows: _CTCLoss | _PixelLoss | None = None
        self._row_by_row = False

    @property
    def row_by_row(self) -> bool:  # type: ignore[override]  # found out by the first batch
        """Tell whether the model has returned one loss for a batch of several rows."""
        return self._row_by_row

    def bind(self, model: torch.nn.Module) -> None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CTC_MAPPING_NAMES  # a second to import

        inner = unwrapped(model)[1]
        names = {cls.__name__ for cls in type(inner).__mro__}
        self._of_rows = None
        if names & {*MODEL_FOR_CTC_MAPPING_NAMES.values()} and hasattr(inner, "_get_feat_extract_output_lengths"):
            self._of_rows = _CTCLoss(inner)
        elif names & _SEGMENTATION_CLASSES and inner.config.num_labels > 1:
            self._of_rows = _PixelLoss(inner)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, Mapping):
            return (), dict(batch.items())
        return tuple(as_sequence(batch, "(input, …)")), {}

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the loss of every row, differentiable.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch, with labels.

        Returns:
            `torch.Tensor` of shape `(B,)`.

        Raises:
            ValueError: the model returned no loss, or one for several rows; `loss_fn` returned another shape.
        """
        size = size_of(batch) or 1
        if self.loss_fn is not None:
            return one_per_sample(self.loss_fn(model_output, batch), size, "`loss_fn`")
        loss = _loss_in(model_output, batch)
        if loss.ndim == 1 and loss.shape[0] == size:
            return loss
        if self._of_rows is not None and size > 1:
            return self._of_rows(model_output, batch)
        if loss.numel() != 1 or size > 1:
            self._row_by_row = loss.numel() == 1
            raise ValueError(
                f"The model returned a loss of shape {tuple(loss.shape)} for a batch of {size} rows. Expected one "
                'number per row, whose mean is the loss of a batch. Set `engine="auto"`, or pass '
                "`task=RowLossModelOutput(loss_fn)` with `loss_fn(model_output, batch) -> (B,)`."
            )
        return loss.reshape(1)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return -self.per_sample_loss(model_output, batch)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            return torch.ones_like(self.per_sample_loss(model_output, batch))


def _loss_in(model_output: Any, batch: Batch) -> Tensor:
    """Find the loss in what a model returned. Raises `ValueError` if it has none."""
    if isinstance(found := entry_of(model_output, "loss"), Tensor):
        return found
    kind = type(model_output).__name__
    columns = list(batch) if isinstance(batch, Mapping) else [f"{len(batch)} item(s)"]
    raise ValueError(
        f"The model returned a {kind} without a loss for a batch with {columns}. Expected a tensor `loss`, which "
        "models of `transformers` return for batches with labels. Name the label column as the model's `forward` "
        "does, or pass `task=RowLossModelOutput(loss_fn)` with `loss_fn(model_output, batch) -> (B,)`."
    )


class _CTCLoss:
    """The loss of connectionist temporal classification (Graves et al. 2006) of every row, as its model computes it.

    With `ctc_loss_reduction="mean"` the loss of a row is divided by the number of its labels.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.frames_of = model._get_feat_extract_output_lengths

    def __call__(self, model_output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, Mapping)
        logits, labels, blank = find_logits(model_output), batch["labels"], self.config.pad_token_id
        counted = (labels >= 0) & (labels != blank)
        counts = counted.sum(dim=1)
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN's gives no reproducible gradients
            given = (log_probs.transpose(0, 1), labels[counted], self._frames(logits, batch), counts, blank)
            losses = functional.ctc_loss(*given, reduction="none", zero_infinity=self.config.ctc_zero_infinity)
        return losses / counts.clamp(min=1) if self.config.ctc_loss_reduction == "mean" else losses

    def _frames(self, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Count the frames of every row, `(B,)`."""
        if (mask := batch.get("attention_mask")) is None:
            return torch.full((logits.shape[0],), logits.shape[1], device=logits.device)
        frames: Tensor = self.frames_of(mask.sum(dim=-1))
        return frames.to(torch.long)


class _PixelLoss:
    """The mean cross-entropy over the pixels of a row that have a label, the logits enlarged to the image's size."""

    def __init__(self, model: Any) -> None:
        self.ignored = model.config.semantic_loss_ignore_index

    def __call__(self, model_output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, Mapping)
        labels = batch["labels"]
        logits = functional.interpolate(
            find_logits(model_output), size=labels.shape[-2:], mode="bilinear", align_corners=False
        )
        losses = functional.cross_entropy(logits, labels, ignore_index=self.ignored, reduction="none")
        return losses.sum(dim=(1, 2)) / (labels != self.ignored).sum(dim=(1, 2)).clamp(min=1)
