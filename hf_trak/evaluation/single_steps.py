"""One small training step on each of several rows, and what it does to targets.

[`~hf_trak.evaluation.tail_patch`] takes a step on a set of rows, and this module on one row after the other, with the
same learning rate and the same rule for an effect. Steps on random rows tell how much a change is worth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_trak.evaluation.tail_patch import SPREADS, checked_inputs, drawn, rows_at_hand, trial_steps
from hf_trak.evaluation.trial_steps import learning_rate
from hf_trak.featurize.featurized import FeaturizedModel

DRAWS, _LEAST_DRAWS = 16, 4
"""Random rows to compare with, and how many other rows there must be."""


@dataclass(frozen=True)
class RowSteps:
    """Changes of the outputs of m targets by a step on one training row. Changes are means over checkpoints.

    Attributes:
        rows: the rows.
        changes: by a step on each of them, `(rows, m)`.
        random: by a step on each of some random rows, `(draws, m)`; none if other rows are too few.
        rounding: a change that may be rounding alone.
    """

    rows: tuple[int, ...]
    changes: np.ndarray
    random: np.ndarray
    rounding: float

    @property
    def has_effect(self) -> np.ndarray:
        """Tell whether a row moves a target by more than random rows do, `(rows, m)`."""
        if not len(self.random):
            return np.zeros(self.changes.shape, dtype=bool)
        spread = np.maximum(self.random.std(axis=0, ddof=1), self.rounding)
        far = np.abs(self.changes - self.random.mean(axis=0)) > SPREADS * spread
        return far & ((self.changes > self.random.max(axis=0)) | (self.changes < self.random.min(axis=0)))


def step_on_each(model: FeaturizedModel, targets: Any, rows: Sequence[int]) -> RowSteps:
    """Take a step on each row alone, and measure what it does to every target.

    Args:
        model: the model and its training rows. All processes call this together, and the main process computes.
        targets: a dataset of m rows.
        rows: distinct numbers of training rows.

    Returns:
        [`RowSteps`].

    Raises:
        As [`~hf_trak.TrakAttributor.verify`].
    """
    n = checked_inputs(model)
    others = np.setdiff1d(np.arange(n), rows)
    model.processes.broadcast_from_main(model.prepare_store)
    draws = min(DRAWS, len(others)) if len(others) >= _LEAST_DRAWS else 0
    compared = drawn(np.random.default_rng(model.args.seed), others, draws)
    at_hand = rows_at_hand(model, [*rows, *compared])

    def measured() -> list[tuple[np.ndarray, float]]:
        found = []
        for model_id in model.store.model_ids or [0]:
            with trial_steps(model, model_id, {}, at_hand, targets) as steps:
                rate = learning_rate(steps, [steps.direction([row]) for row in (rows[0], *compared[:1])])
                changes = [steps.change(steps.direction([row]), rate) for row in (*rows, *compared)]
                found.append((np.stack(changes), steps.rounding))
        return found

    found = model.processes.broadcast_from_main(measured)
    changes = np.mean([one for one, _ in found], axis=0)
    return RowSteps(tuple(rows), changes[: len(rows)], changes[len(rows) :], max(one for _, one in found))
