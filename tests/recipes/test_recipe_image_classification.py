"""The image classification recipe: its arguments, its data, and one small run from command line to picture."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value, load_from_disk
from kit.training import spread
from PIL import Image as PILImage
from recipe_runs import report_of
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from hf_trak.store.sealed import write_sealed
from hf_trak.weights.checkpoints import load_into

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "image_classification"

SMALL = [
    "--max_train_samples=150", "--max_eval_samples=30", "--num_train_epochs=2", "--save_steps=0.5",
    "--num_checkpoints=2", "--proj_dim=256", "--shard_size=64", "--top_k=6", "--num_targets=2", "--images_per_side=3",
    "--use_cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def recipe():
    """The modules of the recipe, imported as Python finds them when the script runs."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield importlib.import_module("run")
    finally:
        sys.path.remove(str(RECIPE))
        for name in ("run", "image_data", "presentation"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def parse(recipe):
    def parse(*argv: str):
        kinds = (recipe.RecipeArguments, recipe.DataArguments, recipe.RecipeTrakConfig)
        return recipe.parse_yaml_and_args(kinds, list(argv))

    return parse


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output directory and the printed text of a small run by plain Python, as in the README."""
    directory = tmp_path_factory.mktemp("run")
    return directory, start([sys.executable], directory)


def start(launcher: list[str], directory: Path, *more: str) -> str:
    command = [*launcher, str(RECIPE / "run.py"), "--output_dir", str(directory / "out"), *SMALL, *more]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "cache")}
    result = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def shard_times(directory: Path) -> dict[str, int]:
    files = [file for name in ("trak", "model") for file in (directory / "out" / name).rglob("*.safetensors")]
    return {str(file): file.stat().st_mtime_ns for file in files}


# -- one run ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_scores_that_refer_to_the_training_rows(finished):
    directory, printed = finished
    scored, train = (load_from_disk(directory / "out" / name) for name in ("scored", "train"))
    assert (len(scored), len(train)) == (30, 150)
    for indices, scores, descending in (
        ("trak_indices", "trak_scores", True),
        ("trak_harmful_indices", "trak_harmful_scores", False),
    ):
        rows, values = np.asarray(scored[indices][:]), np.asarray(scored[scores][:])
        assert rows.shape == values.shape == (30, 6)
        assert rows.min() >= 0 and rows.max() < 150
        assert all(len(set(row)) == 6 for row in rows.tolist())
        assert (np.diff(values, axis=1) <= 0).all() if descending else (np.diff(values, axis=1) >= 0).all()
    assert np.asarray(scored["trak_scores"][:]).max() > 0 > np.asarray(scored["trak_harmful_scores"][:]).min()
    assert scored.features["label_predicted"] == scored.features["label"]
    assert "Target " in printed and "helped most: " in printed


@pytest.mark.slow
def test_the_summary_agrees_with_the_scores(finished):
    directory, printed = finished
    summary = json.loads((directory / "out" / "summary.json").read_text())
    scored, train = (load_from_disk(directory / "out" / name) for name in ("scored", "train"))
    wrong = [row for row in range(30) if scored[row]["label"] != scored[row]["label_predicted"]]
    assert summary["accuracy"] == pytest.approx(1 - len(wrong) / 30)
    page = report_of(directory / "out")
    assert page.count("<image ") > 30 and page.count('class="wrong"') == len(wrong)
    assert [Path(path).name for path in summary["checkpoints"]] == ["checkpoint-5", "checkpoint-10"]
    assert len(summary["attributions"]) == 2
    for target in summary["attributions"]:
        row = scored[target["row"]]
        assert target["row"] in wrong or len(wrong) < 2  # misclassified ones first
        assert (target["label"], target["predicted"]) == (str(row["label"]), str(row["label_predicted"]))
        for side, prefix in (("helped_most", "trak_"), ("harmed_most", "trak_harmful_")):
            assert [item["row"] for item in target[side]] == row[f"{prefix}indices"][:3]
            assert [item["label"] for item in target[side]] == [
                str(train[i]["label"]) for i in row[f"{prefix}indices"][:3]
            ]
            assert f"(row {target[side][0]['row']}, {target[side][0]['score']:+.3g})" in printed


@pytest.mark.slow
def test_the_picture_is_a_picture(finished):
    pixels = np.asarray(PILImage.open(finished[0] / "out" / "attribution.png").convert("RGB"))
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    for frame in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (pixels == np.array(frame)).all(axis=-1).sum() > 500


@pytest.mark.slow
def test_the_same_command_under_accelerate_launch_computes_nothing_again(finished):
    directory, printed = finished
    before = shard_times(directory)
    assert len(before) > 6
    again = start([sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", "--cpu"], directory)
    assert shard_times(directory) == before
    strip = [line for line in printed.splitlines() if line.startswith(("Target", "  helped", "  harmed", "150"))]
    assert strip and [line for line in again.splitlines() if line in strip] == strip
    assert "train_runtime" in printed and "train_runtime" not in again


@pytest.mark.slow
def test_other_settings_are_refused_and_leave_everything_as_it_was(finished, recipe):
    directory = finished[0]
    before = shard_times(directory)
    with pytest.raises(ValueError, match=r"learning_rate: 0.002 there, 0.1 given[\s\S]*--overwrite"):
        recipe.main(["--output_dir", str(directory / "out"), *SMALL, "--learning_rate=0.1"])
    with pytest.raises(ValueError, match="proj_dim"):
        recipe.main(["--output_dir", str(directory / "out"), *SMALL, "--proj_dim=128"])
    assert shard_times(directory) == before


@pytest.mark.slow
def test_an_interrupted_training_is_finished(finished, recipe, tmp_path, capsys):
    """As if the run had been killed while it wrote its second checkpoint."""
    out = tmp_path / "out"
    shutil.copytree(finished[0] / "out" / "model", out / "model")
    first, second = out / "model" / "checkpoint-5", out / "model" / "checkpoint-10"
    (second / "trainer_state.json").unlink()
    (second / "model.safetensors").write_bytes(b"half")
    record = json.loads((out / "model" / "run.json").read_text())
    write_sealed(out / "model" / "run.json", {**record, "finished": False})
    before = (first / "model.safetensors").stat().st_mtime_ns
    recipe.main(["--output_dir", str(out), *SMALL])
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((second / "trainer_state.json").read_text())["global_step"] == 10
    assert len(load_from_disk(out / "scored")) == 30


@pytest.mark.slow
def test_overwrite_starts_anew_and_spares_foreign_files(finished, recipe, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0] / "out", out)
    (out / "notes.txt").write_text("mine")
    recipe.main(["--output_dir", str(out), *SMALL, "--overwrite", "--num_train_epochs=1", "--max_eval_samples=5"])
    assert sorted(path.name for path in (out / "model").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-5"]
    assert len(load_from_disk(out / "scored")) == 5
    assert (out / "notes.txt").read_text() == "mine"


def test_checkpoints_of_another_program_are_left_alone(recipe, tmp_path):
    foreign = tmp_path / "out" / "model" / "checkpoint-7" / "trainer_state.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("{}")
    with pytest.raises(ValueError, match="holds checkpoints of another program"):
        recipe.main(["--output_dir", str(tmp_path / "out"), *SMALL, "--overwrite"])
    assert foreign.read_text() == "{}"


# -- arguments -------------------------------------------------------------------------------------------------------


def test_the_config_file_holds_the_defaults(parse):
    args, data, trak = parse("--config", str(RECIPE / "config.yaml"))
    # `output_dir` is one argument for both; the recipe gives the feature store a place below it.
    assert (args, data, replace(trak, output_dir=parse()[2].output_dir)) == parse()


def test_the_commands_of_the_readme_parse(parse, monkeypatch):
    commands = [
        line for line in (RECIPE / "README.md").read_text().splitlines() if "image_classification/run.py" in line
    ]
    assert len(commands) >= 4
    monkeypatch.chdir(ROOT)
    for command in commands:
        parse(*command.split("run.py", 1)[1].split())


@pytest.mark.parametrize("name", ["num_targets", "top_k", "num_checkpoints", "images_per_side", "max_train_samples"])
def test_counts_start_at_one(parse, name):
    with pytest.raises(ValueError, match=f"`{name}` is 0"):
        parse(f"--{name}=0")


def test_checkpoints_are_spread_from_first_to_last(recipe):
    saved = [f"checkpoint-{step}" for step in range(5)]
    assert spread(saved, 3) == ["checkpoint-0", "checkpoint-2", "checkpoint-4"]
    assert spread(saved, 1) == ["checkpoint-4"]
    assert spread(saved, 9) == saved


# -- data ------------------------------------------------------------------------------------------------------------


def images(count: int) -> list[PILImage.Image]:
    return [PILImage.new("RGB", (9, 7), (i, 2 * i, 0)) for i in range(count)]


def test_digits_are_split_by_kind_without_overlap(recipe, parse):
    train, test = recipe.load_splits(parse()[1])
    assert (len(train), len(test)) == (1437, 360)
    counts = np.bincount(test["label"][:])
    assert counts.min() >= 34 and counts.max() <= 38
    pixels = [np.asarray(image).tobytes() for image in train["image"]]
    assert train[0]["image"].size == (8, 8)
    assert np.asarray(train[0]["image"]).max() == 255
    assert sum(np.asarray(image).tobytes() in set(pixels) for image in test["image"]) == 0


def test_a_directory_with_one_folder_per_class(recipe, parse, tmp_path):
    for split, count in (("train", 4), ("test", 2)):
        for kind in ("cat", "dog"):
            (tmp_path / split / kind).mkdir(parents=True)
            for i, image in enumerate(images(count)):
                image.save(tmp_path / split / kind / f"{i}.png")
    train, test = recipe.load_splits(parse(f"--dataset_name={tmp_path}")[1])
    assert train.features["label"].names == ["cat", "dog"]
    assert (len(train), len(test)) == (8, 4)
    assert train[0]["image"].size == (9, 7)


def test_a_saved_dataset_with_other_columns_text_labels_and_one_split(recipe, parse, tmp_path):
    kinds = ["b", "a", "c", "a", "b"] * 4
    Dataset.from_dict(
        {"picture": images(20), "kind": kinds}, features=Features({"picture": Image(), "kind": Value("string")})
    ).save_to_disk(tmp_path / "saved")
    options = [f"--dataset_name={tmp_path / 'saved'}", "--image_column=picture", "--label_column=kind"]
    train, test = recipe.load_splits(parse(*options, "--eval_fraction=0.25")[1])
    assert (len(train), len(test)) == (15, 5)
    assert train.features["kind"].names == ["a", "b", "c"]
    # The held-out rows and the others together are the dataset, with labels that still fit their images.
    back = {row["picture"].getpixel((0, 0))[0]: "abc"[row["kind"]] for part in (train, test) for row in part}
    assert back == dict(enumerate(kinds))
    with pytest.raises(ValueError, match=r"has the columns \['picture', 'kind'\], not \['image', 'label'\]"):
        recipe.load_splits(parse(options[0])[1])


def test_a_limit_takes_rows_from_the_whole_of_a_sorted_dataset(recipe, parse, tmp_path):
    features = Features({"image": Image(), "label": ClassLabel(names=["x", "y", "z"])})
    rows = Dataset.from_dict({"image": images(12), "label": [0] * 4 + [1] * 4 + [2] * 4}, features=features)
    DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "saved")
    options = [f"--dataset_name={tmp_path / 'saved'}", "--max_train_samples=6", "--max_eval_samples=3"]
    train, targets = recipe.load_splits(parse(*options)[1])
    assert train["label"][:] == [0, 0, 1, 1, 2, 2]
    assert [image.getpixel((0, 0))[0] for image in targets["image"]] == [0, 4, 8]
    with pytest.raises(ValueError, match=r"no split 'test'. Expected one of \['train', 'validation'\]"):
        recipe.load_splits(parse(*options, "--eval_split=test")[1])


def test_rows_without_a_label_are_refused(recipe, parse, tmp_path):
    features = Features({"image": Image(), "label": ClassLabel(names=["x", "y"])})
    rows = Dataset.from_dict({"image": images(4), "label": [0, 1, 0, 1]}, features=features)
    hidden = Dataset.from_dict({"image": images(2), "label": [-1, -1]}, features=features)
    DatasetDict({"train": rows, "test": hidden}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="rows without a label"):
        recipe.load_splits(parse(f"--dataset_name={tmp_path / 'saved'}")[1])


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["resnet", "vit"])
def test_networks_from_scratch_take_the_pixels(recipe, parse, architecture):
    args, data, _ = parse(f"--architecture={architecture}")
    train, _ = recipe.load_splits(data)
    model, processor, preprocess = recipe.build_model(args, data, train)
    batch = recipe.with_pixels(train, preprocess, data)[:3]
    assert processor is None
    assert batch["pixel_values"].shape == (3, 1, 16, 16)
    assert (float(batch["pixel_values"].min()), float(batch["pixel_values"].max())) == (-1.0, 1.0)
    assert model(pixel_values=batch["pixel_values"]).logits.shape == (3, 10)
    assert model.config.id2label[7] == "7"
    assert 5e4 < sum(value.numel() for value in model.parameters()) < 2e5


def test_a_pretrained_model_brings_its_processor(recipe, parse, tmp_path):
    config = ViTConfig(
        image_size=24, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "model")
    args, data, _ = parse(f"--model_name_or_path={tmp_path / 'model'}")
    train, _ = recipe.load_splits(data)
    model, processor, preprocess = recipe.build_model(args, data, train)
    pixels = preprocess(train[:2]["image"])
    assert pixels.shape == (2, 3, 24, 24)
    assert model(pixel_values=pixels).logits.shape == (2, 10)
    assert processor.size["height"] == 24


def test_a_saved_vit_goes_back_into_its_model(tmp_path):
    """Transformers writes a ViT's weights under the names of older versions, other than those of its modules."""
    config = ViTConfig(
        image_size=24, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    saved, other = ViTForImageClassification(config), ViTForImageClassification(config)
    saved.save_pretrained(tmp_path)
    load_into(other, tmp_path)
    for name, value in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    half = load_file(tmp_path / "model.safetensors")
    del half["classifier.weight"]
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit the model"):
        load_into(other, half)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())
