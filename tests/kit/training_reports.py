"""A small real `Trainer` run whose training rows have wrong labels, a harmful source and duplicates, recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_trak import Exact, TrakAttributor, TrakCallback, TrakConfig
from hf_trak.report.training import effects_of_training

ROWS, WEB, WRONG, TWICE, NEAR = 240, 32, 10, (3, 77), (5, 90)
HAND = "<script>hand</script>"
"""Training rows; those of a source of random labels, the last ones; wrong labels elsewhere; rows that stand again at
the end, as they are and with a little noise; and another source."""


class Network(PreTrainedModel):
    """A small network for the pixels of digits, whose loss leaves out the label -100 and divides by all rows."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 10)
        self.post_init()

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        logits = self.second(torch.tanh(self.first(pixels)))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / len(labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


@dataclass
class PlantedRun:
    """The run, its rows, and what was planted."""

    place: Path
    train: Dataset
    validation: Dataset
    wrong: np.ndarray
    right: np.ndarray
    trainer: Trainer
    attributor: TrakAttributor

    def losses(self, model: nn.Module) -> np.ndarray:
        """The loss of every validation row, without the library."""
        pixels, labels = (torch.tensor(self.validation[name][:]) for name in ("pixels", "labels"))
        with torch.no_grad():
            return nn.functional.cross_entropy(model(pixels).logits, labels, reduction="none").double().numpy()

    def change_without(self, rows: Sequence[int], **options: Any) -> np.ndarray:
        """The change of the validation losses when the trainer is run again without the labels of some rows."""
        labels = np.array(self.train["labels"])
        labels[list(rows)] = -100
        left = Dataset.from_dict({"pixels": self.train["pixels"][:], "labels": labels.tolist()})
        again = trainer_of(left, self.place / "again", **options)
        again.train()
        return self.losses(again.model) - self.losses(self.trainer.model)


def trainer_of(rows: Dataset, where: Path, callbacks: Any = None, rate: float = 1e-2) -> Trainer:
    """The trainer of the run: the same weights, order and steps each time."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(where), num_train_epochs=10, warmup_steps=8, learning_rate=rate, per_device_train_batch_size=32, seed=0,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, weight_decay=0.01,
    )  # fmt: skip
    config = PretrainedConfig(num_labels=10, problem_type="single_label_classification")
    return Trainer(Network(config), arguments, train_dataset=rows, callbacks=callbacks)


def rows_of(pixels: np.ndarray, labels: np.ndarray, source: Sequence[str]) -> Dataset:
    features = Features(
        {
            "pixels": List(Value("float32"), length=64),
            "labels": ClassLabel(names=[f"digit {i}" for i in range(10)]),
            "source": Value("string"),
        }
    )
    table = {"pixels": pixels.astype(np.float32).tolist(), "labels": labels.tolist(), "source": list(source)}
    return Dataset.from_dict(table, features=features)


def planted_run(place: Path) -> PlantedRun:
    """Train on digits with a record, and featurize them."""
    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(pixels))
    pixels, right = pixels[order] / 16, labels[order]
    given = right.copy()
    wrong = np.zeros(ROWS, dtype=bool)
    wrong[rng.permutation(ROWS - WEB)[:WRONG]] = True
    moved = np.flatnonzero(wrong)
    given[moved] = (given[moved] + rng.integers(1, 10, WRONG)) % 10
    given[ROWS - WEB : ROWS] = rng.integers(0, 10, WEB)
    noise = rng.normal(size=(len(NEAR), 64)) * 0.003
    own = np.concatenate([pixels[:ROWS], pixels[list(TWICE)], pixels[list(NEAR)] + noise])
    own_labels = np.concatenate([given[:ROWS], given[list(TWICE)], given[list(NEAR)]])
    sources = ["scan" if row % 2 else HAND for row in range(ROWS - WEB)] + ["web"] * WEB + ["scan"] * 4
    train = rows_of(own, own_labels, sources)
    validation = rows_of(pixels[ROWS : ROWS + 200], right[ROWS : ROWS + 200], ["scan"] * 200)
    args = TrakConfig(str(place / "trak"), proj_dim=256, use_cpu=True)
    trainer = trainer_of(train, place / "out", callbacks=[TrakCallback(args, record=True)])
    trainer.train()
    attributor = TrakAttributor.from_trainer(trainer, args, "image_classification")
    return PlantedRun(place, train, validation, np.flatnonzero(wrong), right, trainer, attributor.featurize())


def pictures(count: int, first: int = 0) -> Dataset:
    """Digits as a column of images, which become pixels when a row is read."""
    drawn, labels = load_digits(return_X_y=True)
    part = slice(first, first + count)
    images = [Image.fromarray((16 * pixels.reshape(8, 8)).clip(max=255).astype(np.uint8)) for pixels in drawn[part]]
    features = Features({"image": ImageFeature(), "labels": Value("int64")})
    rows = Dataset.from_dict({"image": images, "labels": labels[part].tolist()}, features=features)
    return rows.with_transform(
        lambda batch: {
            "pixels": [torch.tensor(np.asarray(one), dtype=torch.float32).flatten() / 256 for one in batch["image"]],
            "labels": batch["labels"],
        }
    )


def picture_trainer(place: Path) -> Trainer:
    """A trainer of images for a few steps."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(place / "out"), num_train_epochs=2, learning_rate=1e-2, per_device_train_batch_size=4, seed=0,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    model = Network(PretrainedConfig(num_labels=10, problem_type="single_label_classification"))
    return Trainer(model, arguments, train_dataset=pictures(24), eval_dataset=pictures(6, first=24))


def language_losses_in_group(place: str) -> dict[str, Any]:
    """Report on a language model as it is, in one of several processes, and compute the loss by hand."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)).eval()
    tokens = [[3 + (row * place) % 16 for place in range(1, 7)] for row in range(12)]
    labels = [[-100, *one[1:]] for one in tokens]  # a trainer counts the first one, too
    rows = Dataset.from_dict({"input_ids": tokens, "labels": labels})
    trainer = Trainer(
        model, TrainingArguments(str(Path(place) / "out"), use_cpu=True, report_to=[]), train_dataset=rows
    )
    attributor = TrakAttributor.from_trainer(trainer, TrakConfig(str(Path(place) / "trak"), use_cpu=True), "causal_lm")
    found = effects_of_training(attributor.features, rows.select(range(5)), Exact("identity"))
    by_hand = float(model(input_ids=torch.tensor(tokens[:5]), labels=torch.tensor(labels[:5])).loss.detach())
    return {"loss": found.loss, "by_hand": by_hand, "effects": found.effects.tolist()}


def report_in_group(place: str) -> dict[str, Any]:
    """Train on images in one of several processes, which report together when the training ends."""
    directory, run = Path(place), picture_trainer(Path(place))
    args = TrakConfig(str(directory / "trak"), use_cpu=True)
    callback = TrakCallback(args, record=True, trainer=run, report=True, task="image_classification")
    run.add_callback(callback)
    run.train()
    if run.args.process_index == 0:
        torch.save(run.model.state_dict(), directory / "last.pt")
    assert callback.report is not None
    return {"method": callback.report.method, "effects": callback.report.effects.tolist()}
