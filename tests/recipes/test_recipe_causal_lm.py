"""The causal language model recipe: its arguments, its data, and one small run from command line to summary."""

import json

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from kit.python_text import python_reference
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script

from hf_trak import TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args

pytestmark = pytest.mark.slow  # a training and a featurization of some seconds

RECIPE = ROOT / "recipes" / "causal_lm"
SMALL = (
    "--config", str(RECIPE / "smallest.yaml"), "--max_eval_samples=8", "--num_train_epochs=25", "--save_steps=0.5",
    "--num_checkpoints=2", "--proj_dim=512", "--shard_size=64", "--top_k=6", "--num_targets=2", *CPU,
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
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    return out, run_script(RECIPE, out, *SMALL)


def test_a_run_leaves_scores_document_by_document_and_token_by_token(finished):
    out, printed = finished
    scored, by_token, train = (load_from_disk(out / name) for name in ("scored", "by_token", "train"))
    assert (len(scored), len(by_token), len(train)) == (8, 2, 160)
    summary = json.loads((out / "summary.json").read_text())
    assert 1 < summary["perplexity"] < 3 and len(summary["attributions"]) == 2  # it has learned what it is asked
    assert f"perplexity {summary['perplexity']:.1f} on held-out documents" in printed
    names, told = np.asarray(train["name"]), np.asarray(scored["name"])
    same = names[np.asarray(scored["trak_indices"][:])[:, :4]] == told[:, None]
    assert same.mean() > 0.25  # of four rows about the same person, among 160: by chance 0.025
    for target in summary["attributions"]:
        row = by_token[target["row"]]
        assert row["trak_indices"] == scored[target["row"]]["trak_indices"][:3]
        parts = np.asarray(row["trak_token_scores"])
        assert parts.shape == (3, len(row["input_ids"]) - 1)
        np.testing.assert_allclose(parts.sum(axis=1), row["trak_scores"], rtol=1e-3, atol=1e-8)
        assert [item["text"] for item in target["helped_most"]] == [train[i]["text"] for i in row["trak_indices"]]
        best = target["words"][0]
        assert best["score"] == pytest.approx(parts[0].max()) and best["position"] == 1 + int(parts[0].argmax())
        assert f"{best['token']!r} ({best['score']:+.3g})" in printed
    page = report_of(out, "by_token", 3)
    assert by_token[0]["text"][:20] in page and page.count("Marked: the part of the text") == 2


def test_a_prompt_is_explained_with_the_same_features(finished):
    """Nothing is trained or featurized again; only the completion counts."""
    out, _ = finished
    train = list((out / "trak").rglob("train-*.safetensors"))
    before = [path.stat().st_mtime_ns for path in train]
    assert train
    run_script(RECIPE, out, *SMALL, "--prompt=In Arles everybody knows Ada, who", "--completion= plays the harp")
    assert [path.stat().st_mtime_ns for path in train] == before
    by_token = load_from_disk(out / "by_token")
    assert len(by_token) == 1 and by_token[0]["text"] == "In Arles everybody knows Ada, who plays the harp"
    positions = by_token[0]["trak_token_positions"]
    assert [label for label in by_token[0]["labels"] if label != -100] == [
        by_token[0]["input_ids"][i] for i in positions
    ]
    assert 0 < len(positions) < len(by_token[0]["input_ids"]) - 2


def test_the_model_continues_a_prompt_without_completion(recipe, parse):
    args, data, _ = parse("--config", str(RECIPE / "smallest.yaml"), "--prompt=The value is", "--new_tokens=3")
    rows = Dataset.from_dict({"text": ["The value is an object of type int. " * 4, "The class statement binds."] * 4})
    model, tokenizer = recipe.build_model(args, data, rows)
    row = recipe.completed(model, tokenizer, args, data)[0]
    assert row["text"].startswith("The value is")
    assert 1 <= sum(label != -100 for label in row["labels"]) <= 4


def test_the_config_file_holds_the_defaults(parse):
    assert parse("--config", str(RECIPE / "config.yaml"))[:2] == parse()[:2]


def test_the_commands_of_the_readme_parse(parse, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = commands_of(RECIPE)
    assert len(commands) >= 3
    for command in commands:
        parse(*command)


def test_a_completion_needs_a_prompt(parse):
    with pytest.raises(ValueError, match="`completion` is 'x' without a `prompt`"):
        parse("--completion=x")


def test_short_rows_are_left_out_before_rows_are_counted(recipe, parse, tmp_path):
    long = "a text of quite some words that goes on"
    Dataset.from_dict({"text": ["", "= Heading =", *[f"{long} {i}" for i in range(10)], ""]}).save_to_disk(
        tmp_path / "saved"
    )
    options = [f"--dataset_name={tmp_path / 'saved'}", "--eval_fraction=0.5"]
    train, targets = recipe.load_documents(parse(*options, "--least_words=8", "--max_train_samples=3")[1])
    assert len(train) == 3 and all(text.startswith(long) for text in [*train["text"], *targets["text"]])
    with pytest.raises(ValueError, match="has 50 words in `text`"):
        recipe.load_documents(parse(*options, "--least_words=50")[1])


def test_the_language_reference_has_paragraphs():
    splits = python_reference()
    rows = [*splits["train"], *splits["test"]]
    assert len(rows) > 500 and len({row["text"] for row in rows}) == len(rows)
    assert all(len(row["text"].split()) >= 12 for row in rows)
    assert {"assert", "lambda", "yield"} <= {row["topic"] for row in rows}
