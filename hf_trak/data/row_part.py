"""Some rows of a dataset, by their numbers, as a dataset of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset

from hf_trak.store.sealed import content_digest


@dataclass(frozen=True)
class RowPart:
    """Rows of a dataset, in ascending order.

    Attributes:
        numbers: the numbers of the rows.
        total: number of rows of the dataset.
        held: rows that were fetched, from which these are taken; `None` takes them from the dataset itself.
    """

    numbers: tuple[int, ...]
    total: int
    held: "HeldRows | None" = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def whole(self) -> bool:
        """Whether these are all rows."""
        return len(self.numbers) == self.total

    @property
    def at_hand(self) -> bool:
        """Whether the rows were fetched, so that the dataset need not have them."""
        return self.held is not None

    @property
    def tag(self) -> str:
        """A digest of the numbers, 12 hex digits; empty for all rows."""
        return "" if self.whole else content_digest({"rows": list(self.numbers), "total": self.total})[:12]

    def of(self, dataset: Any) -> Any:
        """Return these rows of a dataset, in the way in which the dataset itself returns them.

        Args:
            dataset: a map-style dataset of `total` rows.
        """
        source = dataset if self.held is None else self.held
        if self.whole and self.held is None:
            return source
        return source.select(self.numbers) if hasattr(source, "select") else PartOfRows(source, self.numbers)


class PartOfRows(Subset[Any]):
    """Rows of a dataset that has no `select` of its own."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        """
        Args:
            dataset: a map-style dataset.
            indices: numbers of the rows, ascending.
        """
        super().__init__(dataset, indices)
        self.sequential = getattr(dataset, "sequential", False)
        """Whether rows are to be read in this process and forwards, as those of a stream."""


class HeldRows:
    """Rows that were fetched, under the numbers that they have in a dataset which is not at hand as a whole."""

    def __init__(self, rows: Any, numbers: Sequence[int], total: int) -> None:
        """
        Args:
            rows: the rows, a `datasets.Dataset`.
            numbers: their numbers, ascending.
            total: number of rows of the dataset.
        """
        self.rows = rows
        self.total = total
        self._places = {number: place for place, number in enumerate(numbers)}

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: int) -> Any:
        return self.rows[self._places[number]]

    def select(self, numbers: Sequence[int]) -> Any:
        """Return some of the rows, by their numbers, as a `datasets.Dataset`."""
        return self.rows.select([self._places[number] for number in numbers])
