"""Directories of retrainings that are damaged or mixed up give right numbers, or an error."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest

from hf_trak.errors import HfTrakError, IncompleteStoreError, StoreError
from hf_trak.evaluation import random_subsets, retrain_on_subsets
from hf_trak.evaluation.retraining_files import verify_retraining

N = 12
MASKS = random_subsets(N, 4)
GIVEN: dict[str, Any] = {
    "masks": MASKS,
    "repeats": 2,
    "seed": 3,
    "settings": {"learning_rate": 0.25, "layers": [2, 3]},
}


JOINED = [(Path(f"{name}.safetensors"),) for name in ("subsets", "outputs")]
"""Either may go, since every call writes both anew."""


def trained(rows: np.ndarray, seed: int) -> np.ndarray:
    """Depends on the rows and on the seed, as a training does."""
    return np.array([rows.sum(), (rows**2).sum(), len(rows)]) + np.random.default_rng(seed).normal(size=3)


def run(directory: Path, **changes: Any) -> list[list[float]]:
    return retrain_on_subsets(retrain=trained, output_dir=directory, **{**GIVEN, **changes})["outputs"][:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(directory)


def expect_no_silence(case: damage.Damage, directory: Path, expected: list[list[float]]) -> str:
    """Run on a damaged directory: the right numbers, or an error with the name of a file that was touched."""
    try:
        found = run(directory)
    except HfTrakError as error:
        names = [str(directory / file) for file in case.files]
        assert any(name in str(error) for name in names), f"{case}: {error}"
        return "refused"
    assert found == expected, f"{case}: wrong numbers without a word"
    return "right"


def cases(directory: Path, scratch: Path) -> Iterator[damage.Damage]:
    yield from damage.flips(directory, 240)
    for byte in range((directory / "retraining.json").stat().st_size):
        yield damage.flip(Path("retraining.json"), byte, byte % 8)
    yield from damage.cuts(directory)
    yield from damage.deletions(directory)
    yield from damage.swaps(directory)
    for label, changes in {
        "another seed": {"seed": 4},
        "other settings": {"settings": {"learning_rate": 0.5, "layers": [2, 3]}},
        "other subsets": {"masks": random_subsets(N, 4, seed=9)},
        "other rows": {"masks": random_subsets(N + 1, 4)},
    }.items():
        run(scratch / label, **changes)
        yield from damage.taken_from(scratch / label, directory, label)


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_damaged_is_silent(whole: tuple[Path, list[list[float]]], tmp_path: Path, step: int) -> None:
    directory, expected = whole
    seen = {"right": 0, "refused": 0}
    every = list(cases(directory, tmp_path))
    for case in every[::step]:
        shutil.copytree(directory, tmp_path / "copy")
        case.act(tmp_path / "copy")
        if (tmp_path / "copy" / "retraining.json").exists():
            found = {one.path for one in verify_retraining(tmp_path / "copy") if one.state != "intact"}
            touched = {tmp_path / "copy" / file for file in case.files}
            # of two intact files that do not fit, the check cannot know which one is in the wrong place
            assert found & touched or case.files in JOINED or (found and case.foreign), case
        seen[expect_no_silence(case, tmp_path / "copy", expected)] += 1
        shutil.rmtree(tmp_path / "copy")
    assert len(every) >= 400 and seen["refused"] >= 300 // step, seen


def test_a_damaged_training_is_done_again_as_the_error_says(whole: Any, tmp_path: Path) -> None:
    directory, expected = whole
    shutil.copytree(directory, tmp_path / "copy")
    files = {path.name: path for path in (tmp_path / "copy" / "trainings").iterdir()}
    for file in files.values():
        data = bytearray(file.read_bytes())
        data[-3] ^= 16
        file.write_bytes(data)
    while files:
        with pytest.raises(StoreError, match=r"checksum.*Delete this file and run the same command again") as error:
            run(tmp_path / "copy")
        (name,) = [name for name in files if name in str(error.value)]
        files.pop(name).unlink()
    assert run(tmp_path / "copy") == expected


@pytest.mark.parametrize("name", ["subsets.safetensors", "outputs.safetensors"])
def test_joined_files_are_never_read_as_truth(whole: Any, tmp_path: Path, name: str) -> None:
    directory, expected = whole
    shutil.copytree(directory, tmp_path / "copy")
    (tmp_path / "copy" / name).write_bytes(b"not a file of tensors")
    (finding,) = [one for one in verify_retraining(tmp_path / "copy") if one.state != "intact"]
    assert finding.path.name == name and finding.state == "damaged" and "anew" in finding.remedy
    assert run(tmp_path / "copy") == expected
    assert {one.state for one in verify_retraining(tmp_path / "copy")} == {"intact"}


def test_a_dataset_outlives_later_calls(tmp_path: Path) -> None:
    """More subsets later replace the file; what was returned before stays what it was."""
    first = retrain_on_subsets(MASKS[:2], trained, tmp_path)
    before = first["outputs"][:]
    retrain_on_subsets(MASKS, trained, tmp_path)
    assert first["outputs"][:] == before and len(first) == 2
    assert first.map(lambda row: {"sum": sum(row["outputs"])})["outputs"][:] == before


def test_the_check_misses_nothing_that_is_absent(whole: Any, tmp_path: Path) -> None:
    directory, _ = whole
    shutil.copytree(directory, tmp_path / "copy")
    last = sorted((tmp_path / "copy" / "trainings").iterdir())[-1]
    last.unlink()
    (finding,) = [one for one in verify_retraining(tmp_path / "copy") if one.state != "intact"]
    assert finding.path == last and finding.state == "missing"
    (tmp_path / "copy" / "trainings" / ".hf_trak-tmp-host-1-0123456789abcdef").write_text("")
    assert [one.state for one in verify_retraining(tmp_path / "copy") if one.state != "intact"] == [
        "missing",
        "leftover",
    ]
    with pytest.raises(IncompleteStoreError, match="holds no retrainings"):
        list(verify_retraining(tmp_path))


def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, repeats=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_trak.store.shards.save_file", full)
    with pytest.raises(StoreError, match=r"repeat-001.*No space left.*are free.*run the same"):
        run(tmp_path)
