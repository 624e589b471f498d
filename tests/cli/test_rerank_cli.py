"""Reranking from the command line: a run with both ranks, of a store and of an index from the Hub; its estimate."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from doc_examples import write_reviews
from hub_server import TOKEN, Hub, client, hub
from test_cli_curvature import MODEL, QUICK, library
from torch import nn

from hf_trak import Exact, Index, Rerank, TrakConfig
from hf_trak.attributor import last_result
from hf_trak.cli.build import MethodArguments
from hf_trak.cli.main import main
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.featurize.estimate import estimate
from hf_trak.methods import Method
from hf_trak.report.run import AttributionRun
from hf_trak.scores.scored_dataset import RANK_COLUMNS, STAGE_COLUMN, TOP_K_COLUMNS

__all__ = ["client", "hub"]  # fixtures

Answer = Callable[..., dict[str, Any]]
SETTINGS = ("--curvature", "ekfac", "--curvature_rows", "30")
WANTED = ("--eval_dataset", "mine.jsonl", "--top_k", "5", "--no_self_influence")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `model/`, 40 rows in `reviews.jsonl` and 4 targets in `mine.jsonl`."""
    write_reviews(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command with `--json`; the object that it prints."""

    def ask(*argv: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*argv, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return ask


@pytest.mark.slow
def test_a_run_has_both_ranks(place: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    answer("featurize", *MODEL, *QUICK, *SETTINGS)
    run = answer("attribute", *WANTED, "--method", "rerank", "--rerank_rows", "5", "--name", "mine")["run"]
    attributor, targets = library(curvature="ekfac", curvature_rows=30)
    expected = attributor.featurize().attribute(targets, top_k=5, method=Rerank(5))
    found = load_from_disk(f"{run}/run/scored")
    for name in (*TOP_K_COLUMNS[::2], *RANK_COLUMNS):
        assert found[name][:] == expected[name][:], name
    saved = AttributionRun.load(run)
    count = len(last_result(attributor).answer.rows)
    assert saved.facts["reranked"] == (
        f"{count} rows, the first 5 of each target and end; ekfac, damping 0.1 relative"
    )
    assert saved.distributions is None  # exact scores of these rows, and a run expects those of all
    assert main(["report", run]) == 0
    assert "index rank" in Path(run, "report.html").read_text(encoding="utf-8")
    assert main(["attribute", *WANTED, "--method", "rerank", "--rerank_rows", "4"]) != 0
    assert "`rows` of `Rerank` is 4, less than `top_k`, which is 5" in capsys.readouterr().err
    assert main(["attribute", *WANTED, "--method", "rerank", "--rerank_rows", "9", "--all_scores"]) != 0


@pytest.mark.slow
def test_an_index_from_the_hub_is_reranked_with_single_rows(
    hub: Hub, client: Path, place: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are fetched by their numbers, and tokenized as the targets are. Others may be named, or be at hand."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    rows = Dataset.from_json("reviews.jsonl")
    rows.push_to_hub("tester/reviews", token=TOKEN, private=False)
    model = ("--model", "model", *QUICK)
    answer("featurize", *model, "--train_dataset", "tester/reviews", *SETTINGS)
    answer("curvature", *SETTINGS)
    options = ("--top_k", "3", "--method", "rerank", "--rerank_rows", "5")
    own = load_from_disk(answer("attribute", *WANTED, *options, *SETTINGS, "--name", "own")["run"] + "/run/scored")
    answer("push", "trak", "--repo_id", "tester/index", "--no_private")
    index = ("attribute", "--index", "tester/index", *model[:2], *QUICK[2:], *WANTED, *options, "--output_dir")
    named = ("--train_dataset", "tester/reviews")
    at_hand = ("--train_dataset", "reviews.jsonl")
    for place_of_results, more in (("elsewhere", ()), ("named", named), ("local", at_hand)):
        found = load_from_disk(answer(*index, place_of_results, *more, "--name", "other")["run"] + "/run/scored")
        assert found[STAGE_COLUMN] == ["exact"] * 4
        for name in TOP_K_COLUMNS:
            assert np.allclose(found[name][:], own[name][:], rtol=1e-4), name
    changed = rows.map(lambda row, i: {"text": row["text"] + " indeed"} if i % 2 else row, with_indices=True)
    changed.push_to_hub("tester/changed", token=TOKEN, private=False)
    assert main([*index, "changed", "--train_dataset", "tester/changed", "--name", "other"]) != 0


def test_the_estimate_names_the_stages(place: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(10, 4)
    found = estimate(
        model, 100_000, TrakConfig(proj_dim=64), eval_dataset=10, checkpoints=2, method=Rerank(200)
    ).stages
    assert [found[name].passes for name in ("rerank", "exact targets", "curvature")] == [2 * 4000, 20, 2 * 2 * 4096]
    assert found["rerank"].disk == 4 * 8000 * 11
    assert found["rerank"].seconds is None
    few = estimate(model, 100, TrakConfig(proj_dim=64), eval_dataset=10, method=Rerank(200)).stages
    assert few["rerank"].passes == 100
    printed = answer("estimate", *MODEL, "--eval_size", "4", "--method", "rerank", "--rerank_rows", "7", "--measure")
    assert printed["stages"]["rerank"]["passes"] == 40
    assert printed["stages"]["rerank"]["seconds"] == pytest.approx(40 / printed["rows_per_second"])
    assert main(["estimate", *MODEL, "--eval_size", "4", "--method", "rerank", "--rerank_rows", "7"]) == 0
    assert "\nrerank " in capsys.readouterr().out
    with pytest.raises(ValueError, match="`rows` is 0"):
        estimate(model, 100, TrakConfig(), method=Rerank(0))


@pytest.mark.parametrize(
    ("argv", "method"),
    [
        ("", "auto"),
        ("--method auto", "auto"),
        ("--method index --first_pass_bytes 512 --candidates 2000", Index(512, 2000)),
        ("--method exact --refine cg", Exact(refine="cg")),
        ("--method rerank", Rerank()),
        ("--method rerank --rerank_rows 50 --refine cg,steps=2 --first_pass_bytes 512",
         Rerank(50, refine="cg,steps=2", index=Index(512))),
    ],
)  # fmt: skip
def test_options_are_those_of_the_library(argv: str, method: Method | str) -> None:
    (given,) = parse_yaml_and_args(MethodArguments, argv.split())
    assert given.chosen() == method


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--rerank_rows 5", "`rerank_rows` is 5, and `method` is 'auto', which has no such option"),
        ("--method exact --first_pass_bytes 512", "`first_pass_bytes` is 512, and `method` is 'exact'"),
        ("--method index --refine cg", "`refine` is 'cg', and `method` is 'index'"),
        ("--method rerank --rerank_rows 0", "`rows` is 0"),
        ("--candidates 7", "`candidates` is 7, without `first_pass_bytes`"),
    ],
)
def test_options_of_other_methods_are_refused(argv: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_yaml_and_args(MethodArguments, argv.split())


def test_help_tells_of_the_method_first_and_of_its_options_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for more in ([], ["all"]):
        with pytest.raises(SystemExit):
            main(["attribute", "--help", *more])
        printed.append(capsys.readouterr().out)
    assert ["--rerank_rows ROWS" in text for text in printed] == [False, True]
    assert all("{auto,index,exact,rerank,replay}" in text for text in printed)
