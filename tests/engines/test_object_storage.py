"""Tables on object storage, `s3://…`, from a server on this machine that fails, truncates and throttles."""

import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from engine_runs import TableIndex, as_lance, small_parts, table_index
from hub_server import Fault
from s3_server import Storage, served_storage, storage

from hf_trak.engines.engine import LocalEngine
from hf_trak.errors import StoreError
from hf_trak.store.table_store import Tables, TableStore

__all__ = ["served_storage", "small_parts", "storage"]  # fixtures


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, served_storage: Storage) -> TableIndex:
    """Make tables of codes, which the storage has in its bucket `me`."""
    index = table_index(tmp_path_factory.mktemp("index"), "int4")
    shutil.copytree(index.directory, served_storage.directory / "me/parquet")
    return index


@pytest.fixture(params=["parquet", "lance"])
def address(request: pytest.FixtureRequest, index: TableIndex, storage: Storage) -> str:
    """Return the address of the tables for a client that has nothing in its caches."""
    if request.param == "parquet":
        pytest.importorskip("s3fs")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        return "s3://me/parquet"
    pytest.importorskip("lance")
    path = storage.directory / "me/lance/index.lance"
    if not path.exists():
        as_lance(index.directory.parent / "whole.parquet", path, rows=13)
    return "s3://me/lance/index.lance"


def test_the_storage_has_the_same_tables(address: str, index: TableIndex, storage: Storage, tmp_path: Path) -> None:
    index.asked(LocalEngine(), address, output_dir=str(tmp_path))
    assert {entry.method for entry in storage.log} <= {"GET", "HEAD"} and storage.requests("GET", "^/me/")


def bits(tables: str, place: Path) -> list[bytes]:
    """Read the features and weights of all shards."""
    shards = TableStore.over(Tables.find([tables]), place).train(0)
    read = [shards.read(number) for number in range(len(shards))]
    return [one.numpy().tobytes() for shard in read for one in (shard.grads, shard.out_to_loss)]


FAULTS: dict[str, tuple[Fault, bool]] = {
    "fails for a while": (Fault("GET", r"/me/[^?]", 503, times=1), True),
    "throttles": (Fault("GET", r"/me/[^?]", 429, times=1, skip=3), True),
    "fails": (Fault("GET", r"/me/[^?]", 503, skip=3), False),
    "refuses": (Fault("GET", r"/me/[^?]", 403, skip=3), False),
    "sends half of what it says": (Fault("GET", r"/me/[^?]", "half", skip=3), False),
    "hangs up halfway": (Fault("GET", r"/me/[^?]", "drop", skip=3), False),
    "changes a bit": (Fault("GET", r"/me/[^?]", "flip", skip=3), False),
    "cannot list": (Fault("GET", r"list-type", 403), False),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_failing_storage_changes_no_bit(
    case: str, address: str, index: TableIndex, storage: Storage, tmp_path: Path
) -> None:
    fault, recovers = FAULTS[case]
    storage.faults.append(replace(fault))
    expected = bits(str(index.directory), tmp_path / "here")
    if recovers:
        assert bits(address, tmp_path / "there") == expected and not storage.faults[0].times
        return
    with pytest.raises(StoreError, match=rf"{address}.* cannot be used"):
        bits(address, tmp_path / "there")
    storage.faults.clear()
    assert bits(address, tmp_path / "there") == expected
