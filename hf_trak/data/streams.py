"""Streams as datasets with row numbers: an order and a length that the user fixes."""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

from hf_trak.data.rows import update_digest


class StreamedRows:
    """The first `num_rows` rows of a stream, as a dataset whose row i is the i-th one to come out of it.

    ```python
    stream = load_dataset("allenai/c4", "en", split="train", streaming=True)
    attributor = TrakAttributor(model, args, train_dataset=StreamedRows(stream, num_rows=100_000), ...)
    ```

    Scores refer to row numbers, so the stream must give the same rows in the same order each time it is started: this
    is checked, against 8 bytes kept per row. Reading forwards is a single pass; reading a row before the last one read
    starts the stream anew. Every process reads the stream for itself and skips the rows of the others.
    """

    sequential = True
    """Read in the process itself, whatever `dataloader_num_workers` says: `datasets` divides a stream among workers,
    and each would have to read all of it."""

    def __init__(self, stream: Iterable[Any], num_rows: int) -> None:
        """
        Args:
            stream: can be iterated more than once, for example a `datasets.IterableDataset`; not a generator.
            num_rows: how many of its rows to use, the length of the dataset.

        Raises:
            TypeError: the stream can be read only once.
            ValueError: `num_rows` is not at least 1.
        """
        if isinstance(stream, Iterator) or not isinstance(stream, Iterable):
            raise TypeError(
                f"`stream` is a {type(stream).__name__}. Expected something that can be iterated from its start more "
                "than once, such as a `datasets.IterableDataset`. Wrap a generator function with "
                "`datasets.IterableDataset.from_generator`."
            )
        if isinstance(num_rows, bool) or not isinstance(num_rows, int) or num_rows < 1:
            raise ValueError(f"`num_rows` is {num_rows!r}. Expected the number of rows to use, at least 1.")
        self.stream = stream
        self.num_rows = num_rows
        self._digests = array("Q")
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._last: Any = None

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Any:
        """Row `index`.

        Raises:
            IndexError: there is no such row.
            ValueError: the stream ends before it, or gives other rows than it gave before.
        """
        if not 0 <= index < self.num_rows:
            raise IndexError(f"Row {index} does not exist; expected 0 ≤ index < {self.num_rows}.")
        if self._iterator is None or index < self._next - 1:
            self._iterator, self._next = iter(self.stream), 0
        while self._next <= index:
            try:
                self._last = next(self._iterator)
            except StopIteration:
                ended, self._iterator = self._next, None
                raise ValueError(
                    f"The stream ended after {ended} rows; `num_rows` is {self.num_rows}. Expected at least as many "
                    + (f"rows. Use `num_rows={ended}`." if ended else "rows. Is it another stream, or an empty file?")
                ) from None
            except BaseException:
                self._iterator = None  # one that has failed ends, which would look like the end of the stream
                raise
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
                "the same order each time. Shuffle with a fixed seed and leave the epoch alone, take rows "
                "from one source, or store them: `Dataset.from_generator`."
            )
