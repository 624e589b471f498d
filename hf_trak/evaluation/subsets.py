"""Which rows to train on: random subsets, all but one, with rows alone or in groups."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.scores.groups import RowGroups


def random_subsets(
    n: int, count: int, fraction: float = 0.5, seed: int = 0, groups: RowGroups | None = None
) -> np.ndarray:
    """Random subsets of a fixed size (TRAK paper, Section 2: α · n rows, α = 1/2).

    Subset i depends on n, `fraction`, `seed` and i alone: more subsets later leave the first ones as they are.

    Args:
        n: number of training rows.
        count: number of subsets s.
        fraction: α, the part of the rows that each has, rounded.
        seed: of the subsets.
        groups: rows that are in or out together; `fraction` is then that of the groups.

    Returns:
        `(s, n)`, boolean.

    Raises:
        ValueError: a number is out of range, or the subsets would be empty or whole.
    """
    units = n if groups is None else len(groups)
    if count < 1:
        raise ValueError(f"`count` is {count}. Expected at least 1.")
    _check_groups(n, groups)
    size = round(fraction * units)
    if not 0 < size < units:
        raise ValueError(
            f"`fraction` is {fraction!r}, which is {size} of {units} {'rows' if groups is None else 'groups'}. "
            "Expected a number between 0 and 1 that leaves some in and some out."
        )
    masks = np.zeros((count, units), dtype=bool)
    for index in range(count):
        rng = np.random.Generator(np.random.Philox(key=[seed, index]))
        masks[index, rng.permutation(units)[:size]] = True
    return masks if groups is None else masks[:, groups.member.numpy()]


def leave_one_out_subsets(n: int, rows: Sequence[int] | None = None, groups: RowGroups | None = None) -> np.ndarray:
    """The whole training set first, then without each row, or without each group.

    Args:
        n: number of training rows.
        rows: the rows (or groups) to leave out, one at a time; all by default.
        groups: rows that are left out together.

    Returns:
        `(1 + number of rows or groups, n)`, boolean.

    Raises:
        ValueError: a row or group does not exist, or is named twice.
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
    """Scores of groups of training rows: Σ_{i ∈ g} τ_ij, the effect of all in an additive model.

    Args:
        scores: τ `(n, m)`.
        groups: G groups of the n rows.

    Returns:
        `(G, m)`, float64.

    Raises:
        ValueError: the numbers of rows differ.
    """
    tau = np.asarray(scores, dtype=np.float64)
    _check_groups(len(tau), groups)
    sums = np.zeros((len(groups), *tau.shape[1:]))
    np.add.at(sums, groups.member.numpy(), tau)
    return sums


def _check_groups(n: int, groups: RowGroups | None) -> None:
    if groups is not None and len(groups.member) != n:
        raise ValueError(f"`groups` has {len(groups.member)} rows for {n} training rows. Expected one group for each.")
