"""Arrays on disk that are written row by row, in any order, with a checksum of every row.

A file is a memory-mapped array in NumPy's `.npy` format, and what follows it:

| bytes | |
|---|---|
| as `numpy.save` writes them | header and values, `(rows, width)` |
| up to a multiple of 8 | zeros |
| rows · 8 | per row the xxh3-64 of its values, 0 while it has not been written |

The hash of a row is seeded with a number that says what the row is (which run, weights, array) plus the row's number,
so that rows of another array, or in another place, do not match. NumPy ignores what follows the array.
"""

import os
import tokenize
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from hf_trak.errors import StoreError
from hf_trak.store.atomic import allocate, atomic_path, create_file
from hf_trak.store.sealed import content_digest

_ALIGNMENT = 8
_BLOCK_BYTES = 64 * 2**20
"""Size of the values that are hashed at a time."""
_MASK = 2**64 - 1

_HEADER_ERRORS = (
    ValueError, TypeError, SyntaxError, EOFError, KeyError, OSError, OverflowError, MemoryError, RecursionError,
    tokenize.TokenError,
)  # fmt: skip
"""Errors that NumPy raises for damaged headers, since it evaluates them as Python literals."""

_intact: dict[str, object] = {}
"""By file: its state on disk and its seed when this process found all of its rows intact."""


def seed_of(identity: Mapping[str, Any]) -> int:
    """Compute the seed of an array's checksums from all that tells the array from others, as plain JSON."""
    return int(content_digest(identity)[:16], 16)


def row_sums(values: np.ndarray, rows: np.ndarray, seed: int) -> np.ndarray:
    """Compute checksums of rows.

    Args:
        values: the rows, `(r, width)`.
        rows: their numbers, `(r,)`.
        seed: seed of the array, see [`seed_of`].

    Returns:
        `numpy.ndarray` of shape `(r,)`, uint64, never 0.
    """
    content = np.ascontiguousarray(values)
    data = content.reshape(-1).view(np.uint8).data
    width = content.nbytes // max(1, len(content))
    sums = (
        xxhash.xxh3_64_intdigest(data[i * width : (i + 1) * width], (seed + row) & _MASK) or 1
        for i, row in enumerate(rows.tolist())
    )
    return np.fromiter(sums, dtype=np.uint64, count=len(rows))


@dataclass(eq=False)
class RowFile:
    """One file of the format above. It is described when this object is made, and opened by [`~RowFile.open`].

    Attributes:
        key: name of the array in `current_store`.
        path: the file.
        shape: `(rows, width)`.
        dtype: NumPy dtype.
        remedy: what to do if the file is damaged.
        checked: whether checksums follow the array.
        array: `(rows, width)`, memory-mapped.
        sums: `(rows,)`, uint64, memory-mapped; `None` for a file without checksums.
    """

    key: str
    path: Path
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    remedy: str
    checked: bool = True
    array: np.memmap = field(init=False)
    sums: np.memmap | None = field(init=False)

    def open(self, mode: Literal["r", "r+"]) -> "RowFile":
        """Map a file that exists. Its rows are not read.

        Raises:
            FileNotFoundError: the file does not exist.
            StoreError: it is truncated, or holds another array, or may not be opened.
        """
        shape, fortran, dtype, offset, size = self._read_header()
        end = self._end(offset)
        if (shape, dtype, fortran, size) != (self.shape, self.dtype, False, end):
            raise StoreError(
                f"{self.path} holds {dtype} {shape} in {size} bytes; expected {self.dtype} {self.shape}, "
                f"{'with' if self.checked else 'without'} checksums. {self.remedy}"
            )
        rows = self.shape[0]
        try:
            self.array = np.memmap(self.path, dtype, mode, offset, self.shape)
            self.sums = np.memmap(self.path, np.uint64, mode, end - 8 * rows, (rows,)) if self.checked else None
        except OSError as error:
            raise StoreError(f"{self.path} cannot be opened ({error}). {self.remedy}") from error
        return self

    def create(self, replace: bool = False) -> None:
        """Make the file, filled with zeros. A file that exists stays, unless `replace` is set.

        Raises:
            StoreError: the file cannot be written.
        """

        def fill(temporary: Path) -> None:
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=self.dtype, shape=self.shape)
            with open(temporary, "r+b") as file:
                allocate(file, self._end(array.offset))

        if replace:
            with atomic_path(self.path) as temporary:
                fill(temporary)
        elif not self.path.exists():
            create_file(self.path, fill)

    def write(self, values: np.ndarray, seed: int) -> None:
        """Write the whole array at once, atomically, with its checksums.

        Raises:
            StoreError: the file cannot be written.
        """
        with atomic_path(self.path) as temporary, open(temporary, "wb") as file:
            np.lib.format.write_array(file, values, allow_pickle=False)
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            file.write(row_sums(values, np.arange(len(values)), seed).tobytes())

    def seal(self, rows: np.ndarray, seed: int) -> None:
        """Compute the checksums of rows that have been written to the array, and write all changes to disk.

        Raises:
            OSError: they cannot be written.
        """
        if self.sums is not None:
            _intact.pop(os.path.abspath(self.path), None)
            for part in self._parts(rows):
                self.sums[part] = row_sums(self.array[part], part, seed)
        self.array.flush()
        if self.sums is not None:
            self.sums.flush()

    def compare(self, rows: np.ndarray, seed: int, again: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Compare rows with their checksums, which reads the rows once.

        Args:
            rows: the row numbers.
            seed: seed of the array.
            again: compare even if this process has found all rows intact and the file has not changed since.

        Returns:
            `tuple`: the numbers of the rows that do not match their checksums, and of those that have no checksum.
            Both are empty for a file without checksums.
        """
        none = np.empty(0, dtype=np.int64)
        name, state = os.path.abspath(self.path), (_stamp(self.path), seed)
        if self.sums is None or (not again and _intact.get(name) == state):
            return none, none
        bare = rows[self.sums[rows] == 0]
        parts = self._parts(rows[self.sums[rows] != 0])
        wrong = [part[row_sums(self.array[part], part, seed) != self.sums[part]] for part in parts]
        found = np.concatenate([none, *wrong])
        if not len(found) and not len(bare) and len(rows) == len(self.array):
            _intact[name] = state
        return found, bare

    def empty(self, rows: np.ndarray) -> np.ndarray:
        """Find the rows whose values are all zero, as they are before anything is written."""
        return rows[~np.asarray(self.array[rows] != 0).any(axis=1)]

    def stray_bytes(self) -> bool:
        """Tell whether the padding between array and checksums holds anything but zeros."""
        end = self.array.offset + self.array.nbytes
        with open(self.path, "rb") as file:
            file.seek(end)
            return self.sums is not None and any(file.read(-end % _ALIGNMENT))

    def _end(self, offset: int) -> int:
        """Return the size of the file if its array begins at byte `offset`."""
        end = offset + self.shape[0] * self.shape[1] * self.dtype.itemsize
        return end + -end % _ALIGNMENT + 8 * self.shape[0] if self.checked else end

    def _parts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Split row numbers into parts whose values fit into a block."""
        count = max(1, _BLOCK_BYTES // max(1, self.shape[1] * self.dtype.itemsize))
        return [rows[start : start + count] for start in range(0, len(rows), count)]

    def _read_header(self) -> tuple[Any, bool, Any, int, int]:
        """Read shape, order, dtype and offset of the array, and the size of the file.

        NumPy would extend a truncated file with zeros when it maps it.
        """
        try:
            with open(self.path, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # NumPy takes damaged headers for those of Python 2
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                header = read[np.lib.format.read_magic(file)](file)
                return *header, file.tell(), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            raise
        except _HEADER_ERRORS as error:
            raise StoreError(
                f"{self.path} cannot be opened as a complete .npy file ({error}). Expected a file that hf_trak wrote. "
                f"{self.remedy}"
            ) from error


def _stamp(path: Path) -> object:
    """Return what changes whenever a file does. Unlike its modification time, its change time cannot be set back."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
