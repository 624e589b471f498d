"""Classes and objects that users plug into `TRAKer`: how they are made, and what they can do."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trak.gradient_computers import AbstractGradientComputer, ParameterLayout
from hf_trak.modelout_functions import AbstractModelOutput, Batch, LossModelOutput, Side
from hf_trak.modelout_functions.function import task_identity
from hf_trak.projectors import BlockProjector, NoOpProjector
from hf_trak.version import __version__


def construct(cls: Any, required: Mapping[str, Any], optional: Mapping[str, tuple[Any, Any]]) -> Any:
    """Make an object of a class that a user gave.

    Args:
        cls: the class, or a function that returns an object.
        required: arguments that every such class takes, by name.
        optional: `(value, neutral value)` of arguments that the class need not take. A class without such an argument
            works as long as the argument has its neutral value.

    Raises:
        TypeError: what was given is not a class.
        ValueError: an optional argument does not have its neutral value, and the class does not take it.
    """
    if not isinstance(cls, type) and not callable(cls):
        raise TypeError(
            f"Expected a class, but an object of type {type(cls).__name__} was given. Pass the class itself."
        )
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = dict(required)
    for name, (value, neutral) in optional.items():
        if takes_any or name in parameters:
            arguments[name] = value
        elif value != neutral:
            raise ValueError(
                f"`{name}` is {value!r}, but {getattr(cls, '__name__', cls)} takes no such argument. Expected "
                f"{neutral!r} with this class. Add the argument to its constructor, or leave it out."
            )
    return cls(**arguments)


def is_ours(function: Any) -> bool:
    """Tell whether a class or function belongs to this library."""
    return getattr(function, "__module__", "").startswith("hf_trak.")


def can_stream(computer: Any) -> bool:
    """Tell whether `stream` gives the same gradients as the methods that the `trak` API documents.

    It does not for a subclass that overrides only those methods, whose gradients must not be bypassed.
    """
    if not isinstance(computer, AbstractGradientComputer) or type(computer).stream is AbstractGradientComputer.stream:
        return False
    overridden = not (is_ours(type(computer).compute_per_sample_grad) and is_ours(type(computer).compute_loss_grad))
    return not (overridden and is_ours(type(computer).stream))


def can_accumulate(projector: Any) -> bool:
    """Tell whether `accumulate` gives the same features as `project`, which a subclass may have overridden alone."""
    return isinstance(projector, BlockProjector) and (
        is_ours(type(projector).project) or not is_ours(type(projector).accumulate)
    )


def require_both_sides(computer: Any, task: AbstractModelOutput) -> None:
    """Raise `ValueError` if the task takes other gradients for targets, and the computer cannot tell them apart."""
    if isinstance(task, LossModelOutput) and not can_stream(computer):
        raise ValueError(
            "The task 'loss' takes other gradients for targets than for train examples, which "
            f"{type(computer).__name__} cannot tell apart. Use FunctionalGradientComputer or "
            "IterativeGradientComputer, or give your class a method `stream`."
        )


def require_size(projector: Any, num_params: int) -> None:
    """Raise `ValueError` if a projector was made for gradients of another length than `num_params`."""
    made_for = getattr(projector, "grad_dim", 0)
    if made_for not in (0, None, num_params):
        raise ValueError(
            f"The {type(projector).__name__} was made for gradients of {made_for} elements, but {num_params} are "
            f"attributed. Make it with grad_dim={num_params}, or choose other parameters (`grad_wrt`)."
        )


@dataclass(frozen=True)
class GradientPipeline:
    """Computes the projected gradients of batches.

    Attributes:
        computer: an `AbstractGradientComputer`, or any object with its documented methods.
        projector: an `AbstractProjector`, or any object with `project(grads, model_id)`.
        grad_dim: number of attributed parameter elements, P.
        proj_dim: number of columns after projection, k.
        device: where gradients are collected and projected.
    """

    computer: Any
    projector: Any
    grad_dim: int
    proj_dim: int
    device: str | torch.device

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


def run_metadata(
    model: torch.nn.Module, layout: ParameterLayout, task: AbstractModelOutput, computer: Any, projector: Any
) -> dict[str, Any]:
    """Describe all that defines the features of a run, apart from sizes and dtype, which the saver adds.

    Args:
        model: the model.
        layout: the attributed parameters.
        task: the model output function.
        computer: the gradient computer.
        projector: the projector.
    """
    return {
        # Built-in ones agree.
        "gradient_computer": "built-in" if is_ours(type(computer)) else class_name(type(computer)),
        "hf_trak_version": __version__,
        "model_class": type(model).__name__,
        "parameters": layout.to_list(),
        "parameters_fingerprint": layout.fingerprint,
        "projection": projection_identity(projector),
        "task": task_identity(task, model),
    }


def projection_identity(projector: Any) -> dict[str, Any]:
    """Identify a projection. The library's own are known by their algorithm, whichever class computes it."""
    own = can_accumulate(projector) and is_ours(type(projector))
    identity = {
        "class": None if own else class_name(type(projector)),
        "algorithm": getattr(projector, "algorithm", None),
    }
    for name in ("nonzeros", "proj_type", "seed"):
        value = getattr(projector, name, None)
        identity[name] = value if value is None or isinstance(value, int) else str(value)
    if isinstance(projector, NoOpProjector):
        identity |= {"proj_type": None, "seed": None}
    return identity


def class_name(cls: type) -> str:
    """Return the name under which a directory records a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
