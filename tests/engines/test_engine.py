"""Questions to engines: in any order and division the answers of `attribute`; what is not a whole index is refused."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from engine_runs import FILES, TOP_K, N, Shuffling, TableIndex, check_answers, damage, table_index

from hf_trak.engines import engine as engine_module
from hf_trak.engines.engine import Engine, LocalEngine, best_rows, gram
from hf_trak.engines.ray import RayEngine
from hf_trak.errors import HfTrakError, StoreError
from hf_trak.store.table_files import fragments_of, read_fragment
from hf_trak.store.tables import rows_of

Function = Callable[[pa.Table], pa.Table]


@pytest.fixture(scope="module", params=["float32", "int4"])
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TableIndex:
    return table_index(tmp_path_factory.mktemp("index"), request.param)


@pytest.mark.parametrize("most", [1024, 2])
@pytest.mark.parametrize("engine", [LocalEngine(), Shuffling()])
def test_answers_are_those_of_attribute(
    engine: Engine, most: int, index: TableIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MOST_PARTS", most)
    check_answers(engine, index)


def test_the_gram_matrix_is_that_of_the_rows(index: TableIndex) -> None:
    shards = [rows_of(read_fragment(one))[1] for one in fragments_of([index.directory])]
    rows = torch.cat([shard.grads for shard in shards]).double()
    found = gram(LocalEngine(), [index.directory])
    bound = 2 * N * 2.0**-53 * (rows.abs().T @ rows.abs())
    assert bool(((found.matrix - rows.T @ rows).abs() <= bound).all())
    assert found.trace == pytest.approx(float(rows.square().sum()), rel=64 * N * 2.0**-53)


class Losing:
    """Leaves out the result of a part, as engines do that are told to go on after errors, or returns one twice."""

    def __init__(self, times: int) -> None:
        self.times = times

    def map(self, function: Function, parts: pa.Table) -> Iterator[pa.Table]:
        for part in range(parts.num_rows):
            yield from [function(parts.slice(part, 1))] * (self.times if part == 3 else 1)


@pytest.mark.parametrize("times", [0, 2])
def test_each_part_is_counted(times: int, index: TableIndex) -> None:
    with pytest.raises(StoreError, match=r"Losing has returned 1 of 9 parts .* first part 3"):
        best_rows(Losing(times), [index.directory], index.targets, TOP_K)


def shuffled(place: Path) -> None:
    table = pq.read_table(place / "1.parquet")
    pq.write_table(table.take(list(reversed(range(0, table.num_rows, 2)))), place / "1.parquet")


def swapped(place: Path) -> None:
    """Two rows in the wrong places, which no footer says."""
    table = pq.read_table(place / "1.parquet")
    pq.write_table(table.take([1, 0, *range(2, table.num_rows)]), place / "1.parquet")


def of_another_run(place: Path) -> None:
    path = place / "1.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata(pq.read_schema(place.parent / "other/0.parquet").metadata), path)


def plain(place: Path) -> None:
    path = place / "1.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file less": (lambda place: (place / "1.parquet").unlink(), "After row 48 of 60, the 3 tables .* have row 60"),
    "a file in the middle less": (lambda place: (place / "3.parquet").unlink(), "have row"),
    "a file twice": (
        lambda place: shutil.copy(place / "1.parquet", place / "again.parquet"),
        "Expected each row once",
    ),
    "some rows only": (shuffled, "1.parquet cannot be used: `row_id` of its row group 0 does not count up"),
    "rows in another order": (swapped, "1.parquet cannot be used: its row group 0 has not rows"),
    "tables of another run": (of_another_run, "different stores or checkpoints"),
    "no metadata": (plain, "1.parquet cannot be used: its metadata do not say"),
    "a changed bit": (damage, "2.parquet cannot be used"),
    "no files": (lambda place: [path.unlink() for path in place.iterdir()], "Expected tables of a checkpoint"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_whole_index_is_refused(case: str, index: TableIndex, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    shutil.copytree(index.directory, tmp_path / "tables")
    if case == "tables of another run":
        table_index(tmp_path / "run", "float16").directory.rename(tmp_path / "other")
    change(tmp_path / "tables")
    with pytest.raises((HfTrakError, ValueError), match=message):
        best_rows(LocalEngine(), [tmp_path / "tables"], index.targets, TOP_K)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ModuleNotFoundError, match=r"`RayEngine` needs Ray Data\. Install it"):
        RayEngine()


def test_files_and_directories_are_named_together(index: TableIndex) -> None:
    files = sorted(index.directory.iterdir())
    assert len(files) == FILES
    assert fragments_of(files[::-1]) == fragments_of([index.directory])
    assert [one.start for one in fragments_of(files)] == list(range(0, N, 7))
