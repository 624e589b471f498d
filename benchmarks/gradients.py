"""Costs of per-sample gradients: the hooked engine against a plain training step and against vmap of the whole model.

    python benchmarks/gradients.py
    python benchmarks/gradients.py --models vit-197 --threads 2 --repeats 5

Everything that is compared runs interleaved in one process, one process per model; printed are the medians, and their
ratios. The consumer of the blocks looks at one number per block, so that what is measured is the gradients. Peak
memory is measured per engine in a process of its own, above what the model and the batch take.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_trak.gradient_computers import FunctionalGradientComputer, HookedGradientComputer
from hf_trak.gradient_computers.per_sample import function_task


def gpt2() -> tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]:
    """6 layers, width 384, T = 128, B = 16."""
    config = transformers.GPT2Config(
        n_layer=6, n_embd=384, n_head=6, n_positions=128, vocab_size=8192, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, config.vocab_size, (16, 128))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(result: Any, batch: Any) -> Tensor:
        logits, labels = result.logits[:, :-1], batch["input_ids"][:, 1:]
        picked = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return picked.view(labels.shape).sum(1)

    return transformers.GPT2LMHeadModel(config), batch, loss


def vit(size: int) -> tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]:
    """6 layers, width 384, (size / 8)² patches and a class token, B = 16."""
    config = transformers.ViTConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=size,
        patch_size=8,
        num_labels=10,
    )
    batch = {"pixel_values": torch.randn(16, 3, size, size)}
    return transformers.ViTForImageClassification(config), batch, margin


def resnet(size: int) -> tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]:
    """ResNet-18 on square images, B = 16."""
    config = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    batch = {"pixel_values": torch.randn(16, 3, size, size)}
    return transformers.ResNetForImageClassification(config), batch, margin


def margin(result: Any, batch: Any) -> Tensor:
    """The margin of class 0."""
    return result.logits[:, 0] - result.logits[:, 1:].logsumexp(1)


Case = Callable[[], tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]]
MODELS: dict[str, Case] = {
    "gpt2": gpt2,
    "vit-65": partial(vit, 64),
    "vit-197": partial(vit, 112),
    "resnet-64": partial(resnet, 64),
    "resnet-128": partial(resnet, 128),
    "resnet-224": partial(resnet, 224),
}
"""The number is that of tokens, or of pixels along a side: the less work a weight is used for, the more its
per-sample gradient weighs."""
ENGINES = ("plain", "hooked", "vmap")


def step_of(
    engine: str, model: nn.Module, batch: dict[str, Tensor], output_fn: Callable[..., Tensor]
) -> Callable[[], None]:
    """One unit of work: all gradients of one batch."""
    task = function_task(output_fn, model)

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        output_fn(model(**batch), batch).sum().backward()

    def consume(start: int, block: Tensor) -> None:
        consumed.append(float(block[0, 0]))

    consumed: list[float] = []
    if engine == "plain":
        return plain
    computer_type = HookedGradientComputer if engine == "hooked" else FunctionalGradientComputer
    computer = computer_type(model, task, None, None, None)

    def per_sample() -> None:
        consumed.clear()
        computer.stream(batch, consume)

    return per_sample


def timed(name: str, repeats: int) -> dict[str, float]:
    """Median seconds of every engine."""
    torch.manual_seed(0)
    model, batch, output_fn = MODELS[name]()
    model.eval()
    steps = {engine: step_of(engine, model, batch, output_fn) for engine in ENGINES}
    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for engine, step in steps.items():
            model.zero_grad(set_to_none=True)
            begun = time.perf_counter()
            step()
            seconds[engine].append(time.perf_counter() - begun)
    return {engine: statistics.median(values) for engine, values in seconds.items()}


def peak(name: str, engine: str) -> float:
    """Peak resident MiB of a step, above what was resident before it. Meant for a fresh process."""
    torch.manual_seed(0)
    model, batch, output_fn = MODELS[name]()
    model.eval()
    step = step_of(engine, model, batch, output_fn)
    with torch.no_grad():
        model(**{key: value[:1] for key, value in batch.items()})  # libraries allocate on first use
    before = high_water()
    step()
    step()
    return (high_water() - before) / 1024


def high_water() -> int:
    """Peak resident KiB of this process. (`getrusage` would count what the parent process had before the fork.)"""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def in_own_process(*arguments: str) -> Any:
    """Run this script with other arguments in a process of its own, and return what it prints."""
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "ENGINE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(json.dumps(peak(*arguments.peak)))
        return
    if arguments.time:
        print(json.dumps(timed(arguments.time, arguments.repeats)))
        return
    options = ["--threads", str(arguments.threads), "--repeats", str(arguments.repeats)]
    print("| model | plain fwd+bwd | hooked ÷ plain | hooked ÷ vmap | peak plain | hooked | vmap | hooked ÷ plain |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.models:
        seconds = in_own_process(*options, "--time", name)
        memory = {engine: in_own_process(*options, "--peak", name, engine) for engine in ENGINES}
        print(
            f"| {name} | {seconds['plain'] * 1e3:.0f} ms | {seconds['hooked'] / seconds['plain']:.2f} "
            f"| {seconds['hooked'] / seconds['vmap']:.2f} | {memory['plain']:.0f} MiB | {memory['hooked']:.0f} MiB "
            f"| {memory['vmap']:.0f} MiB | {memory['hooked'] / memory['plain']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
