"""The iterative engine: every sample alone through an ordinary forward pass and one `autograd.grad`."""

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_trak.gradient_computers.base import (
    AbstractGradientComputer,
    BatchOutputs,
    GradientSink,
    SplitBatch,
    gradients_of,
    one_per_sample,
    run_model,
)
from hf_trak.gradient_computers.environment import differentiating, pass_settings
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side


class IterativeGradientComputer(AbstractGradientComputer):
    """One forward and one backward pass per sample. Slow; works for anything that autograd can differentiate.

    Tasks without a batched form are called as in the `trak` API, `get_output(model, None, None, *batch)`, with a batch
    of one sample. Set `sample_form=True` for a task whose `get_output` expects weights and a sample without a batch
    dimension.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = torch.float16,
        device: torch.device | str | None = "cuda",
        grad_wrt: Iterable[str] | None = None,
        sample_form: bool = False,
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
            sample_form (`bool`, *optional*, defaults to `False`):
                Whether to call the `get_output` of a task without a batched form with weights, and with a sample that
                has no batch dimension.

        Raises:
            ValueError: `grad_dim` is not the number of attributed parameters, or `grad_wrt` does not fit the model.
        """
        super().__init__(model, task, grad_dim, dtype, device, grad_wrt)
        self.sample_form = sample_form
        self.load_model_params(model)

    def load_model_params(self, model: torch.nn.Module) -> None:
        self.model = model
        parameters = dict(model.named_parameters())
        self.model_params = [parameters[name] for name in self.layout.names]

    def compute_per_sample_grad(self, batch: Batch) -> Tensor:
        """Compute the gradients of f for every sample of a batch.

        Args:
            batch (`Mapping[str, torch.Tensor]` or `Sequence[torch.Tensor]`): B samples.

        Returns:
            `torch.Tensor`: `(B, P)`, in `dtype` on `device`; zeros where f does not depend on a parameter.

        Raises:
            TypeError: the batch is a mapping, and the task has only the functional form of the `trak` API.
            ValueError: the task does not return one scalar per sample.
        """
        return self._run(batch, "train")[0]

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        if self.sample_form:
            return super().compute_loss_grad(batch)
        with pass_settings(self.model):
            # the calling convention of the TRAK API: the task uses the model's own weights
            return self.modelout_fn.get_out_to_loss_grad(self.model, None, None, batch)  # type: ignore[arg-type]

    def stream(self, batch: Batch, sink: GradientSink, side: Side = "train") -> BatchOutputs:
        gradients, output, q = self._run(batch, side)
        sink(0, gradients)
        return BatchOutputs(output, self.compute_loss_grad(batch).detach() if q is None else q)

    def _run(self, batch: Batch, side: Side) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the gradients `(B, P)`, f `(B,)`, and q `(B,)`; `None` for q where the task has no batched form."""
        split = SplitBatch.of(batch)
        task = self.modelout_fn
        device = self.model_params[0].device if self.device is None else self.device
        gradients = torch.zeros(split.size, self.grad_dim, dtype=self._dtype(), device=device)
        outputs, qs = [], []
        wanted = {id(p) for p in self.model_params}
        with differentiating(self.model, wanted):
            for row in range(split.size):
                single = split.rows(row, row + 1)
                if isinstance(task, BatchedModelOutput):
                    result = run_model(task, self.model, single)
                    f = one_per_sample(task.output(result, single, side), 1, task).squeeze(0)
                    qs.append(task.out_to_loss_grad(result, single, side).detach())
                else:
                    f = self._plain_output(split, row, single)
                outputs.append(f.detach())
                if not f.requires_grad:  # a sample without valid labels: f is a constant
                    continue
                taken = gradients_of(f, self.model_params)
                for slot, gradient in zip(self.layout.slots, taken, strict=True):
                    if gradient is not None:
                        gradients[row, slot.offset : slot.offset + slot.numel] = gradient.flatten()
        return gradients, torch.stack(outputs), torch.cat(qs) if qs else None

    def _plain_output(self, split: SplitBatch, row: int, single: Batch) -> Tensor:
        """Compute f of one sample by a task without a batched form."""
        task = self.modelout_fn
        split.require_samples(task)
        if self.sample_form:
            weights, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
            sample = split.rebuild({key: tensor[row] for key, tensor in split.mapped.items()})
            return task.get_output(self.model, weights, buffers, *sample)
        f = task.get_output(self.model, None, None, *single)  # type: ignore[arg-type]
        return one_per_sample(f.reshape(1) if f.ndim == 0 else f, 1, task).squeeze(0)

    def _dtype(self) -> torch.dtype:
        """Return the dtype of the gradients, one that holds those of all parameters."""
        if self.dtype is not None:
            return self.dtype
        dtype = self.model_params[0].dtype
        for parameter in self.model_params[1:]:
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype
