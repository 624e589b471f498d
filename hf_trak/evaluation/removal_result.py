"""The results of removals: mean changes by method and control, differences between them, and a table.

See `removal_effects.py`, which computes them.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hf_trak.evaluation.intervals import Interval, quantile_interval
from hf_trak.evaluation.tail_removal import RemovalPlan


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
