"""What removals did: changes of outputs by method and control, with intervals and paired differences.

For a target j and the rows that a method removed for it, three numbers tell whether "these rows did it":

    own       f_j(without the rows) − f_j(all rows): negative if the rows supported the output
    others    the mean of the same change over the other targets: far from 0 if the removal harms everything
    specific  own − others

Negative differences to a control mean that the method's rows mattered more. Intervals resample targets and, for random
removal, its draws, independently of each other (Owen 2007, The pigeonhole bootstrap). All methods and controls use the
same resamples, so that differences are paired.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.intervals import RESAMPLES, Interval, check_interval, quantile_interval
from hf_trak.evaluation.retraining import check_masks
from hf_trak.evaluation.tail_removal import RANDOM, RemovalPlan


@dataclass(frozen=True)
class MeanChanges:
    """Means over targets and draws for each fraction, `(F,)`, and those of all bootstrap samples, `(F, resamples)`."""

    values: np.ndarray
    resampled: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, targets: np.ndarray, draws: np.ndarray) -> "MeanChanges":
        """Compute the means of `(F, T, draws)`, given the weights of targets and draws in each bootstrap sample."""
        resampled = [((targets @ of_fraction) * draws).sum(axis=1) for of_fraction in values]
        return cls(values.mean(axis=(1, 2)), np.stack(resampled))

    def __sub__(self, other: "MeanChanges") -> "MeanChanges":
        return MeanChanges(self.values - other.values, self.resampled - other.resampled)

    def interval(self, at: int, confidence: float) -> Interval:
        """Return the mean for the fraction number `at`, with its bootstrap interval."""
        return quantile_interval(float(self.values[at]), self.resampled[at], confidence)


PARTS = ("own", "others", "specific")

"""The changes that are reported, see the module's docstring."""


@dataclass(frozen=True)
class RemovalEffect:
    """Mean changes over targets after the removal of the first rows by one method or control.

    Attributes:
        name (`str`):
            The method or control.
        fraction (`float`):
            Share of the rows that was removed.
        count (`int`):
            Number of rows that was removed.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain JSON values."""
        changes = {part: None if (found := getattr(self, part)) is None else found.to_dict() for part in PARTS}
        against = {control: interval.to_dict() for control, interval in self.against.items()}
        return {"name": self.name, "fraction": self.fraction, "count": self.count, **changes, "against": against}


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
        confidence (`float`):
            Confidence level of the intervals.
    """

    plan: RemovalPlan
    effects: tuple[RemovalEffect, ...]
    changes: dict[str, np.ndarray]
    notes: tuple[str, ...]
    confidence: float
    _means: dict[str, MeanChanges] = field(repr=False)
    """Means of the `own` changes by method or control."""

    def effect(self, name: str, fraction: float) -> RemovalEffect:
        """Return the effect of one method or control.

        Args:
            name (`str`):
                The method or control.
            fraction (`float`):
                A fraction of the plan.

        Returns:
            [`RemovalEffect`]: the effect.

        Raises:
            ValueError: the plan has no such name or fraction.
        """
        found = [effect for effect in self.effects if (effect.name, effect.fraction) == (name, fraction)]
        if not found:
            raise ValueError(
                f"There is no removal by {name!r} of the fraction {fraction!r}. Expected one of "
                f"{[*self.plan.methods, *self.plan.controls]}, and one of {list(self.plan.fractions)}."
            )
        return found[0]

    def difference(self, first: str, second: str, fraction: float) -> Interval:
        """Compute the mean `own` change by `first` minus that by `second`, target by target.

        Args:
            first (`str`):
                A method or control.
            second (`str`):
                Another one.
            fraction (`float`):
                A fraction of the plan.

        Returns:
            [`Interval`]: negative if the rows of `first` mattered more.

        Raises:
            ValueError: the plan has no such name or fraction.
        """
        for name in (first, second):
            self.effect(name, fraction)  # which refuses what is not in the plan
        at = self.plan.fractions.index(fraction)
        return (self._means[first] - self._means[second]).interval(at, self.confidence)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values, without the plan's subsets."""
        return {
            "methods": list(self.plan.methods),
            "controls": list(self.plan.controls),
            "targets": list(self.plan.targets),
            "effects": [effect.to_dict() for effect in self.effects],
            "changes": {name: values.tolist() for name, values in self.changes.items()},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        controls = self.plan.controls
        head = ["rows removed", "by", "own change", "others' change", "own − others", *(f"− {c}" for c in controls)]
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
    plan: RemovalPlan,
    masks: ArrayLike,
    outputs: ArrayLike,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
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
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level of the intervals.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`RemovalResult`]: mean changes, differences to each control, and a table of both.

    Raises:
        ValueError: shapes do not fit, a subset of the plan was not trained on, or `confidence` or `resamples` is out
            of range.
        NonFiniteError: an output is NaN or infinite.
    """
    check_interval(confidence, resamples)
    measured = _outputs_of_plan(plan, masks, outputs)
    own, others = _changes(plan, measured - measured[0])
    rng = np.random.default_rng(seed)
    targets = _resampling_weights(len(plan.targets), resamples, rng)
    draws = {
        1: np.ones((resamples, 1)),
        (count := len(plan.subsets[RANDOM][0])): _resampling_weights(count, resamples, rng),
    }
    means = {name: MeanChanges.of(values, targets, draws[values.shape[2]]) for name, values in own.items()}
    elsewhere = {name: MeanChanges.of(values, targets, draws[values.shape[2]]) for name, values in others.items()}

    def effect(at: int, name: str) -> RemovalEffect:
        other = elsewhere.get(name)
        compared = plan.controls if name in plan.methods else ()
        return RemovalEffect(
            name,
            plan.fractions[at],
            plan.counts[at],
            own=means[name].interval(at, confidence),
            others=None if other is None else other.interval(at, confidence),
            specific=None if other is None else (means[name] - other).interval(at, confidence),
            against={control: (means[name] - means[control]).interval(at, confidence) for control in compared},
        )

    names = (*plan.methods, *plan.controls)
    return RemovalResult(
        plan,
        effects=tuple(effect(at, name) for at in range(len(plan.fractions)) for name in names),
        changes={name: own[name].mean(axis=2) for name in names},
        notes=tuple(_notes(plan)),
        confidence=confidence,
        _means=means,
    )


def _outputs_of_plan(plan: RemovalPlan, masks: ArrayLike, outputs: ArrayLike) -> np.ndarray:
    """Find the outputs of the plan's subsets, in its order, `(s, m)`."""
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
            "Expected all of `plan.masks`, the first of which is the whole training set. Train on those, too."
        )
    return np.stack([values[of_subset].mean(axis=0) for of_subset in found])


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


def _notes(plan: RemovalPlan) -> list[str]:
    notes = []
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
        tied = [(count, number) for count, number in zip(plan.counts, of_fractions, strict=True) if number]
        if tied:
            counted = ", ".join(f"{number} of {len(plan.targets)} targets at {count} rows" for count, number in tied)
            notes.append(
                f"{name} has rows of equal scores on both sides of the cut ({counted}). They were drawn at random."
            )
    return notes
