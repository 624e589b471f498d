"""Stores and indexes that an earlier version wrote in the current format, before the modules of hf_trak moved.

They are read, resumed and verified without a warning, and nothing that they hold is computed again.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import assert_within, gamma
from safetensors import safe_open
from safetensors.torch import load_file
from test_format_1 import assert_same_scores, attributor_of, expected, golden, scores_of

from hf_trak import TrakAttributor
from hf_trak.cli.main import main
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.store import FeatureStore
from hf_trak.store.verification import verify_store

STATES = [golden.state(0), golden.state(1)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("store", "index", "expected.json"):
        source = Path(__file__).parents[1] / "data" / "format-2" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, logger="hf_trak"):
        yield
    assert not [record.getMessage() for record in caplog.records]


@pytest.fixture
def _nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was computed although the store holds it")

    monkeypatch.setattr(ShardSet, "write", refuse)
    monkeypatch.setattr(FeatureStore, "write_gram", refuse)


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("_nothing_computed")
def test_scores_of_stored_targets_come_from_what_is_stored(directory: Path) -> None:
    before = contents(directory / "store")
    assert_same_scores(scores_of(attributor_of(directory), name="golden"), expected(directory))
    after = contents(directory / "store")
    assert {path: after[path] for path in before} == before
    assert not [path for path in set(after) - set(before) if path.suffix == ".safetensors"]


@pytest.mark.usefixtures("_nothing_computed")
def test_a_finished_store_is_taken_as_finished(directory: Path) -> None:
    attributor_of(directory).featurize(STATES)


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["hf_trak"])


def test_an_unfinished_store_is_finished(directory: Path) -> None:
    """A run that was killed before its last shard, so that there is no Gram matrix either."""
    missing = directory / "store" / "checkpoint-1" / "train-00001-of-00003.safetensors"
    header, features, size = header_of(missing), load_file(missing), missing.stat().st_size
    missing.unlink()
    (missing.parent / "gram.safetensors").unlink()
    attributor_of(directory).featurize(STATES)
    found, computed = header_of(missing), load_file(missing)
    assert missing.stat().st_size == size
    checksums = {"checksum", "tensors"}  # equal where this processor rounds as that of the golden files did
    assert {key: found[key] for key in found if key not in checksums} == {
        key: header[key] for key in header if key not in checksums
    }
    if all(torch.equal(computed[name], features[name]) for name in features):
        assert found == header
    # Fewer than 100 roundings lead from the weights to an entry, of terms that are no larger than the row.
    assert_within(computed["grads"], features["grads"], gamma(100) * features["grads"].norm(dim=1, keepdim=True))
    assert_within(computed["out_to_loss"], features["out_to_loss"], gamma(100))
    assert {one.state for one in verify_store(directory / "store")} == {"intact"}
    assert_same_scores(scores_of(attributor_of(directory), name="golden"), expected(directory))


def test_every_file_is_intact(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {one.state for one in verify_store(directory / "store")} == {"intact"}
    assert main(["verify-store", str(directory / "store")]) == 0
    assert "0 damaged" in capsys.readouterr().out


def test_an_index_opens_and_gives_the_same_scores(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = ShardSet.write

    def recorded(shards: ShardSet, *args: Any) -> Path:
        written.append(shards.prefix)
        return write(shards, *args)

    monkeypatch.setattr(ShardSet, "write", recorded)
    before = contents(directory / "index")
    attributor = TrakAttributor.from_pretrained(
        str(directory / "index"),
        golden.network(),
        checkpoints=STATES,
        output_dir=str(tmp_path / "mine"),
        use_cpu=True,
    )
    scored = attributor.attribute(golden.rows(100, golden.M), top_k=None).with_format("numpy")
    assert_same_scores(scored["trak_scores"][:], expected(directory))
    assert written == ["targets", "targets"]
    assert contents(directory / "index") == before
