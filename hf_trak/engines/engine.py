"""What an engine is, and what it is asked: the best rows of an index as tables, and its Gram matrix.

An engine maps a function over parts of an index. Where that happens, with what resources, and what is done about
processes that die is the engine's:

    best = best_rows(LocalEngine(), ["index.parquet"], targets, 20)

`targets` are those of `hf_trak.scores.tables`, whose functions run here on each row group of the tables. So results
have the same bits on any engine, for any number of processes and any order, where processes compute with the same
number of threads on the same type of processor. What an engine returns is counted: a part that it leaves out or
returns twice is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from hf_trak.errors import StoreError
from hf_trak.runtime.checks import checked_int
from hf_trak.scores.streaming import ScaledRows
from hf_trak.scores.tables import TOP, gram_batch, merge_top, score_batch
from hf_trak.store.store import Gram
from hf_trak.store.table_files import Footers, Fragment, fragments_of, read_fragment

PART = "part"
MOST_PARTS = 1024
"""Parts of an index: enough for as many processes, and few enough to add up their Gram matrices in one."""


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


def best_rows(
    engine: Engine, paths: Sequence[str | Path], targets: ScaledRows, k: int, largest: bool = True
) -> pa.Table:
    """Find the best rows of an index for each target.

    Args:
        engine ([`Engine`]):
            Where.
        paths (`Sequence[str]` or `Sequence[Path]`):
            Parquet files, and directories of such, that together have each row of one checkpoint, under the same names
            in all processes. Rows are in order within a file.
        targets (`ScaledRows`):
            m preconditioned targets, see `hf_trak.scores.tables`.
        k (`int`):
            Rows to return for each target.
        largest (`bool`, *optional*, defaults to `True`):
            The highest scores, or the lowest.

    Returns:
        `pyarrow.Table`: as `score_batch` returns it.

    Raises:
        ValueError: no file is named, `k` is below 1, or targets and rows have different numbers of columns.
        ConfigMismatchError: the files come from different stores or checkpoints.
        IncompleteStoreError: rows are missing.
        StoreError: a file is damaged, or the engine has failed or has not returned each part once.
    """
    k, m = checked_int(k, "k", 1, type_error=ValueError), len(targets.values)
    function = partial(_score_parts, footers=Footers(), targets=targets, k=k, largest=largest)
    found = _asked(engine, paths, function, lambda rows: m * min(k, rows))
    return merge_top((table.select(TOP.names) for table in found), k, largest)


def gram(engine: Engine, paths: Sequence[str | Path]) -> Gram:
    """Compute XᵀX of an index in float64.

    Matrices of the parts are added in the order of their rows, whatever the order in which they arrive.

    Args:
        engine, paths: as in [`best_rows`].

    Returns:
        [`~hf_trak.store.store.Gram`]: XᵀX `(k, k)`, its trace, and the number of rows.

    Raises:
        ValueError, ConfigMismatchError, IncompleteStoreError, StoreError: as [`best_rows`].
    """
    waiting: dict[int, Gram] = {}
    total, following = None, 0
    for table in _asked(engine, paths, partial(_gram_parts, footers=Footers()), lambda rows: 1):
        for row in table.to_pylist():
            values = np.frombuffer(bytearray(row["matrix"]))
            matrix = torch.from_numpy(values.reshape(2 * [round(len(values) ** 0.5)]))
            waiting[row[PART]] = Gram(matrix, row["trace"], row["n"])
        while following in waiting:
            total = _sum(total, waiting.pop(following))
            following += 1
    assert total is not None  # an index has rows
    return total


def failed(engine: str, error: Exception) -> StoreError:
    """Make the error of an engine that has given a function up; `error` is its own, with the traceback as text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    ours = [line for line in lines if line.startswith("hf_trak.errors.")]
    return StoreError(
        f"{engine} has given up a part of the tables: {(ours or lines)[-1]} Expected tables that every process can "
        "read. Correct what it says, and ask again."
    )


def _asked(
    engine: Engine,
    paths: Sequence[str | Path],
    function: Callable[[pa.Table], pa.Table],
    expected: Callable[[int], int],
) -> Iterator[pa.Table]:
    """Yield results of an engine for tables; `expected` maps rows of a part to rows of its result."""
    fragments = fragments_of(paths)
    size = -(-len(fragments) // MOST_PARTS)
    divided = [fragments[first : first + size] for first in range(0, len(fragments), size)]
    rows = np.array([expected(sum(one.stop - one.start for one in part)) for part in divided])
    kept = [[asdict(fragment) for fragment in part] for part in divided]
    yield from counted(engine, function, pa.table({PART: np.arange(len(divided)), "fragments": kept}), rows)


def counted(
    engine: Engine, function: Callable[[pa.Table], pa.Table], parts: pa.Table, rows: NDArray[np.int64]
) -> Iterator[pa.Table]:
    """Yield results of an engine, and count their rows.

    Args:
        engine: the engine.
        function: a function of parts, whose results have their numbers in the column `PART`.
        parts: the parts, with their numbers.
        rows: how many rows the result of each part has.

    Raises:
        StoreError: as `Engine.map`; or a part was left out or returned twice.
    """
    left = rows.copy()
    for table in engine.map(function, parts):
        numbers, counts = np.unique(table.column(PART).to_numpy(), return_counts=True)
        left[numbers] -= counts
        yield table
    if wrong := np.flatnonzero(left).tolist():
        raise StoreError(
            f"{type(engine).__name__} has returned {len(wrong)} of {len(left)} parts incompletely or twice, first "
            f"part {wrong[0]}. Expected each once. Does it leave out what fails? Ask again without that."
        )


def _sum(total: Gram | None, one: Gram) -> Gram:
    if total is None:
        return one
    return Gram(total.matrix.add_(one.matrix), total.trace + one.trace, total.n + one.n)


def _parts(parts: pa.Table) -> Iterator[tuple[int, list[Fragment]]]:
    for row in parts.to_pylist():
        yield row[PART], [Fragment(**one) for one in row["fragments"]]


def _score_parts(parts: pa.Table, footers: Footers, targets: ScaledRows, k: int, largest: bool) -> pa.Table:
    """Find the best rows of each part: columns of `TOP`, and the number of the part."""
    found = [TOP.empty_table().append_column(PART, pa.array([], pa.int64()))]
    for number, fragments in _parts(parts):
        best = merge_top(
            (score_batch(read_fragment(one, footers), targets, k, largest) for one in fragments), k, largest
        )
        found.append(best.append_column(PART, pa.array(np.full(len(best), number))))
    return pa.concat_tables(found)


def _gram_parts(parts: pa.Table, footers: Footers) -> pa.Table:
    """Compute XᵀX of each part, as the bytes of a matrix."""
    schema = pa.schema([(PART, pa.int64()), ("n", pa.int64()), ("trace", pa.float64()), ("matrix", pa.large_binary())])
    rows = []
    for number, fragments in _parts(parts):
        total = None
        for fragment in fragments:
            total = _sum(total, gram_batch(read_fragment(fragment, footers)))
        assert total is not None  # a part has fragments
        rows.append((number, total.n, total.trace, total.matrix.numpy().tobytes()))
    return pa.table([list(column) for column in zip(*rows, strict=True)] or [[]] * 4, schema=schema)
