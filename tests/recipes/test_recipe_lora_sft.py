"""The LoRA recipe: its arguments, its data, and one small run from command line to summary."""

import json
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from recipe_runs import CPU, ROOT, commands_of, imported, report_of, run_script
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow  # a training and a featurization of some seconds

RECIPE = ROOT / "recipes" / "lora_sft"
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


def test_the_example_with_the_answer_comes_first(finished):
    """A real training: a question in other words leads to the training row with the same answer, of 80."""
    out, printed = finished
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["train_rows"], summary["targets"]) == (80, 16)
    scored, train = (load_from_disk(out / name) for name in ("scored", "train"))
    first = [train[rows[0]]["completion"] for rows in scored["trak_indices"]]
    share = np.mean([a == b for a, b in zip(first, scored["completion"], strict=True)])
    assert summary["same_completion_first"] == pytest.approx(share)
    assert share > 0.75  # by chance 1/80
    page = report_of(out)
    assert scored[0]["prompt"] in page and train[scored[0]["trak_indices"][0]]["completion"].strip() in page
    assert "Target 0: Question: Explain" in printed


def test_adapters_and_embeddings_are_all_that_is_attributed(finished):
    out, _ = finished
    manifest = json.loads((out / "trak" / "trak_config.json").read_text())["parameters"]
    names = [slot[0] for slot in manifest]
    assert all("lora_" in name or "modules_to_save" in name for name in names)
    assert sum("lora_" in name for name in names) == 2 * 2 * 7  # two layers of seven linear ones, A and B each
    checkpoints = sorted((out / "model").glob("checkpoint-*"))
    assert len(checkpoints) == 5 and all((path / "adapter_model.safetensors").is_file() for path in checkpoints)
    assert not list((out / "model").glob("checkpoint-*/model.safetensors"))


def test_the_same_command_again_computes_nothing(finished, recipe):
    out, _ = finished
    files = [*out.glob("trak/**/*.safetensors"), *out.glob("model/**/*.safetensors")]
    before = {file: file.stat().st_mtime_ns for file in files}
    recipe.main([*SMALL, "--output_dir", str(out)])
    assert {file: file.stat().st_mtime_ns for file in files} == before
    with pytest.raises(ValueError, match=r"lora_r: 8 there, 4 given"):
        recipe.main([*SMALL, "--output_dir", str(out), "--lora_r=4"])


# -- arguments -------------------------------------------------------------------------------------------------------


def test_the_config_file_holds_the_defaults(parse):
    args, data, trak = parse("--config", str(RECIPE / "config.yaml"))
    assert (args, data, replace(trak, output_dir=parse()[2].output_dir)) == parse()


def test_the_commands_of_the_readme_parse(parse, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) >= 4
    monkeypatch.chdir(ROOT)
    for command in commands:
        parse(*command)


# -- data ------------------------------------------------------------------------------------------------------------


def test_questions_in_other_words_have_the_same_answers(recipe, parse):
    data = parse("--config", str(RECIPE / "smallest.yaml"), "--max_eval_samples=80")[1]
    train, targets = recipe.load_instructions(data)
    assert train["completion"][:] == targets["completion"][:]
    assert len(set(train["completion"])) == len(train) == 80
    assert not set(train["prompt"]) & set(targets["prompt"])


def test_labels_are_the_tokens_of_the_completion(recipe, parse):
    args, data, _ = parse("--config", str(RECIPE / "smallest.yaml"))
    train, _ = recipe.load_instructions(data)
    _, tokenizer = recipe.build_model(args, data, train)
    row = recipe.tokenized(train.select([3]), tokenizer, args.max_length, data)[0]
    kept = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(kept) == train[3]["completion"] + "</s>"
    assert tokenizer.decode(row["input_ids"]) == train[3]["prompt"] + train[3]["completion"] + "</s>"
    with pytest.raises(ValueError, match=r"1 of 1 rows have no token of their completion within the first 5 tokens"):
        recipe.tokenized(train.select([3]), tokenizer, 5, data)


def test_messages_and_other_columns(recipe, parse, tmp_path):
    rows = {
        "question": [[{"role": "user", "content": "Hi"}]] * 4,
        "answer": [[{"role": "assistant", "content": "Hello"}]] * 4,
    }
    DatasetDict({"train": Dataset.from_dict(rows)}).save_to_disk(tmp_path / "saved")
    name = f"--dataset_name={tmp_path / 'saved'}"
    with pytest.raises(ValueError, match="Set `prompt_column` and `completion_column`"):
        recipe.load_instructions(parse(name)[1])
    data = parse(name, "--prompt_column=question", "--completion_column=answer", "--eval_fraction=0.5")[1]
    train, targets = recipe.load_instructions(data)
    assert (len(train), len(targets)) == (2, 2)
    assert recipe.as_text(train[0]["answer"]) == "assistant: Hello"


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_pretrained_base_keeps_its_embeddings(recipe, parse, tmp_path):
    args, data, _ = parse("--config", str(RECIPE / "smallest.yaml"))
    train, _ = recipe.load_instructions(data)
    _, tokenizer = recipe.build_model(args, data, train)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = recipe.build_model(replace(args, model_name_or_path=str(tmp_path)), data, train)
    trainable = [name for name, value in model.named_parameters() if value.requires_grad]
    assert len(trainable) == 2 * 7 and all("lora_" in name for name in trainable)
    few = replace(args, model_name_or_path=str(tmp_path), target_modules=["q_proj"])
    names = [name for name, value in recipe.build_model(few, data, train)[0].named_parameters() if value.requires_grad]
    assert len(names) == 2 and all("q_proj" in name for name in names)
