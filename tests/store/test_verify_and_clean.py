"""`hf-trak inspect --check` and `--clean`, and the policy of leftovers behind it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import store_jobs
import torch
from store_jobs import Job, wait_for

from hf_trak.cli.main import main
from hf_trak.store.atomic import host_name, leftovers, remove_stale

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    networks = store_jobs.models(2)
    attributor = store_jobs.make(tmp_path / "trak").featurize(networks)
    attributor.attribute(store_jobs.rows(3, 2), name="exam", checkpoints=networks)
    return tmp_path / "trak"


def verified(store: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status, and the files that are not intact, by path."""
    capsys.readouterr()
    status = main(["inspect", str(store), "--check", "--json"])
    content = json.loads(capsys.readouterr().out)
    found = {os.path.relpath(one["path"], store): one for one in content["files"] if one["state"] != "intact"}
    assert sum(content["counts"].values()) == len(content["files"]) > 15
    return status, found


def test_an_intact_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(store, capsys) == (0, {})


def test_damaged_and_missing_files_are_told_apart(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = store / "checkpoint-0" / "train-00002-of-00006.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 4
    shard.write_bytes(bytes(data))
    (store / "checkpoint-1" / "train-00005-of-00006.safetensors").unlink()
    (store / "experiments" / "exam" / "checkpoint-0" / "targets-00000-of-00001.safetensors").write_bytes(b"")
    status, found = verified(store, capsys)
    assert status == 1
    states = {name: one["state"] for name, one in found.items()}
    assert states["checkpoint-0/train-00002-of-00006.safetensors"] == "damaged"
    assert states["checkpoint-1/train-00005-of-00006.safetensors"] == "missing"
    assert states["experiments/exam/checkpoint-0/targets-00000-of-00001.safetensors"] == "damaged"
    # a Gram matrix cannot be judged without all of its rows
    assert states["checkpoint-1/gram.safetensors"] == "unchecked"
    assert "rows 20 to 22" in found["checkpoint-1/train-00005-of-00006.safetensors"]["detail"]
    assert "featurize" in found["checkpoint-1/train-00005-of-00006.safetensors"]["remedy"]


@pytest.mark.parametrize(
    "name",
    ["trak_config.json", "checkpoint-0.json", "checkpoint-1/checkpoint.json", "experiments/exam/experiment.json"],
)
def test_damaged_descriptions(store: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = (store / name).read_text()
    position = text.index('": "') + 4
    (store / name).write_text(text[:position] + ("x" if text[position] != "x" else "y") + text[position + 1 :])
    capsys.readouterr()
    assert main(["inspect", str(store), "--check"]) == 1
    out = capsys.readouterr().out
    assert f"DAMAGED   {store / name}" in out


@pytest.mark.slow
def test_what_is_said_to_be_computed_again_is(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = store_jobs.feature_digests(store)
    for name in ("checkpoint-0/train-00001-of-00006.safetensors", "checkpoint-1/gram.safetensors"):
        (store / name).write_bytes(b"damaged")
    _, found = verified(store, capsys)
    damaged = [name for name, one in found.items() if one["state"] == "damaged"]
    assert len(damaged) == 2
    for name in damaged:
        (store / name).unlink()
    store_jobs.make(store).featurize(store_jobs.models(2))
    assert verified(store, capsys) == (0, {}) and store_jobs.feature_digests(store) == before


def test_a_directory_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path), "--check"]) == 1
    assert "holds nothing that hf_trak wrote" in capsys.readouterr().err


# -- leftovers -------------------------------------------------------------------------------------------------------


def leave(directory: Path, host: str, pid: int, age: float, folder: bool = False) -> Path:
    path = directory / f".hf_trak-tmp-{host}-{pid}-{os.urandom(8).hex()}"
    directory.mkdir(parents=True, exist_ok=True)
    if folder:
        path.mkdir()
    written = path / "part" if folder else path
    written.write_bytes(bytes(100))
    for one in {written, path}:
        os.utime(one, (time.time() - age, time.time() - age))
    return path


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_who_may_remove_what_and_when(tmp_path: Path) -> None:
    hour, day, dead = 3600.0, 86_400.0, dead_pid()
    mine, folder = host_name(), tmp_path / "scores" / "exam"
    cases = {  # path: what a run removes, what `inspect --clean` removes
        leave(folder, mine, dead, 60): (False, True),
        leave(folder, mine, dead, 2 * hour): (True, True),
        leave(tmp_path, mine, dead, 2 * hour, folder=True): (True, True),
        leave(folder, mine, os.getpid(), 2 * day): (False, False),
        leave(folder, "elsewhere", dead, 2 * hour): (False, False),
        leave(folder, "elsewhere", dead, 2 * day): (False, True),
        leave(tmp_path / "checkpoint-0", "elsewhere", dead, 8 * day): (True, True),
    }
    found = {one.path: one for one in leftovers(tmp_path)}
    assert found.keys() == cases.keys() and all(one.size >= 100 for one in found.values())
    assert {path: (one.stale, one.removable) for path, one in found.items()} == cases
    removed = {one.path for one in remove_stale(tmp_path)}
    assert removed == {path for path, (run, _) in cases.items() if run}
    assert all(path.exists() != (path in removed) for path in cases)


def test_check_shows_leftovers_and_clean_removes_them(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {path for path in store.rglob("*") if path.is_file()}
    old, living = leave(store, host_name(), dead_pid(), 10), leave(store / "a", host_name(), os.getpid(), 10)
    status, found = verified(store, capsys)
    assert status == 0 and {store / name for name in found} == {old, living} and old.exists()
    assert {(one["state"], "--clean" in one["remedy"]) for one in found.values()} == {("leftover", True)}
    assert main(["inspect", str(store), "--clean", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [str(old)]
    assert living.exists() and not old.exists()
    assert main(["inspect", str(store), "--clean", "--everything"]) == 0
    assert {path for path in store.rglob("*") if path.is_file()} == kept
    capsys.readouterr()
    assert main(["inspect", str(store), "--clean"]) == 0
    assert "Nothing was left behind." in capsys.readouterr().out


def slow_attribute(directory: Path) -> int:
    """Compute all scores, and wait for the end while they are written to the scratch file."""
    from hf_trak.scores import streaming

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's jobs in the background ignore

    checked = streaming._checked

    def pausing(blocks):  # type: ignore[no-untyped-def]
        for block in checked(blocks):
            yield block
            (directory.parent / "writing").touch()
            time.sleep(60)  # until a signal ends the process

    streaming._checked = pausing
    networks = store_jobs.models(2)
    scored = store_jobs.make(directory).attribute(store_jobs.rows(3, 2), top_k=None, checkpoints=networks)
    return len(scored)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_attribute_that_is_ended_leaves_nothing_that_clean_does_not_find(
    store: Path, tmp_path: Path, number: signal.Signals
) -> None:
    expected = store_jobs.numbers(store_jobs.attributed(store, 0))
    before = {path for path in store.rglob("*") if path.is_file()}
    job = Job(tmp_path / "report.json", slow_attribute, store)
    wait_for((tmp_path / "writing").exists)
    job.kill(number)
    assert job.wait() is None and job.process.exitcode != 0
    left = leftovers(store)
    if number == signal.SIGKILL:
        assert left and all(one.removable and one.remove() for one in left)
    assert leftovers(store) == []
    assert {path for path in store.rglob("*") if path.is_file()} - before <= set(store.glob("experiments/**/*"))
    assert store_jobs.numbers(store_jobs.attributed(store, 0)) == expected


def test_a_run_removes_what_dead_processes_left(store: Path) -> None:
    old = leave(store / "scores" / "exam", host_name(), dead_pid(), 2 * 3600.0)
    torch.manual_seed(0)
    store_jobs.make(store).attribute(store_jobs.rows(3, 2), checkpoints=store_jobs.models(2))
    assert not old.exists()


@pytest.mark.slow
def test_exact_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Preconditioned targets, exact scores, self-influence and whitened features are checked, too."""
    networks = store_jobs.models(1)
    attributor = store_jobs.make(tmp_path, curvature="hybrid").featurize(networks)
    attributor.attribute(store_jobs.rows(3, 2), name="exam", checkpoints=networks, method="exact")
    attributor.self_influence(method="exact")
    assert verified(tmp_path, capsys) == (0, {})
    kinds = ("preconditioned", "scores", "whitened", "self-influence")
    files = [
        next(path for path in sorted(tmp_path.rglob("*.safetensors")) if path.name.startswith(kind)) for kind in kinds
    ]
    for path in files:
        data = bytearray(path.read_bytes())
        path.write_bytes(bytes(data[:-2] + bytes([data[-2] ^ 8]) + data[-1:]))
    status, found = verified(tmp_path, capsys)
    assert status == 1
    assert {name: one["state"] for name, one in found.items()} == {
        os.path.relpath(path, tmp_path): "damaged" for path in files
    }
