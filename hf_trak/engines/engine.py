"""What an engine is, and what it is asked: the best rows of a feature store, and its Gram matrices.

An engine maps a function over parts of an index. Where that happens, with what resources, and what is done about
processes that die is the engine's:

    attributor = TrakAttributor.from_pretrained("s3://bucket/tables", model)
    attributor.features.scored_by = RayEngine(num_cpus=1)
    scored = attributor.attribute(eval_dataset, top_k=20)

Every process of the engine reads the shards that fall to it, of tables or of a directory that all see. Results have
the bits of `attribute` in this process, on any engine, for any number of processes and any order, where processes
compute with the same number of threads on the same type of processor. What an engine returns is counted: a part that
it leaves out or returns twice is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.scores.gram import GramSum, column_squares
from hf_trak.scores.gram_sample import Over, Reduction
from hf_trak.scores.scorer import part_blocks
from hf_trak.scores.streaming import ScaledRows
from hf_trak.scores.topk import TopK
from hf_trak.store.shard_set import ShardSet

PART = "part"
_RESULT = "result"
MOST_PARTS = 1024
"""Parts of an index: enough for as many processes, and few enough to add up their Gram matrices in one."""

PART_BYTES = 256 << 20
"""Least bytes of features of a part, unless there are fewer: Ray and Spark take a tenth of a second for each."""


class Engine(Protocol):
    """Maps a function over the rows of a table, somewhere."""

    def map(self, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
        """Apply a function to a table, divided by rows in any way.

        Args:
            function: a function of some rows, which can be pickled and returns a table.
            parts: rows to divide; each is some seconds of work.

        Returns:
            The tables that the function returns, in any order, whole or in pieces.

        Raises:
            StoreError: the function has failed more often than the engine tries; the message has that of the function.
        """
        ...


class LocalEngine:
    """Applies the function in this process."""

    def map(self, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
        """Apply a function to each row, see [`Engine`]. Raises what the function raises."""
        for number in range(parts.num_rows):
            yield function(parts.slice(number, 1))


def best_of_shards(
    engine: Engine, shards: Sequence[ShardSet], targets: Sequence[ScaledRows], k: int
) -> tuple[TopK, TopK]:
    """Find the best rows of a store for each target, from either end, on the CPUs of an engine.

    Args:
        engine ([`Engine`]):
            Where.
        shards (`Sequence[ShardSet]`):
            The features of every checkpoint.
        targets (`Sequence[ScaledRows]`):
            m preconditioned targets of every checkpoint.
        k (`int`):
            Rows to keep for each target.

    Returns:
        `tuple[TopK, TopK]`: the highest scores and the lowest.

    Raises:
        StoreError: a shard is damaged, or the engine has failed or has not returned each part once.
    """
    moved = [ScaledRows(one.values.cpu(), one.exponents) for one in targets]
    function = partial(_extremes, list(shards), moved, k)
    ends = TopK(k), TopK(k, largest=False)
    for keys in _results(engine, function, shards, torch.int64):
        for end, found in zip(ends, keys.view(2, len(moved[0].values), -1), strict=True):
            end.merge(found)
    return ends


def gram_of_shards(engine: Engine, shards: ShardSet) -> Tensor:
    """Compute XᵀX of a checkpoint as [`~hf_trak.scores.scorer.Scorer.gram`] does. All rows are read twice.

    Args:
        engine: where.
        shards: the features.

    Returns:
        XᵀX `(k, k)`, float64.

    Raises:
        StoreError: as [`best_of_shards`].
    """
    k = shards.width
    largest = reduce(torch.maximum, _results(engine, partial(_squares, shards), [shards], torch.float64))
    total = GramSum(largest, len(shards))
    for integers in _results(engine, partial(_integers, shards, largest), [shards], torch.float64):
        total.integers += integers.view(k, k)
    return total.result()


def over_shards(engine: Engine, shards: ShardSet) -> Over:
    """Return the function that calls another with the shards that fall to each process of an engine."""

    def over(function: Callable[[Sequence[int]], Tensor], reduction: Reduction) -> Tensor:
        return reduce(reduction, _results(engine, function, [shards], torch.float64))

    return over


def failed(engine: str, error: Exception) -> StoreError:
    """Make the error of an engine that has given a function up; `error` is its own, with the traceback as text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    ours = [line for line in lines if line.startswith("hf_trak.errors.")]
    return StoreError(
        f"{engine} has given up a part of the tables: {(ours or lines)[-1]} Expected tables that every process can "
        "read. Correct what it says, and ask again."
    )


def _results(
    engine: Engine, function: Callable[[Sequence[int]], Tensor], shards: Sequence[ShardSet], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield what a function returns for parts of the shards of all checkpoints, in any order, flat."""
    count, size_of_row = len(shards[0]), sum(map(_row_bytes, shards))
    size = max(-(-count // MOST_PARTS), PART_BYTES // (shards[0].plan.shard_size * size_of_row), 1)
    first = np.arange(0, count, size)
    parts = pa.table({PART: np.arange(len(first)), "first": first, "stop": np.minimum(first + size, count)})
    for table in _counted(engine, partial(_applied, function), parts):
        for value in table.column(_RESULT):
            yield torch.frombuffer(bytearray(value.as_buffer()), dtype=dtype)


def _row_bytes(shards: ShardSet) -> int:
    return shards.width * shards.dtype.itemsize if shards.code_format is None else shards.code_format.row_bytes


def _counted(engine: Engine, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
    """Yield results of an engine for parts, and count them: each has a row with its number.

    Raises:
        StoreError: as `Engine.map`; or a part was left out or returned twice.
    """
    left = np.ones(parts.num_rows, np.int64)
    for table in engine.map(function, parts):
        np.subtract.at(left, table.column(PART).to_numpy(), 1)
        yield table
    if wrong := np.flatnonzero(left).tolist():
        raise StoreError(
            f"{type(engine).__name__} has left out or repeated {len(wrong)} of {len(left)} parts, first part "
            f"{wrong[0]}. Expected each once. Does it leave out what fails? Ask again without that."
        )


def _applied(function: Callable[[Sequence[int]], Tensor], parts: pa.Table) -> pa.Table:
    found = [function(range(row["first"], row["stop"])).numpy().tobytes() for row in parts.to_pylist()]
    return pa.table({PART: parts.column(PART), _RESULT: pa.array(found, pa.large_binary())})


def _extremes(shards: list[ShardSet], targets: list[ScaledRows], k: int, indices: Sequence[int]) -> Tensor:
    """Return the packed scores and rows from either end, `(2, m, min(k, rows))`."""
    ends = TopK(k), TopK(k, largest=False)
    for start, _, block in part_blocks(shards, indices, targets, mapped=False):
        for end in ends:
            end.update(start, block)
    return torch.stack([end.keys() for end in ends])


def _squares(shards: ShardSet, indices: Sequence[int]) -> Tensor:
    """Return the largest squared norms of columns within a shard, `(k,)`."""
    return reduce(torch.maximum, (column_squares(one.grads, one.start) for one in shards.part(indices, mapped=False)))


def _integers(shards: ShardSet, largest: Tensor, indices: Sequence[int]) -> Tensor:
    """Return the integers of XᵀX, `(k, k)`."""
    total = GramSum(largest, len(shards))
    for shard in shards.part(indices, mapped=False):
        total.add(shard.grads)
    return total.integers
