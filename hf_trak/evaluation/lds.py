"""The linear datamodeling score (TRAK paper, arXiv 2303.14186, Section 2, Definition 2.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.evaluation.intervals import (
    ENDS,
    RESAMPLES,
    Interval,
    Result,
    check_resamples,
    checked_finite,
    checked_matrix,
    checked_numbers,
    checked_scores,
    group_sums,
    mean_interval,
    pearson,
    quantile_interval,
    spearman,
)
from hf_trak.evaluation.retraining import check_masks
from hf_trak.scores.groups import RowGroups


@dataclass(frozen=True)
class LdsResult(Result):
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
    scores: ArrayLike, masks: ArrayLike, outputs: ArrayLike, resamples: int = RESAMPLES, seed: int = 0
) -> LdsResult:
    """Compute the linear datamodeling score with bootstrap intervals.

    Subsets and targets are resampled independently of each other (Owen 2007, The pigeonhole bootstrap).

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            See [`linear_datamodeling_score`].
        masks (`ArrayLike` of shape `(s, n)`):
            See [`linear_datamodeling_score`].
        outputs (`ArrayLike` of shape `(s, m)`):
            See [`linear_datamodeling_score`].
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples. Each takes as long as the score itself without the product of masks and
            scores.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`LdsResult`]: the scores and their intervals.

    Raises:
        ImportError: scipy is not installed.
        ValueError: shapes do not fit, there are fewer than three subsets, or `resamples` is out of range.
        NonFiniteError: a score or an output is NaN or infinite.
    """
    check_resamples(resamples)
    predicted, measured = predicted_and_measured(scores, masks, outputs)
    per_target = spearman(predicted, measured)
    values, means = resampled_lds(predicted, measured, resamples, seed)
    low, high = np.quantile(values, ENDS, axis=0)
    return LdsResult(per_target, low, high, quantile_interval(per_target.mean(), means))


def compare_lds(
    first: ArrayLike,
    second: ArrayLike,
    masks: ArrayLike,
    outputs: ArrayLike,
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
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`Interval`]: the difference and its interval.

    Raises:
        ImportError, ValueError, NonFiniteError: see [`evaluate_lds`].
    """
    check_resamples(resamples)
    both = [predicted_and_measured(scores, masks, outputs) for scores in (first, second)]
    value = float(spearman(*both[0]).mean() - spearman(*both[1]).mean())
    one, other = (resampled_lds(*each, resamples, seed)[1] for each in both)
    return quantile_interval(value, one - other)


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
    tau, member, measured = _checked(scores, np.asarray(masks, dtype=np.float64), outputs)
    if len(member) < 3:
        raise ValueError(f"{len(member)} subsets were given. Expected at least 3, better 50 or more.")
    return member @ tau, measured


def _checked(scores: ArrayLike, member: np.ndarray, outputs: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scores `(n, m)`, subsets `(s, n)` and outputs `(s, m)`, if they fit and are finite."""
    tau, measured = np.asarray(scores, dtype=np.float64), np.asarray(outputs, dtype=np.float64)
    if tau.ndim != 2 or member.shape[1:] != tau.shape[:1] or measured.shape != (len(member), tau.shape[1]):
        raise ValueError(
            f"`scores` has the shape {tau.shape}, `masks` {member.shape}, `outputs` {measured.shape}. Expected (n, "
            "m), (s, n) and (s, m)."
        )
    return checked_finite(tau, "scores"), member, checked_finite(measured, "outputs")


@dataclass(frozen=True)
class LeaveOneOutResult(Result):
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
    tau, member, measured = _checked(scores, check_masks(masks), outputs)
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
    found = pearson(predicted, effects), spearman(predicted, effects)
    means = [mean_interval(values, resamples) for values in found]
    return LeaveOneOutResult(*found, means[0], means[1], effects)


@dataclass(frozen=True)
class TopKPrecision(Result):
    """Shares of the true first k rows that are among the first k by score. `print(result)` shows the means.

    Attributes:
        per_target (`dict[int, np.ndarray]`):
            By k, the share for each target, `(m,)`.
        mean (`dict[int, Interval]`):
            By k, the mean over targets, with its bootstrap interval over targets.
        chance (`dict[int, float]`):
            By k, the expected share for random scores: k / rows.
        rows (`int`):
            Number of rows that were ranked.
    """

    per_target: dict[int, np.ndarray]
    mean: dict[int, Interval]
    chance: dict[int, float]
    rows: int

    def __str__(self) -> str:
        return "\n".join(f"top {k} of {self.rows}: {self.mean[k]}, chance {self.chance[k]:.3f}" for k in self.mean)


def top_k_precision(
    scores: ArrayLike,
    truth: ArrayLike,
    k: Sequence[int] = (10, 100),
    *,
    rows: Sequence[int] | None = None,
    shape: tuple[int, int] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> TopKPrecision:
    """Compute the share of the k rows of the highest true effects that are among the k rows of the highest scores.

    Rows of equal values at the cut count with the probability that a random order would put them among the first k,
    drawn for scores and truth independently. So the result depends on no order of rows, nothing is drawn, and constant
    scores have exactly the precision of chance.

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            Scores τ of any attribution method; higher means more helpful.
        truth (`ArrayLike` of shape `(n, m)`):
            True effects: f(all rows) − f(without the row) by retraining, such as `outputs[0] - outputs[1:]` of
            [`leave_one_out_subsets`], or exact influences. With `rows`, of these alone, `(len(rows), m)`.
        k (`Sequence[int]`, *optional*, defaults to `(10, 100)`):
            Numbers of first rows, each smaller than the number of rows.
        rows (`Sequence[int]`, *optional*):
            Numbers of the rows that were left out, in the order of `truth`. Only these are ranked, for scores and
            truth. By default all.
        shape (`tuple[int, int]`, *optional*):
            The numbers of training rows and targets. By default those of `scores`, which then must have no more
            targets than training rows.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`TopKPrecision`]: the shares, their means, and the level of chance.

    Raises:
        ImportError: scipy is not installed.
        ValueError: shapes do not fit or look transposed, a row does not exist or occurs twice, or a number is out of
            range.
        NonFiniteError: a score or an effect is NaN or infinite.
    """
    tau = checked_scores(scores, "scores", shape)
    chosen = checked_numbers(range(len(tau)) if rows is None else rows, "rows", 0, len(tau) - 1)
    effects = checked_matrix(truth, "truth", (len(chosen), tau.shape[1]))
    tau = tau[chosen]
    n = len(tau)
    sizes = checked_numbers(k, "k", 1, n - 1, f" for {n} rows")
    shares = {size: (membership(tau, size) * membership(effects, size)).sum(axis=0) / size for size in sizes}
    means = {size: mean_interval(values, resamples, seed) for size, values in shares.items()}
    return TopKPrecision(per_target=shares, mean=means, chance={size: size / n for size in shares}, rows=n)


def membership(values: np.ndarray, k: int) -> np.ndarray:
    """Compute the probability of each row to be among the first k of its column, ties in random order, `(n, m)`."""
    cut = -np.partition(-values, k - 1, axis=0)[k - 1]
    above, tied = values > cut, values == cut
    return above + tied * ((k - above.sum(axis=0)) / tied.sum(axis=0))
