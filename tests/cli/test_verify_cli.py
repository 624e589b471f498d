"""`hf-trak verify`: rows of a run or given ones, what the library finds, and wrong arguments."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from doc_examples import write_reviews

from hf_trak import TrakConfig
from hf_trak.cli.build import build
from hf_trak.cli.main import main
from hf_trak.cli.parser import DataArguments, ModelArguments, parse_yaml_and_args
from hf_trak.report.run import AttributionRun

MODEL = ("--model", "model", "--train_dataset", "reviews.jsonl", "--use_cpu", "--proj_dim", "64")
TARGETS = ("--eval_dataset", "mine.jsonl")

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `model/`, 40 rows in `reviews.jsonl` and 4 targets in `mine.jsonl`."""
    write_reviews(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ask(place: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run `hf-trak verify --json`; the object that it prints."""

    def answer(*argv: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["verify", *argv, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return answer


@pytest.mark.slow
def test_given_rows_without_features(ask: Ask, place: Path) -> None:
    printed = ask(*MODEL, *TARGETS, "--target", "2", "--rows", "3", "5", "--draws", "5")
    assert printed["target"] == 2 and printed["rows"] == [3, 5] and len(printed["random"]) == 5
    model_args, data = parse_yaml_and_args((ModelArguments, DataArguments), list(MODEL[:4]))
    built = build(model_args, data, TrakConfig("library", proj_dim=64, use_cpu=True))
    target = built.preparation.prepare(Dataset.from_json("mine.jsonl")).select([2])
    found = built.attributor.verify(target, [3, 5], draws=5)
    assert printed["change"] == pytest.approx(found.change, rel=1e-3)
    assert printed["random"] == pytest.approx(found.random, rel=1e-3)
    assert printed["similar_rows"] == list(found.similar_rows)


@pytest.mark.slow
def test_rows_of_a_run(ask: Ask, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["featurize", *MODEL]) == 0
    assert main(["attribute", *TARGETS, "--name", "mine", "--top_k", "6"]) == 0
    scored = AttributionRun.load("trak/scores/mine").scored
    printed = ask(*TARGETS, "--name", "mine", "--target", "1", "--similar", "none", "--count", "4")
    assert printed["rows"] == scored[1]["trak_indices"][:4] and printed["similar"] is None
    harmful = ask(*TARGETS, "--name", "mine", "--target", "1", "--similar", "none", "--harmful")
    assert harmful["rows"] == scored[1]["trak_harmful_indices"]
    assert harmful["change"] < printed["change"]
    capsys.readouterr()
    assert main(["verify", *TARGETS, "--name", "mine", "--target", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Target 1, training rows ") and any("random rows" in line for line in lines)

    before = AttributionRun.load("trak/scores/mine")
    assert main(["verify", *TARGETS, "--name", "mine", "--target", "1", "--count", "4", "--save"]) == 0
    after = AttributionRun.load("trak/scores/mine")
    assert after.facts.pop("verified: target 1, its 4 highest rows").startswith(printed["verdict"][:20])
    assert after.facts == before.facts and after.scored.to_dict() == before.scored.to_dict()
    assert main(["report", "trak/scores/mine"]) == 0
    assert "Verified: target 1" in Path("trak/scores/mine/report.html").read_text(encoding="utf-8")

    capsys.readouterr()
    Dataset.from_json("mine.jsonl").select([0, 1]).to_json("fewer.jsonl")
    assert main(["verify", "--eval_dataset", "fewer.jsonl", "--name", "mine"]) == 1
    assert "has 4 targets, and there are 2 rows" in capsys.readouterr().err
    Dataset.from_json("reviews.jsonl").select(range(4, 8)).to_json("others.jsonl")
    assert main(["verify", "--eval_dataset", "others.jsonl", "--name", "mine"]) == 1
    assert "Target 0 of the run in 'trak/scores/mine' has the text " in capsys.readouterr().err


@pytest.mark.slow
def test_the_targets_of_a_run_are_what_it_has_attributed(ask: Ask, place: Path) -> None:
    """The model's own predictions, which are not the labels of the rows, if these have any."""
    rows = Dataset.from_json("mine.jsonl")
    rows.remove_columns("label").to_json("bare.jsonl")
    assert main(["featurize", *MODEL]) == 0
    model_args, data = parse_yaml_and_args((ModelArguments, DataArguments), list(MODEL[:4]))
    built = build(model_args, data, TrakConfig("library", proj_dim=64, use_cpu=True))
    said = built.attributor.predict(built.preparation.prepare(rows))
    wrong = [int(1 - label) for label in said["labels"]]
    rows.remove_columns("label").add_column("label", wrong).to_json("wrong.jsonl")
    for name in ("bare", "wrong"):
        given = ("--eval_dataset", f"{name}.jsonl", "--name", name)
        assert main(["attribute", *given, "--predict", "--top_k", "6"]) == 0
        printed = ask(*given, "--target", "1", "--similar", "none", "--count", "4", "--draws", "5")
        found = built.attributor.verify(said.select([1]), printed["rows"], similar=None, draws=5)
        assert printed["change"] == pytest.approx(found.change, rel=1e-3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*MODEL, *TARGETS, "--target", "4", "--rows", "1"), "Expected a number from 0 to 3"),
        ((*MODEL, *TARGETS, "--rows", "40"), "distinct numbers from 0 to 39"),
        ((*MODEL, *TARGETS, "--rows", "1", "--similar", "words"), "Expected one of embeddings, bm25, none"),
        ((*MODEL, *TARGETS, "--count", "0"), "`count` is 0"),
        ((*MODEL, *TARGETS, "--rows", "1", "--save"), "`save` is set, and `rows` is [1]"),
        ((*MODEL, *TARGETS), "run"),
        ((*TARGETS, "--index", "model", "--rows", "1"), "`--train_dataset` is missing"),
    ],
)
def test_wrong_arguments(place: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str) -> None:
    assert main(["verify", *argv]) != 0
    assert message in capsys.readouterr().err
