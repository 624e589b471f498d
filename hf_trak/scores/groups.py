"""Groups of rows: mean scores over groups of targets, and summed scores over groups of training rows.

Scores are linear in the features of the target. With the mean target t̄_g = (1 / |g|) Σ_{j ∈ g} t_j of group g, every
training row i satisfies

    (1 / |g|) Σ_{j ∈ g} τ_ij = (mean_c x_ci A_c t̄_cgᵀ) · mean_c q_ci,        A_c = (X_cᵀX_c + λ_c I)⁻¹

because q depends on the training row alone (TRAK paper, arXiv 2303.14186, Section 3.4). So the mean score over an
evaluation set is exact and costs as much as a single target.
"""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset as HFDataset
from torch import Tensor

from hf_trak.runtime.progress import with_column
from hf_trak.scores.scored_dataset import ScoreBlock
from hf_trak.store.shard_set import ShardSet

GroupBy = str | Sequence[Any]
"""How rows are grouped: by a column of a `datasets.Dataset`, given by name, or by one value per row."""

ALL = "all"
"""As `group_by`, one group of all targets."""

COUNT_COLUMN = "n_targets"
"""Column with the number of targets in each group."""


class RowGroups:
    """A partition of the rows 0 … n - 1 into groups, in ascending order of the groups' values, `None` last.

    Attributes:
        member (`torch.Tensor` of shape `(n,)`):
            The group of every row.
        sizes (`torch.Tensor` of shape `(G,)`):
            Number of rows in every group.
        values (`list`):
            The value of every group.
        column (`str`):
            Name of the values. Empty for [`~RowGroups.whole`].
    """

    def __init__(self, values: Sequence[Any], column: str = "group", table: HFDataset | None = None) -> None:
        """Group rows by their values. Use [`~RowGroups.of`] for a dataset, [`~RowGroups.whole`] for a single group.

        Args:
            values (`Sequence`):
                The value of every row.
            column (`str`, *optional*, defaults to `"group"`):
                Name of the values.
            table (`datasets.Dataset`, *optional*):
                A dataset with this column, whose feature type [`~RowGroups.table`] keeps.

        Raises:
            TypeError: a value is not hashable (a list, an image).
            ValueError: a value is NaN, which is equal to no value, or there are no rows.
        """
        if len(values) == 0:
            raise ValueError(f"`{column}` has no values. Expected one value for each row of a dataset.")
        first: dict[Any, int] = {}
        for row, value in enumerate(values):
            if not isinstance(value, Hashable):
                raise TypeError(
                    f"Row {row} of {column!r} is a {type(value).__name__}. Expected values that can form groups: "
                    "numbers, strings, booleans or `None`."
                )
            if value != value:
                raise ValueError(
                    f"Row {row} of {column!r} is NaN, which is equal to no value, not even itself. Expected a value "
                    "that forms groups. Use `None` for rows without one."
                )
            first.setdefault(value, row)
        self.column = column
        self.values = _ascending(first)
        numbers = {value: number for number, value in enumerate(self.values)}
        self.member = torch.tensor([numbers[value] for value in values])
        self.sizes = torch.bincount(self.member, minlength=len(self.values))
        self._table = None if table is None else table.select([first[value] for value in self.values])

    @classmethod
    def of(cls, dataset: Any, by: GroupBy, what: str = "group_by") -> "RowGroups":
        """Group the rows of a dataset.

        Args:
            dataset (`Dataset`):
                A map-style dataset.
            by (`str` or `Sequence`):
                The name of one of its columns, or one value per row.
            what (`str`, *optional*, defaults to `"group_by"`):
                Name of the argument that `by` came from, for error messages.

        Raises:
            ValueError: there is no such column, or the number of values is not the number of rows.
            TypeError: `by` is neither, or a column is named, but the dataset is no `datasets.Dataset`; or a value is
                not hashable.
        """
        if not isinstance(by, str):
            if not hasattr(by, "__iter__"):
                raise TypeError(
                    f"`{what}` is {by!r}. Expected the name of a column, or one value per row. Pass one of them."
                )
            values = by.tolist() if isinstance(by, np.ndarray | Tensor) else list(by)
            if len(values) != len(dataset):
                raise ValueError(
                    f"`{what}` has {len(values)} values for {len(dataset)} rows. Expected one value per row."
                )
            return cls(values)
        if not isinstance(dataset, HFDataset):
            raise TypeError(
                f"`{what}` is the column {by!r}, but the dataset is a {type(dataset).__name__}, which has no columns. "
                f"Expected a `datasets.Dataset`. Otherwise pass one value per row as `{what}`."
            )
        if by not in dataset.column_names:
            raise ValueError(f"`{what}` is {by!r}. Expected one of the columns {dataset.column_names}.")
        table = dataset.with_format(None).select_columns([by])
        return cls(list(table[by]), by, table)

    @classmethod
    def whole(cls, n: int) -> "RowGroups":
        """Put all n rows into one group, whose value is `None` and whose column has no name."""
        groups = cls([None] * n)
        groups.column = ""
        return groups

    def __len__(self) -> int:
        """Return the number of groups, G."""
        return len(self.values)

    @property
    def tag(self) -> str:
        """Return a digest of the partition for file names, 12 hex digits."""
        return hashlib.sha256(self.member.numpy().tobytes()).hexdigest()[:12]

    def means(self, parts: Iterable[tuple[int, Tensor]]) -> Tensor:
        """Average the rows of a matrix within every group.

        Args:
            parts: the matrix `(n, k)` in pieces `(start, rows)`, where `rows` are its rows from `start` on. Every row
                occurs in exactly one piece.

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
        """Add up the scores of the training rows of every group.

        The additive model behind TRAK (paper, Section 2) predicts that the group as a whole changes the output on
        target j by this sum.

        Args:
            blocks: scores as `(start, stop, block)`, `block` of shape `(stop - start, m)`.

        Returns:
            `(m, G)`, float64: element (j, g) is Σ_{i ∈ g} τ_ij.

        Raises:
            ValueError: `blocks` is empty.
        """
        return self.means((start, block) for start, _, block in blocks).mul_(self.sizes.unsqueeze(1)).T.contiguous()

    def table(self) -> HFDataset:
        """Make a dataset with one row per group: the group's value and, as [`COUNT_COLUMN`], its size.

        Values keep the name and the feature type of the column that they came from. [`~RowGroups.whole`] has no such
        column.
        """
        counts = self.sizes.tolist()
        if self._table is not None:
            kept = self._table.remove_columns([COUNT_COLUMN]) if self.column == COUNT_COLUMN else self._table
            return with_column(kept, COUNT_COLUMN, counts)
        values = {self.column: self.values} if self.column else {}
        return HFDataset.from_dict({**values, COUNT_COLUMN: counts})


def _ascending(values: Iterable[Any]) -> list[Any]:
    """Sort values, `None` last. Values of types that cannot be compared keep their order."""
    present = [value for value in values if value is not None]
    absent = [value for value in values if value is None]
    try:
        return sorted(present) + absent
    except TypeError:
        return present + absent


def target_features(shards: ShardSet, groups: RowGroups | None, columns: int | None = None) -> Tensor:
    """Read the features of targets, or their means over groups: `(m, k)`, or of the first columns alone."""
    parts = ((shard.start, shard.grads[:, :columns].float()) for shard in shards)
    return torch.cat([part for _, part in parts]) if groups is None else groups.means(parts)


def target_groups(dataset: Any, group_by: GroupBy | None) -> RowGroups | None:
    """Make the groups of targets that `group_by` of `attribute` asks for.

    Args:
        dataset (`Dataset`):
            The targets.
        group_by (`str` or `Sequence`, *optional*):
            See [`RowGroups.of`]; `"all"` makes one group of all targets.

    Returns:
        `RowGroups` or `None`: the groups, or `None` if each target is scored by itself.

    Raises:
        ValueError, TypeError: as in [`RowGroups.of`].
    """
    if group_by is None:
        return None
    if isinstance(group_by, str) and group_by == ALL:
        return RowGroups.whole(len(dataset))
    return RowGroups.of(dataset, group_by)
