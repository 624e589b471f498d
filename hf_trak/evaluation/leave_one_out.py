"""Correlation of scores with the measured effects of leaving out one row (or one group); for small problems."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.intervals import RESAMPLES, Interval, mean_interval, scipy_stats
from hf_trak.evaluation.retraining import check_masks
from hf_trak.evaluation.subsets import group_sums
from hf_trak.scores.groups import RowGroups


@dataclass(frozen=True)
class LeaveOneOutResult:
    """Correlations of scores with measured effects, over the rows that were left out.

    Attributes:
        pearson (`np.ndarray` of shape `(m,)`):
            Pearson's correlation for each target; 0 where scores or effects are constant.
        spearman (`np.ndarray` of shape `(m,)`):
            Spearman's correlation for each target; 0 where scores or effects are constant.
        mean_pearson (`Interval`):
            Mean of `pearson` over targets, with its bootstrap interval over targets.
        mean_spearman (`Interval`):
            Mean of `spearman` over targets, with its bootstrap interval over targets.
        effects (`np.ndarray` of shape `(rows, m)`):
            f(all rows) − f(without the row).
    """

    pearson: np.ndarray
    spearman: np.ndarray
    mean_pearson: Interval
    mean_spearman: Interval
    effects: np.ndarray


def leave_one_out_correlation(
    scores: ArrayLike,
    masks: ArrayLike,
    outputs: ArrayLike,
    groups: RowGroups | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> LeaveOneOutResult:
    """Correlate τ_ij with f(z_j; θ*(S)) − f(z_j; θ*(S ∖ {i})) over the rows i that were left out.

    The effect of one row is small compared with that of the random seed of a training: average `outputs` over many
    repeats, or train convex models.

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            Scores τ of any attribution method.
        masks (`ArrayLike` of shape `(1 + rows, n)`):
            The subsets of [`leave_one_out_subsets`]: all rows, then all but one row or one group.
        outputs (`ArrayLike` of shape `(1 + rows, m)`):
            The model output on every target after training on each subset.
        groups (`RowGroups`, *optional*):
            The groups that were left out, if groups were. The sums of their scores are compared.
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level of the intervals.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.

    Returns:
        [`LeaveOneOutResult`]: the correlations.

    Raises:
        ImportError: scipy is not installed.
        ValueError: shapes do not fit, the masks are not those of [`leave_one_out_subsets`], or fewer than three rows
            were left out.
        NonFiniteError: a score or output is NaN or infinite.
    """
    stats = scipy_stats()
    tau, measured = np.asarray(scores, dtype=np.float64), np.asarray(outputs, dtype=np.float64)
    member = check_masks(masks)
    if tau.ndim != 2 or member.shape[1] != len(tau) or measured.shape != (len(member), tau.shape[1]):
        raise ValueError(
            f"`scores` has the shape {tau.shape}, `masks` {member.shape}, `outputs` {measured.shape}. Expected (n, "
            "m), (1 + rows, n) and (1 + rows, m)."
        )
    for name, values in (("scores", tau), ("outputs", measured)):
        if not np.isfinite(values).all():
            raise NonFiniteError(f"`{name}` holds NaN or infinite values. Expected finite ones.")
    division = RowGroups(list(range(len(tau)))) if groups is None else groups
    units = group_sums(tau, division)
    left_out = [np.unique(division.member.numpy()[~mask]) for mask in member[1:]]
    whole = [int((~mask).sum()) for mask in member[1:]]
    single = all(len(out) == 1 and size == division.sizes[out[0]] for out, size in zip(left_out, whole, strict=True))
    if not member[0].all() or not single:
        raise ValueError(
            "`masks` are not those of `leave_one_out_subsets`. Expected all rows first, then all but one row, or all "
            "but one of `groups`."
        )
    if len(left_out) < 3:
        raise ValueError(f"{len(left_out)} rows were left out. Expected at least 3.")
    predicted = units[np.concatenate(left_out)]
    effects = measured[0] - measured[1:]
    pearson = _pearson(predicted, effects)
    spearman = _pearson(stats.rankdata(predicted, axis=0), stats.rankdata(effects, axis=0))
    means = [mean_interval(values, confidence, resamples) for values in (pearson, spearman)]
    return LeaveOneOutResult(pearson, spearman, means[0], means[1], effects)


def _pearson(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson's correlation of each pair of columns; 0 where one of them is constant."""
    one, other = first - first.mean(axis=0), second - second.mean(axis=0)
    norms = np.linalg.norm(one, axis=0) * np.linalg.norm(other, axis=0)
    return np.divide((one * other).sum(axis=0), norms, out=np.zeros_like(norms), where=norms > 0)
