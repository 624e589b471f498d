"""The text classification recipe: its arguments, its data, and one small run from command line to summary."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from kit.python_text import PACKAGES, docstrings, python_packages
from recipe_runs import CPU, ROOT, commands_of, imported, report_of

from hf_trak import TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args

RECIPE = ROOT / "recipes" / "text_classification"
SMALL = (
    "--config", str(RECIPE / "smallest.yaml"), "--max_train_samples=120", "--max_eval_samples=20",
    "--num_train_epochs=2", "--save_steps=0.5", "--num_checkpoints=2", "--proj_dim=128", "--shard_size=64",
    "--max_length=32", "--top_k=6", "--num_targets=2", *CPU,
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


@pytest.fixture(scope="module")
def parse(recipe):
    def parse(*argv: str):
        return parse_yaml_and_args((recipe.RecipeArguments, recipe.DataArguments, TrakConfig), list(argv))

    return parse


@pytest.fixture(scope="module")
def finished(tmp_path_factory, recipe):
    out = tmp_path_factory.mktemp("run") / "out"
    return out, printed_by(recipe, out)


def printed_by(recipe, out):
    """Run the recipe in this process; that of images runs as a script."""
    with redirect_stdout(io.StringIO()) as printed:
        recipe.main(["--output_dir", str(out), *SMALL])
    return printed.getvalue()


@pytest.mark.slow
def test_a_run_leaves_scores_that_refer_to_the_training_rows(finished):
    out, printed = finished
    scored, train = (load_from_disk(out / name) for name in ("scored", "train"))
    assert (len(scored), len(train)) == (20, 120)
    assert scored.column_names[:2] == ["text", "label"] and scored.features["predicted"] == scored.features["label"]
    summary = json.loads((out / "summary.json").read_text())
    wrong = np.asarray(scored["label"][:]) != np.asarray(scored["predicted"][:])
    assert summary["accuracy"] == pytest.approx(1 - wrong.mean())
    assert len(summary["checkpoints"]) == 2 and len(summary["attributions"]) == 2
    for target in summary["attributions"]:
        row = scored[target["row"]]
        assert target["text"] == row["text"] and target["label"] == PACKAGES[row["label"]]
        assert [item["row"] for item in target["helped_most"]] == row["trak_indices"][:3]
        assert [item["score"] for item in target["harmed_most"]] == row["trak_harmful_scores"][:3]
        for item in target["helped_most"]:
            assert item["text"] == train[item["row"]]["text"]
            assert item["label"] == PACKAGES[train[item["row"]]["label"]]
        assert f"row {target['helped_most'][0]['row']:>6}" in printed
    assert f"accuracy {summary['accuracy']:.1%}" in printed
    page = report_of(out)
    assert scored[0]["text"][:80] in page and page.count('class="wrong"') == wrong.sum()
    listed = re.findall(r'class="row">row (\d+)', page.partition('<section id="outliers"')[2])
    assert [int(row) for row in listed[:3]] == [item["row"] for item in summary["highest_self_influence"][:3]]


@pytest.mark.slow
def test_the_same_run_again_computes_nothing(finished, recipe):
    out, _ = finished
    files = sorted(path for part in ("trak", "model") for path in (out / part).rglob("*.safetensors"))
    before = [path.stat().st_mtime_ns for path in files]
    assert len(files) > 4
    again = printed_by(recipe, out)
    assert [path.stat().st_mtime_ns for path in files] == before
    assert "train_runtime" not in again


def test_the_config_file_holds_the_defaults(parse):
    assert parse("--config", str(RECIPE / "config.yaml"))[:2] == parse()[:2]
    trak = parse("--config", str(RECIPE / "config.yaml"))[2]
    assert trak == TrakConfig(output_dir=trak.output_dir)


def test_the_commands_of_the_readme_parse(parse, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = commands_of(RECIPE)
    assert len(commands) >= 3
    for command in commands:
        parse(*command)


def test_three_text_columns_are_refused(parse):
    with pytest.raises(ValueError, match=r"`text_columns` is \['a', 'b', 'c'\].*two for pairs"):
        parse("--text_columns", "a", "b", "c")


def test_pairs_of_texts_with_labels_as_words(recipe, parse, tmp_path):
    """As a user's own dataset may look: other columns, labels that are no numbers."""
    rows = {"q": ["who", "what", "where"] * 4, "s": ["me", "that", "there"] * 4, "kind": ["no", "yes", "no"] * 4}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    args, data, _ = parse(
        f"--dataset_name={tmp_path / 'saved'}", "--config", str(RECIPE / "smallest.yaml"), "--text_columns", "q", "s",
        "--label_column=kind", "--eval_split=null", "--eval_fraction=0.25",
    )  # fmt: skip
    data.eval_split = None
    train, targets = recipe.load_texts(data)
    assert (len(train), len(targets)) == (9, 3)
    assert train.features["kind"].names == ["no", "yes"] and targets.features["kind"].names == ["no", "yes"]
    model, tokenizer = recipe.build_model(args, data, train)
    assert model.config.id2label == {0: "no", 1: "yes"}
    tokens = recipe.tokenized(train, tokenizer, args, data)
    text = tokenizer.decode(tokens[0]["input_ids"])
    assert text == f"<s>{train[0]['q']}</s>{train[0]['s']}</s>"
    assert tokens[0]["token_type_ids"][-1] == 1 and tokens[0]["labels"] == train[0]["kind"]
    data.label_column = "label"
    with pytest.raises(ValueError, match=r"not \['label'\]"):
        recipe.load_texts(data)


# -- the text that Python brings --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_documentation_is_labelled_by_its_package():
    splits = python_packages()
    rows = [*splits["train"], *splits["test"]]
    assert len(rows) > 500 and len({row["text"] for row in rows}) > 0.95 * len(rows)
    counts = np.bincount(splits["test"]["label"][:], minlength=len(PACKAGES))
    assert counts.min() >= 15
    import email.message
    import unittest.case

    for package, text in (("email", email.message.Message.__doc__), ("unittest", unittest.case.TestCase.__doc__)):
        text = " ".join(text.split())
        assert [row["label"] for row in rows if row["text"] == text] == [PACKAGES.index(package)]


def test_python_without_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python files"):
        docstrings(Path(tmp_path))
