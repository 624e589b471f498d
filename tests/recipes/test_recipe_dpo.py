"""The recipe of preferences: its arguments, its data, and one small run from command line to summary."""

import json
from dataclasses import replace

import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script

pytest.importorskip("trl")

RECIPE = ROOT / "recipes" / "dpo"
SMALL = ["--config", str(RECIPE / "smallest.yaml"), *CPU]


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


@pytest.fixture(scope="module")
def parse(recipe):
    def parse(*argv: str):
        return recipe.parse_yaml_and_args(
            (recipe.RecipeArguments, recipe.DataArguments, recipe.TrakConfig), list(argv)
        )

    return parse


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output directory and the printed text of a small run by plain Python, as in the README."""
    out = tmp_path_factory.mktemp("run") / "out"
    return out, run_script(RECIPE, out, *SMALL)


@pytest.mark.slow
def test_swapped_pairs_harmed_the_targets(finished):
    """A real training with a planted cause: a quarter of the pairs is swapped, and twice as many of the harmful."""
    out, printed = finished
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["train_rows"], summary["targets"]) == (637, 24)
    assert summary["swapped_share"] == pytest.approx(0.246, abs=0.001)
    assert summary["swapped_among_most_harmful"] >= 0.5
    assert summary["swapped_among_most_helpful"] <= 0.4
    scored, train = (load_from_disk(out / name) for name in ("scored", "train"))
    assert len(scored) == 24 and "ref_chosen_logps" in train.column_names
    page = report_of(out)
    assert scored[0]["chosen"][:60] in page and scored[0]["rejected"][:60] in page
    assert "Target mean: all of them together" in printed


@pytest.mark.slow
def test_the_same_command_again_computes_nothing(finished, recipe):
    out, _ = finished
    files = [*out.glob("trak/**/*.safetensors"), *out.glob("model/**/*.safetensors")]
    before = {file: file.stat().st_mtime_ns for file in files}
    recipe.main([*SMALL, "--output_dir", str(out)])
    assert {file: file.stat().st_mtime_ns for file in files} == before
    with pytest.raises(ValueError, match=r"beta: 0.5 there, 0.4 given"):
        recipe.main([*SMALL, "--output_dir", str(out), "--beta=0.4"])


def test_the_config_file_holds_the_defaults(parse):
    args, data, trak = parse("--config", str(RECIPE / "config.yaml"))
    assert (args, data, replace(trak, output_dir=parse()[2].output_dir)) == parse()


def test_the_commands_of_the_readme_parse(parse, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) >= 4
    monkeypatch.chdir(ROOT)
    for command in commands:
        parse(*command)


@pytest.mark.slow
def test_swapped_pairs_are_about_one_package(recipe, parse):
    data = parse("--config", str(RECIPE / "smallest.yaml"))[1]
    train, targets = recipe.load_preferences(data)
    assert len(targets) == 24 and set(targets["package"]) == {"email"} and not any(targets["swapped"])
    about = [row for row in train if row["package"] == "email"]
    assert len(about) > 100 and all(row["swapped"] for row in about) and sum(train["swapped"]) == len(about)
    for row in train.select(range(20)):
        assert row["chosen"] != row["rejected"] and sorted(row["chosen"].split()) == sorted(row["rejected"].split())
    half = recipe.load_preferences(replace(data, swapped_share=0.5))[0]
    assert sum(half["swapped"]) == round(len(about) / 2)
    with pytest.raises(ValueError, match="`swapped_share` is 2"):
        replace(data, swapped_share=2)


def test_other_pairs(recipe, parse, tmp_path):
    rows = {"prompt": ["a"] * 4, "good": ["b"] * 4, "rejected": ["c"] * 4}
    DatasetDict({"train": Dataset.from_dict(rows)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"and not \['chosen'\]"):
        recipe.load_preferences(parse(f"--dataset_name={tmp_path / 'saved'}")[1])
    assert recipe.as_text([{"role": "user", "content": "Hi"}]) == "user: Hi"


@pytest.mark.slow
def test_adapters_take_no_reference(recipe, parse):
    args, data, _ = parse("--config", str(RECIPE / "smallest.yaml"))
    train = recipe.load_preferences(data)[0]
    model, reference, _ = recipe.build_model(args, train)
    assert all((a == b).all() for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert recipe.build_model(replace(args, lora_r=4), train)[1] is None
