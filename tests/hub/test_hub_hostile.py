"""Malicious indexes are refused with a reason; nothing is executed, and nothing is written outside of the cache."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import TOKEN, Hub, client, hub
from safetensors.torch import save
from test_hub_index import K, N, features, make_store

from hf_trak.errors import HubAccessError, RefusedIndexError
from hf_trak.hub import HubCheckpoint, open_repo, push_index
from hf_trak.hub.files import LocalFiles
from hf_trak.hub.index_store import IndexStore, open_index
from hf_trak.hub.models import load_model
from hf_trak.store.references import write_references
from hf_trak.store.sealed import CHECKSUM_KEY, content_digest, sealed
from hf_trak.store.shards import checksums

__all__ = ["client", "hub"]  # fixtures

SHARD = "checkpoint-0/train-00001-of-00003.safetensors"
GRAM = "checkpoint-0/gram.safetensors"
Files = dict[str, bytes]


class Bomb:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


_published: Files = {}


@pytest.fixture
def published(hub: Hub, client: Path, tmp_path: Path) -> Files:
    """Publish a valid index with one checkpoint, made only once, and return its files."""
    if not _published:
        store = make_store(tmp_path / "store", ids=(0,))
        write_references(store, 0, {"image_embeddings": torch.ones(2, 3)})
        push_index(store, "tester/index", token=TOKEN, private=False)
        _published.update(hub.dataset("tester/index"))
    hub.put("dataset", "tester/index", _published)
    return dict(_published)


def below(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"}


def use_all(store: IndexStore) -> None:
    for model_id in store.model_ids:
        features(store, model_id)
        store.read_gram(model_id)
        store.targets("exam", model_id, 3, "d" * 32)


def edited(files: Files, name: str, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change a JSON file and its checksum with it, as an attacker can."""
    content = json.loads(files[name])
    change(content)
    return resealed(content)


def resealed(content: dict[str, Any]) -> bytes:
    if CHECKSUM_KEY in content:
        content[CHECKSUM_KEY] = content_digest(content)
    return json.dumps(content).encode()


def recorded(data: bytes) -> str | None:
    """Return the checksum that a file records of itself, if it is a digest."""
    try:
        if data[8:9] == b"{" and data[:1] != b"{":
            (length,) = struct.unpack("<Q", data[:8])
            data = json.loads(data[8 : 8 + length])["__metadata__"]["hf_trak"]
        found = json.loads(data)["checksum"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return found if isinstance(found, str) and len(found) == 32 else None


def listed(files: Files) -> Files:
    """Let the manifest say the size and the checksum of all files, as an attacker can."""

    def change(content: dict[str, Any]) -> None:
        for name, entry in content["files"].items():
            data = files.get(name)
            content["files"][name] = entry if data is None else [len(data), recorded(data) or entry[1]]

    return {**files, "trak_index.json": edited(files, "trak_index.json", change)}


def shard_with(files: Files, name: str, tensors: dict[str, torch.Tensor], consistent: bool = True) -> Files:
    """Replace the tensors of one file, and update all checksums unless `consistent` is false."""
    (length,) = struct.unpack("<Q", files[name][:8])
    metadata = json.loads(json.loads(files[name][8 : 8 + length])["__metadata__"]["hf_trak"])
    del metadata["checksum"]
    metadata = sealed({**metadata, "tensors": checksums(tensors)})
    changed = {**files, name: save(tensors, {"hf_trak": json.dumps(metadata)})}
    return listed(changed) if consistent else changed


def rows(value: float = 1.0, k: int = K, n: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    grads = torch.ones(n, k, dtype=dtype)
    grads[0, -1] = value
    return {"grads": grads, "out_to_loss": torch.ones(n)}


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Files, Path], Files]:
    return lambda files, tmp: {**files, "trak_index.json": edited(files, "trak_index.json", change)}


def config(**changes: Any) -> Callable[[Files, Path], Files]:
    return lambda files, tmp: {
        **files,
        "trak_config.json": edited(files, "trak_config.json", lambda c: c.update(changes)),
    }


def replaced(name: str, data: bytes) -> Callable[[Files, Path], Files]:
    return lambda files, tmp: listed({**files, name: data}) if name.endswith("safetensors") else {**files, name: data}


def flipped(files: Files, name: str) -> Files:
    """Change one bit of λ or of the seed."""
    key = b'"lambda_relative": 0.3' if name == "trak_index.json" else b'"seed": 7'
    assert key in files[name]
    return {**files, name: files[name].replace(key, key[:-1] + bytes([key[-1] ^ 1]))}


def padded(data: bytes, size: int) -> bytes:
    return data + bytes(max(0, size - len(data)))


def with_huge_header(files: Files, tmp: Path) -> Files:
    """Replace a shard by a header full of tensors, of nearly the allowed size of the whole file."""
    entries = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(1200)}
    header = json.dumps(entries).encode()
    return listed({**files, SHARD: struct.pack("<Q", len(header)) + header})


BAD: dict[str, tuple[Callable[[Files, Path], Files], str]] = {
    # content of the JSON files
    "config of another format version": (config(format_version=99), "format version 99"),
    "config without a format version": (config(format_version=None), "format version None"),
    "config of a version that is a text": (config(format_version="2"), "format version '2'"),
    "manifest of another format version": (manifest(lambda m: m.update(format_version=99)), "format version 99"),
    "manifest of a version that is true": (manifest(lambda m: m.update(format_version=True)), "format version True"),
    "manifest with another checksum": (lambda files, tmp: flipped(files, "trak_index.json"), "another checksum"),
    "config with another checksum": (lambda files, tmp: flipped(files, "trak_config.json"), "another checksum"),
    "manifest without its checksum": (manifest(lambda m: m.pop("checksum")), "another checksum"),
    "huge number of rows": (config(train_size=10**15), "shards"),
    "a million million rows": (config(train_size=10**12, shard_size=10**6), "1000000 shards, and only 6 files"),
    "a million million rows in one shard": (config(train_size=10**12, shard_size=10**12), "manifest|3 shards"),
    "a number of 21 digits": (config(seed=10**20), "21 digits"),
    "huge number of features": (config(proj_dim=10**12), "proj_dim"),
    "negative shard size": (config(shard_size=-1), "shard_size"),
    "unknown dtype": (config(feature_dtype="object"), "feature_dtype"),
    "config that is a list": (replaced("trak_config.json", b"[]"), "JSON list"),
    "config with NaN": (replaced("trak_config.json", b'{"a": NaN}'), "NaN"),
    "config with a huge number": (replaced("trak_config.json", b'{"a": 1e999}'), "too large"),
    "deeply nested config": (replaced("trak_config.json", b"[" * 200_000), "up to 200000 values in 200000 bytes"),
    "nested config": (replaced("trak_config.json", b'{"a":' * 1000 + b"1" + b"}" * 1000), "nested more than 64 deep"),
    "config that is a pickle": (lambda files, tmp: {**files, "trak_config.json": bomb(tmp)}, "not valid JSON"),
    "endless digits": (replaced("trak_config.json", b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "path as checkpoint": (
        manifest(lambda m: m["checkpoints"].update({"../../outside": m["checkpoints"].pop("0")})), "outside"
    ),
    "absolute path as checkpoint": (manifest(lambda m: m["checkpoints"].update({"/etc": {}})), "/etc"),
    "no checkpoints": (manifest(lambda m: m.update(checkpoints={})), "checkpoints"),
    "checksum that is a path": (manifest(lambda m: m["files"][SHARD].__setitem__(1, "../x")), "digest"),
    "checksum that is a number": (manifest(lambda m: m["files"][SHARD].__setitem__(1, 5)), "digest 5"),
    "too few files": (manifest(lambda m: m["files"].pop(SHARD)), "2 shards"),
    "no files": (manifest(lambda m: m.pop("files")), "`files` is None"),
    "files that are a list": (manifest(lambda m: m.update(files=[])), "`files` is a list of 0"),
    "file elsewhere": (manifest(lambda m: m["files"].update({"../x": m["files"].pop(SHARD)})), r"'\.\./x', which no"),
    "one file too many": (manifest(lambda m: m["files"].update({"/etc/passwd": [8, "0" * 32]})), "4 shards"),
    "shard of another number": (
        manifest(lambda m: m["files"].update({SHARD.replace("00001", "00007"): m["files"].pop(SHARD)})), "which no"
    ),
    "file of no checkpoint": (
        manifest(lambda m: m["files"].update({GRAM.replace("0", "7"): [920, "0" * 32]})), "no checkpoint 7"
    ),
    "files of two solvers": (
        manifest(lambda m: m["files"].update({GRAM.replace("gram", "low_rank-4"): [920, "0" * 32]})), "two solvers"
    ),
    "entry that is a text": (manifest(lambda m: m["files"].update({SHARD: "x"})), "'x' of .*, not its bytes and"),
    "entry without a digest": (manifest(lambda m: m["files"][SHARD].pop()), "not its bytes and its digest"),
    "bytes that are a text": (manifest(lambda m: m["files"][SHARD].__setitem__(0, "560")), "not its bytes and"),
    "bytes below 0": (manifest(lambda m: m["files"][SHARD].__setitem__(0, -560)), "not its bytes and its digest"),
    "bytes without end": (manifest(lambda m: m["files"][SHARD].__setitem__(0, 10**15)), f"it has {10**15} bytes, not"),
    "other bytes": (manifest(lambda m: m["files"][SHARD].__setitem__(0, 561)), "not 561, which the manifest says"),
    "another key of a checkpoint": (manifest(lambda m: m["checkpoints"]["0"].update(x=1)), "checkpoint 0 is a dict"),
    "checkpoint that is a list": (manifest(lambda m: m["checkpoints"].update({"0": []})), "checkpoint 0 is a list"),
    "local path as source": (manifest(lambda m: m["checkpoints"]["0"].update(source="/etc/passwd")), "passwd"),
    "escaping source": (manifest(lambda m: m["checkpoints"]["0"].update(source="hf://../..@main")), "source"),
    "escaping revision": (manifest(lambda m: m["checkpoints"]["0"].update(source="hf://a/b@../x")), "revision"),
    "setting that is none": (manifest(lambda m: m["settings"].update(output_dir="/tmp/x")), "settings"),
    "ridge that is none": (manifest(lambda m: m["settings"].update(lambda_relative=-1)), "lambda_relative"),
    "engine that is none": (manifest(lambda m: m["settings"].update(engine="os.system")), "engine"),
    "label names that are none": (manifest(lambda m: m["settings"].update(label_names=5)), "label_names"),
    "training dataset elsewhere": (
        manifest(lambda m: m.update(train_dataset={"name": "../x", "config": None, "split": None, "revision": None})),
        "train_dataset",
    ),
    "missing shard": (lambda files, tmp: {k: v for k, v in files.items() if k != SHARD}, "is missing"),
    # content of the tensor files
    "wrong shape": (lambda files, tmp: shard_with(files, SHARD, rows(k=K - 2, n=12)), "shape|expected|bytes"),
    "transposed": (
        lambda files, tmp: shard_with(files, SHARD, {"grads": torch.ones(K, 8), "out_to_loss": torch.ones(8)}),
        r"\(6, 8\), expected torch.float32 \(8, 6\)",
    ),
    "wrong dtype": (
        lambda files, tmp: shard_with(files, SHARD, {"grads": torch.ones(8, K).int(), "out_to_loss": torch.ones(8)}),
        "expected torch.float32",
    ),
    "missing tensor": (lambda files, tmp: shard_with(files, SHARD, {"grads": torch.ones(9, K)}), "expected|missing"),
    "NaN features": (lambda files, tmp: shard_with(files, SHARD, rows(float("nan"))), "training row 8 .*NaN"),
    "infinite features": (lambda files, tmp: shard_with(files, SHARD, rows(float("inf"))), "training row 8 .*inf"),
    "NaN weights": (
        lambda files, tmp: shard_with(
            files, SHARD, {"grads": torch.ones(8, K), "out_to_loss": torch.full((8,), float("nan"))}
        ),
        "out_to_loss.*training row 8",
    ),
    "checksum of others": (lambda files, tmp: shard_with(files, SHARD, rows(), consistent=False), "the manifest says"),
    "shard of other rows": (
        lambda files, tmp: listed({**files, SHARD: files[SHARD.replace("00001", "00000")]}), "another run"
    ),
    "pickle as safetensors": (
        lambda files, tmp: listed({**files, SHARD: padded(bomb(tmp), 600)}), "not a safetensors file"
    ),
    "pickle as Gram matrix": (
        lambda files, tmp: listed({**files, GRAM: padded(bomb(tmp), 600)}), "not a safetensors file"
    ),
    "header beyond the file": (replaced(SHARD, padded(struct.pack("<Q", 2**62) + b"{", 600)), "header of 46116860184"),
    "huge header": (with_huge_header, "bytes|header"),
    "header of a whole file": (replaced(SHARD, padded(struct.pack("<Q", 500) + b'{"a":', 600)), "cannot be read"),
    "huge shard": (replaced(SHARD, bytes(1 << 20)), "it has 1048576 bytes, not"),
    "empty shard": (replaced(SHARD, b""), "it has 0 bytes"),
    "shard of anybody": (lambda files, tmp: listed({**files, SHARD: save(rows())}), "not written by hf_trak"),
    "NaN Gram matrix": (
        lambda files, tmp: shard_with(files, GRAM, {"gram": torch.full((K, K), float("nan"), dtype=torch.float64)}),
        "(?i)its matrix has nan",
    ),
    "Gram matrix of other rows": (
        lambda files, tmp: shard_with(files, GRAM, {"gram": torch.eye(K, dtype=torch.float64)}), "trace"
    ),
    "NaN references": (
        lambda files, tmp: shard_with(
            files, "checkpoint-0/references.safetensors", {"image_embeddings": torch.full((2, 3), float("nan"))}
        ),
        "NaN",
    ),
    "pickle as references": (
        lambda files, tmp: listed({**files, "checkpoint-0/references.safetensors": padded(bomb(tmp), 300)}),
        "not a safetensors file",
    ),
}  # fmt: skip


def bomb(tmp: Path) -> bytes:
    return pickle.dumps(Bomb(tmp / "executed"))


@pytest.mark.parametrize("case", BAD)
def test_bad_index(hub: Hub, client: Path, tmp_path: Path, published: Files, case: str) -> None:
    """It is refused with a reason, on the Hub and as a clone, and its bad file is kept nowhere."""
    change, reason = BAD[case]
    files = change(published, tmp_path)
    assert files != published
    hub.put("dataset", "tester/index", files)
    outside = below(tmp_path) - below(client)
    with pytest.raises(RefusedIndexError, match=reason) as error:
        use_all(open_repo("tester/index", tmp_path / "work"))
    assert "was refused" in str(error.value) and "tester/index@" in str(error.value)
    assert "Delete this file" not in str(error.value)
    assert not (tmp_path / "executed").exists()
    written = below(tmp_path) - below(client) - outside
    assert {path.relative_to(tmp_path).parts[0] for path in written} <= {"work"}
    bad = {data for name, data in files.items() if published.get(name) != data and not name.endswith(".json")}
    assert not bad & {path.read_bytes() for path in below(client)}

    clone = tmp_path / "clone"
    for name, data in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(data)
    with pytest.raises(RefusedIndexError, match=reason):
        use_all(open_index(LocalFiles(clone), tmp_path / "work2"))
    assert not (tmp_path / "executed").exists()


def test_the_good_index_is_not_refused(hub: Hub, client: Path, tmp_path: Path, published: Files) -> None:
    use_all(open_repo("tester/index"))


def test_huge_files_are_refused_before_they_are_downloaded(
    hub: Hub, client: Path, published: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("dataset", "tester/index", {**published, SHARD: bytes(1 << 20)})
    with pytest.raises(RefusedIndexError, match="1048576 bytes"):
        open_repo("tester/index")
    assert hub.downloads() == ["trak_config.json", "trak_index.json"]
    for module in ("files", "index_store"):
        monkeypatch.setattr(f"hf_trak.hub.{module}.MAX_JSON_BYTES", 1 << 19)
    for name in ("trak_config.json", "trak_index.json"):
        before = len(hub.downloads())
        hub.put("dataset", "tester/index", {**published, name: published[name] + b" " * (1 << 20)})
        with pytest.raises(RefusedIndexError, match="more than the"):
            open_repo("tester/index")
        assert name not in hub.downloads()[before:]


def test_names_in_the_repo_are_never_asked_for(hub: Hub, client: Path, tmp_path: Path, published: Files) -> None:
    """Paths in the listing that lead elsewhere have no effect: only names that the library derives are fetched."""
    strange = {"../../../outside": b"x", "/etc/x": b"x", "checkpoint-0/../../y": b"x", "C:\\z": b"x", "a\0b": b"x"}
    hub.put("dataset", "tester/index", {**published, **strange})
    use_all(open_repo("tester/index"))
    assert set(hub.downloads()) <= set(published)


def test_a_refused_file_is_fetched_again(hub: Hub, client: Path, published: Files) -> None:
    """The refused file is not kept under a name that counts as downloaded."""
    commit = hub.repos["dataset", "tester/index"].refs["main"]
    bad = shard_with(published, SHARD, rows(), consistent=False)[SHARD]
    hub.repos["dataset", "tester/index"].commits[commit][SHARD] = bad
    store = open_repo("tester/index")
    with pytest.raises(RefusedIndexError):
        features(store, 0)
    hub.repos["dataset", "tester/index"].commits[commit][SHARD] = published[SHARD]
    assert features(store, 0).shape == (N, K)


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["os.system", "AutoModel", "Trainer", "pipeline", "__import__", "torch.nn.Linear", "NoSuchModel", "", "é(1)"],
)
def test_only_model_classes_are_built(client: Path, name: str) -> None:
    with pytest.raises(RefusedIndexError, match="no model class of `transformers`"):
        load_model("tester/model", None, name, None)


def test_pickled_weights_and_foreign_code_are_not_loaded(hub: Hub, client: Path, tmp_path: Path) -> None:
    settings = {"model_type": "bert", "auto_map": {"AutoModel": "evil.Model"}}
    evil = f"import os; os.mkdir({str(tmp_path / 'executed')!r})".encode()
    files = {"config.json": json.dumps(settings).encode(), "evil.py": evil, "pytorch_model.bin": bomb(tmp_path)}
    hub.put("model", "tester/model", files)
    with pytest.raises(HubAccessError, match="no safetensors weights"):
        load_model("tester/model", None, "BertModel", None)
    with pytest.raises(HubAccessError, match="no safetensors weights"):
        os.fspath(HubCheckpoint("tester/model"))
    assert set(hub.downloads()) == {"config.json"}
    outside = json.dumps({"weight_map": {"a": "../../../../secret.safetensors"}}).encode()
    weights = {"model.safetensors": save({"a": torch.ones(1)}), "model.safetensors.index.json": outside}
    hub.put("model", "tester/model", {**files, **weights})
    with pytest.raises(RefusedIndexError, match="secret"):
        os.fspath(HubCheckpoint("tester/model"))
    assert not (tmp_path / "executed").exists()


def test_checkpoints_of_the_hub_keep_their_token_to_themselves() -> None:
    checkpoint = HubCheckpoint("tester/model", "v1", token=TOKEN)
    assert TOKEN not in repr(checkpoint) and TOKEN.encode() not in pickle.dumps(checkpoint)
    for repo, revision in (("../x", "main"), ("a/b", "../main"), ("a/b", "")):
        with pytest.raises(ValueError, match=r"repo|revision"):
            HubCheckpoint(repo, revision)
