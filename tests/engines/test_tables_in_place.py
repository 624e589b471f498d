"""Tables asked in place: the bits of `attribute` from shards, from disk and a server, by any engine and division."""

import functools
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from doc_examples import sentences, tiny_bert
from engine_runs import (
    FILES,
    TOP_K,
    N,
    Shuffling,
    TableIndex,
    as_lance,
    check_answers,
    damage,
    exam,
    small_parts,
    table_index,
)
from hub_server import Fault, Hub, client, hub

from hf_trak import Exact, Index, TrakAttributor, TrakConfig
from hf_trak.engines import engine as engine_module
from hf_trak.engines.engine import Engine, LocalEngine
from hf_trak.engines.ray import RayEngine
from hf_trak.errors import ConfigMismatchError, HfTrakError, StoreError
from hf_trak.store.sealed import sealed_bytes, unsealed
from hf_trak.store.store import FeatureStore
from hf_trak.store.table_files import FACTS, fragments_of
from hf_trak.store.table_store import Tables, TableStore
from hf_trak.store.tables import write_table

__all__ = ["client", "hub", "small_parts"]  # fixtures


Function = Callable[[pa.Table], pa.Table]


@functools.cache
def made(dtype: str, place: Path) -> TableIndex:
    return table_index(place / dtype, dtype)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index")


@pytest.fixture(params=["float32", "bfloat16", "int4"])
def index(request: pytest.FixtureRequest, place: Path) -> TableIndex:
    return made(request.param, place)


@pytest.mark.few(3)
@pytest.mark.parametrize("engine", [None, LocalEngine(), Shuffling()])
def test_answers_are_those_of_the_shards(engine: Engine | None, index: TableIndex, tmp_path: Path) -> None:
    if engine is None:
        index.asked(output_dir=str(tmp_path))
    else:
        check_answers(engine, index, tmp_path)
    assert not list(tmp_path.rglob("train-*"))


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [4, 13, N])
def test_any_row_groups_do(rows: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a few large parts."""
    index = made("float32", place)
    monkeypatch.setattr(engine_module, "MOST_PARTS", 2)
    path = tmp_path / "index.parquet"
    pq.write_table(pq.read_table(index.directory.parent / "whole.parquet"), path, row_group_size=rows)
    assert len(fragments_of([path])) == -(-N // rows)
    for number, engine in enumerate((None, LocalEngine())):
        index.asked(engine, path, output_dir=str(tmp_path / str(number)))


def test_checkpoints_are_averaged_and_targets_grouped(tmp_path: Path) -> None:
    rows, model = sentences(N), tiny_bert()
    config = TrakConfig(
        str(tmp_path / "trak"), proj_dim=64, use_cpu=True, feature_dtype="int8", shard_size=16, budget="fast"
    )
    weights = {2: model.state_dict(), 5: tiny_bert().state_dict()}
    first = TrakAttributor(model, config, rows).featurize(weights)
    (tmp_path / "tables").mkdir()
    for model_id in weights:
        write_table(first.features.store, model_id, tmp_path / f"tables/{model_id}.parquet")
    options: dict[str, Any] = {"output_dir": str(tmp_path / "asked"), "use_cpu": True, "checkpoints": weights}
    ready = TrakAttributor.from_pretrained(str(tmp_path / "tables"), model, **options)
    assert ready.features.store.model_ids == [2, 5]
    ready.features.scored_by = Shuffling()
    for group_by in (None, "label"):
        expected = first.attribute(exam(), top_k=N + 1, group_by=group_by, checkpoints=weights)
        found = ready.attribute(exam(), top_k=N + 1, group_by=group_by)
        assert found.to_dict() == expected.to_dict()
    one = TrakAttributor.from_pretrained(str(tmp_path / "tables/5.parquet"), tiny_bert(), **options | {
        "output_dir": str(tmp_path / "one"), "checkpoints": {5: weights[5]}
    })  # fmt: skip
    expected = first.attribute(exam(), top_k=3, checkpoints={5: weights[5]})
    assert one.attribute(exam(), top_k=3)["trak_scores"][:] == expected["trak_scores"][:]


def test_tables_have_the_ridge_that_was_chosen(place: Path, tmp_path: Path) -> None:
    index = made("int4", place)
    source = str(index.directory.parent / "trak")
    path = write_table(FeatureStore.load(source), 0, tmp_path / "index.parquet", lambda_relative=3.0)
    shards = TrakAttributor.from_pretrained(source, index.model, use_cpu=True)
    expected = shards.attribute(exam(), top_k=TOP_K, method=Index(lambda_relative=3.0))
    assert expected["trak_scores"][:] != index.best[True][1]
    options: dict[str, Any] = {"output_dir": str(tmp_path / "work"), "use_cpu": True}
    for engine in (None, Shuffling()):
        ready = TrakAttributor.from_pretrained(str(path), index.model, **options)
        ready.features.scored_by = engine
        assert ready.attribute(exam(), top_k=TOP_K, method="index").to_dict() == expected.to_dict()
    index.asked(None, path, **options, lambda_relative=TrakConfig(budget="fast").lambda_relative)


def test_an_engine_does_what_it_can_or_nothing(place: Path, tmp_path: Path) -> None:
    index = made("int4", place)
    ready = index.asked(LocalEngine(), output_dir=str(tmp_path))
    for options in ({"top_k": None}, {"per": "train"}, {"method": Exact()}, {"method": Index(first_pass_bytes=8)}):
        with pytest.raises(ValueError, match=r"`features\.scored_by` is LocalEngine, and"):
            ready.attribute(exam(), **options)
    ready.features.scored_by = None
    scored = ready.attribute(exam(), top_k=TOP_K, method=Index(first_pass_bytes=32, candidates=N))
    assert scored["trak_scores"][:] == index.best[True][1]
    assert len(ready.attribute(exam(), top_k=None)["trak_scores"][0]) == N


class Losing:
    """Leaves out the result of a part, as engines do that are told to go on after errors, or returns one twice."""

    def __init__(self, times: int) -> None:
        self.times = times

    def map(self, function: Function, parts: pa.Table) -> Iterator[pa.Table]:
        for part in range(parts.num_rows):
            yield from [function(parts.slice(part, 1))] * (self.times if part == 3 else 1)


@pytest.mark.parametrize("times", [0, 2])
def test_each_part_is_counted(times: int, place: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"Losing has left out or repeated 1 of 9 parts, first part 3"):
        made("int4", place).asked(Losing(times), output_dir=str(tmp_path))


def test_footers_are_read_once_in_a_process(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all copies of the shards that an engine sends there; those of another question read them again."""
    store = TableStore.over(Tables.find([made("int4", place).directory]), tmp_path)
    make, read = pq.ParquetFile, list[str]()

    def opened(path: str, *args: Any, metadata: Any = None, **options: Any) -> Any:
        if metadata is None:
            read.append(path)
        return make(path, *args, metadata=metadata, **options)

    monkeypatch.setattr(pq, "ParquetFile", opened)
    for question in (1, 2):
        sent = pickle.dumps(store.train(0))
        for _ in range(3):
            copy = pickle.loads(sent)
            parts = list(copy)
            assert len(parts) == 9 and len(read) == question * FILES
        assert copy.__dict__.keys() - pickle.loads(pickle.dumps(copy)).__dict__.keys() >= {"_footers"}


class Counting(LocalEngine):
    """Counts the parts."""

    counts: ClassVar[list[int]] = []

    def map(self, function: Function, parts: pa.Table) -> Iterator[pa.Table]:
        self.counts.append(parts.num_rows)
        return super().map(function, parts)


@pytest.mark.parametrize(("shards", "parts"), [(2, 5), (4, 3), (9, 1), (10_000, 1)])
def test_parts_are_large(
    shards: int, parts: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PART_BYTES", shards * 7 * 32)  # a row of 64 features has 32 bytes
    monkeypatch.setattr(Counting, "counts", [])
    made("int4", place).asked(Counting(), output_dir=str(tmp_path))
    assert Counting.counts and set(Counting.counts) == {parts}


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
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_what_is_not_the_whole_index_is_refused(dtype: str, case: str, place: Path, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    index = made(dtype, place)
    shutil.copytree(index.directory, tmp_path / "tables")
    if case == "tables of another run":
        shutil.copytree(made("bfloat16", place).directory, tmp_path / "other")
    change(tmp_path / "tables")
    with pytest.raises((HfTrakError, ValueError), match=message):
        index.asked(LocalEngine(), tmp_path / "tables", output_dir=str(tmp_path / "work"))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ModuleNotFoundError, match=r"`RayEngine` needs Ray Data\. Install it"):
        RayEngine()


def test_files_and_directories_are_named_together(place: Path, tmp_path: Path) -> None:
    index = made("int4", place)
    files = sorted(index.directory.iterdir())
    assert len(files) == FILES
    assert fragments_of(files[::-1]) == fragments_of([index.directory])
    assert [one.start for one in fragments_of(files)] == list(range(0, N, 7))
    with pytest.raises(ValueError, match="Expected tables of a checkpoint"):
        fragments_of([tmp_path])


def test_other_models_and_other_directories_are_refused(place: Path, tmp_path: Path) -> None:
    index = made("int4", place)
    tables = str(index.directory)
    torch.manual_seed(7)
    with pytest.raises(HfTrakError, match="Expected one of those: the very weights"):
        TrakAttributor.from_pretrained(tables, tiny_bert(), output_dir=str(tmp_path))
    with pytest.raises(ConfigMismatchError, match="another configuration"):
        TrakAttributor.from_pretrained(
            tables, index.model, output_dir=str(made("float32", place).directory.parent / "trak")
        )
    with pytest.raises(ValueError, match="Expected `model=`"):
        TrakAttributor.from_pretrained(tables, output_dir=str(tmp_path))
    index.asked(output_dir=str(index.directory.parent / "trak"))  # the directory of the run itself
    shutil.copytree(index.directory, tmp_path / "bad")
    path = damage(tmp_path / "bad")
    for engine in (None, LocalEngine()):
        with pytest.raises(StoreError, match=f"{path} cannot be used"):
            index.asked(engine, path.parent, output_dir=str(tmp_path / "work"))


@pytest.fixture
def served(hub: Hub, client: Path, place: Path) -> Iterator[tuple[TableIndex, str]]:
    """Tables of codes in a dataset repo on this machine, whose file system has nothing in its caches."""
    index = made("int4", place)
    hub.put("dataset", "me/tables", {f"int4/{path.name}": path.read_bytes() for path in index.directory.iterdir()})
    fsspec.get_filesystem_class("hf").clear_instance_cache()
    yield index, "hf://datasets/me/tables/int4"
    fsspec.get_filesystem_class("hf").clear_instance_cache()


@pytest.mark.parametrize("engine", [None, LocalEngine()])
def test_a_server_has_the_same_tables(engine: Engine | None, served: tuple[TableIndex, str], tmp_path: Path) -> None:
    index, address = served
    ready = index.asked(engine, address, output_dir=str(tmp_path))
    assert ready.features.store.output_dir == tmp_path


FAULTS: dict[str, tuple[Fault, bool]] = {
    "fails for a while": (Fault("GET", r"\.parquet", 503, times=3), True),
    "throttles": (Fault("GET", r"\.parquet", 429, times=2, skip=4), True),
    "fails": (Fault("GET", r"\.parquet", 503, skip=6), False),
    "refuses": (Fault("GET", r"2\.parquet", 403, skip=3), False),
    "sends half of what it says": (Fault("GET", r"\.parquet", "half", skip=9), False),
    "hangs up halfway": (Fault("GET", r"\.parquet", "drop", skip=9), False),
    "changes a bit": (Fault("GET", r"\.parquet", "flip", skip=9), False),
    "cannot list": (Fault("GET", r"/tree/", 500), False),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_failing_server_changes_no_bit(case: str, hub: Hub, served: tuple[TableIndex, str], tmp_path: Path) -> None:
    index, address = served
    fault, recovers = FAULTS[case]
    hub.faults.append(fault)
    if recovers:
        index.asked(None, address, output_dir=str(tmp_path))
        return
    with pytest.raises(HfTrakError, match=r"hf://datasets/me/tables.* cannot be used"):
        index.asked(None, address, output_dir=str(tmp_path))
    hub.faults.clear()
    index.asked(None, address, output_dir=str(tmp_path))


Change = Callable[[pa.Table], pa.Table]


def cast(name: str, kind: pa.DataType) -> Change:
    """Give a column another type, and values of zero."""

    def change(table: pa.Table) -> pa.Table:
        size = kind.byte_width if pa.types.is_fixed_size_binary(kind) else kind.list_size * 4
        values = pa.Array.from_buffers(pa.binary(size), N, [None, pa.py_buffer(bytes(N * size))]).view(kind)
        facts = table.schema.field(name).metadata
        return table.set_column(table.schema.get_field_index(name), pa.field(name, kind, metadata=facts), values)

    return change


def edited(name: str, value: Any) -> Change:
    """Change a column in row 3."""

    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        field = table.schema.field(name)
        values[3] = value
        return table.set_column(
            table.schema.get_field_index(name), field.with_nullable(True), pa.array(values, field.type)
        )

    return change


def told(key: str, value: Any) -> Change:
    """Change what the metadata say of the store, with a checksum that fits."""

    def change(table: pa.Table) -> pa.Table:
        facts = unsealed(json.loads(table.schema.metadata[FACTS]))
        (facts if key in facts else facts["config"])[key] = value
        return table.replace_schema_metadata({FACTS: sealed_bytes(facts)})

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "codes of other widths": (cast("codes", pa.binary(31)), "`codes` has the type"),
    "more features than the store": (told("proj_dim", 65), "another configuration|its features are not 65"),
    "another kind of features": (told("feature_dtype", "float32"), "another configuration|its features are not"),
    "a scale that is no number": (edited("scale", float("nan")), "scale"),
    "an infinite weight": (edited("q", float("inf")), "gradient"),
    "a null scale": (edited("scale", None), "1 nulls"),
    "null codes": (edited("codes", None), "1 nulls"),
    "a row twice": (edited("row_id", 4), "has not rows"),
    "a row less": (lambda table: table.slice(0, N - 1), f"After row {N - 2} of {N}"),
    "no weights": (lambda table: table.drop_columns(["q"]), "no column `q`"),
    "more rows than there are": (told("train_size", 10**12), "of 1000000000000"),
    "rows as text": (told("train_size", "60"), "of 60"),
    "shards of nothing": (told("shard_size", 0), "`shard_size`"),
    "more features than readers accept": (told("proj_dim", 10**9), "`proj_dim` is 1000000000"),
    "no fingerprint": (told("checkpoint", {"model_id": 0}), "metadata do not say"),
    "an id that is text": (told("checkpoint", {"model_id": "../..", "fingerprint": "a"}), "metadata do not say"),
    "a configuration that is a list": (told("config", [1]), "metadata do not say"),
    "another model": (told("checkpoint", {"model_id": 0, "fingerprint": "a"}), "Expected one of those"),
    "a ridge below zero": (told("chosen", {"lambda_relative": -1.0}), "`lambda_relative` is -1.0"),
    "a ridge that is text": (told("chosen", {"lambda_relative": "a"}), "`lambda_relative` is 'a'"),
    "a calibration of nothing": (told("chosen", {"calibration": {}}), "metadata do not say"),
    "a calibration without methods": (told("chosen", {"calibration": {"identity": {}}}), "its figures are none"),
    "another task": (told("task", {"class": "os.system", "settings": {}}), "cannot be built|another configuration"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tables_are_refused(case: str, place: Path, tmp_path: Path) -> None:
    change, message = HOSTILE[case]
    index = made("int4", place)
    pq.write_table(change(pq.read_table(index.directory.parent / "whole.parquet")), tmp_path / "index.parquet")
    with pytest.raises((HfTrakError, ValueError), match=message):
        index.asked(None, tmp_path / "index.parquet", output_dir=str(tmp_path / "work"))


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_lance_tables_are_refused(case: str, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("lance")
    change, message = HOSTILE[case]
    index = made("int4", place)
    pq.write_table(change(pq.read_table(index.directory.parent / "whole.parquet")), tmp_path / "index.parquet")
    (tmp_path / "trak").symlink_to(index.directory.parent / "trak")
    path = as_lance(tmp_path / "index.parquet", tmp_path / "index.lance")
    with pytest.raises((HfTrakError, ValueError), match=message):
        index.asked(None, path, output_dir=str(tmp_path / "work"))


@pytest.mark.parametrize(
    ("engine", "rows", "name"),
    [(None, 4, "{}/index.lance"), (Shuffling(), 13, "file://{}/index.lance"), (None, N, "file://{}"), (None, 7, "{}")],
)
def test_lance_tables_are_asked_in_place(
    engine: Engine | None, rows: int, name: str, index: TableIndex, tmp_path: Path
) -> None:
    pytest.importorskip("lance")
    path = as_lance(index.directory.parent / "whole.parquet", tmp_path / "tables/index.lance", rows)
    assert len(fragments_of([path])) == -(-N // rows)
    index.asked(engine, name.format(path.parent), output_dir=str(tmp_path / "work"))


def test_changed_bits_of_lance_tables_change_no_answer(place: Path, tmp_path: Path) -> None:
    """Lance itself notices some of them alone."""
    pytest.importorskip("lance")
    index, work = made("int4", place), str(tmp_path / "work")
    path = as_lance(index.directory.parent / "whole.parquet", tmp_path / "index.lance", N)
    (data,) = (path / "data").iterdir()
    content, refused = data.read_bytes(), 0
    for at in range(0, len(content), len(content) // 20):
        data.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        try:
            index.asked(None, path, output_dir=work)
        except StoreError as error:
            assert str(path) in str(error) or "The table" in str(error)
            refused += 1
    assert refused >= 5
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match=f"{path} cannot be used"):
        index.asked(None, path, output_dir=work)
    data.unlink()
    with pytest.raises(StoreError, match=f"{path} cannot be used"):
        index.asked(None, path, output_dir=work)


def test_lance_tables_stay_in_their_directory(place: Path, tmp_path: Path) -> None:
    """Others may name any place to read from."""
    lance: Any = pytest.importorskip("lance")
    path = as_lance(made("int4", place).directory.parent / "whole.parquet", tmp_path / "index.lance")
    lance.dataset(path).shallow_clone(str(tmp_path / "clone.lance"), 1)
    assert lance.dataset(tmp_path / "clone.lance").count_rows() == N
    with pytest.raises(StoreError, match=r"clone\.lance cannot be used: it has files outside of its directory"):
        fragments_of([tmp_path / "clone.lance"])


def test_what_lance_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(ModuleNotFoundError, match=r"`\.lance` need Lance\. Install it"):
        fragments_of([tmp_path / "index.lance"])


def test_bombs_are_refused_before_they_are_read(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few kilobytes, whose rows would fill the memory."""
    index, path = made("int4", place), tmp_path / "index.parquet"
    table = pq.read_table(index.directory.parent / "whole.parquet", columns=["row_id"])
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(N << 16, np.float32)), 1 << 16)
    pq.write_table(table.append_column("features", wide), path, compression="zstd")
    assert path.stat().st_size < 1 << 16 < wide.nbytes >> 7
    monkeypatch.setattr("hf_trak.store.table_files._MOST_BYTES", 8 << 20)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    with pytest.raises(StoreError, match="its row group 0 has 15,728,640 bytes, more than 8,388,608"):
        fragments_of([path])


def test_secrets_of_an_address_are_not_shown() -> None:
    with pytest.raises(StoreError) as found:
        fragments_of(["nosuch://user:word@host/index.parquet?signature=abc#d"])
    assert "nosuch://host/index.parquet cannot be used" in str(found.value)
    assert not {"word", "abc"} & set(str(found.value).replace("=", " ").replace(":", " ").split())
