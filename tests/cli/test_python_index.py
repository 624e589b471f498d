"""Commands on an index that a Python program made, with targets as texts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.main import main
from hf_trak.cli.preparation import Preparation, _check_same_tokens
from hf_trak.data.columns import ColumnsRead
from hf_trak.identity.config_identity import adapters_identity
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
        ("cut", cut, "(`max_length` is one reason)"),
        ("bare", rows.remove_columns("text"), "the targets have ['text'], which these do not have to compare with"),
    ):
        other.save_to_disk(tmp_path / name)
        given = ("--model", str(made / "model"), "--train_dataset", str(tmp_path / name))
        assert asked(made, *given, "--output_dir", str(tmp_path / f"trak-{name}")) == 1
        assert said in capsys.readouterr().err


def test_texts_that_the_model_labels_itself_need_no_labels(made: Path, capsys: pytest.CaptureFixture[str]):
    named = ("--model", str(made / "model"), "--train_dataset", str(made / "rows"))
    assert asked(made, *named, "--predict", "--name", "said") == 0, capsys.readouterr().err


def copied(made: Path, to: Path) -> Path:
    """Copy the directory, with an index that no command has asked yet."""
    shutil.copytree(made, to, ignore=shutil.ignore_patterns("featurize.json", "scores"))
    return to


def test_a_command_that_fails_records_nothing(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = copied(made, tmp_path / "home")
    other = BertForSequenceClassification.from_pretrained(home / "model")
    with torch.no_grad():
        other.classifier.bias += 1
    other.save_pretrained(home / "other")
    BertTokenizer.from_pretrained(home / "model").save_pretrained(home / "other")
    assert asked(home, "--model", str(home / "other"), "--train_dataset", str(home / "rows")) == 1
    assert "CheckpointMismatchError" in capsys.readouterr().err
    assert not (home / "trak" / "featurize.json").exists()
    assert (
        asked(home, "--model", str(home / "model"), "--train_dataset", str(home / "rows"), "--group_by", "label") == 0
    )
    assert asked(home, "--name", "again") == 0


def test_a_report_of_the_training_names_model_and_rows(made: Path, tmp_path: Path):
    home = copied(made, tmp_path / "home")
    named = ("--model", str(home / "model"), "--train_dataset", str(home / "rows"), "--output_dir", str(home / "trak"))
    assert main(["report", "--training", *named, "--eval_dataset", str(home / "mine.jsonl"), "--use_cpu"]) == 0
    assert asked(home) == 0


def test_a_part_of_the_features_is_computed_again(made: Path, tmp_path: Path):
    """`featurize` takes the settings of the index, too."""
    home = copied(made, tmp_path / "home")
    shard = sorted((home / "trak").rglob("train-*.safetensors"))[0]
    before = shard.read_bytes()
    shard.unlink()
    named = ("--model", str(home / "model"), "--train_dataset", str(home / "rows"))
    assert main(["featurize", *named, "--output_dir", str(home / "trak"), "--use_cpu"]) == 0
    assert shard.read_bytes() == before


def test_masks_of_training_rows_that_texts_do_not_have(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A mask says which tokens are trained on; tokens of a text alone would all be."""
    tokenizer = BertTokenizer.from_pretrained(made / "model")
    rows = Dataset.from_list([{"text": text, **tokenizer(text)} for text, _ in TARGETS])
    masked = rows.map(lambda row: {"completion_mask": [0] * 3 + [1] * (len(row["input_ids"]) - 3)})

    def prepare(data: Dataset, labelled: bool = True) -> Dataset:
        return data.map(lambda row: dict(tokenizer(row["text"])))

    how = Preparation(prepare, columns=ColumnsRead(["text"]))
    _check_same_tokens(rows, how, "causal_lm")
    with pytest.raises(ValueError, match=r"`completion_mask` of a row is \[0, 0, 0, 1.*gives None"):
        _check_same_tokens(masked, how, "causal_lm")


def test_modules_that_an_adapter_saves_count_once() -> None:
    pytest.importorskip("peft")
    twice = SimpleNamespace(modules_to_save=["classifier", "score", "classifier", "score"], r=2)
    once = SimpleNamespace(modules_to_save=["classifier", "score"], r=2)
    found = [adapters_identity(SimpleNamespace(peft_config={"default": one})) for one in (twice, once)]
    assert found[0] == found[1] and found[0]["default"]["modules_to_save"] == ["classifier", "score"]


@pytest.mark.parametrize("library", ["transformers", "trl"])
def test_labels_that_a_collator_adds(library: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Rows of tokens alone get the labels of the training: without pad tokens, or without prompts and padding."""
    tokenizer = BertTokenizer(vocab=str(made / "vocab.txt"), model_max_length=32, eos_token="[SEP]", pad_token="[SEP]")
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=14, n_positions=32, bos_token_id=2, eos_token_id=3)
    )
    texts = [f"the {what} was {how}" for what in ("film", "plot") for how in ("good", "bad plot", "great")]
    rows, collator = (
        Dataset.from_list([dict(tokenizer(text)) for text in texts]).remove_columns("token_type_ids"),
        None,
    )
    if library == "transformers":
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    else:
        sft = pytest.importorskip("trl.trainer.sft_trainer")
        masks = [[0, 0, *[1] * (len(ids) - 2)] for ids in rows["input_ids"]]
        rows = rows.remove_columns("attention_mask").add_column("completion_mask", masks)
        collator = sft.DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    rows.save_to_disk(tmp_path / "rows")
    settings = TrakConfig(output_dir=str(tmp_path / "trak"), proj_dim=32, use_cpu=True)
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    attributor = TrakAttributor(model, settings, train_dataset=rows, data_collator=collator, task="causal_lm")
    expected = attributor.featurize().attribute(rows.select([1, 4]), method="index", top_k=3)
    rows.select([1, 4]).save_to_disk(tmp_path / "asked")
    named = ("--model", str(tmp_path / "model"), "--train_dataset", str(tmp_path / "rows"))
    given = ("--output_dir", str(tmp_path / "trak"), "--eval_dataset", str(tmp_path / "asked"), "--use_cpu")
    method = ("--method", "index", "--top_k", "3", "--name", "said")
    assert main(["attribute", *named, *given, *method]) == 0, capsys.readouterr().err
    scored = AttributionRun.load(tmp_path / "trak" / "scores" / "said").scored
    assert scored["trak_scores"][:] == expected["trak_scores"][:]
