"""The task of a trainer: that of its model where the trainer minimizes the same loss, and else `trainer_loss`."""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_trak.data.drawn_rows import generators_kept
from hf_trak.data.images import ImageTokens
from hf_trak.data.preferences import PREPARED, kind_of, trainer_task
from hf_trak.data.rows import Collator, RowBatches, forward_columns
from hf_trak.modelout_functions.base import AbstractModelOutput, BatchedModelOutput, call_model
from hf_trak.modelout_functions.batches import evaluating, size_of
from hf_trak.modelout_functions.inference import TASKS_OF_MODELS, known_task
from hf_trak.modelout_functions.loss import GaussNewtonModelOutput, HasLoss, LossModelOutput
from hf_trak.modelout_functions.registry import infer_task
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput, rows_of
from hf_trak.modelout_functions.trainer_settings import own_methods, reads_mode
from hf_trak.runtime.sharding import is_sharded

logger = logging.getLogger(__name__)

Task = str | AbstractModelOutput | Callable[..., Tensor]

_SAME, _ROUNDINGS = 1e-3, 3
"""Relative difference up to which two losses are the same, in float32 and in units of the precision of others. For
gradients it is ten times as large."""

_ERRORS = (ValueError, TypeError, LookupError, RuntimeError, AttributeError)

_OWN_STEPS = ("get_train_dataloader", "_prepare_inputs", "training_step")
"""Methods of a trainer between its dataset and its optimizer, beside `compute_loss`."""

_PLAIN = ("SFTTrainer", *PREPARED)
"""Trainers of TRL whose rows have a task, or do not change on their way to `compute_loss`."""

_NOT_ALONE = ("DPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")
"""Trainers of TRL whose `compute_loss` does not take rows one at a time: of answers side by side, or of rollouts."""

_UNEQUAL = 0.05
"""Relative difference between numbers of labels that a weight for each label shows in losses and gradients."""

_LOOKED_AT, _PROBED = 64, 8
"""Rows among which one is looked for that the loss may weigh otherwise than the first, and rows that are compared."""

_GOLDEN = 5**0.5 / 2 - 0.5
"""Fraction of all rows between two of them, at which no period of labels is hit."""

_CHECKED_ELEMENTS = 2**20
"""Parameters whose gradients tell whether rows of a batch mix, at most."""


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
    first = _first_rows(trainer, model, rows, collator if of is None else of.collator(collator))
    if why is None and given != "trainer_loss":
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
        if task.batch_columns and (own := _first_rows(trainer, model, rows, collator)) is not None:
            task.own_columns = frozenset(own.alone[0])
        task.padded = first.padded
        if reads_mode(trainer):
            _compare_modes(task, model, first)
        _check_rows(task, model, first)
    elif name is None:
        infer_task(model)
    logger.info("The training rows are attributed by `%s`: %s.", task.name, why or "it is asked for")
    return GaussNewtonModelOutput(task) if given == "gauss_newton" else task


def _of_a_known_loss(trainer: Any, rows: Any, given: Task | None, why: str | None) -> Task:
    """Return the loss of a trainer of TRL by its task; refuse any other, where rows cannot be taken one at a time."""
    made = trainer_task(trainer, rows)
    if why is None and made is not None and given != "trainer_loss":
        return GaussNewtonModelOutput(made) if given == "gauss_newton" else LossModelOutput(made)
    raise ValueError(
        f"`compute_loss` of a {type(trainer).__name__} does not take rows one at a time, and "
        f"{why or '`trainer_loss` is asked for'}. Expected the loss of a {kind_of(trainer)} of TRL. "
        f"Pass `task={type(made).__name__}(...)`, which is that, or one of your own."
    )


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


class _FirstRows:
    """Some rows of the training: a batch of each, and one of all of them.

    One has other labels than the first, and another number of them, if one is at hand: rows of one number do not tell
    a mean over tokens from a mean over rows.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, rows: Any, collator: Collator) -> None:
        columns = forward_columns(model, trainer.args.label_names) if trainer.args.remove_unused_columns else None
        device = next(model.parameters()).device
        with generators_kept():
            batches = RowBatches(rows, collator, columns=columns, device=device, images=ImageTokens.of(model))
            count = max(2, min(_PROBED, trainer.args.per_device_train_batch_size))  # no larger than in the training
            found = {0: (first := dict(batches.alone(0).items()))}
            told = [name for name, value in first.items() if isinstance(value, Tensor) and _of_rows(name, value)]
            labels, most, other = _label_count(first), -1, 0
            for row in _looked_at(rows):
                one = dict(batches.alone(row).items())
                apart = sum(not torch.equal(first[name], one[name]) for name in told if name in one)
                others = _label_count(one)
                apart += others > 0 and abs(others - labels) > _UNEQUAL * labels
                if apart > most:
                    other, most = row, apart
                if len(found) < count or other == row:
                    found[row] = one
                if most >= len(told) + (labels > 0) and len(found) >= count:
                    break
            places = list(dict.fromkeys([0, other, *found]))[:count]
            self.alone = [found[row] for row in places]
            self.together: dict[str, Any] | None = None
            try:
                _, together = next(batches.iterate([places]))
            except Exception as error:  # whatever a user's collator may raise of rows that it never had in a batch
                logger.debug("The first rows make no common batch: %r", error)
            else:
                if len(places) > 1 and size_of(together) == len(places):
                    self.together = dict(together.items())

    @property
    def padded(self) -> bool:
        """Tell whether all rows have one width of their own, and some are padded on the left: by the dataset."""
        masks = [one.get("attention_mask") for one in self.alone]
        given = [mask for mask in masks if isinstance(mask, Tensor) and mask.ndim == 2]
        alike = len(given) > 1 and len({mask.shape[1] for mask in given}) == 1
        return alike and any(bool((mask[:, 0] == 0).any()) for mask in given)


def _of_rows(name: str, value: Tensor) -> bool:
    """Tell whether a column may weigh rows: labels, and any other with one number for each row."""
    return name == "labels" or value.ndim == 1


def _label_count(batch: dict[str, Any]) -> int:
    """Count the labels of a batch of sequences; 0 for other labels."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return 0
    return int((labels != -100).sum())


def _looked_at(rows: Any) -> list[int]:
    """List rows to compare with the first, spread over all. A stream is read from its start."""
    last = len(rows) - 1
    if getattr(rows, "sequential", False):
        return [1][:last]
    spread = (int(place * _GOLDEN % 1 * last) + 1 for place in range(_LOOKED_AT))
    return list(dict.fromkeys([1, last, *spread]))[: max(last, 0)]


def _first_rows(trainer: Any, model: torch.nn.Module, rows: Any, collator: Collator) -> _FirstRows | None:
    """Collate the first rows; return `None` where they are no batches, which is refused when it comes to them."""
    if not hasattr(trainer, "compute_loss") or is_sharded(model):
        return None
    try:
        return _FirstRows(trainer, model, rows, collator)
    except Exception as error:  # whatever a user's dataset or collator may raise
        logger.debug("The first rows make no batch: %r", error)
        return None


def _difference(trainer: Any, model: torch.nn.Module, of: Any, first: _FirstRows) -> str | None:
    """Say that the losses of the rows are not those of a task, not even times a number; `None` if they are."""
    own = TrainerLossModelOutput(trainer)
    own.bind(model)
    of.bind(model)
    found, known, labels = [], [], []
    try:
        with evaluating(model):
            for single in first.alone:
                found.append(float(own.computed(model, single)))
                output = call_model(model, None, None, *of.model_inputs(single))
                known.append(float(of.per_sample_loss(output, single)))
                labels.append(max(1, int((single["labels"] != -100).sum())) if "labels" in single else 1)
    except _ERRORS as error:
        logger.warning("The loss of the trainer could not be compared with the task of the model: %s", error)
        return None
    allowed = _allowed(model)
    for weights in ([1] * len(found), labels):  # sums over labels, or means of them
        pairs = zip(found, known, weights, strict=True)
        # losses that are not finite have their rows named when it comes to them
        ratios = [one * weight / other for one, other, weight in pairs if math.isfinite(one) and other]
        if not ratios or not max(ratios) - min(ratios) > allowed * max(map(abs, ratios)):
            return None if _is_of_transformers(model) else _weighed_otherwise(own, model, first, weights)
    return f"rows have the losses {found}, and not {known}"


def _is_of_transformers(model: torch.nn.Module) -> bool:
    """Tell whether the loss is computed by a class of `transformers`, which weighs rows by their labels."""
    base = getattr(model, "get_base_model", lambda: model)()
    return type(base).forward.__module__.partition(".")[0] == "transformers"


def _weighed_otherwise(
    own: TrainerLossModelOutput, model: torch.nn.Module, first: _FirstRows, weights: list[int]
) -> str | None:
    """Say that a batch weighs the losses of its rows otherwise than a task, whose losses have these weights."""
    _check_rows(own, model, first)
    if own.labels_from is None:
        counts = [1] * len(weights)
    else:
        counts = [int((one["labels"][:, own.labels_from :] != -100).sum()) for one in first.alone]
    ratios = [weight / count for weight, count in zip(weights, counts, strict=True) if count]
    same = not ratios or max(ratios) - min(ratios) <= _UNEQUAL * max(ratios)
    return None if same else f"a batch gives its rows the weights {counts}, and not {weights}"


def _allowed(model: torch.nn.Module) -> float:
    eps = max((torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()), default=0.0)
    return max(_SAME, _ROUNDINGS * eps)


def _for_targets(trainer: Any, of: Any, model: torch.nn.Module, first: _FirstRows | None) -> BatchedModelOutput | None:
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


def _compare_modes(task: TrainerLossModelOutput, model: torch.nn.Module, first: _FirstRows) -> None:
    """Name a loss that is another one while the model trains, apart from what its layers do then."""
    task.bind(model)
    with evaluating(model):
        for single in first.alone[:2]:
            found = list[float]()
            for model.training in (False, True):  # of the outermost module alone: no dropout
                found.append(float(task.computed(model, single)))
            model.training = False
            if abs(found[1] - found[0]) > _allowed(model) * max(map(abs, found)):
                logger.warning(
                    "`%s` asks for `training`, and the loss of a row is %.4g in training and %.4g in evaluation, in "
                    "which rows are attributed. Expected one loss.",
                    task.name,
                    found[1],
                    found[0],
                )
                return


def _check_rows(task: TrainerLossModelOutput, model: torch.nn.Module, first: _FirstRows) -> None:
    """Compare the loss of some rows with those of each of them.

    A loss may weigh the parts of a row (its tokens, beside the row itself) by what other rows have. Two copies of a
    row then have its gradient, as in no comparison of rows.

    Raises:
        ValueError: the gradient of the loss of all is no sum of theirs, and the loss compares them.
    """
    batch, wanted = first.together, list[Tensor]()
    for parameter in reversed(list(model.parameters())):
        if parameter.requires_grad and sum(p.numel() for p in wanted) + parameter.numel() <= _CHECKED_ELEMENTS:
            wanted.append(parameter)
    if not wanted or batch is None:
        return
    task.bind(model)
    size = len(first.alone)

    def gradient(*rows: int) -> Tensor:
        return derivative(task.computed(model, rows_of(batch, rows, size)))

    def derivative(loss: Tensor) -> Tensor:
        if not loss.requires_grad or not bool(torch.isfinite(loss)):  # such as a mean over no labels
            return torch.cat([one.new_zeros(one.numel()) for one in wanted]).cpu().double()
        found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        return torch.cat([one.flatten().cpu().double() for one in found])

    allowed = 10 * _allowed(model)
    with evaluating(model), torch.enable_grad():
        alone = torch.stack([gradient(row) for row in range(size)])
        # one item for each row, as a row alone has, so that a part which is not divided keeps its share
        whole = derivative(task.of_batch(model, batch, None if task.items([batch]) is None else size))
        if not bool(whole.any()):  # or no number, with rows that have no labels
            return
        told = alone.any(1)  # not by rows without labels
        shares = _shares_of(whole, alone[told], allowed)
        if shares is not None and len(shares) > 1:
            _weigh(task, batch, whole, alone, told, shares, allowed)
        two = sorted(range(size), key=lambda row: not told[row])[:2]
        if shares is not None or _shares_of(gradient(two[0]), alone[two[:1]], allowed) is None:
            return  # the engines name a model that draws random numbers
        copies = [gradient(row, row) for row in two]
    least = _SAME * float(whole.norm())
    alike = all(
        _shares_of(copy, alone[[row]], allowed) is not None and float(alone[row].norm()) > least
        for copy, row in zip(copies, two, strict=True)
    )
    if alike:
        logger.warning(
            "The loss of some rows is no sum of theirs: `%s` weighs parts of a row by what else is in its batch. Rows "
            "are attributed by their losses alone.",
            task.name,
        )
        return
    raise ValueError(
        f"`{task.name}` compares the rows of a batch with each other: the gradient of the loss of several rows is no "
        "sum of theirs, so that a row has no loss of its own. Expected a loss that is a mean or a sum over rows. Pass "
        "`task=`, such as `EmbeddingPairsModelOutput(...)` for negatives within a batch, or one of your own."
    )


def _shares_of(whole: Tensor, parts: Tensor, allowed: float) -> Tensor | None:
    """Find how often each of some gradients `(B, P)` is in a sum `(P,)`; `None` if it is another one."""
    shares = torch.linalg.lstsq(parts.T, whole[:, None], driver="gelsd").solution[:, 0]
    left = whole - parts.T @ shares
    return shares if float(left.norm()) <= allowed * float(whole.norm()) else None


def _weigh(
    task: TrainerLossModelOutput,
    batch: dict[str, Any],
    whole: Tensor,
    alone: Tensor,
    told: Tensor,
    shares: Tensor,
    allowed: float,
) -> None:
    """Weigh rows by their labels where a batch does so, as a mean over the tokens of a batch; warn of other weights.

    Args:
        task: the task, which is told.
        batch: the batch of some rows.
        whole: its gradient, `(P,)`.
        alone: those of its rows, `(B, P)`.
        told: which of these are not zero, as that of a row without labels.
        shares: how often each that is not zero is in the whole.
        allowed: part of a gradient that may be left over.
    """
    known: list[tuple[int | None, Tensor]] = [(None, torch.ones(len(alone), dtype=torch.float64))]
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.ndim > 1:
        known += [(start, (labels[:, start:] != -100).flatten(1).sum(1).cpu().double()) for start in (0, 1)]
    left = list[float]()
    for _, weights in known:
        weighed = weights @ alone
        factor = weighed @ whole / (weighed @ weighed).clamp_min(1e-300)  # of no labels at all
        left.append(float((whole - factor * weighed).norm() / whole.norm()))
    if min(left) <= allowed:
        known = [(start, weights[told]) for start, weights in known]
        best = known[left.index(min(left))][1]
        # of weights that are the same for these rows the first, and not what rounding chooses
        task.labels_from = next(start for start, one in known if torch.equal(one * best.sum(), best * one.sum()))
        return
    parts = shares / shares.abs().sum()
    logger.warning(
        "In a batch of %d rows, `%s` gives them weights from %.2g to %.2g, which depend on the other rows. Rows are "
        "attributed by their losses alone. Expected a mean or a sum over rows, such as `(losses * weights).mean()`.",
        len(parts),
        task.name,
        float(parts.min()),
        float(parts.max()),
    )
