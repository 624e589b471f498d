"""Image and text classification: f = logit_y − logsumexp(other logits), q = 1 − p_y (TRAK paper, Section 3.3)."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hf_trak.modelout_functions.aggregated import TARGET_MASK, TARGET_WEIGHTS, AggregatedModelOutput
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side, Tensors, call_model, checked_choice
from hf_trak.modelout_functions.batches import (
    LABEL_NAMES,
    as_sequence,
    check_labels,
    class_labels,
    find_logits,
    first_marked,
    inputs_of,
    logits_of,
    looked_at,
    only_labels,
)
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.margins import error_probability, log_likelihood, margin
from hf_trak.modelout_functions.tokens import IGNORED
from hf_trak.runtime.checks import checked_positive


class ClassificationModelOutput(BatchedModelOutput):
    """The task of any model that maps inputs to logits over classes. Base class of the tasks below."""

    def __init__(self, temperature: float = 1.0) -> None:
        """
        Args:
            temperature (`float`, *optional*, defaults to 1.0):
                T in q = 1 − softmax(logits / T)_y. f does not depend on it.

        Raises:
            ValueError: the temperature is not a positive finite number.
        """
        super().__init__()
        self.temperature = checked_positive(temperature, "temperature", "The usual one is 1.0.")

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = inputs_of(batch)
        class_labels(batch)  # which are refused before the model is called
        return inputs

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        labels = class_labels(batch)
        return margin(logits_of(model_output, labels), labels)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        labels = class_labels(batch)
        logits = logits_of(model_output, labels).detach()
        check_labels(labels, logits.shape[1])
        return error_probability(logits, labels, self.temperature)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the cross-entropy loss of every sample, differentiable, shape `(B,)`."""
        labels = class_labels(batch)
        return -log_likelihood(logits_of(model_output, labels), labels)

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute log p(ŷ) of every sample for a class ŷ drawn from softmax(logits), differentiable, `(B,)`."""
        labels = class_labels(batch)
        logits = logits_of(model_output, labels).unsqueeze(1)
        return draws.log_likelihoods(logits, torch.ones_like(labels, dtype=torch.bool).unsqueeze(1)).squeeze(1)


class ImageClassificationModelOutput(ClassificationModelOutput):
    """The task `image_classification`: batches are `(images, labels)` or mappings with `pixel_values` and `labels`."""

    @staticmethod
    def get_output(  # type: ignore[override]  # the `trak` API names the tensors of a sample
        model: torch.nn.Module, weights: Tensors | None, buffers: Tensors | None, image: Tensor, label: Tensor
    ) -> Tensor:
        """Compute the margin of one sample.

        Args:
            model (`torch.nn.Module`):
                Maps images to logits.
            weights (`Mapping[str, torch.Tensor]`, *optional*):
                Parameters that replace the model's own for this call.
            buffers (`Mapping[str, torch.Tensor]`, *optional*):
                Buffers that replace the model's own for this call.
            image (`torch.Tensor` of shape `(C, H, W)`):
                The image, without batch dimension.
            label (`torch.Tensor`):
                The class, a scalar.

        Returns:
            `torch.Tensor`: a scalar.
        """
        label = label.unsqueeze(0)
        logits = logits_of(call_model(model, weights, buffers, (image.unsqueeze(0),), {}), label)
        return margin(logits, label).squeeze(0)


class IterativeImageClassificationModelOutput(ClassificationModelOutput):
    """The task `iterative_image_classification`: `image_classification` with a `get_output` that takes a batch."""

    @staticmethod
    def get_output(  # type: ignore[override]  # the `trak` API names the tensors of a batch
        model: torch.nn.Module, weights: Tensors | None, buffers: Tensors | None, images: Tensor, labels: Tensor
    ) -> Tensor:
        """Compute the margins of a batch.

        Args:
            model (`torch.nn.Module`):
                Maps images to logits; used with its own weights.
            weights (`Mapping[str, torch.Tensor]`, *optional*):
                Not used; part of the common signature.
            buffers (`Mapping[str, torch.Tensor]`, *optional*):
                Not used; part of the common signature.
            images (`torch.Tensor` of shape `(B, C, H, W)`):
                The images.
            labels (`torch.Tensor` of shape `(B,)`):
                Their classes.

        Returns:
            `torch.Tensor` of shape `(B,)`: differentiable with respect to the parameters of `model`.

        Raises:
            ValueError: a label is not a class of the model.
        """
        logits = logits_of(model(images), labels)
        check_labels(labels, logits.shape[1])
        return margin(logits, labels)


class TextClassificationModelOutput(ClassificationModelOutput):
    """The task `text_classification`.

    Batches are `(input_ids, token_type_ids, attention_mask, labels)`, or mappings of what the tokenizer returned plus
    `labels`.
    """

    @staticmethod
    def get_output(  # type: ignore[override]  # the `trak` API names the tensors of a sample
        model: torch.nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        input_id: Tensor,
        token_type_id: Tensor,
        attention_mask: Tensor,
        label: Tensor,
    ) -> Tensor:
        """Compute the margin of one sample.

        Args:
            model (`torch.nn.Module`):
                Takes `input_ids`, `token_type_ids` and `attention_mask` by name.
            weights (`Mapping[str, torch.Tensor]`, *optional*):
                Parameters that replace the model's own for this call.
            buffers (`Mapping[str, torch.Tensor]`, *optional*):
                Buffers that replace the model's own for this call.
            input_id (`torch.Tensor` of shape `(sequence length,)`):
                The tokens, without batch dimension.
            token_type_id (`torch.Tensor` of shape `(sequence length,)`):
                Their segments.
            attention_mask (`torch.Tensor` of shape `(sequence length,)`):
                0 on padding.
            label (`torch.Tensor`):
                The class, a scalar.

        Returns:
            `torch.Tensor`: a scalar.
        """
        named = {"input_ids": input_id, "token_type_ids": token_type_id, "attention_mask": attention_mask}
        kwargs = {name: given.unsqueeze(0) for name, given in named.items()}
        label = label.unsqueeze(0)
        return margin(logits_of(call_model(model, weights, buffers, (), kwargs), label), label).squeeze(0)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, Mapping):
            return super().model_inputs(batch)
        items = as_sequence(batch, "(input_ids, token_type_ids, attention_mask, labels)")
        if len(items) != 4:
            raise ValueError(
                f"The batch is a sequence of {len(items)} tensor(s). Expected four, (input_ids, token_type_ids, "
                "attention_mask, labels). For a model with other inputs, pass a mapping of names to tensors."
            )
        return (), dict(zip(("input_ids", "token_type_ids", "attention_mask"), items[:3], strict=True))


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
        return inputs_of(batch, (*LABEL_NAMES, TARGET_MASK, TARGET_WEIGHTS))

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
        if strange := first_marked((labels != 0) & (labels != 1) & (labels != IGNORED)):
            sample, name = strange
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
    labels = only_labels(batch, "of shape (B, classes)")
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        raise ValueError(
            f"The labels have the shape {tuple(getattr(labels, 'shape', ()))}. Expected (B, classes), one 0 or 1 per "
            "class. For one class per sample use the task 'text_classification' or 'image_classification'."
        )
    return labels


RegressionTarget = Literal["prediction", "fit"]


_REGRESSION_REMEDY = (
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
        self.target = checked_choice(target, "target", RegressionTarget)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs_of(batch)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "target" and self.target == "fit":
            return -self.per_sample_loss(model_output, batch)
        return _predictions(model_output)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        predictions = _predictions(model_output).detach()
        residuals = _regression_labels(batch, predictions) - predictions
        if bad := first_marked(~residuals.isfinite()):
            raise ValueError(
                f"The label of sample {bad[0]} or its prediction is not finite. Expected finite numbers. Look at that "
                "row for a missing label."
            )
        return residuals

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute ½ (ŷ − y)² of every sample, differentiable, shape `(B,)`."""
        predictions = _predictions(model_output)
        return 0.5 * (predictions - _regression_labels(batch, predictions)).square()

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute ε ŷ of every sample with ε = ±1 drawn at even odds, differentiable, `(B,)`.

        The square loss is −log p of the normal distribution N(ŷ, 1), under which a drawn label y has the gradient
        ∇ log p(y) = (y − ŷ) ∇ŷ. Its second moment is ∇ŷ ∇ŷᵀ, which ±∇ŷ has in every draw, not only on average.
        """
        predictions = _predictions(model_output)
        uniforms = draws.uniforms(torch.ones_like(predictions, dtype=torch.bool).unsqueeze(1)).squeeze(1)
        return torch.where(uniforms < 0.5, -predictions, predictions)


def _predictions(model_output: Any) -> Tensor:
    logits = find_logits(model_output, _REGRESSION_REMEDY)
    if logits.ndim == 2 and logits.shape[1] == 1:
        logits = logits.squeeze(1)
    if logits.ndim != 1:
        raise ValueError(
            f"The model returned predictions of the shape {tuple(logits.shape)}. Expected (B,) or (B, 1). "
            f"{_REGRESSION_REMEDY}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _regression_labels(batch: Batch, predictions: Tensor) -> Tensor:
    labels = only_labels(batch, "one number per sample")
    if not isinstance(labels, Tensor) or labels.numel() != predictions.numel():
        raise ValueError(
            f"The labels have the shape {tuple(getattr(labels, 'shape', ()))} for {predictions.numel()} sample(s). "
            "Expected (B,), one number per sample."
        )
    return labels.reshape(predictions.shape).to(predictions.dtype)
