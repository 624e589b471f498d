"""The CLIP recipe: its arguments, its pairs, and a small training that attribution has to see through."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
from datasets import Dataset, DatasetDict, Features, Image, List, Value, load_from_disk
from PIL import Image as PILImage
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script

pytestmark = pytest.mark.slow  # a training and a featurization of some seconds

RECIPE = ROOT / "recipes" / "clip"
SMALL = ["--config", str(RECIPE / "smallest.yaml"), *CPU]


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


@pytest.fixture(scope="module")
def parse(recipe):
    def parse(*argv: str):
        kinds = (recipe.RecipeArguments, recipe.DataArguments, recipe.RecipeTrakConfig)
        return recipe.parse_yaml_and_args(kinds, list(argv))

    return parse


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output directory and the printed text of a small run by plain Python, as in the README."""
    out = tmp_path_factory.mktemp("run") / "out"
    return out, run_script(RECIPE, out, *SMALL)


def test_swapped_captions_are_most_harmful(finished):
    """A real training: of 400 pairs the ten with a caption of another image come out as what spoils these images."""
    out, printed = finished
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accuracy"] > 0.6  # of ten captions: the model has learned what its images show
    swapped = summary["swapped"]
    assert len(swapped["rows"]) == 10 and swapped["top_k"] == 20
    assert swapped["found"] == sum(rank is not None for rank in swapped["ranks"]) >= 5
    assert swapped["by_chance"] == pytest.approx(0.5)
    assert sum(rank == 0 for rank in swapped["ranks"]) >= 3
    train = load_from_disk(out / "train")
    assert [row for row, mark in enumerate(train["swapped"]) if mark] == swapped["rows"]
    assert f"{swapped['found']} of 10 training pairs with a swapped caption" in printed


def test_scores_refer_to_the_training_pairs(finished):
    out, printed = finished
    scored, train = (load_from_disk(out / name) for name in ("scored", "train"))
    summary = json.loads((out / "summary.json").read_text())
    assert (len(scored), len(train)) == (24, 400)
    helpers = np.asarray(scored["trak_indices"][:])
    assert helpers.shape == (24, 20) and helpers.min() >= 0 and helpers.max() < 400
    captions = np.asarray(train["caption"][:])
    same = (captions[helpers[:, :5]] == np.asarray(scored["caption"][:])[:, None]).mean()
    assert same > 0.5  # by chance 0.1
    right = np.asarray(scored["caption"][:]) == np.asarray(scored["caption_matched"][:])
    assert summary["accuracy"] == pytest.approx(right.mean())
    for target in summary["attributions"]:
        row = scored[target["row"]]
        assert [item["row"] for item in target["harmed_most"]] == row["trak_harmful_indices"][:3]
        assert f"Target {target['row']}: {row['caption']!r}" in printed
    assert (out / "attribution.png").stat().st_size > 10_000
    page = report_of(out)
    assert page.count("<image ") > 24 and scored[0]["caption"] in page


def test_the_same_command_again_computes_nothing(finished, recipe, capsys):
    out, printed = finished
    files = [*out.glob("trak/**/*.safetensors"), *out.glob("model/**/*.safetensors")]
    before = {file: file.stat().st_mtime_ns for file in files}
    assert len(before) > 10
    recipe.main(["--output_dir", str(out), *SMALL])
    assert {file: file.stat().st_mtime_ns for file in files} == before
    again = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("Target")] == [
        line for line in again.splitlines() if line.startswith("Target")
    ]
    with pytest.raises(ValueError, match=r"loss: 'softmax' there, 'sigmoid' given"):
        recipe.main(["--output_dir", str(out), *SMALL, "--loss=sigmoid"])


def test_the_sigmoid_loss(recipe, tmp_path):
    options = [*SMALL, "--loss=sigmoid", "--max_train_samples=64", "--num_train_epochs=2", "--simulated_negatives=20"]
    recipe.main(["--output_dir", str(tmp_path / "out"), *options, "--swapped_captions=0", "--num_checkpoints=1"])
    scored = load_from_disk(tmp_path / "out" / "scored")
    assert np.isfinite(np.asarray(scored["trak_scores"][:])).all()
    config = json.loads((tmp_path / "out" / "trak" / "trak_config.json").read_text())
    assert config["task"]["class"].endswith("SigLIPModelOutput")


# -- arguments -------------------------------------------------------------------------------------------------------


def test_the_config_file_holds_the_defaults(parse):
    args, data, trak = parse("--config", str(RECIPE / "config.yaml"))
    assert (args, data, replace(trak, output_dir=parse()[2].output_dir)) == parse()


def test_the_commands_of_the_readme_parse(parse, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) >= 4
    monkeypatch.chdir(ROOT)
    for command in commands:
        args = parse(*command)[0]
        assert args.model_name is None or args.model_name in open_clip.list_models()
        assert args.pretrained is None or args.pretrained in open_clip.list_pretrained_tags_by_model(args.model_name)


@pytest.mark.parametrize("name", ["num_targets", "top_k", "num_checkpoints", "images_per_side", "simulated_negatives"])
def test_counts_start_at_one(parse, name):
    with pytest.raises(ValueError, match=f"`{name}` is 0"):
        parse(f"--{name}=0")


# -- pairs -----------------------------------------------------------------------------------------------------------


def saved(directory: Path, captions: list) -> str:
    images = [PILImage.new("RGB", (9, 7), (i, 0, 0)) for i in range(len(captions))]
    kind = List(Value("string")) if isinstance(captions[0], list) else Value("string")
    features = Features({"image": Image(), "text": kind})
    rows = Dataset.from_dict({"image": images, "text": captions}, features=features)
    DatasetDict({"train": rows, "test": rows.select(range(1))}).save_to_disk(directory)
    return str(directory)


def test_the_first_of_several_captions_is_taken(recipe, parse, tmp_path):
    path = saved(tmp_path / "x", [["a", "b"], ["c", "d"]])
    train, targets = recipe.load_pairs(parse(f"--dataset_name={path}", "--caption_column=text")[1], 0)
    assert train["text"][:] == ["a", "c"] and targets["text"][:] == ["a"]
    with pytest.raises(ValueError, match=r"not \['caption'\]. Set `image_column` and `caption_column`"):
        recipe.load_pairs(parse(f"--dataset_name={path}")[1], 0)


def test_swaps_exchange_captions_of_pairs_and_remember_them(recipe, parse, tmp_path):
    path = saved(tmp_path / "x", [f"caption {i % 5}" for i in range(20)])
    options = [f"--dataset_name={path}", "--caption_column=text"]
    train, targets = recipe.load_pairs(parse(*options, "--swapped_captions=3")[1], 0)
    rows = [row for row, mark in enumerate(train["swapped"]) if mark]
    assert len(rows) == 6 and targets.column_names == ["image", "text"]
    for row, (now, true) in enumerate(zip(train["text"], train["true_caption"], strict=True)):
        assert true == f"caption {row % 5}" and (now != true) == (row in rows)
    assert sorted(train["text"][:]) == sorted(train["true_caption"][:])
    assert recipe.load_pairs(parse(*options, "--swapped_captions=3")[1], 1)[0]["text"][:] != train["text"][:]
    with pytest.raises(ValueError, match=r"`swapped_captions` is 11, but only \d+ pairs"):
        recipe.load_pairs(parse(*options, "--swapped_captions=11")[1], 0)


# -- models ----------------------------------------------------------------------------------------------------------


def test_the_small_model_takes_the_pairs(recipe, parse):
    args, data, _ = parse()
    model, preprocess, tokenizer = recipe.build_model(args)
    collator = recipe.ImageTextCollator("image", "caption", image_transform=preprocess, tokenizer=tokenizer)
    train, _ = recipe.load_pairs(data, 0)
    batch = collator([train[i] for i in range(3)])
    assert batch["image"].shape == (3, 3, 16, 16) and batch["text"].shape == (3, 8)
    assert model(**batch)["image_features"].shape == (3, 32)
    assert sum(value.numel() for value in model.parameters() if value.requires_grad) < 1e5
