"""Interactive search: single targets asked of FAISS, beside the exact scan that reads every row once.

    python benchmarks/search.py --dir /path/with/1/GB --rows 1000000

A synthetic index of random codes is written to a temporary directory and deleted afterwards. Printed are seconds to
build the index of FAISS, its peak memory, and medians over single targets.
"""

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from hf_trak.runtime.processes import Processes
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.search import GradientSearch
from hf_trak.scores.shortlist import PreconditionedTargets
from hf_trak.scores.streaming import ScaledRows
from hf_trak.store.checkpoint_records import code_settings
from hf_trak.store.shards import write_tensors
from hf_trak.store.store import FeatureStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="n, training rows")
    parser.add_argument("--proj-dim", type=int, default=2048, help="k")
    parser.add_argument("--factory", nargs="+", default=["SQ8"], help="kinds of indexes of FAISS")
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        store = written(Path(directory), args)
        targets = torch.randn(args.queries, args.proj_dim, generator=torch.Generator().manual_seed(1))
        print(f"{args.rows:,} rows, int2, k = {args.proj_dim:,}, {args.threads} threads; {scan(store, targets)}")
        for factory in args.factory:
            begun = time.perf_counter()
            search = GradientSearch.build([store.train(0)], [0], "benchmark", factory)
            built = time.perf_counter() - begun
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            seconds = [timed(search, target) for target in targets]
            print(
                f"{factory}: {statistics.median(seconds) * 1000:.0f} ms per target, top 20; built in {built:.0f} s, "
                f"peak {peak:.1f} GiB"
            )


def written(directory: Path, args: argparse.Namespace) -> FeatureStore:
    """A store of random codes."""
    config = {
        "train_size": args.rows,
        "proj_dim": args.proj_dim,
        "feature_dtype": "int2",
        "shard_size": 4096,
        "seed": 0,
        **code_settings("int2"),
    }
    store = FeatureStore.open(directory, config)
    store.register_checkpoint(0, "synthetic")
    shards, generator = store.train(0), torch.Generator().manual_seed(0)
    assert shards.code_format is not None
    for index in range(len(shards)):
        rows = shards.plan.rows(index)
        codes = {
            name: torch.randint(0, 256, (len(rows), count), dtype=torch.uint8, generator=generator)
            for name, count in zip(shards.code_format.names, shards.code_format.block_bytes, strict=True)
        }
        tensors = {"scale": torch.rand(len(rows)), "out_to_loss": torch.rand(len(rows)), **codes}
        write_tensors(shards.path(index), tensors, shards.identity, start=rows.start, stop=rows.stop)
    return store


def scan(store: FeatureStore, targets: torch.Tensor) -> str:
    processes = Processes(use_cpu=True)
    scorer = Scorer(store, processes, processes.device, None, 0.3)
    seconds = []
    for target in targets[:3]:
        begun = time.perf_counter()
        files = ScoreFiles(store.output_dir / "scores", "one", processes, store.train_size, 1)
        files.columns(scorer.blocks([0], [ScaledRows(target[None])]), 20, "target")
        seconds.append(time.perf_counter() - begun)
    return f"exact scan: {statistics.median(seconds):.2f} s per target"


def timed(search: GradientSearch, target: torch.Tensor) -> float:
    begun = time.perf_counter()
    search.best(PreconditionedTargets("benchmark", [0], [], [ScaledRows(target[None])]), 20)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
