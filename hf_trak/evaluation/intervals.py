"""Confidence intervals by the bootstrap (Efron & Tibshirani 1993, Chapter 13: percentiles)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError
from hf_trak.runtime.checks import checked_int

RESAMPLES = 1000
"""Default number of bootstrap samples."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        value (`float`):
            The estimate.
        low (`float`):
            Lower end of the interval.
        high (`float`):
            Upper end of the interval.
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.95

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_dict(self) -> dict[str, float]:
        """Return the attributes as plain JSON values."""
        return {"value": self.value, "low": self.low, "high": self.high, "confidence": self.confidence}


def scipy_stats() -> Any:
    """Import `scipy.stats`.

    Raises:
        ImportError: scipy is not installed; the message says how to install it.
    """
    try:
        import scipy.stats
    except ImportError as error:
        raise ImportError(
            "`hf_trak.evaluation` needs scipy. Install it with `pip install hf_trak[evaluation]`."
        ) from error
    return scipy.stats


def mean_interval(values: ArrayLike, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Compute the mean of independent values and its bootstrap interval.

    Args:
        values (`ArrayLike` of shape `(count,)`):
            The values.
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level: the share of such intervals that contain the true mean.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples, at least 10.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`Interval`]: the mean and its interval.

    Raises:
        ImportError: scipy is not installed.
        ValueError: there is no value, or `confidence` or `resamples` is out of range.
        NonFiniteError: a value is NaN or infinite.
    """
    sample = np.asarray(values, dtype=np.float64)
    check_interval(confidence, resamples)
    if sample.ndim != 1 or len(sample) == 0:
        raise ValueError(f"`values` has the shape {sample.shape}. Expected one dimension, and at least one value.")
    if not np.isfinite(sample).all():
        raise NonFiniteError("`values` holds NaN or infinite values. Expected finite ones.")
    mean = float(sample.mean())
    if np.ptp(sample) == 0:
        return Interval(mean, mean, mean, confidence)
    found = scipy_stats().bootstrap(
        (sample,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        batch=100,
        random_state=np.random.default_rng(seed),
    )
    return Interval(mean, float(found.confidence_interval.low), float(found.confidence_interval.high), confidence)


def quantile_interval(value: float, resampled: np.ndarray, confidence: float) -> Interval:
    """Return a value with the quantiles of its bootstrap samples.

    Args:
        value: the estimate.
        resampled: the estimates of the bootstrap samples, `(resamples,)`.
        confidence: confidence level.
    """
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(value), float(low), float(high), confidence)


def check_interval(confidence: float, resamples: int) -> None:
    """Check the arguments of a bootstrap.

    Raises:
        ValueError: `confidence` is not between 0 and 1, or `resamples` is not an integer of at least 10.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` is {confidence!r}. Expected a number between 0 and 1, such as 0.95.")
    checked_int(resamples, "resamples", 10, remedy="Use 1000 or more for a stable interval.", type_error=ValueError)
