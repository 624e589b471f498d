"""Agreement of repeated trainings, and with it the highest score that any attribution method could reach.

Outputs of retrained models are measurements with noise: another seed, or on a GPU the same seed once more, gives other
outputs. With R repeats of every subset, the repeats are split into halves, and the correlation r of the halves' means
over the subsets tells the reliability of one half. By the Spearman–Brown formula (Spearman 1910; Brown 1910) the mean
of k times as many repeats has the reliability

    ρ_k = k r / (1 + (k - 1) r),

and no prediction, not even the expected output itself, correlates with the measured mean by more than √ρ in
expectation (correction for attenuation, Spearman 1904). That is the ceiling of the linear datamodeling score.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.evaluation.intervals import (
    RESAMPLES,
    Interval,
    Result,
    check_resamples,
    checked_finite,
    quantile_interval,
    spearman,
)

_SPLITS = 100


@dataclass(frozen=True)
class Reliability(Result):
    """Agreement of repeated trainings of the same subsets.

    Attributes:
        repeats: R, trainings of each subset.
        noise: `(m,)`, standard deviation of a target's output between repeats of the same subset.
        signal: `(m,)`, standard deviation of the expected output between subsets.
        one: `(m,)`, reliability of a single training of each subset, in [0, 1].
        mean: `(m,)`, reliability of the mean of all R.
        ceiling: expected score of a perfect prediction of the mean of all R, averaged over targets, with an interval
            from resampled subsets and targets.
        ceiling_of_one: the same for single trainings.
    """

    repeats: int
    noise: np.ndarray
    signal: np.ndarray
    one: np.ndarray
    mean: np.ndarray
    ceiling: Interval
    ceiling_of_one: Interval


def measure_reliability(outputs: ArrayLike, resamples: int = RESAMPLES, seed: int = 0) -> Reliability:
    """Measure how well repeated trainings agree, and the highest linear datamodeling score that is possible.

    Args:
        outputs (`np.ndarray`):
            `(R, s, m)`: outputs of R ≥ 2 trainings of each of s subsets on m targets, see [`repeated_outputs`].
        resamples (`int`, *optional*, defaults to 1000):
            Bootstrap samples of subsets and targets.
        seed (`int`, *optional*, defaults to 0):
            Seed of the splits and of the bootstrap.

    Raises:
        ImportError: scipy is not installed.
        ValueError: there are fewer than 2 repeats or 3 subsets.
        NonFiniteError: an output is NaN or infinite.
    """
    check_resamples(resamples)
    values = checked_finite(outputs, "outputs")
    if values.ndim != 3 or len(values) < 2 or values.shape[1] < 3 or values.shape[2] < 1:
        raise ValueError(
            f"`outputs` has the shape {values.shape}. Expected (R, s, m) with at least 2 repeats, 3 subsets and 1 "
            "target."
        )
    repeats, s, m = values.shape
    rng = np.random.default_rng(seed)
    halves = [_halves(repeats, rng) for _ in range(1 if repeats == 2 else _SPLITS)]
    half = _half_reliability(values, halves)
    size = repeats // 2  # trainings in each half
    one, mean = _stepped(half, 1 / size), _stepped(half, repeats / size)
    ends = np.empty((2, resamples))
    few = halves[:5]  # a bootstrap sample needs no more precision than the sampling itself has
    for index in range(resamples):
        chosen, targets = rng.integers(0, s, s), rng.integers(0, m, m)
        found = _half_reliability(values[:, chosen][:, :, targets], few)
        ends[:, index] = [np.sqrt(_stepped(found, times / size)).mean() for times in (repeats, 1)]
    ceilings = [
        quantile_interval(np.sqrt(found).mean(), sample) for found, sample in zip((mean, one), ends, strict=True)
    ]
    noise = values.var(axis=0, ddof=1).mean(axis=0)
    signal = np.maximum(values.mean(axis=0).var(axis=0, ddof=1) - noise / repeats, 0.0)
    return Reliability(repeats, np.sqrt(noise), np.sqrt(signal), one, mean, *ceilings)


def _halves(repeats: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Divide the repeats into two halves of equal size; an odd one is left out."""
    order = rng.permutation(repeats)
    return order[: repeats // 2], order[repeats // 2 : 2 * (repeats // 2)]


def _half_reliability(values: np.ndarray, halves: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Correlate the means of two halves by their ranks over the subsets, averaged over splits: `(m,)`, in [0, 1]."""
    found = [spearman(values[one].mean(axis=0), values[other].mean(axis=0)) for one, other in halves]
    return np.clip(np.mean(found, axis=0), 0.0, 1.0)


def _stepped(reliability: np.ndarray, times: float) -> np.ndarray:
    """Compute the reliability of the mean of `times` as many trainings, by the Spearman–Brown formula."""
    return times * reliability / (1 + (times - 1) * reliability)
