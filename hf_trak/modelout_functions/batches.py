"""Inputs and labels of classification batches, and logits in model outputs."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_trak._compat import class_if_imported
from hf_trak.modelout_functions.base import Batch
from hf_trak.weights.adapters import without_wrappers

LABEL_NAMES = ("labels", "label")

"""Names under which a mapping batch may hold its labels. Labels are never passed to the model, which would compute its
own loss from them, a mean over the batch."""


def inputs_of(batch: Batch, left_out: Collection[str] = LABEL_NAMES) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's arguments for a batch: all entries but some, or all items of a sequence but the labels.

    Args:
        batch: the batch.
        left_out: names of the entries that the model is not given.

    Raises:
        TypeError: the batch is neither a mapping nor a sequence.
        ValueError: it is a sequence of fewer than two items.
    """
    if isinstance(batch, Mapping):
        return (), {name: value for name, value in batch.items() if name not in left_out}
    items = as_sequence(batch, "(input, …, labels)")
    if len(items) < 2:
        raise ValueError(
            f"The batch is a sequence of {len(items)} tensor(s). Expected at least two, (input, …, labels): labels "
            "last. For batches without labels give `FunctionModelOutput` a `model_inputs_fn`."
        )
    return tuple(items[:-1]), {}


def only_labels(batch: Batch, expected: str) -> Any:
    """Return the labels of a batch: its one entry `labels` or `label`, or the last item of a sequence.

    Args:
        batch: the batch.
        expected: what they have to be, for the error message.

    Raises:
        TypeError: the batch is neither a mapping nor a sequence.
        ValueError: there is no such entry, or there are both.
    """
    if not isinstance(batch, Mapping):
        return as_sequence(batch, "(input, …, labels)")[-1]
    found = [name for name in LABEL_NAMES if batch.get(name) is not None]
    if len(found) != 1:
        remedy = "Remove the other one in the data collator."
        if not found:
            remedy = (
                "Rename the column that has them, since columns of other names reach no batch, pass "
                "`attributor.predict(rows)` to ask about the model's own predictions, or add the labels as class "
                "numbers (`model.config.label2id` has those of names, which data collators drop)."
            )
        raise ValueError(
            f"The batch has the keys {list(batch)}, of which {found or 'none'} hold labels. Expected exactly one of "
            f"{list(LABEL_NAMES)}, {expected}. {remedy}"
        )
    return batch[found[0]]


def size_of(batch: Batch) -> int | None:
    """Count the rows of a batch, which its first tensor has along its first dimension; `None` if there is none."""
    items = batch.values() if isinstance(batch, Mapping) else batch
    return next((item.shape[0] for item in items if isinstance(item, Tensor) and item.ndim > 0), None)


def mapping_of(batch: Any, expected: str) -> Mapping[str, Any]:
    """Return the batch if it is a mapping.

    Args:
        batch: any batch.
        expected: what the mapping holds, and what to do, for the error message.

    Raises:
        TypeError: the batch is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"The batch is a {type(batch).__name__}. Expected a mapping {expected}")
    return batch


def as_sequence(batch: Any, expected: str) -> Sequence[Any]:
    """Return the batch if it is a sequence.

    Args:
        batch: any batch that is not a mapping.
        expected: what a batch of this task looks like, for the error message.

    Raises:
        TypeError: the batch is not a sequence.
    """
    if isinstance(batch, Tensor) or not isinstance(batch, Sequence):
        raise TypeError(
            f"The batch is a {type(batch).__name__}. Expected a mapping of names to tensors, or {expected}."
        )
    return batch


def class_labels(batch: Batch) -> Tensor:
    """Return the labels of a classification batch, `(B,)`, integers.

    Args:
        batch: a mapping with an entry `labels` or `label`, or a sequence `(input, …, labels)`.

    Raises:
        TypeError: the batch or the labels are of another type.
        ValueError: labels are missing, ambiguous, not integers, or not one per sample.
    """
    labels = only_labels(batch, "integers of shape (B,)")
    if not isinstance(labels, Tensor):
        raise TypeError(f"The labels are a {type(labels).__name__}. Expected a tensor of integers of shape (B,).")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"The labels have dtype {labels.dtype}. Expected integer class indices. For regression, soft or multi-hot "
            "labels, pass a task of your own (`FunctionModelOutput`)."
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.ndim != 1:
        raise ValueError(
            f"The labels have shape {tuple(labels.shape)}. Expected (B,), one class index per sample. For one-hot "
            "labels pass `labels.argmax(-1)`; for labels per token pass a task of your own (`FunctionModelOutput`)."
        )
    return labels


def logits_of(model_output: Any, labels: Tensor) -> Tensor:
    """Find the classification logits `(B, C)` in a model's return value, see [`find_logits`].

    Args:
        model_output: what the model returned.
        labels: the labels of the batch, `(B,)`.

    Raises:
        TypeError: no logits are found.
        ValueError: no logits are found, their shape is not `(B, C)`, or C < 2.
    """
    logits = find_logits(model_output)
    if logits.ndim != 2 or logits.shape[0] != labels.shape[0]:
        raise ValueError(
            f"The model returned logits of shape {tuple(logits.shape)} for {labels.shape[0]} label(s). Expected "
            f"({labels.shape[0]}, number of classes). For other outputs, pass a task of your own "
            "(`FunctionModelOutput`)."
        )
    if logits.shape[1] < 2:
        raise ValueError(
            "The model returned logits of one class, for which no margin is defined. Expected two or more classes. "
            "For regression or a single binary logit, pass a task of your own (`FunctionModelOutput`)."
        )
    return logits


def find_logits(model_output: Any, remedy: str = "Pass a task of your own (`FunctionModelOutput`).") -> Tensor:
    """Find the logits of any shape in a model's return value.

    They are the value itself if that is a tensor, the entry or attribute `logits` of a mapping or object, or the first
    tensor of two or more dimensions of a tuple (the loss, if the tuple has one, is a scalar).

    Args:
        model_output: what the model returned.
        remedy: what to do without logits, for the error message.

    Raises:
        TypeError: the value is none of these.
        ValueError: the value is a mapping without `logits`.
    """
    if isinstance(model_output, Tensor):
        return model_output
    if isinstance(found := entry_of(model_output, "logits"), Tensor):
        return found
    if isinstance(model_output, Mapping):
        raise ValueError(
            f"The model returned a mapping with the keys {list(model_output)}. Expected a tensor `logits`. {remedy}"
        )
    if isinstance(model_output, tuple | list):
        for item in model_output:
            if isinstance(item, Tensor) and item.ndim >= 2:
                return item
    raise TypeError(
        f"No logits found in what the model returned (a {type(model_output).__name__}). Expected a tensor, an object "
        f"with `.logits`, or a tuple with the logits first. {remedy}"
    )


def entry_of(model_output: Any, name: str) -> Any:
    """Return an entry or attribute of what a model returned, or `None` if it has none of that name."""
    return model_output.get(name) if isinstance(model_output, Mapping) else getattr(model_output, name, None)


def looked_at(tensor: Tensor) -> Tensor:
    """Unwrap a tensor whose first dimension is the batch, so that its values can be inspected.

    Under `torch.func.vmap` the result holds all vectorized samples.
    """
    plain = torch.func.debug_unwrap(tensor, recurse=True)
    return plain.flatten(0, 1) if plain.ndim > tensor.ndim else plain


def first_marked(marks: Tensor) -> list[int] | None:
    """Return the place of the first true entry of a tensor whose first dimension is the batch, or `None`.

    Under `torch.func.vmap`, this looks at all vectorized samples.
    """
    places = looked_at(marks).nonzero()
    return places[0].tolist() if len(places) else None


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Check that every label is a class. Under `torch.func.vmap`, this covers all vectorized samples.

    Args:
        labels: integers `(B,)`.
        num_classes: number of classes of the model.

    Raises:
        ValueError: a label is not a class; names the sample, the label and the number of classes.
    """
    outside = torch.func.debug_unwrap((labels < 0) | (labels >= num_classes), recurse=True).flatten()
    if bool(outside.any()):
        index = int(outside.nonzero()[0])
        label = int(torch.func.debug_unwrap(labels, recurse=True).flatten()[index])
        raise ValueError(
            f"Sample {index} of {outside.numel()} has the label {label}, but the model has {num_classes} classes. "
            f"Expected a label in 0 … {num_classes - 1}. Map the labels to the model's classes, or drop the sample "
            "(-100, `ignore_index`, marks what has no label, and cannot be attributed)."
        )


def unwrapped(model: torch.nn.Module) -> tuple[Any, Any]:
    """Take off the wrappers of `accelerate`, `torch.compile` and data parallelism, and then PEFT's.

    Returns:
        The model without the former, which may be one of PEFT's, and the model inside of that.
    """
    outer: Any = without_wrappers(model)
    return outer, outer.get_base_model() if hasattr(outer, "get_base_model") else outer


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode without gradients, and restore the mode of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def takes_positions(model: torch.nn.Module) -> bool:
    """Tell whether a model takes `position_ids` counted from 0 over the real tokens, as it would number them itself.

    Models that number positions in a way of their own do not (RoBERTa from the input ids, Qwen-VL in three
    dimensions), and neither does PEFT's prompt learning, which refuses position ids.
    """
    outer, inner = unwrapped(model)
    if getattr(getattr(outer, "active_peft_config", None), "is_prompt_learning", False):
        return False
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return False
    mixin = class_if_imported("transformers.generation.utils", "GenerationMixin")
    if mixin is not None and isinstance(inner, mixin):
        own = type(inner)._prepare_position_ids_for_generation
        if own is not mixin._prepare_position_ids_for_generation:
            return False
    return not any(hasattr(module, "create_position_ids_from_input_ids") for module in inner.modules())


def with_positions(inputs: dict[str, Any]) -> dict[str, Any]:
    """Add `position_ids` `(B, T)`, counted over what `attention_mask` `(B, T)` leaves, unless there are some."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or inputs.get("position_ids") is not None:
        return inputs
    return {**inputs, "position_ids": ((mask != 0).long().cumsum(dim=1) - 1).clamp(min=0)}
