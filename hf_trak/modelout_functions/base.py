"""The contract between a task, a model and a batch: `AbstractModelOutput` and `BatchedModelOutput`.

A *task* defines, for a sample z and weights θ, the scalar model output f(z; θ) whose change is attributed, and the
output-to-loss gradient q(z) = −∂L/∂f at z (TRAK paper, arXiv 2303.14186, Sections 2 and 3), with the
sign by which a positive score marks a helpful training example.

Two forms of the same thing:

* the *functional* form of the `trak` API, `get_output(model, weights, buffers, *sample)`, one sample at a time, which
  `torch.func` can differentiate and vectorize;
* the *batched* form, three small methods around one ordinary forward pass. It is all that the gradient computers need,
  and the functional form follows from it.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Weights or buffers by name."""

Batch = Mapping[str, Any] | Sequence[Tensor]

"""A Hugging Face batch (names to tensors), or a plain sequence of tensors as in the `trak` API; the batch dimension
comes first in both."""


Collator = Callable[[list[Any]], Any]
"""A function that makes a batch of rows."""


class WrappingCollator:
    """A data collator around another one, which finds its own attributes, and those of the one inside (`collator`)."""

    def __init__(self, collator: Collator) -> None:
        """
        Args:
            collator: the inner collator.
        """
        self.collator = collator

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch."""
        return self.collator(rows)


STACKED = "stacked"

"""Key of a batch under which it lists the tensors that have a dimension of rows for hf_trak alone: the model takes the
images of all rows along one dimension."""


Side = Literal["train", "target"]

"""The role of a sample: a training example (a row of X) or a target (a row of t). `loss`, and `regression` with
`target="fit"`, have another f for targets."""


Choice = TypeVar("Choice", bound=str)


def checked_choice(value: Choice, name: str, choices: Any) -> Choice:
    """Return an argument that is one of some words.

    Args:
        value (`str`):
            The argument.
        name (`str`):
            Its name, for the error message.
        choices (`Any`):
            The `Literal` of these words.

    Raises:
        ValueError: it is another word.
    """
    if value not in get_args(choices):
        raise ValueError(f"`{name}` is {value!r}. Expected one of {list(get_args(choices))}.")
    return value


class AbstractModelOutput(ABC):
    """A task in the functional form of the `trak` API.

    For a task of your own, subclass [`BatchedModelOutput`] rather than this class.
    """

    @abstractmethod
    def get_output(self, model: torch.nn.Module, weights: Tensors, buffers: Tensors, *sample: Tensor) -> Tensor:
        """Compute f(z; θ) of one sample.

        Args:
            model (`torch.nn.Module`):
                The model.
            weights (`Mapping[str, torch.Tensor]`):
                Parameters by name, which replace the model's own for this call.
            buffers (`Mapping[str, torch.Tensor]`):
                Buffers by name, which replace the model's own for this call.
            sample (`torch.Tensor`):
                The tensors of the sample, without batch dimension.

        Returns:
            `torch.Tensor`: a scalar.
        """

    @abstractmethod
    def get_out_to_loss_grad(self, model: torch.nn.Module, weights: Tensors, buffers: Tensors, batch: Any) -> Tensor:
        """Compute q of every sample of a batch.

        Args:
            model (`torch.nn.Module`):
                The model.
            weights (`Mapping[str, torch.Tensor]`):
                Parameters by name, which replace the model's own for this call.
            buffers (`Mapping[str, torch.Tensor]`):
                Buffers by name, which replace the model's own for this call.
            batch (`Batch`):
                The batch.

        Returns:
            `torch.Tensor` of shape `(B,)`.
        """

    batch_columns: Sequence[str] = ()
    """Dataset columns that the task reads although no model takes them, kept beside those that `Trainer` keeps."""

    def collator(self, collator: Collator) -> Collator:
        """Wrap a data collator so that it also carries [`batch_columns`] into the batch."""
        return collator

    def bind(self, model: torch.nn.Module) -> None:  # noqa: B027  # most tasks have nothing to do here
        """Learn which model the next batches go through. Called whenever a checkpoint has been loaded into it."""

    def use_seed(self, seed: int) -> None:  # noqa: B027
        """Take the seed of the run for the task's random draws, unless the task was given a seed of its own."""

    def reference_rows(self, train_size: int) -> Sequence[int]:
        """List the train rows that [`~AbstractModelOutput.prepare`] needs, ascending; none by default."""
        return ()

    def prepare(self, model: torch.nn.Module, loader: Iterable[Any]) -> None:  # noqa: B027
        """Compute what the task has to know about a checkpoint before its first batch (CLIP: simulated negatives).

        Args:
            model (`torch.nn.Module`):
                The model, with the checkpoint's weights loaded.
            loader (`Iterable`):
                Batches of the rows that [`~AbstractModelOutput.reference_rows`] lists, in that order.
        """

    def references(self) -> dict[str, Tensor]:
        """Return what [`~AbstractModelOutput.prepare`] computed, as tensors to keep with a checkpoint's features."""
        return {}

    def restore(self, model: torch.nn.Module, references: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take what [`~AbstractModelOutput.references`] returned earlier for the same weights, to save computing it.

        Raises:
            ValueError: the tensors are not those that this task keeps.
        """


class BatchedModelOutput(AbstractModelOutput):
    """A task defined by one batched forward pass: `model(*args, **kwargs)` → f `(B,)` and q `(B,)`.

    No method may mix samples: element i of every result depends on sample i alone. `output` may run under `torch.func`
    transforms, under which values cannot be inspected; `out_to_loss_grad` never does, so it is the one that checks
    labels. An engine calls it before any gradient of the batch leaves it for the store, and `output` may come before
    it: that has to return some number for a label that is no class, too.
    """

    row_by_row: bool = False
    """Whether every row has to go through the model alone, as a batch of several rows may have shown."""

    def terms(self, batch: Batch) -> Tensor | None:
        """Return the size of the numbers whose difference f is, for the rounding of an f near 0.

        Args:
            batch (`Batch`):
                The batch, with labels.

        Returns:
            `torch.Tensor` of shape `(B,)`, or `None` for any other f.
        """
        return None

    @abstractmethod
    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments that the model is called with for a batch.

        Args:
            batch (`Batch`):
                The batch, with labels and the task's own columns.
        """

    @abstractmethod
    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        """Compute f of every sample from the model's return value.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch, with labels.
            side (`Side`, *optional*, defaults to `"train"`):
                Whether the samples are training examples or targets.

        Returns:
            `torch.Tensor` of shape `(B,)`: differentiable.
        """

    @abstractmethod
    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        """Compute q of every sample from the model's return value, and check the labels of the batch.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch, with labels.
            side (`Side`, *optional*, defaults to `"train"`):
                Whether the samples are training examples or targets.

        Returns:
            `torch.Tensor` of shape `(B,)`: detached.

        Raises:
            ValueError: the batch cannot be attributed under this task (for example, a label that is not a class).
        """

    def get_output(self, model: torch.nn.Module, weights: Tensors, buffers: Tensors, *sample: Tensor) -> Tensor:
        batch = tuple(tensor.unsqueeze(0) for tensor in sample)
        return self.output(call_model(model, weights, buffers, *self.model_inputs(batch)), batch).squeeze(0)

    def get_out_to_loss_grad(self, model: torch.nn.Module, weights: Tensors, buffers: Tensors, batch: Any) -> Tensor:
        with torch.no_grad():
            return self.out_to_loss_grad(call_model(model, weights, buffers, *self.model_inputs(batch)), batch)


class WrappingModelOutput(BatchedModelOutput):
    """Base class of tasks around another one, which has the model, the batches, and what is kept of a checkpoint."""

    _task: BatchedModelOutput
    """The task inside."""

    @property
    def batch_columns(self) -> Any:  # type: ignore[override]  # those of the task inside
        """Name the columns of the inner task, see [`AbstractModelOutput`]."""
        return self._task.batch_columns

    @property
    def row_by_row(self) -> bool:  # type: ignore[override]
        """Tell whether the inner task takes rows alone, see [`BatchedModelOutput`]."""
        return self._task.row_by_row

    def collator(self, collator: Collator) -> Collator:
        return self._task.collator(collator)

    def bind(self, model: torch.nn.Module) -> None:
        self._task.bind(model)

    def use_seed(self, seed: int) -> None:
        self._task.use_seed(seed)

    def reference_rows(self, train_size: int) -> Sequence[int]:
        return self._task.reference_rows(train_size)

    def prepare(self, model: torch.nn.Module, loader: Iterable[Any]) -> None:
        self._task.prepare(model, loader)

    def references(self) -> dict[str, Tensor]:
        return self._task.references()

    def restore(self, model: torch.nn.Module, references: Mapping[str, Tensor]) -> None:
        self._task.restore(model, references)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._task.model_inputs(batch)


def joined(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch as its collator made it: entries that are named in `batch["stacked"]` lose the dimension of rows.

    Args:
        batch (`Mapping[str, Any]`):
            The batch, see [`STACKED`].
    """
    given = dict(batch)
    return given | {name: given[name].flatten(0, 1) for name in given.pop(STACKED, ())}


def call_model(
    model: torch.nn.Module,
    weights: Tensors | None,
    buffers: Tensors | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `model(*args, **kwargs)` with the given weights and buffers, or with its own where `weights` is `None`.

    Arguments that are named in `kwargs["stacked"]`, see [`STACKED`], lose their dimension of rows.
    """
    kwargs = joined(kwargs)
    torch.clear_autocast_cache()  # which may hold other weights, where somebody's autocast region is open
    if weights is None:
        return model(*args, **kwargs)
    return torch.func.functional_call(model, (dict(weights), dict(buffers or {})), args, kwargs)


class FieldBatch(dict[str, Any]):
    """The fields of a dataclass as a batch: a mapping, whose entries are attributes too, as they were before."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"The batch has the entries {list(self)}, and no {name!r}. Expected one of them. Add it to the "
                "dataclass that the data collator makes."
            ) from None


def as_batch(batch: Any) -> Any:
    """Return the fields of a dataclass as a mapping, without those that are `None`, and any other batch as it is.

    Args:
        batch (`Any`):
            What a data collator made.
    """
    if isinstance(batch, dict) or not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return batch  # the outputs of transformers are dictionaries and dataclasses at once
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return FieldBatch({name: value for name, value in values.items() if value is not None})
