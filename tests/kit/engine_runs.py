"""An index as tables in several files, with the answers of `attribute`; and functions whose processes die."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from doc_examples import sentences, tiny_bert

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.engines.engine import Engine, LocalEngine, best_rows, gram
from hf_trak.scores.streaming import ScaledRows
from hf_trak.store.tables import write_table

N, M, TOP_K, SHARD = 60, 4, 5, 7
FILES = 4
"""Files of an index; its nine shards are row groups of them."""


@dataclass
class TableIndex:
    """Tables in a directory, the model, preconditioned targets, and the best rows `(rows, scores)` from either end."""

    directory: Path
    model: Any
    targets: ScaledRows
    best: dict[bool, tuple[Any, Any]]

    def asked(self, engine: Engine | None = None, tables: Any = None, **options: Any) -> TrakAttributor:
        """Ask tables about the targets, and compare the answer with that of the shards.

        Args:
            engine: finds the best rows.
            tables: the tables; `None` for all of `directory`.
            options: arguments of `from_pretrained`.
        """
        place = str(self.directory if tables is None else tables)
        options = {"output_dir": str(self.directory.parent / "asked"), "use_cpu": True, **options}
        attributor = TrakAttributor.from_pretrained(place, self.model, **options)
        attributor.features.scored_by = engine
        scored = attributor.attribute(exam(), top_k=TOP_K, method="index")
        for largest, name in ENDS:
            assert scored[f"{name}_indices"][:] == self.best[largest][0]
            assert scored[f"{name}_scores"][:] == self.best[largest][1]
        return attributor


ENDS = ((True, "trak"), (False, "trak_harmful"))


def exam() -> Any:
    """Targets."""
    return sentences(N + M).select(range(N, N + M))


def table_index(place: Path, dtype: str) -> TableIndex:
    """Featurize a tiny model, ask, and divide the table into files, whose names are not in the order of the rows."""
    rows = sentences(N)
    config = TrakConfig(str(place / "trak"), proj_dim=64, use_cpu=True, feature_dtype=dtype, shard_size=SHARD)
    model = tiny_bert()
    attributor = TrakAttributor(model, config, rows).featurize()
    scored = attributor.attribute(exam(), top_k=TOP_K)
    best = {largest: (scored[f"{name}_indices"][:], scored[f"{name}_scores"][:]) for largest, name in ENDS}
    targets = attributor.features.precondition(attributor.features.question(exam())).rows[0]
    whole = write_table(attributor.features.store, 0, place / "whole.parquet", rows.select_columns(["source"]))
    divide(whole, place / "tables")
    return TableIndex(place / "tables", model, targets, best)


def divide(path: Path, directory: Path) -> None:
    """Write a table into several files; each row group stays one."""
    directory.mkdir()
    with pq.ParquetFile(path) as file:
        groups = np.array_split(np.arange(file.num_row_groups), FILES)
        for number, part in enumerate(groups):
            with pq.ParquetWriter(
                directory / f"{(number * 3) % FILES}.parquet", file.schema_arrow, write_page_checksum=True
            ) as writer:
                for group in part:
                    writer.write_table(file.read_row_group(group))


def check_answers(engine: Engine, index: TableIndex) -> None:
    """Compare the answers of an engine with those of `attribute`, and with the Gram matrix of this process."""
    for largest, (rows, scores) in index.best.items():
        best = best_rows(engine, [index.directory], index.targets, TOP_K, largest)
        assert best.column("row_id").to_numpy().reshape(M, TOP_K).tolist() == rows
        assert best.column("score").to_numpy().reshape(M, TOP_K).tolist() == scores
    found, expected = gram(engine, [index.directory]), gram(LocalEngine(), [index.directory])
    assert found.matrix.equal(expected.matrix) and (found.trace, found.n) == (expected.trace, N)


def damage(directory: Path) -> Path:
    """Change a bit of the features in one file, which is returned."""
    path = directory / "2.parquet"
    with pq.ParquetFile(path) as file:
        column = file.metadata.row_group(1).column(1)
    content = bytearray(path.read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    content[first + column.total_compressed_size - 9] ^= 1
    path.write_bytes(content)
    return path


class Shuffling:
    """Applies the function to two parts at a time, from the last, and returns results in pieces of one row."""

    def map(self, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
        for first in reversed(range(0, parts.num_rows, 2)):
            found = function(parts.slice(first, 2))
            yield from (found.slice(row, 1) for row in reversed(range(found.num_rows)))


@dataclass(frozen=True)
class Dying:
    """An engine whose processes are killed at some parts, once each, before or after the function has run."""

    engine: Engine
    place: Path
    moments: Mapping[int, str]

    def map(self, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
        return self.engine.map(DyingFunction(function, self.place, self.moments, os.getpid()), parts)


@dataclass(frozen=True)
class DyingFunction:
    function: Callable[[pa.Table], pa.Table]
    place: Path
    moments: Mapping[int, str]
    asking: int
    """The process that asks, which is not killed."""

    def __call__(self, parts: pa.Table) -> pa.Table:
        self.maybe_die(parts, "before")
        found = self.function(parts)
        self.maybe_die(parts, "after")
        return found

    def maybe_die(self, parts: pa.Table, moment: str) -> None:
        for part in parts.column("part").to_pylist():
            if self.moments.get(part) == moment and not (self.place / str(part)).exists():
                (self.place / str(part)).touch()
                assert os.getpid() != self.asking
                os.kill(os.getpid(), signal.SIGKILL)


def check_killed(engine: Engine, index: TableIndex, place: Path, kills: int) -> None:
    """Compare the answers of an engine whose processes are killed at random moments."""
    rng = np.random.default_rng(0)
    parts = rng.choice(9, kills, replace=False).tolist()
    moments = {part: str(rng.choice(["before", "after"])) for part in parts}
    best = best_rows(Dying(engine, place, moments), [index.directory], index.targets, TOP_K)
    assert sorted(int(path.name) for path in place.iterdir()) == sorted(parts)
    assert best.column("row_id").to_numpy().reshape(M, TOP_K).tolist() == index.best[True][0]
    assert best.column("score").to_numpy().reshape(M, TOP_K).tolist() == index.best[True][1]
