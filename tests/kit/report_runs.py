"""Small runs that differ from each other in every value, and saves of them that are killed."""

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Value, disable_progress_bars

from hf_trak.report import AttributionRun, ScoreDistributions
from hf_trak.report.run_record import SavedParts, write_run

N_TRAIN, N_TARGETS, TOP_K = 40, 3, 4


@functools.cache
def build(number: int) -> AttributionRun:
    """Build run `number`, whose texts, labels, scores and statistics differ from those of all other runs."""
    generator = torch.Generator().manual_seed(number)
    scores = torch.randn(N_TRAIN, N_TARGETS, generator=generator)
    names = [f"no {number}", f"yes {number}"]
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    rows = {
        "text": [f"run {number} row {i}" for i in range(N_TRAIN)],
        "label": [(i + number) % 2 for i in range(N_TRAIN)],
    }
    train = Dataset.from_dict(rows, features=features)
    scored = train.select(range(N_TARGETS))
    for rows_name, scores_name, down in (
        ("trak_indices", "trak_scores", True),
        ("trak_harmful_indices", "trak_harmful_scores", False),
    ):
        order = scores.argsort(dim=0, descending=down)[:TOP_K].T
        scored = scored.add_column(rows_name, order.tolist())
        scored = scored.add_column(scores_name, scores.T.gather(1, order).tolist())
    ends = scores.min(dim=0).values.numpy(), scores.max(dim=0).values.numpy()
    distributions = ScoreDistributions.from_blocks([(0, N_TRAIN, scores)], *ends)
    influence = torch.rand(N_TRAIN, generator=generator).numpy()
    return AttributionRun(scored, train, None, influence, distributions, {"number": number, "train_rows": N_TRAIN})


@functools.cache
def _values(number: int) -> dict[str, Any]:
    return contents(build(number))


def contents(run: AttributionRun) -> dict[str, Any]:
    """Collect all values of a run that a report uses."""
    rows = {i for row in run.scored for name in ("trak_indices", "trak_harmful_indices") for i in row[name]}
    rows |= {i for i, _ in run.outliers()}
    assert run.self_influence is not None and run.distributions is not None
    return {
        "scored": run.scored[:],
        "features": str(run.scored.features),
        "train": {i: run.train_row(i) for i in sorted(rows)},
        "train features": str(run.train.features),
        "influence": run.self_influence.tolist(),
        "distributions": {name: value.tolist() for name, value in vars(run.distributions).items()},
        "facts": run.facts,
        "n": run.n_train,
    }


def whole(run: AttributionRun) -> int:
    """Return the number of a run after checking that all its values are those of that run."""
    number = run.facts["number"]
    assert contents(run) == _values(number), f"a mixture, or another run than {number}"
    return number


def save_unchecked(run: AttributionRun, directory: Path, **changes: Any) -> None:
    """Save a run with all its checksums, but without a look at its values.

    Args:
        changes: other values of tensors, by name; `None` leaves a tensor out.
    """
    rows = np.array(sorted(_values(run.facts["number"])["train"]), dtype=np.int64)
    tensors = {"train_rows": rows, "self_influence": run.self_influence, **vars(run.distributions), **changes}
    kept = {name: np.ascontiguousarray(value) for name, value in tensors.items() if value is not None}
    write_run(SavedParts(run.scored, run.train.select(rows), kept, run.facts, directory / "run"))


# -- killed saves ----------------------------------------------------------------------------------------------------


_TOUCHING = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "os.chmod", "os.link")
"""Audit events of Python for operations on files."""


def killed_at(step: int, number: int, directory: Path) -> bool:
    """Save a run in a child that is killed right before it touches a file for the `step`-th time.

    Returns `False` if the save ended before that.
    """
    with _child(functools.partial(_save_until, step, number, directory, [])) as pid:
        _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _save_until(step: int, number: int, directory: Path, touched: list[str]) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if event in _TOUCHING else None
        if isinstance(path, str | Path) and str(path).startswith(str(directory)):
            touched.append(f"{event} {arguments[1] if event == 'os.rename' else arguments[0]}")
            if event == "open" and Path(path) == directory / "run" / "run.json" and arguments[2] & os.O_ACCMODE:
                os._exit(2)  # it is replaced, never written to
            if len(touched) == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    build(number).save(directory)


def steps_of(number: int, directory: Path) -> list[str]:
    """List the operations of a save on files, in order."""
    touched: list[str] = []
    read, write = os.pipe()

    def work() -> None:
        _save_until(0, number, directory, touched)
        with os.fdopen(write, "w") as file:
            json.dump(touched, file)

    with _child(work) as pid:
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        assert os.waitpid(pid, 0)[1] == 0
    return json.loads(text)


def killed_after(seconds: float, number: int, directory: Path) -> None:
    """Save runs `number`, `number + 1`, … in a child that is killed after a while."""
    with _child(functools.partial(_save_on, number, directory)) as pid:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _save_on(number: int, directory: Path) -> None:
    while True:
        build(number).save(directory)
        number += 1


@contextmanager
def _child(work: Callable[[], None]) -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    yield pid


def kill_at_steps(prepare: str, number: int, stride: int, directory: str) -> int:
    """Make directories `directory/<step>`: in each, a save was killed at that step.

    The steps are every `stride`-th one and all near the one that puts `run/` into its place. In one more directory,
    the save was not killed.

    Args:
        prepare: content of the directories before the save: `nothing`, or a `run`.
        number: the run that is saved. The run before it has the number 0.
        stride: see above.
        directory: where the directories are made.

    Returns:
        Number of directories.
    """
    disable_progress_bars()
    build(number)

    def prepared(name: str) -> Path:
        place = Path(directory) / name
        place.mkdir(parents=True)
        if prepare == "run":
            build(0).save(place)
        return place

    place = prepared("not killed")
    touched = steps_of(number, place)
    (commit,) = (step for step, what in enumerate(touched, 1) if what == f"os.rename {place / 'run'}")
    steps = {*range(1, len(touched) + 1, stride), *range(commit - 4, min(commit + 8, len(touched)) + 1)}
    for step in sorted(steps):
        assert killed_at(step, number, prepared(str(step)))
    return len(steps)


def kill_at_random(kills: int, seed: int, directory: str) -> list[int | None]:
    """Kill one save after the other in one directory. Returns the number of the run that is there after each kill."""
    disable_progress_bars()
    rng = np.random.default_rng(seed)
    found: list[int | None] = []
    start = time.monotonic()
    assert not killed_at(sys.maxsize, 1, Path(f"{directory}, to see how long a save takes"))
    seconds = time.monotonic() - start
    for trial in range(kills):
        killed_after(float(rng.uniform(0.0, 2.0 * seconds)), 1000 * (trial + 1), Path(directory))
        found.append(loaded_in_child(Path(directory)))
    return found


def loaded_in_child(directory: Path) -> int | None:
    """Load a run in a child process, since this process has to stay without threads in order to fork.

    Returns:
        The number of the run, which is whole, or `None` if loading says that there is no complete run.
    """
    read, write = os.pipe()
    with _child(functools.partial(_report_loaded, directory, write)) as pid:
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        assert os.waitpid(pid, 0)[1] == 0, "neither a whole run nor an IncompleteStoreError"
    return json.loads(text)


def _report_loaded(directory: Path, write: int) -> None:
    from hf_trak.errors import IncompleteStoreError

    try:
        number = whole(AttributionRun.load(directory))
    except IncompleteStoreError:
        number = None
    os.write(write, json.dumps(number).encode())


def save_many(first: int, count: int, directory: str) -> int:
    """Save runs `first`, `first + 1`, … to one directory."""
    disable_progress_bars()
    for number in range(first, first + count):
        build(number).save(directory)
    return count
