"""What a batch of the models of `gpu_models.py` makes a GPU do, counted on a CPU: launches, waits, bytes, operations.

    python benchmarks/gpu_counts.py
    python benchmarks/gpu_counts.py --roofline

Tensors have shapes and no numbers, so that models have their real sizes; token ids alone are drawn, since they decide
which blocks exist. A plain step (forward, backward) and featurizing are counted after a first batch, in bfloat16, by
the sparse map with k = 4,096. `tests/kit/device_counts.py` says what a launch is.

The roofline takes a launch for as long as its operations at 400 TFLOP/s or its bytes at 3.8 TB/s, whichever is longer:
what an H200 reaches in practice. Nothing stays in a cache, and kernels follow one another at once. The host takes 25
microseconds for each launch, the least that was measured on the virtual machine of `pages/gpu.md`, and Python beside
it is left out. A batch takes as long as the slower of the two.

`--roofline` takes language models of three sizes at three lengths, batches of as many tokens as the page has, and says
what bounds each: the host, or on the GPU the launches that are bound by operations or those that are bound by bytes,
whichever take longer together. Its last column is what `hf-trak estimate --device h200` says, which counts the plain
step alone and adds the gradients by their sizes.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from gpu_models import MODELS, Model, next_token_loss
from gpu_steps import features, train_step
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_trak.featurize.batch_counts import featurizing_counts
from hf_trak.featurize.roofline import Roofline
from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.projectors import make_projector
from hf_trak.runtime.counting import Counting, Counts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))
from device_counts import as_on_a_gpu

K = 4096

LENGTHS = (128, 512, 1024)

_LLAMA = {"vocab_size": 128_256, "use_cache": False}
ROOFLINE: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig, int]] = {
    "GPT-2": (GPT2LMHeadModel, GPT2Config(use_cache=False), 8192),
    "Llama 1B": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            tie_word_embeddings=True,
            **_LLAMA,
        ),
        4096,
    ),
    "Llama 8B": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            **_LLAMA,
        ),
        4096,
    ),
}
"""Language models by name: class, configuration, and the tokens of a batch."""


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


def moved(counts: Counts) -> int:
    """Count the bytes that are read and written."""
    return counts.read.total() + counts.written.total()


def bound(counts: Counts, size: int) -> Roofline:
    """Bound the time of a batch of some rows on an H200."""
    return Roofline.of(counts, size, "h200")


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


def print_roofline(names: Iterable[str]) -> None:
    """Print rows per second, and what bounds them, of language models at several lengths."""
    print(
        "| | tokens | B | parameters | launches | TFLOP | GB | host, ms | memory, ms | arithmetic, ms | ÷ plain "
        "| bound by | rows/s | `estimate` |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in names:
        for length in LENGTHS:
            made = partial(language_model, name, length)
            found = counted(made)
            ours, plain = bound(found.featurized, found.size), bound(found.plain, found.size)
            print(
                f"| {name} | {length:,} | {found.size} | {found.gradients / 2e9 / found.size:.2f}B "
                f"| {ours.launches:,} | {found.featurized.flops / 1e12:.1f} | {moved(found.featurized) / 1e9:,.0f} "
                f"| {ours.host * 1e3:.0f} | {ours.memory * 1e3:.0f} | {ours.arithmetic * 1e3:.0f} "
                f"| {plain.rows_per_second / ours.rows_per_second:.2f} | {ours.bound} | {ours.rows_per_second:,.0f} "
                f"| {estimated(made).rows_per_second:,.0f} |",
                flush=True,
            )


def language_model(name: str, length: int) -> Model:
    """Make a model of the roofline and a batch of rows of some tokens."""
    kind, config, tokens = ROOFLINE[name]
    return kind(config), torch.empty(tokens // length, length, dtype=torch.int64), next_token_loss


def estimated(make: Callable[[], Model]) -> Roofline:
    """Bound the time of a batch as `estimate` does, from a plain step and the sizes of the gradients."""
    with torch.device("meta"):
        model, data, output_fn = make()
    batch = torch.zeros(data.shape, dtype=data.dtype)
    layout = ParameterLayout.from_model(model)
    return bound(featurizing_counts(model.eval(), function_task(output_fn, model), (batch,), layout), len(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--operators", action="store_true", help="print what is launched, too")
    parser.add_argument("--roofline", nargs="*", choices=list(ROOFLINE), metavar="NAME", help="language models")
    args = parser.parse_args()
    if args.roofline is not None:
        print_roofline(args.roofline or ROOFLINE)
        return
    print(
        "| | B | launches | more per layer | waits | TFLOP | GB | gradients, GB | GPU, ms | host, ms | rows/s |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in args.models:
        found = counted(MODELS[name])
        plain, ours = found.plain, found.featurized
        launches, before = ours.launches.total(), plain.launches.total()
        before_it, with_it = bound(plain, found.size), bound(ours, found.size)
        print(
            f"| {name} | {found.size} | {before} → {launches} | {(launches - before) / found.layers:.1f} "
            f"| {plain.waits.total()} → {ours.waits.total()} | {plain.flops / 1e12:.1f} → {ours.flops / 1e12:.1f} "
            f"| {moved(plain) / 1e9:.0f} → {moved(ours) / 1e9:.0f} | {found.gradients / 1e9:.1f} "
            f"| {before_it.gpu * 1e3:.0f} → {with_it.gpu * 1e3:.0f} "
            f"| {before_it.host * 1e3:.0f} → {with_it.host * 1e3:.0f} | {with_it.rows_per_second:.0f} |",
            flush=True,
        )
        if args.operators:
            for operator, count in (ours.launches - plain.launches).most_common():
                print(f"    {operator}: {count}")


if __name__ == "__main__":
    main()
