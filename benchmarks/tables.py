"""What Arrow tables cost beside the store's own shards: scores of the same rows by both, and merging fragments.

    python benchmarks/tables.py --rows 100000 --feature_dtype int4 --proj_dim 1024

Both sides take turns; the table has medians of processor seconds with one thread.

    python benchmarks/tables.py --in_place /tmp/tables --sizes 100000 1000000 10000000

writes tables of so many rows into a directory, scores them in place, and reads their bytes beside it. The directory is
removed at the end.
"""

import argparse
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hf_trak.engines.engine import LocalEngine, best_of_shards
from hf_trak.scores.streaming import ScaledRows, score_blocks
from hf_trak.scores.tables import TOP, merge_top, score_batch
from hf_trak.scores.topk import TopK
from hf_trak.store.codes import LEVELS, ROTATION, CodedRows, CodeFormat
from hf_trak.store.sealed import sealed_bytes
from hf_trak.store.shard_set import Shard
from hf_trak.store.table_files import FACTS
from hf_trak.store.table_store import Tables, TableStore
from hf_trak.store.tables import batch_of

TOP_K = 20
SHARD = 1024


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


def write_rows(path: Path, rows: int, dim: int) -> None:
    """Write a table of random codes of 4 bits; its row groups are shards of `SHARD` rows with the same codes."""
    config = {"train_size": rows, "proj_dim": dim, "feature_dtype": "int4", "shard_size": SHARD}
    config |= {"seed": 0, "rotation": ROTATION, "levels": LEVELS}
    checkpoint = {"model_id": 0, "fingerprint": "0" * 32}
    facts = sealed_bytes({"config": config, "checkpoint": checkpoint, "content": "0" * 32})
    generator = torch.Generator().manual_seed(0)
    codes = CodedRows.encode(torch.randn(SHARD, dim, generator=generator), CodeFormat(4, dim))
    weights = torch.rand(SHARD, generator=generator)
    writer: pq.ParquetWriter | None = None
    for start in range(0, rows, SHARD):
        count = min(SHARD, rows - start)
        shard = Shard(start, start + count, codes[:count], weights[:count])
        table = pa.Table.from_batches([batch_of(shard)]).replace_schema_metadata({FACTS: facts})
        writer = writer or pq.ParquetWriter(path, table.schema, write_page_checksum=True)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def measured(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the processor seconds of a call, and the wall seconds."""
    begun, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - begun, time.perf_counter() - wall


def read_bytes(path: Path) -> None:
    """Read a file, a megabyte at a time."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def in_place(directory: Path, sizes: list[int], dim: int, m: int) -> None:
    """Print what it takes to find the best rows of tables in place, beside reading their bytes."""
    targets = ScaledRows.of(torch.randn(m, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    print(f"{m} targets, rows of {dim // 2} bytes, shards of {SHARD:,} rows; processor seconds (wall seconds)\n")
    print(
        "| rows | GB | reading | scoring | ÷ reading | µs per row | peak memory, MB |\n|---|---|---|---|---|---|---|"
    )
    directory.mkdir(parents=True)
    try:
        for rows in sizes:
            path = directory / f"{rows}.parquet"
            write_rows(path, rows, dim)
            read_bytes(path)
            read = measured(lambda path=path: read_bytes(path))
            shards = TableStore.over(Tables.find([path]), directory / str(rows)).train(0)
            scored = measured(lambda shards=shards: best_of_shards(LocalEngine(), [shards], [targets], TOP_K))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            print(
                f"| {rows:,} | {path.stat().st_size / 1e9:.2f} | {read[0]:.2f} ({read[1]:.2f}) | {scored[0]:.2f} "
                f"({scored[1]:.2f}) | {scored[0] / read[0]:.1f} | {1e6 * scored[0] / rows:.2f} | {peak:.0f} |",
                flush=True,
            )
            path.unlink()
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--proj_dim", type=int, default=1024)
    parser.add_argument("--feature_dtype", choices=("float32", "int8", "int4", "int2", "int1"), default="int4")
    parser.add_argument("--targets", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--fragments", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--in_place", type=Path, help="a directory, which does not exist, for tables")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    given = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if given.in_place is not None:
        in_place(given.in_place, given.sizes, given.proj_dim, given.targets[0])
        return
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
