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
from dataclasses import dataclass
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
    ValueError,
    TypeError,
    SyntaxError,
    EOFError,
    KeyError,
    OSError,
    OverflowError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)
"""Errors that NumPy raises for damaged headers, since it evaluates them as Python literals."""

_intact: dict[str, object] = {}
"""By file: its state on disk and its seed when this process found all of its rows intact."""


def seed_of(identity: Mapping[str, Any]) -> int:
    """Compute the seed of an array's checksums.

    Args:
        identity: all that tells the array from others, as plain JSON.
    """
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


class RowFile:
    """One open file of the format above.

    Attributes:
        path: the file.
        remedy: what to do if it is damaged.
        array: `(rows, width)`, memory-mapped.
        sums: `(rows,)`, uint64, memory-mapped; `None` for a file without checksums.
    """

    def __init__(
        self,
        path: Path,
        shape: tuple[int, int],
        dtype: Any,
        checked: bool = True,
        mode: Literal["r", "r+"] = "r+",
        remedy: str = "Restore it from a copy.",
    ) -> None:
        """Open a file that exists. Its rows are not read.

        Args:
            path: the file.
            shape: shape that its array must have.
            dtype: dtype that its array must have.
            checked: whether checksums follow the array.
            mode: `r` or `r+`.
            remedy: what to do about a damaged file, for the error message.

        Raises:
            FileNotFoundError: the file does not exist.
            StoreError: it is truncated, or holds another array, or may not be opened.
        """
        self.path = path
        self.remedy = remedy
        found = _read_header(path, remedy)
        itemsize = np.dtype(dtype).itemsize
        plain = found.offset + shape[0] * shape[1] * itemsize
        summed = _with_sums(plain, shape[0])
        sizes = [summed] if checked else [plain, summed]  # an interrupted upgrade leaves checksums behind
        if found.shape != shape or found.dtype != dtype or found.fortran or found.size not in sizes:
            raise StoreError(
                f"{path} holds {found.dtype} {found.shape} in {found.size} bytes; expected {np.dtype(dtype)} {shape}, "
                f"{'with' if checked else 'without'} checksums. {remedy}"
            )
        try:
            self.array = np.memmap(path, dtype, mode, found.offset, shape)
            self.sums = np.memmap(path, np.uint64, mode, summed - 8 * shape[0], shape[:1]) if checked else None
        except OSError as error:
            raise StoreError(f"{path} cannot be opened ({error}). {remedy}") from error

    @staticmethod
    def create(path: Path, shape: tuple[int, int], dtype: Any, checked: bool = True, replace: bool = False) -> None:
        """Make a file of zeros. A file that another process has created meanwhile stays, unless `replace` is set.

        Raises:
            StoreError: the file cannot be written.
        """

        def fill(temporary: Path) -> None:
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
            end = array.offset + array.nbytes
            with open(temporary, "r+b") as file:
                allocate(file, _with_sums(end, shape[0]) if checked else end)

        if replace:
            with atomic_path(path) as temporary:
                fill(temporary)
        else:
            create_file(path, fill)

    @staticmethod
    def write(path: Path, values: np.ndarray, seed: int | None) -> None:
        """Write a whole array at once, atomically, with checksums if a seed is given.

        Raises:
            StoreError: the file cannot be written.
        """
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.lib.format.write_array(file, values, allow_pickle=False)
            if seed is not None:
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                file.write(row_sums(values, np.arange(len(values)), seed).tobytes())

    def seal(self, rows: np.ndarray, seed: int) -> None:
        """Compute the checksums of rows that have been written to the array."""
        if self.sums is not None:
            _intact.pop(os.path.abspath(self.path), None)
            for part in _parts(rows, self.array):
                self.sums[part] = row_sums(self.array[part], part, seed)

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
        state = (_stamp(self.path), seed)
        if self.sums is None or (not again and _intact.get(os.path.abspath(self.path)) == state):
            return none, none
        wrong = [none]
        bare = rows[self.sums[rows] == 0]
        for part in _parts(rows[self.sums[rows] != 0], self.array):
            wrong.append(part[row_sums(self.array[part], part, seed) != self.sums[part]])
        found = np.concatenate(wrong)
        if not len(found) and not len(bare) and len(rows) == len(self.array):
            _intact[os.path.abspath(self.path)] = state
        return found, bare

    def stray_bytes(self) -> bool:
        """Tell whether the padding between array and checksums holds anything but zeros."""
        end = self.array.offset + self.array.nbytes
        with open(self.path, "rb") as file:
            file.seek(end)
            return self.sums is not None and any(file.read(-end % _ALIGNMENT))

    def flush(self) -> None:
        """Write all changes to disk.

        Raises:
            OSError: they cannot be written.
        """
        self.array.flush()
        if self.sums is not None:
            self.sums.flush()


def rows_without_values(file: RowFile, rows: np.ndarray) -> np.ndarray:
    """Find the rows whose values are all zero, as they are before anything is written."""
    return rows[~np.asarray(file.array[rows] != 0).any(axis=1)]


def add_sums(path: Path, shape: tuple[int, int], dtype: Any, rows: np.ndarray, seed: int) -> np.ndarray:
    """Replace a file without checksums, atomically, by one with checksums of the given rows. Checksums that the file
    already has are computed anew.

    Returns:
        `numpy.ndarray` of shape `(shape[0],)`, uint64: the checksums, 0 for all other rows.

    Raises:
        StoreError: the file is truncated, or holds another array, or cannot be written.
    """
    old = RowFile(path, shape, dtype, checked=False, mode="r")
    sums = np.zeros(shape[0], dtype=np.uint64)
    for part in _parts(rows, old.array):
        sums[part] = row_sums(old.array[part], part, seed)
    end = old.array.offset + old.array.nbytes
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        with open(path, "rb") as source:
            while block := source.read(min(_BLOCK_BYTES, end - source.tell())):
                file.write(block)
        file.write(b"\0" * (-end % _ALIGNMENT))
        file.write(sums.tobytes())
    return sums


@dataclass(frozen=True)
class _Header:
    """The header of a file, and the file's size."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    offset: int
    size: int


def _read_header(path: Path, remedy: str) -> _Header:
    """Read the header of a file. (NumPy would extend a truncated file with zeros when it maps it.)"""
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # NumPy takes damaged headers for those of Python 2
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran, dtype = read[np.lib.format.read_magic(file)](file)
            return _Header(shape, dtype, fortran, file.tell(), os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise
    except _HEADER_ERRORS as error:
        raise StoreError(
            f"{path} cannot be opened as a complete .npy file ({error}). Expected a file that hf_trak wrote. {remedy}"
        ) from error


def _with_sums(end: int, rows: int) -> int:
    """Return the size, with checksums, of a file whose array ends at byte `end`."""
    return end + -end % _ALIGNMENT + 8 * rows


def _parts(rows: np.ndarray, array: np.ndarray) -> list[np.ndarray]:
    """Split row numbers into parts whose values fit into a block."""
    count = max(1, _BLOCK_BYTES // max(1, array.shape[1] * array.itemsize))
    return [rows[start : start + count] for start in range(0, len(rows), count)]


def _stamp(path: Path) -> object:
    """Return what changes whenever a file does. Unlike its modification time, its change time cannot be set back."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
