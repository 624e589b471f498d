"""Counts what a batch makes a GPU do that featurizes it, without a GPU.

A plain step (forward, backward) is counted on tensors that have shapes and no numbers, with weights in bfloat16.
Featurizing adds launches for each attributed parameter, and the gradients of all rows, written once and read once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hf_trak.errors import HfTrakError
from hf_trak.featurize.estimation import weights_of
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.roofline import DeviceName, Roofline
from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.gradient_computers.hooked.workspace import default_block_bytes
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, call_model
from hf_trak.modelout_functions.batches import evaluating
from hf_trak.runtime.counting import Counting, Counts

LAUNCHES_PER_BLOCK = 2
"""Launches for the gradients of a parameter, or of the part that fits a block, and for their projection. The sums of
parts, which come on top, are about as many as the plain step's own gradients, which featurizing saves."""


def roofline(features: FeaturizedModel, device: DeviceName) -> Roofline:
    """Bound the rows per second of a model on a GPU, by its batch of the middle length in the first shard.

    Args:
        features: the model, its task and its training rows.
        device: the GPU.

    Raises:
        HfTrakError: the task takes no batches, or the model or the task looks at numbers, which are not there.
    """
    batches = features.row_batches(features.train_dataset, "train")
    cuts = batches.cuts(range(min(features.train_size, features.args.shard_size)), features.args.batch_size)
    rows, batch = next(batches.iterate([cuts[len(cuts) // 2]]))
    features.task.bind(features.model)
    return Roofline.of(featurizing_counts(features.model, features.task, batch, features.layout), len(rows), device)


def featurizing_counts(model: nn.Module, task: AbstractModelOutput, batch: Batch, layout: ParameterLayout) -> Counts:
    """Count what a batch makes a GPU do that featurizes it by the sparse map.

    Gradients of layers of 1 to 8 tokens, which are never formed, count like all others.

    Args:
        model: the model.
        task: the model output function.
        batch: B samples.
        layout: the attributed parameters.

    Raises:
        HfTrakError: the task takes no batches, or the model or the task looks at numbers, which are not there.
    """
    if not isinstance(task, BatchedModelOutput):
        raise HfTrakError(
            f"The task is a {type(task).__name__}, which takes rows one by one. Expected one that takes batches, to "
            "count what a batch costs. Use `measure` on the GPU itself."
        )
    split, names = SplitBatch.of(batch), {slot.name for slot in layout.slots}
    given = split.rebuild({key: _in_16_bits(value) for key, value in split.mapped.items()})
    counting = Counting()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), evaluating(model), pass_settings(model):
            values = {name: _in_16_bits(torch.empty(one.shape, dtype=one.dtype)) for name, one in _tensors(model)}
            attributed = [values[name].requires_grad_() for name in names]
            with torch.enable_grad(), counting:
                output = call_model(model, values, None, *task.model_inputs(given))
                torch.autograd.grad(task.output(output, given).sum(), attributed, allow_unused=True)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise HfTrakError(
            f"The model or the task looks at numbers of a batch ({error}), and what it costs is counted without any. "
            "Expected code that depends on sizes alone. Use `measure` on the GPU itself."
        ) from error
    counts = counting.total
    looked_up = weights_of(model, nn.Embedding) - weights_of(model, nn.Linear)
    positions = max(value[0].numel() for value in split.mapped.values())
    numels = [positions * one.shape[-1] if one.name in looked_up else one.numel for one in layout.slots]
    sizes = [2 * split.size * min(numel, one.numel) for numel, one in zip(numels, layout.slots, strict=True)]
    blocks = sum(-(-size // default_block_bytes(torch.device("cuda"))) for size in sizes)
    counts.launches["gradients and projections"] = LAUNCHES_PER_BLOCK * blocks
    counts.work.append((2 * sum(sizes), 0))
    return counts


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _in_16_bits(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
