"""Selection of training rows by their scores for an evaluation set."""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from datasets import Dataset as HFDataset
from datasets import Features, List, Value
from torch import Tensor
from torch.utils.data import Subset

from hf_trak.runtime.checks import is_int
from hf_trak.runtime.progress import with_column
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.scored_dataset import ScoreBlock

Criterion = Literal["most_helpful", "least_harmful"]
"""How training rows are ranked: by the mean of their scores over all targets (`"most_helpful"`), or by the minimum
(`"least_harmful"`)."""

SELECTION_COLUMNS = ("trak_index", "trak_score")
"""Columns of a selected dataset: the row's index in the training dataset, and the score by which it is ranked."""

GROUP_COLUMNS = ("trak_groups", "trak_group_scores", "trak_group_sizes")
"""Columns of scores by groups of training rows."""


def selection_size(n: int | float, available: int) -> int:
    """Convert the argument `n` of `select` to a number of rows.

    Args:
        n (`int` or `float`):
            A number of rows, or a fraction of the available rows, which is rounded to at least one row.
        available (`int`):
            Number of training rows.

    Raises:
        ValueError: `n` is neither an integer from 1 to `available` nor a fraction between 0 and 1.
    """
    if isinstance(n, float) and 0 < n < 1:
        return max(1, round(n * available))
    if is_int(n, 1, available):
        return int(n)
    raise ValueError(
        f"`n` is {n!r}. Expected a number of training rows from 1 to {available}, or a fraction between 0 and 1."
    )


def row_scores(blocks: Iterable[ScoreBlock], n_train: int, criterion: Criterion) -> Tensor:
    """Reduce the scores of every training row over all targets to one number.

    Args:
        blocks (`Iterable[ScoreBlock]`):
            Scores `(start, stop, block)`, `block` of shape `(stop - start, m)`, with every row once.
        n_train (`int`):
            Number of training rows.
        criterion (`str`):
            `"most_helpful"` for the mean over the m targets, `"least_harmful"` for the minimum.

    Returns:
        `torch.Tensor` of shape `(n_train,)`, float32.
    """
    result = torch.empty(n_train)
    for start, stop, block in blocks:
        result[start:stop] = block.mean(dim=1) if criterion == "most_helpful" else block.min(dim=1).values
    return result


def check_criterion(criterion: str) -> None:
    """Check that `criterion` is a [`Criterion`].

    Raises:
        ValueError: it is not.
    """
    if criterion not in get_args(Criterion):
        raise ValueError(f"`criterion` is {criterion!r}. Expected one of {list(get_args(Criterion))}.")


def best_rows(scores: Tensor, n: int, strata: RowGroups | None = None) -> list[int]:
    """Find the n rows with the highest scores, best first. Among equal scores, the lower row comes first.

    Args:
        scores (`torch.Tensor` of shape `(n_train,)`):
            One score per training row.
        n (`int`):
            Number of rows to choose.
        strata (`RowGroups`, *optional*):
            Groups of training rows that keep their shares: group g gives n · sizes[g] / n_train rows, rounded by the
            method of largest remainders so that the sum is n.

    Returns:
        `list[int]`: the rows.
    """
    order = scores.argsort(descending=True, stable=True)
    if strata is None:
        return order[:n].tolist()
    # Largest remainders: round all quotas down, and give the rows that are left to the largest fractional parts.
    exact = strata.sizes.double() * n / strata.sizes.sum()
    quota = exact.floor().long()
    remainders = (exact - quota).argsort(descending=True, stable=True)
    quota[remainders[: n - int(quota.sum())]] += 1
    # From every group take as many of its best rows as its quota says; keep the overall order.
    member = strata.member[order]
    taken = torch.zeros(len(order), dtype=torch.bool)
    for group, size in enumerate(quota.tolist()):
        taken[(member == group).nonzero().flatten()[:size]] = True
    return order[taken].tolist()


def selected(train_dataset: Any, rows: list[int], scores: Tensor) -> Any:
    """Select rows of the training dataset.

    Args:
        train_dataset (`Dataset`):
            The training dataset.
        rows (`list[int]`):
            Indices of the rows.
        scores (`torch.Tensor` of shape `(n_train,)`):
            One score per training row.

    Returns:
        For a `datasets.Dataset` its rows, with its format and the columns [`SELECTION_COLUMNS`]. For any other
        dataset a `torch.utils.data.Subset`, whose `indices` are the rows.
    """
    if not isinstance(train_dataset, HFDataset):
        return Subset(train_dataset, rows)
    stale = [name for name in SELECTION_COLUMNS if name in train_dataset.column_names]
    wide = train_dataset.remove_columns(stale)
    kept = wide.format
    # Columns are added before rows are selected: `add_column` after `select` would copy every selected row.
    wide = wide.with_format(None)
    for name, values in zip(SELECTION_COLUMNS, (torch.arange(len(scores)), scores), strict=True):
        wide = with_column(wide, name, values.numpy())
    if kept["type"] is not None:  # keep the format or transform of the dataset, and extend it to the new columns
        columns = [*kept["columns"], *SELECTION_COLUMNS]
        wide = wide.with_format(kept["type"], columns, kept["output_all_columns"], **kept["format_kwargs"])
    return wide.select(rows)


def group_score_columns(sums: Tensor, groups: RowGroups) -> HFDataset:
    """Make columns of the scores of groups of training rows.

    Args:
        sums (`torch.Tensor` of shape `(m, G)`):
            Scores of the groups, see [`RowGroups.sums`].
        groups (`RowGroups`):
            The groups of training rows.

    Returns:
        `datasets.Dataset`: m rows with [`GROUP_COLUMNS`]. Every row lists all groups, in ascending order of their
        values, so that `np.stack(result["trak_group_scores"])` is the matrix `(m, G)`.
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
