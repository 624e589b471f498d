"""Rank correlation of many columns at once."""

import numpy as np

from hf_trak.evaluation.intervals import scipy_stats


def spearman(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's correlation of the columns of two matrices `(s, m)`; 0 where a column is constant. Shape `(m,)`."""
    stats = scipy_stats()
    one, other = stats.rankdata(first, axis=0), stats.rankdata(second, axis=0)
    one -= one.mean(axis=0)
    other -= other.mean(axis=0)
    norms = np.linalg.norm(one, axis=0) * np.linalg.norm(other, axis=0)
    return np.divide((one * other).sum(axis=0), norms, out=np.zeros_like(norms), where=norms > 0)
