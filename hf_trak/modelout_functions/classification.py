"""Image and text classification: f = logit_y − logsumexp(other logits), q = 1 − p_y (TRAK paper, Section 3.3)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side, call_model
from hf_trak.modelout_functions.batches import as_sequence, check_labels, logits_of, split_batch
from hf_trak.modelout_functions.margins import error_probability, log_likelihood, margin


class ClassificationModelOutput(BatchedModelOutput):
    """Any model that maps inputs to logits over classes. Base class of the tasks below."""

    def __init__(self, temperature: float = 1.0) -> None:
        """
        Args:
            temperature: T in q = 1 − softmax(logits / T)_y. f does not depend on it.

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
        """The cross-entropy loss of every sample, differentiable, shape `(B,)`."""
        labels = split_batch(batch)[2]
        return -log_likelihood(logits_of(model_output, labels), labels)


class ImageClassificationModelOutput(ClassificationModelOutput):
    """`image_classification`: batches are `(images, labels)`, or mappings with `pixel_values` and `labels`."""

    @staticmethod
    def get_output(  # type: ignore[override]  # the seeds name the tensors of a sample
        model: torch.nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        image: Tensor,
        label: Tensor,
    ) -> Tensor:
        """The margin of one sample.

        Args:
            model: maps images to logits.
            weights, buffers: replace the model's own for this call; `None` uses its own.
            image: `(C, H, W)`, without batch dimension.
            label: scalar.

        Returns:
            a scalar tensor.
        """
        label = label.unsqueeze(0)
        logits = logits_of(call_model(model, weights, buffers, (image.unsqueeze(0),), {}), label)
        return margin(logits, label).squeeze(0)


class IterativeImageClassificationModelOutput(ClassificationModelOutput):
    """`iterative_image_classification`: the same task, whose `get_output` takes a batch and the model as it is."""

    @staticmethod
    def get_output(  # type: ignore[override]  # the seeds name the tensors of a batch
        model: torch.nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        images: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """The margins of a batch.

        Args:
            model: maps images to logits; used with its own weights.
            weights, buffers: not used, present for the common signature.
            images: `(B, C, H, W)`.
            labels: `(B,)`.

        Returns:
            `(B,)`, differentiable with respect to the parameters of `model`.

        Raises:
            ValueError: a label is not a class of the model.
        """
        logits = logits_of(model(images), labels)
        check_labels(labels, logits.shape[1])
        return margin(logits, labels)


class TextClassificationModelOutput(ClassificationModelOutput):
    """`text_classification`: batches are `(input_ids, token_type_ids, attention_mask, labels)`, or mappings of what
    the tokenizer returned plus `labels`."""

    @staticmethod
    def get_output(  # type: ignore[override]  # the seeds name the tensors of a sample
        model: torch.nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        input_id: Tensor,
        token_type_id: Tensor,
        attention_mask: Tensor,
        label: Tensor,
    ) -> Tensor:
        """The margin of one sample.

        Args:
            model: takes `input_ids`, `token_type_ids` and `attention_mask` by name.
            weights, buffers: replace the model's own for this call; `None` uses its own.
            input_id, token_type_id, attention_mask: `(sequence length,)`, without batch dimension.
            label: scalar.

        Returns:
            a scalar tensor.
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
