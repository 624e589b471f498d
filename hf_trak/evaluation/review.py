"""A table of training rows to act on: what each did to the validation set, what may be wrong with it, and what to do.

A row has probably a wrong label where the rows of another label speak against it, as a target, more than the rows of
its own label speak for it, and where it harms the validation set. Its own influence on itself is left out. Of 30 wrong
labels among 600 digits, EK-FAC's sums found 27 and their right labels, and 4 rows that were right
(`tests/evaluation/test_review.py`).

The same rule is tried on rows that helped. Where it doubts many of them, it tells wrong labels
from right ones badly, and rows are to be looked at instead of relabelled.
"""

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import xxhash
from datasets import ClassLabel, Dataset, Value
from numpy.typing import ArrayLike

from hf_trak.data.columns import LABELS, is_text
from hf_trak.data.rows import RowBatches
from hf_trak.evaluation.intervals import ENDS, Interval, Result, checked_finite, scipy_stats
from hf_trak.featurize.calibration import named
from hf_trak.featurize.choosing import MINUTE, seconds_of
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.identity.row_digest import update_digest
from hf_trak.methods import Exact
from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.classification import RegressionModelOutput
from hf_trak.modelout_functions.loss import LossModelOutput
from hf_trak.modelout_functions.sampled import CanSample
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.progress import duration, say, with_column
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.scored_dataset import ScoreBlock
from hf_trak.scores.selection import SELECTION_COLUMNS

logger = logging.getLogger(__name__)

INDEX, EFFECT, REASON, ACTION, LABEL = SELECTION_COLUMNS[0], "effect", "reason", "suggested_action", "suggested_label"
"""The columns of a review: the number of the row, which stays when the table is sorted or filtered, and others."""

_COLUMNS = (INDEX, EFFECT, REASON, ACTION, LABEL)

_OWN = "trak_own_"
"""Before the name of a column of the training rows that is called like one of these, while it is in the table."""

ACTIONS = ("keep", "look", "relabel", "remove")
"""What may stand in the column of actions."""

_HARM = 2.0
"""Standard deviations of effects, above zero, from which on a row is worth a look."""

_MIDDLE = (0.16, 0.84)
"""Quantiles two standard deviations apart. Rows that harm most enlarge the standard deviation itself: of 60 wrong
labels among 600 digits it named 22, and these name 41 with two others."""

_NONE = 1e-3
"""Part of the largest effect below which a row has none."""

_CONTROLS = 64
"""Validation rows on which the rule for wrong labels is tried."""

MOST_FALSE_DOUBTS = 0.2
"""Share of the doubted rows whose label may be right, by the validation rows, for others to be relabelled."""


def review_table(
    rows: Dataset,
    effects: ArrayLike,
    label_column: str | None = None,
    other_labels: Mapping[int, Any] | None = None,
    relabel: bool = True,
    repeated: Mapping[int, int] | None = None,
) -> Dataset:
    """Put effects, reasons and actions beside training rows.

    Args:
        rows (`datasets.Dataset`):
            The n training rows.
        effects (`ArrayLike` of shape `(n,)`):
            By how much training on each row harmed the validation rows: minus the scores of their mean output.
        label_column (`str`, *optional*):
            The column of labels.
        other_labels (`Mapping[int, Any]`, *optional*):
            The rows that have probably a wrong label, and the label that they should have.
        relabel (`bool`, *optional*, defaults to `True`):
            Whether to suggest that these rows get this label, rather than a look at them.
        repeated (`Mapping[int, int]`, *optional*):
            The rows that repeat an earlier one, see [`repeated_rows`].

    Returns:
        `datasets.Dataset`: the rows in their order, with `trak_index`, `effect`, `reason` and `suggested_action`, and
        with `suggested_label` beside a column of labels. Columns of the rows are as stored, and those of such names
        are called `trak_own_effect`, say.
    """
    values = np.asarray(effects, dtype=np.float64)
    plain = rows.with_format(None)
    reasons, actions = _from_effects(values)
    given = [None] * len(plain) if label_column is None else plain[label_column][:]
    with_label = {(first, given[first]): first for first in (repeated or {}).values()}
    for row, first in sorted((repeated or {}).items()):
        same = with_label.setdefault((first, given[row]), row)
        reasons[row] = f"the same as row {same}" if same != row else f"the same as row {first}, with another label"
        actions[row] = "remove" if same != row else "look"
    suggested = dict(other_labels or {})
    for row in suggested:
        reasons[row], actions[row] = "rows like it have another label", "relabel" if relabel else "look"
    table = plain.rename_columns({name: f"{_OWN}{name}" for name in _COLUMNS if name in plain.column_names})
    table = with_column(table, INDEX, np.arange(len(plain)), feature=Value("int64"))
    table = with_column(table, EFFECT, values.astype(np.float32), feature=Value("float32"))
    table = with_column(table, REASON, reasons, feature=Value("string"))
    table = with_column(table, ACTION, actions, feature=Value("string"))
    if label_column is not None:
        labels = [suggested.get(row) for row in range(len(table))]
        table = with_column(table, LABEL, labels, feature=rows.features[label_column])
    return table if rows.format["type"] is None else table.with_transform(_AsStored(rows.format))


@dataclass(frozen=True)
class _AsStored:
    """A transform that changes nothing: it keeps the format of the training rows, however a table is edited."""

    format: dict[str, Any]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def _from_effects(effects: np.ndarray) -> tuple[list[str], list[str]]:
    """Say what effects alone tell: rows that harm the validation set much, and rows that do nothing to it."""
    low, high = np.quantile(effects, _MIDDLE)
    harms = effects > _HARM * ((high - low) / 2 or effects.std())
    reasons = np.full(len(effects), "", dtype=object)
    reasons[without_effect(effects)] = "no effect"
    reasons[harms] = "harms the validation set"
    return reasons.tolist(), np.where(harms, "look", "keep").tolist()


def without_effect(effects: np.ndarray) -> np.ndarray:
    """Mark the rows that do nothing to the validation set, beside the row that does most to it: boolean, `(n,)`."""
    return np.abs(effects) <= _NONE * np.abs(effects).max(initial=0)


def repeated_rows(batches: RowBatches, label_column: str | None = None) -> dict[int, int]:
    """Map every row that gives the model the same as an earlier one to the first such row.

    Rows are compared as collated, one by one: an id, a source or a file name counts only if a transform or collator
    makes something of it. None is found, with a warning, if the collator takes no single row.

    Args:
        batches (`RowBatches`):
            The rows, on their way to the model.
        label_column (`str`, *optional*):
            A column with one label per row, which may differ.
    """
    first: dict[bytes, int] = {}
    found = {}
    try:
        for number, batch in enumerate(batches.alike()):
            content = _without_label(batch, label_column)
            if isinstance(content, Mapping) and not content:
                return {}
            digest = xxhash.xxh3_128()
            update_digest(digest, content)
            before = first.setdefault(digest.digest(), number)
            if before != number:
                found[number] = before
    except Exception as error:  # whatever a user's collator may raise for a single row
        logger.warning("Repeated rows are not looked for, since rows cannot be collated alone and compared: %r", error)
        return {}
    return found


def _without_label(batch: Any, label_column: str | None) -> Any:
    """Leave the single label of a row out of its batch; labels of tokens, and soft ones, stay."""
    if label_column is None or not isinstance(batch, Mapping):
        return batch
    names = {label_column, *LABELS}
    return {name: value for name, value in batch.items() if name not in names or np.asarray(value).size != 1}


def class_column(rows: Dataset) -> str | None:
    """Name the column with one label per row, if there is one."""
    return next((name for name in LABELS if name in rows.features and _is_class(rows.features[name])), None)


def trained_classes(features: FeaturizedModel) -> str | None:
    """Name the column with one class per training row that the model learned, if there is one.

    Scores of a regression and the place of an answer among several are numbers, too, but rows like a row do not share
    them; a language model does not see a label beside its tokens.
    """
    task = getattr(features.task, "of_task", None) or features.task
    several = type(features.model).__name__.endswith("ForMultipleChoice")
    if several or isinstance(task, RegressionModelOutput | AggregatedModelOutput):
        return None
    return class_column(features.train_dataset)


def _is_class(feature: Any) -> bool:
    if isinstance(feature, ClassLabel):
        return True
    return is_text(feature) or (isinstance(feature, Value) and pa.types.is_integer(feature.pa_type))


def with_row_labels(features: FeaturizedModel) -> FeaturizedModel:
    """Let curvatures have the labels of the rows where none can be drawn: of a trainer's own loss, or one of a row."""
    inner = features.task.of_task if isinstance(features.task, LossModelOutput) else features.task
    if isinstance(inner, CanSample) and not isinstance(inner, TrainerLossModelOutput):
        return features
    found, curvature = copy.copy(features), replace(features.args.curvature, labels="empirical")
    found.args = replace(features.args, curvature=curvature)
    return found


def sums_and_own(blocks: Iterable[ScoreBlock], groups: RowGroups, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add up the scores of training rows by their label, for training rows as targets.

    Args:
        blocks: scores of all training rows for m of them.
        groups: the training rows by their label, in G groups.
        rows: the numbers of the m rows, ascending.

    Returns:
        The sums, `(m, G)`, and the score of each of the m rows for itself, `(m,)`.
    """
    own = np.empty(len(rows))

    def passed() -> Iterator[ScoreBlock]:
        for start, stop, block in blocks:
            inside = np.flatnonzero((rows >= start) & (rows < stop))
            own[inside] = block[rows[inside] - start, inside].double().numpy()
            yield start, stop, block

    return groups.sums(passed()).numpy(), own


def wrong_labels(sums: ArrayLike, own: ArrayLike, labels: ArrayLike) -> dict[int, int]:
    """Find targets whose label other rows do not confirm.

    Args:
        sums (`ArrayLike` of shape `(m, G)`):
            For each of m training rows as a target, the scores of all training rows, added up by their label.
        own (`ArrayLike` of shape `(m,)`):
            The score of each of these rows for itself.
        labels (`ArrayLike` of shape `(m,)`):
            The place of its label among the G labels.

    Returns:
        `dict[int, int]`: places of the targets to which another label fits better, and the place of that label.
    """
    others, places = np.array(sums, dtype=np.float64), np.asarray(labels)
    every = np.arange(len(others))
    confirmed = others[every, places] - np.asarray(own, dtype=np.float64)
    others[every, places] = np.inf
    against = others.argmin(1)
    doubted = -others[every, against] > confirmed
    return {int(one): int(against[one]) for one in np.flatnonzero(doubted)}


def doubting_seconds(features: FeaturizedModel, method: Exact, rows: int, fit: bool) -> float:
    """Return about how long [`doubted_labels`] takes; 0 without a column of labels, or with too few rows to measure.

    Args:
        features: the model and its training rows.
        method: how they are scored.
        rows: number of rows whose labels are looked at.
        fit: whether to count a curvature that is not fitted yet.
    """
    if trained_classes(features) is None:
        return 0.0
    return seconds_of(features, method, rows + _CONTROLS, features.store.model_ids or [0], fit) or 0.0


def warn_of_price(features: FeaturizedModel, method: Exact) -> None:
    """Say how long a review takes, if it takes more than a minute. All processes call this together.

    Half of the rows are taken to harm.

    Args:
        features: the model and its training rows.
        method: how they are scored.
    """
    seconds = seconds_of(features, method, 1, features.store.model_ids or [0]) or 0.0
    seconds += doubting_seconds(features, method, len(features.train_dataset) // 2, fit=False)
    if seconds > MINUTE and features.processes.is_main_process:
        logger.warning("The review takes about %s: it scores all rows by %s.", duration(seconds), named(method))


def doubted_labels(
    features: FeaturizedModel, rows: np.ndarray, eval_dataset: Any, method: Exact
) -> tuple[dict[int, Any], float]:
    """Find training rows whose label other training rows do not confirm, as targets of whole gradients.

    The same rule is tried on validation rows, whose labels are taken to be right. A warning says when so many of these
    are doubted that the labels of many doubted rows are right, too. It may be more of them: rows that harm are harder
    than rows of the validation set.

    Args:
        features (`FeaturizedModel`):
            The model and its training rows, a `datasets.Dataset`.
        rows (`np.ndarray` of shape `(m,)`):
            Numbers of the rows to look at, ascending.
        eval_dataset (`Dataset`):
            The validation rows.
        method (`Exact`):
            How they are scored.

    Returns:
        Those of `rows` to which another label fits better, and that label; empty without a column of labels. And the
        share of them whose label is right, as far as validation rows tell: 1 if these have no such labels.

    Raises:
        All that exact scores raise.
    """
    train = features.train_dataset
    column = trained_classes(features)
    if column is None or not len(rows):
        return {}, 0.0
    labels = RowGroups.of(train, column)
    member = labels.member.numpy()
    scores = ExactScores(features, method)

    def sums_of(asked: Dataset, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        question = features.question(asked, featurized=False)
        return sums_and_own(scores.plan(question).blocks, labels, numbers)

    found = wrong_labels(*sums_of(train.select(rows), rows), member[rows])
    doubted = {int(rows[one]): labels.values[other] for one, other in found.items()}
    controls = _controls(eval_dataset, column, labels)
    if not doubted or not len(controls):
        return doubted, float(bool(doubted))
    places = [labels.values.index(value) for value in controls.with_format(None)[column]]
    sums, _ = sums_of(controls, np.full(len(controls), -1))
    false = len(wrong_labels(sums, np.zeros(len(controls)), places))
    share = min(1.0, false / len(controls) * len(rows) / len(doubted))
    if share > MOST_FALSE_DOUBTS:
        features.warn_once(
            f"The labels of {len(doubted)} of the {len(rows)} training rows that were looked at are doubted, and "
            f"those of {false} of {len(controls)} validation rows by the same test: about {share:.0%} of the doubted "
            f"labels may well be right. Expected at most {MOST_FALSE_DOUBTS:.0%}. Do not relabel by this test; look "
            "at the rows that harmed most, and at those with the highest `self_influence()`."
        )
    return doubted, share


def _controls(eval_dataset: Any, column: str, labels: RowGroups) -> Dataset:
    """Draw some validation rows with a label of the training rows; none if they have no labels."""
    if not isinstance(eval_dataset, Dataset) or column not in eval_dataset.column_names:
        return Dataset.from_dict({})
    known = set(labels.values)
    places = [i for i, value in enumerate(eval_dataset.with_format(None)[column]) if value in known]
    drawn = np.random.Generator(np.random.Philox(0)).permutation(places)[:_CONTROLS]
    return eval_dataset.select(np.sort(drawn).astype(int))


def fixed_dataset(table: Dataset) -> Dataset:
    """Apply the actions of a review, as they stand in its table, which may have been edited.

    Args:
        table (`datasets.Dataset`):
            Training rows with `trak_index`, `suggested_action` and, for rows to relabel, `suggested_label`, in any
            order. Rows that are left out of it are removed, too.

    Returns:
        `datasets.Dataset`: the rows to train on, in the order of the training dataset, with their own columns alone
        and with their format or transform, which a table that was read from a file has lost.

    Raises:
        ValueError: there is no column of actions or of row numbers, a row is there twice, an action is unknown, or a
            row to relabel has no label.
    """
    numbers, actions = _numbers_and_actions(table)
    relabelled, removed, left = (int((actions == action).sum()) for action in ("relabel", "remove", "look"))
    say(logger, f"Rows relabelled: {relabelled:,}, removed: {removed:,}, to look at and left as they are: {left:,}.")
    carrier, table = table.format["format_kwargs"].get("transform"), table.with_format(None)
    column = class_column(table) if LABEL in table.column_names else None
    if changed := np.flatnonzero(actions == "relabel").tolist():
        new = [None] * len(table) if column is None else table[LABEL]
        missing = next((row for row in changed if new[row] is None), None)
        if column is None or missing is not None:
            raise ValueError(
                f"Row {numbers[changed[0] if missing is None else missing]} is to be relabelled and has no {LABEL!r}. "
                "Expected the label that it should have."
            )
        labels = list(table[column])
        for row in changed:
            labels[row] = new[row]
        names, feature = table.column_names, table.features[column]
        table = with_column(table.remove_columns([column]), column, labels, feature=feature).select_columns(names)
    order = np.argsort(numbers, kind="stable")
    fixed = table.remove_columns([name for name in _COLUMNS if name in table.column_names])
    own = {f"{_OWN}{name}": name for name in _COLUMNS}
    fixed = fixed.rename_columns({name: own[name] for name in fixed.column_names if name in own})
    fixed = fixed.select(order[actions[order] != "remove"].tolist())
    if not isinstance(carrier, _AsStored):
        return fixed
    kept = carrier.format
    columns = [name for name in kept["columns"] if name in fixed.column_names]
    return fixed.with_format(kept["type"], columns, kept["output_all_columns"], **kept["format_kwargs"])


def _numbers_and_actions(table: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Read from a review the numbers of its rows in the training dataset, and what is to be done with them."""
    if missing := [name for name in (INDEX, ACTION) if name not in table.column_names]:
        raise ValueError(
            f"The columns are {table.column_names}. Expected {missing[0]!r}, of `TrakAttributor.review`. Pass its "
            "table with all of its columns."
        )
    plain = table.with_format(None)
    numbers, actions = np.array(plain[INDEX], dtype=np.int64), np.array(plain[ACTION], dtype=object)
    found, times = np.unique(numbers, return_counts=True)
    if twice := found[times > 1].tolist():
        raise ValueError(
            f"`{INDEX}` has the row {twice[0]} {times.max()} times. Expected each training row once, or not at all. "
            "Put parts of a table together without those that they share."
        )
    if unknown := sorted({str(one) for one in actions} - set(ACTIONS)):
        raise ValueError(f"`{ACTION}` has {unknown[0]!r}. Expected one of {ACTIONS} in every row.")
    return numbers, actions


def changed_rows(table: Dataset) -> np.ndarray:
    """Return the numbers, ascending, of the training rows that a review removes or gives another label.

    Rows that were taken out of the table are not among them, since it does not say how many there were.

    Args:
        table (`datasets.Dataset`):
            The table, in any order, or a part of it.

    Raises:
        ValueError: there is no column of actions or of row numbers, a row is there twice, or an action is unknown.
    """
    numbers, actions = _numbers_and_actions(table)
    return np.sort(numbers[np.isin(actions, ("relabel", "remove"))])


class Retrains(Protocol):
    """Trains on some rows and returns the outputs of every target, as `TrainerRetraining` does."""

    train_dataset: Any

    def __call__(self, rows: np.ndarray, seed: int) -> np.ndarray: ...


@dataclass(frozen=True)
class RemovalProof(Result):
    """What a training without some rows did, beside trainings without as many random rows.

    Attributes:
        removed (`int`): how many rows each left out.
        gain (`Interval`): mean over the targets of the outputs without these rows minus those without random ones. A
            training without random rows has a mean outside of the interval around theirs in 5 % of cases.
        better (`float`): share of the targets whose output is higher without these rows.
    """

    removed: int
    gain: Interval
    better: float

    def __str__(self) -> str:
        gain = self.gain
        return (
            f"without these rows ({self.removed}) instead of as many random ones, outputs are {abs(gain.value):.3g} "
            f"{'lower' if gain.value < 0 else 'higher'} in the mean (a change of {gain.low:+.3g} to "
            f"{gain.high:+.3g}), and higher for {self.better:.0%} of the targets"
        )


def prove_removal(rows: ArrayLike, retraining: Retrains, seed: int = 0, draws: int = 5) -> RemovalProof:
    """Train once without some rows, and some times without as many random ones, and compare outputs of the targets.

    Trainings without random rows differ, too: by rows, and by chaos, which moves all targets at once. With mean r̄ and
    standard deviation s of the targets' mean output over d draws of them, the interval of the gain x − r̄ has the half
    width t s √(1 + 1/d), for the quantile t of Student's distribution with d − 1 degrees of freedom.

    Args:
        rows (`ArrayLike` of shape `(r,)`):
            Numbers of the rows, such as those of [`changed_rows`].
        retraining (`TrainerRetraining`):
            The training; `drop="mask"` keeps order and batches, so that the rows alone differ.
        seed (`int`, *optional*, defaults to 0):
            Seed of the trainings and of the random rows.
        draws (`int`, *optional*, defaults to 5):
            Trainings without random rows, at least 2. With few of them the interval is wide.

    Returns:
        [`RemovalProof`].

    Raises:
        ValueError: there are no rows, too many, or too few draws.
        NonFiniteError: a training has diverged.
        ImportError: scipy is not installed.
    """
    quantile = scipy_stats().t.ppf(ENDS[1], checked_int(draws, "draws", 2, type_error=ValueError) - 1)
    chosen = np.unique(np.asarray(rows, dtype=np.int64))
    _, without, controls = outputs_without(chosen, retraining, seed, draws)
    without, controls = checked_finite(without, "outputs"), checked_finite(controls, "outputs")
    gains, width = without - controls.mean(0), quantile * controls.mean(1).std(ddof=1) * math.sqrt(1 + 1 / draws)
    gain = float(gains.mean())
    return RemovalProof(len(chosen), Interval(gain, gain - width, gain + width), float((gains > 0).mean()))


def outputs_without(
    rows: ArrayLike, retraining: Retrains, seed: int = 0, draws: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train once without some rows, and some times without as many random ones.

    Args:
        rows, retraining, seed, draws: as of [`prove_removal`].

    Returns:
        The numbers of the random rows, `(draws, r)`, ascending, and the outputs of the targets without `rows`, `(m,)`,
        and without these, `(draws, m)`.

    Raises:
        ValueError: there are no rows, or too many.
    """
    n, chosen = len(retraining.train_dataset), np.unique(np.asarray(rows, dtype=np.int64))
    if not 0 < 2 * len(chosen) < n or chosen[0] < 0 or chosen[-1] >= n:
        raise ValueError(
            f"`rows` has {len(chosen)} of {n} rows. Expected at least one, and more rows left than taken. "
            "Leave out fewer."
        )
    generator = np.random.Generator(np.random.Philox(seed))
    random = [np.sort(generator.choice(n, len(chosen), replace=False)) for _ in range(draws)]
    without, *controls = (retraining(np.setdiff1d(np.arange(n), part), seed) for part in (chosen, *random))
    return np.stack(random), np.asarray(without), np.stack(controls)
