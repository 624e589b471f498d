"""Commands on an index that a Python program made, with targets as texts."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.main import main
from hf_trak.report.run import AttributionRun

WORDS = ["good", "bad", "film", "plot", "actor", "great", "dull", "the", "was"]
TARGETS = [("the film was great", "positive"), ("the actor was dull", "negative")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, the training rows as a trainer has seen them, and their index, made by Python."""
    home = tmp_path_factory.mktemp("made")
    (home / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=14, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=32, id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1},
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(home / "model")
    tokenizer = BertTokenizer(vocab=str(home / "vocab.txt"), model_max_length=32)
    tokenizer.save_pretrained(home / "model")
    model = BertForSequenceClassification.from_pretrained(home / "model")
    texts = [f"the {what} was {how}" for what in ("film", "plot", "actor") for how in ("good", "bad", "great", "dull")]
    rows = Dataset.from_dict({"text": texts, "labels": [int(text.endswith(("good", "great"))) for text in texts]})
    rows = rows.map(lambda row: dict(tokenizer(row["text"])))
    rows.save_to_disk(home / "rows")
    settings = TrakConfig(output_dir=str(home / "trak"), proj_dim=32, shard_size=4, seed=3, use_cpu=True)
    attributor = TrakAttributor(model, settings, train_dataset=rows, processing_class=tokenizer).featurize()
    eval_rows = [{"labels": int(name == "positive"), **tokenizer(text)} for text, name in TARGETS]
    scored = attributor.attribute(Dataset.from_list(eval_rows), method="index", top_k=3)
    (home / "expected.json").write_text(json.dumps(scored["trak_scores"][:]))
    (home / "mine.jsonl").write_text("\n".join(json.dumps({"text": text, "label": name}) for text, name in TARGETS))
    return home


def asked(home: Path, *others: str) -> int:
    arguments = ["--output_dir", str(home / "trak"), "--eval_dataset", str(home / "mine.jsonl"), "--use_cpu"]
    return main(["attribute", *arguments, "--method", "index", "--top_k", "3", "--json", *others])


def test_texts_and_names_of_classes_are_asked_of_an_index_that_python_made(
    made: Path, capsys: pytest.CaptureFixture[str]
):
    named = ("--model", str(made / "model"), "--train_dataset", str(made / "rows"))
    assert asked(made, *named, "--name", "first") == 0, capsys.readouterr().err
    # From then on the directory names its model and rows, and nothing of `datasets` shows bars of its own.
    capsys.readouterr()
    assert asked(made, "--name", "second") == 0
    assert "Saving the dataset" not in (error := capsys.readouterr().err) and "Generating" not in error
    for name in ("first", "second"):
        scored = AttributionRun.load(made / "trak" / "scores" / name).scored
        assert scored["trak_scores"][:] == json.loads((made / "expected.json").read_text())


def test_texts_that_training_rows_did_not_become_tokens_like_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = Dataset.load_from_disk(made / "rows")
    cut = rows.map(lambda row: {name: row[name][:4] for name in ("input_ids", "attention_mask", "token_type_ids")})
    for name, other, said in (
        ("cut", cut, "has 4 tokens, and its text gives 6 (`max_length` is one reason)"),
        ("bare", rows.remove_columns("text"), "the targets have ['text'], which these do not have to compare with"),
    ):
        other.save_to_disk(tmp_path / name)
        given = ("--model", str(made / "model"), "--train_dataset", str(tmp_path / name))
        assert asked(made, *given, "--output_dir", str(tmp_path / f"trak-{name}")) == 1
        assert said in capsys.readouterr().err


def test_texts_that_the_model_labels_itself_need_no_labels(made: Path, capsys: pytest.CaptureFixture[str]):
    named = ("--model", str(made / "model"), "--train_dataset", str(made / "rows"))
    assert asked(made, *named, "--predict", "--name", "said") == 0, capsys.readouterr().err
