"""The linear datamodeling scores of several attribution methods on a bank, beside the highest possible ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import IncompleteStoreError
from hf_trak.evaluation.bank import Bank
from hf_trak.evaluation.intervals import (
    RESAMPLES,
    Interval,
    check_interval,
    checked_matrix,
    quantile_interval,
    spearman,
)
from hf_trak.evaluation.lds import predicted_and_measured, resampled_lds


@dataclass(frozen=True)
class BankScore:
    """The score of one method on one part of a bank.

    Attributes:
        part (`str`):
            Name of the part.
        method (`str`):
            Name of the method.
        lds (`Interval`):
            Linear datamodeling score, averaged over targets; the interval comes from resampled subsets and targets.
        difference (`Interval`, *optional*):
            This score minus that of the first method, on the same resamples; `None` for the first method.
        per_target (`np.ndarray` of shape `(m,)`):
            The score of each target.
        ceilings (`dict[str, Interval]`):
            The highest score that any method could reach, by the name of the part that repeats this one.
    """

    part: str
    method: str
    lds: Interval
    difference: Interval | None
    per_target: np.ndarray
    ceilings: dict[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain JSON values."""
        return {
            "part": self.part,
            "method": self.method,
            "lds": self.lds.to_dict(),
            "difference": None if self.difference is None else self.difference.to_dict(),
            "per_target": self.per_target.tolist(),
            "ceilings": {name: ceiling.to_dict() for name, ceiling in self.ceilings.items()},
        }


def evaluate_bank(
    bank: Bank,
    scores: Mapping[str, ArrayLike],
    *,
    parts: Sequence[str] | None = None,
    targets: Sequence[int] | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[BankScore]:
    """Compute the linear datamodeling score of each method on each part of a bank.

    All methods are judged on the same bootstrap samples, so that differences between them have intervals of their own.

    Args:
        bank ([`Bank`]):
            The bank.
        scores (`Mapping[str, ArrayLike]`):
            By the name of a method, its scores of shape `(n, m)`; higher means more helpful.
        parts (`Sequence[str]`, *optional*):
            Names of the parts. By default all that are complete and neither repeats nor removals.
        targets (`Sequence[int]`, *optional*):
            Numbers of the targets that are judged. By default all.
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level of the intervals.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        `list[BankScore]`: by part, then by method in the order of `scores`.

    Raises:
        ImportError: scipy is not installed.
        ValueError: scores have the wrong shape or orientation, there are none, a target does not exist, or a part has
            fewer than three subsets.
        NonFiniteError: a score is NaN or infinite.
        IncompleteStoreError: a part does not exist, trainings of it are missing, or no part is complete.
        StoreError: a file of the bank is damaged.
    """
    check_interval(confidence, resamples)
    if not scores:
        raise ValueError("`scores` is empty. Expected at least one method. Pass scores by the name of the method.")
    shape = (bank.n_train, bank.n_targets)
    checked = {name: checked_matrix(values, f"scores[{name!r}]", shape) for name, values in scores.items()}
    columns = np.arange(bank.n_targets) if targets is None else _checked_targets(bank, targets)
    found: list[BankScore] = []
    for name in judged_parts(bank) if parts is None else parts:
        part = bank.part(name)
        kinds = bank.reliability(name, confidence, resamples)
        ceilings = {other: kind.ceiling if other == name else kind.ceiling_of_one for other, kind in kinds.items()}
        first: tuple[float, np.ndarray] | None = None
        for method, values in checked.items():
            predicted, measured = predicted_and_measured(values[:, columns], part.masks, part.truth[:, columns])
            per_target = spearman(predicted, measured)
            value, means = float(per_target.mean()), resampled_lds(predicted, measured, resamples, seed)[1]
            difference = None
            if first is None:
                first = value, means
            else:
                difference = quantile_interval(value - first[0], means - first[1], confidence)
            lds = quantile_interval(value, means, confidence)
            found.append(BankScore(name, method, lds, difference, per_target, ceilings))
    return found


def judged_parts(bank: Bank) -> list[str]:
    """Return the names of the parts that scores are judged on: complete, and neither repeats nor removals.

    Args:
        bank ([`Bank`]):
            The bank.

    Raises:
        IncompleteStoreError: there is no such part.
        StoreError: a description is damaged.
    """
    described = {name: bank.description(name) for name in bank.parts}
    chosen = [name for name, part in described.items() if not part["repeat_of"] and part["removal"] is None]
    complete = [name for name in chosen if bank.is_complete(name)]
    if not complete:
        raise IncompleteStoreError(
            f"The bank {bank.directory} has no complete part to judge scores on; its parts are: "
            f"{', '.join(chosen) or 'none'}. Expected one whose trainings are all done. Add parts with "
            "`Bank.add_part`, and call `Bank.build`."
        )
    return complete


def _checked_targets(bank: Bank, targets: Sequence[int]) -> np.ndarray:
    chosen = np.asarray(targets)
    valid = chosen.ndim == 1 and len(chosen) and chosen.dtype.kind in "iu"
    if not valid or chosen.min() < 0 or chosen.max() >= bank.n_targets or len(set(chosen.tolist())) != len(chosen):
        raise ValueError(f"`targets` is {targets!r}. Expected distinct numbers from 0 to {bank.n_targets - 1}.")
    return chosen
