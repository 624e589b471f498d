"""Streams that fail, end early, or are empty: each error says what has happened, and reading resumes if it can."""

from collections.abc import Iterator
from typing import Any

import pytest
from datasets import IterableDataset

from hf_trak import StreamedRows


class Broken:
    """A stream with one row that cannot be read the first `times` times."""

    def __init__(self, bad: int, times: int) -> None:
        self.bad, self.times = bad, times

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in range(6):
            if row == self.bad and self.times:
                self.times -= 1
                raise ConnectionError("the line broke")
            yield {"x": row}


def test_a_broken_line_is_not_the_end_of_a_stream() -> None:
    """The error of the connection is raised each time, and reading resumes when it works again."""
    rows = StreamedRows(Broken(bad=3, times=2), 6)
    assert rows[2] == {"x": 2}
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the line broke"):
            rows[4]
    assert [rows[i]["x"] for i in range(6)] == list(range(6))


@pytest.mark.parametrize("stream", [[], IterableDataset.from_generator(lambda: iter(()))], ids=["list", "datasets"])
def test_an_empty_stream_is_named(stream: Any) -> None:
    with pytest.raises(ValueError, match=r"ended after 0 rows; `num_rows` is 5.*whether its files are empty"):
        StreamedRows(stream, 5)[0]


def test_a_short_stream_says_how_many_rows_it_has() -> None:
    with pytest.raises(ValueError, match=r"ended after 6 rows; `num_rows` is 9.*Set `num_rows=6`"):
        StreamedRows(Broken(bad=3, times=0), 9)[8]
