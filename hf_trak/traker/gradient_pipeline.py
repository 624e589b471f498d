"""A gradient computer and a projector together: from a batch to projected gradients.

If both can, gradients pass from one to the other block by block, so that nothing of size B × P is held.
"""

from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions import Batch, Side
from hf_trak.traker.plugins import can_accumulate, can_stream


class GradientPipeline:
    """Computes the projected gradients of batches."""

    def __init__(
        self, computer: Any, projector: Any, grad_dim: int, proj_dim: int, device: str | torch.device
    ) -> None:
        """
        Args:
            computer: an `AbstractGradientComputer`, or any object with its documented methods.
            projector: an `AbstractProjector`, or any object with `project(grads, model_id)`.
            grad_dim: number of attributed parameter elements, P.
            proj_dim: number of columns after projection, k.
            device: where gradients are collected and projected.
        """
        self.computer = computer
        self.projector = projector
        self.grad_dim = grad_dim
        self.proj_dim = proj_dim
        self.device = device

    def __call__(self, batch: Batch, size: int, model_id: int, side: Side) -> tuple[Tensor, Tensor]:
        """Compute projected gradients and output-to-loss gradients.

        Args:
            batch: the samples.
            size: number of samples, B.
            model_id: id of the checkpoint, which chooses the random projection.
            side: `"train"` or `"target"`.

        Returns:
            `tuple`: projected gradients `(B, k)` in float32, and output-to-loss gradients q `(B,)`. For targets, which
            do not need q, it is zero if it would cost a pass of its own.

        Raises:
            ValueError: the computer or the projector returned another shape.
        """
        grads, q = self._compute(batch, size, model_id, side)
        expected = (size, self.proj_dim)
        if tuple(grads.shape) != expected or q.numel() != size:
            raise ValueError(
                f"The gradients have the shape {tuple(grads.shape)} after projection, with {q.numel()} output-to-loss "
                f"gradients. Expected {expected} and {size}. Check {type(self.computer).__name__} and "
                f"{type(self.projector).__name__}."
            )
        return grads.to(torch.float32), q.reshape(-1)

    def _compute(self, batch: Batch, size: int, model_id: int, side: Side) -> tuple[Tensor, Tensor]:
        if not can_stream(self.computer):
            grads = self.projector.project(self.computer.compute_per_sample_grad(batch), model_id=model_id)
            return grads, self.computer.compute_loss_grad(batch) if side == "train" else torch.zeros(size)
        if can_accumulate(self.projector) and self.projector.proj_dim:  # a NoOpProjector need not know its size
            sink = self.projector.sink(size, model_id, self.device)
            q = self.computer.stream(batch, sink, side).out_to_loss
            return sink.result(), q
        whole = torch.zeros(size, self.grad_dim, dtype=torch.float32, device=self.device)

        def collect(start: int, block: Tensor) -> None:
            whole[:, start : start + block.shape[1]] += block

        q = self.computer.stream(batch, collect, side).out_to_loss
        return self.projector.project(whole, model_id=model_id), q


def require_device(device: str | torch.device) -> None:
    """Raise `ValueError` if the device is a CUDA device and torch sees none."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` is {str(device)!r}, but torch sees no CUDA device. Pass device='cpu'.")
