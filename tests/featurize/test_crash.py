"""Runs that are killed, starved of disk space, interrupted or damaged: they always end in the results of a run that
was left alone, or in an error that names the file. Never in other results."""

import errno
import functools
import logging
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_jobs
from store_jobs import Job, Sizes, start_group, wait_for

from hf_trak.data.rows import RowBatches
from hf_trak.runtime.progress import log_on_interrupt
from hf_trak.store import atomic

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

KILLED = -signal.SIGKILL
DESCRIBING = ("trak_config.json", "checkpoint.json", "experiment.json")
"""Files that say what the others are: damaged ones are restored from a copy, all others are deleted."""


@dataclass
class Reference:
    result: dict[str, Any]
    seconds: float
    steps: int
    """Calls of the system that make a file visible or durable."""


def kill_at(step: int, directory: Path) -> Any:
    """The job, killed right before its `step`-th system call that makes a file visible or durable."""
    calls = count_steps(step)
    result = store_jobs.run(directory)
    return {**result, "steps": calls()}


def count_steps(limit: int | None) -> Callable[[], int]:
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("fsync", "replace", "link", "unlink", "chmod"):
        setattr(atomic.os, name, counted(getattr(os, name)))
    return lambda: count


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = tmp_path_factory.mktemp("reference")
    whole = Job(directory / "report.json", store_jobs.run, directory / "store").wait()
    begun = time.monotonic()
    counted = Job(directory / "report.json", kill_at, 0, directory / "again").wait()
    assert whole is not None and counted is not None
    steps = counted["value"].pop("steps")
    assert whole == counted and steps > 60
    return Reference(whole["value"], time.monotonic() - begun, steps)


@dataclass
class Trial:
    """One store, and what has happened to it."""

    store: Path
    rng: np.random.Generator
    copies: dict[Path, bytes] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)

    @property
    def report(self) -> Path:
        return self.store.parent / f"{self.store.name}.json"

    def damage_something(self) -> None:
        """Truncate, empty, lengthen, delete a file of the store, or flip a bit of it."""
        files = [p for p in sorted(self.store.rglob("*")) if p.is_file() and ".hf_trak-tmp" not in str(p)]
        if not files:
            return
        path = files[int(self.rng.integers(len(files)))]
        data = path.read_bytes()
        how = self.rng.choice(["truncate", "empty", "append", "delete", "flip"])
        if how == "delete" and path.name in DESCRIBING:
            how = "flip"  # a store without its description is another store
        self.history.append(f"{how} {path.relative_to(self.store)}")
        if how == "delete":
            path.unlink()
            return
        if data and path not in self.copies:
            self.copies[path] = data
        if how == "flip" and data:
            changed = bytearray(data)
            changed[int(self.rng.integers(len(data)))] ^= 1 << int(self.rng.integers(8))
            data = bytes(changed)
        elif how == "append":
            data += b"\0garbage"
        else:
            data = data[: int(self.rng.integers(len(data) + 1))] if how == "truncate" else b""
        path.write_bytes(data)

    def repair(self, error: str) -> None:
        """Do what the error says to the file that it names, which must be one that was damaged."""
        named = [path for path in self.copies if str(path) in error]
        assert named, f"no damaged file is named in: {error}\n{self.history}"
        for path in named:
            self.history.append(f"repair {path.relative_to(self.store)}")
            if path.name in DESCRIBING:
                path.write_bytes(self.copies.pop(path))
            else:
                del self.copies[path]
                path.unlink()

    def finish(self, reference: Reference, start: Callable[[], list[Job]]) -> int:
        """Run until it ends well, repairing what errors name. Returns the number of runs."""
        for runs in range(1, 20):
            reports = [job.wait() for job in start()]
            assert None not in reports, self.history
            errors = [report["error"] for report in reports if report is not None and "error" in report]
            if not errors:
                for report in reports:
                    assert report is not None and report["value"] == reference.result, self.history
                return runs
            self.history.append(errors[0][:200])
            self.repair("\n".join(errors))
        raise AssertionError(f"it never ends: {self.history}")


@pytest.mark.slow
def test_killed_at_any_moment_and_damaged_in_between(reference: Reference, tmp_path: Path) -> None:
    """At least 30 killed runs in one process: at random times, and right before steps all along the way."""
    rng, killed, trials = np.random.default_rng(0), 0, 0
    while killed < 30:
        trial = Trial(tmp_path / f"store{trials}", rng)
        trials += 1
        for _ in range(int(rng.integers(1, 7))):
            if rng.random() < 0.6:
                step = int(rng.integers(1, reference.steps + 1))
                job = Job(trial.report, kill_at, step, trial.store)
                trial.history.append(f"kill before step {step}")
            else:
                job = Job(trial.report, store_jobs.run, trial.store)
                after = float(rng.uniform(0, reference.seconds))
                time.sleep(after)
                job.kill()
                trial.history.append(f"kill after {after:.2f} s")
            report = job.wait()
            if report is not None and "error" in report:
                trial.repair(report["error"])
            killed += job.process.exitcode == KILLED
            if rng.random() < 0.5:
                trial.damage_something()
        trial.finish(reference, lambda: [Job(trial.report, store_jobs.run, trial.store)])  # noqa: B023
    assert trials >= 5


@pytest.mark.slow
@pytest.mark.distributed
def test_one_of_two_processes_is_killed_and_both_go_on(reference: Reference, tmp_path: Path) -> None:
    """At two random moments of the work on features; whatever had been finished stays, and the bits are those of one
    process that was left alone."""
    rng, store = np.random.default_rng(2), tmp_path / "store"
    count, moments = 12, sorted(rng.choice(np.arange(1, 11), 2, replace=False).tolist())

    def shards() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in store.glob("*/train-*.safetensors")}

    for moment in moments:
        jobs, victim = start_group(tmp_path, 2, store_jobs.run, store), int(rng.integers(2))
        wait_for(lambda: len(shards()) >= moment)  # noqa: B023
        time.sleep(float(rng.uniform(0, 0.02)))
        jobs[victim].kill()
        reports = [job.wait() for job in jobs]
        assert jobs[victim].process.exitcode == KILLED and reports[victim] is None
        error = (reports[1 - victim] or {})["error"]
        assert error.startswith("PeerProcessError") and "run the same command again" in error
        finished = shards()
    assert moments[1] <= len(finished) <= count
    reports = [job.wait() for job in start_group(tmp_path, 2, store_jobs.run, store)]
    assert reports == [{"value": reference.result}] * 2
    assert len(shards()) == count and finished.items() <= shards().items()


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_between_meeting_and_the_first_word(reference: Reference, tmp_path: Path) -> None:
    """The other one says so at once, not after the minutes that processes wait for late ones, or torch's timeout."""
    jobs = start_group(tmp_path, 2, store_jobs.run_without_rank_1, tmp_path / "store", timeout=600)
    reports = [job.wait() for job in jobs]
    assert jobs[1].process.exitcode == KILLED and reports[1] is None
    error = (reports[0] or {})["error"]
    assert error.startswith("PeerProcessError") and "run the same command again" in error
    assert Job(tmp_path / "report.json", store_jobs.run, tmp_path / "store").wait() == {"value": reference.result}


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_one_of_two_processes_is_killed(reference: Reference, tmp_path: Path) -> None:
    """Kill one of two processes in at least 12 runs. The other ends by itself and says why; it does not wait
    for ever. Any number of processes finishes the work."""
    rng, killed, noticed, trials = np.random.default_rng(1), 0, 0, 0
    while killed < 12:
        trial = Trial(tmp_path / f"store{trials}", rng)
        (group := tmp_path / f"group{trials}").mkdir()
        trials += 1
        for _ in range(int(rng.integers(1, 4))):
            jobs = start_group(group, 2, store_jobs.run, trial.store)
            time.sleep(float(rng.uniform(0.1, 2 * reference.seconds)))
            victim = int(rng.integers(2))
            jobs[victim].kill()
            reports = [job.wait() for job in jobs]
            killed += jobs[victim].process.exitcode == KILLED
            error = (reports[1 - victim] or {}).get("error")
            if error is not None and jobs[victim].process.exitcode == KILLED:
                if error.startswith("PeerProcessError"):
                    assert "run the same command again" in error
                    noticed += 1
                else:
                    trial.repair(error)
            if rng.random() < 0.3:
                trial.damage_something()
        world = int(rng.integers(1, 4))
        trial.finish(reference, lambda: start_group(group, world, store_jobs.run, trial.store))  # noqa: B023
    assert noticed >= 3


# -- disks -----------------------------------------------------------------------------------------------------------


def with_file_limit(limit: int, directory: Path, sizes: Sizes) -> Any:
    """The job with no file allowed to grow beyond `limit` bytes, as with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return store_jobs.run(directory, sizes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    sizes = Sizes(proj_dim=48)  # so that Gram matrices are the largest files
    whole = Job(tmp_path / "report.json", store_jobs.run, tmp_path / "whole", sizes).wait()
    assert whole is not None
    gram = next(p for p in whole["value"]["features"] if "gram" in p)
    least, most = (tmp_path / "whole" / name for name in ("checkpoint-0/checkpoint.json", gram))
    # nothing fits; small descriptions do; all but the Gram matrices do
    for limit in (10, least.stat().st_size + 1, most.stat().st_size - 1):
        job = Job(tmp_path / "report.json", with_file_limit, limit, tmp_path / "store", sizes)
        report = job.wait()
        assert report is not None and report["error"].startswith("StoreError"), report
        assert str(tmp_path / "store") in report["error"] and "cannot be written" in report["error"]
        assert os.strerror(errno.EFBIG) in report["error"] and "run the same command again" in report["error"]
    assert gram in report["error"]
    assert not list((tmp_path / "store").rglob("*tmp*"))
    again = Job(tmp_path / "report.json", store_jobs.run, tmp_path / "store", sizes).wait()
    assert again == whole


@pytest.mark.slow  # a file that cannot grow is always tested
def test_a_full_disk_is_no_crash(reference: Reference, tmp_path: Path) -> None:
    """A small file system, fuller and fuller; what is on it afterwards is finished once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system takes more rights")
    try:
        full = 0
        for free in (0, 4, 12, 24, 48, 72):  # KiB
            ballast = disk / "ballast"
            ballast.write_bytes(b"")
            used = sum(path.stat().st_blocks * 512 for path in disk.rglob("*"))
            ballast.write_bytes(b"\1" * max(0, (120 - free) * 1024 - used))
            report = Job(tmp_path / "report.json", store_jobs.run, disk / "store").wait()
            assert report is not None, "killed by a signal"
            if "error" in report:
                full += 1
                assert os.strerror(errno.ENOSPC) in report["error"] and str(disk / "store") in report["error"]
            else:
                assert report["value"] == reference.result
        assert full >= 3
        ballast.unlink()
        again = Job(tmp_path / "report.json", store_jobs.run, disk / "store").wait()
        assert again == {"value": reference.result}
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_output_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    places = [tmp_path / "file" / "store"]
    if os.getuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o555)
        places.append(tmp_path / "closed" / "store")
    for place in places:
        report = Job(tmp_path / "report.json", store_jobs.run, place).wait()
        assert report is not None and report["error"].startswith("StoreError"), report
        assert str(place) in report["error"] and "another output directory" in report["error"]


# -- interruptions ---------------------------------------------------------------------------------------------------


def slowly(directory: Path, log: Path) -> Any:
    """The job with a pause per batch and its log in a file."""
    logging.basicConfig(filename=log, level=logging.INFO)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    RowBatches._collate = paused(RowBatches._collate)  # type: ignore[method-assign]
    return store_jobs.run(directory)


def paused(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return function(*arguments, **options)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_interrupted_run_says_how_to_go_on(reference: Reference, tmp_path: Path, number: signal.Signals) -> None:
    """Cluster preemption and Ctrl-C: the message counts what is done, no rubbish stays, the exit status is honest."""
    store = tmp_path / "store"
    job = Job(tmp_path / "report.json", slowly, store, tmp_path / "log")
    wait_for(lambda: len(list(store.glob("checkpoint-0/train-*"))) >= 2)
    job.kill(number)
    assert job.wait() is None
    assert job.process.exitcode == -signal.SIGTERM if number == signal.SIGTERM else job.process.exitcode == 1
    message = (tmp_path / "log").read_text()
    assert ("Terminated by SIGTERM." if number == signal.SIGTERM else "Interrupted.") in message
    done = len(list(store.glob("checkpoint-0/train-*")))
    assert f"{done} of 6 shards" in message and "Run the same command again" in message
    assert not list(store.rglob("*tmp*"))
    again = Job(tmp_path / "report.json", store_jobs.run, store).wait()
    assert again == {"value": reference.result}


def test_somebody_elses_handler_of_sigterm_is_left_alone(tmp_path: Path) -> None:
    """Clusters' own requeueing installs one."""
    report = Job(tmp_path / "report.json", interrupted_with_a_handler).wait()
    assert report == {"value": ["requeued", "goes on"]}


def interrupted_with_a_handler() -> list[str]:
    """What is said in a process with a handler of its own, log included."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    signal.signal(signal.SIGTERM, lambda *_: said.append("requeued"))
    with log_on_interrupt(lambda: "never"):
        os.kill(os.getpid(), signal.SIGTERM)
    return [*said, "goes on"]


# -- two runs on one store -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_started_twice_by_mistake(reference: Reference, tmp_path: Path) -> None:
    jobs = [Job(tmp_path / f"{i}.json", store_jobs.run, tmp_path / "store") for i in range(2)]
    assert [job.wait() for job in jobs] == [{"value": reference.result}] * 2
    other = Sizes(proj_dim=17)
    jobs = [Job(tmp_path / f"{i}.json", store_jobs.run, tmp_path / "mixed", *a) for i, a in enumerate([(), (other,)])]
    reports = [job.wait() for job in jobs]
    refused = [report["error"] for report in reports if report is not None and "error" in report]
    assert len(refused) == 1 and refused[0].startswith("ConfigMismatchError") and "proj_dim" in refused[0]
    if "value" in (reports[0] or {}):
        assert reports[0] == {"value": reference.result}
