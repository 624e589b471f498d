"""Ray as an engine, with two workers: the bits of `attribute`, also after kills; damage is named."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import (
    TableIndex,
    as_lance,
    check_answers,
    check_command,
    check_killed,
    damage,
    small_parts,
    table_index,
)

from hf_trak.errors import StoreError

__all__ = ["small_parts"]  # a fixture

ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> TableIndex:
    return table_index(tmp_path_factory.mktemp("index"), "int4")


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """Ray on this machine, whose processes find the library and the tests' modules."""
    # Paths of sockets have 107 characters at most; those of pytest's directories are too long.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        options = {"object_store_memory": 80 * 2**20, "include_dashboard": False, "log_to_driver": False}
        ray.init("local", num_cpus=2, _temp_dir=place, **options)
        from hf_trak.engines.ray import RayEngine

        yield RayEngine(num_cpus=1)
        ray.shutdown()


@pytest.mark.slow
def test_answers_are_those_of_attribute(engine: Any, index: TableIndex, tmp_path: Path) -> None:
    check_answers(engine, index, tmp_path)


@pytest.mark.slow
def test_it_reads_tables_of_lance(engine: Any, index: TableIndex, tmp_path: Path) -> None:
    pytest.importorskip("lance")
    path = as_lance(index.directory.parent / "whole.parquet", tmp_path / "index.lance", rows=13)
    index.asked(engine, path, output_dir=str(tmp_path / "asked"))


@pytest.mark.slow
def test_the_command_line_asks_it(engine: Any, index: TableIndex, tmp_path: Path) -> None:
    check_command("ray", index, tmp_path)


@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.exhaustive)]
)
def test_killed_and_slow_workers_change_nothing(kills: int, engine: Any, index: TableIndex, tmp_path: Path) -> None:
    check_killed(engine, index, tmp_path, kills)


@pytest.mark.slow
def test_a_damaged_file_is_named(engine: Any, index: TableIndex, tmp_path: Path) -> None:
    shutil.copytree(index.directory, tmp_path / "tables")
    path = damage(tmp_path / "tables")
    with pytest.raises(StoreError, match=rf"Ray has given up a part .*StoreError: {path} cannot be used"):
        index.asked(engine, tmp_path / "tables", output_dir=str(tmp_path / "asked"))


@pytest.mark.slow
def test_parts_that_ray_leaves_out_are_missed(
    engine: Any, index: TableIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(index.directory, tmp_path / "tables")
    damage(tmp_path / "tables")
    monkeypatch.setattr(ray.data.DataContext.get_current(), "max_errored_blocks", 1)
    with pytest.raises(StoreError, match="RayEngine has left out or repeated 1 of 9 parts"):
        index.asked(engine, tmp_path / "tables", output_dir=str(tmp_path / "asked"))
