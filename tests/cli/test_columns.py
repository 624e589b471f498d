"""The columns that commands read, the targets that they ask for, and answers of the model in place of labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value, load_from_disk
from doc_examples import tiny_gpt2, word_tokenizer
from PIL import Image as PILImage
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_trak.cli.class_labels import _aligned
from hf_trak.cli.main import main
from hf_trak.cli.preparation import _with_columns
from hf_trak.cli.stored_rows import load_rows
from hf_trak.data.columns import text_columns
from hf_trak.store.sealed import read_sealed

TEXT, CHAT = Value("string"), List({"role": Value("string"), "content": Value("string")})
SENTENCES = ["the fox sleeps in a barn", "a film was dull", "a great plot", "the plot was good", "a fox", "the barn"]


@pytest.mark.parametrize(
    ("task", "columns", "expected"),
    [
        ("causal_lm", "url text", ["text"]),
        ("causal_lm", "text source label", ["text"]),
        ("causal_lm", "review stars", ["review"]),
        ("causal_lm", "prompt prompt_id messages", ["messages"]),
        ("causal_lm", "id prompt completion", ["prompt", "completion"]),
        ("masked_lm", "title content", ["content"]),
        ("clip", "image caption", ["caption"]),
        ("text_classification", "text source label", ["text"]),
        ("text_classification", "sentence idx label", ["sentence"]),
        ("text_classification", "sentence1 sentence2 label", ["sentence1", "sentence2"]),
        ("text_classification", "question sentence label", ["question", "sentence"]),
        ("regression", "premise hypothesis genre label", ["premise", "hypothesis"]),
        ("causal_lm", "url", None),
        ("causal_lm", "title body", None),
        ("causal_lm", "text messages", None),
        ("causal_lm", "sentence1 sentence2", None),
        ("causal_lm", "prompt completion text", None),
        ("masked_lm", "messages", None),
        ("text_classification", "text sentence label", None),
        ("text_classification", "title body label", None),
        ("text_classification", "label", None),
    ],
)
def test_columns_are_read_where_their_names_leave_no_choice(task: str, columns: str, expected: Any) -> None:
    kinds = {"stars": Value("int64"), "label": TEXT, "messages": CHAT, "image": Image(), "idx": Value("int64")}
    features = Features({name: kinds.get(name, TEXT) for name in columns.split()})
    if expected is not None:
        assert text_columns(features, task) == expected
        return
    with pytest.raises(ValueError, match=r"The rows have the columns \[.*--text_columns") as caught:
        text_columns(features, task)
    assert all(repr(name) in str(caught.value) for name in columns.split())


def test_named_columns_exist_are_text_and_are_all_read() -> None:
    features = Features({"question": TEXT, "answer": TEXT, "stars": Value("int64"), "dialog": CHAT})
    assert text_columns(features, "causal_lm", ["question", "answer"]) == ["question", "answer"]
    assert text_columns(features, "causal_lm", ["dialog"]) == ["dialog"]
    for task, named, message in (
        ("causal_lm", ["body"], r"names \['body'\].*Expected some of"),
        ("causal_lm", ["stars"], r"\['stars'\], of the type Value"),
        ("text_classification", ["dialog"], r"\['dialog'\], of the type List"),
        ("masked_lm", ["question", "answer"], r"Expected at most 1 for the task 'masked_lm'"),
    ):
        with pytest.raises(ValueError, match=message):
            text_columns(features, task, named)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model in `lm`, and a classifier of texts in `bert`, with one tokenizer."""
    home, words, model = tmp_path_factory.mktemp("models"), word_tokenizer(), tiny_gpt2()
    ids = torch.tensor([words(SENTENCES[0])["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):  # until it says the first sentence
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(home / "lm")
    config = BertConfig(
        vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=64, num_labels=2,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(home / "bert")
    for name in ("lm", "bert"):
        words.save_pretrained(home / name)
    return home


def rows(**columns: Any) -> Dataset:
    return Dataset.from_dict(columns)


def features(directory: Path) -> Any:
    (shard,) = directory.glob("checkpoint-0/train-*.safetensors")
    return load_file(shard)["grads"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lm", "bert"])
def test_other_columns_of_text_change_nothing(model: str, models: Path, tmp_path: Path, capsys: Any) -> None:
    """Names of pages beside the text are neither what is featurized nor what is shown."""
    label = {} if model == "lm" else {"label": [0, 1] * 3}
    urls = [f"https://example.org/{i}" for i in range(6)]
    kinds = {
        "before": rows(url=urls, text=SENTENCES, **label),
        "after": rows(text=SENTENCES, source=urls, **label),
        "alone": rows(text=SENTENCES, **label),
    }
    for name, data in kinds.items():
        DatasetDict({"train": data, "test": data.select([0, 3])}).save_to_disk(tmp_path / name)
        common = ["--output_dir", str(tmp_path / f"trak-{name}"), "--use_cpu", "--proj_dim", "32"]
        given = ["--model", str(models / model), "--train_dataset", str(tmp_path / name)]
        assert main(["featurize", *given, *common]) == 0
        assert f"Columns read: text{'' if model == 'lm' else ', label'}\n" in capsys.readouterr().err
    assert features(tmp_path / "trak-before").equal(features(tmp_path / "trak-alone"))
    assert features(tmp_path / "trak-after").equal(features(tmp_path / "trak-alone"))

    store = tmp_path / "trak-before"
    assert read_sealed(store / "featurize.json", "")["arguments"]["text_columns"] == ["text"]
    assert main(["attribute", "--output_dir", str(store), "--top_k", "2"]) == 0
    printed = capsys.readouterr()
    assert "Target 0" in printed.out and SENTENCES[0] in printed.out and "example.org" not in printed.out
    assert main(["report", str(store)]) == 0
    page = (store / "scores" / "targets" / "report.html").read_text()
    assert SENTENCES[0] in page and "example.org" not in page


def test_empty_cells_are_named(tmp_path: Path) -> None:
    """Of rows that are there: a selection without them is fine, and so is an empty label that nobody reads."""
    file = tmp_path / "rows.csv"
    file.write_text("text,label\na film,1\nNA,0\na plot,\n")
    rows = load_rows(str(file), None, None, ("train",), None)
    with pytest.raises(ValueError, match="Row 1 has nothing in the column 'text'"):
        _with_columns(rows, ["text"], ["label"])
    with pytest.raises(ValueError, match="Row 1 has nothing in the column 'label'"):
        _with_columns(rows.select([0, 2]), ["text"], ["label"])
    assert len(_with_columns(rows.select([0, 2]), ["text"])) == 2


def test_names_that_leave_a_choice_are_refused(models: Path, tmp_path: Path, capsys: Any) -> None:
    rows(title=SENTENCES, body=SENTENCES[::-1]).to_parquet(tmp_path / "rows.parquet")
    given = ["featurize", "--model", str(models / "lm"), "--train_dataset", str(tmp_path / "rows.parquet")]
    common = ["--output_dir", str(tmp_path / "trak"), "--use_cpu", "--proj_dim", "32"]
    assert main([*given, *common]) == 1
    assert "['title', 'body']" in (error := capsys.readouterr().err) and "`--text_columns`" in error
    assert not (tmp_path / "trak").exists()
    assert main([*given, *common, "--text_columns", "body"]) == 0
    assert "Columns read: body\n" in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize("saved", ["rows.parquet", "alone", "splits"])
def test_training_rows_are_no_targets(saved: str, models: Path, tmp_path: Path, capsys: Any) -> None:
    """Without targets, and without a split that could be them, nothing is scored."""
    data, place = rows(text=SENTENCES), tmp_path / saved
    if saved == "rows.parquet":
        data.to_parquet(place)
    else:
        (data if saved == "alone" else DatasetDict({"train": data})).save_to_disk(place)
    common = ["--output_dir", str(tmp_path / "trak"), "--use_cpu", "--proj_dim", "32"]
    assert main(["featurize", "--model", str(models / "lm"), "--train_dataset", str(place), *common]) == 0
    assert main(["attribute", *common[:2]]) == 1
    error = capsys.readouterr().err
    assert "No targets are given" in error and "scored against themselves" in error and "`--eval_dataset`" in error
    assert main(["attribute", *common[:2], "--eval_dataset", str(place), "--max_eval_samples", "1"]) == 0


@pytest.mark.slow
def test_predictions_of_a_classifier(models: Path, tmp_path: Path, capsys: Any) -> None:
    kinds = Features({"text": TEXT, "label": ClassLabel(names=["no", "yes"])})
    train = Dataset.from_dict({"text": SENTENCES, "label": [0, 1] * 3}, kinds)
    train.to_parquet(tmp_path / "train.parquet")
    train.remove_columns("label").select([1, 2]).to_parquet(tmp_path / "bare.parquet")
    common = ["--output_dir", str(tmp_path / "trak"), "--use_cpu", "--proj_dim", "32"]
    model = ["--model", str(models / "bert"), "--train_dataset", str(tmp_path / "train.parquet")]
    assert main(["featurize", *model, *common]) == 0
    targets = ["attribute", *common[:2], "--eval_dataset", str(tmp_path / "bare.parquet")]
    assert main(targets) == 1
    error = capsys.readouterr().err
    assert "and not ['label']" in error and "`--predict`" in error and "Rename" not in error
    assert main([*targets, "--predict"]) == 0
    assert load_from_disk(tmp_path / "trak/scores/targets/run/scored")["predicted"][0] in ("LABEL_0", "LABEL_1")
    for label in (0, 1):  # checkpoints that say one class to everything
        model_of = BertForSequenceClassification.from_pretrained(models / "bert")
        model_of.classifier.weight.data.zero_()
        model_of.classifier.bias.data = 9 * torch.eye(2)[label]
        model_of.save_pretrained(tmp_path / f"says-{label}")
    common[1], checkpoints = str(tmp_path / "two"), [str(tmp_path / f"says-{label}") for label in (1, 0)]
    assert main(["featurize", *model, *common, "--checkpoints", *checkpoints]) == 0
    assert main(["attribute", *common[:2], *targets[3:], "--predict"]) == 0
    assert set(load_from_disk(tmp_path / "two/scores/targets/run/scored")["predicted"]) == {"LABEL_0"}, "the last one"


@pytest.mark.slow
def test_labels_are_those_of_the_model_by_their_names(models: Path, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    """Also where the dataset numbers its classes in another order. Names of rows that are predicted are not read."""
    model = BertForSequenceClassification.from_pretrained(models / "bert")
    model.config.label2id, model.config.id2label = {"no": 0, "Yes": 1}, {0: "no", 1: "Yes"}
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    said = ["no", "Yes", "Yes", "no", "no", "no"]
    named = Features({"text": TEXT, "label": ClassLabel(names=["yes", "no"])})
    strange = Features({"text": TEXT, "label": ClassLabel(names=["negative", "positive"])})
    kinds = {
        "words": rows(text=SENTENCES, label=said),
        "named": Dataset.from_dict({"text": SENTENCES, "label": [int(one == "no") for one in said]}, named),
        "strange": Dataset.from_dict({"text": SENTENCES, "label": [int(one == "Yes") for one in said]}, strange),
    }
    for name, data in kinds.items():
        data.to_parquet(tmp_path / f"{name}.parquet")
        given = ["--model", str(tmp_path / "model"), "--train_dataset", str(tmp_path / f"{name}.parquet")]
        common = ["--output_dir", str(tmp_path / name), "--use_cpu", "--proj_dim", "32"]
        caplog.clear()
        assert main(["featurize", *given, *common]) == 0
        assert ("['negative', 'positive'], and those of the model ['no', 'Yes']" in caplog.text) == (name == "strange")
        assert features(tmp_path / name).equal(features(tmp_path / "words"))
    asked = ["attribute", "--output_dir", str(tmp_path / "named"), "--eval_dataset", str(tmp_path / "words.parquet")]
    assert main([*asked, "--predict"]) == 0
    scored = load_from_disk(tmp_path / "named/scores/targets/run/scored")
    assert scored.features["labels"].names == ["no", "Yes"] and set(scored["predicted"]) <= {"no", "Yes"}


@pytest.mark.parametrize(
    ("names", "ids", "expected"),
    [
        (["yes", "no"], {"No": 0, "Yes": 1}, [1, 0, -1]),
        (["pos", "Pos"], {"pos": 0, "neg": 1}, [0, 1, -1]),  # classes that differ in case alone
        (["neg", "pos"], {"neg": 0, "pos": 5}, [0, 1, -1]),  # numbers with gaps
        (["a", "b"], {"LABEL_0": 0, "LABEL_1": 1}, [0, 1, -1]),
    ],
)
def test_numbers_of_classes_that_the_model_names(names: list[str], ids: dict[str, int], expected: list[int]) -> None:
    kinds = Features({"text": TEXT, "labels": ClassLabel(names=names)})
    found = _aligned(Dataset.from_dict({"text": ["x", "y", "z"], "labels": [0, 1, -1]}, kinds), names, ids)
    assert found["labels"][:] == expected


def test_classes_of_targets_have_the_numbers_of_the_training_rows(models: Path, tmp_path: Path) -> None:
    """The model has no names of classes. Targets have them in another order, or as texts, and are grouped by them."""
    kinds = Features({"text": TEXT, "label": ClassLabel(names=["no", "yes"])})
    other = Features({"text": TEXT, "label": ClassLabel(names=["yes", "no"])})
    more = Features({"text": TEXT, "label": ClassLabel(names=["no", "maybe", "yes"])})
    Dataset.from_dict({"text": SENTENCES, "label": [0, 1] * 3}, kinds).to_parquet(tmp_path / "train.parquet")
    for name, asked in (
        ("same", Dataset.from_dict({"text": SENTENCES[:3], "label": [1, 0, 0]}, kinds)),
        ("other", Dataset.from_dict({"text": SENTENCES[:3], "label": [0, 1, 1]}, other)),
        ("words", rows(text=SENTENCES[:3], label=["yes", "no", "no"])),
        ("unnamed", rows(text=SENTENCES[:3], label=["LABEL_1", "LABEL_0", "LABEL_0"])),
        ("more", Dataset.from_dict({"text": SENTENCES[:3], "label": [2, 0, 0]}, more)),
    ):
        asked.to_parquet(tmp_path / f"{name}.parquet")
    common = ["--output_dir", str(tmp_path / "trak"), "--use_cpu", "--proj_dim", "32"]
    model = ["--model", str(models / "bert"), "--train_dataset", str(tmp_path / "train.parquet")]
    assert main(["featurize", *model, *common]) == 0
    found = {}
    for name in ("same", "other", "words", "unnamed", "more"):
        given = ["--eval_dataset", str(tmp_path / f"{name}.parquet"), "--method", "index", "--name", name]
        assert main(["attribute", *common[:2], *given]) == 0
        found[name] = load_from_disk(tmp_path / "trak" / "scores" / name / "run" / "scored")
        assert found[name]["labels"][:] == [1, 0, 0]
        assert found[name]["trak_scores"][:] == found["same"]["trak_scores"][:]
    assert main(["attribute", *common[:2], *given[:2], "--group_by", "label", "--name", "groups"]) == 0


@pytest.mark.slow
def test_an_answer_and_one_of_its_words(models: Path, tmp_path: Path, capsys: Any) -> None:
    """`--predict` continues texts under their own name; `--words` scores one word of what was said."""
    rows(body=SENTENCES).to_parquet(tmp_path / "train.parquet")
    rows(body=["the fox"]).to_parquet(tmp_path / "asked.parquet")
    common = ["--output_dir", str(tmp_path / "trak"), "--use_cpu", "--proj_dim", "32"]
    model = ["--model", str(models / "lm"), "--train_dataset", str(tmp_path / "train.parquet")]
    assert main(["featurize", *model, *common]) == 0
    targets = ["attribute", *common[:2], "--eval_dataset", str(tmp_path / "asked.parquet"), "--predict"]
    assert main([*targets, "--max_new_tokens", "3", "--name", "whole"]) == 0
    (whole,) = load_from_disk(tmp_path / "trak/scores/whole/run/scored")
    assert whole["target_mask"] == [0, 0, 1, 1, 1] and whole["labels"][2:] == whole["input_ids"][2:]
    assert whole["predicted"] == "sleeps in a"
    capsys.readouterr()
    assert main([*targets, "--max_new_tokens", "3", "--name", "word", "--words", "in"]) == 0
    (part,) = load_from_disk(tmp_path / "trak/scores/word/run/scored")
    assert part["target_mask"] == [0, 0, 0, 1, 0]
    assert part["trak_scores"] != whole["trak_scores"]
    assert json.loads((tmp_path / "trak/scores/word/run/run.json").read_text())["facts"]["part of targets"] == "in"


@pytest.mark.slow
@pytest.mark.parametrize("channels", [3, 1])
def test_predictions_for_images(tmp_path: Path, channels: int) -> None:
    """In colours, and in grey for a model of one channel."""
    rng = np.random.default_rng(0)
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        num_labels=2, num_channels=channels,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    means = {"image_mean": [0.5] * channels, "image_std": [0.5] * channels}
    ViTImageProcessor(size={"height": 16, "width": 16}, **means).save_pretrained(tmp_path / "model")
    shape = (16, 16, 3)[: 2 + (channels == 3)]
    pictures = [PILImage.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)) for _ in range(6)]
    kinds = Features({"image": Image(), "label": ClassLabel(names=["cat", "dog"])})
    train = Dataset.from_dict({"image": pictures, "label": [0, 1] * 3}, kinds)
    train.save_to_disk(tmp_path / "train")
    train.remove_columns("label").select([0, 1]).save_to_disk(tmp_path / "bare")
    common = ["--output_dir", str(tmp_path / "trak"), "--use_cpu", "--proj_dim", "32"]
    given = ["--model", str(tmp_path / "model"), "--train_dataset", str(tmp_path / "train")]
    assert main(["featurize", *given, *common]) == 0
    assert main(["attribute", *common[:2], "--eval_dataset", str(tmp_path / "bare"), "--predict"]) == 0
    assert len(load_from_disk(tmp_path / "trak/scores/targets/run/scored")["predicted"]) == 2
    verify = ["verify", *common[:2], "--eval_dataset", str(tmp_path / "bare"), "--count", "2", "--draws", "4"]
    assert main([*verify, "--similar", "none"]) == 0
