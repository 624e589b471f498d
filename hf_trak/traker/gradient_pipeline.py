"""A gradient computer and a projector together: from a batch to projected gradients.

Where both are able to, gradients pass from one to the other block by block, so that nothing of size B × P is held.
"""

from typing import Any

import torch
from torch import Tensor

from hf_trak.gradient_computers import AbstractGradientComputer
from hf_trak.modelout_functions import Batch, Side
from hf_trak.projectors import BlockProjector


class GradientPipeline:
    """Projected gradients of batches."""

    def __init__(
        self, computer: Any, projector: Any, grad_dim: int, proj_dim: int, device: str | torch.device
    ) -> None:
        """
        Args:
            computer: an [`AbstractGradientComputer`], or any object with the methods of the seeds.
            projector: an [`AbstractProjector`], or any object with `project(grads, model_id)`.
            grad_dim: P.
            proj_dim: k.
            device: where gradients are collected and projected.
        """
        self.computer = computer
        self.projector = projector
        self.grad_dim = grad_dim
        self.proj_dim = proj_dim
        self.device = device

    def __call__(self, batch: Batch, size: int, model_id: int, side: Side) -> tuple[Tensor, Tensor]:
        """Projected gradients `(B, k)` in float32 and q `(B,)` of a batch of `size` samples; q is zero for targets
        where taking it would cost a pass of its own.

        Raises:
            ValueError: the computer or the projector returned another shape.
        """
        grads, q = self._compute(batch, size, model_id, side)
        expected = (size, self.proj_dim)
        if tuple(grads.shape) != expected or q.numel() != size:
            raise ValueError(
                f"The gradients have the shape {tuple(grads.shape)} after projection, with {q.numel()} output-to-loss "
                f"gradients; expected {expected} and {size}. Check {type(self.computer).__name__} and "
                f"{type(self.projector).__name__}."
            )
        return grads.to(torch.float32), q.reshape(-1)

    def _compute(self, batch: Batch, size: int, model_id: int, side: Side) -> tuple[Tensor, Tensor]:
        if not can_stream(self.computer):
            grads = self.projector.project(self.computer.compute_per_sample_grad(batch), model_id=model_id)
            return grads, self.computer.compute_loss_grad(batch) if side == "train" else torch.zeros(size)
        if can_accumulate(self.projector):
            features = torch.zeros(size, self.proj_dim, dtype=torch.float32, device=self.device)
            q = self.computer.stream(batch, _Accumulation(self.projector, features, model_id), side).out_to_loss
            return features, q
        result = torch.zeros(size, self.grad_dim, dtype=torch.float32, device=self.device)

        def sink(start: int, block: Tensor) -> None:
            result[:, start : start + block.shape[1]] += block

        q = self.computer.stream(batch, sink, side).out_to_loss
        return self.projector.project(result, model_id=model_id), q


class _Accumulation:
    """The sink that projects what it is given, as an `OuterSink` where the projector takes factors."""

    def __init__(self, projector: BlockProjector, features: Tensor, model_id: int) -> None:
        self.projector = projector
        self.features = features
        self.model_id = model_id

    def __call__(self, start: int, block: Tensor) -> None:
        self.projector.accumulate(self.features, block, start, self.model_id)

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        return self.projector.takes_outer(left, right)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        self.projector.accumulate_outer(self.features, left, right, start, self.model_id)


def is_ours(function: Any) -> bool:
    """Whether a class or function is this library's own."""
    return getattr(function, "__module__", "").startswith("hf_trak.")


def can_stream(computer: Any) -> bool:
    """Whether `stream` says the same as the seeds' methods: a subclass that overrides those alone is not to be
    bypassed.
    """
    if not isinstance(computer, AbstractGradientComputer) or type(computer).stream is AbstractGradientComputer.stream:
        return False
    overridden = not (is_ours(type(computer).compute_per_sample_grad) and is_ours(type(computer).compute_loss_grad))
    return not (overridden and is_ours(type(computer).stream))


def can_accumulate(projector: Any) -> bool:
    """Whether `accumulate` says the same as `project`."""
    return isinstance(projector, BlockProjector) and (
        is_ours(type(projector).project) or not is_ours(type(projector).accumulate)
    )


def require_device(device: str | torch.device) -> None:
    """Raise `ValueError` if a CUDA device is asked for and there is none."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"`device` is {str(device)!r}, but torch sees no CUDA device. Expected one that exists. Pass device='cpu'."
        )
