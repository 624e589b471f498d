"""The recipe of chats about pictures: its data, and a whole run that finds the wrong answers."""

import json

import pytest
from datasets import load_from_disk
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script

pytest.importorskip("trl")
RECIPE = ROOT / "recipes" / "vlm_sft"


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


def test_the_chats(recipe):
    rows, targets = recipe.load(200, 5, 0.5, 0)
    assert len(rows) == 200 and len(targets) == 5
    assert 3 <= sum(rows["wrong"]) <= 20
    for row in [*rows, *targets]:
        said = row["completion"][0]["content"][0]["text"].split()[-1]
        assert said == ("eight" if row["wrong"] else row["digit"])
        assert not row["wrong"] or row["digit"] == "three"
        assert row["images"][0].size == (16, 16)
    assert not any(targets["wrong"]) and set(targets["digit"]) == {"three"}
    words = recipe.processor().tokenizer
    assert words.unk_token_id is None or words.unk_token_id not in words("this is a three")["input_ids"]


@pytest.mark.slow
def test_a_small_run_writes_what_the_readme_lists(recipe, tmp_path, capsys):
    small = "--rows 24 --num_train_epochs 1 --proj_dim 16 --num_targets 2 --top_k 3"
    recipe.main([*small.split(), *CPU, "--output_dir", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} - {"training"} == {
        "scored",
        "train",
        "summary.json",
        "report.html",
        "trak",
    }
    scored = load_from_disk(str(tmp_path / "scored"))
    assert all(len(rows) == 3 for rows in scored["trak_harmful_indices"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["answers"]) == 2 and set(summary["answers"]) <= set(recipe.DIGITS)
    page = report_of(tmp_path)
    assert page.count("<image ") >= 2 and "user: what digit is this" in page
    assert "call a three eight" in capsys.readouterr().out


@pytest.mark.slow
def test_wrong_answers_are_found(tmp_path):
    run_script(RECIPE, tmp_path / "out", *CPU)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["wrong_among_most_harmful"] > 3 * summary["wrong_share"]
    assert summary["wrong_among_most_helpful"] < summary["wrong_among_most_harmful"] / 3


def test_the_commands_of_the_readme_parse(recipe, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) == 2
    monkeypatch.setattr(recipe, "load", lambda *args: pytest.skip("parsed"))
    for command in commands:
        with pytest.raises(pytest.skip.Exception):
            recipe.main(command)
