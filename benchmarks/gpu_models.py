"""Six models as they are trained, and what a batch of each makes a GPU do, plain and featurized.

    python benchmarks/gpu_first_day.py        # runs this

The time of a batch that is featurized is bounded from below by a roofline: the operations of a plain step at 400
TFLOP/s, and the gradients of all rows, written once and read once, at 3.8 TB/s. Both rates are what an H200 reaches in
practice, about half of its peak for matrix products and 90 % of a copy. Weights, activations and gathered rows of
embeddings are left out.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from gpu_steps import Step, features, gpt2, ignore, resnet18, train_step
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.projectors import make_projector

Model = tuple[nn.Module, Tensor, Callable[..., Tensor]]
"""A model, the rows of a batch, and `output_fn(model output, batch) -> (B,)`."""

FLOPS, BYTES = 400e12, 3.8e12
"""Operations and bytes per second of the roofline."""


@dataclass(frozen=True)
class Counted:
    """What one batch costs.

    Attributes:
        seconds: median over the rounds.
        launches: kernels launched.
        waits: times that the host waits for the GPU.
        memory: bytes at the peak, above what was there before.
    """

    seconds: float
    launches: int
    waits: int
    memory: int


def next_token_loss(output: object, batch: tuple[Tensor]) -> Tensor:
    logits = output.logits[:, :-1].float()  # type: ignore[attr-defined]
    losses = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none")
    return losses.view(len(logits), -1).sum(1)


def margin(output: object, batch: tuple[Tensor]) -> Tensor:
    logits = output.logits.float()  # type: ignore[attr-defined]
    return logits.logsumexp(1) - logits[:, 0]


def vit() -> Model:
    """86M parameters, ViT-B/16."""
    model = ViTForImageClassification(ViTConfig(num_labels=1000))
    return model, torch.randn(32, 3, 224, 224), margin


def bert() -> Model:
    """110M parameters, 128 tokens."""
    return BertForSequenceClassification(BertConfig()), torch.randint(0, 30522, (64, 128)), margin


def llama() -> Model:
    """1.3B parameters, 512 tokens; heads are not shared, because torch 2.11 counts no operations of those that are."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        vocab_size=128_256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("cuda") if torch.cuda.is_available() else nullcontext():
        model = LlamaForCausalLM(config)
    return model, torch.randint(0, 128_256, (8, 512)), next_token_loss


def llama_lora() -> Model:
    """The same with adapters of rank 16 on all linear layers."""
    from peft import LoraConfig, get_peft_model

    model, data, output_fn = llama()
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")), data, output_fn


MODELS: dict[str, Callable[[], Model]] = {
    "ResNet-18, 224 px": resnet18,
    "ViT-B/16": vit,
    "BERT-base, 128 tokens": bert,
    "GPT-2, 512 tokens": gpt2,
    "Llama 1B, 512 tokens": llama,
    "Llama 1B LoRA, 512 tokens": llama_lora,
}


def steps_of(make: Callable[[], Model], k: int, device: torch.device) -> tuple[dict[str, Step], int, int, float]:
    """Make the steps of a model.

    Returns:
        the steps by name, B, P, and the operations of a plain step.
    """
    model, data, output_fn = make()
    model = model.to(device=device, dtype=torch.bfloat16).eval()
    batch = (data.to(device=device, dtype=torch.bfloat16) if data.is_floating_point() else data.to(device),)
    total = ParameterLayout.from_model(model).total
    computer = HookedGradientComputer(model, function_task(output_fn, model), None, None, device)
    projector = make_projector("sjlt", total, k, 0, device)
    plain = partial(train_step, model, batch, output_fn)
    with FlopCounterMode(display=False) as counter:
        plain()
    steps: dict[str, Step] = {
        "plain": plain,
        "gradients": partial(computer.stream, batch, ignore),
        "features": partial(features, computer, projector, batch, len(data), device),
    }
    return steps, len(data), total, float(counter.get_total_flops())


def counted(step: Step, rounds: int, device: torch.device) -> Counted:
    """Run a step again and again, and count what it does. The first two runs trace the model and choose kernels."""
    step(), step()
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    times = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() - before if cuda else 0
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        step()
        wait()
    launches = sum(event.count for event in profiled.key_averages() if is_launch(event.key))
    return Counted(statistics.median(times), launches, waits_of(step) if cuda else 0, memory)


def is_launch(name: str) -> bool:
    """Tell whether an event of the profiler is the launch of a kernel."""
    return "LaunchKernel" in name


def waits_of(step: Step) -> int:
    """Count how often a step has the host wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in found)


def table(k: int, rounds: int, device: torch.device) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure all models; prints a line for each.

    Yields:
        the name of a model, and its figures by name.
    """
    print(
        f"\n{'':28}{'rows/s':>9}{'plain ms':>10}{'grad. ×':>9}{'feat. ×':>9}{'roofline':>10}{'launches':>15}"
        f"{'waits':>9}{'GiB':>13}"
    )
    for name, make in MODELS.items():
        steps, size, total, operations = steps_of(make, k, device)
        found = {step: counted(run, rounds, device) for step, run in steps.items()}
        plain, gradients, whole = found["plain"], found["gradients"], found["features"]
        bound = operations / FLOPS + 2.0 * size * total * 2 / BYTES
        figures = {
            "rows per second": size / whole.seconds,
            "plain, seconds": plain.seconds,
            "gradients ÷ plain": gradients.seconds / plain.seconds,
            "features ÷ plain": whole.seconds / plain.seconds,
            "share of the roofline": bound / whole.seconds,
            "launches, plain": plain.launches,
            "launches, features": whole.launches,
            "waits, plain": plain.waits,
            "waits, features": whole.waits,
            "bytes, plain": plain.memory,
            "bytes, features": whole.memory,
        }
        print(
            f"{name:28}{figures['rows per second']:9.0f}{plain.seconds * 1e3:10.1f}"
            f"{figures['gradients ÷ plain']:9.2f}{figures['features ÷ plain']:9.2f}"
            f"{figures['share of the roofline']:10.0%}{f'{plain.launches} → {whole.launches}':>15}"
            f"{f'{plain.waits} → {whole.waits}':>9}{f'{plain.memory / 2**30:.1f} → {whole.memory / 2**30:.1f}':>13}",
            flush=True,
        )
        yield name, figures
        del steps, found
        if device.type == "cuda":
            torch.cuda.empty_cache()
