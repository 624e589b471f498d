"""What a batch of the models of `gpu_models.py` makes a GPU do, counted on a CPU: launches, waits, bytes, operations.

    python benchmarks/gpu_counts.py

Tensors have shapes and no numbers, so that models have their real sizes; token ids alone are drawn, since they decide
which blocks exist. A plain step (forward, backward) and featurizing are counted after a first batch, in bfloat16, by
the sparse map with k = 4,096. `tests/kit/device_counts.py` says what a launch is.

The roofline takes a launch for as long as its operations at 400 TFLOP/s or its bytes at 3.8 TB/s, whichever is longer:
what an H200 reaches in practice. Nothing stays in a cache, and kernels follow one another at once. The host takes 25
microseconds for each launch, the least that was measured on the virtual machine of `pages/gpu.md`, and Python beside
it is left out. A batch takes as long as the slower of the two.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from gpu_models import MODELS, Model
from gpu_steps import features, train_step
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.projectors import make_projector

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))
from device_counts import Counting, Counts, as_on_a_gpu

FLOPS, BYTES, SECONDS_PER_LAUNCH = 400e12, 3.8e12, 25e-6
"""Operations and bytes per second of an H200, and what a launch takes the host."""

K = 4096


@dataclass(frozen=True)
class Counted:
    """What one batch costs, plain and featurized.

    Attributes:
        size: B.
        layers: number of layers with attributed parameters.
        gradients: bytes of the gradients of all rows.
        plain: counts of a plain step.
        featurized: counts of featurizing.
    """

    size: int
    layers: int
    gradients: int
    plain: Counts
    featurized: Counts


def gpu_seconds(counts: Counts) -> float:
    """Bound the time on the GPU from below by the roofline of every launch."""
    return sum(max(size / BYTES, flops / FLOPS) for size, flops in counts.work)


def moved(counts: Counts) -> int:
    """Count the bytes that are read and written."""
    return counts.read.total() + counts.written.total()


def host_seconds(counts: Counts) -> float:
    """Bound the time on the host from below by its launches."""
    return counts.launches.total() * SECONDS_PER_LAUNCH


def counted(make: Callable[[], Model]) -> Counted:
    """Count what a batch of a model costs."""
    with torch.device("meta"):
        model, data, output_fn = make()
    model = model.to(torch.bfloat16).eval()
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 1)
    ids = np.random.default_rng(0).integers(0, vocabulary, data.shape)
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(FakeTensor, "data_ptr", lambda tensor: 1):
        model.to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.tie_weights()  # new memory came untied
        rows = torch.empty(data.shape, dtype=torch.bfloat16 if data.is_floating_point() else data.dtype)

        def values(tensor: Tensor) -> np.ndarray:
            """Give the ids of a batch; other tables (types of tokens, positions) are looked up at the first row."""
            of_batch = tensor.untyped_storage()._cdata == rows.untyped_storage()._cdata
            return ids if of_batch else np.zeros(tensor.shape, dtype=np.int64)

        total = ParameterLayout.from_model(model).total
        computer = HookedGradientComputer(model, function_task(output_fn, model), None, None, None)
        projector = make_projector("sjlt", total, K, 0, "cpu")
        plain = counts_of(partial(train_step, model, (rows,), output_fn), values)
        step = partial(features, computer, projector, (rows,), len(rows), torch.device("cpu"))
        return Counted(len(rows), layers(model), 2 * len(rows) * total, plain, counts_of(step, values))


def counts_of(step: Callable[[], object], values: Callable[[Tensor], np.ndarray]) -> Counts:
    """Count a step after one that traces the model."""
    with as_on_a_gpu(Counting(), values):
        step()
    counting = Counting()
    with as_on_a_gpu(counting, values), counting:
        step()
    return counting.total


def layers(model: nn.Module) -> int:
    """Count the layers with attributed parameters of their own."""
    return sum(any(p.requires_grad for p in module.parameters(recurse=False)) for module in model.modules())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--operators", action="store_true", help="print what is launched, too")
    args = parser.parse_args()
    print(
        "| | B | launches | more per layer | waits | TFLOP | GB | gradients, GB | GPU, ms | host, ms | rows/s |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in args.models:
        found = counted(MODELS[name])
        plain, ours = found.plain, found.featurized
        launches, before = ours.launches.total(), plain.launches.total()
        gpu, host = gpu_seconds(ours), host_seconds(ours)
        print(
            f"| {name} | {found.size} | {before} → {launches} | {(launches - before) / found.layers:.1f} "
            f"| {plain.waits.total()} → {ours.waits.total()} | {plain.flops / 1e12:.1f} → {ours.flops / 1e12:.1f} "
            f"| {moved(plain) / 1e9:.0f} → {moved(ours) / 1e9:.0f} | {found.gradients / 1e9:.1f} "
            f"| {gpu_seconds(plain) * 1e3:.0f} → {gpu * 1e3:.0f} "
            f"| {host_seconds(plain) * 1e3:.0f} → {host * 1e3:.0f} | {found.size / max(gpu, host):.0f} |",
            flush=True,
        )
        if args.operators:
            for operator, count in (ours.launches - plain.launches).most_common():
                print(f"    {operator}: {count}")


if __name__ == "__main__":
    main()
