"""Directories of `TRAKer` that version 0.1.0 wrote: they open with one warning, are finished, and can be upgraded."""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import format_1_traker as old
from torch import Tensor
from traker_runs import SAVERS, findings

from hf_trak.errors import ConfigMismatchError, StoreError
from hf_trak.store import format_1
from hf_trak.traker import TRAKer
from hf_trak.traker.savers import mmap_directory
from hf_trak.traker.savers.mmap_saver import read_scores, upgrade_mmap
from hf_trak.traker.savers.safetensors_saver import upgrade_traker

GOLDEN = Path(__file__).parents[1] / "data" / "format-1"
EXPECTED = json.loads((GOLDEN / "traker-expected.json").read_text())
NAMES = {"mmap": "traker-mmap", "safetensors": "traker-safetensors"}


@pytest.fixture
def golden(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for warned in (mmap_directory._warned, format_1.warned_directories):
        warned.clear()
    name = NAMES[request.getfixturevalue("kind")]
    shutil.copytree(GOLDEN / name, tmp_path / name)
    return tmp_path / name


def open_golden(directory: Path, kind: str) -> TRAKer:
    return old.traker(directory, SAVERS[kind].__name__)


def saved_scores(traker: TRAKer, kind: str) -> Tensor:
    return read_scores(traker.save_dir, "golden") if kind == "mmap" else traker.saver.read_scores("golden")


def close(found: Tensor, expected: Tensor) -> bool:
    """Products of float32 matrices depend on the machine: k = 8 terms, twice, and an average."""
    bound = 32 * 2**-24 * float(expected.abs().max())
    return torch.allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", SAVERS)
def test_a_directory_of_format_1_opens_with_one_warning(golden: Path, kind: str, caplog: Any) -> None:
    expected = torch.tensor(EXPECTED[NAMES[kind]])
    with caplog.at_level(logging.WARNING, "hf_trak"):
        assert torch.equal(saved_scores(open_golden(golden, kind), kind), expected)
        for _ in range(2):
            assert close(open_golden(golden, kind).finalize_scores("golden", [0, 1]), expected)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "of format 1" in told[0] and "hf-trak upgrade" in told[0] and str(golden) in told[0]
    states = {one.state for one in findings(golden, kind)}
    assert "unchecked" in states and "damaged" not in states


@pytest.mark.parametrize("kind", SAVERS)
def test_a_run_of_format_1_is_finished_in_its_format(golden: Path, kind: str) -> None:
    traker = open_golden(golden, kind)
    traker.load_checkpoint(old.state(2), 2)
    assert np.flatnonzero(traker.saver.featurized()).tolist() == list(range(old.HALF))
    for start in range(0, old.N, 2):
        traker.featurize(old.rows(start, start + 2), inds=range(start, start + 2))
    traker.finalize_features()
    for member in range(3):
        traker.start_scoring_checkpoint("golden", old.state(member), member, old.M)
        traker.score(old.rows(old.N, old.N + old.M), num_samples=old.M)
    scores = traker.finalize_scores("golden")
    fresh = old.traker(golden.parent / "fresh", SAVERS[kind].__name__)
    for member in range(3):
        fresh.load_checkpoint(old.state(member), member)
        for start in range(0, old.N, 2):
            fresh.featurize(old.rows(start, start + 2), inds=range(start, start + 2))
    fresh.finalize_features()
    for member in range(3):
        fresh.start_scoring_checkpoint("golden", old.state(member), member, old.M)
        fresh.score(old.rows(old.N, old.N + old.M), num_samples=old.M)
    assert torch.allclose(scores, fresh.finalize_scores("golden"), rtol=1e-4, atol=1e-6)
    assert torch.equal(saved_scores(open_golden(golden, kind), kind), scores)
    for path in golden.rglob("*.json"):
        assert "checksum" not in json.loads(path.read_text()), path


UPGRADES = {"mmap": upgrade_mmap, "safetensors": upgrade_traker}


@pytest.mark.parametrize("kind", SAVERS)
def test_upgrading(golden: Path, kind: str, caplog: Any) -> None:
    expected, upgrade = torch.tensor(EXPECTED[NAMES[kind]]), UPGRADES[kind]
    upgrade(golden)
    assert {one.state for one in findings(golden, kind)} == {"intact", "missing"}  # of model id 2 rows are missing
    files = {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()}
    for warned in (mmap_directory._warned, format_1.warned_directories):
        warned.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_trak"):
        upgrade(golden)
        assert {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()} == files
        traker = open_golden(golden, kind)
        assert torch.equal(saved_scores(traker, kind), expected)
        assert close(traker.finalize_scores("golden", [0, 1]), expected)
        traker.load_checkpoint(old.state(2), 2)
        assert np.flatnonzero(traker.saver.featurized()).tolist() == list(range(old.HALF))
    assert not caplog.records
    for path in [path for path in golden.rglob("*") if path.is_file() and path.suffix in (".mmap", ".safetensors")]:
        if path.parent.name == "2" or path.stem.endswith(("is_scored", "is_featurized")):
            continue  # not complete, or without rows
        data = bytearray(path.read_bytes())
        data[-130] ^= 1
        path.write_bytes(data)
        assert path in {one.path for one in findings(golden, kind) if one.state == "damaged"}
        data[-130] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("kind", SAVERS)
def test_an_upgrade_that_was_killed_goes_on(golden: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each file that it writes. In between, a directory of MmapSaver is one of format 1 that may be used and
    changed; one of SafetensorsSaver is that, too, until files are exchanged, and is then refused until that is done.
    """
    expected, replace = torch.tensor(EXPECTED[NAMES[kind]]), os.replace
    steps, used, refused = 0, 0, 0
    while True:
        count = 0

        def counted(*args: Any) -> None:
            nonlocal count
            if count == steps:  # noqa: B023
                raise KeyboardInterrupt
            count += 1
            replace(*args)

        monkeypatch.setattr("hf_trak.store.atomic.os.replace", counted)  # this is `os.replace` everywhere
        try:
            UPGRADES[kind](golden)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            monkeypatch.setattr("hf_trak.store.atomic.os.replace", replace)
        steps += 1
        try:
            traker = open_golden(golden, kind)
        except StoreError as error:
            assert kind == "safetensors" and "hf-trak upgrade" in str(error)
            steps, refused = 1, refused + 1  # one file is exchanged per call
            continue
        used += 1
        assert torch.equal(saved_scores(traker, kind), expected)
        traker.load_checkpoint(old.state(2), 2)
        traker.featurize(old.rows(6 + steps % 3, 7 + steps % 3), inds=[6 + steps % 3])
        assert not {one.path for one in findings(golden, kind) if one.state == "damaged"}
    assert used >= 8 and (refused >= 8) == (kind == "safetensors")
    assert {one.state for one in findings(golden, kind)} <= {"intact", "missing"}
    assert torch.equal(saved_scores(open_golden(golden, kind), kind), expected)


@pytest.mark.parametrize("kind", ["mmap"])
def test_an_upgrade_refuses_what_is_visibly_damaged(golden: Path, kind: str) -> None:
    for name, offset, value in (("grads", 131, 0x7F), ("_is_featurized", 128, 7), ("features", None, b"")):
        path = golden / "0" / f"{name}.mmap"
        before = path.read_bytes()
        data = bytearray(before if offset is not None else before[:200])
        if offset is not None:
            data[offset] = value
            data[offset - 1] = 0x80 if name == "grads" else data[offset - 1]
        path.write_bytes(data)
        with pytest.raises(StoreError, match=rf"{name}\.mmap"):
            upgrade_mmap(golden)
        path.write_bytes(before)
    assert "checksum" not in json.loads((golden / "metadata.json").read_text())


WRONG = [
    ("mmap", "metadata.json", {"proj_dim": "8"}),
    ("mmap", "metadata.json", {"feature_dtype": ["float32"]}),
    ("mmap", "metadata.json", {"train_size": -1}),
    ("mmap", "experiments.json", {"golden": 3}),
    ("mmap", "experiments.json", {"golden": {"num_targets": None}}),
    ("mmap", "experiments.json", {"golden": {}}),
    ("mmap", "0/id_metadata.json", {"model_id": 1}),
    ("mmap", "0/id_metadata.json", {"finalized": []}),
    ("mmap", "0/id_metadata.json", {"finalized_with": 3}),
    ("mmap", "0/id_metadata.json", {"fingerprint": 3}),
    ("mmap", "0/id_metadata.json", {"grads_deleted": "no"}),
    ("safetensors", "checkpoint-0/features.json", {"settings": 3}),
    ("safetensors", "checkpoint-0/features.json", {"content": None}),
    ("safetensors", "checkpoint-0/features.json", {"grads_deleted": 1}),
    ("safetensors", "experiments/golden/experiment.json", {"num_targets": "3"}),
]


@pytest.mark.parametrize(("kind", "name", "change"), WRONG)
def test_values_that_cannot_be_are_refused_by_name(golden: Path, kind: str, name: str, change: dict) -> None:
    """In format 1 no checksum notices them first."""
    path = golden / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((StoreError, ConfigMismatchError), match=re.escape(str(path))):
        open_golden(golden, kind).finalize_scores("golden", [0, 1])


NO_OBJECTS = [b"", b"[1]", b"{", b"null", b"[" * 100_000, b"\xff\xfe{}", b'{"a": 1e999}x']


@pytest.mark.parametrize("content", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
@pytest.mark.parametrize(("kind", "name"), sorted({(kind, name) for kind, name, _ in WRONG}))
def test_what_is_no_json_object_is_refused_by_name(golden: Path, kind: str, name: str, content: bytes) -> None:
    (golden / name).write_bytes(content)
    with pytest.raises(StoreError, match=re.escape(str(golden / name))):
        open_golden(golden, kind).finalize_scores("golden", [0, 1])
