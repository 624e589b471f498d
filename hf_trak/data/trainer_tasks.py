"""The task of a trainer: that of its model where the trainer minimizes the same loss, and else `trainer_loss`."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trak.data.preferences import PREPARED, kind_of, trainer_task
from hf_trak.data.rows import Collator
from hf_trak.data.trainer_rows import UNEQUAL, FirstRows, allowed_difference, check_rows, compare_modes, first_rows
from hf_trak.modelout_functions.base import AbstractModelOutput, BatchedModelOutput, call_model
from hf_trak.modelout_functions.batches import evaluating, find_logits
from hf_trak.modelout_functions.inference import TASKS_OF_MODELS, known_task
from hf_trak.modelout_functions.loss import GaussNewtonModelOutput, HasLoss, LossModelOutput
from hf_trak.modelout_functions.registry import infer_task
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.modelout_functions.trainer_settings import own_methods, reads_mode

logger = logging.getLogger(__name__)

Task = str | AbstractModelOutput | Callable[..., Tensor]

_ERRORS = (ValueError, TypeError, LookupError, RuntimeError, AttributeError)

_OWN_STEPS = ("get_train_dataloader", "_prepare_inputs", "training_step")
"""Methods of a trainer between its dataset and its optimizer, beside `compute_loss`."""

_PLAIN = ("SFTTrainer", *PREPARED)
"""Trainers of TRL whose rows have a task, or do not change on their way to `compute_loss`."""

_NOT_ALONE = ("DPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")
"""Trainers of TRL whose `compute_loss` does not take rows one at a time: of answers side by side, or of rollouts."""


def task_of(trainer: Any, model: torch.nn.Module, rows: Any, collator: Collator, given: Task | None) -> Task:
    """Choose the task of a trainer, so that its loss is never replaced by another.

    Args:
        trainer: the trainer.
        model: its model, without wrappers.
        rows: the training rows.
        collator: the data collator of the features.
        given: what the user asks for. `"loss"`, `"gauss_newton"`, `"trainer_loss"` and `None` mean the trainer's own.

    Returns:
        The task.

    Raises:
        ValueError: the trainer's loss compares rows of a batch with each other, is that of answers which no row holds,
            or there is no task for it.
    """
    _name_own_steps(trainer)
    why = _own_loss(trainer)
    if given is None and why is None:
        made = trainer_task(trainer, rows)
        if made is not None:
            return made
    if given not in (None, "loss", "gauss_newton", "trainer_loss"):
        if why is not None:
            logger.warning(
                "The task %s is asked for, and the trainer minimizes a loss of its own: %s. Pass "
                "`task='trainer_loss'`, or none, for that loss.",
                given if isinstance(given, str) else type(given).__name__,
                why,
            )
        return given
    kind = kind_of(trainer)
    if kind in _NOT_ALONE or (kind is not None and why is None and given != "trainer_loss"):
        return _of_a_known_loss(trainer, rows, given, why)
    name = known_task(model)
    of: Any = None if name is None else TASKS_OF_MODELS[name]()
    first = first_rows(trainer, model, rows, collator if of is None else of.collator(collator))
    if why is None and given != "trainer_loss":
        if name is None and first is not None and (guess := _guessed(trainer, model, first)) is not None:
            return guess if given is None else _loss_of(TASKS_OF_MODELS[guess](), given)
        if name is None:
            why = "no task is known for the model"
        elif first is None or not isinstance(of, HasLoss) or (why := _difference(trainer, model, of, first)) is None:
            return given or name
    owner = _owner(trainer)
    if first is None and "_prepare_inputs" in vars(owner) and not owner.__module__.startswith("transformers."):
        raise ValueError(
            f"`{owner.__name__}.compute_loss` takes what `_prepare_inputs` makes, such as answers that the model "
            "generates during the training: a row of the dataset has no loss of its own. Expected rows that hold "
            "their answers. Pass such rows to `TrakAttributor(model, args, train_dataset=…, data_collator=…)`."
        )
    task = TrainerLossModelOutput(trainer, _for_targets(trainer, of, model, first))
    if first is not None:
        if task.batch_columns and (own := first_rows(trainer, model, rows, collator)) is not None:
            task.own_columns = frozenset(own.alone[0])
        task.padded = first.padded
        if reads_mode(trainer):
            compare_modes(task, model, first)
        check_rows(task, model, first)
    elif name is None:
        infer_task(model)
    logger.info("The training rows are attributed by `%s`: %s.", task.name, why or "it is asked for")
    return GaussNewtonModelOutput(task) if given == "gauss_newton" else task


def _guessed(trainer: Any, model: torch.nn.Module, first: FirstRows) -> str | None:
    """Name the task of a classifier or a regression of one's own class, whose loss has to be the trainer's."""
    labels = first.alone[0].get("labels")
    if not isinstance(labels, Tensor) or labels.numel() != 1:
        return None
    name = "image_classification" if "pixel_values" in first.alone[0] else "text_classification"
    if labels.is_floating_point():
        name = "regression"
    of: Any = TASKS_OF_MODELS[name]()
    of.bind(model)
    try:
        with evaluating(model):
            of.per_sample_loss(call_model(model, None, None, *of.model_inputs(first.alone[0])), first.alone[0])
    except _ERRORS:
        return None
    if _difference(trainer, model, of, first) is not None:
        return None
    # Rows that a model fits well do not tell a square from another loss, nor classes from weighted ones.
    own = TrainerLossModelOutput(trainer)
    own.bind(model)
    try:
        with evaluating(model):
            classes = find_logits(call_model(model, None, None, *of.model_inputs(first.alone[0]))).shape[-1]
            rows = [*first.alone, *_relabelled(first.alone, classes)]
            found, known = _losses(own, of, model, rows)
    except _ERRORS:
        return None
    return name if _in_proportion(found, known, allowed_difference(model)) else None


def _relabelled(rows: Sequence[dict[str, Any]], classes: int) -> list[dict[str, Any]]:
    """Give a row every class, or up to 64 of them; or rows numbers that are far from theirs, on either side."""
    label = rows[0]["labels"]
    if not label.is_floating_point():
        some = range(0, classes, max(1, classes // 64))
        return [{**rows[0], "labels": torch.full_like(label, one)} for one in some]
    return [{**row, "labels": row["labels"] + by * (1 + row["labels"].abs())} for row in rows for by in (-10, 1, 100)]


def _of_a_known_loss(trainer: Any, rows: Any, given: Task | None, why: str | None) -> Task:
    """Return the loss of a trainer of TRL by its task; refuse any other, where rows cannot be taken one at a time."""
    made = trainer_task(trainer, rows)
    if why is None and made is not None and given != "trainer_loss":
        return _loss_of(made, given)
    raise ValueError(
        f"`compute_loss` of a {type(trainer).__name__} does not take rows one at a time, and "
        f"{why or '`trainer_loss` is asked for'}. Expected the loss of a {kind_of(trainer)} of TRL. "
        f"Pass `task={type(made).__name__}(...)`, which is that, or one of your own."
    )


def _loss_of(task: Any, given: Task | None) -> Task:
    """Return the loss of a task, or its Gauss-Newton form if that is asked for."""
    return GaussNewtonModelOutput(task) if given == "gauss_newton" else LossModelOutput(task)


def _owner(trainer: Any) -> type:
    """Return the class that defines the `compute_loss` of a trainer."""
    return next((cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls)), object)


def _name_own_steps(trainer: Any) -> None:
    """Name methods of the trainer that change what `compute_loss` gets, or what becomes of the loss."""
    known = ("transformers", "sentence_transformers", "setfit")
    for cls in type(trainer).__mro__:
        package = cls.__module__.partition(".")[0]
        found = [name for name in _OWN_STEPS if name in vars(cls)]
        if found and package not in known and not (package == "trl" and cls.__name__ in _PLAIN):
            logger.warning(
                "%s has %s of its own, by which a training may see other batches, such as with answers that the model "
                "generates, or another loss. Rows are attributed by `compute_loss`, as `data_collator` makes them.",
                cls.__name__,
                " and ".join(f"`{name}`" for name in found),
            )
            return


def _own_loss(trainer: Any) -> str | None:
    """Say what makes the loss of a trainer its own, by the trainer's code and settings; `None` if nothing does."""
    if callable(getattr(trainer, "compute_loss_func", None)):  # TRL passes a string, so that losses are not scaled
        return "it has a `compute_loss_func`"
    if getattr(trainer, "label_smoother", None) is not None:
        return f"`label_smoothing_factor` is {trainer.args.label_smoothing_factor}"
    if "compute_loss" in vars(trainer):
        return "it has a `compute_loss` of its own"
    owner = _owner(trainer)
    package = owner.__module__.partition(".")[0]
    if package == "trl" and owner.__name__ == kind_of(trainer):
        if getattr(trainer, "aux_loss_enabled", False):
            return "it adds the loss of the router of experts"
        return f"it overrides {', '.join(changed)}" if (changed := own_methods(trainer)) else None
    if package in ("transformers", "sentence_transformers", "builtins"):
        return None
    if package == "trl" and owner.__name__ == "SFTTrainer":
        kind = getattr(trainer.args, "loss_type", "nll")
        if getattr(trainer, "aux_loss_enabled", False):
            return "it adds the loss of the router of experts"
        return None if kind in ("nll", "chunked_nll") else f"`loss_type` is {kind!r}"
    return f"{owner.__name__} overrides `compute_loss`"


def _difference(trainer: Any, model: torch.nn.Module, of: Any, first: FirstRows) -> str | None:
    """Say that the losses of the rows are not those of a task, not even times a number; `None` if they are."""
    own = TrainerLossModelOutput(trainer)
    own.bind(model)
    of.bind(model)
    labels = [max(1, int((one["labels"] != -100).sum())) if "labels" in one else 1 for one in first.alone]
    try:
        with evaluating(model):
            found, known = _losses(own, of, model, first.alone)
    except _ERRORS as error:
        logger.warning("The loss of the trainer could not be compared with the task of the model: %s", error)
        return None
    allowed = allowed_difference(model)
    for weights in ([1] * len(found), labels):  # sums over labels, or means of them
        if _in_proportion([one * weight for one, weight in zip(found, weights, strict=True)], known, allowed):
            return None if _is_of_transformers(model) else _weighed_otherwise(own, model, first, weights)
    return f"rows have the losses {found}, and not {known}"


def _losses(
    own: TrainerLossModelOutput, of: Any, model: torch.nn.Module, rows: Sequence[dict[str, Any]]
) -> tuple[list[float], list[float]]:
    """Compute the losses of rows by the trainer, and by a task."""
    found, known = [], []
    for single in rows:
        found.append(float(own.computed(model, single)))
        output = call_model(model, None, None, *of.model_inputs(single))
        known.append(float(of.per_sample_loss(output, single)))
    return found, known


def _in_proportion(found: Sequence[float], known: Sequence[float], allowed: float) -> bool:
    """Tell whether losses have one ratio. Those that are not finite have their rows named when it comes to them."""
    ratios = [one / other for one, other in zip(found, known, strict=True) if math.isfinite(one) and other]
    return not ratios or not max(ratios) - min(ratios) > allowed * max(map(abs, ratios))


def _is_of_transformers(model: torch.nn.Module) -> bool:
    """Tell whether the loss is computed by a class of `transformers`, which weighs rows by their labels."""
    base = getattr(model, "get_base_model", lambda: model)()
    return type(base).forward.__module__.partition(".")[0] == "transformers"


def _weighed_otherwise(
    own: TrainerLossModelOutput, model: torch.nn.Module, first: FirstRows, weights: list[int]
) -> str | None:
    """Say that a batch weighs the losses of its rows otherwise than a task, whose losses have these weights."""
    check_rows(own, model, first)
    counts = [1 if (found := own.label_counts(one)) is None else int(found.sum()) for one in first.alone]
    ratios = [weight / count for weight, count in zip(weights, counts, strict=True) if count]
    same = not ratios or max(ratios) - min(ratios) <= UNEQUAL * max(ratios)
    return None if same else f"a batch gives its rows the weights {counts}, and not {weights}"


def _for_targets(trainer: Any, of: Any, model: torch.nn.Module, first: FirstRows | None) -> BatchedModelOutput | None:
    """Return the task of the targets, if it can be computed from what the trainer asks of the model."""
    if not isinstance(of, HasLoss) or not isinstance(of, BatchedModelOutput) or first is None:
        return None
    task = TrainerLossModelOutput(trainer)
    task.bind(model)
    of.bind(model)
    try:
        with evaluating(model):
            args, kwargs = task.model_inputs(first.alone[0])
            of.out_to_loss_grad(model(*args, **kwargs), first.alone[0], "target")
    except _ERRORS as error:
        logger.info("Targets are attributed by minus their loss, too, and not by %s: %s", type(of).__name__, error)
        return None
    return of
