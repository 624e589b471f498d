"""Tail patches: one small training step on the rows that an attribution found, and what it does to the target.

A row is said to have made a model do something; then training on it once more must move the model further that way.
The step takes seconds where retraining takes hours, and starts from the final weights, so that it measures what rows
do to the model as it is (Chang et al. 2024, arXiv 2410.17413, Section 3). It takes controls to read: random rows move
the output, too, and so do rows that merely look like the target.

All sets of rows have the same size and the same learning rate. It is the largest of 1/1000, 1/4000, … of the norm of
the weights, over the largest gradient of a set, at which half a step moves the target half as far, within a tenth:
small enough that the change belongs to the rows and not to the curvature of the output, and large enough to be no
rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_trak.data.rows import row_count
from hf_trak.errors import IncompleteStoreError
from hf_trak.evaluation.intervals import Result
from hf_trak.evaluation.trial_steps import Similarity, TrialSteps, learning_rate, most_similar
from hf_trak.featurize.definition import Checkpoints, sources_of
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.reranking import fetched_rows, row_source
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.runtime.checks import checked_int, is_int
from hf_trak.weights.checkpoints import Checkpoint, loaded

SPREADS = 5.0

"""Threshold: an effect must exceed this many standard deviations of random rows, and every random draw.
Few rows have most of the effect on a target, so that sets of random rows are no normal distribution: with 3 instead of
5, `benchmarks/verify.py` sees an effect of 2 in 16 sets of random rows."""


@dataclass(frozen=True)
class PatchResult(Result):
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
        """Return the mean change by random rows."""
        return float(np.mean(self.random))

    @cached_property
    def spread(self) -> float:
        """Compute the standard deviation of the changes by random rows, which is no less than rounding."""
        return max(float(np.std(self.random, ddof=1)), self.rounding)

    @property
    def ratio(self) -> float:
        """Measure the distance of the change by the rows from the mean of random rows, in spreads."""
        return (self.change - self.random_mean) / self.spread

    @property
    def has_effect(self) -> bool:
        """Tell whether the rows move the output by more than random rows do, in either direction."""
        return abs(self.ratio) > SPREADS and not min(self.random) <= self.change <= max(self.random)

    @property
    def verdict(self) -> str:
        """Say what was found in a sentence or two."""
        low, high = min(self.random), max(self.random)
        if not self.has_effect:
            inside = low <= self.change <= high
            effect, beside = ("No effect", "inside") if inside else ("No clear effect", "outside")
            needed = "" if inside else f", and would have to be {SPREADS:g}"
            return (
                f"{effect}: training on these rows changes the target's output by {self.change:+.2g}, {beside} of "
                f"what random rows do ({low:+.2g} to {high:+.2g}; {abs(self.ratio):.1f} times their spread{needed}). "
                "Verify more rows at once, or those of a method that `recommend` has better figures for."
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
        return {**super().to_dict(), **{name: getattr(self, name) for name in derived}}

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


CANDIDATES = 1024

"""Training rows, drawn at random, among which the most similar ones are looked for."""


_LEAST_DRAWS = 4


def verify_rows(
    model: FeaturizedModel,
    target: Any,
    rows: Sequence[int],
    similar: Similarity | Sequence[int] | None = "embeddings",
    draws: int = 16,
    seed: int = 0,
    checkpoints: Checkpoints = None,
) -> PatchResult:
    """Measure what a training step on some rows does to a target, see [`~hf_trak.TrakAttributor.verify`].

    Args:
        model (`FeaturizedModel`):
            The model and its training rows. All processes call this together, and the main process computes.
        target, rows, similar, draws, seed, checkpoints:
            As there.

    Raises:
        As there.
    """
    if (m := row_count(target, "target")) != 1:
        raise ValueError(
            f"`target` has {m} rows. Expected a dataset of one row, whose answer is verified. Take one, as in "
            "`eval_dataset.select([0])`."
        )
    n = checked_inputs(model)
    found = checked_rows(rows, "rows", n)
    if 2 * len(found) > n:
        raise ValueError(
            f"`rows` has {len(found)} of the {n} training rows. Expected at most half of them, since as many "
            "rows are drawn at random to compare with. Pass the first rows of the attribution alone."
        )
    draws = checked_int(draws, "draws", _LEAST_DRAWS, type_error=ValueError)
    rng = np.random.default_rng(seed)
    others = np.setdiff1d(np.arange(n), found)
    # From all rows: of the others alone, those that half of the rows leave would be the same set in every draw.
    sets = {f"random {number}": drawn(rng, np.arange(n), len(found)) for number in range(draws)}
    candidates = drawn(rng, others, min(CANDIDATES, len(others)))
    if similar is not None and not isinstance(similar, str):
        sets["similar"] = checked_rows(similar, "similar", n)
    elif similar not in (None, "embeddings", "bm25"):
        raise ValueError(f"`similar` is {similar!r}. Expected 'embeddings', 'bm25', row numbers, or `None`.")
    model.processes.broadcast_from_main(model.prepare_store)
    known = model.store.model_ids
    chosen, sources = sources_of(checkpoints, known)
    ids = chosen or known or [0]
    wanted = similar if isinstance(similar, str) else None
    looked_at = [*found, *(row for one in sets.values() for row in one), *(candidates if wanted else ())]
    at_hand = rows_at_hand(model, looked_at)

    def measured() -> list[dict[str, Any]]:
        made = []
        for model_id in ids:
            with trial_steps(model, model_id, sources, at_hand, target) as steps:
                made.append(_measured(steps, {"found": found, **sets}, wanted, candidates))
        return made

    return PatchResult.of(n, found, model.processes.broadcast_from_main(measured), ids, similar, len(candidates))


def checked_rows(rows: Any, name: str, n: int) -> list[int]:
    """Return row numbers as plain integers.

    Raises:
        ValueError: they are no list of distinct numbers of training rows.
    """
    listed = list(rows) if hasattr(rows, "__iter__") and not isinstance(rows, str | Mapping) else None
    if not listed or not all(is_int(row) for row in listed):
        raise ValueError(
            f"`{name}` is {rows!r}. Expected a list of numbers of training rows, such as `scored[0]['trak_indices']`."
        )
    numbers = [int(row) for row in listed]
    outside = sorted({row for row in numbers if not 0 <= row < n})
    if outside or len(set(numbers)) < len(numbers):
        wrong = f"the row {outside[0]}" if outside else "a row twice"
        raise ValueError(f"`{name}` has {wrong}. Expected distinct numbers from 0 to {n - 1}, of the training rows.")
    return numbers


def checked_inputs(model: FeaturizedModel) -> int:
    """Check that rows and losses are at hand, and return the number of training rows.

    Args:
        model: the model and its training rows.

    Raises:
        IncompleteStoreError: the rows are not at hand.
        TypeError: the output of the task depends on more than one row and the weights.
    """
    if row_source(model) is None:
        raise IncompleteStoreError(
            "The training rows of the index are not at hand, and no dataset repo is recorded to fetch them from. "
            "Expected them, since a step is taken on them. Pass `train_dataset=` to `from_pretrained`."
        )
    n = model.train_size
    task = model.task
    if not isinstance(task, BatchedModelOutput) or task.reference_rows(n):
        raise TypeError(
            f"The task is {type(task).__name__}. Expected one whose output follows from the weights and one row "
            "alone, since it is measured again after each step. Tasks with reference rows (CLIP), and those with the "
            "functional form alone, have no such output."
        )
    return n


def rows_at_hand(model: FeaturizedModel, numbers: Sequence[int]) -> Any:
    """Return the training dataset; fetch the given rows first if it is remote.

    Args:
        model: the model and its training rows.
        numbers: the rows that are read.
    """
    source = row_source(model)
    return fetched_rows(model, source, numbers) if getattr(source, "remote", False) else source


def drawn(rng: np.random.Generator, rows: np.ndarray, count: int) -> list[int]:
    """Draw distinct rows, in ascending order.

    Args:
        rng: draws them.
        rows: row numbers.
        count: how many to draw.
    """
    return sorted(int(row) for row in rng.choice(rows, count, replace=False))


def _measured(
    steps: TrialSteps, sets: dict[str, Sequence[int]], similar: Similarity | None, candidates: Sequence[int]
) -> dict[str, Any]:
    """Compute the changes of the target's output under one checkpoint, by set of rows, as plain JSON."""
    found = sets["found"]
    if similar is not None:
        sets["similar"] = most_similar(steps, similar, candidates, len(found))
    rate = learning_rate(steps, [steps.direction(sets[name]) for name in ("found", "random 0")])
    return {
        "output": float(steps.start_output[0]),
        "changes": {name: float(steps.change(steps.direction(one), rate)[0]) for name, one in sets.items()},
        "half": float(steps.change(steps.direction(found), rate / 2)[0]),
        "rate": rate,
        "rounding": steps.rounding,
        "similar_rows": list(sets.get("similar", ())),
    }


@contextmanager
def trial_steps(
    model: FeaturizedModel, model_id: int, sources: Mapping[int, Checkpoint | None], rows: Any, targets: Any
) -> Iterator[TrialSteps]:
    """Load the weights of a checkpoint, and take small steps in this block.

    Args:
        model: the model and its training rows.
        model_id: the checkpoint.
        sources: weights that are given, by id.
        rows: the training rows, by their numbers.
        targets: a dataset.
    """
    with _weights(model, model_id, sources):
        featurizer = model.featurizer()
        featurizer.prepare_task(model_id, model.args.batch_size)
        train_task = ExactScores(model).train_task
        train_task.bind(model.model)
        assert isinstance(train_task, BatchedModelOutput)
        with TrialSteps(featurizer, train_task, rows, targets, model.layout.names).opened() as steps:
            yield steps


def _weights(
    model: FeaturizedModel, model_id: int, sources: Mapping[int, Checkpoint | None]
) -> AbstractContextManager[Any]:
    """Load the weights of a featurized checkpoint, or those given where nothing is featurized."""
    if model.store.model_ids:
        return model.weights(model_id, model.source_of(model_id, sources))
    dtype = None if model.args.model_dtype is None else getattr(torch, model.args.model_dtype)
    return loaded(model.model, sources.get(model_id), dtype)
