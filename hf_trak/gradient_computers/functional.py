"""The functional engine: `torch.func.vmap` of the gradient of one sample, the default engine of the `trak` API."""

import logging
from typing import Any

import torch
from torch import Tensor

from hf_trak._compat import mask_code_traceable
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import (
    AbstractGradientComputer,
    BatchOutputs,
    GradientSink,
    SplitBatch,
    one_per_sample,
    run_model,
    saved_activation_bytes,
)
from hf_trak.gradient_computers.environment import pass_settings, problem_type_fixed, require_graph
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side
from hf_trak.runtime.checks import free_bytes

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
"""Share of the free memory that the vectorized pass may use."""


class FunctionalGradientComputer(AbstractGradientComputer):
    """`vmap(grad(f))` over the samples of a batch, differentiating the attributed parameters alone.

    Attributes:
        chunk_size (`int`, *optional*):
            Number of samples that are vectorized together. `None` chooses by free memory.
    """

    chunk_size: int | None = None
    _measured: tuple[int, int] | None = None

    @property
    def func_weights(self) -> dict[str, Tensor]:
        """Return the parameters of the model by name, as the functional form of a task takes them."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @property
    def func_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the model by name."""
        return {name: buffer.detach() for name, buffer in self.model.named_buffers()}

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the gradients of f for every sample of a batch.

        Args:
            batch (`Mapping[str, torch.Tensor]` or `Sequence[torch.Tensor]`): B samples.

        Returns:
            `dict[str, torch.Tensor]`: by parameter name, shapes `(B, *shape)`, in `dtype` on `device`.

        Raises:
            GradientEngineError: the model does something that `torch.func.vmap` cannot vectorize.
            TypeError: the batch is a mapping, and the task has only the functional form of the `trak` API.
        """
        gradients, _, _ = self._run(batch, "train")
        return {name: gradient.to(self.device, self.dtype) for name, gradient in gradients.items()}

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        with pass_settings(self.model):
            return self.modelout_fn.get_out_to_loss_grad(self.model, self.func_weights, self.func_buffers, batch)

    def stream(self, batch: Batch, sink: GradientSink, side: Side = "train") -> BatchOutputs:
        gradients, output, q = self._run(batch, side)
        for slot in self.layout.slots:
            sink(
                slot.offset, gradients.pop(slot.name).to(self.device, self.dtype).reshape(output.shape[0], slot.numel)
            )
        if q is None:
            q = self.compute_loss_grad(batch).detach()
        return BatchOutputs(output, q)

    def _run(self, batch: Batch, side: Side) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Compute the gradients by name, f `(B,)`, and q `(B,)`; `None` for q where the task has no batched form."""
        split = SplitBatch.of(batch)
        task = self.modelout_fn
        if not isinstance(task, BatchedModelOutput):
            split.require_samples(task)
        if (split.listed and split.size > 1) or (isinstance(task, BatchedModelOutput) and task.row_by_row):
            raise GradientEngineError(
                f"The task {type(task).__name__} takes rows alone, or lists of them, which cannot be vectorized. Use "
                "the iterative engine."
            )
        fixed, buffers = self.func_weights, self.func_buffers
        attributed = {name: fixed.pop(name) for name in self.layout.names}

        def value(weights: dict[str, Tensor], mapped: dict[Any, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
            everything = {**fixed, **weights}
            if not isinstance(task, BatchedModelOutput):
                sample = split.rebuild(mapped)
                f = task.get_output(self.model, everything, buffers, *sample)
                return f, (f.detach(),)
            single = split.rebuild({key: tensor.unsqueeze(0) for key, tensor in mapped.items()})
            result = run_model(task, self.model, single, everything, buffers)
            f = one_per_sample(task.output(result, single, side), 1, task).squeeze(0)
            return f, (f.detach(), task.out_to_loss_grad(result, single, side).detach().squeeze(0))

        labels = split.mapped.get("labels") if split.is_mapping else None
        require_graph()
        gradient_of_one = torch.func.grad(value, has_aux=True)
        with pass_settings(self.model), problem_type_fixed(self.model, labels):
            chunk = self.chunk_size or self._chunk_by_memory(
                split, attributed, lambda: value(attributed, _first(split))
            )
            with mask_code_traceable():
                while True:
                    vectorized = torch.func.vmap(
                        gradient_of_one, in_dims=(None, 0), randomness="different", chunk_size=chunk
                    )
                    try:
                        gradients, aux = vectorized(attributed, split.mapped)
                        break
                    except torch.OutOfMemoryError:
                        if chunk == 1:
                            raise
                        chunk = max(1, min(chunk, split.size) // 2)
                        logger.info("Out of memory: vectorizing %d samples at a time.", chunk)
                    except (RuntimeError, NotImplementedError) as error:
                        raise GradientEngineError(
                            f"The functional engine cannot vectorize {type(self.model).__name__}: {error}\n"
                            'Use engine="auto", "hooked" or "iterative" (IterativeGradientComputer in TRAKer).'
                        ) from error
        return gradients, aux[0], aux[1] if len(aux) > 1 else None

    def _chunk_by_memory(self, split: SplitBatch, weights: dict[str, Tensor], forward: Any) -> int:
        """Count the samples that fit into [`MEMORY_SHARE`] of the free memory, at least one.

        A sample costs the activations that its forward pass saves, about as much again for the backward pass, and its
        gradient twice (once when it is taken, once in the result, which is subtracted for the whole batch beforehand).
        """
        if self._measured is None or self._measured[0] < split.sample_elements:
            for weight in weights.values():
                weight.requires_grad_()  # what autograd saves for detached weights is counted, too
            self._measured = (split.sample_elements, saved_activation_bytes(forward))
            for weight in weights.values():
                weight.requires_grad_(False)
        gradient = self.layout.gradient_bytes(weights)
        available = free_bytes(next(iter(weights.values())).device) * MEMORY_SHARE - split.size * gradient
        chunk = int(available // max(2 * self._measured[1] + gradient, 1))
        return max(1, min(split.size, chunk))


def _first(split: SplitBatch) -> dict[Any, Tensor]:
    """Return the tensors of the first sample, without batch dimension."""
    return {key: tensor[0] for key, tensor in split.mapped.items()}
