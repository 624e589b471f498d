"""Stores and indexes of format 1, as version 0.1.0 wrote them: they open, say what they do not know, are upgraded."""

import contextlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import assert_within, gamma
from safetensors import safe_open
from safetensors.torch import load_file

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.main import main
from hf_trak.errors import ConfigMismatchError, StoreError
from hf_trak.store import format_1
from hf_trak.store.store import FeatureStore
from hf_trak.store.verification import verify_store

DATA = Path(__file__).parents[1] / "data"
_spec = importlib.util.spec_from_file_location("format_1", DATA / "format_1.py")
assert _spec is not None and _spec.loader is not None
golden: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


@pytest.fixture(autouse=True)
def _no_warnings_yet() -> Iterator[None]:
    format_1.warned_directories.clear()
    yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "format-1", tmp_path / "golden")
    return tmp_path / "golden"


def attributor_of(directory: Path, model: Any = None, dataset: Any = None, **options: Any) -> TrakAttributor:
    settings = {"proj_dim": 8, "shard_size": 4, "per_device_batch_size": 4, **options}
    args = TrakConfig(output_dir=str(directory / "store"), use_cpu=True, disable_tqdm=True, **settings)
    rows = golden.rows(0, golden.N) if dataset is None else dataset
    return TrakAttributor(model or golden.network(), args, train_dataset=rows, task="image_classification")


def scores_of(attributor: TrakAttributor, **options: Any) -> np.ndarray:
    states = [golden.state(0), golden.state(1)]
    scored = attributor.attribute(golden.rows(100, golden.M), top_k=None, checkpoints=states, **options)
    return np.stack(scored.with_format("numpy")["trak_scores"][:])


def expected(directory: Path) -> np.ndarray:
    return np.array(json.loads((directory / "expected.json").read_text()), dtype=np.float32)


def assert_same_scores(found: np.ndarray, wanted: np.ndarray) -> None:
    """Equal but for the order of 8 additions in float32, which CPUs choose differently."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=8 * np.finfo(np.float32).eps * np.abs(wanted).max() * 8)


def test_scores_of_a_store_are_those_of_the_version_that_wrote_it(directory: Path) -> None:
    before = {path: path.read_bytes() for path in (directory / "store").rglob("*.safetensors")}
    assert_same_scores(scores_of(attributor_of(directory), name="golden"), expected(directory))
    assert {path: path.read_bytes() for path in before} == before  # features of targets, too, were used as they are


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["hf_trak"])


def without_checksums(header: dict[str, Any]) -> dict[str, Any]:
    """A header without what depends on the last bits of features."""
    identity = {key: value for key, value in header["identity"].items() if key != "content"}
    return {**{key: header[key] for key in header if key not in {"checksum", "trace"}}, "identity": identity}


def test_a_store_is_finished_in_its_own_format(directory: Path) -> None:
    """A shard is computed again. The Gram matrix goes, too: it would only be accepted with the same bits."""
    missing = directory / "store" / "checkpoint-1" / "train-00001-of-00003.safetensors"
    gram = missing.parent / "gram.safetensors"
    headers, features = [header_of(path) for path in (missing, gram)], load_file(missing)
    for path in (missing, gram):
        path.unlink()
    attributor_of(directory).featurize([golden.state(0), golden.state(1)])
    computed = load_file(missing)
    for path, header in zip((missing, gram), headers, strict=True):
        found = header_of(path)
        assert found["format_version"] == 1 and without_checksums(found) == without_checksums(header)
        if all(torch.equal(computed[name], features[name]) for name in features):
            assert found == header  # this processor rounds as that of the golden files did
    # Fewer than 100 roundings lead from the weights to an entry, of terms that are no larger than the row.
    assert_within(computed["grads"], features["grads"], gamma(100) * features["grads"].norm(dim=1, keepdim=True))
    assert_within(computed["out_to_loss"], features["out_to_loss"], gamma(100))


def test_what_a_store_does_not_say_is_said_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_trak"):
        for _ in range(2):
            FeatureStore.load(directory / "store")
    (record,) = [one for one in caplog.records if "format 1" in one.getMessage()]
    assert "hf-trak upgrade" in record.getMessage() and "collated" in record.getMessage()


def test_an_index_opens_and_gives_the_same_scores(directory: Path, tmp_path: Path) -> None:
    attributor = TrakAttributor.from_pretrained(
        str(directory / "index"),
        golden.network(),
        checkpoints=[golden.state(0), golden.state(1)],
        output_dir=str(tmp_path / "mine"),
        use_cpu=True,
        disable_tqdm=True,
    )
    scored = attributor.attribute(golden.rows(100, golden.M), top_k=None).with_format("numpy")
    assert_same_scores(np.stack(scored["trak_scores"][:]), expected(directory))


def test_features_under_another_id_are_noticed_in_format_1_too(directory: Path) -> None:
    shutil.rmtree(directory / "store" / "checkpoint-1")
    shutil.copytree(directory / "store" / "checkpoint-0", directory / "store" / "checkpoint-1")
    with pytest.raises(StoreError, match=r"checkpoint-1/checkpoint\.json is that of model id 0"):
        scores_of(attributor_of(directory), name="golden")


def test_a_changed_trace_is_noticed_in_format_1_too(directory: Path) -> None:
    path = directory / "store" / "checkpoint-0" / "gram.safetensors"
    data = path.read_bytes()
    start = data.index(b'trace\\": ') + len(b'trace\\": ')
    digit = data[start : start + 1]
    path.write_bytes(data[:start] + (b"9" if digit != b"9" else b"8") + data[start + 1 :])
    with pytest.raises(StoreError, match=r"gram\.safetensors says that the trace"):
        scores_of(attributor_of(directory), name="golden")


def test_upgrade(directory: Path) -> None:
    states = [golden.state(0), golden.state(1)]
    old = {
        model_id: torch.cat([shard.grads.clone() for shard in FeatureStore.load(directory / "store").train(model_id)])
        for model_id in (0, 1)
    }
    attributor = attributor_of(directory).upgrade_store(states)
    assert attributor.store.version == 2
    for model_id, features in old.items():
        assert torch.equal(torch.cat([shard.grads for shard in attributor.store.train(model_id)]), features)
    assert_same_scores(scores_of(attributor, name="golden"), expected(directory))
    assert {one.state for one in verify_store(directory / "store")} == {"intact"}
    assert not (directory / "store" / "upgrading").exists()
    attributor.upgrade_store(states)  # nothing to do
    assert_same_scores(scores_of(attributor_of(directory), name="golden"), expected(directory))


@pytest.mark.parametrize("step", range(1, 60, 4))
def test_an_upgrade_that_is_interrupted_goes_on(directory: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """At some system call the process is gone; the same call finishes, and no call in between gives other scores."""
    calls = 0
    replace = os.replace

    def stopped(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            raise KeyboardInterrupt
        replace(*args)

    states = [golden.state(0), golden.state(1)]
    monkeypatch.setattr(os, "replace", stopped)
    with contextlib.suppress(KeyboardInterrupt):
        attributor_of(directory).upgrade_store(states)
    monkeypatch.setattr(os, "replace", replace)
    try:
        between = scores_of(attributor_of(directory))
    except StoreError as error:
        assert str(directory) in str(error)
    else:
        assert_same_scores(between, expected(directory))
    attributor = attributor_of(directory).upgrade_store(states)
    assert attributor.store.version == 2
    assert_same_scores(scores_of(attributor), expected(directory))


@pytest.mark.parametrize("what", ["rows", "collator", "model"])
def test_an_upgrade_refuses_what_does_not_fit(directory: Path, what: str) -> None:
    """Rows are in the identity of format 1; collators and settings of the model show in features computed again."""
    before = {path: path.read_bytes() for path in (directory / "store").rglob("*") if path.is_file()}
    attributor = attributor_of(directory, dataset=golden.rows(1, golden.N) if what == "rows" else None)
    if what == "collator":
        attributor.data_collator = _collate_doubled
    elif what == "model":
        attributor.model.first.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    with pytest.raises(ConfigMismatchError):
        attributor.upgrade_store([golden.state(0), golden.state(1)])
    assert {path: path.read_bytes() for path in before} == before


def _collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.tensor([row["pixel_values"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def _collate_doubled(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = _collate(rows)
    return {**batch, "pixel_values": 2 * batch["pixel_values"]}


def test_verify_store_says_what_is_not_protected(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-store", str(directory / "store")]) == 0
    out = capsys.readouterr().out
    assert "UNCHECKED" in out and "0 damaged" in out
