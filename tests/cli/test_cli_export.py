"""`hf-trak export`: a store as tables and back to the bit, beside columns of the rows, which DuckDB filters by."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, load_dataset
from doc_examples import sentences, tiny_bert

from hf_trak.cli.main import main
from hf_trak.report.run import AttributionRun
from hf_trak.scores.streaming import ScaledRows
from hf_trak.scores.tables import score_batch

N, K = 24, 16
SOURCES = sentences(N)["source"][:]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two checkpoints in `trak`, made by the command line."""
    home = tmp_path_factory.mktemp("home")
    for name in ("model", "second"):
        torch.manual_seed(len(name))
        tiny_bert().save_pretrained(home / name)
    sentences(N).save_to_disk(home / "rows")
    rows = ["--model", f"{home}/model", "--train_dataset", f"{home}/rows", "--checkpoints", *given(home)]
    settings = ["--proj_dim", str(K), "--feature_dtype", "int8", "--use_cpu", "--shard_size", "7"]
    assert main(["featurize", "--output_dir", f"{home}/trak", *rows, *settings]) == 0
    return home


def given(home: Path) -> list[str]:
    return [f"{home}/model", f"{home}/second"]


def test_there_and_back_to_the_bit(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["export", f"{home}/trak", "--to", f"{tmp_path}/tables", "--columns", "source", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"output_dir": f"{tmp_path}/tables", "checkpoints": [0, 1], "train_rows": N}
    assert sorted(path.name for path in tmp_path.rglob("*.parquet")) == [
        "checkpoint-0.parquet",
        "checkpoint-1.parquet",
    ]
    read = load_dataset("parquet", data_dir=f"{tmp_path}/tables", cache_dir=f"{tmp_path}/cache", split="train")
    assert read["source"][:] == SOURCES * 2 and read["row_id"][:] == [*range(N)] * 2
    assert main(["export", f"{tmp_path}/tables", "--to", f"{tmp_path}/again"]) == 0
    written = [path.relative_to(home / "trak") for path in sorted((home / "trak").glob("*/train-*"))]
    assert len(written) >= 8
    for path in [*written, Path("trak_config.json")]:
        assert (tmp_path / "again" / path).read_bytes() == (home / "trak" / path).read_bytes()
    one = f"{tmp_path}/tables/checkpoint-1.parquet"
    assert main(["export", one, "--to", f"{tmp_path}/one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["checkpoints"] == [1]


@pytest.mark.slow
def test_tables_have_the_recorded_ridge(home: Path, tmp_path: Path) -> None:
    rows = ["--model", f"{home}/model", "--train_dataset", f"{home}/rows", "--use_cpu", "--lambda_relative", "3"]
    assert main(["featurize", "--output_dir", f"{tmp_path}/trak", "--proj_dim", str(K), *rows]) == 0
    assert main(["export", f"{tmp_path}/trak", "--to", f"{tmp_path}/tables"]) == 0
    asked = ["--eval_dataset", f"{home}/rows", "--max_eval_samples", "3", "--method", "index"]
    assert main(["attribute", "--output_dir", f"{tmp_path}/trak", *asked]) == 0
    index = ["--index", f"{tmp_path}/tables", "--model", f"{home}/model", "--use_cpu"]
    assert main(["attribute", *index, "--output_dir", f"{tmp_path}/work", *asked]) == 0
    runs = [AttributionRun.load(tmp_path / place / "scores/targets") for place in ("trak", "work")]
    assert runs[0].scored.to_dict() == runs[1].scored.to_dict()


@pytest.mark.slow
def test_tables_are_asked_in_place(home: Path, tmp_path: Path) -> None:
    assert main(["export", f"{home}/trak", "--to", f"{tmp_path}/tables"]) == 0
    rows = [
        "--eval_dataset",
        f"{home}/rows",
        "--max_eval_samples",
        "3",
        "--method",
        "index",
        "--name",
        "asked",
        "--json",
    ]
    assert main(["attribute", "--output_dir", f"{home}/trak", *rows]) == 0
    asked = ["attribute", "--index", f"{tmp_path}/tables", "--model", f"{home}/model", "--checkpoints", *given(home)]
    assert main([*asked, "--output_dir", f"{tmp_path}/work", "--use_cpu", *rows]) == 0
    runs = [AttributionRun.load(place / "scores/asked") for place in (home / "trak", tmp_path / "work")]
    assert runs[0].scored.to_dict() == runs[1].scored.to_dict()
    assert main([*asked, "--scored_by", "ray", "--all_scores", "--output_dir", f"{tmp_path}/work", *rows]) == 1


def test_lance_tables_are_asked_in_place_and_read_back(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("lance")
    assert main(["export", f"{home}/trak", "--to", f"{tmp_path}/tables", "--format", "lance"]) == 0
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == [
        "checkpoint-0.lance",
        "checkpoint-1.lance",
    ]
    rows = ["--eval_dataset", f"{home}/rows", "--max_eval_samples", "3", "--use_cpu"]
    asked = ["--index", f"{tmp_path}/tables/checkpoint-1.lance", "--model", f"{home}/second"]
    assert main(["attribute", *asked, "--output_dir", f"{tmp_path}/work", *rows]) == 0
    assert main(["export", f"{tmp_path}/tables/checkpoint-1.lance", "--to", f"{tmp_path}/one"]) == 0
    assert main(["export", f"{tmp_path}/tables", "--to", f"{tmp_path}/again"]) == 0
    written = [path.relative_to(home / "trak") for path in sorted((home / "trak").glob("*/train-*"))]
    for path in written:
        assert (tmp_path / "again" / path).read_bytes() == (home / "trak" / path).read_bytes()


def test_tables_without_columns_need_no_rows(home: Path, tmp_path: Path) -> None:
    assert main(["export", f"{home}/trak", "--to", f"{tmp_path}/tables"]) == 0
    assert "source" not in pq.read_schema(tmp_path / "tables/checkpoint-0.parquet").names


def damaged(home: Path, place: Path) -> list[str]:
    assert main(["export", f"{home}/trak", "--to", f"{place}/bad"]) == 0
    path = place / "bad/checkpoint-1.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    return [f"{place}/bad"]


def other_rows(home: Path, place: Path) -> list[str]:
    Dataset.from_dict({"source": ["cc"]}).save_to_disk(place / "rows")
    return [f"{home}/trak", "--columns", "source", "--train_dataset", f"{place}/rows"]


def without_record(home: Path, place: Path) -> list[str]:
    (place / "bare").mkdir()
    for path in (home / "trak").rglob("*"):
        if path.is_file() and path.name != "featurize.json":
            (place / "bare" / path.relative_to(home / "trak")).parent.mkdir(parents=True, exist_ok=True)
            (place / "bare" / path.relative_to(home / "trak")).write_bytes(path.read_bytes())
    return [f"{place}/bare", "--columns", "source"]


def tables(home: Path, place: Path) -> list[str]:
    assert main(["export", f"{home}/trak", "--to", f"{place}/tables"]) == 0
    return [f"{place}/tables", "--columns", "source"]


REFUSED: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "a damaged table": (damaged, "checkpoint-1.parquet cannot be used"),
    "no such directory": (lambda home, place: [f"{place}/none"], "none cannot be used"),
    "an empty directory": (lambda home, place: [str(place)], "is missing"),
    "no such column": (lambda home, place: [f"{home}/trak", "--columns", "origin"], "`columns` names ['origin']"),
    "a column of the table": (lambda home, place: [f"{home}/trak", "--columns", "q"], "`columns` names ['q']"),
    "other rows": (other_rows, "`columns` has 1 rows"),
    "unknown rows": (without_record, "no training rows are known. Expected `--train_dataset`"),
    "columns of a store": (tables, "a store has no columns of rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_leaves_nothing(
    case: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, message = REFUSED[case]
    arguments = make(home, tmp_path)
    assert main(["export", *arguments, "--to", f"{tmp_path}/result"]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "result").exists() and not list(tmp_path.glob("*tmp*"))


def test_what_exists_is_kept(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("kept")
    assert main(["export", f"{home}/trak", "--to", str(tmp_path)]) == 1
    assert f"`to` is {str(tmp_path)!r}, which exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_duckdb_finds_the_best_rows_of_one_source(home: Path, tmp_path: Path) -> None:
    duckdb: Any = pytest.importorskip("duckdb")
    assert main(["export", f"{home}/trak", "--to", f"{tmp_path}/tables", "--columns", "source"]) == 0
    path = tmp_path / "tables/checkpoint-0.parquet"
    targets = ScaledRows.of(torch.randn(3, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    best = score_batch(pq.read_table(path), targets, N)
    pq.write_table(best, tmp_path / "best.parquet")
    filtered = score_batch(pq.read_table(path, filters=[("source", "==", "book")]), targets, 4)
    for target in range(3):
        query = f"""
            SELECT row_id, score FROM '{tmp_path}/best.parquet' JOIN '{path}' USING (row_id)
            WHERE target = {target} AND source = 'book' ORDER BY score DESC LIMIT 4
        """
        rows = filtered.slice(4 * target, 4)
        assert duckdb.sql(query).fetchall() == list(
            zip(rows["row_id"].to_pylist(), rows["score"].to_pylist(), strict=True)
        )
