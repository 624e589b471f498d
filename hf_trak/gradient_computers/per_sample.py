"""`per_sample_gradients`: the engines without tasks, projections or stores."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.gradient_computers.auto import AutoGradientComputer, engines_of
from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, as_batch
from hf_trak.modelout_functions.function import FunctionModelOutput, OutputFn
from hf_trak.modelout_functions.registry import get_task

ModelInputs = tuple[tuple[Any, ...], dict[str, Any]]


def function_task(output_fn: OutputFn, model: torch.nn.Module) -> FunctionModelOutput:
    """Make a task of a function, with q ≡ 1, that gives the model those values of a batch that its `forward` takes.

    Args:
        output_fn: `output_fn(model_output, batch) -> (B,)`.
        model: the model.

    Returns:
        `FunctionModelOutput`: the task.

    Raises:
        TypeError: `output_fn` is not callable.
    """
    return FunctionModelOutput(output_fn, _ones, inputs_taken_by(model))


def inputs_taken_by(model: torch.nn.Module) -> Callable[[Batch], ModelInputs]:
    """Make the function that picks, out of a batch, the arguments that the model's `forward` takes.

    Of a mapping it takes the values by name, of a sequence as many as there are positional parameters.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = None if inspect.Parameter.VAR_KEYWORD in kinds else {p.name for p in parameters}
    unlimited = inspect.Parameter.VAR_POSITIONAL in kinds
    count = None if unlimited else sum(parameter.kind in positional for parameter in parameters)

    def taken(batch: Batch) -> ModelInputs:
        if isinstance(batch, Mapping):
            return (), {key: value for key, value in batch.items() if names is None or key in names}
        return tuple(batch)[:count], {}

    return taken


def _ones(model_output: Any, batch: Batch) -> Tensor:
    return torch.ones(SplitBatch.of(batch).size)


def _of_one_tensor(output_fn: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Give the function the tensor that a batch of one tensor consists of."""
    return lambda model_output, batch: output_fn(model_output, batch[0])


def per_sample_gradients(
    model: torch.nn.Module,
    batch: Batch | Tensor,
    output_fn: str | AbstractModelOutput | Callable[[Any, Any], Tensor],
    engine: str = "auto",
    grad_wrt: Iterable[str] | None = None,
    self_check: bool = True,
    max_block_bytes: int | None = None,
) -> dict[str, Tensor]:
    """Compute the gradient of one scalar with respect to the parameters, for every sample of a batch.

    Args:
        model (`torch.nn.Module`):
            The model, in the mode in which it is to be differentiated (usually `eval()`).
        batch (`Mapping[str, torch.Tensor]`, `Sequence[torch.Tensor]` or `torch.Tensor`):
            B samples, batch dimension first, also as a namedtuple or dataclass. The model gets, of a mapping or
            dataclass, those values that its `forward` takes by name; of a sequence, as many as its `forward` takes by
            position.
        output_fn (`Callable[[Any, Any], torch.Tensor]`, `str` or `AbstractModelOutput`):
            `output_fn(model_output, batch) -> (B,)`. Element i may depend on sample i alone. Or a task, or the name of
            one, such as `"causal_lm"`: gradients are those of its f.
        engine (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"hooked"`, `"functional"` or `"iterative"`.
        grad_wrt (`Iterable[str]`, *optional*):
            Names of the parameters. `None` takes those with `requires_grad`.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to compare two samples with plain autograd on each of them alone first.
        max_block_bytes (`int`, *optional*):
            Bytes of a block at which the hooked engine cuts large parameters into slices: what it holds beside the
            result. `None` is 32 MiB, and 256 MiB on a GPU.

    Returns:
        `dict[str, torch.Tensor]`: by parameter name in `named_parameters()` order, shape `(B, *parameter.shape)`, in
        the dtype and on the device of the parameter.

    Raises:
        ValueError: `output_fn` does not give one scalar per sample; an unknown task, engine or parameter name;
            `max_block_bytes` is not positive.
        TypeError: `output_fn` is neither a function nor a task.
        GradientEngineError: no engine, or not the one asked for, gives the gradients of each sample alone.
    """
    task: AbstractModelOutput
    if isinstance(output_fn, str | AbstractModelOutput):
        task = get_task(output_fn)
        task.bind(model)
    else:
        made = function_task(output_fn, model)
        if isinstance(batch, Tensor):
            made.output_fn = _of_one_tensor(output_fn)
        task = made
    given: Batch = (batch,) if isinstance(batch, Tensor) else as_batch(batch)
    computer = AutoGradientComputer(
        model, task, None, None, None, grad_wrt, engines_of(engine), self_check, max_block_bytes
    )
    size = SplitBatch.of(given).size
    parameters = dict(model.named_parameters())
    slots = computer.layout.slots
    gradients = {s.name: parameters[s.name].detach().new_zeros(size, s.numel) for s in slots}

    def sink(start: int, block: Tensor) -> None:
        for slot, low, high in computer.layout.overlaps(start, start + block.shape[1]):
            target = gradients[slot.name][:, low - slot.offset : high - slot.offset]
            target += block[:, low - start : high - start].to(target.device)

    computer.stream(given, sink)
    return {slot.name: gradients[slot.name].view(size, *slot.shape) for slot in slots}
