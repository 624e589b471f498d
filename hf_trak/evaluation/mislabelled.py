"""Finding mislabelled examples: how far up they come when rows are ranked by self-influence.

A row with a wrong label is one that little else supports, and that the model can fit only by itself (Koh & Liang 2017,
arXiv 1703.04730, Section 5.4). Known wrong labels, planted by [`with_wrong_labels`], measure how well that works.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.intervals import RESAMPLES, Interval, check_interval


@dataclass(frozen=True)
class MislabelledResult:
    """How well a ranking finds the mislabelled rows.

    Attributes:
        auc: area under the ROC curve, 0.5 for a ranking by chance, with its bootstrap interval (mislabelled and other
            rows resampled separately).
        average_precision: area under the curve of precision over recall; the share of mislabelled rows by chance.
        precision_at: k → part of the first k rows that is mislabelled.
        mislabelled: number of mislabelled rows.
        rows: number of rows.
    """

    auc: Interval
    average_precision: float
    precision_at: dict[int, float]
    mislabelled: int
    rows: int


def mislabel_detection(
    self_influence: ArrayLike,
    mislabelled: ArrayLike,
    ks: Sequence[int] | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> MislabelledResult:
    """How well the highest scores find the mislabelled rows.

    Args:
        self_influence: `(n,)`, for example of `TrakAttributor.self_influence()`; highest for the most suspect.
        mislabelled: `(n,)`, true for rows with a wrong label.
        ks: numbers of rows that somebody would look through; by default the number of mislabelled rows.
        confidence, resamples, seed: of the bootstrap.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: shapes do not fit, all or no rows are mislabelled, or a number is out of range.
        NonFiniteError: a score is NaN or infinite.
    """
    try:
        from sklearn.metrics import average_precision_score, roc_auc_score
    except ImportError as error:
        raise ImportError(
            "`mislabel_detection` needs scikit-learn. Install it with `pip install scikit-learn`."
        ) from error
    check_interval(confidence, resamples)
    values = np.asarray(self_influence, dtype=np.float64)
    wrong = np.asarray(mislabelled, dtype=bool)
    if values.ndim != 1 or wrong.shape != values.shape:
        raise ValueError(
            f"`self_influence` has the shape {values.shape}, `mislabelled` {wrong.shape}. Expected (n,) for both."
        )
    if not np.isfinite(values).all():
        raise NonFiniteError("`self_influence` holds NaN or infinite values. Expected finite ones.")
    if not 0 < wrong.sum() < len(wrong):
        raise ValueError(
            f"{int(wrong.sum())} of {len(wrong)} rows are mislabelled. Expected some, and some that are not."
        )
    chosen = [int(wrong.sum())] if ks is None else [int(k) for k in ks]
    if not all(1 <= k <= len(values) for k in chosen):
        raise ValueError(f"`ks` is {chosen}. Expected numbers from 1 to {len(values)}.")
    rng = np.random.default_rng(seed)
    positive, negative = np.flatnonzero(wrong), np.flatnonzero(~wrong)
    found = []
    for _ in range(resamples):
        rows = np.concatenate([rng.choice(part, len(part)) for part in (positive, negative)])
        found.append(roc_auc_score(wrong[rows], values[rows]))
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    ranked = wrong[np.argsort(-values, kind="stable")]
    return MislabelledResult(
        auc=Interval(float(roc_auc_score(wrong, values)), float(low), float(high), confidence),
        average_precision=float(average_precision_score(wrong, values)),
        precision_at={k: float(ranked[:k].mean()) for k in chosen},
        mislabelled=int(wrong.sum()),
        rows=len(values),
    )


def with_wrong_labels(
    dataset: Dataset, fraction: float, label_column: str = "labels", seed: int = 0
) -> tuple[Dataset, np.ndarray]:
    """A copy of a dataset in which some rows have another of the labels that occur, drawn evenly.

    Args:
        dataset: the rows.
        fraction: the part of the rows that is changed, rounded.
        label_column: the column of labels.
        seed: of the choice.

    Returns:
        The dataset, and `(n,)` booleans: true for the rows that were changed.

    Raises:
        ValueError: there is no such column or only one label, or the fraction leaves no row changed or unchanged.
    """
    if label_column not in dataset.column_names:
        raise ValueError(f"`label_column` is {label_column!r}. Expected one of {dataset.column_names}.")
    labels: list[Any] = list(dataset.with_format(None)[label_column])
    kinds = sorted(set(labels))
    count = round(fraction * len(labels))
    if len(kinds) < 2 or not 0 < count < len(labels):
        raise ValueError(
            f"`fraction` {fraction!r} changes {count} of {len(labels)} rows with {len(kinds)} labels. Expected some "
            "rows, not all, and at least two labels."
        )
    rng = np.random.default_rng(seed)
    changed = np.zeros(len(labels), dtype=bool)
    changed[rng.permutation(len(labels))[:count]] = True
    for row in np.flatnonzero(changed):
        others = [kind for kind in kinds if kind != labels[row]]
        labels[row] = others[rng.integers(len(others))]
    feature = dataset.features[label_column]
    place = dataset.column_names
    replaced = dataset.remove_columns([label_column]).add_column(label_column, labels, feature=feature)
    return replaced.select_columns(place), changed
