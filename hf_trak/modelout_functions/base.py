"""What is attributed: the contract between a task, a model and a batch.

A *task* defines, for a sample z and weights θ, the scalar model output f(z; θ) whose change is attributed, and the
output-to-loss gradient q(z) = ∂L/∂f at z (TRAK paper, arXiv 2303.14186, Sections 2 and 3), with the sign chosen so
that a positive score marks a helpful training example.

Two forms of the same thing:

* the *functional* form of the seed API, `get_output(model, weights, buffers, *sample)`, one sample at a time, which
  `torch.func` can differentiate and vectorize;
* the *batched* form, three small methods around one ordinary forward pass. It is all that the gradient computers need,
  and the functional form follows from it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Batch = Mapping[str, Any] | Sequence[Tensor]
"""A Hugging Face batch (names to tensors) or the seeds' plain sequence of tensors, in both cases batch dimension
first."""

Side = Literal["train", "target"]
"""Whether a sample is a training example (a row of X) or a target (a row of t). Only the `loss` task distinguishes
them."""


class AbstractModelOutput(ABC):
    """A task in the seeds' functional form. Subclass it, or rather [`BatchedModelOutput`], for a task of your own."""

    @abstractmethod
    def get_output(
        self, model: torch.nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *sample: Tensor
    ) -> Tensor:
        """f(z; θ) of one sample, whose tensors have no batch dimension. Returns a scalar tensor."""

    @abstractmethod
    def get_out_to_loss_grad(
        self, model: torch.nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> Tensor:
        """q of every sample of a batch. Returns a tensor of shape `(B,)`."""

    batch_columns: Sequence[str] = ()
    """Dataset columns that the task reads though no model takes them, kept beside those that `Trainer` keeps."""

    def collator(self, collator: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The data collator to use in place of `collator`: one that also carries [`batch_columns`] into the batch."""
        return collator

    def bind(self, model: torch.nn.Module) -> None:  # noqa: B027  # most tasks have nothing to do here
        """Learn which model the next batches go through. Called whenever a checkpoint has been loaded into it."""

    def use_seed(self, seed: int) -> None:  # noqa: B027
        """Take the seed of the run for what the task draws, unless it was given one of its own."""

    def reference_rows(self, train_size: int) -> Sequence[int]:
        """Rows of the train dataset that [`~AbstractModelOutput.prepare`] needs, ascending; none by default."""
        return ()

    def prepare(self, model: torch.nn.Module, loader: Iterable[Any]) -> None:  # noqa: B027
        """Compute what the task has to know about a checkpoint before its first batch (CLIP: simulated negatives).

        Args:
            model: the model, with the checkpoint's weights loaded.
            loader: batches of the rows that [`~AbstractModelOutput.reference_rows`] names, in that order.
        """

    def references(self) -> dict[str, Tensor]:
        """What [`~AbstractModelOutput.prepare`] computed, as tensors to be kept with the features of a checkpoint."""
        return {}

    def restore(self, model: torch.nn.Module, references: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take what [`~AbstractModelOutput.references`] gave earlier for the same weights, instead of computing it.

        Raises:
            ValueError: they are not what this task keeps.
        """


class BatchedModelOutput(AbstractModelOutput):
    """A task defined by one batched forward pass: `model(*args, **kwargs)` → f `(B,)` and q `(B,)`.

    No method may mix samples: element i of every result depends on sample i alone. `output` may run under `torch.func`
    transforms, where values cannot be looked at; `out_to_loss_grad` never does, and so it is the one that checks them.
    An engine calls it before any gradient of the batch leaves it for the store.
    """

    @abstractmethod
    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments with which the model is called for this batch."""

    @abstractmethod
    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        """f of every sample, differentiable, shape `(B,)`, from what the model returned."""

    @abstractmethod
    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        """q of every sample, detached, shape `(B,)`, from what the model returned.

        Raises:
            ValueError: the batch cannot be attributed under this task (for example, a label that is not a class).
        """

    def get_output(
        self, model: torch.nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *sample: Tensor
    ) -> Tensor:
        batch = tuple(tensor.unsqueeze(0) for tensor in sample)
        return self.output(self._call(model, weights, buffers, batch), batch).squeeze(0)

    def get_out_to_loss_grad(
        self, model: torch.nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> Tensor:
        with torch.no_grad():
            return self.out_to_loss_grad(self._call(model, weights, buffers, batch), batch)

    def _call(
        self,
        model: torch.nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        batch: Batch,
    ) -> Any:
        """The model's output with the given weights, or with its own where `weights` is `None`."""
        args, kwargs = self.model_inputs(batch)
        return call_model(model, weights, buffers, args, kwargs)


def call_model(
    model: torch.nn.Module,
    weights: Mapping[str, Tensor] | None,
    buffers: Mapping[str, Tensor] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`model(*args, **kwargs)` with the given weights and buffers, or with its own where `weights` is `None`."""
    if weights is None:
        return model(*args, **kwargs)
    return torch.func.functional_call(model, (dict(weights), dict(buffers or {})), args, kwargs)
