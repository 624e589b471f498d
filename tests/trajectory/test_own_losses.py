"""Replays of runs whose trainer computes the loss itself, against retraining."""

from pathlib import Path
from typing import Any

import pytest
import torch
from replay_runs import WORDS, RowWeights, config, differences, outputs, recorded, replayed, sentences, tiny, trainer
from torch.nn import functional
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from hf_trak import TrakAttributor
from hf_trak.errors import HfTrakError
from hf_trak.methods import Replay

WEIGHTS = RowWeights()
CLASSES = torch.linspace(0.5, 2.0, WORDS, dtype=torch.float64)


def token_losses(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """The loss of every token, by the weight of its row, `(B, T)`."""
    losses = functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", **options)
    return losses * WEIGHTS.factors(labels).unsqueeze(1)


class Smoother(LabelSmoother):
    """Smooth labels in float64, where `transformers` computes a part in float32."""

    def __call__(self, model_output, labels, shift_labels=False, num_items_in_batch=None):
        losses = token_losses(model_output["logits"], labels, label_smoothing=self.epsilon)
        return losses.sum() / (labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


class Smoothed(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label_smoother = Smoother(0.2)


class Classes(Trainer):
    """A loss with weights of classes, divided by those of all labels of a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        losses = token_losses(model(**inputs).logits, labels, weight=CLASSES)
        kept = labels[:, 1:]
        return losses.sum() / CLASSES[kept[kept != -100]].sum()


class Function(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=self.saturated, **kwargs)

    @staticmethod
    def saturated(outputs, labels, num_items_in_batch=None):
        return token_losses(outputs["logits"].tanh(), labels).sum() / num_items_in_batch


class Twice(Trainer):
    """A loss that the model computes itself, so that rows go through it alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


class OfTheModel(Trainer):
    """A loss that the model computes, which is looked at on the way."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


class Sums(RowWeights):
    """A loss that is a sum over all tokens."""

    def __call__(self, logits, labels, vocab_size=None, num_items_in_batch=None, **options):
        return super().__call__(logits, labels, num_items_in_batch=1)


def weighted(weights: RowWeights = WEIGHTS) -> Any:
    model = tiny()
    model.loss_function = weights
    return model


def scores_of(scored: Any) -> torch.Tensor:
    return torch.tensor(scored["trak_scores"], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Smoothed, Classes, Function, Twice])
def test_retraining_with_other_weights(tmp_path: Path, kind: type[Trainer]) -> None:
    """Central differences by the weight of a row in the trainer's own loss, in float64."""
    options = {"kind": kind, "label_smoothing_factor": 0.2 if kind is Smoothed else 0.0}

    def train() -> torch.Tensor:
        other = trainer(tmp_path, weighted(), **options)
        other.train()
        return outputs(other.model)

    run = recorded(tmp_path, weighted(), **options)
    found = scores_of(replayed(run, tmp_path, Replay(of="run", smoothing=0.0)))
    measured = differences(WEIGHTS, train)
    assert float((found - measured).abs().max() / measured.abs().max()) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a row in a batch", "sums"])
def test_retraining_by_the_loss_of_the_model(tmp_path: Path, case: str) -> None:
    """Batches of three rows and of one, of a trainer's own loss; and a loss that nothing divides."""
    weights = Sums() if case == "sums" else WEIGHTS
    options: dict[str, Any] = {} if case == "sums" else {"kind": OfTheModel, "per_device_train_batch_size": 3}

    def train() -> torch.Tensor:
        other = trainer(tmp_path, weighted(weights), **options)
        other.train()
        return outputs(other.model)

    run = recorded(tmp_path, weighted(weights), **options)
    assert TrakAttributor.from_trainer(run, config(tmp_path)).trajectory().activations > 0  # before anything else
    found = scores_of(replayed(run, tmp_path, Replay(of="run", smoothing=0.0)))
    measured = differences(weights, train)
    assert float((found - measured).abs().max() / measured.abs().max()) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Trainer, Classes])
def test_runs_without_a_record(tmp_path: Path, kind: type[Trainer]) -> None:
    """Items and factors are those of the record, and so are scores where a checkpoint is at every step."""
    options: dict[str, Any] = {"label_smoothing_factor": 0.1} if kind is Trainer else {}
    run = recorded(tmp_path, save_strategy="steps", save_steps=1, kind=kind, **options)
    tiny().save_pretrained(tmp_path / "out" / "checkpoint-0")
    found = [scores_of(replayed(run, tmp_path, Replay(of="run", name=name))) for name in ("run", "nothing")]
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_another_loss_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path, kind=Classes, max_grad_norm=0.0)
    other = trainer(tmp_path, run.model, sentences(10, 0, cut=True), kind=Function, max_grad_norm=0.0)
    with pytest.raises(HfTrakError, match="The gradient of the first step has the norm"):
        replayed(other, tmp_path, Replay(of="run"))
