"""Image and text classification: f = logit_y − logsumexp(other logits), q = 1 − p_y (TRAK paper, Section 3.3)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side, call_model
from hf_trak.modelout_functions.batches import as_sequence, check_labels, logits_of, split_batch
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.margins import error_probability, log_likelihood, margin


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
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(
                f"`temperature` is {temperature}. Expected a positive finite number; 1.0 is the usual one."
            )
        self.temperature = temperature

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs, _ = split_batch(batch)
        return args, kwargs

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        labels = split_batch(batch)[2]
        return margin(logits_of(model_output, labels), labels)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        labels = split_batch(batch)[2]
        logits = logits_of(model_output, labels).detach()
        check_labels(labels, logits.shape[1])
        return error_probability(logits, labels, self.temperature)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the cross-entropy loss of every sample, differentiable, shape `(B,)`."""
        labels = split_batch(batch)[2]
        return -log_likelihood(logits_of(model_output, labels), labels)

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute log p(ŷ) of every sample for a class ŷ drawn from softmax(logits), differentiable, `(B,)`."""
        labels = split_batch(batch)[2]
        logits = logits_of(model_output, labels).unsqueeze(1)
        return draws.log_likelihoods(logits, torch.ones_like(labels, dtype=torch.bool).unsqueeze(1)).squeeze(1)


class ImageClassificationModelOutput(ClassificationModelOutput):
    """The task `image_classification`: batches are `(images, labels)` or mappings with `pixel_values` and `labels`."""

    @staticmethod
    def get_output(  # type: ignore[override]  # the `trak` API names the tensors of a sample
        model: torch.nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        image: Tensor,
        label: Tensor,
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
        model: torch.nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        images: Tensor,
        labels: Tensor,
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
        kwargs = {
            "input_ids": input_id.unsqueeze(0),
            "token_type_ids": token_type_id.unsqueeze(0),
            "attention_mask": attention_mask.unsqueeze(0),
        }
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
