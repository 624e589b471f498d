"""Digests of the values of single rows, column by column, which are the same wherever the rows are stored.

A row that was read by itself, from a Parquet file of a repo, say, is compared with the one that features were computed
from. Values are hashed as Python sees them, so that the types of files (32 or 64 bits, the length of offsets) make no
difference. A transform or format that is set on a dataset is code, and left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
import xxhash
from datasets import Dataset
from torch import Tensor

from hf_trak.identity.row_digest import update_digest

_ROWS = 1000


@dataclass(frozen=True)
class RowContents:
    """The digests of all rows of a dataset.

    Attributes:
        columns: names of the columns.
        digests: xxh3-64 of every value, as a signed number, `(n, columns)`, int64.
    """

    columns: tuple[str, ...]
    digests: Tensor

    def changed(self, rows: Dataset, numbers: Sequence[int]) -> list[int]:
        """List the rows that have another value in any column that both have.

        Args:
            rows: rows that were read, with at least one of the columns.
            numbers: their numbers.

        Returns:
            The numbers of rows that have changed.
        """
        names = [name for name in self.columns if name in rows.column_names]
        places = [self.columns.index(name) for name in names]
        expected = self.digests[torch.tensor(list(numbers), dtype=torch.int64)][:, places]
        wrong = (content_digests(rows, names) != expected).any(dim=1)
        return [number for number, differs in zip(numbers, wrong.tolist(), strict=True) if differs]


def content_digests(rows: Dataset, columns: Sequence[str]) -> Tensor:
    """Hash the stored values of some columns.

    Args:
        rows: a `datasets.Dataset`.
        columns: names of the columns.

    Returns:
        `(n, len(columns))`, int64.

    Raises:
        TypeError: a value cannot be hashed.
    """
    found = torch.empty(len(rows), len(columns), dtype=torch.int64)
    start = 0
    for table in rows.with_format("arrow").iter(batch_size=_ROWS):
        for place, name in enumerate(columns):
            digests = [_digest(value) for value in _values(table[name])]
            found[start : start + len(digests), place] = torch.tensor(digests, dtype=torch.int64)
        start += len(table)
    return found


def _values(column: pa.ChunkedArray) -> list[Any]:
    return [
        value
        for chunk in column.chunks
        for value in (chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk).to_pylist()
    ]


def _digest(value: Any) -> int:
    digest = xxhash.xxh3_64()
    update_digest(digest, value)
    number = digest.intdigest()
    return number - (number >> 63 << 64)
