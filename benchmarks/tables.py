"""What Arrow tables cost beside the store's own shards: scores of the same rows by both, and merging fragments.

    python benchmarks/tables.py --rows 100000 --feature_dtype int4 --proj_dim 1024

Both sides take turns; the table has medians of processor seconds with one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hf_trak.scores.streaming import ScaledRows, score_blocks
from hf_trak.scores.tables import TOP, merge_top, score_batch
from hf_trak.scores.topk import TopK
from hf_trak.store.codes import CodedRows, CodeFormat
from hf_trak.store.shard_set import Shard
from hf_trak.store.tables import batch_of

TOP_K = 20


def medians(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the median processor seconds of each call, after one that does not count."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, found in zip(calls, seconds, strict=True):
            begun = time.process_time()
            call()
            found.append(time.process_time() - begun)
    return [statistics.median(found[1:]) for found in seconds]


def from_shards(shard: Shard, targets: ScaledRows) -> Any:
    """Find the best rows as `attribute` does."""
    best = TopK(TOP_K)
    for start, _, block in score_blocks([[shard]], [targets]):
        best.update(start, block)
    return best.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--proj_dim", type=int, default=1024)
    parser.add_argument("--feature_dtype", choices=("float32", "int8", "int4", "int2", "int1"), default="int4")
    parser.add_argument("--targets", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--fragments", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    features: Any = torch.randn(given.rows, given.proj_dim, generator=generator)
    if given.feature_dtype != "float32":
        features = CodedRows.encode(features, CodeFormat(int(given.feature_dtype.removeprefix("int")), given.proj_dim))
    shard = Shard(0, given.rows, features, torch.rand(given.rows, generator=generator))
    batch = batch_of(shard)
    print(f"{given.rows:,} rows of {batch.nbytes / given.rows:,.0f} bytes, the best {TOP_K}\n")
    print("| targets | shard, s | table, s | table ÷ shard |\n|---|---|---|---|")
    for m in given.targets:
        targets = ScaledRows.of(torch.randn(m, given.proj_dim, dtype=torch.float64, generator=generator))
        ours, table = medians(
            [lambda t=targets: from_shards(shard, t), lambda t=targets: score_batch(batch, t, TOP_K)], given.repeats
        )
        print(f"| {m} | {ours:.4f} | {table:.4f} | {table / ours:.2f} |")
    rng = np.random.default_rng(0)
    fragments = []
    for number in range(given.fragments):
        scores = -np.sort(-rng.normal(size=(10, TOP_K)).astype(np.float32))
        rows = np.tile(np.arange(TOP_K) + TOP_K * number, 10)
        fragments.append(pa.table([np.repeat(np.arange(10), TOP_K), rows, scores.reshape(-1)], schema=TOP))
    (seconds,) = medians([lambda: merge_top(fragments, TOP_K)], given.repeats)
    print(f"\n{given.fragments:,} fragments of 10 targets merged in {seconds:.2f} s")


if __name__ == "__main__":
    main()
