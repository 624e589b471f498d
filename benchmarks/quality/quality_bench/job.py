"""One method on one case, in a process of its own: what it is given, what it gives, and how its cost is measured."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from quality_bench.case import Case, trained

BATCH = 32
"""Rows per batch of every method."""


@dataclass
class Cost:
    """What a method costs.

    Attributes:
        seconds: wall-clock seconds by stage: `fit`, whatever can be done before targets are known, and `score`.
        bytes_per_row: bytes that are stored per training row between `fit` and `score`; 0 if nothing is.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    bytes_per_row: float = 0.0

    def time(self, stage: str, run: Callable[[], Any]) -> Any:
        """Run a stage of the default variant, and add its seconds."""
        started = time.perf_counter()
        result = run()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
        return result


Scores = dict[str, np.ndarray]
"""Matrices `(n, m)` by variant, positive for helpful rows. The variant "default" is what the library does unless told
otherwise, or what it recommends; the others are settings among which the best is chosen on other targets."""


@dataclass(frozen=True)
class Job:
    """What a method may use.

    Attributes:
        case: the case.
        directory: an empty directory for scratch files.
        work: directory of the case, with trained models.
        seed: of random projections and samples.
    """

    case: Case
    directory: Path
    work: Path
    seed: int = 0

    @property
    def model(self) -> nn.Module:
        """The model that was trained on all rows, a fresh copy in eval mode."""
        return trained(self.case, 0, self.work)[-1]

    def independent(self, count: int) -> list[nn.Module]:
        """Models trained on all rows with seeds 0, 1, …"""
        return [trained(self.case, seed, self.work)[-1] for seed in range(count)]

    def of_one_run(self) -> list[nn.Module]:
        """Models after each third of the steps of the training with seed 0."""
        return trained(self.case, 0, self.work)

    def tensors(self, part: str) -> tuple[list[Tensor], Tensor]:
        """Inputs in the order of `case.inputs`, and labels, of `"train"` or `"targets"`."""
        rows = getattr(self.case, part)
        return list(self.case.inputs(rows).values()), self.case.labels(rows)


Method = Callable[[Job, Cost], Scores]


class PeakMemory:
    """Peak memory of this process from now on, above what it holds now; known on Linux only."""

    def __init__(self) -> None:
        self.before: float | None = None
        if sys.platform == "linux" and os.access("/proc/self/clear_refs", os.W_OK):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts anew
            self.before = self._status("VmRSS")

    def mib(self) -> float | None:
        return None if self.before is None else self._status("VmHWM") - self.before

    @staticmethod
    def _status(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


class Logits(nn.Module):
    """A model that returns bare logits, and takes its inputs by position."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        output: Any = self.model(**dict(zip(self.names, tensors, strict=True)))
        return output if isinstance(output, Tensor) else output.logits


def bare(job: Job, model: nn.Module | None = None) -> Logits:
    """A model that takes `case.inputs` by position and returns logits."""
    names = list(job.case.inputs(job.case.train.select(range(1))))
    return Logits(job.model if model is None else model, names).eval()
