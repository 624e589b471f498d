"""Trainers of cross-encoders of sentence-transformers: every row has the gradient of the trainer's own loss of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_embeddings_trainer import bert, columns, texts, tokenizer
from torch import nn
from transformers import BertForSequenceClassification

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions import TextPairsModelOutput

st = pytest.importorskip("sentence_transformers")
from sentence_transformers.cross_encoder import (  # noqa: E402
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    losses,
)

ROWS = 6
BINARY = {"label": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]}
NEGATIVES = ("query", "positive", "negative_1", "negative_2")


def encoder(directory: Path, logits: int = 1) -> Any:
    """A tiny model whose logits of different pairs differ: their margins would cancel otherwise."""
    torch.manual_seed(0)
    classifier = BertForSequenceClassification(bert(num_labels=logits))
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    classifier.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return CrossEncoder(str(directory), num_labels=logits, device="cpu")


def trainer_of(directory: Path, loss: Any, rows: dict[str, Any], **options: Any) -> Any:
    args = CrossEncoderTrainingArguments(
        str(directory / "out"), use_cpu=True, report_to=[], per_device_train_batch_size=3, num_train_epochs=1,
        save_strategy="no", **options,
    )  # fmt: skip
    return CrossEncoderTrainer(loss.model, args, train_dataset=Dataset.from_dict(rows), loss=loss)


def attributor(directory: Path, trainer: Any, **options: Any) -> TrakAttributor:
    config = TrakConfig(
        str(directory / "trak"), proj_type="none", feature_dtype="float32", use_cpu=True,
        per_device_batch_size=4, budget="fast",
    )  # fmt: skip
    return TrakAttributor.from_trainer(trainer, config, **options)


CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "binary": ("BinaryCrossEntropyLoss", 1, columns(ROWS, "one", "two") | BINARY, {}),
    "weighted": ("BinaryCrossEntropyLoss", 1, columns(ROWS, "one", "two") | BINARY, {"pos_weight": torch.tensor(3.0)}),
    "classes": ("CrossEntropyLoss", 3, columns(ROWS, "one", "two") | {"label": [0, 2, 1, 1, 0, 2]}, {}),
    "regression": ("MSELoss", 1, columns(ROWS, "one", "two") | {"score": [0.1, 0.9, 0.4, 2.0, -1.0, 0.0]}, {}),
    "sigmoid": ("MSELoss", 1, columns(ROWS, "one", "two") | BINARY, {"activation_fn": nn.Sigmoid()}),
    "margin": ("MarginMSELoss", 1, columns(ROWS, *NEGATIVES[:3]) | {"label": [0.5, 1.0, -0.2, 2.0, 0.0, 0.3]}, {}),
    "margins": ("MarginMSELoss", 1, columns(ROWS, *NEGATIVES) | {"label": [[0.5, 1.0]] * 3 + [[2.0, -1.0]] * 3}, {}),
    "scores": ("MarginMSELoss", 1, columns(ROWS, *NEGATIVES) | {"label": [[3.0, 2.0, 1.0]] * ROWS}, {}),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_features_are_gradients_of_the_trainers_own_loss(case: str, tmp_path: Path) -> None:
    """The loss itself, called on one row after the other, tokenizes, pads and averages for itself."""
    kind, logits, rows, settings = CASES[case]
    model = encoder(tmp_path / "model", logits)
    trainer = trainer_of(tmp_path, getattr(losses, kind)(model, **settings), rows)
    own = attributor(tmp_path, trainer).featurize()
    found = torch.cat([shard.grads for shard in own.features.store.train(0)])
    model.eval()
    for row in range(ROWS):
        inputs, labels = trainer.collect_features(trainer.data_collator([trainer.train_dataset[row]]))[:2]
        taken = torch.autograd.grad(-trainer.loss(inputs, labels), list(model.parameters()), allow_unused=True)
        pairs = zip(taken, model.parameters(), strict=True)
        expected = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
        assert (found[row] - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
def test_a_training_and_the_lines_of_the_readme(tmp_path: Path) -> None:
    """Copies of training rows are their own best explanation; targets are dictionaries in any order."""
    model = encoder(tmp_path / "model")
    rows = columns(24, "one", "two") | {"label": [float(i % 2) for i in range(24)]}
    trainer = trainer_of(tmp_path, losses.BinaryCrossEntropyLoss(model), rows, learning_rate=1e-3)
    trainer.train()
    config = TrakConfig(str(tmp_path / "trak"), proj_dim=256, use_cpu=True, budget="fast")

    attributor = TrakAttributor.from_trainer(trainer, config)
    attributor.featurize()
    targets = [{"label": rows["label"][i], "two": rows["two"][i], "one": rows["one"][i]} for i in (3, 10, 17)]
    scored = attributor.attribute(targets, top_k=3)

    assert [one[0] for one in scored["trak_indices"]] == [3, 10, 17]


def test_prompts_reach_the_tokens(tmp_path: Path) -> None:
    model = encoder(tmp_path / "model")
    loss = losses.BinaryCrossEntropyLoss(model)
    rows = columns(3, "one", "two") | {"label": [1.0, 0.0, 1.0]}
    found = []
    for prompt in (None, "dog far "):
        own = attributor(tmp_path / str(prompt), trainer_of(tmp_path, loss, rows, prompts=prompt))
        found.append(own.features.featurizer().batches(own.train_dataset).alone(0)["input_ids"])
        expected = model.preprocess([(rows["one"][0], rows["two"][0])], prompt=prompt)["input_ids"]
        assert torch.equal(found[-1][0], expected)
    assert found[0].shape != found[1].shape


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("MultipleNegativesRankingLoss", "a row has no loss of its own"),
        ("ListNetLoss", "whose rows are lists of documents"),
        ("LambdaLoss", "whose rows are lists of documents"),
    ],
)
def test_losses_without_a_task_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    loss = getattr(losses, kind)(encoder(tmp_path / "model"))
    with pytest.raises(ValueError, match=message):
        attributor(tmp_path, trainer_of(tmp_path, loss, columns(3, "one", "two")))


def test_settings_that_change_the_loss_are_refused(tmp_path: Path) -> None:
    rows = columns(3, "one", "two") | {"label": [1, 0, 1]}
    model = encoder(tmp_path / "model", 2)
    for settings, message in (
        ({"label_smoothing": 0.1}, "label_smoothing=0.1"),
        ({"weight": torch.ones(2)}, "weight=tensor"),
        ({"reduction": "sum"}, "reduction='sum'"),
        ({"activation_fn": nn.Tanh()}, "after Tanh"),
    ):
        with pytest.raises(ValueError, match=message):
            attributor(tmp_path, trainer_of(tmp_path, losses.CrossEntropyLoss(model, **settings), rows))


@pytest.mark.slow
def test_rows_that_do_not_fit_the_task_are_named(tmp_path: Path) -> None:
    model = encoder(tmp_path / "model")
    binary, margin = losses.BinaryCrossEntropyLoss(model), losses.MarginMSELoss(model)
    three = columns(3, *NEGATIVES[:3])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (binary, three | {"label": [1.0, 0.0, 1.0]}, "rows have 3 texts. Expected 2"),
        (margin, columns(3, "one", "two") | {"label": [1.0, 0.0, 1.0]}, "rows have 2 texts. Expected 3 or more"),
        (margin, three | {"label": [[1.0, 2.0, 3.0]] * 3}, "Expected 1 margins or 2 scores per row"),
        (binary, columns(3, "one", "two"), "The batch has no labels"),
        (binary, {"one": texts(2, 0), "docs": [["a"], ["b"]], "label": [1.0, 0.0]}, "column 'docs' holds a list"),
    ]
    for place, (loss, rows, message) in enumerate(cases):
        with pytest.raises(ValueError, match=message):
            attributor(tmp_path / str(place), trainer_of(tmp_path / str(place), loss, rows)).featurize()
    with pytest.raises(ValueError, match="has 2 logits"):
        two = encoder(tmp_path / "two", 2)
        rows = columns(3, "one", "two") | {"label": [0, 1, 0]}
        task = TextPairsModelOutput("mse")
        attributor(
            tmp_path / "x", trainer_of(tmp_path / "x", losses.CrossEntropyLoss(two), rows), task=task
        ).featurize()
    with pytest.raises(ValueError, match=r"`pos_weight` is 2\.0 for the loss 'mse'"):
        TextPairsModelOutput("mse", pos_weight=2.0)
    with pytest.raises(ValueError, match="`loss` is 'hinge'"):
        TextPairsModelOutput("hinge")  # type: ignore[arg-type]
