"""The audio recipe: the sounds that it draws, and a whole run that finds the wrong labels."""

import json

import numpy as np
import pytest
from datasets import load_from_disk
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script

RECIPE = ROOT / "recipes" / "audio"


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


def test_the_sounds(recipe):
    rows = recipe.draw(80, 0.5, 0)
    assert np.asarray(rows["input_values"][:]).shape == (80, recipe.FRAMES, recipe.BANDS)
    assert 3 <= sum(rows["mislabelled"]) <= 17
    for row in rows:
        said = recipe.KINDS[row["labels"]]
        assert said == ("falling" if row["mislabelled"] else row["kind"])
        assert row["kind"] == "rising" or not row["mislabelled"]
        level = np.asarray(row["input_values"])
        pitch = level.argmax(axis=1)
        if row["kind"] in ("rising", "falling"):
            rises = np.polyfit(range(len(pitch)), pitch, 1)[0] > 0
            assert rises == (row["kind"] == "rising")
    again = recipe.draw(80, 0.5, 0)
    assert again["input_values"][3] == rows["input_values"][3]


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
    assert scored["kind"][:] == ["rising"] * 2
    assert all(len(rows) == 3 for rows in scored["trak_harmful_indices"])
    page = report_of(tmp_path)
    assert "falling" in page and page.count('src="data:audio/wav;base64,') >= 4
    assert "are rising and labelled as falling" in capsys.readouterr().out


@pytest.mark.slow
def test_mislabelled_clips_are_found(tmp_path):
    run_script(RECIPE, tmp_path / "out", *CPU)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["accuracy"] > 0.8
    assert summary["mislabelled_among_most_harmful"] > 4 * summary["mislabelled_share"]
    assert summary["mislabelled_among_most_harmful"] > 1.2 * summary["mislabelled_among_most_helpful"]


def test_the_commands_of_the_readme_parse(recipe, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) == 2
    monkeypatch.setattr(recipe, "draw", lambda *args: pytest.skip("parsed"))
    for command in commands:
        with pytest.raises(pytest.skip.Exception):
            recipe.main(command)
