"""Progress of a pass over rows: a bar with rate and remaining time, and one estimate of that time in the log."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

if TYPE_CHECKING:  # the second imports torch, and is not needed where nothing is divided
    from datasets import Dataset

    from hf_trak.runtime.processes import Processes

logger = logging.getLogger(__name__)


_SETTLED_BATCHES = 3

_SETTLED_SECONDS = 2.0


@dataclass
class RowProgress:
    """Counts the rows that one process has finished.

    The first batch is left out of the estimate of the remaining time, since it includes the choice of the engine, its
    check, and everything that is compiled or cached at first use.

    Attributes:
        rows: number of rows that this process has to do.
        description: text before the bar.
        processes: number of processes that do as many rows each, for the rate of all together.
        show: whether to show the bar, unless bars are switched off in `datasets`.
        announce: whether to log the estimate, once, after the first batches.
        clock: returns a time in seconds.
    """

    rows: int
    description: str
    _: KW_ONLY
    processes: int = 1
    show: bool = True
    announce: bool = True
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def over(cls, processes: "Processes", rows: int, description: str, announce: bool = True) -> "RowProgress":
        """Count rows of a pass that the processes divide, shown by the main one.

        Args:
            processes: the processes.
            rows: number of rows that this process has to do.
            description: text before the bar.
            announce: whether to log the estimate.
        """
        main = processes.is_main_process
        return cls(rows, description, processes=processes.num_processes, show=main, announce=main and announce)

    def __post_init__(self) -> None:
        hidden = not self.show or _bars_are_hidden()
        self._bar = tqdm(total=self.rows, desc=self.description, unit="rows", disable=hidden)
        self._done = self._batches = 0
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> "RowProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def update(self, rows: int) -> None:
        """Count one batch of `rows` rows."""
        self._done += rows
        self._batches += 1
        self._bar.update(rows)
        now = self.clock()
        if self._first is None:
            self._first = (now, self._done)
            return
        seconds = now - self._first[0]
        if self.announce and self._batches > _SETTLED_BATCHES and seconds >= _SETTLED_SECONDS:
            self.announce = False
            logger.info("%s: %s", self.description, self._estimate((self._done - self._first[1]) / seconds))

    def _estimate(self, rate: float) -> str:
        left = self.rows - self._done
        text = f"{rate * self.processes:,.1f} rows/s, about {duration(left / rate)} left for {left:,} rows"
        return f"{text} in each of {self.processes} processes" if self.processes > 1 else text


def duration(seconds: float) -> str:
    """Format a duration, for example as `45 s`, `3 min 20 s`, or `2 h 5 min`."""
    whole = round(seconds)
    if seconds < 1:
        return f"{seconds:.1g} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def say(log: logging.Logger, text: str) -> None:
    """Log a line, and show it beside the progress bars where the log does not.

    Args:
        log: the logger of the module that has something to say.
        text: the line.
    """
    log.info("%s", text)
    if not log.isEnabledFor(logging.INFO) and not _bars_are_hidden():
        tqdm.write(text, file=sys.stderr)


def _bars_are_hidden() -> bool:
    # Takes more than a second, which who shows none need not wait.
    from datasets.utils import are_progress_bars_disabled

    return are_progress_bars_disabled() or os.environ.get("TQDM_DISABLE", "") not in ("", "0")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Return a context in which `datasets` shows no bars. Afterwards it is as it was before."""
    from datasets import disable_progress_bars, enable_progress_bars
    from datasets.utils import are_progress_bars_disabled

    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not silent:
            enable_progress_bars()


def with_column(rows: "Dataset", name: str, values: Any, feature: Any = None) -> "Dataset":
    """Add a column, without the bar that `datasets` shows for rows that were selected.

    Args:
        rows: the rows.
        name: name of the column.
        values: its values.
        feature: its type; by default that of the values.
    """
    with no_progress_bars():
        return rows.add_column(name, values, feature=feature)


class _Terminated(BaseException):
    """Raised instead of dying of SIGTERM at once, so that unfinished files are removed on the way out."""


@contextmanager
def log_on_interrupt(message: Callable[[], str]) -> Iterator[None]:
    """Log a message when the block is interrupted, and let the interruption take its course.

    Ctrl-C stays a `KeyboardInterrupt`. After SIGTERM the process still dies of SIGTERM, as the sender expects. A
    handler of SIGTERM that other code has installed is left in place.

    Args:
        message: returns what has been done and how to continue; called when the block is interrupted.

    Raises:
        KeyboardInterrupt: the block was interrupted by Ctrl-C.
    """
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    owner = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise _Terminated
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker dies as it would without this
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        if mine:
            signal.signal(signal.SIGTERM, terminate)
        yield
    except KeyboardInterrupt:
        logger.warning("Interrupted. %s", message())
        raise
    except _Terminated:
        logger.warning("Terminated by SIGTERM. %s", message())
        if not mine:
            raise  # the outer block, which installed the handler, ends the process once blocks between have cleaned up
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise  # not reached where SIGTERM ends a process
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Pace:
    """Counts rows per second, without the first batch, which pays for the choice of the engine and its check."""

    def __init__(self, also: Callable[[int], None]) -> None:
        """
        Args:
            also: called with the number of rows of every batch, too.
        """
        self._also = also
        self._first = self._last = 0.0
        self._batches = self._rows = 0

    def count(self, rows: int) -> None:
        """Count a batch that is done."""
        self._last = time.perf_counter()
        if self._batches == 0:
            self._first = self._last
        else:
            self._rows += rows
        self._batches += 1
        self._also(rows)

    @property
    def rate(self) -> float | None:
        """Return the rows per second; `None` before the third batch."""
        return self._rows / (self._last - self._first) if self._batches > 2 else None
