"""Removal of rows, and what it does to outputs: did the rows of the highest scores make an output what it is?

"These rows did it" is a claim that removal tests: train without the first 1 % of the rows by score for a target, and
look at its output. It takes controls to read the change: any removal costs something, and rows that merely look like
the target matter, too (Ilyas et al. 2022, arXiv 2202.00622, Section 4; Koh & Liang 2017, arXiv 1703.04730).

[`removal_plan`] chooses the subsets for several methods and controls at once, and [`evaluate_removal`] compares the
changes. Three numbers for a target j and the rows that were removed for it tell whether "these rows did it":

    own       f_j(without the rows) − f_j(all rows): negative if the rows supported the output
    others    the mean of the same change over the other targets: far from 0 if the removal harms everything
    specific  own − others

Negative differences to a control mean that the method's rows mattered more. Intervals resample targets and, for random
removal, its draws, independently of each other (Owen 2007, The pigeonhole bootstrap). All methods and controls use the
same resamples, so that differences are paired.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.intervals import (
    RESAMPLES,
    Interval,
    Result,
    check_resamples,
    checked_matrices,
    checked_numbers,
    group_sums,
    quantile_interval,
    random_subsets,
)
from hf_trak.evaluation.retraining import check_masks
from hf_trak.runtime.checks import checked_int, is_int
from hf_trak.scores.groups import RowGroups

Action = Literal["remove", "add"]

"""`"remove"` trains without the chosen rows, `"add"` with the chosen rows alone."""


RANDOM = "random"

"""Name of the control that removes random rows, which every plan has."""


_KIND, _VERSION = "removal plan", 1

_FIELDS = ("shape", "fractions", "targets", "methods", "controls", "removed", "subsets", "tied", "action", "groups")


@dataclass(frozen=True)
class RemovalPlan:
    """Subsets to retrain on, for [`retrain_on_subsets`] or a part of a bank. Made by [`removal_plan`].

    Attributes:
        shape (`tuple[int, int]`):
            Numbers of training rows and of targets, `(n, m)`.
        fractions (`tuple[float, ...]`):
            The F shares of the rows (or groups) that are removed.
        targets (`tuple[int, ...]`):
            Numbers of the T targets whose outputs are compared.
        methods (`tuple[str, ...]`):
            Names of the methods whose scores are tested.
        controls (`tuple[str, ...]`):
            Names of the controls; [`RANDOM`] is the first.
        removed (`tuple[tuple[int, ...], ...]`):
            Numbers of the rows (or groups) that each of the s subsets lacks, ascending; all that it has if they are
            added. Subset 0 is the whole training set, for which none is listed, and all differ.
        subsets (`dict[str, tuple[tuple[int, ...], ...]]`):
            By method or control, F × T numbers of subsets. Random removals serve all targets: F × draws.
        tied (`dict[str, tuple[int, ...]]`):
            By method or control other than random, and by fraction, the number of targets for which the last row that
            is removed has the same score as the first that is not.
        action (`str`, *optional*, defaults to `"remove"`):
            See [`Action`].
        groups (`tuple[int, ...]`, *optional*):
            The group of each of the n rows, if groups of rows are removed.
    """

    shape: tuple[int, int]
    fractions: tuple[float, ...]
    targets: tuple[int, ...]
    methods: tuple[str, ...]
    controls: tuple[str, ...]
    removed: tuple[tuple[int, ...], ...]
    subsets: dict[str, tuple[tuple[int, ...], ...]]
    tied: dict[str, tuple[int, ...]]
    action: Action = "remove"
    groups: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise ValueError(f"{problem} Expected a plan that `removal_plan` made, unchanged. Make it again.")

    @property
    def units(self) -> int:
        """Count the training rows, or the groups."""
        return self.shape[0] if self.groups is None else max(self.groups) + 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Count the rows (or groups) that each fraction removes."""
        return removal_counts(self.units, self.fractions)

    @cached_property
    def masks(self) -> np.ndarray:
        """Return the subsets as booleans `(s, n)`, true where a training row belongs to one."""
        masks = np.ones((len(self.removed), self.units), dtype=bool)
        for mask, rows in zip(masks, self.removed, strict=True):
            mask[list(rows)] = False
        if self.action == "add":
            masks[1:] = ~masks[1:]
        return masks if self.groups is None else masks[:, list(self.groups)]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, which [`RemovalPlan.from_dict`] reads."""
        content = {"kind": _KIND, "format_version": _VERSION, **{name: getattr(self, name) for name in _FIELDS}}
        return dict(json.loads(json.dumps(content)))

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
    counts: Sequence[int] | None = None,
    targets: Sequence[int] | None = None,
    together: bool = False,
    groups: RowGroups | None = None,
    action: Action = "remove",
    random_draws: int = 10,
    seed: int = 0,
    shape: tuple[int, int] | None = None,
) -> RemovalPlan:
    """Choose which rows to remove: for each target the first by every method's scores, and by every control.

    Methods that remove the same rows share a training. Besides random removal, take at least two controls that look
    like attribution but know nothing of the training: cosines of embeddings, BM25, rows of the same label. Negative
    scores as another method, `{"helpful": scores, "harmful": -scores}`, remove the rows of the lowest scores.

    Args:
        scores (`Mapping[str, ArrayLike]`):
            By method, its scores τ of shape `(n, m)`; higher means more helpful.
        fractions (`Sequence[float]`, *optional*, defaults to `(0.01, 0.05)`):
            Shares of the training rows to remove. A fraction f leaves round((1 − f) · n) rows.
        controls (`Mapping[str, ArrayLike]`, *optional*):
            By name, matrices of the same shape, whose highest values are removed first.
        counts (`Sequence[int]`, *optional*):
            Numbers of rows (or groups) to remove, in place of `fractions`.
        targets (`Sequence[int]`, *optional*):
            Numbers of the targets that get removals of their own. Each removal costs a training per fraction, method
            and control. By default all.
        together (`bool`, *optional*, defaults to `False`):
            Remove the same rows for all these targets: the first by the mean of their scores. That costs one training
            per fraction, method and control.
        groups (`RowGroups`, *optional*):
            Groups of training rows that are removed together, the highest sums of scores first. Fractions and counts
            are then those of groups.
        action (`str`, *optional*, defaults to `"remove"`):
            `"remove"` trains without the first rows, `"add"` with the first rows alone.
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
    if action not in get_args(Action):
        raise ValueError(f"`action` is {action!r}. Expected one of {list(get_args(Action))}.")
    n, m = next(iter(matrices.values())).shape
    if groups is not None:
        matrices = {name: group_sums(matrix, groups) for name, matrix in matrices.items()}
    units = n if groups is None else len(groups)
    if counts is not None:
        fractions = [count / units for count in checked_numbers(counts, "counts", 1, units - 1)]
    sizes = _checked_counts(units, tuple(fractions))
    chosen = checked_numbers(range(m) if targets is None else targets, "targets", 0, m - 1)
    draws = checked_int(random_draws, "random_draws", 2, type_error=ValueError)
    numbers: dict[tuple[int, ...], int] = {(): 0}

    def number(removed: np.ndarray) -> int:
        return numbers.setdefault(tuple(np.sort(removed).tolist()), len(numbers))

    at_random = [random_subsets(units, draws, 1 - fraction, seed) for fraction in fractions]
    subsets = {RANDOM: tuple(tuple(number(np.flatnonzero(~mask)) for mask in masks) for masks in at_random)}
    # A dataset is often sorted, so that its first rows are no neutral choice among rows of equal scores.
    shuffled, tied = np.random.default_rng(seed).permutation(units), {}
    for name, matrix in matrices.items():
        values = matrix[:, chosen]
        values = values.mean(axis=1, keepdims=True) if together else values
        times = len(chosen) if together else 1
        first = shuffled[np.argsort(-values[shuffled], axis=0, kind="stable")].T
        subsets[name] = tuple(tuple(number(rows[:size]) for rows in first) * times for size in sizes)
        tied[name] = tuple(times * count for count in _ties(values, sizes))
    return RemovalPlan(
        shape=(n, m),
        fractions=tuple(map(float, fractions)),
        targets=tuple(chosen),
        methods=tuple(scores),
        controls=(RANDOM, *(controls or {})),
        removed=tuple(numbers),
        subsets=subsets,
        tied=tied,
        action=action,
        groups=None if groups is None else tuple(groups.member.tolist()),
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


def _ties(matrix: np.ndarray, counts: Sequence[int]) -> tuple[int, ...]:
    """Count the targets with equal values on both sides of the cut, for each number of rows."""
    ordered = -np.sort(-matrix, axis=0)
    return tuple(int((ordered[count - 1] == ordered[count]).sum()) for count in counts)


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(entry) for key, entry in value.items()}
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value


def _problem(plan: RemovalPlan) -> str | None:
    """Say what is wrong with a plan, which may come from a file that somebody else wrote."""
    if not _are_integers(plan.shape, 1) or len(plan.shape) != 2:
        return f"The plan has the shape {plan.shape!r}."
    n, m = plan.shape
    if plan.action not in get_args(Action):
        return f"The plan has the `action` {plan.action!r}, which is none of {list(get_args(Action))}."
    if plan.groups is not None and not (
        _are_integers(plan.groups, 0, n - 1)
        and len(plan.groups) == n
        and set(plan.groups) == set(range(max(plan.groups) + 1))
    ):
        return f"The plan has groups that are not one number for each of {n} rows, from 0 without gaps."
    if not isinstance(plan.fractions, tuple) or not all(isinstance(f, float) and 0 < f < 1 for f in plan.fractions):
        return f"The plan has the fractions {plan.fractions!r}."
    counts = plan.counts
    if not counts or not all(0 < count < plan.units for count in counts) or len(set(counts)) != len(counts):
        return f"The plan's fractions {plan.fractions} remove {counts} of {plan.units} rows."
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
    n = plan.units
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


@dataclass(frozen=True)
class _MeanChanges:
    """Means over targets and draws for each fraction, `(F,)`, and those of all bootstrap samples, `(F, resamples)`."""

    values: np.ndarray
    resampled: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, targets: np.ndarray, draws: np.ndarray) -> "_MeanChanges":
        """Compute the means of `(F, T, draws)`, given the weights of targets and draws in each bootstrap sample."""
        resampled = [((targets @ of_fraction) * draws).sum(axis=1) for of_fraction in values]
        return cls(values.mean(axis=(1, 2)), np.stack(resampled))

    def __sub__(self, other: "_MeanChanges") -> "_MeanChanges":
        return _MeanChanges(self.values - other.values, self.resampled - other.resampled)

    def interval(self, at: int) -> Interval:
        """Return the mean for the fraction number `at`, with its bootstrap interval."""
        return quantile_interval(float(self.values[at]), self.resampled[at])


PARTS = ("own", "others", "specific")

"""The changes that are reported, see the module's docstring."""


@dataclass(frozen=True)
class RemovalEffect(Result):
    """Mean changes over targets after the removal of the first rows by one method or control.

    Attributes:
        name (`str`):
            The method or control.
        fraction (`float`):
            Share of the rows (or groups) that was removed.
        count (`int`):
            Number of rows (or groups) that was removed.
        own (`Interval`):
            Change of the output of the target whose rows were removed.
        others (`Interval`, *optional*):
            Mean change of the outputs of all other targets; `None` if there are none.
        specific (`Interval`, *optional*):
            `own` minus `others`; `None` if there are no others.
        against (`dict[str, Interval]`):
            By control, `own` minus that of the control; empty for controls.
    """

    name: str
    fraction: float
    count: int
    own: Interval
    others: Interval | None
    specific: Interval | None
    against: dict[str, Interval]


@dataclass(frozen=True)
class RemovalResult:
    """Changes of outputs after the removals of a plan. `print(result)` shows the table.

    Attributes:
        plan (`RemovalPlan`):
            The plan.
        effects (`tuple[RemovalEffect, ...]`):
            One for each fraction and each method and control, in their order.
        changes (`dict[str, np.ndarray]`):
            By method or control, the `own` changes of shape `(F, T)`, fractions × targets of the plan; those of random
            removals are averaged over draws.
        notes (`tuple[str, ...]`):
            What to bear in mind: too few controls or targets, rows of equal scores.
    """

    plan: RemovalPlan
    effects: tuple[RemovalEffect, ...]
    changes: dict[str, np.ndarray]
    notes: tuple[str, ...]
    _means: dict[str, _MeanChanges] = field(repr=False)
    """Means of the `own` changes by method or control."""

    @property
    def curves(self) -> dict[str, dict[int, Interval]]:
        """Return the `own` change by method or control, and by number of rows (or groups)."""
        sizes = range(len(self.plan.fractions))
        return {
            name: {self.plan.counts[at]: means.interval(at) for at in sizes} for name, means in self._means.items()
        }

    def effect(self, name: str, size: float) -> RemovalEffect:
        """Return the effect of one method or control.

        Args:
            name (`str`):
                The method or control.
            size (`float` or `int`):
                A fraction of the plan, or its number of rows (or groups).

        Returns:
            [`RemovalEffect`]: the effect.

        Raises:
            ValueError: the plan has no such name, fraction or number.
        """
        if not (found := [one for one in self.effects if one.name == name and size in (one.fraction, one.count)]):
            raise ValueError(
                f"There is no removal by {name!r} of the fraction {size!r}. Expected one of "
                f"{[*self.plan.methods, *self.plan.controls]}, and one of {list(self.plan.fractions)} or of "
                f"{list(self.plan.counts)} rows."
            )
        return found[0]

    def difference(self, first: str, second: str, size: float) -> Interval:
        """Compute the mean `own` change by `first` minus that by `second`, target by target.

        Args:
            first (`str`):
                A method or control.
            second (`str`):
                Another one.
            size (`float` or `int`):
                A fraction of the plan, or its number of rows (or groups).

        Returns:
            [`Interval`]: negative if the rows of `first` mattered more.

        Raises:
            ValueError: the plan has no such name, fraction or number.
        """
        count, _ = (self.effect(name, size).count for name in (first, second))
        at = self.plan.counts.index(count)
        return (self._means[first] - self._means[second]).interval(at)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values, without the plan's subsets."""
        return {
            **{name: list(getattr(self.plan, name)) for name in ("methods", "controls", "targets")},
            "effects": [effect.to_dict() for effect in self.effects],
            "changes": {name: values.tolist() for name, values in self.changes.items()},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        controls = self.plan.controls
        done = "removed" if self.plan.action == "remove" else "added"
        first = f"{'rows' if self.plan.groups is None else 'groups'} {done}"
        head = [first, "by", "own change", "others' change", "own − others", *(f"− {c}" for c in controls)]
        lines = [head]
        for effect in self.effects:
            label = effect.name if effect.name in self.plan.methods else f"{effect.name} (control)"
            changes = [_text(getattr(effect, part)) for part in PARTS]
            against = [_text(effect.against.get(control)) for control in controls]
            lines.append([f"{effect.count} ({effect.fraction:.3g})", label, *changes, *against])
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        lines.insert(1, ["-" * width for width in widths])
        rows = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(f"| {row} |" for row in rows), *(f"\n{note}" for note in self.notes)])


def _text(interval: Interval | None) -> str:
    """Write an interval with three digits; outputs may be of any scale."""
    return "" if interval is None else f"{interval.value:+.3g} [{interval.low:+.3g}, {interval.high:+.3g}]"


_ENOUGH_CONTROLS = 3

_ENOUGH_TARGETS = 10


def evaluate_removal(
    plan: RemovalPlan, masks: ArrayLike, outputs: ArrayLike, resamples: int = RESAMPLES, seed: int = 0
) -> RemovalResult:
    """Compare the changes of outputs that the removals of a plan caused.

    Args:
        plan (`RemovalPlan`):
            The plan.
        masks (`ArrayLike` of shape `(s, n)`):
            Subsets that were trained on, true where a training row belongs to one. Those of the plan must be among
            them, in any order; others are not used, and a subset that occurs several times is averaged.
        outputs (`ArrayLike` of shape `(s, m)`):
            The model output on every target after training on each subset.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`RemovalResult`]: mean changes, differences to each control, and a table of both.

    Raises:
        ValueError: shapes do not fit, a subset of the plan was not trained on, or `resamples` is out of
            range.
        NonFiniteError: an output is NaN or infinite.
    """
    check_resamples(resamples)
    measured, whole = _outputs_of_plan(plan, masks, outputs)
    own, others = _changes(plan, measured - measured[0])
    rng = np.random.default_rng(seed)
    targets = _resampling_weights(len(plan.targets), resamples, rng)
    count = len(plan.subsets[RANDOM][0])
    draws = {1: np.ones((resamples, 1)), count: _resampling_weights(count, resamples, rng)}
    means = {name: _MeanChanges.of(values, targets, draws[values.shape[2]]) for name, values in own.items()}
    elsewhere = {name: _MeanChanges.of(values, targets, draws[values.shape[2]]) for name, values in others.items()}

    def effect(at: int, name: str) -> RemovalEffect:
        other = elsewhere.get(name)
        compared = plan.controls if name in plan.methods else ()
        return RemovalEffect(
            name,
            plan.fractions[at],
            plan.counts[at],
            own=means[name].interval(at),
            others=None if other is None else other.interval(at),
            specific=None if other is None else (means[name] - other).interval(at),
            against={control: (means[name] - means[control]).interval(at) for control in compared},
        )

    names = (*plan.methods, *plan.controls)
    return RemovalResult(
        plan,
        effects=tuple(effect(at, name) for at in range(len(plan.fractions)) for name in names),
        changes={name: own[name].mean(axis=2) for name in names},
        notes=tuple(_notes(plan, whole)),
        _means=means,
    )


def _outputs_of_plan(plan: RemovalPlan, masks: ArrayLike, outputs: ArrayLike) -> tuple[np.ndarray, int]:
    """Find the outputs of the plan's subsets, in its order, `(s, m)`, and the number of trainings on all rows."""
    member, values = check_masks(masks), np.asarray(outputs, dtype=np.float64)
    n, m = plan.shape
    if member.shape[1] != n or values.shape != (len(member), m):
        remedy = ""
        if values.shape == (m, len(member)):
            remedy = " `outputs` looks transposed: pass its `.T`."
        elif member.shape == (n, len(values)):
            remedy = " `masks` looks transposed: pass its `.T`."
        raise ValueError(
            f"`masks` has the shape {member.shape}, `outputs` {values.shape}. Expected (s, {n}) and (s, {m}), as the "
            f"plan has {n} training rows and {m} targets.{remedy}"
        )
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise NonFiniteError(
            f"`outputs` holds NaN or infinite values, the first for subset {row} and target {column}. Expected finite "
            "ones. Check whether that training diverged."
        )
    places: dict[bytes, list[int]] = {}
    for place, packed in enumerate(np.packbits(member, axis=1)):
        places.setdefault(packed.tobytes(), []).append(place)
    found = [places.get(packed.tobytes(), []) for packed in np.packbits(plan.masks, axis=1)]
    if missing := [number for number, of_subset in enumerate(found) if not of_subset]:
        raise ValueError(
            f"`masks` lacks {len(missing)} of the plan's {len(found)} subsets, the first being subset {missing[0]}. "
            "Expected all of `plan.masks`; the first is the whole training set. Train on those, too."
        )
    return np.stack([values[of_subset].mean(axis=0) for of_subset in found]), len(found[0])


def _changes(plan: RemovalPlan, changes: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Arrange the changes `(s, m)` of own targets and of the others, by name `(F, T, draws)`; a method has one draw.

    The second is empty if there is one target alone.
    """
    targets, m = np.array(plan.targets), plan.shape[1]
    own, others = {}, {}
    for name, of_fractions in plan.subsets.items():
        numbers = np.array(of_fractions)
        # random: (F, 1, draws), for all targets; else (F, T, 1)
        numbers = numbers[:, None, :] if name == RANDOM else numbers[:, :, None]
        own[name] = changes[numbers, targets[None, :, None]]
        if m > 1:
            others[name] = (changes[numbers].sum(axis=-1) - own[name]) / (m - 1)
    return own, others


def _resampling_weights(count: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Draw how often each of `count` values is in each bootstrap sample, as shares of 1, `(resamples, count)`."""
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples) / count


def _notes(plan: RemovalPlan, whole: int) -> list[str]:
    notes = []
    if whole == 1:
        notes.append(
            "Changes are measured from one training on all rows, whose noise all targets share: the intervals of "
            "changes leave it out, and those of differences do not need it."
        )
    same = [
        name for name in (*plan.methods, *plan.controls[1:]) if all(len({*one}) == 1 for one in plan.subsets[name])
    ]
    if same and len(plan.targets) > 1:
        notes.append(
            f"One training without the same rows serves all targets ({', '.join(same)}): no interval has its noise. "
            "Compare with the spread of random rows, or repeat it with other seeds."
        )
    if len(plan.controls) < _ENOUGH_CONTROLS:
        notes.append(
            f"Controls: {len(plan.controls)} ({', '.join(plan.controls)}), fewer than {_ENOUGH_CONTROLS}. Without "
            "others, such as similarity of embeddings or BM25, rows that merely look like a target are not told from "
            "rows that caused its output."
        )
    if len(plan.targets) < _ENOUGH_TARGETS:
        notes.append(
            f"Targets: {len(plan.targets)}, fewer than {_ENOUGH_TARGETS}. Intervals resample them, and are too narrow "
            "for so few."
        )
    for name, of_fractions in plan.tied.items():
        if tied := [(count, number) for count, number in zip(plan.counts, of_fractions, strict=True) if number]:
            counted = ", ".join(f"{number} of {len(plan.targets)} targets at {count} rows" for count, number in tied)
            notes.append(
                f"{name} has rows of equal scores on both sides of the cut ({counted}). They were drawn at random."
            )
    return notes
