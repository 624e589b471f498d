"""Lance tables of features (the extra `lance`): the part of `pyarrow.parquet.ParquetFile` that tables are read by.

A fragment of Lance, one data file, takes the place of a row group. Lance compares no checksums of what it reads, so
that the metadata of these tables have those of the shards, see `TableFacts`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from hf_trak.runtime.checks import required

LANCE = ".lance"
ERRORS = (ValueError, RuntimeError, OSError)
"""What Lance raises for tables that are damaged or cannot be reached."""


@contextmanager
def panics_raised() -> Iterator[None]:
    """Raise a `RuntimeError` for a panic of Lance, whose class is no `Exception` and cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error


class LanceTable:
    """A table that is read."""

    def __init__(self, path: str | Path, known: Any = None) -> None:
        """
        Args:
            path: the directory, or its address as Lance knows it.
            known: the `metadata` of the same table, if it was opened before.

        Raises:
            ModuleNotFoundError: Lance is not installed.
            ValueError: it is no Lance table, or has files outside of its directory.
            OSError, RuntimeError: it cannot be reached.
        """
        self.metadata = _lance().dataset(str(path)) if known is None else known
        if self.metadata.base_paths():
            raise ValueError("it has files outside of its directory")
        self.schema_arrow: pa.Schema = self.metadata.schema
        self._fragments = self.metadata.get_fragments()
        self.num_row_groups = len(self._fragments)

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return sum(self.counts())

    def counts(self) -> list[int]:
        """Return the number of rows of each fragment."""
        return [one.count_rows() for one in self._fragments]

    def row(self, numbers: Sequence[int], column: str) -> list[Any]:
        """Return the values of a column in some rows, counted from the first of the table."""
        return self.metadata.take(list(numbers), columns=[column]).column(column).to_pylist()

    def read_row_group(self, number: int, columns: list[str]) -> pa.Table:
        """Read some columns of a fragment."""
        return self._fragments[number].to_table(columns=columns)

    def read(self, columns: list[str]) -> pa.Table:
        """Read some columns of all rows."""
        return self.metadata.to_table(columns=columns)

    def iter_batches(self, rows: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns of so many rows at a time, at most, in their order."""
        return self.metadata.to_batches(batch_size=rows, columns=columns)


def write_lance(path: Path, tables: Iterable[pa.Table], rows: int) -> None:
    """Write tables of one schema as the fragments of a Lance table.

    Args:
        path: an empty directory.
        tables: at least one.
        rows: most rows of a fragment.

    Raises:
        ModuleNotFoundError: Lance is not installed.
        StopIteration: there is no table.
    """
    left = iter(tables)
    first = next(left)
    batches = chain.from_iterable(one.to_batches() for one in chain([first], left))
    _lance().write_dataset(batches, str(path), schema=first.schema, max_rows_per_file=rows)


def _lance() -> Any:
    return required("lance", "Tables whose names end in `.lance` need Lance. Install it with `pip install pylance`.")
