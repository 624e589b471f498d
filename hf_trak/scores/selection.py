"""Which training rows to keep: the most helpful ones for an evaluation set, or those that harm none of it."""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from datasets import Dataset as HFDataset
from datasets import Features, List, Value
from torch import Tensor
from torch.utils.data import Subset

from hf_trak.scores.groups import GroupBy, RowGroups
from hf_trak.scores.scored_dataset import ScoreBlock

Criterion = Literal["most_helpful", "least_harmful"]
"""How the scores of a training row for several targets become one number: their mean, or their minimum."""

SELECTION_COLUMNS = ("trak_index", "trak_score")
"""Columns of a selected dataset: the row's number in the training dataset, and the number it is ranked by."""

GROUP_COLUMNS = ("trak_groups", "trak_group_scores", "trak_group_sizes")
"""Columns of scores by groups of training rows."""


def selection_size(n: int | float, available: int) -> int:
    """The number of rows that `n` asks for: itself, or that fraction of the available rows, rounded.

    Raises:
        ValueError: it is not a whole number from 1 to `available`, nor a fraction between 0 and 1.
    """
    if isinstance(n, float) and 0 < n < 1:
        return max(1, round(n * available))
    if isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= available:
        return n
    raise ValueError(
        f"`n` is {n!r}. Expected a number of training rows from 1 to {available}, or a fraction between 0 and 1."
    )


def row_scores(blocks: Iterable[ScoreBlock], n_train: int, criterion: Criterion) -> Tensor:
    """One number for each training row, `(n_train,)`, float32: the mean, or the minimum, of its scores.

    Args:
        blocks: `(start, stop, (stop - start, m))`, every row once.
        n_train: n.
        criterion: see [`Criterion`].
    """
    check_criterion(criterion)
    result = torch.empty(n_train)
    for start, stop, block in blocks:
        result[start:stop] = block.mean(dim=1) if criterion == "most_helpful" else block.min(dim=1).values
    return result


def check_criterion(criterion: str) -> None:
    """Raises `ValueError` unless it is a [`Criterion`]."""
    if criterion not in get_args(Criterion):
        raise ValueError(f"`criterion` is {criterion!r}. Expected one of {list(get_args(Criterion))}.")


def best_rows(scores: Tensor, n: int, strata: RowGroups | None = None) -> list[int]:
    """The n rows of the highest scores, best first; among equal ones the lower row comes first.

    Args:
        scores: `(n_train,)`.
        n: how many.
        strata: groups of training rows which are to keep their shares: each gives n · (its size / n_train) rows,
            rounded so that the sum is n (the largest remainders are rounded up).
    """
    order = scores.argsort(descending=True, stable=True)
    if strata is None:
        return order[:n].tolist()
    exact = strata.sizes.double() * n / strata.sizes.sum()
    quota = exact.floor().long()
    remainders = (exact - quota).argsort(descending=True, stable=True)
    quota[remainders[: n - int(quota.sum())]] += 1
    member = strata.member[order]
    taken = torch.zeros(len(order), dtype=torch.bool)
    for group, size in enumerate(quota.tolist()):
        taken[(member == group).nonzero().flatten()[:size]] = True
    return order[taken].tolist()


def selected(train_dataset: Any, rows: list[int], scores: Tensor) -> Any:
    """Those rows of the training dataset, with the columns [`SELECTION_COLUMNS`] if it is a `datasets.Dataset`.

    Any other dataset gives a `torch.utils.data.Subset`, whose `indices` are the rows.
    """
    if not isinstance(train_dataset, HFDataset):
        return Subset(train_dataset, rows)
    stale = [name for name in SELECTION_COLUMNS if name in train_dataset.column_names]
    wide = train_dataset.remove_columns(stale)
    kept = wide.format
    # The columns are added before rows are chosen: `add_column` after `select` would copy every chosen row.
    wide = wide.with_format(None)
    for name, values in zip(SELECTION_COLUMNS, (torch.arange(len(scores)), scores), strict=True):
        wide = wide.add_column(name, values.numpy())
    if kept["type"] is not None:  # a format or transform set on the dataset stays, over the new columns too
        columns = [*kept["columns"], *SELECTION_COLUMNS]
        wide = wide.with_format(kept["type"], columns, kept["output_all_columns"], **kept["format_kwargs"])
    return wide.select(rows)


def group_score_columns(sums: Tensor, groups: RowGroups) -> HFDataset:
    """Scores by groups of training rows as columns, every group in every row, in ascending order of values.

    Args:
        sums: `(m, G)`, see [`RowGroups.sums`].
        groups: the groups of training rows.

    Returns:
        m rows with [`GROUP_COLUMNS`]: `np.stack(result["trak_group_scores"])` is the matrix `(m, G)`.
    """
    table = groups.table()
    value = table.features[groups.column] if groups.column in table.column_names else Value("null")
    kinds = (value, Value("float32"), Value("int64"))
    m = len(sums)
    return HFDataset.from_dict(
        {
            GROUP_COLUMNS[0]: [groups.values] * m,
            GROUP_COLUMNS[1]: sums.float().tolist(),
            GROUP_COLUMNS[2]: [groups.sizes.tolist()] * m,
        },
        features=Features(
            {name: List(kind, length=len(groups)) for name, kind in zip(GROUP_COLUMNS, kinds, strict=True)}
        ),
    )


def check_strata(train_dataset: Any, stratify_by: GroupBy | None) -> RowGroups | None:
    """The groups of training rows that keep their shares, or `None`. Raises as [`RowGroups.of`]."""
    return None if stratify_by is None else RowGroups.of(train_dataset, stratify_by, "stratify_by")
