"""The worker of one library: a process that reads requests, does the work, writes scores and tells times."""

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from comparison.cases import CASES, Case, Logits, Size
from comparison.retraining import checkpoints

SETTINGS = "settings.json"


@dataclass
class Clock:
    """Wall and CPU seconds of the stages of a worker: `featurize` and `score`, or `all` in one, and `project`."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    def time(self, stage: str, run: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        self.seconds[stage] = time.perf_counter() - wall
        self.cpu[stage] = time.process_time() - cpu
        return result


@dataclass(frozen=True)
class Settings:
    """One case at one size: what a directory of results belongs to."""

    case: str
    size: Size
    proj_dim: int
    checkpoints: int
    threads: int
    batch_size: int

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Settings":
        read = json.loads(path.read_text())
        return cls(**{**read, "size": Size(**read["size"])})


@dataclass(frozen=True)
class Job:
    """A request to a worker.

    Attributes:
        models: the checkpoints.
        seed: of the random projection.
        lambdas: further λ to score with, relative to trace(XᵀX) / min(n, k) of the library's own features X.
        timed: stages are what counts, with those that nothing else needs; there are no `lambdas`.
        directory: scratch.
    """

    case: Case
    models: list[nn.Module]
    k: int
    batch_size: int
    seed: int
    lambdas: list[float]
    timed: bool
    directory: Path

    @property
    def bare(self) -> Logits:
        """The first checkpoint, returning logits."""
        return Logits(self.models[0], list(self.case.inputs)).eval()

    def states(self) -> list[dict[str, Tensor]]:
        """Weights of the checkpoints, by the names of `bare`."""
        return [dict(Logits(model, []).state_dict()) for model in self.models]

    def unit(self, features: Tensor) -> float:
        """trace(XᵀX) / min(n, k), of features X `(n, k)`."""
        return float(features.square().sum()) / min(features.shape)


Scores = dict[str, np.ndarray]
"""`(n, m)` by λ: "default", and each relative λ as `f"{λ:g}"`."""


def serve(library: str, path: Path) -> None:
    """Answer requests for the case of a directory until there are no more: one line of JSON each, in and out.

    A process goes on for all measurements of its library, so that none is charged for imports and first calls.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    settings = Settings.load(path / SETTINGS)
    torch.set_num_threads(settings.threads)
    attribute = importlib.import_module(f"comparison.with_{library}").attribute
    case = CASES[settings.case](settings.size)
    models = checkpoints(case, settings.checkpoints, path.parent)

    def run(seed: int, lambdas: list[float], timed: bool) -> tuple[Scores, Clock]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as directory:
            where = Path(directory).resolve()
            job = Job(case, models, settings.proj_dim, settings.batch_size, seed, lambdas, timed, where)
            return attribute(job, clock), clock

    warm = False
    for line in sys.stdin:
        request = json.loads(line)
        if request["timed"]:
            if not warm:
                run(request["seeds"][0], [], True)
            memory = PeakMemory()
            _, clock = run(request["seeds"][0], [], True)
            answer = {"seconds": clock.seconds, "cpu": clock.cpu, "peak_mib": memory.mib()}
        else:
            for seed in request["seeds"]:
                found, _ = run(seed, request["lambdas"], False)
                np.savez(path / f"{library}-{seed}.npz", allow_pickle=False, **found)
            answer = {}
        warm = request["timed"]
        print(json.dumps(answer), file=answers, flush=True)


class PeakMemory:
    """Peak memory of this process since then, above what it held; known on Linux only."""

    def __init__(self) -> None:
        self.before: float | None = None
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts anew
            self.before = self._status("VmRSS")

    def mib(self) -> float | None:
        return None if self.before is None else self._status("VmHWM") - self.before

    @staticmethod
    def _status(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def gradient_block(models: list[nn.Module]) -> Tensor:
    """32 rows of P random numbers, to time projections with."""
    count = sum(parameter.numel() for parameter in models[0].parameters())
    return torch.randn(32, count, generator=torch.Generator().manual_seed(0))
