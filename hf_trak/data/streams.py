"""Streams as map-style datasets, with a length that the user gives."""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

from hf_trak.data.rows import update_digest
from hf_trak.runtime.checks import checked_int


class StreamedRows:
    """The first `num_rows` rows of a stream as a map-style dataset. Row i is the i-th row of the stream.

    ```python
    stream = load_dataset("allenai/c4", "en", split="train", streaming=True)
    attributor = TrakAttributor(model, args, train_dataset=StreamedRows(stream, num_rows=100_000), ...)
    ```

    Scores refer to row numbers, so the stream has to give the same rows in the same order every time it is started.
    This is checked with a digest of 8 bytes per row. Reading forwards takes a single pass; reading a row before the
    last one read starts the stream again. Every process reads the whole stream and skips the rows of the others.

    Args:
        stream (`Iterable`):
            A stream that can be iterated over more than once, such as a `datasets.IterableDataset`, but no generator.
        num_rows (`int`):
            Number of rows to use, which is the length of the dataset.

    Raises:
        TypeError: the stream can be read only once.
        ValueError: `num_rows` is not an integer of at least 1.
    """

    sequential = True
    """Rows are loaded without worker processes, however many are asked for: `datasets` divides a stream
    among workers, and each of them would have to read all of it."""

    def __init__(self, stream: Iterable[Any], num_rows: int) -> None:
        if isinstance(stream, Iterator) or not isinstance(stream, Iterable):
            raise TypeError(
                f"`stream` is a {type(stream).__name__}. Expected a stream that can be iterated over more than once, "
                "such as a `datasets.IterableDataset`. Wrap a generator function with "
                "`datasets.IterableDataset.from_generator`."
            )
        self.stream = stream
        self.num_rows = checked_int(num_rows, "num_rows", 1, type_error=ValueError)
        self._digests = array("Q")
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._last: Any = None

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Any:
        """Read row `index`.

        Raises:
            IndexError: there is no such row.
            ValueError: the stream ends before this row, or gives other rows than before.
        """
        if not 0 <= index < self.num_rows:
            raise IndexError(f"Row {index} does not exist. Expected a number from 0 to {self.num_rows - 1}.")
        if self._iterator is None or index < self._next - 1:
            self._iterator, self._next = iter(self.stream), 0
        while self._next <= index:
            # Without an iterator until the row is there: one that has failed would next report the end of the stream.
            iterator, self._iterator = self._iterator, None
            try:
                self._last = next(iterator)
            except StopIteration:
                ended = self._next
                raise ValueError(
                    f"The stream ended after {ended} rows; `num_rows` is {self.num_rows}. Expected at least as "
                    "many rows. "
                    + (f"Set `num_rows={ended}`." if ended else "Check whether its files are empty or were moved.")
                ) from None
            self._iterator = iterator
            self._check(self._next, self._last)
            self._next += 1
        return self._last

    def _check(self, index: int, row: Any) -> None:
        digest = xxhash.xxh3_64()
        update_digest(digest, row)
        if index == len(self._digests):
            self._digests.append(digest.intdigest())
        elif self._digests[index] != digest.intdigest():
            raise ValueError(
                f"Row {index} of the stream is not what it was when it was read before. Expected the same rows in "
                "the same order every time. Shuffle with a fixed seed and do not change the epoch, or store the rows "
                "with `Dataset.from_generator`."
            )
