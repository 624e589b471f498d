"""The checkpoint whose batches a `TRAKer` accepts at the moment."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from hf_trak.modelout_functions import Batch, Side
from hf_trak.traker.batch_rows import rows_of
from hf_trak.weights.watch import LoadedWeights


@dataclass
class OpenCheckpoint:
    """A checkpoint that has been loaded for `featurize` or for `score`.

    Attributes:
        side: `"train"` if batches are for `featurize`, `"target"` if they are for `score`.
        weights: the weights that were loaded into the model.
        size: number of rows that batches may belong to.
        size_name: the argument that gave this number, for error messages.
        next_row: the row after those that were written with `num_samples`.
    """

    side: Side
    weights: LoadedWeights
    size: int
    size_name: str
    next_row: int = 0

    def rows(self, batch: Batch, inds: Iterable[int] | None, num_samples: int | None) -> list[int]:
        """Determine the row numbers of a batch. Arguments and errors are those of `rows_of`."""
        return rows_of(batch, inds, num_samples, self.size, self.size_name, self.next_row)

    def advance(self, num_samples: int | None) -> None:
        """Count rows that were written in sequence. Called after they were, so that a failed call can be repeated."""
        if num_samples is not None:
            self.next_row += operator.index(num_samples)
