"""Speed of the CUDA kernels, as ratios to what the GPU can do, all measured in one run.

    python benchmarks/gpu_kernels.py --json kernels.json

Ceilings: a large bf16 matrix product, and a device-to-device copy (bytes read plus bytes written). Dense projections
are compared with the first (2 · B · P · k operations; float32 gradients take twice as many by default, and batches
that are not 16, 64 or a multiple of 128 fill only part of a tile), sparse ones with the second (bytes of the
gradients, each read once), and so are rotations of features (bytes of the features, read and written once, whatever
number of passes the three rounds take). Beside them, doing it with torch: generate R, then multiply; the steps of the
rotation one by one; and `fast_jl`, if it is installed. All methods take turns, and medians are shown. The parts
`dense`, `sparse`, `rotation` and `fused` show times of kernels alone; `featurize` and `scoring` include all of Python.
"""

import argparse
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from gpu_steps import Step, featurize_steps, fused_steps, scoring_steps

from hf_trak.kernels.arguments import WGMMA_VARIABLE, float32_terms, kernels_wanted
from hf_trak.kernels.hadamard import plan_passes
from hf_trak.kernels.runtime import CUDA as RUNTIME
from hf_trak.kernels.self_check import checked_instruction
from hf_trak.kernels.torch_hadamard import rotate_blocks
from hf_trak.projectors import BlockProjector, FastJlProjector, RademacherProjector, make_projector

Measurement = tuple[Callable[[], object], float]
"""A function to time, and its number of operations or bytes."""

MATMUL, COPY = "bf16 matmul", "copy"

SLEEP_CYCLES = 20_000_000
"""About 10 ms, in which a thousand kernels are launched."""

PARTS = ("dense", "sparse", "rotation", "fused", "featurize", "scoring")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grad-dim", type=int, default=10_000_000, help="P, the number of parameters")
    parser.add_argument("--proj-dim", type=int, default=4096, help="k")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 128], help="B of the dense maps")
    parser.add_argument("--sjlt-batch", type=int, default=128, help="B of the sparse map")
    parser.add_argument("--sjlt-dims", type=int, nargs="+", default=[512, 4096, 16384], help="k of the sparse map")
    parser.add_argument(
        "--rotation-dims",
        type=int,
        nargs="+",
        default=[4096, 2**14, 2**16, 2**20],
        help="k of rotations, powers of two",
    )
    parser.add_argument("--rotation-numbers", type=int, default=2**28, help="features of all rows of a rotation")
    parser.add_argument("--rounds", type=int, default=11, help="measurements per method")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure")
    parser.add_argument("--no-normal", action="store_true", help="leave the `normal` map out")
    parser.add_argument("--json", type=Path, help="file to write the medians to, in seconds")
    return parser.parse_args(arguments)


def ceilings(device: torch.device) -> dict[str, Measurement]:
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    return {
        MATMUL: (lambda: a @ b, 2.0 * n**3),
        COPY: (lambda: target.copy_(source), 2.0 * source.numel() * 4),
    }


def dense_methods(args: argparse.Namespace, device: torch.device) -> dict[str, Measurement]:
    """Operations of every dense method."""
    table: dict[str, Measurement] = {}
    P, k = args.grad_dim, args.proj_dim
    for B in args.batch_sizes:
        operations = 2.0 * B * P * k
        grads = torch.randn(B, P, dtype=torch.bfloat16, device=device)
        out = torch.zeros(B, k, device=device)
        for dtype in (torch.bfloat16, torch.float32):
            block = grads.to(dtype)
            projector = RademacherProjector(P, k, device=device)
            name = f"rademacher {str(dtype).removeprefix('torch.')} B={B}"
            used = checked_instruction(RUNTIME, "rademacher", dtype, B, device, float32_terms())
            table[f"{name}, {used}"] = (accumulation(projector, out, block), operations)
            if used == "wgmma":
                table[f"{name}, mma"] = (without_wgmma(accumulation(projector, out, block)), operations)
        if not args.no_normal:
            normal = make_projector("normal", P, k, 0, device)
            table[f"normal bfloat16 B={B}"] = (accumulation(normal, out, grads), operations)
        table[f"torch: random signs, matmul B={B}"] = (materialize_and_multiply(out, grads), operations)
        peer = fast_jl(P, k, device)
        if peer is not None:
            half = grads.to(torch.float16)
            table[f"fast_jl float16 B={B}"] = (lambda peer=peer, half=half: run_in_batches(peer, half), operations)
    return table


def sparse_methods(args: argparse.Namespace, device: torch.device) -> dict[str, Measurement]:
    """Bytes of every sparse method."""
    table: dict[str, Measurement] = {}
    for dtype in (torch.bfloat16, torch.float32):
        block = torch.randn(args.sjlt_batch, args.grad_dim, device=device).to(dtype)
        for k in args.sjlt_dims:
            out = torch.zeros(args.sjlt_batch, k, device=device)
            projector = make_projector("sjlt", args.grad_dim, k, 0, device)
            name = f"sjlt {str(dtype).removeprefix('torch.')} k={k}"
            table[name] = (accumulation(projector, out, block), float(block.numel() * block.element_size()))
    return table


def rotation_methods(args: argparse.Namespace, device: torch.device) -> dict[str, Measurement]:
    """Bytes of every rotation: each feature read once and written once."""
    table: dict[str, Measurement] = {}
    for k in args.rotation_dims:
        rows = torch.randn(args.rotation_numbers // k, k, device=device)
        signs = torch.randint(-(2**31), 2**31, (3, k // 32), device=device).to(torch.int32)
        name, amount = f"rotation k={k}", 2.0 * rows.numel() * rows.element_size()
        table[f"{name}, {len(plan_passes(k.bit_length() - 1, 3))} passes"] = (
            lambda rows=rows, signs=signs, k=k: torch.ops.hf_trak.hadamard(rows, signs, k, [0, 0, 0]),
            amount,
        )
        table[f"torch: {name}"] = (
            lambda rows=rows, signs=signs, k=k: rotate_blocks(rows, signs, k, [0, 0, 0]),
            amount,
        )
    return table


def accumulation(projector: BlockProjector, out: torch.Tensor, block: torch.Tensor) -> Callable[[], object]:
    return lambda: projector.accumulate(out, block, 0, 0)


def without_wgmma(run: Callable[[], object]) -> Callable[[], object]:
    """On Hopper: by the kernel for all GPUs instead of the one for its own matrix instructions."""

    def run_without() -> None:
        before = os.environ.get(WGMMA_VARIABLE)
        os.environ[WGMMA_VARIABLE] = "0"
        try:
            run()
        finally:
            os.environ.pop(WGMMA_VARIABLE)
            if before is not None:
                os.environ[WGMMA_VARIABLE] = before

    return run_without


def materialize_and_multiply(out: torch.Tensor, grads: torch.Tensor) -> Callable[[], object]:
    """The obvious way: random bits from torch's generator, a tile of 64 MiB at a time, and a bf16 product. Signs are
    2 b − 1, so the product with the bits is enough."""
    rows = min(grads.shape[1], 2**25 // out.shape[1])
    bits = torch.empty(rows, out.shape[1], dtype=torch.bfloat16, device=out.device)

    def run() -> None:
        for start in range(0, grads.shape[1], rows):
            part = grads[:, start : start + rows]
            out.add_(part @ bits[: part.shape[1]].bernoulli_(), alpha=2).sub_(part.sum(1, keepdim=True))

    return run


def fast_jl(grad_dim: int, proj_dim: int, device: torch.device) -> FastJlProjector | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return FastJlProjector(grad_dim, proj_dim, 0, "rademacher", device)
        except (ModuleNotFoundError, ValueError):
            return None


def run_in_batches(peer: FastJlProjector, grads: torch.Tensor) -> None:
    for start in range(0, len(grads), peer.max_batch_size):
        peer.project(grads[start : start + peer.max_batch_size], 0)


def measure(table: dict[str, Measurement], rounds: int, busy: bool) -> dict[str, float]:
    """Median seconds per method by CUDA events; all methods take turns, the first round warms up.

    Args:
        busy: keep the GPU busy while the method's kernels are being launched, so that the time is theirs alone.
            Otherwise it includes what Python does before and between them.
    """
    times: dict[str, list[float]] = {name: [] for name in table}
    for current in range(rounds + 1):
        for name, (run, _) in table.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if busy:
                torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            run()
            end.record()
            end.synchronize()
            if current:
                times[name].append(begin.elapsed_time(end) / 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def report_table(
    args: argparse.Namespace,
    methods: Callable[[argparse.Namespace, torch.device], dict[str, Measurement]],
    ceiling: str,
    unit: str,
    device: torch.device,
) -> dict[str, float]:
    """Measure and print methods as a share of a ceiling; returns medians in seconds."""
    table = {**ceilings(device), **methods(args, device)}
    found = measure(table, args.rounds, busy=True)
    best = table[ceiling][1] / found[ceiling]
    print(f"\n{'':40}{'ms':>10}{unit:>10}{'of ' + ceiling:>16}")
    for name, seconds in found.items():
        if name not in (MATMUL, COPY) or name == ceiling:
            rate = table[name][1] / seconds
            print(f"{name:40}{seconds * 1000:10.3f}{rate / 1e12:10.2f}{rate / best:16.1%}", flush=True)
    return found


def report_groups(
    groups: Iterable[tuple[str, dict[str, Step], float]], unit: str, scale: float, rounds: int, busy: bool
) -> dict[str, float]:
    """Measure and print groups of steps that do the same, as ratios to the first of each; returns medians."""
    medians = {}
    print(f"\n{'':62}{'ms':>10}{unit:>10}{'of first':>10}")
    for group, steps, amount in groups:
        found = measure({name: (step, amount) for name, step in steps.items()}, rounds, busy)
        first = next(iter(found.values()))
        for name, seconds in found.items():
            label = f"{group}: {name}"
            print(
                f"{label:62}{seconds * 1000:10.3f}{amount / seconds / scale:10.1f}{seconds / first:10.2f}", flush=True
            )
            medians[label] = seconds
    return medians


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark measures CUDA kernels and torch sees no GPU. Run it on a machine with one.")
    device = torch.device("cuda", torch.cuda.current_device())
    if not kernels_wanted(device):
        raise SystemExit("This benchmark measures CUDA kernels, and HF_TRAK_BACKEND is 'torch'. Run it without that.")
    torch.manual_seed(0)
    medians: dict[str, float] = {}
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, P = {args.grad_dim:,}, k = {args.proj_dim} "
        f"(dense), B = {args.sjlt_batch} (sjlt); medians of {args.rounds} rounds",
        flush=True,
    )
    tables = {
        "dense": (dense_methods, MATMUL, "TFLOP/s"),
        "sparse": (sparse_methods, COPY, "TB/s"),
        "rotation": (rotation_methods, COPY, "TB/s"),
    }
    groups = {
        "fused": (fused_steps, "Gelem/s", 1e9),
        "featurize": (featurize_steps, "1/s", 1),
        "scoring": (scoring_steps, "GB/s", 1e9),
    }
    for part in args.parts:
        if part in tables:
            found = report_table(args, *tables[part], device)
        else:
            steps, unit, scale = groups[part]
            found = report_groups(steps(args.proj_dim, device), unit, scale, args.rounds, busy=part == "fused")
        medians |= {f"{part}: {name}": seconds for name, seconds in found.items()}
        torch.cuda.empty_cache()
        if not all(map(math.isfinite, found.values())):
            raise SystemExit(f"A measurement of {part} is not a number.")
        if args.json is not None:
            args.json.write_text(json.dumps(medians, indent=2) + "\n")


if __name__ == "__main__":
    main()
