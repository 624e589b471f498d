"""`hf-trak inspect --check` finds a changed byte in every file of every kind of directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_runs
import store_jobs
import traker_runs

from hf_trak.cli.main import main
from hf_trak.evaluation import Bank, random_subsets, retrain_on_subsets

Checked = tuple[int, dict[Path, str]]
N, M = 12, 3


def trained(rows: np.ndarray, seed: int) -> np.ndarray:
    return np.array([rows.sum(), (rows**2).sum(), len(rows)]) + np.random.default_rng(seed).normal(size=M)


def make_store(directory: Path) -> None:
    attributor = store_jobs.make(directory).featurize(store_jobs.models(1))
    attributor.attribute(store_jobs.rows(3, 2), name="exam", checkpoints=store_jobs.models(1))


def make_run(directory: Path) -> None:
    report_runs.build(0).save(directory)


def make_traker(directory: Path) -> None:
    traker_runs.run(directory)


def make_retrainings(directory: Path) -> None:
    retrain_on_subsets(random_subsets(N, 4), trained, directory, repeats=2, seed=3)


def make_bank(directory: Path) -> Bank:
    bank = Bank.create(directory, store_jobs.rows(N, 0), store_jobs.rows(M, 1))
    bank.add_part("half", random_subsets(N, 4))
    bank.build("half", trained)
    bank.add_part("half-again", bank.part("half").masks[:3], seed=20, repeat_of="half")
    bank.build("half-again", trained)
    return bank


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], Checked]:
    """The exit status of `hf-trak inspect --check`, and the state of every file."""

    def check(directory: Path) -> Checked:
        capsys.readouterr()
        status = main(["inspect", str(directory), "--check", "--json"])
        files = json.loads(capsys.readouterr().out)["files"]
        assert all(one["remedy"] for one in files if one["state"] in ("damaged", "missing"))
        return status, {Path(one["path"]): one["state"] for one in files}

    return check


@pytest.mark.few(2)
@pytest.mark.parametrize("make", [make_store, make_run, make_traker, make_retrainings, make_bank])
def test_a_changed_byte_of_any_file_is_found(tmp_path: Path, checked: Any, make: Callable[[Path], Any]) -> None:
    directory = tmp_path / "directory"
    make(directory)
    status, states = checked(directory)
    assert status == 0 and set(states.values()) == {"intact"} and len(states) >= 4
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)  # locks are empty
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 4]) + content[-1:])
        status, found = checked(directory)
        reported = (
            directory / path.stem / "id_metadata.json" if make is make_traker and path.parent == directory else path
        )
        assert status == 1 and "damaged" in (found.get(path), found.get(reported)), path
        path.write_bytes(content)
    assert checked(directory) == (0, states)


@pytest.mark.parametrize("make", [make_run, make_bank])
def test_a_file_that_vanished_is_found(tmp_path: Path, checked: Any, make: Callable[[Path], Any]) -> None:
    directory = tmp_path / "directory"
    make(directory)
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in sorted(path for path in files if path.name not in ("bank.json", "retraining.json")):
        content = path.read_bytes()
        path.unlink()
        status, found = checked(directory)
        assert (status == 1 or "missing" in found.values()) and found[path] != "intact", path
        path.write_bytes(content)


def test_trainings_of_a_part_that_are_not_done_are_missing(tmp_path: Path, checked: Any) -> None:
    bank = make_bank(tmp_path)
    bank.add_part("most", random_subsets(N, 3, 0.75))
    status, states = checked(tmp_path)
    absent = {path.relative_to(tmp_path).parts[0] for path, state in states.items() if state == "missing"}
    assert status == 0 and absent == {"most"} and list(states.values()).count("missing") == 4


def test_a_part_of_another_bank_is_found(tmp_path: Path, checked: Any) -> None:
    make_bank(tmp_path / "bank")
    other = Bank.create(tmp_path / "other", store_jobs.rows(N, 5), store_jobs.rows(M, 1))
    other.add_part("half", random_subsets(N, 4))
    (tmp_path / "bank/half/retraining.json").write_bytes((tmp_path / "other/half/retraining.json").read_bytes())
    status, states = checked(tmp_path / "bank")
    assert status == 1 and states[tmp_path / "bank/half/retraining.json"] == "damaged"
