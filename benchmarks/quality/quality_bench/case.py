"""A case: data, a model, and its training with `Trainer`. A bank retrains such models."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_trak.evaluation import TrainerRetraining
from hf_trak.identity.row_digest import fingerprint_dataset
from hf_trak.store.sealed import content_digest


@dataclass(frozen=True)
class Case:
    """A task, all of whose rows have columns of one fixed length, so that the default collator serves.

    Attributes:
        name: what flags and directories call it.
        title: what tables call it.
        task: hf_trak's name of the task, whose model output is measured.
        train: training rows, n; the columns are arguments of the model, `labels` among them.
        targets: rows to explain, m, with the same columns.
        make_model: makes an untrained model; all randomness comes from torch's global generator.
        training: arguments of `TrainingArguments`, such as `learning_rate`, `num_train_epochs` and
            `per_device_train_batch_size`.
        inputs: turns rows into tensors by the names of the model's arguments, for libraries that vmap the model over
            single rows (without `labels`).
        head: name of the last linear layer, whose input is the embedding of a row.
        texts: turns rows into texts, if they have any.
        drops: shares of the training rows that are dropped.
        subsets: random subsets for each share.
        perturbed: how many of the first subsets are trained again from a perturbed start.
        other_seed: how many of the first subsets are trained again with another seed.
    """

    name: str
    title: str
    task: str
    train: Dataset
    targets: Dataset
    make_model: Callable[[], nn.Module]
    training: dict[str, Any]
    inputs: Callable[[Dataset], dict[str, Tensor]]
    head: str
    texts: Callable[[Dataset], list[str]] | None = None
    drops: tuple[float, ...] = (0.01, 0.05, 0.5)
    subsets: int = 40
    perturbed: int = 8
    other_seed: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    """Facts that a method may need, such as `{"tokenizer": …}`; each case module says which."""

    def trainer(self, rows: Dataset, seed: int) -> Trainer:
        """A trainer of a fresh model for these rows; the caller has seeded everything."""
        arguments = TrainingArguments(
            output_dir="unused",
            seed=seed,
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            **self.training,
        )
        trainer = Trainer(self.make_model(), arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def retraining(self, **options: Any) -> TrainerRetraining:
        """The training for a bank; options are `drop`, `seed` and `perturbation`."""
        return TrainerRetraining(self.trainer, self.train, self.targets, self.task, **options)

    @property
    def digest(self) -> str:
        """Eight digits of a hash of the data, the model's structure and the training."""
        model = self.make_model()
        config = getattr(model, "config", None)
        settings = {} if config is None else json.loads(config.to_json_string(use_diff=False))
        settings.pop("transformers_version", None)
        described = {"model": str(model), "config": settings, "training": self.training}
        return content_digest({"rows": fingerprint_dataset(self.train), **described})[:8]

    def labels(self, rows: Dataset) -> Tensor:
        return torch.tensor(rows["labels"][:])


class _States(TrainerCallback):
    """Keeps the weights after the first and the second third of the steps, and after the last."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        thirds = {-(-state.max_steps * part // 3) for part in (1, 2, 3)}
        if state.global_step in thirds:
            self.states.append({name: value.detach().clone() for name, value in changing_state(model).items()})


def changing_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model without frozen weights, which `make_model` gives again."""
    frozen = {name for name, value in model.named_parameters(remove_duplicate=False) if not value.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def trained(case: Case, seed: int, directory: Path) -> list[nn.Module]:
    """Models of one training on all rows with this seed: after each third of the steps, the last one at the end.

    With the bank's own seed the last is the model whose outputs the bank has for no dropped rows. Kept in a file.
    """
    path = directory / f"trained-{case.digest}-{seed}.pt"
    if not path.is_file():
        set_seed(seed)
        trainer = case.trainer(case.train, seed)
        states = _States()
        trainer.add_callback(states)
        trainer.train()
        partial = path.with_suffix(".part")
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(states.states, partial)
        partial.rename(path)
    models = []
    for state in torch.load(path, weights_only=True):
        model = case.make_model()
        model.load_state_dict({**model.state_dict(), **state})
        models.append(model.eval())
    return models
