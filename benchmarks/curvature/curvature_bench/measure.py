"""Seconds and peak memory of the stages of a library, beside plain passes that are made before and after each."""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from curvature_bench.work import PlainPass, Work

StageOf = str | Callable[..., str]
"""A stage, or what tells it from the arguments of a call."""


@dataclass(frozen=True)
class Time:
    """Seconds on the clock, and seconds of this process on a processor."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Time":
        return cls(time.perf_counter(), time.process_time())

    def __add__(self, other: "Time") -> "Time":
        return Time(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: "Time") -> "Time":
        return Time(self.wall - other.wall, self.cpu - other.cpu)

    def __truediv__(self, other: "Time") -> "Time":
        return Time(self.wall / other.wall, self.cpu / other.cpu)


@dataclass
class Measured:
    """What one process has measured.

    Attributes:
        plain: times of the plain passes.
        times: by stage.
        ratios: times of a stage divided by those of a plain pass, the mean of the ones before and after it.
        peak_mib: by group of stages and of a plain pass, above what the process held before; empty but on Linux.
        promised_mib: the same, as the library's own estimate has it, if it has one.
    """

    plain: list[Time] = field(default_factory=list)
    times: dict[str, Time] = field(default_factory=dict)
    ratios: dict[str, Time] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    promised_mib: dict[str, float] = field(default_factory=dict)


class Meter:
    """Measures stages one after the other, with plain passes between them."""

    def __init__(self, work: Work) -> None:
        self.measured = Measured()
        self._plain = PlainPass(work)
        self._plain.step()  # libraries allocate on first use
        self._calls: dict[str, Time] = {}
        self._plain_pass()

    @contextmanager
    def stages(self, name: str, rest: str | None = None) -> Iterator[None]:
        """Measure a group of stages: the peak memory of all, and the time of each that is timed inside.

        Args:
            name: the group's name, under which its peak memory is reported; also a stage, the whole group, unless
                `rest` is given.
            rest: a stage for what the group does besides the stages that are timed inside.
        """
        self._calls = {}
        memory = PeakMemory()
        started = Time.now()
        yield
        taken = Time.now() - started
        if (peak := memory.mib()) is not None:
            self.measured.peak_mib[name] = peak
        if rest is None:
            self._calls[name] = taken
        else:
            self._calls[rest] = taken - sum(self._calls.values(), Time(0.0, 0.0))
        self._plain_pass()
        before, after = self.measured.plain[-2:]
        plain = (before + after) / Time(2.0, 2.0)
        self.measured.times |= self._calls
        self.measured.ratios |= {stage: each / plain for stage, each in self._calls.items()}

    @contextmanager
    def calls(self, owner: Any, name: str, stage: StageOf) -> Iterator[None]:
        """Add the time of every call of a function or method to a stage of the group that is being measured.

        Args:
            owner: module, class or object that has it.
            name: its name.
            stage: the stage, or a function of the arguments of the call that names it.
        """
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = Time.now()
            result = function(*args, **kwargs)
            of = stage if isinstance(stage, str) else stage(*args, **kwargs)
            self._calls[of] = self._calls.get(of, Time(0.0, 0.0)) + (Time.now() - started)
            return result

        with patch.object(owner, name, timed):
            yield

    def _plain_pass(self) -> None:
        memory = PeakMemory()
        started = Time.now()
        self._plain()
        self.measured.plain.append(Time.now() - started)
        if (peak := memory.mib()) is not None:
            self.measured.peak_mib["plain"] = max(peak, self.measured.peak_mib.get("plain", 0.0))


class PeakMemory:
    """Peak memory of this process from now on, above what it holds now; known on Linux only."""

    def __init__(self) -> None:
        self._before: float | None = None
        if sys.platform == "linux" and os.access("/proc/self/clear_refs", os.W_OK):
            gc.collect()
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
                trim(0)  # what earlier stages have freed but glibc keeps would hide what this one takes
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts anew
            self._before = _status("VmRSS")

    def mib(self) -> float | None:
        return None if self._before is None else _status("VmHWM") - self._before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
