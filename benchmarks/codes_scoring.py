"""Scores from codes: a million training rows of 512 bytes to 16 KiB, beside float32 rows and beside plain reading.

    python benchmarks/codes_scoring.py --dir /path/with/5/GB

Synthetic indexes of random codes, and one of float32 features, are written to a temporary directory and deleted
afterwards. An index has at most `--gigabytes`, and fewer rows where a million take more; times are then scaled to a
million rows. Every step runs in a process of its own, with the indexes in turn and that in several rounds:

* `read once`: read every file into the same memory, on one core. Nothing is checked or kept.
* `top k`: what `attribute(top_k=…)` does once the preconditioned targets are there: check and read the shards,
  multiply, keep the best and the worst of every target.
* `one target`: the same for a single target.
* `two passes`: scores from the first 512 bytes of every row, then those of whole rows of the candidates.
* `two passes, one`: the same for a single target.

Preconditioned targets are random: what they cost does not depend on the number of rows, and is no part of this.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars

from hf_trak.runtime.processes import Processes
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.shortlist import PreconditionedTargets, rescored, shortlist
from hf_trak.scores.streaming import ScaledRows
from hf_trak.store.checkpoint_records import CODE_BITS, code_settings
from hf_trak.store.codes import FIRST_BLOCK_BYTES
from hf_trak.store.revised import PrefixStore
from hf_trak.store.shards import write_tensors
from hf_trak.store.store import FeatureStore

MILLION = 1_000_000


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=MILLION, help="n, training rows")
    parser.add_argument("--gigabytes", type=float, default=1.1, help="largest size of an index, which bounds its rows")
    parser.add_argument(
        "--indexes",
        nargs="+",
        default=[
            "float32:2048",
            "float32:4096",
            "int2:2048",
            "int2:4096",
            "int1:8192",
            "int4:4096",
            "int2:16384",
            "int2:65536",
        ],
        metavar="DTYPE:K",
        help="`feature_dtype` and k of each index",
    )
    parser.add_argument("--targets", type=int, default=100, help="m")
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--candidates", type=int, default=1000, help="rows of the first pass per target and end")
    parser.add_argument("--shard-size", type=int, default=1024, help="rows per file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--cold", action="store_true", help="ask the kernel to drop the files from memory before each")
    parser.add_argument("--dir", help="where the temporary directory goes")
    parser.add_argument("--step", nargs=2, metavar=("STEP", "DIRECTORY"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def write_index(directory: Path, name: str, args: argparse.Namespace) -> None:
    """Write a store with random features, or random codes with which no encoder has to be run."""
    dtype, k = name.split(":")
    row_bytes = int(k) * (4 if dtype == "float32" else CODE_BITS[dtype] / 8)
    config = {
        "train_size": min(args.rows, int(args.gigabytes * 1e9 / row_bytes)),
        "proj_dim": int(k),
        "feature_dtype": dtype,
        "shard_size": args.shard_size,
        "seed": 0,
        **code_settings(dtype),
    }
    store = FeatureStore.open(directory, config)
    store.register_checkpoint(0, "synthetic")
    shards = store.train(0)
    generator = torch.Generator().manual_seed(0)
    for index in range(len(shards)):
        rows = shards.plan.rows(index)
        q = torch.rand(len(rows), generator=generator)
        if shards.code_format is None:
            shards.write(index, torch.randn(len(rows), int(k), generator=generator), q)
            continue
        form = shards.code_format
        tensors = {"out_to_loss": q, "scale": torch.rand(len(rows), generator=generator) + 0.5}
        for block, size in zip(form.names, form.block_bytes, strict=True):
            tensors[block] = torch.randint(0, 256, (len(rows), size), dtype=torch.uint8, generator=generator)
        write_tensors(shards.path(index), tensors, shards.identity, start=rows.start, stop=rows.stop)


def targets(store: FeatureStore, count: int) -> ScaledRows:
    k = store.config["proj_dim"]
    return ScaledRows(torch.randn(count, k, generator=torch.Generator().manual_seed(1)) / k)


def read_once(directory: Path, args: argparse.Namespace) -> None:
    memory = bytearray()
    for path in sorted(directory.rglob("train-*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if len(memory) < size:
                memory = bytearray(size)
            file.readinto(memoryview(memory)[:size])


def top_k(directory: Path, args: argparse.Namespace, count: int) -> None:
    processes = Processes(use_cpu=True)
    store = FeatureStore.load(directory)
    scorer = Scorer(store, processes, processes.device, None, 0.3)
    files = ScoreFiles(directory / "scores", "per-target", processes, scorer.n, count)
    files.columns(scorer.blocks(scorer.ensemble(None), [targets(store, count)]), args.top_k, "target")


def two_passes(directory: Path, args: argparse.Namespace, count: int) -> None:
    processes = Processes(use_cpu=True)
    store = FeatureStore.load(directory)
    prefix = PrefixStore(store, FIRST_BLOCK_BYTES)
    whole = targets(store, count)
    first = ScaledRows(whole.values[:, : prefix.config["proj_dim"]].contiguous())
    n = store.config["train_size"]
    blocks = Scorer(prefix, processes, processes.device, None, 0.3).blocks([0], [first])
    files = ScoreFiles(directory / "scores", "first-pass", processes, n, count)
    listed = shortlist(blocks, files, args.candidates)
    files = ScoreFiles(directory / "scores", "second-pass", processes, len(listed), count)
    rescored([store.train(0)], PreconditionedTargets("synthetic", [0], [], [whole]), listed, args.top_k, files)


Step = Callable[[Path, argparse.Namespace], None]
STEPS: dict[str, Step] = {
    "read once": read_once,
    "top k": lambda directory, args: top_k(directory, args, args.targets),
    "one target": lambda directory, args: top_k(directory, args, 1),
    "two passes": lambda directory, args: two_passes(directory, args, args.targets),
    "two passes, one": lambda directory, args: two_passes(directory, args, 1),
}


def bytes_read() -> int:
    """Bytes that this process has read with system calls; pages of memory-mapped files are not among them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def one_step(name: str, directory: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure one step: seconds, processor seconds, bytes read, peak resident MiB. Meant for a fresh process."""
    torch.set_num_threads(args.threads)
    disable_progress_bars()
    Processes(use_cpu=True)
    torch.ones(64, 64) @ torch.ones(64, 64)  # libraries start their threads
    begun, used, read = time.perf_counter(), processor_seconds(), bytes_read()
    STEPS[name](directory, args)
    return {
        "seconds": time.perf_counter() - begun,
        "processor": processor_seconds() - used,
        "read": bytes_read() - read,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def forget(directory: Path) -> None:
    """Ask the kernel to drop the files of an index from its memory."""
    for path in directory.rglob("train-*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def has_step(name: str, step: str) -> bool:
    """Tell whether a step makes sense for an index: a first pass needs more than its first block."""
    dtype, k = name.split(":")
    return not step.startswith("two") or (dtype in CODE_BITS and int(k) * CODE_BITS[dtype] > 8 * FIRST_BLOCK_BYTES)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.step:
        print(json.dumps(one_step(args.step[0], Path(args.step[1]), args)))
        return
    given = sys.argv[1:] if arguments is None else arguments
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hf_trak-codes-scoring-") as temporary:
        for name in args.indexes:
            write_index(Path(temporary) / name, name, args)
            sizes[name] = FeatureStore.load(Path(temporary) / name).config["train_size"]
        for _ in range(args.rounds):
            for step in args.steps:
                for name in filter(lambda name, step=step: has_step(name, step), args.indexes):
                    directory = Path(temporary) / name
                    if args.cold:
                        forget(directory)
                    command = [sys.executable, __file__, *given, "--step", step, str(directory)]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    results.setdefault((name, step), []).append(json.loads(done.stdout))
    print(
        f"m = {args.targets}, top_k = {args.top_k}, {args.threads} threads, files {'cold' if args.cold else 'warm'}; "
        f"medians of {args.rounds} rounds, scaled to a million rows"
    )
    header = ("index", "rows", "step", "seconds", "processor s", "GB read", "peak MiB", "× read once")
    print(f"{header[0]:14}{header[1]:>10}  {header[2]:16}" + "".join(f"{title:>12}" for title in header[3:]))
    for (name, step), runs in sorted(results.items(), key=lambda item: args.indexes.index(item[0][0])):
        scale = MILLION / sizes[name]
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        plain = results.get((name, "read once"))
        ratio = median["seconds"] / statistics.median(run["seconds"] for run in plain) if plain else float("nan")
        print(
            f"{name:14}{sizes[name]:10,}  {step:16}{median['seconds'] * scale:12.2f}"
            f"{median['processor'] * scale:12.2f}{median['read'] * scale / 1e9:12.2f}"
            f"{max(run['peak'] for run in runs):12.0f}{ratio:12.1f}"
        )


if __name__ == "__main__":
    main()
