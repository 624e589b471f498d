"""`PatchResult`: what a small training step on some rows did to a target's output, beside what other rows did."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

SPREADS = 5.0
"""An effect is farther than so many standard deviations from the mean of random rows, and beyond each draw of them.
Few rows have most of the effect on a target, so that sets of random rows are no normal distribution: with 3 instead of
5, `recipes/benchmarks/verify.py` sees an effect of 2 in 16 sets of random rows."""


@dataclass(frozen=True)
class PatchResult:
    """The change of a target's output by one small training step on each of several sets of rows of one size.

    Changes are means over checkpoints.

    Attributes:
        rows (`tuple[int, ...]`):
            The rows that are verified.
        train_rows (`int`):
            Number of training rows.
        model_ids (`tuple[int, ...]`):
            The checkpoints.
        output (`float`):
            The target's output before a step.
        change (`float`):
            Its change by a step on the rows.
        random (`tuple[float, ...]`):
            Its changes by steps on as many random rows, one for each draw.
        similar (`float`, *optional*):
            Its change by a step on as many rows that look like the target.
        similar_rows (`tuple[int, ...]`):
            These rows, of the last checkpoint.
        similar_by (`str`):
            How they were found.
        learning_rates (`tuple[float, ...]`):
            Size of the step of each checkpoint, in which the gradient of the mean loss of the rows is multiplied.
        linearity (`float`):
            Twice the change by half a step, over that of the step; 1 where the step is small.
        rounding (`float`):
            A change that may be rounding alone.
    """

    rows: tuple[int, ...]
    train_rows: int
    model_ids: tuple[int, ...]
    output: float
    change: float
    random: tuple[float, ...]
    similar: float | None
    similar_rows: tuple[int, ...]
    similar_by: str
    learning_rates: tuple[float, ...]
    linearity: float
    rounding: float

    @classmethod
    def of(
        cls,
        n: int,
        rows: Sequence[int],
        measured: Sequence[Mapping[str, Any]],
        model_ids: Sequence[int],
        similar: Any,
        candidates: int,
    ) -> "PatchResult":
        """Average over checkpoints.

        Args:
            n: number of training rows.
            rows: the rows that are verified.
            measured: of each checkpoint, what was measured.
            model_ids: the checkpoints.
            similar: how similar rows were chosen.
            candidates: number of rows among which they were looked for.
        """
        names = measured[0]["changes"]
        changes = {name: float(np.mean([one["changes"][name] for one in measured])) for name in names}
        half, change = float(np.mean([one["half"] for one in measured])), changes["found"]
        among = "all other rows" if candidates == n - len(rows) else f"{candidates:,} random rows"
        by = "" if similar is None else f"{similar}, among {among}" if isinstance(similar, str) else "given rows"
        return cls(
            tuple(rows),
            n,
            tuple(model_ids),
            float(np.mean([one["output"] for one in measured])),
            change,
            tuple(value for name, value in changes.items() if name.startswith("random")),
            changes.get("similar"),
            tuple(measured[-1]["similar_rows"]),
            by,
            tuple(one["rate"] for one in measured),
            2 * half / change if change else 1.0,
            max(one["rounding"] for one in measured),
        )

    @property
    def random_mean(self) -> float:
        """Mean change by random rows."""
        return float(np.mean(self.random))

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the changes by random rows, and no less than rounding."""
        return max(float(np.std(self.random, ddof=1)), self.rounding)

    @property
    def ratio(self) -> float:
        """How many spreads the change by the rows is away from the mean of random rows."""
        return (self.change - self.random_mean) / self.spread

    @property
    def has_effect(self) -> bool:
        """Whether the rows move the output by more than random rows do, in either direction."""
        return abs(self.ratio) > SPREADS and not min(self.random) <= self.change <= max(self.random)

    @property
    def verdict(self) -> str:
        """What was found, in a sentence or two."""
        low, high = min(self.random), max(self.random)
        if not self.has_effect:
            return (
                f"No effect: training on these rows changes the target's output by {self.change:+.2g}, which is not "
                f"more than random rows do ({low:+.2g} to {high:+.2g}; {abs(self.ratio):.1f} times their spread)."
            )
        word = "raises" if self.change > 0 else "lowers"
        text = (
            f"Training on these rows {word} the target's output by {abs(self.change):.2g}: {abs(self.ratio):.1f} "
            f"times the spread of random rows ({low:+.2g} to {high:+.2g})."
        )
        if self.similar is None:
            return text
        if (self.similar - self.random_mean) * np.sign(self.ratio) >= abs(self.change - self.random_mean):
            return f"{text} Similar rows do as much ({self.similar:+.2g}): resemblance alone explains it."
        return f"{text} Similar rows change it by {self.similar:+.2g}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        derived = ("random_mean", "spread", "ratio", "has_effect", "verdict")
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {**plain, **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        """Say what was found, and show the changes beside each other."""
        lines = [
            self.verdict,
            "",
            f"output before the step       {self.output:+.4g}",
            f"change by {len(self.rows):>3} rows verified  {self.change:+.4g}",
            f"          {len(self.rows):>3} random rows    {self.random_mean:+.4g} ± {self.spread:.2g}  "
            f"({len(self.random)} draws)",
        ]
        if self.similar is not None:
            lines.append(f"          {len(self.rows):>3} similar rows   {self.similar:+.4g}  ({self.similar_by})")
        rates = ", ".join(f"{rate:.2g}" for rate in self.learning_rates)
        lines.append(f"learning rate {rates}; half a step goes {self.linearity / 2:.0%} of the way")
        return "\n".join(lines)
