"""Rows in groups: the mean of targets, and the sum over training rows, by the values of a column.

Scores are linear in the target. With t̄_g = (1 / |g|) Σ_{j ∈ g} t_j, for every training row i

    (1 / |g|) Σ_{j ∈ g} τ_ij = (mean_c x_ci A_c t̄_gᵀ) · mean_c q_ci,        A_c = (X_cᵀX_c + λ_c I)⁻¹

because q belongs to the training row alone (TRAK paper, Section 3.4). So the mean of an evaluation set costs as much
as one target, and is exact.
"""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset as HFDataset
from torch import Tensor

from hf_trak.scores.scored_dataset import ScoreBlock

GroupBy = str | Sequence[Any]
"""The name of a column of a `datasets.Dataset`, or one value per row."""

COUNT_COLUMN = "n_targets"
"""Number of targets in a group, beside the group's value."""


class RowGroups:
    """The division of rows 0 … n into groups: row i is in group `member[i]`, and group g has `sizes[g]` rows.

    Groups are in ascending order of their values, rows without a value (`None`) last.
    """

    def __init__(self, values: Sequence[Any], column: str = "group", table: HFDataset | None = None) -> None:
        """See [`~RowGroups.of`] and [`~RowGroups.whole`].

        Args:
            values: the value of every row.
            column: what the values are called.
            table: the dataset that has this column, whose feature type is kept.

        Raises:
            TypeError: a value cannot be compared for equality (a list, an image).
            ValueError: a value is NaN, which equals nothing, or there are no rows.
        """
        if len(values) == 0:
            raise ValueError(f"The groups of {column!r} have no rows. Expected one value for each row of a dataset.")
        first: dict[Any, int] = {}
        for row, value in enumerate(values):
            if not isinstance(value, Hashable):
                raise TypeError(
                    f"Row {row} of {column!r} is a {type(value).__name__}. Expected values that can form groups: "
                    "numbers, strings, booleans or `None`."
                )
            if value != value:
                raise ValueError(f"Row {row} of {column!r} is NaN, which equals nothing. Expected values, or `None`.")
            first.setdefault(value, row)
        self.column = column
        self.values = _ascending(first)
        numbers = {value: number for number, value in enumerate(self.values)}
        self.member = torch.tensor([numbers[value] for value in values])
        self.sizes = torch.bincount(self.member, minlength=len(self.values))
        self._table = None if table is None else table.select([first[value] for value in self.values])

    @classmethod
    def of(cls, dataset: Any, by: GroupBy, what: str = "group_by") -> "RowGroups":
        """Groups of the rows of a dataset.

        Args:
            dataset: a map-style dataset.
            by: the name of one of its columns, or one value per row.
            what: the argument that `by` came from, for errors.

        Raises:
            ValueError: there is no such column, or not one value per row.
            TypeError: a column is named, but the dataset is no `datasets.Dataset`; or values cannot form groups.
        """
        if not isinstance(by, str):
            values = by.tolist() if isinstance(by, np.ndarray | Tensor) else list(by)
            if len(values) != len(dataset):
                raise ValueError(f"`{what}` has {len(values)} values for {len(dataset)} rows. Expected one for each.")
            return cls(values)
        if not isinstance(dataset, HFDataset):
            raise TypeError(
                f"`{what}` is the column {by!r}, but the dataset is a {type(dataset).__name__}, which has no columns. "
                f"Expected a `datasets.Dataset`; or pass one value per row as `{what}`."
            )
        if by not in dataset.column_names:
            raise ValueError(f"`{what}` is {by!r}. Expected one of the columns {dataset.column_names}.")
        table = dataset.with_format(None).select_columns([by])
        return cls(list(table[by]), by, table)

    @classmethod
    def whole(cls, n: int) -> "RowGroups":
        """All of n rows as one group, without a value."""
        groups = cls([None] * n)
        groups.column = ""
        return groups

    def __len__(self) -> int:
        """G, the number of groups."""
        return len(self.values)

    @property
    def tag(self) -> str:
        """12 hex digits that identify the division, for file names."""
        return hashlib.sha256(self.member.numpy().tobytes()).hexdigest()[:12]

    def means(self, parts: Iterable[tuple[int, Tensor]]) -> Tensor:
        """The mean row of every group.

        Args:
            parts: `(start, rows)` with the rows `start …` of a matrix (n, k), each of which comes once.

        Returns:
            `(G, k)`, float64.

        Raises:
            ValueError: `parts` is empty.
        """
        total: Tensor | None = None
        for start, rows in parts:
            if total is None:
                total = torch.zeros(len(self), rows.shape[1], dtype=torch.float64)
            total.index_add_(0, self.member[start : start + len(rows)], rows.to("cpu", torch.float64))
        if total is None:
            raise ValueError("No rows were given. Expected all rows of a matrix.")
        return total / self.sizes.unsqueeze(1)

    def sums(self, blocks: Iterable[ScoreBlock]) -> Tensor:
        """Sums of scores over groups of training rows: element (j, g) is Σ_{i ∈ g} τ_ij.

        What the group as a whole does to the output on target j, in the additive model behind TRAK (paper, Section 2).

        Args:
            blocks: `(start, stop, (stop - start, m))`.

        Returns:
            `(m, G)`, float64.

        Raises:
            ValueError: `blocks` is empty.
        """
        return self.means((start, block) for start, _, block in blocks).mul_(self.sizes.unsqueeze(1)).T.contiguous()

    def table(self) -> HFDataset:
        """One row per group: its value, under the name of the column (none for the whole), and [`COUNT_COLUMN`]."""
        counts = self.sizes.tolist()
        if self._table is not None:
            kept = self._table.remove_columns([COUNT_COLUMN]) if self.column == COUNT_COLUMN else self._table
            return kept.add_column(COUNT_COLUMN, counts)
        values = {self.column: self.values} if self.column else {}
        return HFDataset.from_dict({**values, COUNT_COLUMN: counts})


def _ascending(values: Iterable[Any]) -> list[Any]:
    """Sorted, `None` last; in the order given where values cannot be compared."""
    present = [value for value in values if value is not None]
    absent = [value for value in values if value is None]
    try:
        return sorted(present) + absent
    except TypeError:
        return present + absent


def target_groups(dataset: Any, aggregate: str | None = None, group_by: GroupBy | None = None) -> RowGroups | None:
    """The groups that `aggregate="mean"` or `group_by=` ask for, or `None` where targets stay single.

    Raises:
        ValueError: `aggregate` is unknown, and all of [`RowGroups.of`].
    """
    if aggregate not in (None, "mean"):
        raise ValueError(f"`aggregate` is {aggregate!r}. Expected 'mean', or `None` for single targets.")
    if group_by is not None:
        return RowGroups.of(dataset, group_by)
    return RowGroups.whole(len(dataset)) if aggregate else None
