"""Rows of a trainer whose losses tell how a batch weighs them: collated alone and together, and compared."""

import logging
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from hf_trak.data.drawn_rows import generators_kept
from hf_trak.data.images import ImageTokens
from hf_trak.data.rows import Collator, RowBatches, forward_columns
from hf_trak.modelout_functions.answered_calls import WeightsSeen
from hf_trak.modelout_functions.batches import evaluating, size_of
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput, rows_of
from hf_trak.runtime.sharding import is_sharded

logger = logging.getLogger(__name__)

_SAME, _ROUNDINGS = 1e-3, 3
"""Relative difference up to which two losses are the same, in float32 and in units of the precision of others. For
gradients it is ten times as large."""

UNEQUAL = 0.05
"""Relative difference between numbers of labels that a weight for each label shows in losses and gradients."""

_LOOKED_AT, _PROBED = 64, 8
"""Rows among which one is looked for that the loss may weigh otherwise than the first, and rows that are compared."""

_GOLDEN = 5**0.5 / 2 - 0.5
"""Fraction of all rows between two of them, at which no period of labels is hit."""

_CHECKED_ELEMENTS = 2**20
"""Parameters whose gradients tell whether rows of a batch mix, at most."""


class FirstRows:
    """Some rows of the training: a batch of each, and one of all of them.

    One has other labels than the first, and another number of them, if one is at hand: rows of one number do not tell
    a mean over tokens from a mean over rows.

    Attributes:
        alone: a batch of each row.
        together: one of all of them; `None` if they make none.
        spread: a batch of each of some rows, the same for any size of batches.
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
                apart += others > 0 and abs(others - labels) > UNEQUAL * labels
                if apart > most:
                    other, most = row, apart
                if len(found) < count or other == row:
                    found[row] = one
                if most >= len(told) + (labels > 0) and len(found) >= count:
                    break
            places = list(dict.fromkeys([0, other, *found]))[:count]
            self.alone = [found[row] for row in places]
            fixed = [0, *_looked_at(rows)][:_PROBED]
            self.spread = [found[row] if row in found else dict(batches.alone(row).items()) for row in fixed]
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


def first_rows(trainer: Any, model: torch.nn.Module, rows: Any, collator: Collator) -> FirstRows | None:
    """Collate the first rows; return `None` where they are no batches, which is refused when it comes to them."""
    if not hasattr(trainer, "compute_loss") or is_sharded(model):
        return None
    try:
        return FirstRows(trainer, model, rows, collator)
    except Exception as error:  # whatever a user's dataset or collator may raise
        logger.debug("The first rows make no batch: %r", error)
        return None


def allowed_difference(model: torch.nn.Module) -> float:
    """Return the relative difference up to which two losses of a model are the same, by its precision."""
    eps = max((torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()), default=0.0)
    return max(_SAME, _ROUNDINGS * eps)


def compare_modes(task: TrainerLossModelOutput, model: torch.nn.Module, first: FirstRows) -> None:
    """Name a loss that is another one while the model trains, apart from what its layers do then."""
    task.bind(model)
    with evaluating(model):
        for single in first.alone[:2]:
            found = list[float]()
            for model.training in (False, True):  # of the outermost module alone: no dropout
                found.append(float(task.computed(model, single)))
            model.training = False
            if abs(found[1] - found[0]) > allowed_difference(model) * max(map(abs, found)):
                logger.warning(
                    "`%s` asks for `training`, and the loss of a row is %.4g in training and %.4g in evaluation, in "
                    "which rows are attributed. Expected one loss.",
                    task.name,
                    found[1],
                    found[0],
                )
                return


def check_rows(task: TrainerLossModelOutput, model: torch.nn.Module, first: FirstRows) -> None:
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

    allowed = 10 * allowed_difference(model)
    with evaluating(model), torch.enable_grad():
        # one item for each row, as a row alone has, so that a part which is not divided keeps its share
        with WeightsSeen() as seen:
            loss = task.of_batch(model, batch, None if task.items([batch]) is None else size)
        whole = derivative(loss)
        task.mean_weights = _mean_weights(task, model, first.spread) if seen.sums else ()
        alone = torch.stack([gradient(row) for row in range(size)])
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


def _mean_weights(
    task: TrainerLossModelOutput, model: torch.nn.Module, rows: list[dict[str, Any]]
) -> tuple[float, ...]:
    """Return the mean weight of the labels of some rows, for each cross-entropy with weights of classes."""
    sums = defaultdict[int, tuple[float, int]](lambda: (0.0, 0))
    for one in rows:
        with WeightsSeen() as seen:
            task.of_batch(model, one, None if task.items([one]) is None else 1)
        for call, (weight, labels) in enumerate(seen.sums):
            sums[call] = sums[call][0] + weight, sums[call][1] + labels
    means = (weight / labels if labels and weight else 1.0 for weight, labels in sums.values())
    return tuple(float(f"{one:.6g}") for one in means)  # whatever the order in which a device adds them up


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
