"""The contract of a gradient computer: a model, a task and a batch in; blocks of per-sample gradients out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from hf_trak.gradient_computers.environment import gradients_set_aside, pass_settings
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions import function
from hf_trak.modelout_functions.base import (
    AbstractModelOutput,
    Batch,
    BatchedModelOutput,
    FieldBatch,
    Side,
    Tensors,
    as_batch,
    call_model,
)

GradientSink = Callable[[int, Tensor], None]

"""Receives `(start, block)`: `block` of shape `(B, n)` holds columns `start … start + n` of the per-sample gradients,
in the order of [`ParameterLayout`]. Blocks come in any order, and a sink adds up columns that come twice (shared
parameters). The producer may reuse or free the block as soon as the sink returns."""


@dataclass(frozen=True)
class BatchOutputs:
    """Results of one pass over a batch besides the gradients, both detached.

    Attributes:
        output (`torch.Tensor`): f of every sample, `(B,)`.
        out_to_loss (`torch.Tensor`): q of every sample, `(B,)`.
    """

    output: Tensor
    out_to_loss: Tensor


class AbstractGradientComputer(ABC):
    """Per-sample gradients of a task's model output function, as in the `trak` API.

    Subclasses implement the abstract methods of the `trak` API. Those that can produce gradients piece by piece also
    override [`~AbstractGradientComputer.stream`], so that nothing of size B × P is ever held.

    Attributes:
        model (`torch.nn.Module`): the model.
        modelout_fn ([`AbstractModelOutput`]): the task.
        layout ([`ParameterLayout`]): the attributed parameters and their places in the gradient vector.
        grad_dim (`int`): P, the number of attributed parameters.
        grad_wrt (`list[str]`, *optional*): their names as given.
        dtype (`torch.dtype`, *optional*): dtype of the gradients.
        device (`torch.device` or `str`, *optional*): device of the gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = torch.float16,
        device: torch.device | str | None = "cuda",
        grad_wrt: Iterable[str] | None = None,
    ) -> None:
        """
        Args:
            model (`torch.nn.Module`):
                The model whose parameters are differentiated.
            task ([`AbstractModelOutput`]):
                The model output function.
            grad_dim (`int`, *optional*):
                P, the number of attributed parameters. `None` counts them.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float16`):
                Dtype in which gradients are returned. `None` keeps that of the parameters.
            device (`torch.device` or `str`, *optional*, defaults to `"cuda"`):
                Device of the returned gradients, not touched before the first batch. `None` keeps that of the
                parameters.
            grad_wrt (`Iterable[str]`, *optional*):
                Names of the parameters to attribute, see [`ParameterLayout.from_model`]. `None` takes those with
                `requires_grad`.

        Raises:
            ValueError: `grad_dim` is not the number of attributed parameters, or `grad_wrt` does not fit the model.
        """
        self.model = model
        self.modelout_fn = task
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.layout = ParameterLayout.from_model(model, self.grad_wrt)
        if grad_dim is not None and grad_dim != self.layout.total:
            raise ValueError(
                f"`grad_dim` is {grad_dim}, but the attributed parameters have {self.layout.total} elements. "
                "Pass `None` to have them counted."
            )
        self.grad_dim = self.layout.total
        self.dtype = dtype
        self.device = device

    def load_model_params(self, model: torch.nn.Module) -> None:
        """Take over the weights and buffers of `model` (after a checkpoint has been loaded into it)."""
        self.model = model

    @abstractmethod
    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor] | Tensor:
        """Compute the gradients of f for every sample of a batch.

        Args:
            batch (`Mapping[str, torch.Tensor]` or `Sequence[torch.Tensor]`): B samples.

        Returns:
            `torch.Tensor` or `dict[str, torch.Tensor]`: `(B, P)`, or `(B, *shape)` by parameter name.
        """

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Compute the output-to-loss gradient q of every sample of a batch.

        Args:
            batch (`Mapping[str, torch.Tensor]` or `Sequence[torch.Tensor]`): B samples.

        Returns:
            `torch.Tensor`: `(B,)`.
        """
        weights, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        with pass_settings(self.model), torch.no_grad():
            return self.modelout_fn.get_out_to_loss_grad(self.model, weights, buffers, batch)

    def stream(self, batch: Batch, sink: GradientSink, side: Side = "train") -> BatchOutputs:
        """Push the per-sample gradients of a batch into `sink`, block by block.

        Args:
            batch (`Mapping[str, torch.Tensor]` or `Sequence[torch.Tensor]`):
                B samples.
            sink (`Callable[[int, torch.Tensor], None]`):
                Called with `(start, (B, n))` blocks, see [`GradientSink`].
            side (`"train"` or `"target"`, *optional*, defaults to `"train"`):
                Whether the samples are training examples or targets. The `loss` task takes gradients of L for the
                former, of f for the latter.

        Returns:
            [`BatchOutputs`]: f and q of the batch.

        Raises:
            NotImplementedError: the gradient computer has no streaming form.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not stream. Implement `stream`, or use the built-in gradient computers."
        )


def batch_size_of(batch: Any) -> int:
    """Return B, the leading dimension of the first tensor of a batch.

    Args:
        batch (`Mapping[str, Any]` or `Sequence[Any]`): the batch.

    Returns:
        `int`: the number of samples.

    Raises:
        ValueError: the batch holds no tensor with a batch dimension.
    """
    values = batch.values() if hasattr(batch, "values") else batch
    for value in values:
        if isinstance(value, Tensor) and value.ndim > 0:
            return value.shape[0]
    raise ValueError(
        f"The batch (a {type(batch).__name__}) holds no tensor with a batch dimension. Expected a mapping of names to "
        "tensors, or a sequence of tensors, batch dimension first."
    )


@dataclass(frozen=True)
class SplitBatch:
    """A batch taken apart. Keys are the names of a mapping or the positions of a sequence.

    Attributes:
        size: B.
        mapped: the tensors whose leading dimension is B.
        constant: everything else (flags, constants, tables).
        listed: those of `constant` that are lists of B mappings or tensors, such as the boxes of every image.
        keys: all keys, in order.
        is_mapping: whether the batch is a mapping.
        kind: `dict`, `tuple`, or the class of a namedtuple or of a dataclass' fields, whose attributes tasks may read.
    """

    size: int
    mapped: dict[Any, Tensor]
    constant: dict[Any, Any]
    keys: tuple[Any, ...]
    is_mapping: bool
    listed: dict[Any, Sequence[Any]]
    kind: type[Any] = dict

    @classmethod
    def of(cls, batch: Batch) -> "SplitBatch":
        """Take a batch apart.

        Raises:
            ValueError: no tensor has a batch dimension.
        """
        batch = as_batch(batch)
        size = batch_size_of(batch)
        is_mapping = isinstance(batch, Mapping)
        items = dict(batch.items()) if isinstance(batch, Mapping) else dict(enumerate(batch))
        mapped = {k: v for k, v in items.items() if isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == size}
        constant = {k: v for k, v in items.items() if k not in mapped}
        listed: dict[Any, Sequence[Any]] = {
            k: v
            for k, v in constant.items()
            if isinstance(v, list | tuple) and len(v) == size and all(isinstance(one, Mapping | Tensor) for one in v)
        }
        kept = isinstance(batch, FieldBatch) or hasattr(batch, "_fields")
        kind = type(batch) if kept else dict if is_mapping else tuple
        return cls(size, mapped, constant, tuple(items), is_mapping, listed, kind)

    @classmethod
    def of_rows(cls, batch: Batch, rows: int) -> "SplitBatch":
        """Take a batch of some rows apart.

        Raises:
            ValueError: it has not one sample per row.
        """
        split = cls.of(batch)
        if split.size != rows:
            raise ValueError(
                f"The collator made a batch of {split.size} samples from {rows} rows. Expected one sample per row. "
                "Use a collator that neither drops nor adds samples."
            )
        return split

    def rebuild(self, mapped: Mapping[Any, Any]) -> Batch:
        """Make a batch of the same kind with other tensors in place of the mapped ones."""
        values = {**self.constant, **mapped}
        if self.is_mapping:
            return self.kind({key: values[key] for key in self.keys})
        made = tuple(values[key] for key in self.keys)
        return self.kind(*made) if hasattr(self.kind, "_fields") else made

    def rows(self, start: int, stop: int) -> Batch:
        """Make a batch of samples `start … stop`."""
        taken = {key: values[start:stop] for key, values in self.listed.items()}
        return self.rebuild({**taken, **{key: tensor[start:stop] for key, tensor in self.mapped.items()}})

    def picked(self, rows: Sequence[int]) -> Batch:
        """Make a batch of some samples."""
        tensors = {key: tensor[list(rows)] for key, tensor in self.mapped.items()}
        return self.rebuild({**tensors, **{key: [values[row] for row in rows] for key, values in self.listed.items()}})

    def require_samples(self, task: AbstractModelOutput) -> None:
        """Refuse a batch with names for a task that takes the tensors of one sample.

        Raises:
            TypeError: it is such a batch.
        """
        if self.is_mapping:
            raise TypeError(
                f"The batch is a mapping with keys {list(self.keys)}, but the task {type(task).__name__} has only the "
                "functional form get_output(model, weights, buffers, *sample). Pass a tuple of tensors, or derive the "
                "task from BatchedModelOutput."
            )

    @property
    def sample_elements(self) -> int:
        """Count the tensor elements per sample, a measure of the cost of batches of different lengths."""
        return sum(tensor.numel() for tensor in self.mapped.values()) // max(self.size, 1)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or one of the errors that caused it, says that memory ran out.

    Recognizes the messages of CUDA and other accelerators, of the CPU's allocator and of cuDNN, as
    `accelerate.utils.find_executable_batch_size` does.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, Exception) and should_reduce_batch_size(error):
            return True
        error = error.__cause__
    return False


def saved_activation_bytes(forward: Callable[[], Any]) -> int:
    """Count the bytes that autograd saves during `forward()`. A storage shared by several operations counts once."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(seen.values())


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the storage of a tensor: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def run_model(
    task: BatchedModelOutput,
    model: torch.nn.Module,
    batch: Batch,
    weights: Tensors | None = None,
    buffers: Tensors | None = None,
) -> Any:
    """Run one forward pass of a batch with the inputs that the task takes from it.

    Args:
        task: the task.
        model: the model.
        batch: the batch.
        weights, buffers: used in place of the model's own where `weights` is given.

    Returns:
        What the model returned.
    """
    return call_model(model, weights, buffers, *task.model_inputs(batch))


def one_per_sample(values: Any, size: int, task: AbstractModelOutput) -> Tensor:
    """Check that a task returned one value per sample.

    Args:
        values: what the task returned.
        size: samples in the batch that it was called with: one, where an engine takes them one at a time.
        task: named in the error message.

    Returns:
        `torch.Tensor`: `values`.

    Raises:
        ValueError: it has another shape than `(size,)`, or is no tensor.
    """
    return function.one_per_sample(values, size, f"The task {type(task).__name__}")


def model_output(task: BatchedModelOutput, model: torch.nn.Module, batch: Batch, side: Side = "train") -> Tensor:
    """Run one forward pass of a batch, and compute f of every sample.

    Args:
        task: the task.
        model: the model.
        batch: B samples.
        side: the side that they are on.

    Returns:
        `torch.Tensor`: `(B,)`.

    Raises:
        ValueError: the task did not return one value per sample.
    """
    values = task.output(run_model(task, model, batch), batch, side)
    return one_per_sample(values, SplitBatch.of(batch).size, task)


def gradients_of(f: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients of a scalar by plain autograd.

    Reentrant activation checkpointing refuses `autograd.grad`. There, gradients are accumulated in `.grad`, which is
    put back as it was.

    Args:
        f: the scalar.
        parameters: what to differentiate with respect to.

    Returns:
        One gradient per parameter, `None` for one that `f` does not depend on.

    Raises:
        RuntimeError: autograd cannot differentiate `f`.
    """
    try:
        return list(torch.autograd.grad(f, parameters, allow_unused=True, retain_graph=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    return accumulated_gradients(f, parameters)


def accumulated_gradients(f: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients of a scalar as [`gradients_of`] does, in one backward pass under any kind of checkpointing.

    Args:
        f: the scalar.
        parameters: what to differentiate with respect to, all leaves that require a gradient.

    Returns:
        One gradient per parameter, `None` for one that `f` does not depend on.
    """
    with gradients_set_aside(parameters):
        f.backward()
        return [parameter.grad for parameter in parameters]
