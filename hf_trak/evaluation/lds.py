"""The linear datamodeling score (TRAK paper, arXiv 2303.14186, Section 2, Definition 2.3)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.correlation import spearman
from hf_trak.evaluation.intervals import RESAMPLES, Interval, check_interval, quantile_interval


@dataclass(frozen=True)
class LdsResult:
    """Linear datamodeling scores of m targets, with intervals.

    Attributes:
        per_target (`np.ndarray` of shape `(m,)`):
            Spearman's correlation of each target over the subsets.
        low (`np.ndarray` of shape `(m,)`):
            Lower ends of the intervals, from resampled subsets.
        high (`np.ndarray` of shape `(m,)`):
            Upper ends of the intervals.
        mean (`Interval`):
            The mean over targets, which the paper reports. Its interval comes from resampling subsets and targets: the
            same retrained models serve all targets, so that resampling targets alone would understate it.
    """

    per_target: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: Interval

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        columns = {name: getattr(self, name).tolist() for name in ("per_target", "low", "high")}
        return {"mean": self.mean.to_dict(), **columns}


def linear_datamodeling_score(scores: ArrayLike, masks: ArrayLike, outputs: ArrayLike) -> np.ndarray:
    """Compute the linear datamodeling score of each target.

    For subsets S_1 … S_s of the training set and target j, this is Spearman's rank correlation, over the subsets, of
    the measured output f(z_j; θ*(S)) with the predicted one, Σ_{i ∈ S} τ_{ij}.

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            Scores τ of any attribution method; higher means more helpful.
        masks (`ArrayLike` of shape `(s, n)`):
            True where a training row belongs to the subset.
        outputs (`ArrayLike` of shape `(s, m)`):
            The model output on every target after training on each subset. An average of several such trainings has
            less noise.

    Returns:
        `np.ndarray` of shape `(m,)`: the score of each target, in [-1, 1]; 0 where the predictions or the outputs are
        constant. The paper reports the mean over targets.

    Raises:
        ImportError: scipy is not installed.
        ValueError: shapes do not fit, or there are fewer than three subsets.
        NonFiniteError: a score or an output is NaN or infinite.
    """
    return spearman(*predicted_and_measured(scores, masks, outputs))


def evaluate_lds(
    scores: ArrayLike,
    masks: ArrayLike,
    outputs: ArrayLike,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> LdsResult:
    """Compute the linear datamodeling score with bootstrap confidence intervals.

    Subsets and targets are resampled independently of each other (Owen 2007, The pigeonhole bootstrap).

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            See [`linear_datamodeling_score`].
        masks (`ArrayLike` of shape `(s, n)`):
            See [`linear_datamodeling_score`].
        outputs (`ArrayLike` of shape `(s, m)`):
            See [`linear_datamodeling_score`].
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level of the intervals.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples. Each takes as long as the score itself without the product of masks and
            scores.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`LdsResult`]: the scores and their intervals.

    Raises:
        ImportError: scipy is not installed.
        ValueError: shapes do not fit, there are fewer than three subsets, or `confidence` or `resamples` is out of
            range.
        NonFiniteError: a score or an output is NaN or infinite.
    """
    check_interval(confidence, resamples)
    predicted, measured = predicted_and_measured(scores, masks, outputs)
    per_target = spearman(predicted, measured)
    values, means = resampled_lds(predicted, measured, resamples, seed)
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(values, ends, axis=0)
    mean_low, mean_high = np.quantile(means, ends)
    mean = Interval(float(per_target.mean()), float(mean_low), float(mean_high), confidence)
    return LdsResult(per_target, low, high, mean)


def compare_lds(
    first: ArrayLike,
    second: ArrayLike,
    masks: ArrayLike,
    outputs: ArrayLike,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Compute the mean score of `first` minus that of `second`, with its bootstrap interval.

    Both use the same resampled subsets and targets, so that the interval of the difference is narrower than those of
    the two scores suggest. If 0 is outside it, the difference is no accident of the subsets and targets.

    Args:
        first (`ArrayLike` of shape `(n, m)`):
            Scores of one attribution method.
        second (`ArrayLike` of shape `(n, m)`):
            Scores of another one for the same targets.
        masks (`ArrayLike` of shape `(s, n)`):
            See [`linear_datamodeling_score`].
        outputs (`ArrayLike` of shape `(s, m)`):
            See [`linear_datamodeling_score`].
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level of the interval.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`Interval`]: the difference and its interval.

    Raises:
        ImportError, ValueError, NonFiniteError: see [`evaluate_lds`].
    """
    check_interval(confidence, resamples)
    both = [predicted_and_measured(scores, masks, outputs) for scores in (first, second)]
    value = float(spearman(*both[0]).mean() - spearman(*both[1]).mean())
    one, other = (resampled_lds(*each, resamples, seed)[1] for each in both)
    return quantile_interval(value, one - other, confidence)


def resampled_lds(
    predicted: np.ndarray, measured: np.ndarray, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute linear datamodeling scores of bootstrap samples, which are the same ones for the same seed and shape.

    Args:
        predicted: sums of scores over each subset, `(s, m)`.
        measured: outputs of the retrained models, `(s, m)`.
        resamples: number of bootstrap samples.
        seed: seed of the bootstrap.

    Returns:
        Scores over resampled subsets, `(resamples, m)`, and means over resampled targets, `(resamples,)`.
    """
    rng = np.random.default_rng(seed)
    s, m = predicted.shape
    values, means = np.empty((resamples, m)), np.empty(resamples)
    for index in range(resamples):
        subsets = rng.integers(0, s, s)
        values[index] = spearman(predicted[subsets], measured[subsets])
        means[index] = values[index, rng.integers(0, m, m)].mean()
    return values, means


def predicted_and_measured(scores: ArrayLike, masks: ArrayLike, outputs: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Compute Σ_{i ∈ S} τ_{ij}, and check f(z_j; θ*(S)); both are `(s, m)`, float64.

    Args:
        scores: scores τ, `(n, m)`.
        masks: subsets S, `(s, n)`.
        outputs: outputs f, `(s, m)`.

    Raises:
        ValueError: shapes do not fit, or there are fewer than three subsets.
        NonFiniteError: a score or an output is NaN or infinite.
    """
    tau = np.asarray(scores, dtype=np.float64)
    member = np.asarray(masks, dtype=np.float64)
    measured = np.asarray(outputs, dtype=np.float64)
    if tau.ndim != 2 or member.shape[1:] != tau.shape[:1] or measured.shape != (len(member), tau.shape[1]):
        raise ValueError(
            f"`scores` has the shape {tau.shape}, `masks` {member.shape}, `outputs` {measured.shape}. Expected (n, "
            "m), (s, n) and (s, m)."
        )
    if len(member) < 3:
        raise ValueError(f"{len(member)} subsets were given. Expected at least 3, better 50 or more.")
    for name, values in (("scores", tau), ("outputs", measured)):
        if not np.isfinite(values).all():
            raise NonFiniteError(f"`{name}` holds NaN or infinite values. Expected finite ones.")
    return member @ tau, measured
