"""The diffusion recipe: its data, and a whole run that finds the images with a mark."""

import json
from argparse import Namespace

import pytest
import torch
from datasets import load_from_disk
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script

RECIPE = ROOT / "recipes" / "diffusion"


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


def test_the_marks(recipe):
    rows = recipe.load(Namespace(rows=300, marked=12, seed=0))
    pixels, marked = torch.tensor(rows["pixel_values"][:]), torch.tensor(rows["marked"][:])
    assert pixels.shape == (312, 1, 8, 8) and int(marked.sum()) == 12
    assert float(pixels.min()) >= -1 and float(pixels.max()) <= 1
    assert {digit for digit, mark in zip(rows["digit"], rows["marked"], strict=True) if mark} == {3}
    assert torch.equal(recipe.has_mark(pixels), marked)
    targets = recipe.choose_targets(pixels, 3)
    assert targets["marked"][:] == [True] * 3 + [False] * 3


@pytest.mark.slow
def test_a_small_run_writes_what_the_readme_lists(recipe, tmp_path, capsys):
    small = "--rows 20 --marked 2 --training_steps 3 --timesteps 2 --num_draws 1 --proj_dim 16 --num_targets 2"
    recipe.main([*small.split(), *CPU, "--top_k", "3", "--output_dir", str(tmp_path)])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"scored", "train", "summary.json", "report.html", "model.safetensors", "trak"}
    scored = load_from_disk(str(tmp_path / "scored"))
    assert all(len(rows) == 3 for rows in scored["trak_indices"])
    page = report_of(tmp_path)
    assert page.count("<image ") >= 4 and "without a mark" in page
    assert "of the training images have a mark" in capsys.readouterr().out


@pytest.mark.slow
def test_marked_images_taught_the_model_its_marks(tmp_path):
    run_script(RECIPE, tmp_path / "out", *CPU)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = summary["marked_among_most_helpful"]
    assert summary["marked_targets"] == 8
    assert found["of_marked_targets"] > 3 * summary["marked_share"]
    assert found["of_other_targets"] < found["of_marked_targets"] / 2


def test_the_commands_of_the_readme_parse(recipe, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) == 2
    monkeypatch.setattr(recipe, "load", lambda args: pytest.skip("parsed"))
    for command in commands:
        with pytest.raises(pytest.skip.Exception):
            recipe.main(command)
