"""Curvatures that are published with an index: used elsewhere to the bit, and refused where they are not sound."""

import json
import logging
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hub_server import TOKEN, Hub, client, hub
from huggingface_hub import DatasetCard, constants
from safetensors.torch import load as load_tensors
from test_hub_hostile import Bomb, Files, edited, listed, padded, shard_with
from torch import Tensor
from trak_options import trak_config

from hf_trak import TrakAttributor
from hf_trak.config import CurvatureConfig
from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.curvature.files import CurvatureFiles
from hf_trak.errors import (
    CheckpointMismatchError,
    IncompleteStoreError,
    RefusedIndexError,
    StoreError,
)
from hf_trak.hub import open_repo, pull_index, push_index
from hf_trak.hub.curvature_files import checked_record, checked_tensors
from hf_trak.hub.files import MAX_HEADER_BYTES, LocalFiles
from hf_trak.hub.index_store import IndexStore, open_index
from hf_trak.store.store import FeatureStore

__all__ = ["client", "hub"]  # fixtures

N, M, SIZE = 14, 3, 4
OPTIONS: dict[str, Any] = {"use_cpu": True, "per_device_batch_size": 7}
SETTING: dict[str, Any] = {"curvature_rows": 9, "curvature_damping": 0.3, "curvature_labels": "empirical"}
RECORD = "curvature/0/curvature.json"
BLOCK, DIAGONAL = "curvature/0/block-00001.safetensors", "curvature/0/diagonal.safetensors"


class Net(torch.nn.Module):
    """A perceptron of three layers and a norm."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = torch.nn.Linear(SIZE + 1, SIZE), torch.nn.Linear(SIZE, SIZE), torch.nn.LayerNorm(SIZE)
        self.layers = torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(SIZE, SIZE))

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.layers(pixel_values))


def weights(seed: int) -> dict[str, Tensor]:
    return Net(seed).state_dict()


def rows(start: int, count: int) -> Dataset:
    pixels = torch.sin(torch.arange(start, start + count).unsqueeze(1) * torch.arange(1.0, SIZE + 2)).tolist()
    return Dataset.from_dict({"pixel_values": pixels, "labels": [i % SIZE for i in range(start, start + count)]})


def full(attributor: TrakAttributor, **options: Any) -> np.ndarray:
    scored = attributor.attribute(rows(100, M), top_k=None, **options)
    return np.stack(scored.with_format("numpy")["trak_scores"][:])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attributor_in(directory: Path, **options: Any) -> TrakAttributor:
    """An attributor of two checkpoints."""
    config = trak_config(output_dir=str(directory), proj_dim=16, shard_size=8, **{**OPTIONS, **SETTING, **options})
    return TrakAttributor(Net(1), config, train_dataset=rows(0, N), task="image_classification")


_made: list[tuple[Files, dict[str, bytes], np.ndarray, Tensor]] = []


@pytest.fixture
def published(hub: Hub, client: Path, tmp_path: Path) -> Files:
    """An index of two checkpoints with their curvatures, made only once."""
    if not _made:
        made = attributor_in(tmp_path / "made").featurize([weights(1), weights(2)])
        made.fit_curvature([weights(1), weights(2)])
        made.push_to_hub("tester/index", token=TOKEN, private=False)
        store = {
            path.relative_to(tmp_path / "made").as_posix(): path.read_bytes()
            for path in (tmp_path / "made").rglob("*")
            if path.is_file()
        }
        influence = made.self_influence(method="exact")
        _made.append((dict(hub.dataset("tester/index")), store, full(made, method="exact"), influence))
    hub.put("dataset", "tester/index", _made[0][0])
    return dict(_made[0][0])


@pytest.fixture
def made(published: Files, tmp_path: Path) -> Path:
    """The directory that the index was published from, before targets were scored."""
    for name, data in _made[0][1].items():
        (tmp_path / "copy-of-made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy-of-made" / name).write_bytes(data)
    return tmp_path / "copy-of-made"


def expected() -> np.ndarray:
    """Exact scores before publishing."""
    return _made[0][2]


def load(name: str = "tester/index", model: Any = None, **options: Any) -> TrakAttributor:
    """Load the index with the training rows at hand."""
    given = {"use_cpu": True, "train_dataset": rows(0, N), "checkpoints": {1: weights(2)}}
    return TrakAttributor.from_pretrained(name, model or Net(1), token=TOKEN, **{**given, **options})


def curvatures(files: Any) -> list[str]:
    return sorted(name for name in files if name.startswith("curvature/"))


# -- published and used ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_scores_elsewhere(hub: Hub, published: Files, made: Path, tmp_path: Path) -> None:
    """Settings travel, files are fetched when they are needed, and nothing is fitted again."""
    names = curvatures(published)
    assert names == sorted(p.relative_to(made).as_posix() for p in (made / "curvature").rglob("*") if p.is_file())
    assert all(published[name] == (made / name).read_bytes() for name in names) and len(names) == 10
    elsewhere = load(output_dir=str(tmp_path / "work"))
    assert elsewhere.args.curvature == CurvatureConfig(rows=9, damping=0.3, labels="empirical")
    elsewhere.attribute(rows(100, M), method="index")
    assert not hub.downloads("curvature")
    assert np.array_equal(full(elsewhere, method="exact"), expected())
    assert sorted(hub.downloads("curvature")) == names
    assert not list((tmp_path / "work").rglob("curvature.json"))
    before = len(hub.log)
    assert torch.equal(elsewhere.fit_curvature().self_influence(method="exact"), _made[0][3])
    offline = load(local_files_only=True, output_dir=str(tmp_path / "other"))
    assert np.array_equal(full(offline, method="exact"), expected())
    assert len(hub.log) == before


def test_exact_scores_take_the_training_rows(hub: Hub, published: Files) -> None:
    elsewhere = load(train_dataset=None)
    for call in (lambda: full(elsewhere, method="exact"), lambda: elsewhere.self_influence(method="exact")):
        with pytest.raises(IncompleteStoreError, match=r"rows .* not at hand.*`train_dataset=`"):
            call()
    assert not hub.downloads("curvature")
    with pytest.raises(IncompleteStoreError, match="`train_dataset=`"):
        full(load(train_dataset=None, curvature="identity"), method="exact")


def test_other_settings_fit_another_curvature(
    hub: Hub, published: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"curvature": "diagonal", "curvature_damping": 0.7}
    caplog.set_level(logging.WARNING)
    given = {"kind": "diagonal", "damping": 0.7}
    found = full(load(output_dir=str(tmp_path / "work"), curvature=given), method="exact", checkpoints=[0])
    assert hub.downloads("curvature") == [RECORD]
    assert "fitted with other settings" in caplog.text and 'kind: saved "ekfac", given "diagonal"' in caplog.text
    assert (tmp_path / "work" / RECORD).exists()
    assert np.array_equal(found, full(attributor_in(tmp_path / "own", **other).featurize(), method="exact"))


@pytest.mark.slow
def test_a_curvature_of_ones_own_does_not_hide_the_published_one(hub: Hub, published: Files, tmp_path: Path) -> None:
    work = str(tmp_path / "work")
    full(load(output_dir=work, curvature="kfac"), method="exact", checkpoints=[0])
    again = load(output_dir=work)
    full(again, method="exact", checkpoints=[0])
    assert again.curvature_report().kind == "ekfac"


@pytest.mark.slow
def test_an_index_without_curvatures(hub: Hub, published: Files, made: Path, tmp_path: Path) -> None:
    """Pushing without them removes those that are there; who loads the index fits one, for all or some checkpoints."""
    hub.put("dataset", "tester/index", {**published, "curvature/notes.txt": b"mine"})
    attributor_in(made).push_to_hub("tester/index", token=TOKEN, curvature=False, private=False)
    assert curvatures(hub.dataset("tester/index")) == ["curvature/notes.txt"]
    without = load(output_dir=str(tmp_path / "work")).fit_curvature()
    assert (tmp_path / "work/curvature/0/curvature.json").read_bytes() == published[RECORD]
    assert np.array_equal(full(without, method="exact"), expected())
    shutil.rmtree(made / "curvature/1")
    attributor_in(made).push_to_hub("tester/index", token=TOKEN, private=False)
    kept = [name for name in curvatures(published) if "/0/" in name]
    assert curvatures(hub.dataset("tester/index")) == [*kept, "curvature/notes.txt"]


def test_a_copy_without_the_curvature(hub: Hub, published: Files, tmp_path: Path) -> None:
    """It has the manifest, and serves for scores that take no curvature."""
    copy = tmp_path / "copy"
    for name, data in published.items():
        if not name.startswith("curvature/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(data)
    elsewhere = load(str(copy), output_dir=str(tmp_path / "work"))
    elsewhere.attribute(rows(100, M), method="index")
    with pytest.raises(IncompleteStoreError, match=r"curvature\.json is missing.*Pull or clone it again"):
        full(elsewhere, method="exact")


def interrupted(store: IndexStore, name: str, directory: Path) -> None:
    """Copy no curvature."""
    if name.startswith("curvature/"):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_copies(hub: Hub, published: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pull_index` copies curvatures, also over older ones. Copies work without a connection, and can be published."""
    copy = tmp_path / "copy"
    (copy / "curvature/0").mkdir(parents=True)
    (copy / RECORD).write_text("{}")
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr("hf_trak.hub.index_store._copy", interrupted)
        pull_index("tester/index", copy)
    assert not (copy / RECORD).exists(), "it would belong to other blocks"
    pull_index("tester/index", copy)
    assert all((copy / name).read_bytes() == published[name] for name in curvatures(published))
    push_index(FeatureStore.load(copy), "tester/fork", token=TOKEN, private=False)
    fork = hub.dataset("tester/fork")
    assert fork["trak_index.json"] == published["trak_index.json"]
    assert all(fork[name] == published[name] for name in curvatures(published))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert np.array_equal(full(load(str(copy), output_dir=str(tmp_path / "work")), method="exact"), expected())


def test_settings_that_are_not_told_follow_the_curvature(hub: Hub, published: Files, made: Path) -> None:
    push_index(FeatureStore.load(made), "tester/other", token=TOKEN, private=False)
    settings = open_repo("tester/other").manifest.settings["curvature"]
    assert (settings["kind"], settings["labels"], settings["rows"]) == ("ekfac", "empirical", 9)
    push_index(
        FeatureStore.load(made), "tester/other", token=TOKEN, settings=trak_config(curvature_rows=8), private=False
    )
    assert open_repo("tester/other").manifest.settings["curvature"]["rows"] == 8


def test_the_card_tells_of_the_curvature(hub: Hub, published: Files) -> None:
    card = DatasetCard(published["README.md"].decode())
    size = sum(len(published[name]) for name in curvatures(published) if name.startswith("curvature/1")) / 2**20
    assert f"| 1 | `ekfac` | 9 rows | those of the data | {size:.1f} MiB |\n\n## What the scores mean" in card.text
    assert "holds no row" in card.text and "which words" in card.text
    assert "{%" not in card.text and "None" not in card.text and "\n\n\n" not in card.text


def test_an_index_takes_no_other_weights(hub: Hub, published: Files) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"model_id 0 .*Expected the same weights"):
        load().fit_curvature(weights(3))
    with pytest.raises(StoreError, match="only read here"):
        load().fit_curvature({2: weights(1)})


def test_what_is_not_published(hub: Hub, made: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A curvature that is not finished is left out, and one that readers would refuse is an error."""
    store = FeatureStore.load(made)
    before = hub.dataset("tester/index")
    damaged = load_tensors((made / BLOCK).read_bytes())["eigenvalues"]
    (made / BLOCK).write_bytes(with_values(_made[0][0], BLOCK, eigenvalues=-damaged)[BLOCK])
    with pytest.raises(StoreError, match=r"block-00001.* cannot be published: .*below 0\. .*`curvature=False`"):
        push_index(store, "tester/index", token=TOKEN, private=False)
    (made / BLOCK).unlink()
    with pytest.raises(StoreError, match="cannot be published: it is missing"):
        push_index(store, "tester/index", token=TOKEN, private=False)
    assert hub.dataset("tester/index") == before
    (made / RECORD).unlink()
    (made / "curvature/0/progress").mkdir()
    push_index(store, "tester/index", token=TOKEN, private=False)
    assert "is not finished" in caplog.text
    assert {name[:12] for name in curvatures(hub.dataset("tester/index"))} == {"curvature/1/"}


# -- of another version ----------------------------------------------------------------------------------------------


def test_a_curvature_of_another_version_is_passed_over(
    hub: Hub, published: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def newer(record: dict[str, Any]) -> None:
        record["identity"]["curvature_version"] = 99
        record["blocks"] = {"tensor trains": []}

    hub.put("dataset", "tester/index", with_record(published, newer))
    pull_index("tester/index", tmp_path / "copy")
    assert "another version" in caplog.text and not (tmp_path / "copy" / RECORD).exists()
    assert (tmp_path / "copy/curvature/1/curvature.json").exists()
    store = open_repo("tester/index", tmp_path / "work")
    identity = json.loads(published[RECORD])["identity"]
    assert store.curvature_dir(0, identity) == tmp_path / "work/curvature/0"


# -- hostile ---------------------------------------------------------------------------------------------------------


def with_record(files: Files, change: Callable[[dict[str, Any]], object], consistent: bool = True) -> Files:
    """Change the record of a curvature, its checksum, and that in the manifest."""
    changed = {**files, RECORD: edited(files, RECORD, change)}
    return listed(changed) if consistent else changed


def with_values(files: Files, name: str, consistent: bool = True, **tensors: Tensor) -> Files:
    """Change tensors of a file, and all checksums."""
    return shard_with(files, name, {**load_tensors(files[name]), **tensors}, consistent)


def changed(name: str, key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Files], Files]:
    return lambda files: with_values(files, name, **{key: change(load_tensors(files[name])[key])})


def first(value: float) -> Callable[[Tensor], Tensor]:
    """Replace the first number."""

    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values.view(-1)[0] = value
        return values

    return change


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Files], Files]:
    """Change the files in the manifest."""
    return lambda files: {
        **files, "trak_index.json": edited(files, "trak_index.json", lambda m: change(m["files"]))
    }  # fmt: skip


def setting(**values: Any) -> Callable[[Files], Files]:
    return lambda files: {
        **files, "trak_index.json": edited(files, "trak_index.json", lambda m: m["settings"].update(values))
    }  # fmt: skip


def curvature(**values: Any) -> Callable[[Files], Files]:
    return lambda files: {
        **files,
        "trak_index.json": edited(files, "trak_index.json", lambda m: m["settings"]["curvature"].update(values)),
    }


def record(change: Callable[[dict[str, Any]], object]) -> Callable[[Files], Files]:
    return lambda files: with_record(files, change)


def block(**values: Any) -> Callable[[Files], Files]:
    """Change the first block with bases."""
    return record(lambda content: content["blocks"]["kronecker"][0].update(values))


def lone(**values: Any) -> Callable[[Files], Files]:
    """Change the first block without bases."""
    return record(lambda content: content["blocks"]["diagonal"][0].update(values))


def without(name: str) -> Callable[[Files], Files]:
    return lambda files: {key: data for key, data in files.items() if key != name}


def replaced(name: str, change: Callable[[bytes], bytes]) -> Callable[[Files], Files]:
    return lambda files: listed({**files, name: change(files[name])})


def cut(data: bytes) -> bytes:
    """Cut a file in a way that its size may be right: readers accept a range."""
    return data[:-40]


def twice(content: dict[str, Any]) -> None:
    """Cover one matrix twice, and leave out another of the same size."""
    found = content["blocks"]["kronecker"]
    pairs = [
        (a, b)
        for a in found
        for b in found
        if a["start"] < b["start"] and a["left"] * a["right"] == b["left"] * b["right"]
    ]
    one, other = pairs[0]
    bias = other["bias"]
    other.update(one)
    other["bias"] = bias


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def bad_seal(data: bytes) -> bytes:
    assert b'"rows": 9' in data
    return data.replace(b'"rows": 9', b'"rows": 8')


def big_header(data: bytes) -> bytes:
    return struct.pack("<Q", len(data) - 8) + b"{" + data[9:]


def bomb(data: bytes) -> bytes:
    return padded(pickle.dumps(Bomb(Path("executed"))), len(data))


BAD: dict[str, tuple[Callable[[Files], Files], str]] = {
    # the manifest
    "entry that is a list": (manifest(lambda f: f.update({BLOCK: []})), "a list of 0 of .*, not its bytes"),
    "entry that is null": (manifest(lambda f: f.update({RECORD: None})), "None of .*, not its bytes and its digest"),
    "another file": (manifest(lambda f: f.update({"curvature/0/../x": [8, "0" * 32]})), "shards, not the"),
    "curvature of no checkpoint": (
        manifest(lambda f: f.update({RECORD.replace("/0/", "/7/"): f[RECORD]})), "there is no checkpoint 7"
    ),
    "path as checksum": (manifest(lambda f: f[RECORD].__setitem__(1, "../x")), r"digest '\.\./x'"),
    "checksum of a block that is a number": (manifest(lambda f: f[BLOCK].__setitem__(1, 5)), "digest 5"),
    "bytes without end": (manifest(lambda f: f[BLOCK].__setitem__(0, 10**15)), f"it has {10**15} bytes, not"),
    "too few blocks": (manifest(lambda f: f.pop(BLOCK)), "the manifest lists other files"),
    "too many blocks": (
        manifest(lambda f: f.update({BLOCK.replace("00001", "00077"): f[BLOCK]})), "the manifest lists other files"
    ),
    "no diagonal": (manifest(lambda f: f.pop(DIAGONAL)), "the manifest lists other files"),
    "no record": (manifest(lambda f: f.pop(RECORD)), "the manifest lists other files"),
    "another checksum of the diagonal": (
        manifest(lambda f: f[DIAGONAL].__setitem__(1, "0" * 32)), "manifest says 000"
    ),
    "setting of a path": (setting(output_dir="/tmp/x"), "settings"),
    "setting of a path of the curvature": (curvature(output_dir="/tmp/x"), "`curvature` is"),
    "curvature by its name": (setting(curvature="ekfac"), "`curvature` is 'ekfac', not an object"),
    "unknown curvature": (curvature(kind="os.system"), "`curvature.kind` is 'os.system'"),
    "damping below 0": (curvature(damping=-1), "`curvature.damping` is -1"),
    # the record
    "missing record": (without(RECORD), "it is missing, although the manifest lists it"),
    "record with another checksum": (replaced(RECORD, bad_seal), "another checksum than the one that it records"),
    "record without checksum": (replaced(RECORD, lambda data: b"{}"), "format version None"),
    "record of another edition": (
        lambda files: with_record(files, lambda r: r.update(counts=[]), consistent=False), "the manifest says"
    ),
    "record of another checkpoint": (
        lambda files: listed({**files, RECORD: files[RECORD.replace("/0/", "/1/")]}), r"or index \(checkpoint: "
    ),
    "other weights": (record(lambda r: r["identity"].update(checkpoint="0" * 32)), "another checkpoint or index"),
    "identity that is nested": (record(lambda r: r["identity"].update(seed=[0])), "object of texts and integers"),
    "record that is a pickle": (replaced(RECORD, bomb), "not valid JSON"),
    "record that is a list": (replaced(RECORD, lambda data: b"[]"), "JSON list"),
    "record of many lists": (replaced(RECORD, lambda data: b"[" * 100_000), "up to 100000 values"),
    "record with NaN": (replaced(RECORD, lambda data: b'{"rows": NaN}'), "NaN"),
    "large record": (replaced(RECORD, lambda data: data + b" " * (17 << 20)), "bytes, more than the 16777216"),
    "blocks that are none": (record(lambda r: r.update(blocks=7)), "its blocks are 7"),
    "block with another key": (block(module="os"), "which hf_trak does not write"),
    "block without a start": (record(lambda r: r["blocks"]["kronecker"][0].pop("start")), "does not write"),
    "start before 0": (block(start=-1), "-1 in the place of an integer"),
    "start that is a fraction": (block(start=0.5), r"0\.5 in the place of an integer"),
    "start that is true": (lone(start=True), "True in the place of an integer"),
    "name that is a number": (lone(name=3), "the parameter 3, which is no text"),
    "unknown parameter": (lone(name="nothing"), "does not lie in the parameter 'nothing'"),
    "unknown side": (block(bias_part="up"), "the bias part 'up'"),
    "overlapping rows": (block(stride=1), "does not lie in the parameter"),
    "step beyond the parameter": (block(stride=10**6), "does not lie in the parameter"),
    "bias beyond the parameters": (block(bias=10**9), "has a bias at 1000000000"),
    "bias on another parameter": (block(bias=0), "leave out some parameters, or have some twice"),
    "number of 70 digits": (lone(numel=10**70), "70 digits|parameters, and the index|not valid JSON"),
    "huge block": (lone(numel=10**15), "parameters, and the index"),
    "missing block": (record(lambda r: r["blocks"]["diagonal"].pop()), "parameters, and the index"),
    "a block twice": (record(twice), "leave out some parameters, or have some twice"),
    "fewer counts": (record(lambda r: r["counts"].pop()), "not one for each of"),
    "count below 0": (record(lambda r: r["counts"].__setitem__(0, -3)), "not one for each of"),
    "no scale": (record(lambda r: r.pop("scale")), "its scale is None, not a finite number"),
    "a scale that is a text": (record(lambda r: r.update(scale="1")), "its scale is '1', not a finite number"),
    "a scale below 0": (record(lambda r: r.update(scale=-1.0)), "its scale is -1.0, not"),
    "another number of rows": (record(lambda r: r.update(rows=10)), "its number of rows is 10, and in its identity 9"),
    # tensors
    "missing file": (without(BLOCK), "block-00001.*it is missing, although the manifest lists it"),
    "truncated file": (replaced(BLOCK, cut), "cannot be read|bytes, not"),
    "half a file": (replaced(BLOCK, lambda data: data[: len(data) // 2]), "bytes, not|cannot be read"),
    "huge file": (replaced(BLOCK, lambda data: data + bytes(1 << 20)), r"it has \d+ bytes, not"),
    "flipped bit": (replaced(BLOCK, flipped), "checksum"),
    "pickle": (replaced(BLOCK, bomb), "not a safetensors file|bytes, not"),
    "header of a whole file": (replaced(BLOCK, big_header), "cannot be read"),
    "header beyond the file": (
        replaced(BLOCK, lambda data: struct.pack("<Q", 2**60) + b"{" + data[9:]), "header of 11529215046"
    ),
    "file of another checkpoint": (
        lambda files: listed({**files, BLOCK: files[BLOCK.replace("/0/", "/1/")]}), "belongs to another run"
    ),
    "another block of the same curvature": (
        lambda files: listed({**files, BLOCK: files[BLOCK.replace("00001", "00000")]}),
        r"it belongs to another run \(part: saved \"0: layers.0.weight\", given \"1: layers.1.weight\"\)",
    ),
    "tensors of another edition": (
        lambda files: with_values(files, BLOCK, consistent=False, eigenvalues=torch.ones(SIZE, SIZE + 1)),
        "the manifest says",
    ),
    "other shape": (changed(BLOCK, "eigenvalues", lambda values: values[:, :-1].contiguous()), "expected|bytes, not"),
    "transposed": (changed(BLOCK, "eigenvalues", lambda values: values.T.contiguous()), "expected torch.float32"),
    "integers": (changed(BLOCK, "left_basis", lambda values: values.int()), "expected torch.float32"),
    "NaN": (changed(BLOCK, "eigenvalues", first(float("nan"))), "`eigenvalues` holds NaN or infinite"),
    "infinite": (changed(DIAGONAL, "00000", first(float("inf"))), "`00000` holds NaN or infinite"),
    "NaN in a basis": (changed(BLOCK, "right_basis", first(float("nan"))), "`right_basis` holds NaN"),
    "below 0": (changed(BLOCK, "eigenvalues", first(-1e-9)), "`eigenvalues` holds eigenvalues below 0"),
    "diagonal below 0": (changed(DIAGONAL, "00000", first(-1.0)), "`00000` holds eigenvalues below 0"),
}  # fmt: skip


def use(store: IndexStore, identity: dict[str, Any]) -> None:
    assert store.curvature_dir(0, identity).is_relative_to(store.files.root)


@pytest.mark.parametrize("case", BAD)
def test_bad_curvature(
    hub: Hub, client: Path, tmp_path: Path, published: Files, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with a reason, on the Hub and as a clone. The bad file is not kept, and nothing is executed."""
    monkeypatch.chdir(tmp_path)
    change, reason = BAD[case]
    files = change(published)
    assert files != published
    hub.put("dataset", "tester/index", files)
    identity = json.loads(published[RECORD])["identity"]
    with pytest.raises(RefusedIndexError, match=reason) as error:
        use(open_repo("tester/index", tmp_path / "work"), identity)
    assert "was refused" in str(error.value) and "tester/index@" in str(error.value)
    assert "Delete this file" not in str(error.value)
    bad = {data for name, data in files.items() if published.get(name) != data and name.endswith("safetensors")}
    assert not bad & {path.read_bytes() for path in client.rglob("*.safetensors") if path.exists()}
    clone = tmp_path / "clone"
    for name, data in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(data)
    missing = case.startswith("missing") and "block" not in case
    with pytest.raises(
        IncompleteStoreError if missing else RefusedIndexError, match="is missing" if missing else reason
    ):
        use(open_index(LocalFiles(clone), tmp_path / "work"), identity)
    assert not (tmp_path / "executed").exists()


def test_the_good_curvature_is_not_refused(hub: Hub, published: Files, tmp_path: Path) -> None:
    use(open_repo("tester/index", tmp_path / "work"), json.loads(published[RECORD])["identity"])


def test_files_of_impossible_sizes_are_not_downloaded(hub: Hub, published: Files, tmp_path: Path) -> None:
    hub.put("dataset", "tester/index", {**published, BLOCK: bytes(1 << 20)})
    with pytest.raises(RefusedIndexError, match="1048576 bytes"):
        open_repo("tester/index", tmp_path / "work").fetch_curvature(0)
    assert hub.downloads("curvature") == [RECORD, BLOCK.replace("00001", "00000")]


def test_a_refused_file_is_fetched_again(hub: Hub, published: Files, tmp_path: Path) -> None:
    for name, change in ((RECORD, bad_seal), (BLOCK, flipped), (DIAGONAL, flipped)):
        repo = hub.put("dataset", "tester/index", {**published, name: change(published[name])})
        with pytest.raises(RefusedIndexError):
            pull_index("tester/index", tmp_path / "copy")
        assert not (tmp_path / "copy" / RECORD).exists()
        repo.main[name] = published[name]
        kept = [name for name in curvatures(published) if "/0/" in name]
        assert sorted(open_repo("tester/index", tmp_path / "work").fetch_curvature(0)) == kept


def test_links_in_a_clone_are_refused(hub: Hub, published: Files, tmp_path: Path) -> None:
    pull_index("tester/index", tmp_path / "copy")
    store = open_index(LocalFiles(tmp_path / "copy"), tmp_path / "work")
    shutil.move(tmp_path / "copy" / BLOCK, tmp_path / "elsewhere")
    (tmp_path / "copy" / BLOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedIndexError, match="is a link"):
        store.fetch_curvature(0)


# -- records of larger models ----------------------------------------------------------------------------------------


def checked(kronecker: list[KroneckerBlock], diagonal: list[DiagonalBlock], shapes: dict[str, list[int]]) -> Any:
    """Check the record of a curvature of parameters of these shapes."""
    offsets = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes.values())]).tolist()
    parameters = [[name, shape, offset] for (name, shape), offset in zip(shapes.items(), offsets, strict=False)]
    content = {
        "identity": {"kind": "ekfac", "rows": 9},
        "blocks": CurvatureBlocks(tuple(kronecker), tuple(diagonal)).to_json(),
        "counts": [1] * len(kronecker),
        "rows": 9,
        "scale": 1.0,
        "checksum": "",
    }
    store: Any = SimpleNamespace(config={"parameters": parameters})
    return checked_record(content, store)


def test_matrices_that_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some columns of a matrix lie in it, row by row, and cover it together."""
    shapes = {"w": [4, 6], "b": [4]}
    left = KroneckerBlock("w", 0, 4, 3, 6, bias=24)
    right = KroneckerBlock("w", 3, 4, 3, 6)
    assert checked([left, right], [], shapes).blocks.numel == 28
    with pytest.raises(StoreError, match="leave out some parameters, or have some twice"):
        checked([left, KroneckerBlock("w", 2, 4, 3, 6)], [], shapes)
    with pytest.raises(StoreError, match="does not lie in the parameter 'w'"):
        checked([left, KroneckerBlock("w", 4, 4, 3, 6)], [], shapes)
    monkeypatch.setattr("hf_trak.hub.curvature_files._MAX_PIECES", 9)
    with pytest.raises(StoreError, match="up to 10 pieces, more than 9"):
        checked([left, right], [], shapes)


def test_sides_are_bounded() -> None:
    """A basis of a million vectors would take terabytes."""
    with pytest.raises(StoreError, match=r"a basis of 1000000 vectors, more than 32768"):
        checked([KroneckerBlock("w", 0, 1, 10**6, 10**6)], [], {"w": [1, 10**6]})


@pytest.mark.slow
def test_thousands_of_small_parameters(tmp_path: Path) -> None:
    """The header of their file is longer than that of any file of features."""
    count = 2000
    diagonal = [DiagonalBlock(f"p{index}", index, 1) for index in range(count)]
    found = checked([], diagonal, {f"p{index}": [1] for index in range(count)})
    CurvatureFiles(tmp_path, found.identity).write_diagonal(found.blocks, [torch.ones(1) for _ in range(count)])
    path, (file,) = tmp_path / "diagonal.safetensors", found.files
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] > MAX_HEADER_BYTES
    checked_tensors(path, file)
