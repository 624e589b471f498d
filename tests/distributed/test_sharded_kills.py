"""A process of a sharded run is killed: the others end within a minute and say so, and any rerun finishes the work."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_jobs import attributor, difference, eigenvalues, features, made, mesh_of_all, sharded, tensor_parallel
from store_jobs import start_group

from hf_trak.curvature.owner_maps import ExchangingSink
from hf_trak.gradient_computers.sharded import ShardedGradientComputer
from hf_trak.runtime.processes import Processes
from hf_trak.store.shard_set import ShardSet

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("jobs_with_one_thread")]

ROUNDING = 1e-5
"""As in `test_sharded`."""

MODES = {"fsdp": ("gpt2", 2), "hsdp": ("gpt2", 4), "tp": ("llama", 2), "tp-fsdp": ("llama", 4)}
"""The model and the number of processes of each."""

OPTIONS = {"shard_size": 1, "per_device_batch_size": 1}
_JOINING = 120
"""Seconds in which processes find each other, on a busy machine."""


def divided(mode: str, directory: Path) -> torch.nn.Module:
    """The model of a mode, divided over as many processes as there are."""
    name = MODES[mode][0]
    if mode.startswith("tp"):
        return tensor_parallel(name, directory / "model", int(os.environ["WORLD_SIZE"]) // 2)
    return sharded(made(name), mesh_of_all(mode))


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*args: Any) -> None:
    raise ValueError("no such luck.")


def killed(directory: Path, mode: str, moment: str) -> None:
    """The last process is killed as it writes its first shard or in a layer of its second pass, or fails there."""
    Processes(True)
    model = divided(mode, directory)
    if int(os.environ["RANK"]) == MODES[mode][1] - 1:
        layers = [m for m in model.modules() if type(m).__name__.endswith(("GPT2Block", "DecoderLayer"))]
        write, stream, passes = ShardSet.write, ShardedGradientComputer.stream, []

        def write_and_die(self: Any, *args: Any) -> None:
            write(self, *args)
            die()

        def die_in_a_layer(self: Any, *args: Any) -> Any:
            passes.append(1)
            if len(passes) == 2:
                layers[-1].register_forward_pre_hook(fail if moment == "failing" else die)
            return stream(self, *args)

        if moment == "writing":
            ShardSet.write = write_and_die  # type: ignore[method-assign]
        else:
            ShardedGradientComputer.stream = die_in_a_layer  # type: ignore[method-assign]
    attributor(model, MODES[mode][0], directory / "store", **OPTIONS).featurize()


def resumed(directory: Path, mode: str) -> int:
    """Shards that were missing."""
    Processes(True)
    one = attributor(divided(mode, directory), MODES[mode][0], directory / "store", **OPTIONS)
    missing = 7 - len(shards(directory))
    one.featurize()
    return missing


def shards(directory: Path) -> list[Path]:
    return sorted((directory / "store" / "checkpoint-0").glob("train-*.safetensors"))


def check_kill(directory: Path, mode: str, moment: str) -> torch.Tensor:
    """Kill one of the processes, look at how the others end, and return features of the unsharded model.

    There is no `torchrun`, which would end the others itself.
    """
    name, count = MODES[mode]
    jobs = start_group(directory, count, killed, directory, mode, moment, timeout=_JOINING)
    try:
        assert jobs[-1].wait(300) is None and jobs[-1].process.exitcode == -signal.SIGKILL
        began = time.monotonic()
        reports = [job.wait(max(1.0, began + 60 - time.monotonic())) for job in jobs[:-1]]
    finally:
        for job in jobs:
            job.kill()
    for said in reports:
        assert said is not None and said["error"].startswith("PeerProcessError: Process"), said
        assert "lost contact" in said["error"]
    assert len(shards(directory)) < 7
    return features(attributor(made(name), name, directory / "whole", **OPTIONS).featurize())


def rerun(directory: Path, mode: str, count: int) -> None:
    jobs = start_group(directory, count, resumed, directory, mode, timeout=_JOINING)
    try:
        reports = [job.wait(300) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert all(said is not None and said.get("value", 0) > 0 for said in reports), reports


def of_store(directory: Path, mode: str) -> torch.Tensor:
    """Features in the store, which is finished unsharded if it is not yet."""
    name = MODES[mode][0]
    return features(attributor(made(name), name, directory / "store", **OPTIONS).featurize())


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_one_process_finishes(tmp_path: Path) -> None:
    expected = check_kill(tmp_path, "fsdp", "writing")
    assert shards(tmp_path)
    assert difference(of_store(tmp_path, "fsdp"), expected) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_a_process_killed_in_a_pass_ends_the_others_and_every_rerun_finishes(mode: str, tmp_path: Path) -> None:
    """It finishes with as many processes, in another mode with another number of them, and with one."""
    first = tmp_path / "killed"
    first.mkdir()
    expected = check_kill(first, mode, "passing")
    others = {"fsdp": ("hsdp", 4), "hsdp": ("fsdp", 2), "tp": ("tp-fsdp", 4), "tp-fsdp": ("tp", 2)}
    for again, number in ((mode, MODES[mode][1]), others[mode], (mode, 1)):
        directory = tmp_path / f"{again}-{number}"
        shutil.copytree(first, directory)
        if number > 1:
            rerun(directory, again, number)
        assert difference(of_store(directory, mode), expected) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tp", "tp-fsdp"])
def test_a_process_that_fails_in_a_layer_ends_those_that_wait_for_its_slices(mode: str, tmp_path: Path) -> None:
    count = MODES[mode][1]
    jobs = start_group(tmp_path, count, killed, tmp_path, mode, "failing", timeout=_JOINING)
    try:
        last = jobs[-1].wait(300)
        reports = [job.wait(60) for job in jobs[:-1]]
    finally:
        for job in jobs:
            job.kill()
    assert last is not None and last["error"] == "ValueError: no such luck."
    assert all(said is not None and "lost contact" in said["error"] for said in reports), reports


def fitted(directory: Path, name: str, moment: int = 0) -> bool:
    """A curvature under FSDP2. The last process is killed as it hands over its gradients for the `moment`-th time."""
    Processes(True)
    finish, times = ExchangingSink.finish, []

    def finish_or_die(self: Any) -> None:
        times.append(1)
        if len(times) == moment:
            die()
        finish(self)

    if int(os.environ["RANK"]) == 1:
        ExchangingSink.finish = finish_or_die  # type: ignore[method-assign]
    attributor(divided("fsdp", directory), "gpt2", directory / name, **OPTIONS).fit_curvature()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("moment", [2, 5], ids=["first pass", "second pass"])
def test_a_process_killed_in_a_fit_ends_the_other_and_the_rerun_gives_the_same_curvature(
    moment: int, tmp_path: Path
) -> None:
    """6 rows in batches of one, three per process and pass."""

    def run(name: str, moment: int) -> list[Any]:
        jobs = start_group(tmp_path, 2, fitted, tmp_path, name, moment, timeout=_JOINING)
        try:
            last = jobs[1].wait(300)
            began = time.monotonic()
            first = jobs[0].wait(60 if moment else 300)
            assert not moment or (jobs[1].process.exitcode == -signal.SIGKILL and time.monotonic() - began < 60)
            return [first, last]
        finally:
            for job in jobs:
                job.kill()

    first, last = run("store", moment)
    assert last is None and first is not None and first["error"].startswith("PeerProcessError: Process")
    assert "lost contact" in first["error"]
    again, straight = run("store", 0), run("straight", 0)
    assert all(said is not None and said.get("value") for said in (*again, *straight)), (again, straight)
    found, expected, whole = (
        eigenvalues(attributor(made("gpt2"), "gpt2", tmp_path / name, **OPTIONS))
        for name in ("store", "straight", "whole")
    )
    assert torch.equal(found, expected)
    assert float((found - whole).norm() / whole.norm()) <= 1e-4
