"""An index as tables in several files, with the answers of `attribute`; and functions whose processes die."""

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doc_examples import sentences, tiny_bert

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.main import main
from hf_trak.engines import engine as engine_module
from hf_trak.engines.engine import Engine
from hf_trak.report.run import AttributionRun
from hf_trak.store.lance_table import write_lance
from hf_trak.store.sealed import sealed_bytes, unsealed
from hf_trak.store.store import FeatureStore
from hf_trak.store.table_files import FACTS
from hf_trak.store.tables import write_table

N, M, TOP_K, SHARD = 60, 4, 5, 7
FILES = 4
"""Files of an index; its nine shards are row groups of them."""


@dataclass
class TableIndex:
    """Tables in a directory, the model, and the best rows `(rows, scores)` from either end."""

    directory: Path
    model: Any
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


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines asked for a shard at a time, however small it is."""
    monkeypatch.setattr(engine_module, "PART_BYTES", 1)


ENDS = ((True, "trak"), (False, "trak_harmful"))


def exam() -> Any:
    """Targets."""
    return sentences(N + M).select(range(N, N + M))


def table_index(place: Path, dtype: str) -> TableIndex:
    """Featurize a tiny model, ask, and divide the table into files, whose names are not in the order of the rows."""
    rows = sentences(N)
    config = TrakConfig(
        str(place / "trak"), proj_dim=64, use_cpu=True, budget="fast", feature_dtype=dtype, shard_size=SHARD
    )
    model = tiny_bert()
    attributor = TrakAttributor(model, config, rows).featurize()
    scored = attributor.attribute(exam(), top_k=TOP_K)
    best = {largest: (scored[f"{name}_indices"][:], scored[f"{name}_scores"][:]) for largest, name in ENDS}
    whole = write_table(attributor.features.store, 0, place / "whole.parquet", rows.select_columns(["source"]))
    divide(whole, place / "tables")
    return TableIndex(place / "tables", model, best)


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


def as_lance(source: Path, path: Path, rows: int = SHARD) -> Path:
    """Write a Parquet file as a table of Lance, with the checksums of the shards that are beside it."""
    table = pq.read_table(source)
    facts = unsealed(json.loads(table.schema.metadata[FACTS]))
    facts["shards"] = FeatureStore.load(source.parent / "trak").train(0).checksums()
    table = table.replace_schema_metadata({FACTS: sealed_bytes(facts)})
    write_lance(path, [table], rows)
    return path


def check_answers(engine: Engine, index: TableIndex, place: Path) -> None:
    """Compare the answers of an engine and its Gram matrix with those of the shards, in a directory of their own."""
    found = index.asked(engine, output_dir=str(place)).features.store.read_gram(0)
    expected = FeatureStore.load(index.directory.parent / "trak").read_gram(0)
    assert found is not None and expected is not None
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


def check_command(engine: str, index: TableIndex, place: Path) -> None:
    """Have the command line ask an engine about tables, and compare the answer with that of the shards."""
    index.model.save_pretrained(place / "model")
    exam().save_to_disk(place / "exam")
    asked = ["--index", f"{index.directory}", "--model", f"{place}/model", "--eval_dataset", f"{place}/exam"]
    options = ["--scored_by", engine, "--top_k", str(TOP_K), "--output_dir", f"{place}/work", "--use_cpu"]
    assert main(["attribute", *asked, *options]) == 0
    scored = AttributionRun.load(place / "work/scores/targets").scored
    for largest, name in ENDS:
        assert (scored[f"{name}_indices"][:], scored[f"{name}_scores"][:]) == index.best[largest]


class Shuffling:
    """Applies the function to two parts at a time, from the last, and returns results in pieces of one row."""

    def map(self, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
        for first in reversed(range(0, parts.num_rows, 2)):
            found = function(parts.slice(first, 2))
            yield from (found.slice(row, 1) for row in reversed(range(found.num_rows)))


@dataclass(frozen=True)
class Dying:
    """An engine with a slow process, and others that are killed at some parts, once each."""

    engine: Engine
    place: Path
    moments: Mapping[tuple[int, int], float]
    """Seconds after the start of the function, by the number of the question to the engine, and the part."""
    questions: Iterator[int] = field(default_factory=itertools.count)

    def map(self, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
        asked = next(self.questions)
        moments = {part: moment for (question, part), moment in self.moments.items() if question == asked}
        dying = DyingFunction(function, self.place / str(asked), moments, os.getpid())
        dying.place.mkdir()
        return self.engine.map(dying, parts)


@dataclass(frozen=True)
class DyingFunction:
    function: Callable[[pa.Table], pa.Table]
    place: Path
    moments: Mapping[int, float]
    asking: int
    """The process that asks, which is not killed."""

    def __call__(self, parts: pa.Table) -> pa.Table:
        for part in parts.column("part").to_pylist():
            if part in self.moments and not (self.place / str(part)).exists():
                assert os.getpid() != self.asking
                (self.place / str(part)).touch()
                if not self.moments[part]:
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Timer(self.moments[part], os.kill, (os.getpid(), signal.SIGKILL)).start()
        if self.is_slow():
            time.sleep(0.3)
        return self.function(parts)

    def is_slow(self) -> bool:
        """Tell whether this is the first process that was asked."""
        path = self.place / "slow"
        with suppress(FileExistsError), path.open("x") as file:
            file.write(str(os.getpid()))
        return path.read_text() == str(os.getpid())


def check_killed(engine: Engine, index: TableIndex, place: Path, kills: int) -> None:
    """Compare the answers of an engine whose processes are killed at random moments, at most three for an answer.

    It is asked three times for each: for the scales of the columns, the Gram matrix, and the best rows.
    """
    rng, killed = np.random.default_rng(0), 0
    while killed < kills:
        chosen = [divmod(int(one), 9) for one in rng.choice(3 * 9, min(3, kills - killed), replace=False)]
        moments = {one: max(0.0, float(rng.uniform(-0.05, 0.1))) for one in chosen}
        died = place / f"died{killed}"
        died.mkdir()
        check_answers(Dying(engine, died, moments), index, place / f"asked{killed}")
        found = {(int(path.parent.name), int(path.name)) for path in died.glob("*/[0-9]*")}
        assert found == set(chosen)
        killed += len(found)
