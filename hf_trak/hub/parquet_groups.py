"""Row groups of Parquet files of others, decoded within bounds: a few hundred bytes can stand for gigabytes."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hf_trak.errors import StoreError

_MOST_BYTES = 4 << 30
"""Maximum bytes of a row group when it is decoded. Those that `datasets` writes have megabytes."""

_ALWAYS_ALLOWED, _TIMES = 64 << 20, 256
"""A file of n bytes may have row groups of up to 64 MiB and 256 n bytes."""

_BATCH_ROWS = 1024

_WIDTHS = {"BOOLEAN": 0.125, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}


def check_groups(file: Any, size: int) -> None:
    """Check all row groups of a file as [`check_group`] does, and columns whose dictionaries may stand for more.

    A footer does not tell how long the texts are that refer to a dictionary. Where every one may be as long as all of
    it, and that is too much, the column is decoded piece by piece.

    Args:
        file: the file, open.
        size: bytes of the file.

    Raises:
        StoreError: a row group is larger. The message begins with "it".
    """
    source = pq.ParquetFile(file)
    for group in range(source.metadata.num_row_groups):
        most = check_group(source.metadata, group, size)
        doubtful = [
            one.path_in_schema
            for one in _with_dictionaries(source.metadata, group)
            if one.num_values * one.total_uncompressed_size > most
        ]
        if doubtful:
            for _ in _pieces(source, group, most, doubtful):
                pass


def _with_dictionaries(metadata: pq.FileMetaData, group: int) -> list[Any]:
    found = metadata.row_group(group)
    columns = [found.column(place) for place in range(found.num_columns)]
    return [column for column in columns if column.has_dictionary_page]


def _pieces(source: pq.ParquetFile, group: int, most: int, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    """Decode a row group in batches, of a few rows if one may be long. Raises `StoreError` after `most` bytes."""
    longest = max([one.total_uncompressed_size for one in _with_dictionaries(source.metadata, group)], default=0)
    total, rows = 0, max(1, min(_BATCH_ROWS, most // max(1, longest)))
    for batch in source.iter_batches(rows, row_groups=[group], columns=columns):
        yield batch
        for column in batch.columns:
            total += (column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column).nbytes
        if total > most:
            raise StoreError(f"it holds more than {most} bytes")


def check_group(metadata: pq.FileMetaData, group: int, size: int, columns: Sequence[str] | None = None) -> int:
    """Compare what a row group holds, by its own account, with what a file of this size may hold.

    Args:
        metadata: the footer of the file.
        group: number of the row group.
        size: bytes of the file.
        columns: names of the columns that are to be read; `None` for all.

    Returns:
        The bytes that it may have when it is decoded.

    Raises:
        StoreError: it holds more. The message begins with "it".
    """
    found, names = metadata.row_group(group), set(columns or ())
    most, needed = min(_MOST_BYTES, _ALWAYS_ALLOWED + _TIMES * size), 0.0
    for place in range(found.num_columns):
        column = found.column(place)
        if columns is None or column.path_in_schema.partition(".")[0] in names:
            width = _WIDTHS.get(column.physical_type, metadata.schema.column(place).length or 1)
            needed += max(width * max(found.num_rows, column.num_values), column.total_uncompressed_size)
    if needed > most:
        raise StoreError(f"it holds {found.num_rows} rows of {needed:.0f} bytes in all, more than {most}")
    return most


def read_group(file: Any, metadata: pq.FileMetaData, group: int, size: int, columns: Sequence[str] | None) -> pa.Table:
    """Decode a row group piece by piece, within the bounds of [`check_group`].

    Args:
        file: the file, open.
        metadata, group, size, columns: see [`check_group`].

    Raises:
        StoreError: it is larger. The message begins with "it".
    """
    most = check_group(metadata, group, size, columns)
    source = pq.ParquetFile(file, metadata=metadata, pre_buffer=True)
    names = None if columns is None else [*columns]
    batches = [*_pieces(source, group, most, names)]
    return pa.Table.from_batches(batches) if batches else source.read_row_group(group, columns=names)
