"""Some rows of a dataset, by their numbers, as a dataset of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset as HFDataset
from torch.utils.data import Subset

from hf_trak.store.sealed import content_digest


@dataclass(frozen=True)
class RowPart:
    """Rows of a dataset, in ascending order.

    Attributes:
        numbers: the numbers of the rows.
        total: number of rows of the dataset.
    """

    numbers: tuple[int, ...]
    total: int

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def whole(self) -> bool:
        """Whether these are all rows."""
        return len(self.numbers) == self.total

    @property
    def tag(self) -> str:
        """A digest of the numbers, 12 hex digits; empty for all rows."""
        return "" if self.whole else content_digest({"rows": list(self.numbers), "total": self.total})[:12]

    def of(self, dataset: Any) -> Any:
        """Return these rows of a dataset, in the way in which the dataset itself returns them.

        Args:
            dataset: a map-style dataset of `total` rows.
        """
        if self.whole:
            return dataset
        return dataset.select(self.numbers) if isinstance(dataset, HFDataset) else PartOfRows(dataset, self.numbers)


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
