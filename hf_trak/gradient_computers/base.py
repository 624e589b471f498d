"""The contract of a gradient computer: a model, a task and a batch in; blocks of per-sample gradients out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, Side

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

    Subclasses implement the three methods of the `trak` API. Those that can produce gradients piece by piece also
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

    @abstractmethod
    def load_model_params(self, model: torch.nn.Module) -> None:
        """Take over the weights and buffers of `model` (after a checkpoint has been loaded into it)."""

    @abstractmethod
    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor] | Tensor:
        """Compute the gradients of f for every sample of a batch.

        Args:
            batch (`Mapping[str, torch.Tensor]` or `Sequence[torch.Tensor]`): B samples.

        Returns:
            `torch.Tensor` or `dict[str, torch.Tensor]`: `(B, P)`, or `(B, *shape)` by parameter name.
        """

    @abstractmethod
    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Compute the output-to-loss gradient q of every sample of a batch.

        Args:
            batch (`Mapping[str, torch.Tensor]` or `Sequence[torch.Tensor]`): B samples.

        Returns:
            `torch.Tensor`: `(B,)`.
        """

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
