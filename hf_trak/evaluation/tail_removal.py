"""Tail removal: which rows to remove to see whether the rows of the highest scores made a target's output what it is.

"These rows did it" is a claim that removal tests: train without the first 1 % of the rows by score for a target, and
look at its output. It takes controls to read the change: any removal costs something, and rows that merely look like
the target matter, too (Ilyas et al. 2022, arXiv 2202.00622, Section 4; Koh & Liang 2017, arXiv 1703.04730).

[`removal_plan`] chooses the subsets for several methods and controls at once, [`evaluate_removal`] compares the
changes. For curves over numbers of rows, groups, or addition, see `counterfactual.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from datasets import Dataset
from numpy.typing import ArrayLike

from hf_trak.evaluation.intervals import (
    Interval,
    checked_matrices,
    checked_matrix,
    group_sums,
    mean_interval,
    random_subsets,
)
from hf_trak.evaluation.retraining import masks_and_outputs
from hf_trak.runtime.checks import checked_int, is_int
from hf_trak.scores.groups import RowGroups

Order = Literal["helpful", "harmful", "random"]

"""The rows that come first: those of the highest scores, those of the lowest, or random ones."""


Action = Literal["remove", "add"]

"""`"remove"` trains without the first r rows, `"add"` with the first r rows alone."""


MEAN = -1

"""The target number that stands for the mean over all targets."""


@dataclass(frozen=True)
class CounterfactualPlan:
    """Subsets to retrain on, for [`retrain_on_subsets`]. Subset 0 is the whole training set.

    Attributes:
        masks (`np.ndarray` of shape `(s, n)`):
            True where a training row belongs to the subset.
        order (`tuple[str, ...]`):
            The order of rows of subsets 1 … s − 1, see [`Order`].
        count (`tuple[int, ...]`):
            The number of rows (or groups) removed or added in each of them.
        target (`tuple[int, ...]`):
            The target by whose scores rows were ordered for each of them; [`MEAN`] for the mean over targets.
        action (`str`):
            See [`Action`].
    """

    masks: np.ndarray
    order: tuple[str, ...]
    count: tuple[int, ...]
    target: tuple[int, ...]
    action: Action

    def curves(self, retrained: Dataset, confidence: float = 0.95) -> "CounterfactualCurves":
        """Compute the curves from the retrainings of this plan.

        Args:
            retrained (`datasets.Dataset`):
                The result of `retrain_on_subsets(plan.masks, …)`.
            confidence (`float`, *optional*, defaults to 0.95):
                Confidence level of the intervals over targets.

        Returns:
            [`CounterfactualCurves`]: the curves.

        Raises:
            ValueError: the retrainings are of other subsets, or lack a target.
            ImportError: scipy is not installed.
        """
        masks, outputs = masks_and_outputs(retrained)
        if not np.array_equal(masks, self.masks):
            raise ValueError(
                "The retrainings are of other subsets than this plan's. Expected the result of "
                "`retrain_on_subsets(plan.masks, …)`."
            )
        if max(self.target) >= outputs.shape[1]:
            raise ValueError(
                f"The plan has target {max(self.target)}, but the retrainings have {outputs.shape[1]} targets. "
                "Expected an output for every target of the plan."
            )
        changes = outputs[1:] - outputs[0]
        own = [row.mean() if j == MEAN else row[j] for row, j in zip(changes, self.target, strict=True)]
        table = Dataset.from_dict(
            {
                "order": list(self.order),
                "count": list(self.count),
                "target": list(self.target),
                "change": [float(value) for value in own],
            }
        )
        points: dict[str, dict[int, Interval]] = {}
        for order in dict.fromkeys(self.order):
            for count in dict.fromkeys(self.count):
                keys = zip(self.order, self.count, self.target, changes, own, strict=True)
                values: list[float] = []
                for found, size, target, row, value in keys:
                    if (found, size) == (order, count):
                        values.extend(row if target == MEAN else [value])
                points.setdefault(order, {})[count] = mean_interval(values, confidence)
        return CounterfactualCurves(points, table, self.action)


@dataclass(frozen=True)
class CounterfactualCurves:
    """Changes of outputs, f(after) − f(trained on all rows).

    Attributes:
        points (`dict[str, dict[int, Interval]]`):
            By order and count, the mean change over targets with its bootstrap interval over targets.
        table (`datasets.Dataset`):
            One row per retraining, with the columns `order`, `count`, `target` and `change`.
        action (`str`):
            See [`Action`].
    """

    points: dict[str, dict[int, Interval]]
    table: Dataset
    action: Action

    def difference(self, order: str, control: str, count: int, confidence: float = 0.95) -> Interval:
        """Compare two orders target by target: the mean of the change under `order` minus that under `control`.

        Args:
            order (`str`):
                An order of the plan, such as `"helpful"`.
            control (`str`):
                Another one, such as `"random"` or the name of a control.
            count (`int`):
                Number of rows (or groups) removed or added.
            confidence (`float`, *optional*, defaults to 0.95):
                Confidence level of the interval over targets.

        Returns:
            [`Interval`]: negative for removal if the rows of `order` mattered more.

        Raises:
            ValueError: the plan has no such orders or count, or ordered rows for the mean over targets, which leaves a
                single difference.
            ImportError: scipy is not installed.
        """
        changes: dict[str, dict[int, float]] = {order: {}, control: {}}
        for row in self.table:
            if row["order"] in changes and row["count"] == count and row["target"] != MEAN:
                changes[row["order"]][row["target"]] = row["change"]
        common = sorted(changes[order].keys() & changes[control].keys())
        if not common:
            raise ValueError(
                f"There are no targets with the orders {order!r} and {control!r} and the count {count}. Expected "
                f"orders among {list(self.points)} and a count of the plan, made with `targets=`."
            )
        return mean_interval([changes[order][j] - changes[control][j] for j in common], confidence)


def counterfactual_plan(
    scores: ArrayLike,
    counts: Sequence[int],
    *,
    action: Action = "remove",
    orders: Sequence[Order] = ("helpful", "harmful", "random"),
    targets: Sequence[int] | None = None,
    groups: RowGroups | None = None,
    seed: int = 0,
    controls: Mapping[str, ArrayLike] | None = None,
) -> CounterfactualPlan:
    """Choose the subsets for removal or addition curves.

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            Scores τ of any attribution method; higher means more helpful.
        counts (`Sequence[int]`):
            The numbers r of rows (or groups).
        action (`str`, *optional*, defaults to `"remove"`):
            `"remove"` trains without the first r rows, `"add"` with the first r rows alone.
        orders (`Sequence[str]`, *optional*, defaults to `("helpful", "harmful", "random")`):
            The orders of rows, see [`Order`]. Rows of equal scores keep the order of the dataset.
        targets (`Sequence[int]`, *optional*):
            Numbers of the targets that get an order of their own, which costs `len(targets)` retrainings per point. By
            default rows are ordered once, by their mean score over all targets.
        groups (`RowGroups`, *optional*):
            Groups of training rows that are removed or added together, ordered by the sums of their scores.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random order, which is the same for every count.
        controls (`Mapping[str, ArrayLike]`, *optional*):
            More orders to compare with, by name: matrices of the shape of `scores`, the highest values first, such as
            the similarity of embeddings or the scores of another method.

    Returns:
        [`CounterfactualPlan`]: the subsets.

    Raises:
        ValueError: a count, an order, the action or a target is out of range.
        NonFiniteError: a score is NaN or infinite.
    """
    tau = checked_matrix(scores, "scores")
    n, m = tau.shape
    others = {name: checked_matrix(values, f"controls[{name!r}]") for name, values in (controls or {}).items()}
    for name, values in others.items():
        if name in get_args(Order) or values.shape != tau.shape:
            raise ValueError(
                f"`controls` has {name!r} of the shape {values.shape}. Expected a name other than {get_args(Order)}, "
                f"and the shape of `scores`, {tau.shape}."
            )
    if action not in get_args(Action):
        raise ValueError(f"`action` is {action!r}. Expected one of {list(get_args(Action))}.")
    if not orders or not set(orders) <= set(get_args(Order)):
        raise ValueError(f"`orders` is {list(orders)}. Expected some of {list(get_args(Order))}.")
    units, *more = (values if groups is None else group_sums(values, groups) for values in (tau, *others.values()))
    by_control = dict(zip(others, more, strict=True))
    if not counts or not all(0 < count < len(units) for count in counts) or len(set(counts)) != len(counts):
        raise ValueError(f"`counts` is {list(counts)}. Expected distinct numbers from 1 to {len(units) - 1}.")
    chosen = [MEAN] if targets is None else list(targets)
    if not chosen or (targets is not None and not all(0 <= target < m for target in chosen)):
        raise ValueError(f"`targets` is {chosen}. Expected numbers from 0 to {m - 1}, or `None` for their mean.")
    shuffled = np.random.default_rng(seed).permutation(len(units))
    masks, keys = [np.ones(n, dtype=bool)], []
    for order in (*orders, *others):
        matrix = by_control.get(order, units)
        for target in chosen:
            values = matrix.mean(axis=1) if target == MEAN else matrix[:, target]
            first = (
                shuffled if order == "random" else np.argsort(values if order == "harmful" else -values, kind="stable")
            )
            for count in counts:
                taken = np.isin(np.arange(len(units)), first[:count])
                rows = taken if groups is None else taken[groups.member.numpy()]
                masks.append(rows if action == "add" else ~rows)
                keys.append((order, int(count), int(target)))
    named = tuple(zip(*keys, strict=True))
    return CounterfactualPlan(np.stack(masks), named[0], named[1], named[2], action)


RANDOM = "random"

"""Name of the control that removes random rows, which every plan has."""


_KIND, _VERSION = "removal plan", 1

_FIELDS = ("shape", "fractions", "targets", "methods", "controls", "removed", "subsets", "tied")


@dataclass(frozen=True)
class RemovalPlan:
    """Subsets to retrain on, for [`retrain_on_subsets`] or a part of a bank. Made by [`removal_plan`].

    Attributes:
        shape (`tuple[int, int]`):
            Numbers of training rows and of targets, `(n, m)`.
        fractions (`tuple[float, ...]`):
            The F shares of the rows that are removed.
        targets (`tuple[int, ...]`):
            Numbers of the T targets that have removals of their own.
        methods (`tuple[str, ...]`):
            Names of the methods whose scores are tested.
        controls (`tuple[str, ...]`):
            Names of the controls; [`RANDOM`] is the first.
        removed (`tuple[tuple[int, ...], ...]`):
            Row numbers that each of the s subsets lacks, ascending. Subset 0 lacks none, and all differ.
        subsets (`dict[str, tuple[tuple[int, ...], ...]]`):
            By method or control, F × T numbers of subsets. Random removals serve all targets: F × draws.
        tied (`dict[str, tuple[int, ...]]`):
            By method or control other than random, and by fraction, the number of targets for which the last row that
            is removed has the same score as the first that is not.
    """

    shape: tuple[int, int]
    fractions: tuple[float, ...]
    targets: tuple[int, ...]
    methods: tuple[str, ...]
    controls: tuple[str, ...]
    removed: tuple[tuple[int, ...], ...]
    subsets: dict[str, tuple[tuple[int, ...], ...]]
    tied: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise ValueError(f"{problem} Expected a plan that `removal_plan` made, unchanged. Make it again.")

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of rows that each fraction removes."""
        return removal_counts(self.shape[0], self.fractions)

    @cached_property
    def masks(self) -> np.ndarray:
        """The subsets as booleans `(s, n)`, true where a training row belongs to one."""
        masks = np.ones((len(self.removed), self.shape[0]), dtype=bool)
        for mask, rows in zip(masks, self.removed, strict=True):
            mask[list(rows)] = False
        return masks

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, which [`RemovalPlan.from_dict`] reads."""
        fields = {name: _as_lists(getattr(self, name)) for name in _FIELDS}
        return {"kind": _KIND, "format_version": _VERSION, **fields}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "RemovalPlan":
        """Read and check a plan.

        Args:
            content (`Mapping[str, Any]`):
                The result of [`RemovalPlan.to_dict`], as it is or from a JSON file.

        Returns:
            [`RemovalPlan`]: the plan.

        Raises:
            ValueError: the content is no plan of this format, or contradicts itself.
        """
        given = dict(content) if isinstance(content, Mapping) else {}
        label = (given.pop("kind", None), given.pop("format_version", None))
        if label != (_KIND, _VERSION) or set(given) != set(_FIELDS):
            raise ValueError(
                f"The plan has the kind and version {label} and the fields {sorted(map(str, given))}. Expected "
                f"{(_KIND, _VERSION)} and {sorted(_FIELDS)}, as `RemovalPlan.to_dict` writes them."
            )
        return cls(**{name: _as_tuples(value) for name, value in given.items()})


def removal_plan(
    scores: Mapping[str, ArrayLike],
    fractions: Sequence[float] = (0.01, 0.05),
    *,
    controls: Mapping[str, ArrayLike] | None = None,
    targets: Sequence[int] | None = None,
    random_draws: int = 10,
    seed: int = 0,
    shape: tuple[int, int] | None = None,
) -> RemovalPlan:
    """Choose which rows to remove: for each target, the first by every method's scores, and by every control.

    Methods that remove the same rows share a training. Besides random removal, take at least two controls that look
    like attribution but know nothing of the training: cosines of embeddings, BM25, rows of the same label.

    Args:
        scores (`Mapping[str, ArrayLike]`):
            By method, its scores τ of shape `(n, m)`; higher means more helpful.
        fractions (`Sequence[float]`, *optional*, defaults to `(0.01, 0.05)`):
            Shares of the training rows to remove. A fraction f leaves round((1 − f) · n) rows.
        controls (`Mapping[str, ArrayLike]`, *optional*):
            By name, matrices of the same shape, whose highest values are removed first.
        targets (`Sequence[int]`, *optional*):
            Numbers of the targets that get removals of their own, each of which costs a training per fraction, method
            and control. By default all.
        random_draws (`int`, *optional*, defaults to 10):
            Random removals for each fraction, at least 2; one alone would have much noise. They serve all targets.
            They are the first subsets of `random_subsets(n, …, 1 - fraction, seed)`, so that trainings on these serve
            again.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random removals, and of the order of rows with equal scores, which is random, too.
        shape (`tuple[int, int]`, *optional*):
            The numbers of training rows and targets. By default those of the first matrix, which then must have no
            more targets than training rows.

    Returns:
        [`RemovalPlan`]: the subsets.

    Raises:
        TypeError: `scores` or `controls` is no mapping.
        ValueError: a matrix has another shape or is transposed, a name occurs twice or is `"random"`, a fraction
            removes no row or all, two remove the same number, or a target does not exist.
        NonFiniteError: a score is NaN or infinite.
    """
    matrices = checked_matrices({"scores": scores, "controls": controls or {}}, shape)
    if not scores or RANDOM in matrices:
        raise ValueError(
            f"`scores` has the methods {list(scores)}, `controls` {list(controls or {})}. Expected at least one "
            f"method, and no name {RANDOM!r}, which the control of random rows has."
        )
    n, m = next(iter(matrices.values())).shape
    fractions = tuple(fractions)
    counts = _checked_counts(n, fractions)
    chosen = tuple(range(m)) if targets is None else tuple(targets)
    if not chosen or not all(is_int(j, 0, m - 1) for j in chosen) or len(set(chosen)) != len(chosen):
        raise ValueError(f"`targets` is {list(chosen)}. Expected distinct numbers from 0 to {m - 1}.")
    draws = checked_int(random_draws, "random_draws", 2, type_error=ValueError)
    numbers: dict[tuple[int, ...], int] = {(): 0}

    def number(removed: np.ndarray) -> int:
        return numbers.setdefault(tuple(np.flatnonzero(removed).tolist()), len(numbers))

    at_random = [random_subsets(n, draws, 1 - fraction, seed) for fraction in fractions]
    subsets = {RANDOM: tuple(tuple(number(~mask) for mask in masks) for masks in at_random)}
    for name, matrix in matrices.items():
        removed = _first_rows(matrix, counts, chosen, seed)
        subsets[name] = tuple(tuple(number(rows) for rows in of_fraction) for of_fraction in removed)
    return RemovalPlan(
        shape=(n, m),
        fractions=tuple(float(fraction) for fraction in fractions),
        targets=tuple(int(j) for j in chosen),
        methods=tuple(scores),
        controls=(RANDOM, *(controls or {})),
        removed=tuple(numbers),
        subsets=subsets,
        tied={name: _ties(matrix[:, list(chosen)], counts) for name, matrix in matrices.items()},
    )


def removal_counts(n: int, fractions: Sequence[float]) -> tuple[int, ...]:
    """Compute how many of n rows each fraction removes, as [`random_subsets`] of the other rows does."""
    return tuple(n - round((1 - fraction) * n) for fraction in fractions)


def _checked_counts(n: int, fractions: tuple[float, ...]) -> tuple[int, ...]:
    if not fractions or not all(isinstance(fraction, float) and 0 < fraction < 1 for fraction in fractions):
        raise ValueError(f"`fractions` is {list(fractions)}. Expected numbers between 0 and 1, such as 0.01.")
    counts = removal_counts(n, fractions)
    if not all(0 < count < n for count in counts) or len(set(counts)) != len(counts):
        raise ValueError(
            f"`fractions` is {list(fractions)}, which is {list(counts)} of {n} rows. Expected fractions that remove "
            "some rows, not all, and different numbers of them."
        )
    return counts


def _first_rows(matrix: np.ndarray, counts: Sequence[int], targets: Sequence[int], seed: int) -> np.ndarray:
    """Mark the rows of the highest values for each count and target, booleans `(F, T, n)`.

    A dataset is often sorted, so that its first rows are no neutral choice among rows of equal values: rows are
    shuffled before they are sorted, in the same way for all matrices.
    """
    shuffled = np.random.default_rng(seed).permutation(len(matrix))
    plan = counterfactual_plan(matrix[shuffled], list(counts), orders=["helpful"], targets=targets)
    removed = np.empty_like(plan.masks[1:])
    removed[:, shuffled] = ~plan.masks[1:]
    return removed.reshape(len(targets), len(counts), -1).swapaxes(0, 1)


def _ties(matrix: np.ndarray, counts: Sequence[int]) -> tuple[int, ...]:
    """Count the targets with equal values on both sides of the cut, for each number of rows."""
    ordered = -np.sort(-matrix, axis=0)
    return tuple(int((ordered[count - 1] == ordered[count]).sum()) for count in counts)


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(entry) for key, entry in value.items()}
    return [_as_lists(entry) for entry in value] if isinstance(value, tuple) else value


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(entry) for key, entry in value.items()}
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value


def _problem(plan: RemovalPlan) -> str | None:
    """Say what is wrong with a plan, which may come from a file that somebody else wrote."""
    if not _are_integers(plan.shape, 1) or len(plan.shape) != 2:
        return f"The plan has the shape {plan.shape!r}."
    n, m = plan.shape
    if not isinstance(plan.fractions, tuple) or not all(isinstance(f, float) and 0 < f < 1 for f in plan.fractions):
        return f"The plan has the fractions {plan.fractions!r}."
    counts = plan.counts
    if not counts or not all(0 < count < n for count in counts) or len(set(counts)) != len(counts):
        return f"The plan's fractions {plan.fractions} remove {counts} of {n} rows."
    if not plan.targets or not _are_integers(plan.targets, 0, m - 1) or len(set(plan.targets)) != len(plan.targets):
        return f"The plan has the targets {plan.targets!r} of {m}."
    return _problem_of_names(plan) or _problem_of_removals(plan) or _problem_of_numbers(plan)


def _problem_of_names(plan: RemovalPlan) -> str | None:
    for names in (plan.methods, plan.controls):
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) and name for name in names):
            return f"The plan has the methods {plan.methods!r} and the controls {plan.controls!r}."
    named = [*plan.methods, *plan.controls]
    if plan.controls[0] != RANDOM or len(set(named)) != len(named):
        return f"The plan has the methods {plan.methods} and the controls {plan.controls}, random not being the first."
    for found, expected in ((plan.subsets, set(named)), (plan.tied, set(named) - {RANDOM})):
        if not isinstance(found, dict) or set(found) != expected:
            return f"The plan has the methods and controls {named}, but subsets or ties of others."
    return None


def _problem_of_removals(plan: RemovalPlan) -> str | None:
    n = plan.shape[0]
    if not isinstance(plan.removed, tuple) or not plan.removed or plan.removed[0] != ():
        return "The plan's first subset is not the whole training set."
    for number, rows in enumerate(plan.removed):
        if not _are_integers(rows, 0, n - 1) or any(a >= b for a, b in pairwise(rows)):
            return f"Subset {number} of the plan does not lack ascending row numbers below {n}."
    return "The plan has a subset twice." if len(set(plan.removed)) != len(plan.removed) else None


def _problem_of_numbers(plan: RemovalPlan) -> str | None:
    last = len(plan.removed) - 1
    for name, of_fractions in plan.subsets.items():
        if not isinstance(of_fractions, tuple) or len(of_fractions) != len(plan.fractions):
            return f"The plan has subsets of {name!r} for other fractions than its {len(plan.fractions)}."
        if not all(_are_integers(numbers, 1, last) for numbers in of_fractions):
            return f"The plan has subsets of {name!r} that are no numbers from 1 to {last}."
        width = len(of_fractions[0]) if name == RANDOM else len(plan.targets)
        if width == 0 or any(len(numbers) != width for numbers in of_fractions):
            return f"The plan has {[len(numbers) for numbers in of_fractions]} subsets of {name!r}, not {width} each."
        for count, numbers in zip(plan.counts, of_fractions, strict=True):
            if any(len(plan.removed[number]) != count for number in numbers):
                return f"The plan has a subset of {name!r} that does not lack {count} rows."
    ties = [_are_integers(t, 0, len(plan.targets)) and len(t) == len(plan.fractions) for t in plan.tied.values()]
    return None if all(ties) else f"The plan has the numbers of ties {plan.tied}."


def _are_integers(values: Any, low: int, high: int | None = None) -> bool:
    return isinstance(values, tuple) and all(is_int(value, low, high) for value in values)
