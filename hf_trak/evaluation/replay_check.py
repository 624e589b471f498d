"""One retraining without some rows, beside what scores predict for it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.evaluation.intervals import scipy_stats, spearman
from hf_trak.evaluation.trainer_retraining import TrainerRetraining


@dataclass(frozen=True)
class ReplayCheck:
    """The change of every target by leaving rows out, predicted and measured.

    Attributes:
        dropped (`np.ndarray`): numbers of the rows that were left out, ascending.
        predicted (`np.ndarray` of shape `(m,)`): minus the sum of their scores.
        measured (`np.ndarray` of shape `(m,)`): outputs after the retraining minus those of the model.
    """

    dropped: np.ndarray
    predicted: np.ndarray
    measured: np.ndarray

    @property
    def r_squared(self) -> float:
        """Return the share of the measured changes, from zero, that the predicted ones explain; at most 1."""
        return float(1 - np.square(self.measured - self.predicted).sum() / np.square(self.measured).sum())

    @property
    def rank_correlation(self) -> float:
        """Return Spearman's correlation over the targets; 0 for a single one."""
        return float(spearman(self.predicted[:, None], self.measured[:, None])[0])

    def __str__(self) -> str:
        return (
            f"without {len(self.dropped)} rows: R² = {self.r_squared:.3f}, rank correlation "
            f"{self.rank_correlation:.3f} over {len(self.measured)} targets"
        )


def check_by_retraining(
    scores: ArrayLike, outputs: ArrayLike, retraining: TrainerRetraining, share: float, seed: int = 0
) -> ReplayCheck:
    """Train again without a random share of the rows.

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            Scores whose sums are changes of outputs, as those of a replay.
        outputs (`ArrayLike` of shape `(m,)`):
            The outputs of the model on the targets.
        retraining (`TrainerRetraining`):
            Trains on the whole dataset with some rows masked.
        share (`float`):
            The share of the rows to leave out, in (0, 1).
        seed (`int`, *optional*, defaults to 0):
            Seed of their choice.

    Returns:
        [`ReplayCheck`].

    Raises:
        ValueError: `share` leaves out no row, or all of them.
        ImportError: scipy is not installed.
    """
    scipy_stats()  # needed at the end, and nothing is trained in vain
    table = np.asarray(scores, dtype=np.float64)
    n, count = len(table), round(share * len(table))
    if not 0 < count < n:
        raise ValueError(f"`share` is {share!r}, which leaves out {count} of {n} rows. Expected some, and not all.")
    order = np.random.Generator(np.random.Philox(seed)).permutation(n)
    dropped, kept = np.sort(order[:count]), np.sort(order[count:])
    measured = retraining(kept, seed) - np.asarray(outputs)
    return ReplayCheck(dropped, -table[dropped].sum(0), measured)
