"""Files of a recorded run and of its sweep that were changed, cut, lost or are of another run: all are refused."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_runs import TARGETS, recorded, replayed, tiny

from hf_trak.errors import HfTrakError
from hf_trak.methods import Replay
from hf_trak.trajectory.record import RunRecord, verify_record
from hf_trak.trajectory.sweep import BackwardSweep
from hf_trak.trajectory.swept_targets import SweptTargets

MUTATIONS = 40


def mutated(content: bytes, seed: int) -> Iterator[bytes]:
    """Change single bits at random places, most of them near the start, cut, or lengthen."""
    draw = random.Random(seed)
    for number in range(MUTATIONS):
        place = draw.randrange(min(400, len(content)) if number % 2 else len(content))
        yield content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
    for length in (0, 7, len(content) // 2, len(content) - 1):
        yield content[:length]
    yield content + b"\0"


def refused(path: Path, read: Callable[[], Any], seed: int, foreign: Path | None = None) -> None:
    """Check that every change of a file is refused with an error of this library. Blanks of JSON mean nothing."""
    content = path.read_bytes()
    read()
    changes = [*mutated(content, seed), *([foreign.read_bytes()] if foreign else [])]
    for change in changes:
        if path.suffix == ".json" and change.split() == content.split():
            continue
        path.write_bytes(change)
        with pytest.raises(HfTrakError):
            read()
    path.unlink()
    with pytest.raises(HfTrakError):
        read()
    path.write_bytes(content)
    read()


@pytest.mark.slow
def test_records(tmp_path: Path) -> None:
    recorded(tmp_path / "a", tiny(dropout=0.1), every=3)
    recorded(tmp_path / "b", tiny(dropout=0.1), every=3, max_grad_norm=1.0)
    place, other = (tmp_path / name / "trak" / "trajectory" / "run" for name in "ab")
    record = RunRecord.open(place)

    def read() -> None:
        RunRecord.open(place).steps()
        assert all(found.state == "intact" for found in verify_record(place)) or _broken()

    refused(place / "record.json", read, 0, other / "record.json")
    for seed, step in enumerate((0, 3, 6)):
        refused(record.path(step), read, seed, other / record.path(step).name)


def _broken() -> None:
    raise HfTrakError("verify_record found a file that is not intact.")


class _StoppedError(Exception):
    pass


def stopped(
    directory: Path, run: Any, method: Replay, monkeypatch: pytest.MonkeyPatch
) -> tuple[BackwardSweep, SweptTargets]:
    """Replay a run up to the second file of its sweep back."""
    sweeps: list[BackwardSweep] = []
    kept: list[SweptTargets] = []
    finish, keep = BackwardSweep.run, SweptTargets.keep

    def noted(self: BackwardSweep, *given: Any) -> None:
        sweeps.append(self)
        finish(self, *given)

    def stop(self: SweptTargets, *given: Any) -> None:
        keep(self, *given)
        kept.append(self)
        if len(kept) == 2:
            raise _StoppedError

    with monkeypatch.context() as patch:
        patch.setattr("hf_trak.trajectory.sweep.KEPT_BYTES", 0)
        patch.setattr(BackwardSweep, "run", noted)
        patch.setattr(SweptTargets, "keep", stop)
        with pytest.raises(_StoppedError):
            replayed(run, directory, method)
    return sweeps[0], kept[0]


@pytest.mark.slow
def test_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path, tiny(dropout=0.1))
    sweep, group = stopped(tmp_path, run, Replay(of="run"), monkeypatch)
    _, other = stopped(tmp_path, run, Replay(of="run", smoothing=0.2), monkeypatch)
    targets = torch.zeros(TARGETS, sweep.width, dtype=sweep.dtype)
    files = {path.name: path for path in group.directory.glob("*.safetensors")}
    assert any(name.startswith("state-") for name in files) and any(name.startswith("back-") for name in files)
    for seed, (name, path) in enumerate(sorted(files.items())):
        step = int(path.stem.rsplit("-", 1)[1])
        if name.startswith("state-"):
            refused(path, lambda step=step: sweep._read_state(step), seed, other.directory / name)
        else:
            foreign = other.directory / name
            content = path.read_bytes()
            for change in [*mutated(content, seed), foreign.read_bytes()]:
                path.write_bytes(change)
                with pytest.raises(HfTrakError):
                    group.begin(targets, sweep.forward)
            path.write_bytes(content)
            group.begin(targets, sweep.forward)


@pytest.mark.slow
def test_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path, tiny(dropout=0.1))
    made: list[SweptTargets] = []
    conclude = SweptTargets.conclude

    def noted(self: SweptTargets, *given: Any) -> None:
        made.append(self)
        conclude(self, *given)

    monkeypatch.setattr(SweptTargets, "conclude", noted)
    replayed(run, tmp_path, Replay(of="run"))
    replayed(run, tmp_path, Replay(of="run", smoothing=0.2))
    refused(made[0].result_path, made[0].result, 0, made[1].result_path)
