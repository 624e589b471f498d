"""What Arrow tables cost beside the store's own shards: scores of the same rows by both, and merging fragments.

    python benchmarks/tables.py --rows 100000 --feature_dtype int4 --proj_dim 1024

Both sides take turns; the table has medians of processor seconds with one thread.

    python benchmarks/tables.py --in_place /tmp/tables --sizes 100000 1000000 10000000 --engines ray --repeats 3

writes tables of so many rows into a directory, scores them in place, as `attribute` does and by an engine with two
workers, and reads their bytes beside it. Processor seconds are those of all processes, medians. The directory is
removed at the end. For Spark, `JAVA_HOME` is set.
"""

import argparse
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hf_trak.engines.engine import PART_BYTES, Engine, LocalEngine, best_of_shards
from hf_trak.engines.ray import RayEngine
from hf_trak.engines.spark import SparkEngine
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
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


def read_bytes(path: Path) -> None:
    """Read a file, a megabyte at a time."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


class Usage(threading.Thread):
    """Measures this process with those that it has started, and theirs, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped, self.peak, self.seconds = threading.Event(), 0, 0.0
        self.start()

    def run(self) -> None:
        """Keep the most memory, where what processes share counts once."""
        ended = False
        while not ended:
            ended = self.stopped.wait(1)
            self.peak = max(self.peak, sum(map(memory, alive())))
        self.seconds = time.thread_time()

    def stop(self) -> None:
        """Measure once more, and end."""
        self.stopped.set()
        self.join()


def alive() -> list[psutil.Process]:
    """Return this process and those that it has started, and theirs."""
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def memory(process: psutil.Process) -> int:
    """Return the memory of a process, of what it shares its part; 0 if it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return 0


def used() -> float:
    """Return the processor seconds of all processes so far; of those that ended, too."""
    return sum(sum(one.cpu_times()[:4]) for one in alive())


def measured(call: Callable[[], Any]) -> tuple[float, float, int]:
    """Return the processor seconds of a call in all processes, the wall seconds, and the peak memory."""
    usage, begun, wall = Usage(), used(), time.perf_counter()
    call()
    wall = time.perf_counter() - wall
    usage.stop()
    return used() - begun - usage.seconds, wall, usage.peak


def ray_engine(directory: Path) -> Engine:
    """Start Ray with two workers here."""
    import ray

    ray.init("local", num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return RayEngine(num_cpus=1)


def spark_engine(directory: Path) -> Engine:
    """Start Spark with two workers here; Java is that of `JAVA_HOME`."""
    from pyspark.sql import SparkSession

    settings = {"spark.master": "local[2]", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    settings |= {"spark.ui.enabled": "false", "spark.local.dir": str(directory), "spark.driver.memory": "1g"}
    settings |= {"spark.ui.showConsoleProgress": "false"}
    return SparkEngine(SparkSession.builder.config(map=settings).getOrCreate())


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "local": lambda directory: LocalEngine(),
    "ray": ray_engine,
    "spark": spark_engine,
}


def in_place(directory: Path, sizes: list[int], dim: int, m: int, engines: list[str], repeats: int) -> None:
    """Print what it takes to find the best rows of tables in place, beside reading their bytes."""
    targets = ScaledRows.of(torch.randn(m, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    directory.mkdir(parents=True)
    started = dict[str, Engine]()
    try:
        write_rows(directory / "first.parquet", 2 * PART_BYTES // (dim // 2), dim)  # some parts for each worker
        first = TableStore.over(Tables.find([directory / "first.parquet"]), directory / "first").train(0)
        for name in engines:

            def start(name: str = name) -> None:
                started[name] = ENGINES[name](directory)
                best_of_shards(started[name], [first], [targets], TOP_K)

            print(f"{name}: {measured(start)[0]:.1f} processor seconds from its start to a first answer")
        print(f"\n{m} targets, rows of {dim // 2} bytes, shards of {SHARD:,} rows; processor seconds (wall seconds)\n")
        print("| rows | by | seconds | ÷ attribute | ÷ reading | µs per row | peak memory, MB |")
        print("|---" * 7 + "|")
        for rows in sizes:
            path = directory / f"{rows}.parquet"
            write_rows(path, rows, dim)
            store = TableStore.over(Tables.find([path]), directory / str(rows))
            answers: list[Any] = []

            def attribute(store: TableStore = store, answers: list[Any] = answers) -> None:
                scorer = Scorer(store, Processes(), torch.device("cpu"), lambda_relative=0.1)
                ends = TopK(TOP_K), TopK(TOP_K, largest=False)
                for start, _, block in scorer.blocks([0], [targets]):
                    for end in ends:
                        end.update(start, block)
                answers.append([end.keys() for end in ends])

            def asked(name: str, store: TableStore = store, answers: list[Any] = answers) -> None:
                ends = best_of_shards(started[name], [store.train(0)], [targets], TOP_K)
                answers.append([end.keys() for end in ends])

            read_bytes(path)
            found = {
                "reading the bytes": measured(lambda path=path: read_bytes(path)),
                "attribute": measured(attribute),
            }
            found |= {name: measured(partial(asked, name)) for name in engines}
            for answer in answers[1:]:
                if not all(map(torch.equal, answer, answers[0])):
                    raise SystemExit("The answers of two engines differ.")
            for name, (seconds, wall, peak) in found.items():
                print(
                    f"| {rows:,} | {name} | {seconds:.2f} ({wall:.2f}) | {seconds / found['attribute'][0]:.2f} | "
                    f"{seconds / found['reading the bytes'][0]:.0f} | {1e6 * seconds / rows:.2f} | {peak / 1e6:.0f} |",
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
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=["local"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    given = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if given.in_place is not None:
        in_place(given.in_place, given.sizes, given.proj_dim, given.targets[0], given.engines, given.repeats)
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
