"""Subsets of the training rows to train on: random ones, or all rows but one, with rows alone or in groups."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.scores.groups import RowGroups


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
    units = n if groups is None else len(groups)
    if count < 1:
        raise ValueError(f"`count` is {count}. Expected at least 1.")
    _check_groups(n, groups)
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
    _check_groups(n, groups)
    units = n if groups is None else len(groups)
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
    _check_groups(len(tau), groups)
    sums = np.zeros((len(groups), *tau.shape[1:]))
    np.add.at(sums, groups.member.numpy(), tau)
    return sums


def _check_groups(n: int, groups: RowGroups | None) -> None:
    if groups is not None and len(groups.member) != n:
        raise ValueError(f"`groups` has {len(groups.member)} rows for {n} training rows. Expected one group for each.")
