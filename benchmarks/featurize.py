"""Costs of features: hooked gradients and the sparse projection to k = 4096, against a plain training step.

    python benchmarks/featurize.py
    python benchmarks/featurize.py --busy 1
    python benchmarks/featurize.py --models resnet-64 resnet-128 --threads 1 --processor --batch-sizes

The models are those of gradients.py. Steps are interleaved in one process; printed are medians and their ratios. With
`--busy N` everything is measured a second time beside N other processes that compute without a pause.
Peak memory is measured for three batch sizes, each in a process of its own, beside what a plain step of that batch
takes: it must not grow with B × P.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from busy import competing
from gradients import MODELS, high_water, step_of
from torch import Tensor, nn

from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.projectors import make_projector


def featurize_step(
    model: nn.Module, batch: dict[str, Tensor], output_fn: Callable[..., Tensor], projection: str, k: int
) -> Callable[[], None]:
    """Gradients of one batch, projected: what `TrakAttributor.featurize` does for it, without writing."""
    layout = ParameterLayout.from_model(model)
    projector = make_projector(projection, grad_dim=layout.total, proj_dim=k, seed=0, device="cpu")  # type: ignore[arg-type]
    computer = HookedGradientComputer(model, function_task(output_fn, model), None, None, None)

    def step() -> None:
        sink = projector.sink(len(next(iter(batch.values()))), 0, "cpu")
        computer.stream(batch, sink)
        sink.result()

    return step


def resized(batch: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """The batch repeated or cut to `size` samples."""
    return {name: value[torch.arange(size) % len(value)] for name, value in batch.items()}


def timed(
    name: str, k: int, repeats: int, busy: tuple[int, ...], clock: Callable[[], float]
) -> tuple[int, list[dict[str, list[float]]]]:
    """P, and seconds of every repetition of every step, beside each number of competing processes."""
    torch.manual_seed(0)
    model, batch, output_fn = MODELS[name]()
    model.eval()
    steps = {
        "plain": step_of("plain", model, batch, output_fn),
        "hooked": step_of("hooked", model, batch, output_fn),
        "sjlt": featurize_step(model, batch, output_fn, "sjlt", k),
    }
    for step in steps.values():
        step()
        step()
    measured = []
    for processes in busy:
        seconds: dict[str, list[float]] = {key: [] for key in steps}
        with competing(processes):
            for _ in range(repeats):
                for key, step in steps.items():
                    begun = clock()
                    step()
                    seconds[key].append(clock() - begun)
                    model.zero_grad(set_to_none=True)
        measured.append(seconds)
    return sum(parameter.numel() for parameter in model.parameters()), measured


def peak(name: str, kind: str, size: int, k: int) -> float:
    """Peak resident MiB of a step above what was resident before it. Meant for a fresh process."""
    torch.manual_seed(0)
    model, batch, output_fn = MODELS[name]()
    model.eval()
    batch = resized(batch, size)
    if kind == "plain":
        step = step_of("plain", model, batch, output_fn)
    else:
        step = featurize_step(model, batch, output_fn, kind, k)
    with torch.no_grad():
        model(**resized(batch, 1))  # libraries allocate on first use
    before = high_water()
    step()
    step()
    return (high_water() - before) / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2"], choices=list(MODELS))
    parser.add_argument("--proj-dim", type=int, default=4096, help="k")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--busy", type=int, default=0, help="measure again beside so many competing processes")
    parser.add_argument("--processor", action="store_true", help="processor seconds, for a machine that is not idle")
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[8, 16, 32])
    parser.add_argument("--peak", nargs=3, metavar=("MODEL", "KIND", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        name, kind, size = arguments.peak
        print(json.dumps(peak(name, kind, int(size), arguments.proj_dim)))
        return
    for name in arguments.models:
        busy = (0, arguments.busy) if arguments.busy else (0,)
        clock = time.process_time if arguments.processor else time.perf_counter
        parameters, measured = timed(name, arguments.proj_dim, arguments.repeats, busy, clock)
        print(f"{name}: P = {parameters / 1e6:.1f} M, k = {arguments.proj_dim}", flush=True)
        for processes, seconds in zip(busy, measured, strict=True):
            median = {key: statistics.median(values) for key, values in seconds.items()}
            ratios = statistics.median(a / b for a, b in zip(seconds["sjlt"], seconds["plain"], strict=True))
            print(
                f"  beside {processes} other processes: plain {median['plain'] * 1e3:.0f} ms, "
                f"gradients {median['hooked'] / median['plain']:.2f} ×, gradients and sjlt "
                f"{median['sjlt'] / median['plain']:.2f} × (median of pairs {ratios:.2f})",
                flush=True,
            )
        for size in arguments.batch_sizes:
            memory = {}
            for kind in ("plain", "sjlt"):
                options = ["--threads", str(arguments.threads), "--proj-dim", str(arguments.proj_dim)]
                command = [sys.executable, __file__, *options, "--peak", name, kind, str(size)]
                memory[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"  B = {size}: peak {memory['sjlt']:.0f} MiB, plain step {memory['plain']:.0f} MiB; B × P would be "
                f"{4 * size * parameters / 2**20:.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
