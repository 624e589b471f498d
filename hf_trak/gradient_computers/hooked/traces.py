"""Records of the hooked engine: what the pass of one sample saw, and what is known about a model after some passes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_trak._compat import unseen_by_modes
from hf_trak.gradient_computers.hooked.batch_axis import (
    BatchAxis,
    RowOrders,
    TensorTrace,
    UnsupportedError,
    batch_axis,
)

OpKey = tuple[tuple[str, ...], str]

"""An operation on parameter values: names of the parameters that the values come from, and of the torch function."""


LayerCallId = tuple[str, int]

"""A call of a layer within one pass: the name of the module, and how many calls of it came before."""


OpCallId = tuple[OpKey, int]

"""A call of an operation within one pass: its key, and how many calls with that key came before."""


class RestartError(Exception):
    """The pass has learned something that the pass of one sample must know, too: begin again."""


class ParameterUnsupportedError(UnsupportedError):
    """An unsupported operation on parameters.

    Attributes:
        roots: names of the parameters.
        operation: the call, where it is one that can be trapped, see [`ModelTrace`].
    """

    def __init__(self, roots: Iterable[str], reason: str, operation: OpCallId | None = None) -> None:
        super().__init__(reason)
        self.roots = tuple(roots)
        self.operation = operation


class ModuleUnsupportedError(UnsupportedError):
    """An unsupported call of a module.

    Attributes:
        name: name of the module in the model.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


@dataclass
class TracedTensor:
    """A tensor of the pass of one sample, and, once a batch has been seen, the dimension that carries the batch."""

    trace: TensorTrace
    axis: BatchAxis | None = None
    resolved: bool = False

    def axis_of(self, tensor: Tensor, size: int, orders: RowOrders) -> BatchAxis | None:
        """Find the batch dimension of the same tensor in a batch of `size` samples.

        Args:
            tensor: the tensor.
            size: B.
            orders: see [`batch_axis`].

        Returns:
            `BatchAxis` or `None`: `None` if the tensor has no batch dimension.

        Raises:
            UnsupportedError: the batch dimension cannot be told, see [`batch_axis`], or the tensor has another shape
                than in earlier batches.
        """
        if not self.resolved:
            with unseen_by_modes():  # the tracker takes it for the model's own operations otherwise
                self.axis = batch_axis(self.trace, tensor, size, orders)
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
        """Trace the tensors of a call."""
        return cls(
            [TracedTensor(TensorTrace.of(t)) for t in inputs], [TracedTensor(TensorTrace.of(t)) for t in outputs]
        )


@dataclass
class SampleTrace:
    """The record of the pass of one sample.

    Attributes:
        calls: the calls of hooked modules, by name of the module, in order.
        ops: the operations on parameter values, by key, in order.
        foretold: whether no sample was traced, see `width_traces`.
        learned: whether a batch has shown where it is in all tensors, and traces at other widths may be computed.
        orders: what a batch has shown about the order of folded rows.
    """

    calls: dict[str, list[OpTrace]] = field(default_factory=lambda: defaultdict(list))
    ops: dict[OpKey, list[OpTrace]] = field(default_factory=lambda: defaultdict(list))
    foretold: bool = False
    learned: bool = False
    orders: RowOrders = field(default_factory=RowOrders)

    def place(self, name: str, index: int) -> int:
        """Return the position, among the traces of a module, of the call that has a number in its pass.

        Raises:
            ModuleUnsupportedError: one sample alone did not come to this module.
        """
        traces = self.calls.get(name, [])
        if not traces:
            raise ModuleUnsupportedError(name, "was not called for one sample alone")
        # a checkpointed block runs again in the backward pass, and finds its own trace there
        return index % len(traces)

    def op(self, key: OpKey, index: int) -> OpTrace:
        """Return the trace of one operation.

        Raises:
            ParameterUnsupportedError: one sample alone did not come to this operation.
        """
        traces = self.ops.get(key, [])
        if not traces:
            raise ParameterUnsupportedError(key[0], f"{key[1]} was not called for one sample alone")
        return traces[index % len(traces)]


@dataclass
class ModelTrace:
    """The findings of the engine about a model, kept over batches.

    Attributes:
        batched_calls: calls of layers that do see the batch, although it was not apparent from one sample.
        unbatched_calls: calls of layers that see no batch (a position table looked up once for all samples).
        batched_ops: operations in which a parameter value meets the batch.
        unbatched_ops: operations that have a handler, but whose result has no batch dimension.
        replayed: names of modules that are evaluated sample by sample, with the reason.
        trapped: operations that nothing can handle, with the error message. Their results may not matter to f (the
            logits of a CLIP model, which compare every image with every text); a gradient that does come back from
            them is an error.
        unvectorizable: parameters whose values `torch.func.vmap` cannot differentiate (sparse ones).
    """

    batched_calls: set[LayerCallId] = field(default_factory=set)
    unbatched_calls: set[LayerCallId] = field(default_factory=set)
    batched_ops: set[OpCallId] = field(default_factory=set)
    unbatched_ops: set[OpCallId] = field(default_factory=set)
    replayed: dict[str, str] = field(default_factory=dict)
    trapped: dict[OpCallId, str] = field(default_factory=dict)
    unvectorizable: set[tuple[str, ...]] = field(default_factory=set)

    def copy(self) -> "ModelTrace":
        """Return a copy that stays as it is."""
        return ModelTrace(**{name: value.copy() for name, value in vars(self).items()})


@dataclass(frozen=True)
class Lookup:
    """Rows of a parameter that all samples look up, such as the positions of a table.

    Attributes:
        ids: returns their numbers, also negative ones, in host memory or on the device of the parameter.
        rows: number of rows of the parameter.
        padding_idx: the row without a gradient; `None` if there is none.
    """

    ids: Callable[[], Tensor]
    rows: int
    padding_idx: int | None


@dataclass(frozen=True)
class Tracked:
    """A parameter value: a tensor computed from parameters alone.

    Attributes:
        value: the tensor, with a small autograd graph that leads back to stand-ins of the parameters.
        roots: names of the parameters that it is computed from.
        is_parameter: whether it is a parameter itself.
        lookup: what rows of one parameter it is, if it is that; its gradient then takes no graph.
        via: the looked-up rows that it is computed from alone; its gradient then takes a graph as far as these.
    """

    value: Tensor
    roots: tuple[str, ...]
    is_parameter: bool = False
    lookup: Lookup | None = None
    via: "Tracked | None" = None


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a call, including those in lists and tuples."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            for item in value:
                if isinstance(item, Tensor):
                    yield item


def replace_tensors(value: Any, replacement: Callable[[Tensor], Any]) -> Any:
    """Replace a tensor, or every tensor in a list or tuple; return anything else as it is."""
    if isinstance(value, Tensor):
        return replacement(value)
    if type(value) in (tuple, list) and any(isinstance(item, Tensor) for item in value):
        return type(value)(replacement(item) if isinstance(item, Tensor) else item for item in value)
    return value


def outputs_of(result: Any) -> list[Tensor]:
    """Return the tensors that a function returned, alone or in a list or tuple."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [item for item in result if isinstance(item, Tensor)]
    return []


def is_data(tensor: Tensor) -> bool:
    """Tell whether a tensor, in the pass of one sample, was computed from the sample."""
    return getattr(tensor, "_hf_trak_data", False)


def mark_data(result: Any) -> None:
    """Mark the tensors of a result as computed from the sample."""
    for tensor in outputs_of(result):
        tensor._hf_trak_data = True  # type: ignore[attr-defined]
