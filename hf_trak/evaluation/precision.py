"""Precision of the first rows: how many of the rows that truly matter most are among the first by score.

Precision at k (Manning, Raghavan & Schütze 2008, Introduction to Information Retrieval, Section 8.4). The k rows of
the highest true effects are relevant: as many as are asked for, so that precision is recall, too.
The truth is exact where retraining without single rows is affordable, or has a closed form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.evaluation.intervals import RESAMPLES, Interval, mean_interval
from hf_trak.evaluation.score_matrix import checked_matrix, checked_scores
from hf_trak.runtime.checks import is_int


@dataclass(frozen=True)
class TopKPrecision:
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

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values, with k as text."""
        return {
            "rows": self.rows,
            "mean": {str(k): interval.to_dict() for k, interval in self.mean.items()},
            "chance": {str(k): share for k, share in self.chance.items()},
            "per_target": {str(k): shares.tolist() for k, shares in self.per_target.items()},
        }

    def __str__(self) -> str:
        return "\n".join(f"top {k} of {self.rows}: {self.mean[k]}, chance {self.chance[k]:.3f}" for k in self.mean)


def top_k_precision(
    scores: ArrayLike,
    truth: ArrayLike,
    k: Sequence[int] = (10, 100),
    *,
    rows: Sequence[int] | None = None,
    shape: tuple[int, int] | None = None,
    confidence: float = 0.95,
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
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level of the interval over targets.
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
    chosen = list(range(len(tau)) if rows is None else rows)
    if not chosen or not all(is_int(i, 0, len(tau) - 1) for i in chosen) or len(set(chosen)) != len(chosen):
        raise ValueError(f"`rows` is {chosen}. Expected distinct numbers from 0 to {len(tau) - 1}.")
    effects = checked_matrix(truth, "truth", (len(chosen), tau.shape[1]))
    tau = tau[chosen]
    n = len(tau)
    sizes = list(k)
    if not sizes or not all(is_int(size, 1, n - 1) for size in sizes) or len(set(sizes)) != len(sizes):
        raise ValueError(f"`k` is {sizes} for {n} rows. Expected distinct numbers from 1 to {n - 1}.")
    shares = {int(size): (_membership(tau, size) * _membership(effects, size)).sum(axis=0) / size for size in sizes}
    return TopKPrecision(
        per_target=shares,
        mean={size: mean_interval(values, confidence, resamples, seed) for size, values in shares.items()},
        chance={size: size / n for size in shares},
        rows=n,
    )


def _membership(values: np.ndarray, k: int) -> np.ndarray:
    """Compute the probability of each row to be among the first k of its column, ties in random order, `(n, m)`."""
    cut = -np.partition(-values, k - 1, axis=0)[k - 1]
    above, tied = values > cut, values == cut
    return above + tied * ((k - above.sum(axis=0)) / tied.sum(axis=0))
