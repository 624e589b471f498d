"""Calls of a model whose answers are known, for losses of trainers: stand-ins for the model and for its outputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class Called(BaseException):
    """Ends `compute_loss` at its first call of the model. No `except Exception` of a trainer catches it."""

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.named = inputs, named


SUBSTITUTED: ContextVar[Mapping[str, Tensor] | None] = ContextVar("SUBSTITUTED", default=None)
"""Weights that stand in the place of the model's, by name, while a loss is computed."""


class WithWeights(torch.nn.Module):
    """Computes a loss with other weights in the model, however often it is called."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[torch.nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self) -> Tensor:
        """Compute the loss."""
        return self.loss(self.model)

    def by(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss by these weights, with derivatives by them."""
        return torch.func.functional_call(self, {f"model.{name}": one for name, one in weights.items()}, ())


class WholeBatchError(Exception):
    """The loss of a row needs more than the row of one output of the model."""


class Answering:
    """Stands for the model in all but its forward pass."""

    def __init__(self, model: torch.nn.Module | None, call: Callable[..., Any]) -> None:
        self._of, self.forward = model, call

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # trainers ask for the class of the model
        return type(self._of)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"], name)


class OfTheBatch:
    """Stands for a number that the model returned for the whole batch, such as a loss: no row has one."""

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise WholeBatchError

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise WholeBatchError

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused
    __neg__ = __pow__ = __getattr__ = __getitem__ = __iter__ = __float__ = __bool__ = _refused


def divided(model_output: Any, size: int) -> list[Any]:
    """Divide what a model returned for a batch into rows of one.

    Args:
        model_output: what it returned.
        size: the number of rows.
    """
    pieces: dict[int, Sequence[Tensor]] = {}

    def row(value: Any, place: int) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: each(getattr(value, f.name), place) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 0 or value.shape[0] != size:
            return OfTheBatch()
        # the gradients of `split` are joined once, those of slices are added up in a tensor of zeros each
        return pieces.setdefault(id(value), value.split(1))[place]

    def each(value: Any, place: int) -> Any:
        return tree_map(lambda one: row(one, place), value)

    return [each(model_output, place) for place in range(size)]


class WeightsSeen(TorchFunctionMode):
    """Adds up weights and numbers of the labels of each cross-entropy with weights of classes, in `sums`, by call."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[tuple[float, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (given := _weighted(func, args, kwargs)) is not None:
            target = given["target"]
            labels = target[target != given.get("ignore_index", -100)]
            self.sums.append((float(given["weight"][labels].double().sum()), len(labels)))
        return func(*args, **kwargs)


class WeightsKept(TorchFunctionMode):
    """Divides a cross-entropy with weights of classes by the number of labels and the mean weight that a batch had.

    Divided by the sum of its own weights, the loss of one row would have none of them.
    """

    def __init__(self, means: Sequence[float]) -> None:
        """
        Args:
            means: mean weights of labels in the order of the calls. Those of further calls are 1.
        """
        super().__init__()
        self._means = iter(means)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (given := _weighted(func, args, kwargs)) is not None:
            labels = (given["target"] != given.get("ignore_index", -100)).sum().clamp(min=1)
            return func(**{**given, "reduction": "sum"}) / (labels * next(self._means, 1.0))
        return func(*args, **kwargs)


def _weighted(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a mean cross-entropy that is divided by weights of classes; `None` of another call."""
    if func not in (functional.cross_entropy, functional.nll_loss):
        return None
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mean = given.get("reduction", "mean") == "mean"
    # a mean over probabilities of classes is divided by their number anyway
    return given if mean and given.get("weight") is not None and not given["target"].is_floating_point() else None


def leaf(value: Any, size: int) -> Any:
    """Return a tensor with a gradient of its own where it has rows of numbers, and everything else as it is.

    Args:
        value: a part of what a model returned.
        size: the number of rows.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim and value.shape[0] == size:
        return value.detach().requires_grad_()
    return value
