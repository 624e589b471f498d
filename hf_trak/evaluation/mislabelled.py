"""Detection of mislabelled examples by their rank among all rows sorted by self-influence.

A row with a wrong label has little support from other rows, so that the model fits it by the influence of that row on
itself (Koh & Liang 2017, arXiv 1703.04730, Section 5.4). Known wrong labels, planted by [`with_wrong_labels`], measure
how well that works.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import ArrayLike

from hf_trak.evaluation.intervals import (
    RESAMPLES,
    Interval,
    Result,
    check_resamples,
    checked_finite,
    quantile_interval,
)
from hf_trak.evaluation.lds import membership
from hf_trak.modelout_functions.tokens import IGNORED
from hf_trak.runtime.checks import required
from hf_trak.runtime.progress import with_column

_REPLACED = "hf_trak_replaced"
"""Name of the new labels as long as the old ones are there: without any column a dataset has no rows."""


@dataclass(frozen=True)
class MislabelledResult(Result):
    """Measures of how well a ranking finds the mislabelled rows.

    Attributes:
        auc (`Interval`):
            Area under the ROC curve, 0.5 for a random ranking, with its bootstrap interval (mislabelled and other rows
            are resampled separately).
        average_precision (`float`):
            Area under the curve of precision over recall; for a random ranking about the share of mislabelled rows.
        precision_at (`dict[int, float]`):
            By k, the expected share of mislabelled rows among the first k, rows of equal scores in random order.
        mislabelled (`int`):
            Number of mislabelled rows.
        rows (`int`):
            Number of rows.
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
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> MislabelledResult:
    """Measure how well the highest scores find the mislabelled rows.

    Args:
        self_influence (`ArrayLike` of shape `(n,)`):
            Scores that are highest for the most suspect rows, for example those of `TrakAttributor.self_influence()`.
        mislabelled (`ArrayLike` of shape `(n,)`):
            True for rows with a wrong label.
        ks (`Sequence[int]`, *optional*):
            Numbers of rows that somebody would look through. By default the number of mislabelled rows.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`MislabelledResult`]: the measures.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: shapes do not fit, all or no rows are mislabelled, or a number is out of range.
        NonFiniteError: a score is NaN or infinite.
    """
    message = "`mislabel_detection` needs scikit-learn. Install it with `pip install scikit-learn`."
    metrics = required("sklearn.metrics", message)
    check_resamples(resamples)
    values = checked_finite(self_influence, "self_influence")
    wrong = np.asarray(mislabelled, dtype=bool)
    if values.ndim != 1 or wrong.shape != values.shape:
        raise ValueError(
            f"`self_influence` has the shape {values.shape}, `mislabelled` {wrong.shape}. Expected (n,) for both."
        )
    if not 0 < wrong.sum() < len(wrong):
        raise ValueError(
            f"{int(wrong.sum())} of {len(wrong)} rows are mislabelled. Expected at least one that is and one that is "
            "not."
        )
    chosen = [int(wrong.sum())] if ks is None else [int(k) for k in ks]
    if not all(1 <= k <= len(values) for k in chosen):
        raise ValueError(f"`ks` is {chosen}. Expected numbers from 1 to {len(values)}.")
    rng = np.random.default_rng(seed)
    positive, negative = np.flatnonzero(wrong), np.flatnonzero(~wrong)
    found = []
    for _ in range(resamples):
        rows = np.concatenate([rng.choice(part, len(part)) for part in (positive, negative)])
        found.append(metrics.roc_auc_score(wrong[rows], values[rows]))
    return MislabelledResult(
        auc=quantile_interval(metrics.roc_auc_score(wrong, values), np.array(found)),
        average_precision=float(metrics.average_precision_score(wrong, values)),
        precision_at={k: float(membership(values[:, None], k)[wrong].sum()) / k for k in chosen},
        mislabelled=int(wrong.sum()),
        rows=len(values),
    )


def _is_class(label: Any) -> bool:
    """Tell whether a label is one class: a text, or a whole number that no loss ignores."""
    whole = isinstance(label, int) or (isinstance(label, float) and label.is_integer())
    return isinstance(label, str) or (whole and label != IGNORED)


def with_wrong_labels(
    dataset: Dataset, fraction: float, label_column: str = "labels", seed: int = 0
) -> tuple[Dataset, np.ndarray]:
    """Copy a dataset, giving some rows another label, drawn uniformly from the other labels that occur.

    Args:
        dataset (`datasets.Dataset`):
            The rows.
        fraction (`float`):
            The share of the rows that is changed, rounded to whole rows.
        label_column (`str`, *optional*, defaults to `"labels"`):
            The column of labels.
        seed (`int`, *optional*, defaults to 0):
            Seed of the choice of rows and labels.

    Returns:
        `tuple[datasets.Dataset, np.ndarray]`: the copy, and booleans of shape `(n,)` that are true for changed rows.

    Raises:
        ValueError: the column does not exist, has no single label in every row, or only one label; or no row would be
            changed, or all would.
    """
    if label_column not in dataset.column_names:
        raise ValueError(f"`label_column` is {label_column!r}. Expected one of {dataset.column_names}.")
    labels: list[Any] = list(dataset.with_format(None)[label_column])
    odd = next((row for row, one in enumerate(labels) if not _is_class(one)), None)
    if odd is not None:
        raise ValueError(
            f"Row {odd} has {labels[odd]!r:.80} in `{label_column}`. Expected one class in every row, a number or a "
            "text. Leave out rows without a class."
        )
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
    place, feature = dataset.column_names, dataset.features[label_column]
    added = with_column(dataset, _REPLACED, labels, feature=feature).remove_columns([label_column])
    return added.rename_column(_REPLACED, label_column).select_columns(place), changed
