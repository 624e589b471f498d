"""Progress of a pass over rows: a bar with rate and remaining time, and one estimate of that time in the log."""

import logging
import time
from collections.abc import Callable
from types import TracebackType

from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

_SETTLED_BATCHES = 3
_SETTLED_SECONDS = 2.0


class RowProgress:
    """Counts the rows that one process has finished.

    The first batch is left out of the estimate of the remaining time, since it includes the choice of the engine, its
    check, and everything that is compiled or cached at first use.
    """

    def __init__(
        self,
        rows: int,
        description: str,
        *,
        processes: int = 1,
        show: bool = True,
        announce: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            rows: number of rows that this process has to do.
            description: text before the bar.
            processes: number of processes that do as many rows each, for the rate of all together.
            show: whether to show the bar.
            announce: whether to log the estimate, once, after the first batches.
            clock: returns a time in seconds.
        """
        self.rows = rows
        self.description = description
        self.processes = processes
        self._announce = announce
        self._clock = clock
        self._bar = tqdm(total=rows, desc=description, unit="rows", disable=not show)
        self._done = 0
        self._batches = 0
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> "RowProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, rows: int) -> None:
        """Count one batch of `rows` rows."""
        self._done += rows
        self._batches += 1
        self._bar.update(rows)
        now = self._clock()
        if self._first is None:
            self._first = (now, self._done)
            return
        seconds = now - self._first[0]
        if self._announce and self._batches > _SETTLED_BATCHES and seconds >= _SETTLED_SECONDS:
            self._announce = False
            logger.info("%s: %s", self.description, self._estimate((self._done - self._first[1]) / seconds))

    def _estimate(self, rate: float) -> str:
        left = self.rows - self._done
        text = f"{rate * self.processes:,.1f} rows/s, about {duration(left / rate)} left for {left:,} rows"
        return f"{text} in each of {self.processes} processes" if self.processes > 1 else text


def duration(seconds: float) -> str:
    """Format a duration, for example as `45 s`, `3 min 20 s`, or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
