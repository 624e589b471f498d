"""`FunctionModelOutput`: a plain function as a task."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_trak.identity.function_identity import function_identity, identity_of
from hf_trak.identity.own_code import assigned_by, assigned_in_init, is_own_class, name_of
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.batches import inputs_of, size_of

OutputFn = Callable[[Any, Batch], Tensor]

"""A function `(model_output, batch) -> (B,)`. Element i of its result depends on sample i alone."""


class FunctionModelOutput(BatchedModelOutput):
    """A task made of one function, or two."""

    def __init__(
        self,
        output_fn: OutputFn,
        out_to_loss_fn: OutputFn | None = None,
        model_inputs_fn: Callable[[Batch], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
    ) -> None:
        """
        Args:
            output_fn (`Callable`):
                `(model_output, batch) -> (B,)`, f of every sample, differentiable.
            out_to_loss_fn (`Callable`, *optional*):
                `(model_output, batch) -> (B,)`, q of every sample. `None` takes q ≡ 1: scores then rank by the change
                of f alone.
            model_inputs_fn (`Callable`, *optional*):
                `batch -> (args, kwargs)`, the arguments that the model is called with. `None` passes a mapping by name
                without `labels` and `label`, and a sequence by position without its last element, the labels.

        Raises:
            TypeError: an argument is not callable, or not with two arguments.
        """
        super().__init__()
        for name, function in (("output_fn", output_fn), ("out_to_loss_fn", out_to_loss_fn)):
            if not _takes_two(function) and not (function is None and name != "output_fn"):
                raise TypeError(f"`{name}` is {function!r}. Expected a function (model_output, batch) -> tensor (B,).")
        self.output_fn = output_fn
        self.out_to_loss_fn = out_to_loss_fn
        self.model_inputs_fn = model_inputs_fn

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.model_inputs_fn or inputs_of)(batch)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return one_per_sample(self.output_fn(model_output, batch), size_of(batch), "`output_fn`")

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if self.out_to_loss_fn is None:
            with torch.no_grad():
                return torch.ones_like(self.output(model_output, batch, side))
        return one_per_sample(self.out_to_loss_fn(model_output, batch), size_of(batch), "`out_to_loss_fn`").detach()


def _takes_two(function: Any) -> bool:
    """Tell whether something can be called with two arguments, as far as that is seen before."""
    if not inspect.isfunction(function):
        return callable(function)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def one_per_sample(values: Any, size: int | None, who: str) -> Tensor:
    """Check that there is one value per sample.

    Args:
        values: what a task, or a user's function, returned.
        size: samples in the batch that it was called with: one, where an engine takes them one at a time. `None` if
            that is not known.
        who: the subject of the error message.

    Returns:
        `torch.Tensor`: `values`.

    Raises:
        ValueError: it has another shape than `(size,)`, or is no tensor.
    """
    if not isinstance(values, Tensor) or values.ndim != 1 or (size is not None and values.shape[0] != size):
        given = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
        samples = "a batch" if size is None else f"a batch of {size} samples"
        single = "one sample (engines may take those of a batch one at a time)"
        raise ValueError(
            f"{who} returned {given[:200]} for {single if size == 1 else samples}. Expected a tensor of shape "
            f"({'B' if size is None else size},), one scalar per sample: of several outputs choose one for each, as "
            "`logits.gather(1, labels[:, None]).squeeze(1)` does, or add them up. Do not take a mean or a sum over "
            "the batch: use `reduction='none'`."
        )
    return values


_ON_BATCHES = frozenset(
    {"bind", "prepare", "restore", "references", "reference_rows", "collator", "model_inputs", "output"}
    | {"out_to_loss_grad", "get_output", "get_out_to_loss_grad"}
)

"""Methods that are called between construction and the last batch: what they assign is state, not a setting."""


def task_identity(task: AbstractModelOutput, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Describe class and settings of a task as plain JSON: two tasks of the same identity define the same f and q.

    Settings are the public attributes, and for a user's own class also the private ones that its `__init__` assigns.
    Attributes that the task assigns when it is bound to a model or given a batch are left out. Numbers, texts,
    sequences and mappings are described by their values, tasks by their own identity, and anything else (functions,
    tensors, …) by [`~hf_trak.identity.function_identity.function_identity`], with everything that a user's function
    refers to. A user's class has its `code`, too. Compare identities with
    [`~hf_trak.identity.function_identity.same_function`], because bytecode differs between versions of Python.

    Args:
        task: any task.
        model: the attributed model, whose weights are no part of the task even if a function refers to them.

    Returns:
        `{"class": "module.Class", "settings": {…}}`, and `"code"` for a class of a user.
    """
    cls: Any = type(task)
    settings = {
        name: _setting(value, model) for name, value in sorted(vars(task).items()) if _is_setting_name(cls, name)
    }
    identity = {"class": name_of(cls), "settings": settings}
    return {**identity, "code": function_identity(cls, model)} if is_own_class(cls) else identity


def _is_setting_name(cls: Any, name: str) -> bool:
    if not is_own_class(cls):
        return not name.startswith("_")
    return (not name.startswith("_") or name in assigned_in_init(cls)) and name not in assigned_by(cls, _ON_BATCHES)


def _setting(value: Any, model: torch.nn.Module | None) -> Any:
    if isinstance(value, AbstractModelOutput):
        return task_identity(value, model)
    if type(value) in (list, tuple):
        return [_setting(item, model) for item in value]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _setting(item, model) for key, item in value.items()}
    return identity_of(value, model)
