"""Logits that are not computed until a margin is taken of them, and then for some of the vocabulary at a time.

B · T positions under a vocabulary of V have B · T · V logits, and a gradient of the same size. Inside of
[`deferring`], a language model's head returns a [`DeferredLogits`] instead: a tensor with shape and dtype, and no
memory, that notes what is done with it (scaling, soft caps, biases, casts, a choice of positions). `deferred_margins`
then goes through the vocabulary in slices, twice. Inside of [`in_chunks`], it takes margins by plain autograd instead,
of some positions at a time, for what engines are checked with.

Anything else that is done with such logits raises [`NotDeferrableError`], so that a model or a task that this module
does not follow is run again as it is, and never gets other numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_trak.modelout_functions.batches import unwrapped
from hf_trak.runtime.sharding import is_sharded_tensor

SLICE, SLICE_OF_GPUS = 2**20, 2**26
"""Logits in a slice. About four tensors of that size in float32 exist at a time: 16 MiB, and 1 GiB on a GPU."""

LEAST_SLICE = 64
"""Words in a slice, however many positions there are: products with fewer columns are slow."""

DEFERRED_FROM, DEFERRED_FROM_OF_GPUS = 2**26, 2**31
"""Bytes of the logits of a batch from which they are deferred. On CPUs that takes no more time from a tenth of that
on; on GPUs the head makes four products instead of three, and memory is what is gained."""

CHUNKED_FROM, CHUNKED_FROM_OF_GPUS = 2**29, 2**32
"""Bytes of logits from which [`in_chunks`] has margins computed for some positions at a time."""

T = TypeVar("T")

Step = Callable[[Tensor, int, int], Tensor]
"""`step(z, first, last)`: what a model does with its logits, for those of the words `first … last`, `(N, words)`."""

ReceiveHead = Callable[[int, Tensor, Tensor], None]
"""`receive(first, grad, hidden)`: takes the gradient `(B, T, words)` of the head's results for the words from `first`
on, and the hidden states `(B, T, d)`. The gradient of their weights is Σ_t grad[b, t] ⊗ hidden[b, t]."""


class NotDeferrableError(Exception):
    """Logits that were deferred are used in a way that needs all of them."""


@dataclass
class LinearHead:
    """The head of one forward pass.

    Attributes:
        weight: `(V, d)`, without a graph.
        bias: `(V,)`, if there is one.
        dtype: in which autocast has it compute; `None` for that of the weight.
        receive: takes the gradients of weight and bias in the backward pass; `None` where they are not wanted.
        chunked: whether margins are taken by plain autograd, of some positions at a time.
        taken: margins that were taken: hidden states, labels, steps, and the values without their graph.
    """

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype | None
    receive: ReceiveHead | None = None
    chunked: bool = False
    taken: list[tuple[Tensor, Tensor, tuple[Step, ...], Tensor]] = field(default_factory=list)

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return hidden states in the dtype in which the head computes."""
        return hidden if self.dtype is None else hidden.to(self.dtype)

    def words(self, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of some words, in the dtype in which the head computes."""
        bias = None if self.bias is None else self.inputs(self.bias[first:last])
        return self.inputs(self.weight[first:last]), bias

    def slices(self, positions: int) -> Iterator[tuple[int, int]]:
        """Cut the vocabulary, for a number of positions."""
        limit = SLICE_OF_GPUS if self.weight.is_cuda else SLICE
        step = max(LEAST_SLICE, limit // max(1, positions))
        size = self.weight.shape[0]
        for first in range(0, size, step):
            yield first, min(size, first + step)


class DeferredLogits(Tensor):
    """Logits `(B, T, V)` without memory, see the module.

    Attributes:
        hidden: all hidden states, `(B, all positions, d)`, with their graph.
        first: the first position.
        head: makes logits of them.
        steps: what was done with them, in order.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    hidden: Tensor
    first: int
    head: LinearHead
    steps: tuple[Step, ...]

    @staticmethod
    def of(hidden: Tensor, head: LinearHead) -> "DeferredLogits":
        """Defer the logits of hidden states `(B, T, d)`."""
        return _deferred(hidden, 0, hidden.shape[1], head, (), head.dtype or hidden.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        found = None if rule is None else rule(*args, **(kwargs or {}))
        if found is None:
            raise NotDeferrableError(f"{func} is applied to the logits")
        return found


def _deferred(
    hidden: Tensor, first: int, positions: int, head: LinearHead, steps: tuple[Step, ...], dtype: torch.dtype
) -> DeferredLogits:
    shape = (hidden.shape[0], positions, head.weight.shape[0])
    made = Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=hidden.device)
    made.hidden, made.first, made.head, made.steps = hidden, first, head, steps
    return made


def _after(logits: DeferredLogits, step: Step | None, dtype: torch.dtype | None = None) -> DeferredLogits:
    steps = logits.steps if step is None else (*logits.steps, step)
    return _deferred(logits.hidden, logits.first, logits.shape[1], logits.head, steps, dtype or logits.dtype)


# -- what may be done with deferred logits: each returns `None` for arguments that it does not follow -----------------


def _binary(function: Callable[..., Tensor], swapped: bool) -> Callable[..., DeferredLogits | None]:
    def rule(left: Any, right: Any, **options: Any) -> DeferredLogits | None:
        if isinstance(left, DeferredLogits) == isinstance(right, DeferredLogits):
            return None
        logits, other = (left, right) if isinstance(left, DeferredLogits) else (right, left)
        if logits is right and not swapped:
            return None
        dtype = logits.dtype
        if isinstance(other, Tensor):
            if other.requires_grad or other.numel() not in (1, logits.shape[-1]) or other.ndim > logits.ndim:
                return None
            if other.numel() > 1 and other.shape[-1] != logits.shape[-1]:
                return None
            dtype = torch.result_type(torch.empty(1, 1, 1, dtype=dtype, device="meta"), other.to("meta"))
        elif not isinstance(other, int | float):
            return None

        return _after(logits, _Operation(function, other, options), dtype)

    return rule


class _Operation:
    """A step with a number or a tensor, equal to the same one that is made a second time."""

    def __init__(self, function: Callable[..., Tensor], other: Tensor | float, options: dict[str, Any]) -> None:
        self._function = function
        self._other = other
        self._options = options

    def __call__(self, z: Tensor, first: int, last: int) -> Tensor:
        value = self._other
        if isinstance(value, Tensor) and value.ndim:
            value = value.reshape(-1) if value.numel() == 1 else value.reshape(-1)[first:last]
        return self._function(z, value, **self._options)

    def _key(self) -> tuple[Any, ...]:
        other = self._other
        return self._function, id(other) if isinstance(other, Tensor) else other, sorted(self._options.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Operation) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._function)


@dataclass(frozen=True)
class _Cast:
    """A step that changes the dtype."""

    dtype: torch.dtype

    def __call__(self, z: Tensor, first: int, last: int) -> Tensor:
        return z.to(self.dtype)


def _tanh_step(z: Tensor, first: int, last: int) -> Tensor:
    return torch.tanh(z)


def _same(logits: DeferredLogits, **options: Any) -> DeferredLogits:
    return _after(logits, None)


def _copied(logits: DeferredLogits, **options: Any) -> DeferredLogits | None:
    dtype, device = options.get("dtype") or logits.dtype, options.get("device")
    if not dtype.is_floating_point or (device is not None and torch.device(device) != logits.device):
        return None
    return _after(logits, _Cast(dtype), dtype)


def _sliced(
    logits: DeferredLogits, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> DeferredLogits | None:
    first, last, step = slice(start, end, step).indices(logits.shape[dim])
    if (first, last, step) == (0, logits.shape[dim], 1):
        return _after(logits, None)
    if dim % logits.ndim != 1 or step != 1:
        return None
    positions = max(0, last - first)
    return _deferred(logits.hidden, logits.first + first, positions, logits.head, logits.steps, logits.dtype)


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., DeferredLogits | None]] = {
    _aten.mul.Tensor: _binary(torch.mul, True),
    _aten.div.Tensor: _binary(torch.div, False),
    _aten.add.Tensor: _binary(torch.add, True),
    _aten.sub.Tensor: _binary(torch.sub, False),
    _aten.tanh.default: lambda logits: _after(logits, _tanh_step),
    _aten._to_copy.default: _copied,
    **dict.fromkeys((_aten.clone.default, _aten.detach.default, _aten.alias.default), _same),
    _aten.slice.Tensor: _sliced,
}


# -- heads ------------------------------------------------------------------------------------------------------------


def output_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module that makes logits of hidden states, `None` where a model does not tell."""
    getter = getattr(unwrapped(model)[1], "get_output_embeddings", None)
    try:
        return None if getter is None else getter()
    except (AttributeError, NotImplementedError):
        return None


def deferrable_head(model: nn.Module) -> nn.Linear | None:
    """Find the head of a language model whose logits can be deferred, `None` if there is none.

    It is the output embedding, if that is a linear layer as torch has it: not one that is divided over processes,
    moved between devices, quantized, wrapped (LoRA), parametrized, or has hooks.
    """
    head = output_embedding(model)
    if type(head) is not nn.Linear or "forward" in vars(head) or parametrize.is_parametrized(head):
        return None
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return None
    weight: Tensor = head.weight
    plain = type(weight) in (Tensor, nn.Parameter) and not is_sharded_tensor(weight)
    return head if plain and weight.is_floating_point() and weight.device.type != "meta" else None


@contextmanager
def deferring(head: nn.Linear, share: float = 1.0, receive: ReceiveHead | None = None) -> Iterator[list[LinearHead]]:
    """Have a head return [`DeferredLogits`] where the logits of a batch take at least [`DEFERRED_FROM`].

    Args:
        head: see [`deferrable_head`].
        share: what part of the samples of the batch that this is about the head is called with.
        receive: see [`LinearHead`].

    Yields:
        The calls of the head that were deferred so far.
    """

    def made(dtype: torch.dtype | None) -> LinearHead:
        return LinearHead(head.weight.detach(), None if head.bias is None else head.bias.detach(), dtype, receive)

    limit = DEFERRED_FROM_OF_GPUS if head.weight.is_cuda else DEFERRED_FROM
    with _replaced(head, share, limit, made) as calls:
        yield calls


def in_chunks(model: nn.Module, compute: Callable[[], T]) -> T:
    """Call a function that takes margins of a model's logits by plain autograd, with bounded memory.

    Where the logits take at least [`CHUNKED_FROM`], their margins are computed for some positions at a time, by the
    formula that is used for whole logits, and once more in the backward pass.

    Args:
        model: the model.
        compute: calls model and task. It is called again, with whole logits, where these are needed.

    Returns:
        What it returned.
    """
    if (head := deferrable_head(model)) is None:
        return compute()

    def made(dtype: torch.dtype | None) -> LinearHead:
        return LinearHead(head.weight, head.bias, dtype, chunked=True)

    limit = CHUNKED_FROM_OF_GPUS if head.weight.is_cuda else CHUNKED_FROM
    try:
        with _replaced(head, 1.0, limit, made):
            return compute()
    except NotDeferrableError:
        return compute()


@contextmanager
def _replaced(
    head: nn.Linear, share: float, limit: int, made: Callable[[torch.dtype | None], LinearHead]
) -> Iterator[list[LinearHead]]:
    calls: list[LinearHead] = []

    def forward(hidden: Tensor) -> Tensor:
        weight, kind = head.weight, hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        fits = type(hidden) in (Tensor, nn.Parameter) and hidden.ndim == 3 and hidden.device == weight.device
        if not fits or (dtype is None and hidden.dtype != weight.dtype) or hidden.numel() == 0:
            return nn.Linear.forward(head, hidden)
        size = hidden.shape[0] * hidden.shape[1] * weight.shape[0] * (dtype or hidden.dtype).itemsize
        if round(size / share) < limit:
            return nn.Linear.forward(head, hidden)
        calls.append(made(dtype))
        return DeferredLogits.of(hidden, calls[-1])

    vars(head)["forward"] = forward
    try:
        yield calls
    finally:
        del vars(head)["forward"]
