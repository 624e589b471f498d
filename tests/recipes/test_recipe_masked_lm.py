"""The recipe of masked language models: its rows, and a whole run that finds the planted ones."""

import json
from argparse import Namespace

import pytest
from datasets import load_from_disk
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script

RECIPE = ROOT / "recipes" / "masked_lm"


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


def test_the_rows(recipe):
    rows, targets = recipe.load(Namespace(rows=50))
    assert len(rows) == 50 + len(recipe.PLANTED)
    planted = [text for text, mark in zip(rows["text"], rows["planted"], strict=True) if mark]
    assert sorted(planted) == sorted(recipe.PLANTED)
    assert rows["planted"][0] and rows["planted"][-1] and not all(rows["planted"][:20])
    assert not set(targets["text"]) & set(rows["text"])
    assert targets["about_planted"][:] == [True, True, False, False]
    for text, mark in zip(rows["text"], rows["planted"], strict=True):
        assert ("apricot" in text) == mark


@pytest.mark.slow
def test_a_small_run_writes_what_the_readme_lists(recipe, tmp_path, capsys):
    small = "--rows 20 --num_train_epochs 1 --num_draws 2 --proj_dim 16 --top_k 3"
    recipe.main([*small.split(), *CPU, "--output_dir", str(tmp_path)])
    names = {path.name for path in tmp_path.iterdir()} - {"training"}
    assert names == {"scored", "train", "summary.json", "report.html", "trak"}
    scored = load_from_disk(str(tmp_path / "scored"))
    assert all(len(rows) == 3 for rows in scored["trak_indices"])
    assert recipe.TARGETS[0] in report_of(tmp_path)
    assert "training rows were planted" in capsys.readouterr().out


@pytest.mark.slow
def test_planted_documents_are_found(tmp_path):
    run_script(RECIPE, tmp_path / "out", *CPU)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = summary["planted_among_most_helpful"]
    assert found["of_targets_about_them"] > 5 * summary["planted_share"]
    assert found["of_other_targets"] < found["of_targets_about_them"] / 3


def test_the_commands_of_the_readme_parse(recipe, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) == 2
    monkeypatch.setattr(recipe, "load", lambda args: pytest.skip("parsed"))
    for command in commands:
        with pytest.raises(pytest.skip.Exception):
            recipe.main(command)
