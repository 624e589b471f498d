"""Replays of BERTs, whose models ignore how many items the trainer counts, against retraining and without a record."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from replay_runs import ROWS, TARGETS, config, differences, trainer
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, Trainer

from hf_trak import TrakAttributor
from hf_trak.callbacks import TrakCallback
from hf_trak.errors import GradientEngineError
from hf_trak.evaluation.trainer_retraining import model_outputs
from hf_trak.methods import Replay


class Twice(Trainer):
    """A loss that the model computes itself, so that rows go through it alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


class Penalized(Trainer):
    """A loss with a part that asks the model a second time, of the same inputs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        first, second = model(**inputs).logits, model(**inputs).logits
        return functional.cross_entropy(first, labels) + (first * second).square().mean()


def losses_of(kind: type[Trainer], model: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each row, or of each of its tokens, written by hand."""
    if model.config.num_labels == 1:
        return (logits.squeeze(1) - labels).square()
    if logits.ndim == 3:
        logits = logits.transpose(1, 2)
    found = functional.cross_entropy(logits, labels, reduction="none")
    if kind is Penalized:
        found = found + logits.pow(4).mean(1)
    return 2 * found if kind is Twice else found


class Weights:
    """Trainers of a kind, with a weight for each row in their loss."""

    def __init__(self, rows: Dataset) -> None:
        self.of: dict[int, float] = {}
        self._numbers = {tuple(ids): row for row, ids in enumerate(rows["input_ids"])}

    def kind(self, kind: type[Trainer]) -> type[Trainer]:
        outer = self

        class Weighted(kind):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                labels = inputs.pop("labels")
                factors = [outer.of.get(outer._numbers[tuple(ids)], 1.0) for ids in inputs["input_ids"].tolist()]
                losses = losses_of(kind, model, model(**inputs).logits, labels)
                weighed = losses * torch.tensor(factors, dtype=torch.float64).reshape(-1, *[1] * (losses.ndim - 1))
                return weighed.sum() / (labels != -100).sum()

        return Weighted


def rows(count: int, seed: int, model: Any) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 17, (count, 6), generator=generator).tolist()
    kind, classes = type(model), model.config.num_labels
    if kind is BertForTokenClassification:
        labels: list[Any] = [
            [-100 if i % 3 == 0 and j > 1 else one[j] % 3 for j in range(6)] for i, one in enumerate(ids)
        ]
    else:
        labels = [one[0] % classes if classes > 1 else one[0] / 8 for one in ids]
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 6] * count, "labels": labels})


def bert(kind: Any, classes: int) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = BertConfig(vocab_size=17, max_position_embeddings=8, num_labels=classes, **sizes, **dropout)
    return kind(settings).double()


CASES = {
    "regression": (Trainer, BertForSequenceClassification, 1),
    "twice the loss of the model": (Twice, BertForSequenceClassification, 3),
    "twice a mean over tokens": (Twice, BertForTokenClassification, 3),
    "two calls of the model": (Penalized, BertForSequenceClassification, 3),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_retraining_with_other_weights(tmp_path: Path, case: str) -> None:
    """Central differences by the weight of a row, in float64, with two batches in a step."""
    kind, model, classes = CASES[case]
    given, asked = rows(ROWS, 0, bert(model, classes)), rows(TARGETS, 1, bert(model, classes))
    weights = Weights(given)
    callback = TrakCallback(config(tmp_path), record=True)
    run = trainer(
        tmp_path, bert(model, classes), given, kind=kind, callbacks=[callback], optim="sgd", learning_rate=0.1
    )
    run.train()
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    found = attributor.attribute(asked, top_k=None, method=Replay(of="run", smoothing=0.0))["trak_scores"]

    def train() -> torch.Tensor:
        other = trainer(tmp_path, bert(model, classes), given, kind=weights.kind(kind), optim="sgd", learning_rate=0.1)
        other.train()
        return torch.from_numpy(model_outputs(other.model, asked, batch_size=1))

    measured = differences(weights, train, 1e-4)  # type: ignore[arg-type]
    error = (torch.tensor(found, dtype=torch.float64) - measured).abs().max()
    assert float(error / measured.abs().max()) <= 1e-6


def test_a_loss_that_asks_the_model_has_no_gauss_newton_matrix(tmp_path: Path) -> None:
    given, asked = (rows(count, seed, bert(BertForSequenceClassification, 3)) for count, seed in ((ROWS, 0), (1, 1)))
    callback = TrakCallback(config(tmp_path), record=True)
    run = trainer(tmp_path, bert(BertForSequenceClassification, 3), given, kind=Penalized, callbacks=[callback])
    run.train()
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    with pytest.raises(GradientEngineError, match=r"asks the model itself.*Use the Hessian"):
        attributor.attribute(asked, top_k=None, method=Replay(of="run", form="gauss-newton"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForTokenClassification])
def test_a_run_without_a_record_has_the_scores_of_its_record(tmp_path: Path, kind: Any) -> None:
    given, asked = rows(ROWS, 0, bert(kind, 3)), rows(TARGETS, 1, bert(kind, 3))
    callback = TrakCallback(config(tmp_path), record=True)
    run = trainer(tmp_path, bert(kind, 3), given, callbacks=[callback], save_strategy="steps", save_steps=1)
    run.train()
    bert(kind, 3).save_pretrained(tmp_path / "out" / "checkpoint-0")
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    found = [
        torch.tensor(
            attributor.attribute(asked, top_k=None, method=Replay(of="run", name=name), name=name)["trak_scores"],
            dtype=torch.float64,
        )
        for name in ("run", "nothing")
    ]
    torch.testing.assert_close(*found)
