"""Scores larger than memory: a million training rows against a hundred targets, beside one plain matrix product.

    python benchmarks/scoring.py --dir /path/with/5/GB
    python benchmarks/scoring.py --dir /path/with/5/GB --busy 1

A synthetic index (2 GB of float32 features at the defaults, twice) is written to a temporary directory and deleted
afterwards.
Every step runs in a process of its own, in turn, so that its peak memory is its own:

* `matmul`: one `torch.matmul` of the same features, read from one file, with the same targets. Nothing is kept.
* `top k`: what `attribute(top_k=…)` does once Gram matrix and targets are there: check and read the shards, multiply,
  keep the best and the worst of every target.
* `all scores`: the full matrix, written to Arrow.
* `product`: XᵀX in float64 of the same file, 1024 rows at a time: nothing but conversion and product.
* `Gram`: XᵀX of the store: checked, with the same bits for any number of processes, and saved.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from busy import competing
from datasets import disable_progress_bars

from hf_trak.runtime.processes import Processes
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scorer import Scorer
from hf_trak.store.store import FeatureStore


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="n, training rows")
    parser.add_argument("--proj-dim", type=int, default=512, help="k")
    parser.add_argument("--targets", type=int, default=100, help="m")
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--shard-size", type=int, default=1024, help="rows per file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0, help="measure again beside so many competing processes")
    parser.add_argument("--steps", nargs="+", default=list(BASELINES), choices=list(STEPS))
    parser.add_argument("--dir", help="where the temporary directory goes")
    parser.add_argument("--step", nargs=2, metavar=("STEP", "DIRECTORY"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def write_index(directory: Path, args: argparse.Namespace) -> None:
    """The store, and its features once more in one file."""
    config = {
        "train_size": args.rows,
        "proj_dim": args.proj_dim,
        "feature_dtype": "float32",
        "shard_size": args.shard_size,
    }
    store = FeatureStore.open(directory / "store", config)
    store.register_checkpoint(0, "synthetic")
    shards = store.train(0)
    generator = torch.Generator().manual_seed(0)
    with open(directory / "features.bin", "wb") as file:
        for index in range(len(shards)):
            grads = torch.randn(len(shards.plan.rows(index)), args.proj_dim, generator=generator)
            shards.write(index, grads, torch.rand(len(grads), generator=generator))
            file.write(grads.numpy().data)


def targets(args: argparse.Namespace) -> torch.Tensor:
    return torch.randn(args.targets, args.proj_dim, generator=torch.Generator().manual_seed(1)) / args.proj_dim


def matmul(directory: Path, args: argparse.Namespace) -> None:
    features = np.memmap(directory / "features.bin", dtype=np.float32, mode="c", shape=(args.rows, args.proj_dim))
    torch.matmul(torch.from_numpy(features), targets(args).T)


def product(directory: Path, args: argparse.Namespace) -> None:
    features = np.memmap(directory / "features.bin", dtype=np.float32, mode="c", shape=(args.rows, args.proj_dim))
    total = torch.zeros(args.proj_dim, args.proj_dim, dtype=torch.float64)
    for rows in torch.from_numpy(features).split(1024):
        wide = rows.double()
        total.addmm_(wide.T, wide)


def scored(directory: Path, args: argparse.Namespace, top_k: int | None) -> None:
    processes = Processes(use_cpu=True)
    store = FeatureStore.load(directory / "store")
    scorer = Scorer(store, processes, processes.device, 0.3)
    files = ScoreFiles(directory / "scores", "per-target", processes, args.rows, args.targets)
    files.columns(scorer.blocks(scorer.ensemble(None), [targets(args)]), top_k, "target")


def gram(directory: Path, args: argparse.Namespace) -> None:
    processes = Processes(use_cpu=True)
    store = FeatureStore.load(directory / "store")
    Scorer(store, processes, processes.device, 0.3).gram(0)
    next((directory / "store").rglob("gram.safetensors")).unlink()


STEPS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "matmul": matmul,
    "top k": lambda directory, args: scored(directory, args, args.top_k),
    "all scores": lambda directory, args: scored(directory, args, None),
    "product": product,
    "Gram": gram,
}

BASELINES = {"matmul": None, "top k": "matmul", "all scores": "matmul", "product": None, "Gram": "product"}
"""The steps, and what each is compared with."""


def one_step(name: str, directory: Path, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of one step, and the peak resident MiB of its process. Meant for a fresh process."""
    torch.set_num_threads(args.threads)
    disable_progress_bars()
    Processes(use_cpu=True)
    torch.ones(64, 64) @ torch.ones(64, 64)  # libraries start their threads
    begun = time.perf_counter()
    STEPS[name](directory, args)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.step:
        print(json.dumps(one_step(args.step[0], Path(args.step[1]), args)))
        return
    given = sys.argv[1:] if arguments is None else arguments
    print(
        f"n = {args.rows:,}, k = {args.proj_dim}, m = {args.targets}, top_k = {args.top_k}, {args.threads} threads, "
        f"{args.rows * args.proj_dim * 4 / 1e9:.1f} GB of features; medians of {args.rounds} rounds",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hf_trak-scoring-") as directory:
        write_index(Path(directory), args)
        for processes in (0, args.busy) if args.busy else (0,):
            results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.steps}
            with competing(processes):
                for _ in range(args.rounds):
                    for name in args.steps:
                        command = [sys.executable, __file__, *given, "--step", name, directory]
                        done = subprocess.run(command, check=True, capture_output=True, text=True)
                        results[name].append(json.loads(done.stdout))
            report(results, processes)


def report(results: dict[str, list[dict[str, Any]]], processes: int) -> None:
    """Print a table of medians, beside so many competing processes."""
    print(f"beside {processes} other processes")
    medians = {name: statistics.median(run["seconds"] for run in runs) for name, runs in results.items()}
    print(f"{'':12}{'seconds':>10}{'peak MiB':>10}{'speed of':>18}")
    for name, runs in results.items():
        plain = BASELINES[name]
        speed = "" if plain not in medians else f"{plain} {medians[plain] / medians[name]:.0%}"
        print(f"{name:12}{medians[name]:10.2f}{max(run['peak'] for run in runs):10.0f}{speed:>18}")


if __name__ == "__main__":
    main()
