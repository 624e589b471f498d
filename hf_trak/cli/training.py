"""The trainer of a run, from its arguments as JSON and the state that it saved. Nothing is unpickled."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from hf_trak.cli.named_models import load_model
from hf_trak.cli.parser import ModelArguments
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.pricing import recorded_run
from hf_trak.trajectory.hyperparameters import hyperparameters
from hf_trak.trajectory.record import RunRecord

STATE = "trainer_state.json"
"""File of a checkpoint directory with the steps that were taken, and what was logged."""

_READ = (
    "optim", "optim_args", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "per_device_train_batch_size",
    "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed", "data_seed", "dataloader_drop_last",
    "group_by_length", "train_sampling_strategy", "average_tokens_across_devices",
)  # fmt: skip
"""Arguments of a trainer on which the numbers of its steps or the order of its rows depend."""

_SAY = (
    "Give them as `--training_args args.json`, the file that `trainer.args.to_json_string()` makes, or as "
    "`--training_args learning_rate=5e-5,per_device_train_batch_size=8,num_train_epochs=3`."
)

_MOST_BYTES = 1 << 24

_AGREEMENT = 1e-5
"""Deviation of a logged learning rate from that of the arguments, relative to the highest."""


def trainer_of(features: FeaturizedModel, given: str | None, model: str | None) -> Trainer:
    """Make the trainer of the run that made a model, as far as replays ask it.

    Args:
        features: the model, its rows and its store.
        given: a JSON file of training arguments, or `name=value` of some, divided by commas. Those that are not given
            are the defaults of `TrainingArguments`, as in the run.
        model: the directory that the model was loaded from, whose `trainer_state.json` is read if it is there.

    Raises:
        ValueError: the learning rate, the batch size or the number of steps is not given, an argument is unknown, or
            the learning rates are not those that were logged.
    """
    arguments, state = _of_run(given, model)
    place = None if model is None else Path(model)
    saved = None if place is None or not place.is_dir() else place
    if saved is not None and saved.name.startswith("checkpoint-"):
        saved = saved.parent
    trainer = _trainer(
        features, features.model, features.train_dataset, str(saved or features.args.output_dir), arguments
    )
    if state is not None:
        trainer.state = state
        _check_rates(hyperparameters(trainer, features.model, features.layout).rates, state)
    return trainer


def trainers_from(
    start: str, features: FeaturizedModel, given: str | None, model_args: ModelArguments
) -> Callable[[Any, int], Trainer]:
    """Make trainers that repeat a run with other rows.

    Args:
        start: the model that the run began with, a directory or a repo.
        features, given: as of [`trainer_of`].
        model_args: the model that the run made, as it is loaded.

    Returns:
        `make_trainer(rows, seed)` of [`~hf_trak.report.training_report`]. It takes the seed of the run, so that rows
        come in the same order, and saves nothing.

    Raises:
        ValueError: as of [`trainer_of`], or a record of the run has other steps.
    """
    _check_record(features, trainer_of(features, given, model_args.model_name_or_path))
    arguments, state = _of_run(given, model_args.model_name_or_path)
    if state is not None and not {"max_steps", "num_train_epochs"} & set(arguments):
        arguments["max_steps"] = state.max_steps
    silent = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}

    def make_trainer(rows: Any, seed: int) -> Trainer:
        model = load_model(start, model_args.model_revision, model_args.task)
        made = _trainer(features, model, rows, str(Path(features.args.output_dir) / "proof"), {**arguments, **silent})
        made.remove_callback(PrinterCallback)  # which would print among a command's own output
        return made

    return make_trainer


def _trainer(features: FeaturizedModel, model: Any, rows: Any, place: str, arguments: dict[str, Any]) -> Trainer:
    made = TrainingArguments(place, report_to=[], use_cpu=features.device.type == "cpu", **arguments)
    return Trainer(model, made, train_dataset=rows, data_collator=features.data_collator)


def _of_run(given: str | None, model: str | None) -> tuple[dict[str, Any], TrainerState | None]:
    """Read the arguments of a run, and its state if the directory of its model has it."""
    place = Path(model) if model is not None and Path(model).is_dir() else None
    state = None if place is None or not (place / STATE).is_file() else TrainerState(**_json(place / STATE))
    arguments = _arguments(given)
    if state is not None and state.train_batch_size:
        arguments.setdefault("per_device_train_batch_size", state.train_batch_size)
    needed = ["learning_rate", "per_device_train_batch_size"]
    if state is None and "max_steps" not in arguments:
        needed.append("num_train_epochs")
    if missing := [f"`{name}`" for name in needed if name not in arguments]:
        raise ValueError(
            f"The steps of the training are asked for, and the run's {', '.join(missing)} "
            f"{'are' if missing[1:] else 'is'} not known. Expected the arguments of the training. {_SAY}"
        )
    return arguments, state


def _arguments(given: str | None) -> dict[str, Any]:
    """Read training arguments from a file or a text."""
    known = {field.name for field in fields(TrainingArguments)}
    if given is None:
        return {}
    if Path(given).is_file():
        read = _json(Path(given))
        for name in ("label_smoothing_factor", *(one for one in _READ if one not in known)):
            if read.get(name):
                raise ValueError(
                    f"{given} has {read[name]!r} as `{name}`. Expected none, since this command cannot follow it. Use "
                    "`TrakAttributor.from_trainer(trainer)` in Python, or the version of transformers that trained."
                )
        return {name: value for name, value in read.items() if name in _READ and name in known}
    pairs = [part.partition("=") for part in given.split(",")]
    if wrong := [name for name, equals, _ in pairs if not equals or name not in known.intersection(_READ)]:
        raise ValueError(
            f"`training_args` is {given!r}, and {wrong[0]!r} is no file, and no argument that a replay reads. "
            f"Expected a JSON file, or `name=value` of {', '.join(name for name in _READ if name in known)}."
        )
    return {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _json(path: Path) -> dict[str, Any]:
    """Read an object from a file."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes. Expected {_MOST_BYTES:,} at most.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {str(error)[:200]}. Expected what a trainer has saved.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}. Expected an object, as a trainer saves it.")
    return found


def _check_record(features: FeaturizedModel, trainer: Trainer) -> None:
    """Compare the steps that a trainer would take with those of the record of the run, if there is one."""
    if (run := recorded_run(features)) is None:
        return
    record = RunRecord.open(features.store.output_dir / "trajectory" / run.name)
    recorded = record.numbers([step.rates for step in record.steps()], record.group_of)
    ours = hyperparameters(trainer, features.model, features.layout)
    same = (ours.kind, ours.groups, ours.max_norm) == (recorded.kind, recorded.groups, recorded.max_norm)
    near = ours.rates.shape == recorded.rates.shape and torch.allclose(ours.rates, recorded.rates, _AGREEMENT, 0.0)
    if not same or not near:
        raise ValueError(
            f"The training arguments make {ours.steps} steps of {ours.kind} with {ours.groups[0]} and learning rates "
            f"up to {ours.rates.max():.6g}, and the record of the run has {recorded.steps} of {recorded.kind} with "
            f"{recorded.groups[0]} and up to {recorded.rates.max():.6g}. Expected the arguments of the run. {_SAY}"
        )


def _check_rates(rates: Tensor, state: TrainerState) -> None:
    """Compare learning rates with those that the trainer logged, before or after the step of the entry."""
    highest = rates.max(1).values.tolist()
    for entry in state.log_history:
        logged, step = entry.get("learning_rate"), int(entry.get("step", 0))
        near = highest[max(0, step - 1) : step + 1]
        if logged is not None and near and all(abs(one - logged) > _AGREEMENT * max(highest) for one in near):
            raise ValueError(
                f"The training arguments give step {step} of {len(highest)} the learning rate {near[0]:.6g}, and the "
                f"trainer logged {logged:.6g}. Expected the arguments of the run. {_SAY}"
            )
