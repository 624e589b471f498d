"""What is fitted, and how its sample of rows is divided into parts, each of which is a file on the way.

The second pass, of eigenvalues, takes the whole sample. The first, of bases, takes as much of it as they need: that
of `"ekfac"` a few positions per dimension, since eigenvalues are measured anew in the second pass, and a basis need
not be as good as they are. What that does to scores is in docs/benchmarks/curvature.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

PARTS = 8
"""Parts of the sample at most. More would lose less to a kill, and write more."""

ROWS_PER_PART = 64
"""Rows of a part at least, where there are as many: files of fewer would take as long as the gradients."""

LARGEST_SIDE = 8192
"""Longest side of a basis. The eigendecomposition of twice the side takes eight times as long."""

BASIS_POSITIONS = 20
"""Positions per dimension of a basis that are enough: scores then change less than with other draws of the labels."""

BASIS_ROWS = 256
"""Rows behind a basis at least, where there are as many, since the positions of a row are alike."""

Rows = tuple[int, ...]


@dataclass(frozen=True)
class FitPlan:
    """What is fitted, and to which rows.

    Attributes:
        kind: see [`~hf_trak.curvature.curvature.CurvatureKind`].
        rows: numbers of the rows of the sample, ascending.
        batch_size: rows per batch.
        embeddings: names of embedding tables.
        transposed: names of weights whose rows are inputs.
        description: for progress bars.
        show_progress: whether to show bars.
        largest_side: longest side of a basis.
    """

    kind: str
    rows: Rows
    batch_size: int
    embeddings: frozenset[str]
    transposed: frozenset[str]
    description: str
    show_progress: bool = True
    largest_side: int = LARGEST_SIDE

    @cached_property
    def parts(self) -> list[Rows]:
        """The parts of the second pass: the whole sample. Each has rows from all over it."""
        return _divided(self.rows, PARTS)

    @cached_property
    def first_basis_parts(self) -> list[Rows]:
        """The parts of the first pass that are there in any case."""
        if self.kind != "ekfac":
            return self.parts
        return _divided(self._shuffled[:BASIS_ROWS], PARTS // 2)

    def further_basis_parts(self, rows: int) -> list[Rows]:
        """The other parts of the first pass where bases take so many rows in all; none for bases of the whole sample.

        Args:
            rows: number of rows, from 0 to those of the sample.
        """
        if self.kind != "ekfac":
            return []
        return _divided(self._shuffled[BASIS_ROWS:rows], PARTS // 2)

    @cached_property
    def _shuffled(self) -> Rows:
        """The sample in an order of which every beginning is a random sample itself."""
        order = np.random.Generator(np.random.Philox(len(self.rows))).permutation(len(self.rows))
        return tuple(self.rows[place] for place in order)

    def batches(self, rows: Rows) -> list[Sequence[int]]:
        """Divide the rows of one part into batches."""
        return [rows[low : low + self.batch_size] for low in range(0, len(rows), self.batch_size)]


def _divided(rows: Rows, most: int) -> list[Rows]:
    """Divide rows into at most so many parts of almost equal length, each ascending."""
    count = min(most, -(-len(rows) // ROWS_PER_PART))
    return [tuple(sorted(rows[part::count])) for part in range(count)]


def rows_needed(counted: int, sides_and_positions: Sequence[tuple[int, int]], available: int) -> int:
    """Number of rows that give every basis enough positions.

    Args:
        counted: number of rows that were looked at.
        sides_and_positions: for every Kronecker block its longer side, and its positions in these rows.
        available: number of rows of the sample, which is taken whole where a block had no position yet.
    """
    if any(positions == 0 for _, positions in sides_and_positions):
        return available
    wanted = (-(-counted * BASIS_POSITIONS * side // positions) for side, positions in sides_and_positions)
    return min(available, max(wanted, default=0))
