"""Training rows as a viewer needs them: read one by one, searched, and grouped by a column."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Value

from hf_trak.report.content import Columns, Content, content_of, stored

_BATCH = 10_000
_TEXT_TYPES = ("string", "large_string")
_GROUP_TYPES = (*_TEXT_TYPES, "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_MOST_GROUPS = 1000
_FIRST_ROWS, _SHORT = 100, 300


@dataclass(frozen=True)
class RowFilter:
    """The conditions that rows have to match.

    Attributes:
        text: letters that occur in a text of the row, in either case; no pattern.
        label: the label of the row, by its name.
    """

    text: str = ""
    label: str | None = None

    @property
    def empty(self) -> bool:
        """Tell whether all rows match."""
        return not self.text and self.label is None


class TrainRows:
    """The training rows of an index or a run.

    Attributes:
        count (`int`):
            Number of training rows, n, whether or not they are at hand.
        searchable (`bool`):
            Whether rows can be searched and grouped: they are on this machine, and not read one by one from the Hub.
    """

    def __init__(self, rows: Any, count: int, numbers: np.ndarray | None = None) -> None:
        """
        Args:
            rows: a map-style dataset, rows of a dataset repo, or `None` where they are not at hand.
            count: number of training rows, n.
            numbers: numbers of the rows in `rows`, ascending. By default `rows` has all.
        """
        self.count = count
        self.searchable = isinstance(rows, Dataset)
        self._rows = rows.with_format(None) if isinstance(rows, Dataset) else rows
        self._numbers = numbers
        self._read = stored(self._rows)
        self._columns: Columns | None = None

    @property
    def at_hand(self) -> bool:
        """Tell whether rows can be shown, and not only their numbers."""
        return self._rows is not None

    @property
    def columns(self) -> Columns:
        """Return the columns that are shown, chosen when the first row is read."""
        if self._columns is None:
            self._columns = Columns.find(self._read) if self.at_hand else Columns()
        return self._columns

    def content(self, number: int) -> Content:
        """Read what is shown of a row; empty where rows are not at hand.

        Args:
            number: its number among all training rows.

        Raises:
            HfTrakError: the row cannot be read from its repo, or has changed.
        """
        place = self._place(number)
        return Content() if place is None else content_of(self._read[place], self.columns)

    def example(self, names: Sequence[str]) -> dict[str, str]:
        """Return short texts of one of the first rows, for the fields of a target; empty without such a row.

        Args:
            names: columns of text that the row has to have.
        """
        for number in self.numbers()[:_FIRST_ROWS].tolist() if self.searchable else ():
            texts = dict(self.content(number).texts)
            if names and all(0 < len(texts.get(name, "")) <= _SHORT for name in names):
                return {name: texts[name] for name in names}
        return {}

    def labels(self) -> list[str]:
        """List the names of labels that rows can be filtered by."""
        if (names := self.columns.label_names) is not None:
            return list(names)
        label = self.columns.label
        if not self.searchable or label is None or label not in self.group_columns():
            return []
        return sorted({str(value) for value in self._values(label)})[:_MOST_GROUPS]

    def group_columns(self) -> list[str]:
        """List the columns whose values can form groups."""
        if not isinstance(self._rows, Dataset):
            return []
        return [
            name
            for name, kind in self._rows.features.items()
            if isinstance(kind, ClassLabel) or (isinstance(kind, Value) and kind.dtype in _GROUP_TYPES)
        ]

    def group_names(self, column: str) -> list[str]:
        """Return the value of every row in a column, as text, for the rows at hand in their order.

        Raises:
            ValueError: there is no such column, or it has more than 1,000 values.
        """
        if column not in self.group_columns():
            raise ValueError(
                f"The column is {column!r}. Expected one whose values form groups: {self.group_columns()}. Choose one."
            )
        values = [str(value) for value in self._values(column)]
        if (found := len(set(values))) > _MOST_GROUPS:
            raise ValueError(
                f"The column {column!r} has {found:,} values. Expected at most {_MOST_GROUPS:,}, such as classes or "
                "sources. Choose another column."
            )
        return values

    def numbers(self) -> np.ndarray:
        """Return the numbers of the rows that are at hand, ascending; of all rows where none is."""
        return np.arange(self.count) if self._numbers is None else self._numbers

    def matching(self, wanted: RowFilter) -> np.ndarray:
        """Find the rows that match a filter.

        Returns:
            Their numbers, ascending.

        Raises:
            ValueError: rows are not at hand, or are read one by one from the Hub, and the filter is not empty.
        """
        if wanted.empty:
            return self.numbers()
        if not self.searchable:
            raise ValueError(
                "The training rows are not on this machine, so they cannot be searched. Expected a local dataset. "
                "Clear the filter, or start the viewer with `--train_dataset`."
            )
        mask = np.ones(len(self._rows), dtype=bool)
        if wanted.text:
            mask &= self._containing(wanted.text)
        if wanted.label is not None:
            mask &= self._labelled(wanted.label)
        return self.numbers()[mask]

    def _place(self, number: int) -> int | None:
        """Find the position of a row among those at hand."""
        if not self.at_hand:
            return None
        if self._numbers is None:
            return number
        place = int(np.searchsorted(self._numbers, number))
        return place if place < len(self._numbers) and self._numbers[place] == number else None

    def _containing(self, text: str) -> np.ndarray:
        if not (names := [name for name in self.columns.texts if name in self._rows.features]):
            return np.zeros(len(self._rows), dtype=bool)
        found = ([_contains(table[name], text) for name in names] for table in self._tables(names))
        return np.concatenate([np.any(columns, axis=0) for columns in found])

    def _labelled(self, wanted: str) -> np.ndarray:
        label, names = self.columns.label, self.columns.label_names
        if label is None:
            return np.zeros(len(self._rows), dtype=bool)
        if names is not None:
            return np.array([value == names.index(wanted) for value in self._values(label)])
        return np.array([str(value) == wanted for value in self._values(label)])

    def _values(self, column: str) -> list[Any]:
        return [value for table in self._tables([column]) for value in table[column].to_pylist()]

    def _tables(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Read columns in pieces."""
        yield from self._rows.select_columns(list(names)).with_format("arrow").iter(_BATCH)


def _contains(values: pa.ChunkedArray, text: str) -> np.ndarray:
    """Tell which texts of a column contain a text, in either case."""
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        found = pc.match_substring(values, text, ignore_case=True)
        return np.asarray(found.fill_null(False).to_pylist(), dtype=bool)
    lowered = text.lower()
    return np.array([lowered in str(value).lower() for value in values.to_pylist()], dtype=bool)
