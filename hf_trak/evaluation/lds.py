"""The linear datamodeling score (TRAK paper, arXiv 2303.14186, Section 2, Definition 2.3)."""

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError


def linear_datamodeling_score(scores: ArrayLike, masks: ArrayLike, outputs: ArrayLike) -> np.ndarray:
    """How well scores predict what retraining on subsets does to each target.

    For subsets S_1 … S_s of the training set and target j: Spearman's rank correlation, over the subsets, of the
    measured output f(z_j; θ*(S)) with the predicted one, Σ_{i ∈ S} τ_{ij}.

    Args:
        scores: τ, `(n, m)`, of any attribution method, higher meaning more helpful.
        masks: `(s, n)`, true where a training row belongs to the subset.
        outputs: `(s, m)`, the model output on every target after training on each subset (an average of several such
            trainings has less noise).

    Returns:
        `(m,)`: the score of each target, in [-1, 1]; 0 where the predictions or the outputs are constant. The mean
        over targets is what the paper reports.

    Raises:
        ImportError: scipy is not installed.
        ValueError: shapes do not fit, or there are fewer than three subsets.
        NonFiniteError: a score or an output is NaN or infinite.
    """
    try:
        from scipy.stats import rankdata
    except ImportError as error:
        raise ImportError(
            "`linear_datamodeling_score` needs scipy. Install it with `pip install hf_trak[evaluation]`."
        ) from error
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
    predicted = rankdata(member @ tau, axis=0)
    actual = rankdata(measured, axis=0)
    predicted -= predicted.mean(axis=0)
    actual -= actual.mean(axis=0)
    norms = np.linalg.norm(predicted, axis=0) * np.linalg.norm(actual, axis=0)
    return np.divide((predicted * actual).sum(axis=0), norms, out=np.zeros_like(norms), where=norms > 0)
