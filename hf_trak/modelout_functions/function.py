"""`FunctionModelOutput`: a plain function as a task."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.batches import LABEL_NAMES, as_sequence

OutputFn = Callable[[Any, Batch], Tensor]
"""A function `(model_output, batch) -> (B,)`, of whose result element i depends on sample i alone."""


class FunctionModelOutput(BatchedModelOutput):
    """A task made of one function, or two."""

    def __init__(
        self,
        output_fn: OutputFn,
        out_to_loss_fn: OutputFn | None = None,
        model_inputs_fn: Callable[[Batch], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
    ) -> None:
        """
        Args:
            output_fn (`Callable`):
                `(model_output, batch) -> (B,)`, f of every sample, differentiable.
            out_to_loss_fn (`Callable`, *optional*):
                `(model_output, batch) -> (B,)`, q of every sample. `None` takes q ≡ 1: scores then rank by the change
                of f alone.
            model_inputs_fn (`Callable`, *optional*):
                `batch -> (args, kwargs)` with which the model is called. `None` passes a mapping by name without
                `labels` and `label`, and a sequence by position without its last element, the labels.

        Raises:
            TypeError: an argument is not callable.
        """
        super().__init__()
        for name, function in (("output_fn", output_fn), ("out_to_loss_fn", out_to_loss_fn)):
            if not callable(function) and not (function is None and name != "output_fn"):
                raise TypeError(f"`{name}` is {function!r}. Expected a function (model_output, batch) -> tensor (B,).")
        self.output_fn = output_fn
        self.out_to_loss_fn = out_to_loss_fn
        self.model_inputs_fn = model_inputs_fn

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.model_inputs_fn is not None:
            return self.model_inputs_fn(batch)
        if isinstance(batch, Mapping):
            return (), {name: value for name, value in batch.items() if name not in LABEL_NAMES}
        items = as_sequence(batch, "(input, …, labels)")
        if len(items) < 2:
            raise ValueError(
                f"The batch is a sequence of {len(items)} tensor(s). Expected (input, …, labels). For batches without "
                "labels give `FunctionModelOutput` a `model_inputs_fn`."
            )
        return tuple(items[:-1]), {}

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return one_per_sample(self.output_fn(model_output, batch), _size_of(batch), "`output_fn`")

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if self.out_to_loss_fn is None:
            with torch.no_grad():
                return torch.ones_like(self.output(model_output, batch, side))
        return one_per_sample(self.out_to_loss_fn(model_output, batch), _size_of(batch), "`out_to_loss_fn`").detach()


def one_per_sample(values: Any, size: int | None, who: str) -> Tensor:
    """Check that there is one value per sample.

    Args:
        values: what a task, or a user's function, returned.
        size: samples in the batch that it was called with: one, where an engine takes them one at a time. `None` if
            that is not known.
        who: the subject of the error message.

    Returns:
        `torch.Tensor`: `values`.

    Raises:
        ValueError: it has another shape than `(size,)`, or is no tensor.
    """
    if not isinstance(values, Tensor) or values.ndim != 1 or (size is not None and values.shape[0] != size):
        given = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
        samples = "a batch" if size is None else f"a batch of {size} samples"
        single = "one sample (engines may take those of a batch one at a time)"
        raise ValueError(
            f"{who} returned {given[:200]} for {single if size == 1 else samples}. Expected a tensor of shape "
            f"({'B' if size is None else size},), one scalar per sample: of several outputs choose one for each, as "
            "`logits.gather(1, labels[:, None]).squeeze(1)` does, or add them up. Do not take a mean or a sum over "
            "the batch: use `reduction='none'`."
        )
    return values


def _size_of(batch: Batch) -> int | None:
    items = batch.values() if isinstance(batch, Mapping) else batch
    return next((item.shape[0] for item in items if isinstance(item, Tensor) and item.ndim > 0), None)
