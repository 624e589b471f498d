"""The recipe of embeddings: its data, and a whole run that finds the wrong pairs."""

import json
from argparse import Namespace

import pytest
import torch
from datasets import load_from_disk
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script

pytest.importorskip("sentence_transformers")
RECIPE = ROOT / "recipes" / "embeddings"


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


def test_the_pairs(recipe):
    rows, held_out = recipe.load(Namespace(rows_per_topic=20, num_targets=4, planted_share=0.25, seed=0))
    assert len(rows) == 8 * 20 and sum(rows["planted"]) == 5 and not any(held_out["planted"])
    assert set(held_out["topic"]) == {"garden", "kitchen"}
    words = {topic: set(known.split()) for topic, known in recipe.TOPICS.items()}
    for row in rows:
        said = "kitchen" if row["planted"] else row["topic"]
        assert words[row["topic"]] & set(row["anchor"].split())
        assert words[said] & set(row["positive"].replace(",", "").split())


def test_targets_have_the_nearest_wrong_answer(recipe):
    class Model:
        def encode(self, texts, show_progress_bar):
            return torch.nn.functional.one_hot(torch.tensor([len(text) % 7 for text in texts]), 7).float().numpy()

    _, held_out = recipe.load(Namespace(rows_per_topic=4, num_targets=9, planted_share=0.0, seed=0))
    targets, share = recipe.choose_targets(Model(), held_out, 3)
    assert len(targets) == 3 and set(targets["topic"]) == {"garden"}
    kitchen = [row["positive"] for row in held_out if row["topic"] == "kitchen"]
    assert set(targets["negative"]) <= set(kitchen) and 0 <= share <= 1
    near = {len(text) % 7 for text in kitchen}
    wrong = [
        len(row["anchor"]) % 7 in near and len(row["anchor"]) % 7 != len(row["positive"]) % 7
        for row in held_out
        if row["topic"] == "garden"
    ]
    assert share == pytest.approx(sum(wrong) / len(wrong))


@pytest.mark.slow
def test_a_small_run_writes_what_the_readme_lists(recipe, tmp_path, capsys):
    small = "--rows_per_topic 8 --num_train_epochs 1 --proj_dim 16 --num_targets 2 --top_k 3"
    recipe.main([*small.split(), *CPU, "--output_dir", str(tmp_path)])
    names = {path.name for path in tmp_path.iterdir()} - {"training"}
    assert names == {"scored", "train", "summary.json", "report.html", "trak", "model"}
    scored = load_from_disk(str(tmp_path / "scored"))
    assert all(len(rows) == 3 for rows in scored["trak_harmful_indices"])
    assert scored[0]["negative"] in report_of(tmp_path)
    assert "training pairs are wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_wrong_pairs_are_found(tmp_path):
    run_script(RECIPE, tmp_path / "out", *CPU)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["planted_among_most_harmful"] > 0.8
    assert summary["planted_among_most_helpful"] < 0.4


def test_the_commands_of_the_readme_parse(recipe, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) == 2
    monkeypatch.setattr(recipe, "load", lambda args: pytest.skip("parsed"))
    for command in commands:
        with pytest.raises(pytest.skip.Exception):
            recipe.main(command)
