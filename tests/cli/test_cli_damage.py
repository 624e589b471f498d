"""Files that commands read back, damaged: each refusal names the file, what is in it, and what to do."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from kit.files import write_json
from kit.training import RECORD as TRAINING_RECORD
from kit.training import saved_checkpoints, train_once

from hf_trak.cli.build import RECORD, remembered
from hf_trak.cli.evaluate import _array
from hf_trak.cli.main import main
from hf_trak.errors import StoreError
from hf_trak.store.sealed import read_sealed, write_sealed

SETTINGS = {"seed": 0, "learning_rate": 0.01}


def mutations(data: bytes) -> list[bytes]:
    """A bit of every byte flipped, and every fifth truncation."""
    flips = [data[:i] + bytes([data[i] ^ (1 << (i * 5) % 8)]) + data[i + 1 :] for i in range(len(data))]
    return [*flips, *(data[:i] for i in range(0, len(data), 5))]


# -- the record of `hf-trak featurize` -------------------------------------------------------------------------------


def record(directory: Path, **changes: Any) -> Path:
    path = directory / RECORD
    content = {"arguments": {"dataset_name": "rows"}, "trak": {"lambda_relative": 0.25, "seed": 3}, "processing": None}
    write_sealed(path, {**content, **changes})
    return path


def test_a_record_is_read_back(tmp_path: Path) -> None:
    record(tmp_path)
    assert remembered(str(tmp_path)) == {"dataset_name": "rows", "lambda_relative": 0.25, "seed": 3}
    assert remembered(str(tmp_path / "nowhere")) == {}


def test_records_of_the_version_before_are_read(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text('{"arguments": {"dataset_name": "rows"}, "processing": null, "trak": {"seed": 3}}')
    assert remembered(str(tmp_path)) == {"dataset_name": "rows", "seed": 3}


def test_every_changed_byte_of_a_record_is_noticed(tmp_path: Path) -> None:
    """λ among them. A change that leaves the JSON as it is (spaces) is none."""
    path = record(tmp_path)
    data, before = path.read_bytes(), remembered(str(tmp_path))
    silent = 0
    for changed in mutations(data):
        path.write_bytes(changed)
        try:
            found = remembered(str(tmp_path))
        except StoreError as error:
            assert str(path) in str(error)
        else:
            assert found == before and json.loads(changed) == json.loads(data)
            silent += 1
    assert silent <= data.count(b" ") + data.count(b"\n")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"5",
        b"[" * 100_000,
        b'{"arguments": 5}',
        b'{"trak": [1]}',
        b'{"processing": "x"}',
        b"\xff\xfe",
    ],
    ids=range(9),
)
def test_a_damaged_record_is_named(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / RECORD).write_bytes(content)
    with pytest.raises(StoreError, match=re.escape(str(tmp_path / RECORD))):
        remembered(str(tmp_path))
    assert main(["attribute", "--output_dir", str(tmp_path)]) == 1
    assert "StoreError" in capsys.readouterr().err


# -- the record of a training ----------------------------------------------------------------------------------------


class FakeTrainer:
    """As much of a trainer as a finished training needs."""

    def __init__(self, directory: Path) -> None:
        self.args = type("Args", (), {"output_dir": str(directory)})
        self.accelerator = type("A", (), {"wait_for_everyone": lambda *_: None, "unwrap_model": lambda _, m: m})()
        self.model = torch.nn.Linear(2, 1)

    def is_world_process_zero(self) -> bool:
        return True

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        step = Path(self.args.output_dir) / "checkpoint-10"
        step.mkdir(parents=True)
        torch.save(self.model.state_dict(), step / "pytorch_model.bin")
        (step / "trainer_state.json").write_text("{}")


def test_a_training_is_done_once(tmp_path: Path) -> None:
    first = FakeTrainer(tmp_path)
    assert train_once(first, SETTINGS) == [str(tmp_path / "checkpoint-10")]
    assert read_sealed(tmp_path / TRAINING_RECORD)["finished"] is True
    second = FakeTrainer(tmp_path)
    train_once(second, SETTINGS)
    assert torch.equal(first.model.weight, second.model.weight)
    with pytest.raises(ValueError, match="seed: 0 there, 1 given"):
        train_once(second, {**SETTINGS, "seed": 1})
    (tmp_path / TRAINING_RECORD).write_text(json.dumps({"settings": SETTINGS, "finished": True}))  # as it once was
    train_once(second, SETTINGS)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b"{}",
        b'{"settings": 5, "finished": true}',
        b'{"settings": {}, "finished": 1}',
    ],
    ids=range(7),
)
def test_a_damaged_record_of_a_training_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TRAINING_RECORD).write_bytes(content)
    with pytest.raises(StoreError, match=TRAINING_RECORD):
        train_once(FakeTrainer(tmp_path), SETTINGS)


def test_every_changed_byte_of_the_record_of_a_training_is_noticed(tmp_path: Path) -> None:
    train_once(FakeTrainer(tmp_path), SETTINGS)
    path = tmp_path / TRAINING_RECORD
    data = path.read_bytes()
    for changed in mutations(data):
        path.write_bytes(changed)
        try:
            train_once(FakeTrainer(tmp_path), SETTINGS)
        except StoreError as error:
            assert str(path) in str(error)
        else:
            assert json.loads(changed) == json.loads(data)


def test_a_finished_training_without_checkpoints_is_named(tmp_path: Path) -> None:
    write_sealed(tmp_path / TRAINING_RECORD, {"settings": SETTINGS, "finished": True})
    with pytest.raises(StoreError, match=r"finished, but .* holds no checkpoint.*--overwrite"):
        train_once(FakeTrainer(tmp_path), SETTINGS)


def test_directories_that_are_no_checkpoints_are_passed_over(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-best", "checkpoint-1e3", "checkpoint-"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}")
    assert [Path(path).name for path in saved_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


def test_summaries_are_replaced_at_once(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "summary.json", {"b": 1, "a": [float("nan")]})
    write_json(tmp_path / "new" / "summary.json", {"b": 2})
    assert (tmp_path / "new" / "summary.json").read_text() == '{\n  "b": 2\n}\n'
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["summary.json"]


# -- arrays ----------------------------------------------------------------------------------------------------------


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"x", b"\x93NUMPY", header("{"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000,)}\n"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}\n"), header("__import__('os')\n"),
        header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n") + b"cos\nsystem\n(S'true'\ntR.",
        header("{'descr': '<U4', 'fortran_order': False, 'shape': (1,)}\n") + bytes(16), b"PK\x03\x04" + bytes(100),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}\n"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 30 + ",)}\n"),
    ],
    ids=range(12),
)  # fmt: skip
def test_damaged_arrays_are_named(tmp_path: Path, content: bytes) -> None:
    """Whatever a header claims: nothing is unpickled, and no memory is taken for a shape that is not there."""
    (tmp_path / "masks.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"masks\.npy'"):
        _array(str(tmp_path / "masks.npy"))


def test_good_arrays_are_read(tmp_path: Path) -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.array([[True, False]]), np.arange(4, dtype=np.int8)):
        np.save(tmp_path / "x.npy", array)
        assert np.array_equal(_array(str(tmp_path / "x.npy")), array)


def test_rows_without_content_end_a_command_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty JSON Lines file for training rows, for targets, and a damaged dataset for a report."""
    (tmp_path / "rows.jsonl").write_bytes(b"")
    rows = ["--train_dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out")]
    Dataset.from_dict({"a": [1]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{}")
    for command in (
        ["attribute", "--model", "m", "--eval_dataset", str(tmp_path / "rows.jsonl"), *rows],
        ["attribute", "--model", "m", "--eval_dataset", str(tmp_path / "saved"), *rows],
        ["attribute", "--index", "x/y", "--eval_dataset", str(tmp_path / "rows.jsonl")],
    ):
        assert main(command) == 1
        assert "No rows can be read from" in capsys.readouterr().err
