"""Following parameters that are used outside of layers with a rule: class tokens, position tables, layer scales, tied
heads.

During the forward pass every function call on a tensor goes through [`ParameterTracker`]. A value computed from
parameters alone ("parameter value": a transposed weight, a table of relative position biases) has no batch dimension;
it is followed with a small autograd graph of its own. Where it meets the batch (a "contact": an addition, a product,
`F.linear`), a function of `contacts` sees to it that the gradient arrives there per sample, before broadcasting sums
it over the batch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis, TensorTrace, UnsupportedError, batch_axis
from hf_trak.gradient_computers.hooked.opened import opened_attention

if TYPE_CHECKING:
    from hf_trak.gradient_computers.hooked.session import Session

OpKey = tuple[tuple[str, ...], str]
"""The parameters that a value comes from, and the function that is applied."""


class RestartError(Exception):
    """The pass has learned something that the pass of one sample must know, too: begin again."""


@dataclass
class TracedTensor:
    """A tensor of the pass of one sample, and, once a batch has been seen, the dimension that carries the batch."""

    trace: TensorTrace
    axis: BatchAxis | None = None
    resolved: bool = False

    def axis_of(self, tensor: Tensor, size: int) -> BatchAxis | None:
        """The batch dimension of the same tensor in a batch. Raises `UnsupportedError`, see [`batch_axis`]."""
        if not self.resolved:
            self.axis = batch_axis(self.trace, tensor, size)
            self.trace = TensorTrace(self.trace.shape, None)
            self.resolved = True
        expected = list(self.trace.shape)
        if self.axis is not None:
            expected[self.axis.dim] *= size
        if list(tensor.shape) != expected:
            raise UnsupportedError(f"a tensor has shape {tuple(tensor.shape)} where {tuple(expected)} was expected")
        return self.axis


@dataclass
class OpTrace:
    """The tensors that went into one traced call, and those that came out."""

    inputs: list[TracedTensor]
    outputs: list[TracedTensor]

    @classmethod
    def of(cls, inputs: list[Tensor], outputs: list[Tensor]) -> "OpTrace":
        return cls(
            [TracedTensor(TensorTrace.of(t)) for t in inputs], [TracedTensor(TensorTrace.of(t)) for t in outputs]
        )


@dataclass
class Profile:
    """What the pass of one sample saw: calls of hooked modules by name, operations on parameter values by key."""

    calls: dict[str, list[OpTrace]] = field(default_factory=lambda: defaultdict(list))
    ops: dict[OpKey, list[OpTrace]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Tracked:
    """A parameter value: the tensor, with a graph back to stand-ins of the parameters that it comes from."""

    value: Tensor
    roots: tuple[str, ...]
    is_parameter: bool = False


class ParameterTracker(TorchFunctionMode):
    """Sees every call of a torch function during the forward pass of one [`Session`]."""

    def __init__(self, session: "Session") -> None:
        super().__init__()
        self.session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        session = self.session
        if session.inside or not session.recording():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # its projections are seen one by one
                return opened_attention(*args, **kwargs)
        tracked = session.tracked
        for tensor in tensors_in(args, kwargs):
            if id(tensor) in tracked:
                break
        else:
            result = func(*args, **kwargs)
            if session.calibrating and any(is_data(t) for t in tensors_in(args, kwargs)):
                mark_data(result)
            return result
        return session.parameter_operation(func, args, kwargs)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of a call, including those in lists and tuples."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            for item in value:
                if isinstance(item, Tensor):
                    yield item


def replace_tensors(value: Any, replacement: Callable[[Tensor], Any]) -> Any:
    """Arguments with every tensor replaced, including those in lists and tuples."""
    if isinstance(value, Tensor):
        return replacement(value)
    if type(value) in (tuple, list) and any(isinstance(item, Tensor) for item in value):
        return type(value)(replacement(item) if isinstance(item, Tensor) else item for item in value)
    return value


def outputs_of(result: Any) -> list[Tensor]:
    """The tensors that a function returned."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [item for item in result if isinstance(item, Tensor)]
    return []


def is_data(tensor: Tensor) -> bool:
    """Whether a tensor of the pass of one sample was computed from the sample."""
    return getattr(tensor, "_hf_trak_data", False)


def mark_data(result: Any) -> None:
    """Mark the tensors of a result as computed from the sample."""
    for tensor in outputs_of(result):
        tensor._hf_trak_data = True  # type: ignore[attr-defined]
