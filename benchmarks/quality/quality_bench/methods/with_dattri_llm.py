"""dattri-llm 0.1.0: its attributors, on models as they are.

They take any `torch` module, whose linear layers, convolutions, embeddings and norms they hook. As in the library's
example of attribution, all layers that have a rule are hooked. Losses are summed over the rows of a batch, so that
each row has its own gradient, whole; the target of a classifier is the negative margin, that of a language model the
loss.

- EK-FAC and K-FAC: absolute damping of 1e-3, the library's default, and relative ones, which it has as an option. The
  Fisher is that of the labels given; labels drawn from the model are no choice. Norms take part in a variant.
- AdamW-influence carries targets back through the recorded steps of a training with AdamW, from the gradients of its
  rows and the moments of the optimizer. Both are offloaded while `Trainer` trains, as in the library's first example,
  so that it is the very run of the bank. Its scores are positive for rows whose absence lowers the loss of the target,
  and are turned round here.
- Gradient dot and cosine, which the library calls TracIn, for the final model, and for three of its run.

Nothing is kept of rows between fitting and scoring but for AdamW-influence, whose store is counted.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dattri_llm import (
    REGISTER_ALL,
    AdamWInfluenceAttributor,
    AttributionArguments,
    AttributionTask,
    EKFACAttributor,
    GradientStorageManager,
    HookManager,
    HookManagerConfig,
    KFACAttributor,
    OffloadCallback,
    OptimizerStateCallback,
    TracInAttributor,
    hash_sample,
)
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, set_seed

from quality_bench.banks import SEED
from quality_bench.job import BATCH, Cost, Job, Method, Scores
from quality_bench.objective import losses, margins

HOOKS: dict[str, Any] = {"linear_io": REGISTER_ALL}
"""All layers for which the library has a rule."""

RELATIVE = (0.01, 0.1, 1.0, 10.0)
"""Dampings as multiples of the mean eigenvalue."""

Batch = dict[str, Tensor]


class Rows(Dataset[Batch]):
    """Rows of `"train"` or `"targets"` as dictionaries of tensors, labels among them."""

    def __init__(self, job: Job, part: str) -> None:
        rows = getattr(job.case, part)
        self.columns = {**job.case.inputs(rows), "labels": job.case.labels(rows)}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[index] for name, tensor in self.columns.items()}


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return losses(_logits(model, batch), batch["labels"]).sum()


def _negative_margin(model: nn.Module, batch: Batch) -> Tensor:
    return -margins(_logits(model, batch), batch["labels"]).sum()


def _arguments(job: Job, **options: Any) -> AttributionArguments:
    sizes = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    return AttributionArguments(str(job.directory / "out"), use_cpu=True, seed=job.seed, **sizes, **options)


def _task(job: Job, model: nn.Module, checkpoints: Any = None) -> AttributionTask:
    target = _loss if job.case.task == "causal_lm" else _negative_margin
    return AttributionTask(_loss, model, checkpoints, target_func=target)


def factored(attributor: type[EKFACAttributor] | type[KFACAttributor]) -> Method:
    """Influence with factors of Kronecker, of this kind."""

    def attribute(job: Job, cost: Cost) -> Scores:
        train, targets = Rows(job, "train"), Rows(job, "targets")

        def scores(name: str, **options: Any) -> np.ndarray:
            made = attributor(_arguments(job), task=_task(job, job.model))
            fitted = {"hook_config": HookManagerConfig(**HOOKS), "fisher_dir": str(job.directory / name)}
            return made.attribute(train, targets, **fitted, **options).scores.double().numpy()

        found = {"default": cost.time("score", lambda: scores("factors"))}
        for damping in RELATIVE:
            found[f"relative damping {damping:g}"] = scores("factors", damping=damping, relative_damping=True)
            found[f"norms, relative damping {damping:g}"] = scores(
                "norms", damping=damping, relative_damping=True, non_kfac_strategy="direct"
            )
        return found

    return attribute


def gradients(**options: Any) -> Method:
    """Inner products of gradients; of three models of the run in a variant."""

    def attribute(job: Job, cost: Cost) -> Scores:
        train, targets = Rows(job, "train"), Rows(job, "targets")

        def scores(checkpoints: list[Any] | None) -> np.ndarray:
            made = TracInAttributor(_arguments(job), task=_task(job, job.model, checkpoints))
            found = made.attribute(train, targets, hook_config=HookManagerConfig(**HOOKS), **options)
            return found.scores.double().numpy().reshape(-1, len(train), len(targets)).sum(0)

        found = {"default": cost.time("score", lambda: scores(None))}
        return found | {"3 of one run": scores([model.state_dict() for model in job.of_one_run()])}

    return attribute


class _AfterStep(TrainerCallback):
    """Tells the library of moments after every step of the optimizer, which are its own before the next backward."""

    def __init__(self, record: Callable[[int], None]) -> None:
        self.record, self.steps = record, itertools.count()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.record(next(self.steps))


def adamw_influence(job: Job, cost: Cost) -> Scores:
    """The run that made the model, step by step."""
    if job.case.training.get("optim", "adamw_torch") != "adamw_torch":
        raise ValueError(
            f"The case is trained with {job.case.training['optim']!r}. Expected AdamW. Leave it out here."
        )
    train, store = Rows(job, "train"), job.directory / "train"

    def fit() -> tuple[nn.Module, dict[int, Any]]:
        set_seed(SEED)
        trainer = job.case.trainer(job.case.train, SEED)
        gradients = OffloadCallback(1, GradientStorageManager(str(store)), recording_type="per_batch")
        # `accelerate` wraps the optimizer in a class that the library does not know.
        moments = OptimizerStateCallback(trainer.model, lambda: trainer.optimizer.optimizer)
        trainer.add_callback(_AfterStep(moments.record_post))
        hooks = HookManager(trainer.model, config=HookManagerConfig(**HOOKS), callbacks=[gradients, moments])
        with hooks.collect():
            trainer.train()
        hooks.remove()
        return trainer.model.eval(), dict(moments.dynamics())

    def score(model: nn.Module, dynamics: dict[int, Any]) -> np.ndarray:
        made = AdamWInfluenceAttributor(_arguments(job), task=_task(job, model))
        kept = GradientStorageManager(str(job.directory / "targets"))
        of_targets = made.generate_test_rep(Rows(job, "targets"), hook_config=HookManagerConfig(**HOOKS))
        made.collect_gradients(of_targets, kept)
        found = made.attribute_from_cache(str(store), kept, propagation="test", dynamics=dynamics)
        return -_by_row(job, train, *found.agnostic_matrix())

    model, dynamics = cost.time("fit", fit)
    cost.bytes_per_row = sum(path.stat().st_size for path in _files(store)) / len(train)
    return {"default": cost.time("score", lambda: score(model, dynamics))}


def _by_row(job: Job, train: Rows, hashes: list[str], scores: Tensor) -> np.ndarray:
    """Scores of rows in their order, from those of distinct contents; equal rows have equal shares."""
    place = {name: position for position, name in enumerate(hashes)}
    columns = [name for name in train.columns if name in job.case.train.column_names]
    of_row = [place[hash_sample({name: train[row][name] for name in columns})] for row in range(len(train))]
    places = torch.tensor(of_row)
    return (scores.double() / torch.bincount(places)[:, None])[places].numpy()


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


METHODS: dict[str, Method] = {
    "EK-FAC": factored(EKFACAttributor),
    "K-FAC": factored(KFACAttributor),
    "AdamW-influence": adamw_influence,
    "gradient dot": gradients(),
    "gradient cosine": gradients(normalized_grad=True),
}
