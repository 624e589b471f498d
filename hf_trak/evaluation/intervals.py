"""Confidence intervals by the bootstrap (Efron & Tibshirani 1993, Chapter 13: percentiles)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError
from hf_trak.runtime.checks import checked_int, is_int, required
from hf_trak.scores.groups import RowGroups

RESAMPLES = 1000
"""Default number of bootstrap samples."""

CONFIDENCE = 0.95
"""The share of intervals that contain the true value."""

ENDS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
"""The quantiles of bootstrap samples between which an interval lies."""


class Result:
    """A dataclass of results."""

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain JSON values; keys are texts."""
        content: Any = self
        return {name: _plain(value) for name, value in asdict(content).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Interval(Result):
    """An estimate with its interval, which contains the truth in 95 % of cases.

    Attributes:
        value (`float`):
            The estimate.
        low (`float`):
            Lower end of the interval.
        high (`float`):
            Upper end of the interval.
    """

    value: float
    low: float
    high: float

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def scipy_stats() -> Any:
    """Import `scipy.stats`. Raises `ImportError` if scipy is not installed."""
    return required("scipy.stats", "`hf_trak.evaluation` needs scipy. Install it with `pip install scipy`.")


def mean_interval(values: ArrayLike, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Compute the mean of independent values and its bootstrap interval.

    Args:
        values (`ArrayLike` of shape `(count,)`):
            The values.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples, at least 10.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`Interval`]: the mean and its interval.

    Raises:
        ImportError: scipy is not installed.
        ValueError: there is no value, or `resamples` is out of range.
        NonFiniteError: a value is NaN or infinite.
    """
    sample = checked_finite(values, "values")
    check_resamples(resamples)
    if sample.ndim != 1 or len(sample) == 0:
        raise ValueError(f"`values` has the shape {sample.shape}. Expected one dimension, and at least one value.")
    mean = float(sample.mean())
    if np.ptp(sample) == 0:
        return Interval(mean, mean, mean)
    found = scipy_stats().bootstrap(
        (sample,),
        np.mean,
        n_resamples=resamples,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        batch=100,
        random_state=np.random.default_rng(seed),
    )
    return Interval(mean, float(found.confidence_interval.low), float(found.confidence_interval.high))


def quantile_interval(value: float, resampled: np.ndarray) -> Interval:
    """Return a value with the quantiles of its bootstrap samples.

    Args:
        value: the estimate.
        resampled: the estimates of the bootstrap samples, `(resamples,)`.
    """
    low, high = np.quantile(resampled, ENDS)
    return Interval(float(value), float(low), float(high))


def check_resamples(resamples: int) -> None:
    """Check the number of bootstrap samples.

    Raises:
        ValueError: it is not an integer of at least 10.
    """
    checked_int(resamples, "resamples", 10, remedy="Use 1000 or more for a stable interval.", type_error=ValueError)


def spearman(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute Spearman's correlation of the columns of two matrices `(s, m)`, see [`pearson`]. Shape `(m,)`."""
    stats = scipy_stats()
    return pearson(stats.rankdata(first, axis=0), stats.rankdata(second, axis=0))


def pearson(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute Pearson's correlation of the columns of two matrices `(s, m)`; 0 where one is constant. Shape `(m,)`."""
    one, other = first - first.mean(axis=0), second - second.mean(axis=0)
    norms = np.linalg.norm(one, axis=0) * np.linalg.norm(other, axis=0)
    return np.divide((one * other).sum(axis=0), norms, out=np.zeros_like(norms), where=norms > 0)


def checked_finite(values: ArrayLike, name: str) -> np.ndarray:
    """Return an argument as float64.

    Args:
        values: the argument.
        name: its name in messages.

    Raises:
        NonFiniteError: a value is NaN or infinite.
    """
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise NonFiniteError(f"`{name}` holds NaN or infinite values. Expected finite ones.")
    return array


def checked_numbers(values: Iterable[Any], name: str, low: int, high: int, of: str = "") -> list[int]:
    """Return row or target numbers as plain integers.

    Args:
        values: the numbers.
        name: their name in messages.
        low: the least number.
        high: the greatest number.
        of: what follows their value in messages.

    Raises:
        ValueError: there are none, or they are no distinct integers in this range.
    """
    listed = list(values)
    if not listed or not all(is_int(value, low, high) for value in listed) or len(set(listed)) != len(listed):
        raise ValueError(f"`{name}` is {listed}{of}. Expected distinct numbers from {low} to {high}.")
    return [int(value) for value in listed]


def checked_matrix(values: ArrayLike, name: str, shape: tuple[int, int] | None = None) -> np.ndarray:
    """Return a matrix as float64.

    Args:
        values (`ArrayLike` of shape `(n, m)`):
            The matrix, training rows × targets.
        name (`str`):
            Its name in messages.
        shape (`tuple[int, int]`, *optional*):
            The shape `(n, m)` that it must have. By default any.

    Returns:
        `np.ndarray` of shape `(n, m)`, float64: the values.

    Raises:
        ValueError: the array has another shape, such as the transposed one.
        NonFiniteError: a value is NaN or infinite.
    """
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"`{name}` has the shape {matrix.shape}. Expected (training rows, targets).")
    if shape is not None and matrix.shape != shape:
        remedy = " It looks transposed: pass its `.T`." if matrix.shape == shape[::-1] else ""
        raise ValueError(f"`{name}` has the shape {matrix.shape}. Expected {shape}, training rows × targets.{remedy}")
    if not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0]
        raise NonFiniteError(
            f"`{name}` holds NaN or infinite values, the first for row {row} and target {column}. Expected finite "
            "ones."
        )
    return matrix


def checked_scores(values: ArrayLike, name: str, shape: tuple[int, int] | None = None) -> np.ndarray:
    """Return a matrix as float64; without a known shape it must not have more targets than training rows.

    More targets than training rows are most often a transposed matrix, which nothing else would show.

    Args:
        values (`ArrayLike` of shape `(n, m)`):
            The matrix, training rows × targets.
        name (`str`):
            Its name in messages.
        shape (`tuple[int, int]`, *optional*):
            The shape `(n, m)` that it must have, which the caller's argument `shape` gives.

    Returns:
        `np.ndarray` of shape `(n, m)`, float64: the values.

    Raises:
        ValueError: the array has another shape, or more columns than rows with no shape given.
        NonFiniteError: a value is NaN or infinite.
    """
    matrix = checked_matrix(values, name, shape)
    if shape is None and matrix.shape[0] < matrix.shape[1]:
        raise ValueError(
            f"`{name}` has the shape {matrix.shape}, fewer training rows than targets. Expected (training rows, "
            f"targets). It may be transposed: pass its `.T`, or `shape={matrix.shape}` if that is meant."
        )
    return matrix


def checked_matrices(
    named: Mapping[str, Mapping[str, ArrayLike]], shape: tuple[int, int] | None = None
) -> dict[str, np.ndarray]:
    """Return all matrices of some arguments, by their names, if they have one shape.

    Args:
        named (`Mapping[str, Mapping[str, ArrayLike]]`):
            By argument (`"scores"`, say), matrices `(n, m)` by name.
        shape (`tuple[int, int]`, *optional*):
            The shape `(n, m)`. By default that of the first matrix, see [`checked_scores`].

    Returns:
        `dict[str, np.ndarray]`: the matrices, float64.

    Raises:
        TypeError: an argument is no mapping.
        ValueError: a name is empty or given twice, there is no matrix, or shapes do not fit.
        NonFiniteError: a value is NaN or infinite.
    """
    found: dict[str, np.ndarray] = {}
    for argument, matrices in named.items():
        if not isinstance(matrices, Mapping):
            raise TypeError(
                f"`{argument}` is a {type(matrices).__name__}. Expected matrices by name, such as "
                f'`{argument}={{"trak": …}}`.'
            )
        for name, values in matrices.items():
            if not isinstance(name, str) or not name or name in found:
                raise ValueError(f"`{argument}` has the name {name!r}. Expected texts; each occurs once.")
            label = f"{argument}[{name!r}]"
            found[name] = matrix = checked_scores(values, label, shape)
            shape = (matrix.shape[0], matrix.shape[1])
    if not found:
        raise ValueError(f"{', '.join(f'`{name}`' for name in named)}: no matrix is given. Expected at least one.")
    return found


def random_subsets(
    n: int, count: int, fraction: float = 0.5, seed: int = 0, groups: RowGroups | None = None
) -> np.ndarray:
    """Draw random subsets of a fixed size (TRAK paper, Section 2: α · n rows, α = 1/2).

    Subset i depends on n, `fraction`, `seed` and i alone, so that a larger `count` keeps the first subsets.

    Args:
        n (`int`):
            Number of training rows.
        count (`int`):
            Number of subsets, s.
        fraction (`float`, *optional*, defaults to 0.5):
            The share α of the rows that each subset has, rounded to whole rows.
        seed (`int`, *optional*, defaults to 0):
            Seed of the subsets.
        groups (`RowGroups`, *optional*):
            Groups of rows that are in a subset together or not at all; `fraction` is then the share of the groups.

    Returns:
        `np.ndarray` of shape `(s, n)`: true where a training row belongs to the subset.

    Raises:
        ValueError: a number is out of range, or the subsets would be empty or have all rows.
    """
    if count < 1:
        raise ValueError(f"`count` is {count}. Expected at least 1.")
    units = _units(n, groups)
    size = round(fraction * units)
    if not 0 < size < units:
        raise ValueError(
            f"`fraction` is {fraction!r}, which is {size} of {units} {'rows' if groups is None else 'groups'}. "
            "Expected a number between 0 and 1 for which subsets have some of them, but not all."
        )
    masks = np.zeros((count, units), dtype=bool)
    for index in range(count):
        rng = np.random.Generator(np.random.Philox(key=[seed, index]))
        masks[index, rng.permutation(units)[:size]] = True
    return masks if groups is None else masks[:, groups.member.numpy()]


def leave_one_out_subsets(n: int, rows: Sequence[int] | None = None, groups: RowGroups | None = None) -> np.ndarray:
    """Make the subsets for leaving out one row or one group at a time; the whole training set comes first.

    Args:
        n (`int`):
            Number of training rows.
        rows (`Sequence[int]`, *optional*):
            The rows (or groups) to leave out, one at a time. By default all.
        groups (`RowGroups`, *optional*):
            Groups of rows that are left out together.

    Returns:
        `np.ndarray` of shape `(1 + number of rows or groups, n)`: true where a training row belongs to the subset.

    Raises:
        ValueError: a row or group does not exist, or is given twice.
    """
    units = _units(n, groups)
    chosen = list(range(units)) if rows is None else [int(row) for row in rows]
    if len(set(chosen)) != len(chosen) or not all(0 <= row < units for row in chosen):
        raise ValueError(f"`rows` is {chosen}. Expected distinct numbers from 0 to {units - 1}.")
    masks = np.ones((1 + len(chosen), units), dtype=bool)
    masks[np.arange(1, 1 + len(chosen)), chosen] = False
    return masks if groups is None else masks[:, groups.member.numpy()]


def group_sums(scores: ArrayLike, groups: RowGroups) -> np.ndarray:
    """Sum the scores of each group of training rows: Σ_{i ∈ g} τ_ij, the effect of the group in an additive model.

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            Scores τ of any attribution method.
        groups (`RowGroups`):
            G groups of the n rows.

    Returns:
        `np.ndarray` of shape `(G, m)`, float64: the scores of the groups.

    Raises:
        ValueError: `groups` has another number of rows than `scores`.
    """
    tau = np.asarray(scores, dtype=np.float64)
    sums = np.zeros((_units(len(tau), groups), *tau.shape[1:]))
    np.add.at(sums, groups.member.numpy(), tau)
    return sums


def _units(n: int, groups: RowGroups | None) -> int:
    """Count the rows, or the groups that they are divided into."""
    if groups is not None and len(groups.member) != n:
        raise ValueError(f"`groups` has {len(groups.member)} rows for {n} training rows. Expected one group for each.")
    return n if groups is None else len(groups)
