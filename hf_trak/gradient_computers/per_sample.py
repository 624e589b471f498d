"""`per_sample_gradients`: the engines without tasks, projections or stores."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trak.gradient_computers.auto import AutoGradientComputer, engines_of
from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side

OutputFn = Callable[[Any, Any], Tensor]


class FunctionOutput(BatchedModelOutput):
    """A function `output_fn(model_output, batch) -> (B,)` as a task; the output-to-loss gradient is 1."""

    def __init__(self, output_fn: OutputFn, model: torch.nn.Module, is_tensor: bool = False) -> None:
        """
        Args:
            output_fn: gives one scalar per sample.
            model: its `forward` decides which values of the batch are handed to it.
            is_tensor: whether the function expects a single tensor rather than a tuple of one.
        """
        self.output_fn = output_fn
        self.is_tensor = is_tensor
        parameters = list(inspect.signature(model.forward).parameters.values())
        kinds = {parameter.kind for parameter in parameters}
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = None if inspect.Parameter.VAR_KEYWORD in kinds else {p.name for p in parameters}
        self._count = (
            None
            if inspect.Parameter.VAR_POSITIONAL in kinds
            else sum(parameter.kind in positional for parameter in parameters)
        )

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, Mapping):
            return (), {key: value for key, value in batch.items() if self._names is None or key in self._names}
        return tuple(batch)[: self._count], {}

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return self.output_fn(model_output, batch[0] if self.is_tensor else batch)  # type: ignore[index]

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return torch.ones(SplitBatch.of(batch).size)


def per_sample_gradients(
    model: torch.nn.Module,
    batch: Batch | Tensor,
    output_fn: OutputFn,
    engine: str = "auto",
    grad_wrt: Iterable[str] | None = None,
    self_check: bool = True,
    max_block_bytes: int | None = None,
) -> dict[str, Tensor]:
    """The gradient of one scalar per sample with respect to the parameters, for every sample of a batch.

    Args:
        model: the model, in the mode in which it is to be differentiated (usually `eval()`).
        batch: a mapping, handed to the model as those keyword arguments that its `forward` takes; a sequence of
            tensors, of which the model gets as many as its `forward` takes; or one tensor. Batch dimension first.
        output_fn: `output_fn(model_output, batch) -> (B,)`; element i may depend on sample i alone.
        engine: `"auto"`, or the name of an engine.
        grad_wrt: names of the parameters; `None` takes those with `requires_grad`.
        self_check: whether to compare two samples with plain autograd on each of them alone first.
        max_block_bytes: bytes of a block at which the hooked engine cuts large parameters into slices: what it holds
            beside the result.

    Returns:
        `dict[str, torch.Tensor]`: by parameter name in `named_parameters()` order, shape `(B, *parameter.shape)`, in
        the dtype and on the device of the parameter.

    Raises:
        ValueError: `output_fn` does not give one scalar per sample; an unknown engine or parameter name;
            `max_block_bytes` is not positive.
        GradientEngineError: no engine, or not the one asked for, gives the gradients of each sample alone.
    """
    is_tensor = isinstance(batch, Tensor)
    given: Batch = (batch,) if isinstance(batch, Tensor) else batch
    task = FunctionOutput(output_fn, model, is_tensor)
    computer = AutoGradientComputer(
        model, task, None, None, None, grad_wrt, engines_of(engine), self_check, max_block_bytes
    )
    size = SplitBatch.of(given).size
    parameters = dict(model.named_parameters())
    slots = computer.layout.slots
    gradients = {s.name: parameters[s.name].detach().new_zeros(size, s.numel) for s in slots}

    def sink(start: int, block: Tensor) -> None:
        stop = start + block.shape[1]
        for slot in slots:
            low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if low < high:
                target = gradients[slot.name][:, low - slot.offset : high - slot.offset]
                target += block[:, low - start : high - start].to(target.device)

    computer.stream(given, sink)
    return {slot.name: gradients[slot.name].view(size, *slot.shape) for slot in slots}
