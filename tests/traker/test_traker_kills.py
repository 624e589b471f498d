"""Runs of `TRAKer` that are killed at any moment: the same script, run again, gives the same bits."""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import PYTHONPATH
from store_jobs import Job
from traker_runs import M, N, model, rows, run, state

import hf_trak.store
import hf_trak.traker.savers
import hf_trak.traker.traker
from hf_trak.store.atomic import leftovers
from hf_trak.traker import TRAKer

KILLED = -signal.SIGKILL
ROOM = os.path.dirname(hf_trak.traker.__file__)
OURS = (
    os.path.join(ROOM, "savers") + os.sep,
    os.path.dirname(hf_trak.store.__file__) + os.sep,
    hf_trak.traker.traker.__file__,
)
"""Files whose lines are counted."""


def script(directory: Path) -> dict[str, Any]:
    """Two checkpoints in batches, features, targets in batches, scores. Returns digests of them and of all files."""
    traker = TRAKer(
        model(), "image_classification", N, directory, device="cpu", proj_dim=8, use_half_precision=False,
        lambda_reg=0.05, logging_level=30,
    )  # fmt: skip
    for member in range(2):
        traker.load_checkpoint(state(member), member)
        for start in range(0, N, 4):
            stop = min(start + 4, N)
            traker.featurize(rows(start, stop), inds=range(start, stop))
    traker.finalize_features()
    for member in range(2):
        traker.start_scoring_checkpoint("golden", state(member), member, M)
        for start in (0, 2):
            stop = min(start + 2, M)
            traker.score(rows(N + start, N + stop), inds=range(start, stop))
    scores = traker.finalize_scores("golden")
    return {"scores": scores.tolist(), "files": digests(directory)}


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def alone(directory: Path) -> dict[str, Any]:
    """The script in a process of its own. What a killed process has written is there: no need to wait for a disk."""
    os.fsync = lambda descriptor: None
    np.memmap.flush = lambda array: None  # type: ignore[method-assign]
    return script(directory)


def killed_at(step: int | None, directory: Path) -> dict[str, Any]:
    """The script, killed right before it runs its `step`-th line of this library's code that works on files."""
    count = 0

    def in_frame(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
        return in_frame

    sys.settrace(lambda frame, event, argument: in_frame if frame.f_code.co_filename.startswith(OURS) else None)
    try:
        result = alone(directory)
    finally:
        sys.settrace(None)
    return {**result, "lines": count}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The server that jobs are forked from takes its environment over when the first job starts."""
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("PYTHONPATH", PYTHONPATH)
    yield
    patch.undo()


class Reference:
    """A run that nobody disturbed."""

    def __init__(self, directory: Path) -> None:
        counted = Job(directory / "report.json", killed_at, None, directory / "counted").wait()
        begun = time.monotonic()  # the first job starts the server
        report = Job(directory / "report.json", alone, directory / "whole").wait()
        self.seconds = time.monotonic() - begun
        assert report is not None and counted is not None
        self.result, self.lines = report["value"], counted["value"].pop("lines")
        assert counted["value"] == self.result and self.lines > 1000


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


def kill_and_resume(reference: Reference, place: Path, kills: int, seed: int) -> None:
    """Directories whose runs are killed one to five times each, at random lines and times, and then finished."""
    rng, killed, trial = np.random.default_rng(seed), 0, 0
    while killed < kills:
        directory, trial = place / str(trial), trial + 1
        history = []
        for _ in range(int(rng.integers(1, 6))):
            if rng.random() < 0.75:
                step = int(rng.integers(1, reference.lines + 1))
                job = Job(place / "report.json", killed_at, step, directory)
                history.append(f"before line {step}")
            else:
                job = Job(place / "report.json", alone, directory)
                after = float(rng.uniform(0, reference.seconds))
                time.sleep(after)
                job.kill()
                history.append(f"after {after:.3f} s")
            report = job.wait()
            assert report is None or report["value"].items() >= reference.result.items(), (history, report)
            killed += job.process.exitcode == KILLED
        report = Job(place / "report.json", alone, directory).wait()
        assert report is not None and "value" in report, (history, report)
        found, files = report["value"], reference.result["files"]
        differing = {name for name in found["files"].keys() | files if found["files"].get(name) != files.get(name)}
        assert not differing and found["scores"] == reference.result["scores"], (history, differing)
        for one in leftovers(directory):
            assert one.alive is False and one.remove(), one
        names = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
        assert names - {".experiments.lock"} == reference.result["files"].keys()


@pytest.mark.slow
def test_killed_at_any_moment(reference: Reference, tmp_path: Path) -> None:
    kill_and_resume(reference, tmp_path, kills=4, seed=0)


@pytest.mark.exhaustive
def test_killed_at_any_moment_often(reference: Reference, tmp_path: Path) -> None:
    kill_and_resume(reference, tmp_path, kills=200, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["link", "replace"])
def test_interrupted_before_each_file_appears(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the registration of a model id and its arrays, among other places."""
    run(tmp_path / "whole")
    expected, act, steps = digests(tmp_path / "whole"), getattr(os, call), 0
    while True:
        count = 0

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            if count == steps:  # noqa: B023
                raise KeyboardInterrupt
            count += 1
            return act(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, counted)
            try:
                run(tmp_path / str(steps))
            except KeyboardInterrupt:
                pass
            else:
                break
        run(tmp_path / str(steps))
        assert digests(tmp_path / str(steps)) == expected, steps
        steps += 1
    assert steps >= {"link": 12, "replace": 6}[call]
