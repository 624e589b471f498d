"""Time limits that hold on a busy machine: they count how long a fixed piece of work takes there."""

import os
import time

_WORK = 0.02
"""Processor seconds of the fixed piece of work."""


def slowness() -> float:
    """Return how many times longer than alone a process takes at this moment; at least 1."""
    wall, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < _WORK:
        pass
    return max(1.0, (time.perf_counter() - wall) / _WORK)


def patient(seconds: float) -> float:
    """Return a time limit in wall seconds for work that takes less than so many seconds on an idle machine."""
    return seconds * max(slowness(), os.getloadavg()[0] / (os.cpu_count() or 1))


class Deadline:
    """A time limit whose seconds last as much longer as the machine is slower while they pass."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._last = time.monotonic()

    def passed(self) -> bool:
        """Tell whether the time is over; to be asked again and again."""
        now = time.monotonic()
        self._left -= (now - self._last) / slowness()
        self._last = now
        return self._left < 0
