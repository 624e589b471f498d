"""Training with `Trainer`, and attribution, as the recipes share them.

`TrainingRecipeArguments` are the arguments of every recipe, `start` makes those of `Trainer` and the attributor out of
them, and `train_and_attribute` does the work, resuming what an earlier run left.
"""

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled
from transformers import Trainer, TrainingArguments

from hf_trak.attributor import TrakAttributor
from hf_trak.config import TrakConfig
from hf_trak.errors import StoreError
from hf_trak.hub.names import shown
from hf_trak.modelout_functions import AbstractModelOutput
from hf_trak.runtime.checks import checked_int
from hf_trak.store.sealed import read_sealed, write_sealed
from hf_trak.weights.checkpoints import load_into

RECORD = "run.json"
"""File that records the settings of a training and whether it is finished; sealed, see `hf_trak.store.sealed`."""

_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")

TrakConfigT = TypeVar("TrakConfigT", bound=TrakConfig)


@dataclass
class TrainingRecipeArguments:
    """Arguments of training, and how much to attribute. Recipes add fields and change defaults."""

    COUNTS: ClassVar[tuple[str, ...]] = ("num_checkpoints", "num_targets", "top_k")
    """Fields whose smallest value is 1."""

    output_dir: str = field(
        default="outputs",
        metadata={"help": "Checkpoints, features, scores and summary go here. The same command again resumes."},
    )
    num_train_epochs: float = field(default=5.0, metadata={"help": "Passes over the training rows."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Training batch size per process."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Highest learning rate of AdamW, decaying to 0."})
    weight_decay: float = field(default=0.05, metadata={"help": "Weight decay of AdamW."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Warmup steps, or below 1 their part of all steps."})
    save_steps: float = field(
        default=0.2, metadata={"help": "Steps between checkpoints, or below 1 their part of all steps."}
    )
    num_checkpoints: int = field(
        default=3,
        metadata={"help": "Attribute with this many checkpoints, from the first to the last of the training."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of training and of the projection."})
    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU even beside an accelerator."})
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that load rows."})
    method: Literal["index", "exact"] = field(
        default="index",
        metadata={"help": "`index` scores with features, `exact` with whole gradients under `curvature`."},
    )
    top_k: int = field(default=20, metadata={"help": "Training rows to keep per target, from either end."})
    num_targets: int = field(default=6, metadata={"help": "Targets to print."})
    overwrite: bool = field(
        default=False, metadata={"help": "Delete what this recipe left in `output_dir` and start anew."}
    )

    def __post_init__(self) -> None:
        for name in self.COUNTS:
            checked_int(getattr(self, name), name, 1)

    def settings(self, *names: str) -> dict[str, Any]:
        """Collect what a trained model depends on, besides its rows: the common fields, and the named ones."""
        common = (
            "num_train_epochs", "per_device_train_batch_size", "learning_rate", "weight_decay", "warmup_steps",
            "save_steps", "seed",
        )  # fmt: skip
        return {name: getattr(self, name) for name in (*names, *common)}


def start(args: TrainingRecipeArguments, trak: TrakConfigT, **more: Any) -> tuple[TrainingArguments, TrakConfigT]:
    """Make the arguments of the trainer and of the attributor, each with a directory of its own below `output_dir`.

    Args:
        args: the recipe's arguments. With `overwrite`, the files of an earlier run are deleted here.
        trak: the arguments of the attribution.
        more: further arguments of `TrainingArguments`, which replace those that follow from `args`.
    """
    output_dir = Path(args.output_dir)
    training = TrainingArguments(
        **{
            "output_dir": str(output_dir / "model"),
            "num_train_epochs": args.num_train_epochs,
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "per_device_eval_batch_size": 256,
            "learning_rate": args.learning_rate,
            "weight_decay": args.weight_decay,
            "warmup_steps": args.warmup_steps,
            "save_steps": args.save_steps,
            "logging_strategy": "epoch",
            "seed": args.seed,
            "use_cpu": args.use_cpu,
            "disable_tqdm": are_progress_bars_disabled(),
            "dataloader_num_workers": args.dataloader_num_workers,
            "dataloader_pin_memory": torch.cuda.is_available() and not args.use_cpu,
            **more,
        }
    )
    if args.overwrite and (output_dir / "model" / RECORD).is_file() and training.process_index == 0:
        for name in ("model", "trak", "scored", "train"):
            shutil.rmtree(output_dir / name, ignore_errors=True)
    return training, replace(trak, output_dir=str(output_dir / "trak"))


def train_once(trainer: Trainer, settings: dict[str, Any]) -> list[str]:
    """Train, or finish an interrupted training, or take the finished one.

    Args:
        trainer: a trainer with an output directory of its own.
        settings: everything that defines the trained model, as plain JSON.

    Returns:
        The checkpoint directories, oldest first. The trainer's model has the weights of the last.

    Raises:
        ValueError: the directory holds a model trained with other settings, or checkpoints of another program.
        StoreError: the record of the training is damaged, or says that it is finished and its checkpoints are gone.
    """
    trainer.accelerator.wait_for_everyone()  # the main process may still be deleting files, see `start`
    model_dir = Path(str(trainer.args.output_dir))
    record_path = model_dir / RECORD
    record = _read_record(record_path) if record_path.is_file() else None
    saved = saved_checkpoints(model_dir)
    trainer.accelerator.wait_for_everyone()  # no process writes before all of them have read
    if record is None and saved:
        raise ValueError(f"{model_dir} holds checkpoints of another program. Set another `output_dir`.")
    if record is not None and record["settings"] != settings:
        changes = [
            f"{name}: {record['settings'].get(name)!r} there, {value!r} given"
            for name, value in settings.items()
            if record["settings"].get(name) != value
        ]
        raise ValueError(
            f"{model_dir} holds a model trained with other settings:\n  "
            + "\n  ".join(changes)
            + "\nExpected the same. Use them, or another `output_dir`, or `--overwrite` to start anew."
        )
    if record is not None and record["finished"]:
        if not saved:
            raise StoreError(
                f"{record_path} says that the training is finished, but {model_dir} holds no checkpoint. Expected at "
                "least the last one. Restore it, or set `--overwrite` to train anew."
            )
        load_into(trainer.accelerator.unwrap_model(trainer.model), saved[-1])
        return saved
    if trainer.is_world_process_zero():
        write_sealed(record_path, {"settings": settings, "finished": False})
    trainer.train(resume_from_checkpoint=saved[-1] if saved else None)
    if trainer.is_world_process_zero():
        write_sealed(record_path, {"settings": settings, "finished": True})
    trainer.accelerator.wait_for_everyone()
    return saved_checkpoints(model_dir)


def _read_record(path: Path) -> dict[str, Any]:
    """Read the record of an earlier run's training. Records of earlier versions have no checksum."""
    remedy = "Set `--overwrite` to train anew, or restore the file from a copy."
    record = read_sealed(path, remedy)
    settings, finished = record.get("settings"), record.get("finished")
    if not isinstance(settings, dict) or not isinstance(finished, bool):
        raise StoreError(
            f"{path} has the settings {shown(settings)} and `finished` {shown(finished)}; expected an object, and "
            f"true or false. {remedy}"
        )
    return record


def saved_checkpoints(model_dir: Path) -> list[str]:
    """List the complete checkpoints by step: `Trainer` writes `trainer_state.json` last."""
    complete = {
        int(match[1]): path.parent
        for path in model_dir.glob("checkpoint-*/trainer_state.json")
        if (match := _CHECKPOINT.fullmatch(path.parent.name))
    }
    return [str(complete[step]) for step in sorted(complete)]


def spread(checkpoints: Sequence[str], count: int) -> list[str]:
    """Choose `count` checkpoints from the first to the last, evenly spaced, or the last alone if `count` is 1.

    Early ones matter: at the end of the training of a small network q = 1 − p is close to 0 for all but a few rows,
    and those few would score highest for every target.
    """
    if count >= len(checkpoints):
        return list(checkpoints)
    last = len(checkpoints) - 1
    chosen = [checkpoints[round(i * last / (count - 1))] for i in range(count)] if count > 1 else checkpoints[-1:]
    return list(chosen)


@dataclass
class Outcome:
    """The results of a run."""

    attributor: TrakAttributor
    targets: Dataset
    """The targets as the model takes them."""
    scored: Dataset
    """The targets with the columns of `TrakAttributor.attribute`."""
    checkpoints: list[str]
    seconds: dict[str, float]
    """Durations of training, featurizing (or fitting a curvature) and scoring."""
    method: Literal["index", "exact"] = "index"
    """How scores are computed."""

    def facts(self, *arguments: Any) -> dict[str, Any]:
        """Collect number of parameters, checkpoints, durations and all arguments, as plain JSON for a summary.

        Args:
            arguments: dataclasses; where two have a field of the same name, the later one's value is taken.
        """
        return {
            "parameters": self.attributor.features.layout.total,
            "checkpoints": self.checkpoints,
            "seconds": self.seconds,
            "arguments": {name: value for part in arguments for name, value in asdict(part).items()},
        }


def train_and_attribute(
    trainer: Trainer,
    args: TrainingRecipeArguments,
    trak: TrakConfig,
    settings: dict[str, Any],
    targets: Dataset | Callable[[Any], Dataset],
    task: str | AbstractModelOutput | None = None,
) -> Outcome:
    """Train, or take what an earlier run left; featurize some checkpoints; score the targets.

    With `method="exact"`, a curvature is fitted instead of featurizing, and scores are exact.

    Args:
        trainer: see [`train_once`]. Afterwards its model has the weights of the last checkpoint.
        args: the numbers of checkpoints and of training rows per target.
        trak: arguments of the attribution.
        settings: see [`train_once`].
        targets: rows in the form of the trainer's datasets, or a function that makes them with the trained model.
        task: the model output function; `None` infers it from the model.
    """
    clock = [time.perf_counter()]
    checkpoints = spread(train_once(trainer, settings), args.num_checkpoints)
    rows = targets if isinstance(targets, Dataset) else targets(trainer.accelerator.unwrap_model(trainer.model))
    clock.append(time.perf_counter())
    attributor = TrakAttributor.from_trainer(trainer, args=trak, task=task)
    method: Literal["index", "exact"] = args.method
    if method == "exact":
        attributor.fit_curvature(checkpoints=checkpoints)
    else:
        attributor.featurize(checkpoints=checkpoints)
    clock.append(time.perf_counter())
    scored = attributor.attribute(rows, top_k=args.top_k, method=method)
    clock.append(time.perf_counter())
    stages = ("training", "fitting the curvature" if method == "exact" else "featurizing", "scoring")
    seconds = {stage: round(b - a, 1) for stage, a, b in zip(stages, clock, clock[1:], strict=False)}
    return Outcome(attributor, rows, scored, checkpoints, seconds, method)
