"""Indexes of codes on the Hub: published and loaded, read in part, and refused when they are not what they say."""

import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import TOKEN, Fault, Handler, Hub, client, hub
from safetensors.torch import load, save
from test_hub_attributor import OPTIONS, sentences, targets, tiny_bert
from test_hub_hostile import Files, below, config, edited, listed, manifest, replaced
from test_hub_index import CONFIG
from trak_options import trak_config

from hf_trak import Index, TrakAttributor, TrakConfig
from hf_trak.errors import HubAccessError, IncompleteStoreError, RefusedIndexError
from hf_trak.featurize.converting import convert_store
from hf_trak.hub import files as ranges
from hf_trak.hub import index_shards, open_repo, pull_index, push_index
from hf_trak.hub.files import HubFiles, LocalFiles
from hf_trak.hub.index_store import IndexStore, open_index
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
from hf_trak.store.checkpoint_records import code_settings
from hf_trak.store.sealed import sealed
from hf_trak.store.shards import checksums
from hf_trak.store.store import FeatureStore

__all__ = ["client", "hub"]  # fixtures

N, SHARD = 40, 16
K = 1100
"""Features of rows with three blocks of 8 bits: 512, 512 and 76 bytes."""
FIRST = "checkpoint-0/train-00000-of-00003.safetensors"
MIDDLE = "checkpoint-0/train-00001-of-00003.safetensors"
LAST = "checkpoint-0/train-00002-of-00003.safetensors"
HEADS = [f"train-0000{number}-of-00003-first-512.safetensors" for number in range(3)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_codes(path: Path, dtype: str = "int8", k: int = K, n: int = N, rank: int | None = 4) -> FeatureStore:
    """Write a finished store of codes of random features, with eigenvalues of a rank or a Gram matrix."""
    settings = {"feature_dtype": dtype, "proj_dim": k, "train_size": n, "shard_size": SHARD, **code_settings(dtype)}
    store = FeatureStore.open(path, {**CONFIG, **settings})
    generator = torch.Generator().manual_seed(k)
    x, q = torch.randn(n, k, generator=generator), torch.rand(n, generator=generator)
    store.register_checkpoint(0, "0" * 32, None)
    shards = store.train(0)
    for index in range(len(shards)):
        rows = shards.plan.rows(index)
        shards.write(index, x[rows.start : rows.stop], q[rows.start : rows.stop])
    solver = ("auto", None) if rank is None else ("low_rank", rank)
    Scorer(store, Processes(True), torch.device("cpu"), 0.3, *solver).prepare(0)
    return store


@dataclass
class Answer:
    """A file that the server sent: its path, the bytes that were asked for, the number of bytes sent, the token."""

    path: str
    asked: str | None
    sent: int
    token: str | None


def watched(hub: Hub, change: Callable[[Handler, bytes, int, dict[str, str]], Any] | None = None) -> list[Answer]:
    """Record the files that a server sends from now on, and let `change` send something else for ranges."""
    answers: list[Answer] = []

    def answer(handler: Handler, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        match, asked = re.search(r"/resolve/[^/]+/([^?]+)", handler.path), handler.headers.get("Range")
        if match and handler.command == "GET":
            if change is not None and asked:
                content, status, headers = change(handler, content, status, dict(headers or {}))
            answers.append(Answer(match[1], asked, len(content), handler.token))
        Handler.answer(handler, content, status, headers)

    hub.server.RequestHandlerClass.answer = answer  # type: ignore[attr-defined]
    return answers


_published: dict[str, Files] = {}


def published(hub: Hub, tmp_path: Path, dtype: str = "int8", k: int = K) -> Files:
    """Publish an index of codes, made only once, and return its files."""
    key = f"{dtype}-{k}"
    if key not in _published:
        push_index(make_codes(tmp_path / key, dtype, k), "tester/index", token=TOKEN, private=False)
        _published[key] = dict(hub.dataset("tester/index"))
    hub.put("dataset", "tester/index", _published[key], private=True)
    return dict(_published[key])


@pytest.fixture
def files(hub: Hub, client: Path, tmp_path: Path) -> Files:
    return published(hub, tmp_path)


def opened(**options: Any) -> IndexStore:
    return open_repo("tester/index", token=TOKEN, **options)


def clone(files: Files, directory: Path) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def decoded(store: FeatureStore) -> torch.Tensor:
    return torch.cat([shard.grads for shard in store.train(0)])


def kept_heads(client: Path) -> list[str]:
    return sorted(path.name for path in (client / "hf_trak").rglob("heads/**/*.safetensors"))


# -- publishing and loading ------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "int1"])
def test_push_and_read_back(hub: Hub, client: Path, tmp_path: Path, dtype: str) -> None:
    local = make_codes(tmp_path / "store", dtype, k=90, rank=None)
    push_index(local, "tester/index", token=TOKEN, private=False)
    store = opened()
    assert store.config_hash == local.config_hash
    for found, expected in zip(store.train(0), local.train(0), strict=True):
        assert torch.equal(found.grads, expected.grads) and torch.equal(found.out_to_loss, expected.out_to_loss)
    assert torch.equal(store.read_gram(0).matrix, local.read_gram(0).matrix)
    pulled = pull_index("tester/index", tmp_path / "copy", token=TOKEN)
    assert torch.equal(decoded(pulled), decoded(local))
    push_index(FeatureStore.load(tmp_path / "copy"), "tester/fork", token=TOKEN, private=False)
    copied = {name for name in hub.dataset("tester/fork") if name != "README.md"}
    assert all(hub.dataset("tester/fork")[name] == hub.dataset("tester/index")[name] for name in copied)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "int1"])
def test_new_targets_get_the_same_scores_elsewhere(hub: Hub, client: Path, tmp_path: Path, dtype: str) -> None:
    """Targets are rotated like the training rows, and scores have the same bits."""
    model = tiny_bert(1)
    args = trak_config(str(tmp_path / "trak"), proj_dim=50, feature_dtype=dtype, shard_size=8,
                      per_device_batch_size=3, **OPTIONS)  # fmt: skip
    attributor = TrakAttributor(model, args, train_dataset=sentences(0, 22)).featurize()
    attributor.push_to_hub("tester/index", token=TOKEN, private=False)
    elsewhere = TrakAttributor.from_pretrained("tester/index", model, token=TOKEN, **OPTIONS)
    found, expected = (
        np.array(one.attribute(targets(), top_k=None)["trak_scores"][:]) for one in (elsewhere, attributor)
    )
    assert np.array_equal(found, expected) and np.ptp(expected) > 0


@pytest.mark.slow
def test_the_card_says_what_is_stored(hub: Hub, client: Path, tmp_path: Path) -> None:
    store = make_codes(tmp_path / "store", "int1", k=8200)
    push_index(store, "tester/index", token=TOKEN, private=False)
    card = hub.dataset("tester/index")["README.md"].decode()
    assert "1,029 bytes: codes of 1 bit per number and a scale, 31.9 times fewer than float32" in card
    assert "rotation hadamard-1, levels levels-1" in card and "| 8,200, stored as int1 |" in card
    assert "| format version | 1; an `hf_trak` that does not read it refuses it |" in card
    assert "the first 512 bytes of every row can be downloaded by themselves" in card
    assert "converted from" not in card
    plain = FeatureStore.open(tmp_path / "bfloat16", {**CONFIG, "feature_dtype": "bfloat16"})
    plain.register_checkpoint(0, "0" * 32, None)
    for index in range(3):
        rows = plain.train(0).plan.rows(index)
        plain.train(0).write(index, torch.randn(len(rows), 6), torch.ones(len(rows)))
    push_index(convert_store(plain, tmp_path / "small", "int2"), "tester/small", token=TOKEN, private=False)
    card = hub.dataset("tester/small")["README.md"].decode()
    assert "6 bytes: codes of 2 bits per number" in card and "converted from bfloat16" in card
    assert "can be downloaded by themselves" not in card
    found = open_repo("tester/small")
    assert found.checkpoint_info(0)["converted_from"] == ["bfloat16"]
    pull_index("tester/small", tmp_path / "copy")
    assert FeatureStore.load(tmp_path / "copy").checkpoint_info(0)["converted_from"] == ["bfloat16"]
    Scorer(plain, Processes(True), torch.device("cpu"), 0.3).prepare(0)
    push_index(plain, "tester/plain", token=TOKEN, private=False)
    assert "| 12 bytes of bfloat16 |" in hub.dataset("tester/plain")["README.md"].decode()


def test_versions_that_cannot_read_an_index_say_so(hub: Hub, client: Path, files: Files) -> None:
    """An index names the version of its format, and readers name those that they know."""
    assert json.loads(files["trak_config.json"])["format_version"] == 1
    newer = {**files, "trak_config.json": edited(files, "trak_config.json", lambda c: c.update(format_version=2))}
    hub.put("dataset", "tester/index", newer)
    with pytest.raises(RefusedIndexError, match=r"has format version 2, and this version .* reads 1"):
        opened()


# -- what solvers keep -----------------------------------------------------------------------------------------------


def test_eigenvalues_are_published(hub: Hub, client: Path, files: Files, tmp_path: Path) -> None:
    """With them, an index without a Gram matrix need not be read to the end before the first score."""
    assert "checkpoint-0/gram.safetensors" not in files and "checkpoint-0/low_rank-4.safetensors" in files
    store = opened()
    settings = store.manifest.settings
    assert settings["solver"] == "low_rank-4"
    assert store.read_gram(0) is None
    path = store.solver_path(0, "low_rank-4.safetensors")
    assert path.read_bytes() == files["checkpoint-0/low_rank-4.safetensors"]
    assert hub.downloads() == ["trak_config.json", "trak_index.json", "checkpoint-0/low_rank-4.safetensors"]
    own = store.solver_path(0, "low_rank-7.safetensors")
    assert own == store.output_dir / "checkpoint-0" / "low_rank-7.safetensors" and not own.exists()
    pull_index("tester/index", tmp_path / "copy", token=TOKEN)
    assert (tmp_path / "copy/checkpoint-0/low_rank-4.safetensors").read_bytes() == path.read_bytes()
    push_index(open_index(LocalFiles(tmp_path / "copy"), tmp_path / "work"), "tester/fork", token=TOKEN, private=False)
    assert set(hub.dataset("tester/fork")) == {*files, ".gitattributes"}


@pytest.mark.parametrize("solver", ["dual"])
def test_solvers_that_read_all_features_publish_nothing(hub: Hub, client: Path, tmp_path: Path, solver: str) -> None:
    """An index without a Gram matrix is published all the same, and one can be computed from it."""
    store = make_codes(tmp_path / "store", "int8", k=90, rank=None)
    matrix = store.read_gram(0).matrix
    (tmp_path / "store/checkpoint-0/gram.safetensors").unlink()
    with pytest.raises(IncompleteStoreError, match="neither a Gram matrix nor what another solver keeps"):
        push_index(store, "tester/index", token=TOKEN, private=False)
    Scorer(store, Processes(True), torch.device("cpu"), 0.3, solver).prepare(0)
    push_index(store, "tester/index", token=TOKEN, settings=TrakConfig(solver=solver), private=False)
    assert {name for name in hub.dataset("tester/index") if "safetensors" in name} == {FIRST, MIDDLE, LAST}
    index = opened()
    assert index.manifest.settings["solver"] == solver and index.read_gram(0) is None
    found = Scorer(index, Processes(True), torch.device("cpu"), 0.3, "primal").gram(0)
    assert torch.equal(found.matrix, matrix)
    assert (index.output_dir / "checkpoint-0" / "gram.safetensors").exists()
    pull_index("tester/index", tmp_path / "copy", token=TOKEN)


# -- heads -----------------------------------------------------------------------------------------------------------


def test_a_first_look_downloads_the_first_blocks_alone(hub: Hub, client: Path, files: Files, tmp_path: Path) -> None:
    """A head is one range of bytes of each shard, fetched once, and kept under another name than the shard's."""
    sent = watched(hub)
    store = opened()
    shards = store.train(0)
    local = open_index(LocalFiles(clone(files, tmp_path / "clone")), tmp_path / "work").train(0)
    for index in range(3):
        head = shards.prefix_of(index, 512)
        assert head.coded.columns == 512 and len(head.coded.blocks) == 1
        whole = local.read(index)
        assert torch.equal(head.grads, whole.grads[:, :512]) and torch.equal(head.out_to_loss, whole.out_to_loss)
        assert torch.equal(head.grads, local.prefix_of(index, 512).grads)
    partial = [answer for answer in sent if answer.asked is not None]
    assert sorted(answer.path for answer in partial) == [FIRST, MIDDLE, LAST]
    for answer in partial:
        (length,) = struct.unpack("<Q", files[answer.path][:8])
        rows = len(load(files[answer.path])["scale"])
        assert answer.sent == 8 + length + rows * (4 + 4 + 512)
        assert answer.asked == f"bytes=0-{answer.sent - 1}" and answer.token == TOKEN
    json_bytes = len(files["trak_config.json"]) + len(files["trak_index.json"])
    assert sum(answer.sent for answer in sent) == json_bytes + sum(answer.sent for answer in partial)
    assert sum(answer.sent for answer in partial) < 0.6 * sum(len(files[name]) for name in (FIRST, MIDDLE, LAST))
    assert kept_heads(client) == HEADS
    assert not list((client / "hub").rglob("train-*"))

    before = len(hub.log)
    again = opened(revision=store.files.commit, local_files_only=True).train(0)
    assert torch.equal(again.prefix_of(2, 512).grads, local.prefix_of(2, 512).grads)
    assert len(hub.log) == before, "what was fetched is there, with or without a connection"
    with pytest.raises(HubAccessError, match="is not in the cache, and offline mode"):
        again.prefix_of(2, 1024)
    assert torch.equal(shards.read(1).grads, local.read(1).grads), "the rest comes on demand"
    count = len(sent)
    assert torch.equal(shards.prefix_of(1, 1024).grads, local.read(1).grads[:, :1024])
    assert len(sent) == count, "a shard that is here as a whole is used"


def test_larger_heads_serve_for_smaller_ones(hub: Hub, client: Path, files: Files) -> None:
    shards, sent = opened().train(0), watched(hub)
    shards.fetch_prefixes(1024, quiet=True)
    assert len(sent) == 3 and len(kept_heads(client)) == 3
    one = shards.prefix_of(0, 600)
    assert one.coded.columns == 512, "a number between two blocks is rounded down"
    assert shards.prefix_of(0, 1024).coded.columns == 1024
    shards.fetch_prefixes(512)
    assert len(sent) == 3
    whole = shards.prefix_of(0, 2000)
    assert whole.coded.columns == K and sent[-1].asked is None, "all blocks are the whole shard"


def test_a_fetch_that_stops_goes_on(hub: Hub, client: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived is kept and not asked for again."""
    monkeypatch.setattr(index_shards, "CONNECTIONS", 1)
    hub.faults.append(Fault("GET", MIDDLE, 403))
    shards = opened().train(0)
    with pytest.raises(HubAccessError, match="403"):
        shards.fetch_prefixes(512)
    kept = kept_heads(client)
    assert kept in ([HEADS[0]], [HEADS[0], HEADS[2]]), "the third may have been under way"
    hub.faults.clear()
    sent = watched(hub)
    shards.fetch_prefixes(512)
    assert kept_heads(client) == HEADS and len(sent) == 3 - len(kept)


def test_features_that_are_no_codes_have_no_heads(hub: Hub, client: Path, files: Files, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"The first 300 bytes .* first block of its codes, 512"):
        opened().train(0).prefix_of(0, 300)
    plain = FeatureStore.open(tmp_path / "plain", CONFIG)
    plain.register_checkpoint(0, "0" * 32, None)
    for index in range(3):
        rows = plain.train(0).plan.rows(index)
        plain.train(0).write(index, torch.randn(len(rows), 6), torch.ones(len(rows)))
    Scorer(plain, Processes(True), torch.device("cpu"), 0.3).prepare(0)
    push_index(plain, "tester/plain", token=TOKEN, private=False)
    with pytest.raises(ValueError, match=r"are torch.float32, whose first bytes say nothing"):
        open_repo("tester/plain").train(0).prefix_of(0, 512)


# -- single rows -----------------------------------------------------------------------------------------------------


def test_candidates_download_little_more_than_their_rows(
    hub: Hub, client: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come by themselves, compared with their digests, where whole shards would be more."""
    monkeypatch.setattr(index_shards, "_REQUEST_BYTES", 0)
    shards, sent = opened().train(0), watched(hub)
    shards.fetch_prefixes(512, quiet=True)
    del sent[:]
    wanted = {2: [7, 0], 0: [3]}
    local = open_index(LocalFiles(clone(files, tmp_path / "clone")), tmp_path / "work").train(0)
    for found, expected in zip(shards.rows_of(wanted), local.rows_of(wanted), strict=True):
        index, features, q = found
        assert index == expected[0] and torch.equal(q, expected[2])
        assert torch.equal(features.decode(), expected[1].decode())
        assert torch.equal(features.decode(), local.read(index).grads[wanted[index]])
    digests = [answer for answer in sent if answer.path.endswith("row_digests.safetensors")]
    assert len(digests) == 1 and digests[0].sent < 8 * N + 2048
    rows = [answer for answer in sent if answer.asked is not None]
    assert sum(answer.sent for answer in rows) == 3 * (512 + 76) and len(rows) == 6
    assert not [answer for answer in sent if answer.asked is None and "train-" in answer.path]
    del sent[:]
    monkeypatch.setattr(index_shards, "_REQUEST_BYTES", 1 << 17)
    list(shards.rows_of({1: [0]}))
    assert [answer.path for answer in sent] == [MIDDLE], "a small shard takes less than the requests"


def test_rows_without_digests_come_with_their_shards(
    hub: Hub, client: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_shards, "_REQUEST_BYTES", 0)
    without = edited(files, "trak_index.json", lambda m: m["files"].pop("checkpoint-0/row_digests.safetensors"))
    hub.put("dataset", "tester/index", {**files, "trak_index.json": without})
    shards, sent = opened().train(0), watched(hub)
    list(shards.rows_of({1: [0]}))
    assert [(answer.path, answer.asked) for answer in sent] == [(MIDDLE, None)]


def test_other_rows_are_refused(
    hub: Hub, client: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row whose bytes changed on the way, or in the repo, has another digest."""
    monkeypatch.setattr(index_shards, "_REQUEST_BYTES", 0)

    def flip(handler: Handler, content: bytes, status: int, headers: dict[str, str]) -> Any:
        return content[:-1] + bytes([content[-1] ^ 1]), status, headers

    shards = opened().train(0)
    shards.fetch_prefixes(512, quiet=True)
    watched(hub, flip)
    with pytest.raises(RefusedIndexError, match="the codes of training row 19 have another digest"):
        list(shards.rows_of({1: [3]}))
    watched(hub)
    changed = load(files["checkpoint-0/row_digests.safetensors"])["digests"]
    changed[20] += 1
    bad = rewritten(files, "checkpoint-0/row_digests.safetensors", {"digests": changed})
    hub.put("dataset", "tester/index", bad)
    with pytest.raises(RefusedIndexError, match="the codes of training row 20 have another digest"):
        list(opened().train(0).rows_of({1: [4]}))
    hub.put("dataset", "tester/index", {**bad, "trak_index.json": files["trak_index.json"]})
    with pytest.raises(RefusedIndexError, match=r"row_digests.safetensors.*the manifest says"):
        list(opened().train(0).rows_of({1: [4]}))


@pytest.mark.slow
def test_two_passes_elsewhere(hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first pass takes the heads, what the solver keeps and few rows, and gives the scores that it gives at home.

    A dual solver, which few rows get by default, reads all features anyway.
    """
    monkeypatch.setattr(index_shards, "_REQUEST_BYTES", 0)
    model = tiny_bert(1)
    args = trak_config(str(tmp_path / "trak"), proj_dim=K, feature_dtype="int8", shard_size=16,
                      solver="primal", per_device_batch_size=5, **OPTIONS)  # fmt: skip
    attributor = TrakAttributor(model, args, train_dataset=sentences(0, N)).featurize()
    attributor.push_to_hub("tester/index", token=TOKEN, private=False)
    files, sent = hub.dataset("tester/index"), watched(hub)
    elsewhere = TrakAttributor.from_pretrained("tester/index", model, token=TOKEN, **OPTIONS)
    assert [answer.path for answer in sent] == ["trak_config.json", "trak_index.json"]
    options = {"top_k": 2, "method": Index(first_pass_bytes=512, candidates=2)}
    found, expected = (one.attribute(targets(), **options) for one in (elsewhere, attributor))
    for name in ("trak_indices", "trak_scores", "trak_harmful_indices", "trak_harmful_scores"):
        assert found[name][:] == expected[name][:], name
    shards = {name for name in files if "/train-" in name}
    heads = [answer for answer in sent if answer.asked is not None and answer.asked.startswith("bytes=0-")]
    rows = [answer for answer in sent if answer.asked is not None and answer not in heads]
    assert {answer.path for answer in heads} == shards and len(heads) == len(shards)
    assert sum(answer.sent for answer in heads) < N * (512 + 8) + len(shards) * 1024
    assert sum(answer.sent for answer in rows) <= 2 * 2 * 5 * (512 + 76)
    others = {answer.path for answer in sent if answer.asked is None}
    assert others == {
        "trak_config.json",
        "trak_index.json",
        *(f"checkpoint-0/{name}.safetensors" for name in ("gram", "row_digests")),
    }
    before = len(sent)
    assert elsewhere.attribute(targets(), **options)["trak_indices"][:] == found["trak_indices"][:]
    assert not [answer for answer in sent[before:] if answer in heads], "heads are fetched once"
    before = len(sent)
    assert np.array_equal(
        *(np.array(one.attribute(targets(), top_k=None)["trak_scores"][:]) for one in (elsewhere, attributor))
    )
    assert {answer.path for answer in sent[before:]} == shards, "all scores take whole shards"


@pytest.mark.slow
def test_the_solver_that_is_published_is_the_one_used(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Readers take the Gram matrix that is there, where the choice for so few rows would be another solver."""
    model = tiny_bert(1)

    def attributor(solver: str) -> TrakAttributor:
        args = trak_config(str(tmp_path / "trak"), proj_dim=K, feature_dtype="int8", shard_size=16, solver=solver,
                          per_device_batch_size=5, **OPTIONS)  # fmt: skip
        return TrakAttributor(model, args, train_dataset=sentences(0, N))

    attributor("primal").featurize()
    attributor("auto").push_to_hub("tester/index", token=TOKEN, private=False)
    elsewhere = TrakAttributor.from_pretrained("tester/index", model, token=TOKEN, **OPTIONS)
    assert elsewhere.args.solver == "primal"
    found, expected = (
        one.attribute(targets(), top_k=None)["trak_scores"][:] for one in (elsewhere, attributor("auto"))
    )
    assert found == expected


@pytest.mark.slow
def test_published_eigenvalues_are_used(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No whole shard is downloaded for a first pass, although there is no Gram matrix."""
    monkeypatch.setattr(index_shards, "_REQUEST_BYTES", 0)
    model = tiny_bert(1)
    args = trak_config(str(tmp_path / "trak"), proj_dim=K, feature_dtype="int8", shard_size=16, solver="low_rank-8",
                      per_device_batch_size=5, **OPTIONS)  # fmt: skip
    attributor = TrakAttributor(model, args, train_dataset=sentences(0, N)).featurize()
    attributor.push_to_hub("tester/index", token=TOKEN, private=False)
    sent = watched(hub)
    elsewhere = TrakAttributor.from_pretrained("tester/index", model, token=TOKEN, **OPTIONS)
    options = {"top_k": 2, "method": Index(first_pass_bytes=512, candidates=2)}
    found, expected = (one.attribute(targets(), **options) for one in (elsewhere, attributor))
    assert found["trak_scores"][:] == expected["trak_scores"][:]
    names = ("low_rank-8.safetensors", "row_digests.safetensors")
    assert {answer.path for answer in sent if answer.asked is None} == {
        "trak_config.json", "trak_index.json", *(f"checkpoint-0/{name}" for name in names),
    }  # fmt: skip


# -- servers that do not send what they were asked for ---------------------------------------------------------------


Change = Callable[[Handler, bytes, int, dict[str, str]], Any]


def whole(handler: Handler, content: bytes, status: int, headers: dict[str, str]) -> Any:
    """Ignore the range, as servers may."""
    return content + bytes(10**6), 200, {key: value for key, value in headers.items() if key != "Content-Range"}


def ranged(part: str) -> Change:
    return lambda handler, content, status, headers: (content, status, {**headers, "Content-Range": part})


SERVERS: dict[str, tuple[Change, str]] = {
    "ignores ranges": (whole, "the server answered status 200"),
    "says another range": (ranged("bytes 8-20/30"), "Content-Range 'bytes 8-20/30'"),
    "says another size": (
        lambda handler, content, status, headers: (
            content, status, {**headers, "Content-Range": headers["Content-Range"].split("/")[0] + "/9"}
        ),
        "Content-Range 'bytes 0-",
    ),
    "says no range": (lambda handler, content, status, headers: (content, 206, {}), "Content-Range None"),
    "compresses": (
        lambda handler, content, status, headers: (content, status, {**headers, "Content-Encoding": "gzip"}),
        "the server answered status 206",
    ),
    "sends more": (
        lambda handler, content, status, headers: (content + bytes(10**6), status, headers), "answered more than"
    ),
    "sends less": (lambda handler, content, status, headers: (content[:-9], status, headers), r"answered \d+ bytes"),
    "sends another header": (
        lambda handler, content, status, headers: (content[:1] + b"\x09" + content[2:], status, headers),
        "begins with a header of .* its size implies",
    ),
    "sends no JSON": (
        lambda handler, content, status, headers: (content[:8] + b"[" + content[9:], status, headers),
        "its header cannot be read",
    ),
    "sends other numbers": (
        lambda handler, content, status, headers: (content[:-1] + bytes([content[-1] ^ 1]), status, headers),
        "the checksum of its tensors is not the one .* in 'codes.00'",
    ),
    "sends zeros": (lambda handler, content, status, headers: (bytes(len(content)), status, headers), "header of 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVERS)
def test_other_bytes_than_those_asked_for_are_refused(hub: Hub, client: Path, files: Files, case: str) -> None:
    """Whatever comes, no more than was asked for is read, and nothing of it is kept."""
    change, reason = SERVERS[case]
    sent = watched(hub, change)
    with pytest.raises(RefusedIndexError, match=reason) as error:
        opened().train(0).prefix_of(2, 512)
    assert LAST in str(error.value) and "was refused" in str(error.value)
    assert [answer for answer in sent if answer.asked], "something was asked for"
    with pytest.raises(RefusedIndexError, match=reason):
        opened().train(0).fetch_prefixes(512)
    assert kept_heads(client) == []


def test_broken_connections_are_tried_again(
    hub: Hub, client: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_PAUSE_SECONDS", 0.01)
    shards = opened().train(0)
    hub.faults.append(Fault("GET", LAST, "drop", times=2))
    assert shards.prefix_of(2, 512).coded.columns == 512
    hub.faults[:] = [Fault("GET", MIDDLE, "drop")]
    with pytest.raises(HubAccessError, match=r"the connection to http://127.0.0.1:.* failed .*; there is no dir"):
        shards.prefix_of(1, 512)
    hub.faults[:] = [Fault("GET", MIDDLE, 404)]
    with pytest.raises(HubAccessError, match="404"):
        shards.prefix_of(1, 512)


def test_ranges_respect_token_commit_and_bounds(hub: Hub, client: Path, files: Files, tmp_path: Path) -> None:
    hub_files = HubFiles("tester/index", "trak_config.json", token=TOKEN)
    assert hub_files.fetch_range(FIRST, 5, 9) == files[FIRST][5:9]
    hub.put("dataset", "tester/index", {**files, FIRST: bytes(len(files[FIRST]))}, private=True)
    assert hub_files.fetch_range(FIRST, 5, 9) == files[FIRST][5:9], "another commit changes nothing"
    for start, stop in ((-1, 4), (4, 4), (0, len(files[FIRST]) + 1)):
        with pytest.raises(IncompleteStoreError, match="were asked for"):
            hub_files.fetch_range(FIRST, start, stop)
    with pytest.raises(IncompleteStoreError, match="has None bytes"):
        hub_files.fetch_range("nothing", 0, 1)
    again = HubFiles("tester/index", "trak_config.json", hub_files.commit, token=False)
    with pytest.raises(HubAccessError, match=r"does not exist at .* or is private"):
        again.fetch_range(FIRST, 0, 4)
    local = LocalFiles(clone(files, tmp_path / "clone"))
    assert local.fetch_range(FIRST, 5, 9) == files[FIRST][5:9]
    with pytest.raises(IncompleteStoreError, match="ends before byte"):
        local.fetch_range(FIRST, 0, len(files[FIRST]) + 1)


# -- hostile indexes -------------------------------------------------------------------------------------------------


def rewritten(files: Files, name: str, content: dict[str, torch.Tensor], **changes: Any) -> Files:
    """Replace the tensors of a file, and update all checksums, as an attacker can."""
    metadata = metadata_of(files[name])
    del metadata["checksum"]
    metadata = sealed({**metadata, "tensors": checksums(content), **changes})
    return listed({**files, name: save(content, {"hf_trak": json.dumps(metadata)})})


def metadata_of(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["hf_trak"])


def shard(**changes: Any) -> Callable[[Files], Files]:
    """Change tensors of the last shard: a function of the tensor, another tensor, or `None` to leave it out."""

    def act(files: Files) -> Files:
        tensors = load(files[LAST])
        for name, change in changes.items():
            name = name.replace("_", ".") if name.startswith("codes") else name
            value = change(tensors[name]) if callable(change) else change
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value
        return rewritten(files, LAST, tensors)

    return act


def scale_with(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scale: torch.cat([scale[:-1], torch.tensor([value])])


def header_with(change: Callable[[dict[str, Any]], Any]) -> Callable[[Files], Files]:
    """Change the header of the last shard, and the size of the file with it."""

    def act(files: Files) -> Files:
        (length,) = struct.unpack("<Q", files[LAST][:8])
        header = json.loads(files[LAST][8 : 8 + length])
        change(header)
        body = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        return listed({**files, LAST: struct.pack("<Q", len(body)) + body + files[LAST][8 + length :]})

    return act


def digests_with(change: Callable[[dict[str, str]], Any]) -> Callable[[Files], Files]:
    def act(files: Files) -> Files:
        tensors = load(files[LAST])
        return rewritten(files, LAST, tensors, tensors=change(checksums(tensors)))

    return act


def same_place(header: dict[str, Any]) -> None:
    """Let the second block begin where the first one does."""
    header["codes.01"]["data_offsets"] = header["codes.00"]["data_offsets"]


def swapped(header: dict[str, Any]) -> None:
    header["codes.00"], header["codes.01"] = header["codes.01"], header["codes.00"]


def far_away(header: dict[str, Any]) -> None:
    header["codes.00"]["data_offsets"] = [0, 10**9]


NOT_EACH = "not a checksum for each tensor"

BAD_SHARDS: dict[str, tuple[Callable[[Files], Files], str]] = {
    "NaN scale": (shard(scale=scale_with(float("nan"))), "a scale is negative, NaN or infinite"),
    "infinite scale": (shard(scale=scale_with(float("inf"))), "a scale is negative, NaN or infinite"),
    "negative scale": (shard(scale=scale_with(-0.5)), "a scale is negative, NaN or infinite"),
    "NaN weight": (shard(out_to_loss=scale_with(float("nan"))), "`out_to_loss` of training row 39"),
    "scale in another dtype": (shard(scale=lambda scale: scale.half().repeat(2)), "scale.*expected torch|header"),
    "block in another dtype": (shard(codes_00=lambda block: block.view(torch.int8)), "codes.00.* exp|other tensors"),
    "block without rows": (shard(codes_01=lambda block: block[:-1]), r"\(7, 512\), expected|bytes"),
    "block of other columns": (shard(codes_02=lambda block: block[:, :-1].contiguous()), "expected|bytes"),
    "wide and narrow blocks": (
        shard(codes_00=lambda block: block.reshape(4, 1024), codes_01=lambda block: block), r"\(4, 1024\)|other ten"
    ),
    "missing block": (shard(codes_01=None), "missing|bytes"),
    "misnamed block": (shard(codes_01=None, codes_1=torch.zeros(8, 512, dtype=torch.uint8)), "missing|other tensors"),
    "extra block": (shard(codes_03=torch.zeros(8, 4, dtype=torch.uint8)), "not a checksum for each tensor|header of"),
    "float features beside": (shard(grads=torch.zeros(1, 1)), "not a checksum for each tensor|header of"),
    "no scale": (shard(scale=None), "missing|bytes"),
    "checksums that are one text": (digests_with(lambda found: "0" * 32), NOT_EACH),
    "checksums that are a list": (digests_with(lambda found: list(found.values())), NOT_EACH),
    "no checksums": (digests_with(lambda found: None), NOT_EACH),
    "too few checksums": (digests_with(lambda found: {"codes.00": found["codes.00"]}), NOT_EACH),
    "checksums of something else": (digests_with(lambda found: {**found, "../x": "0" * 32}), NOT_EACH),
    "a wrong checksum": (digests_with(lambda found: {**found, "codes.00": "0" * 32}), "the checksum"),
    "a checksum that is a number": (digests_with(lambda found: {**found, "codes.00": 7}), "the checksum"),
    "overlapping blocks": (header_with(same_place), "cannot be read|other tensors, shapes or places"),
    "swapped blocks": (header_with(swapped), "the checksum|cannot be read|other tensors, shapes or places"),
    "block far away": (header_with(far_away), "cannot be read|other tensors, shapes or places"),
    "negative offsets": (
        header_with(lambda header: header["codes.00"].update(data_offsets=[-1, 5])), "cannot be read|other tensors"
    ),
    "offsets that are a text": (
        header_with(lambda header: header["codes.00"].update(data_offsets="x")), "cannot be read|other tensors"
    ),
    "no entry": (header_with(lambda header: header.pop("codes.02")), "cannot be read|missing|other tensors"),
    "no metadata": (header_with(lambda header: header.pop("__metadata__")), "not written by hf_trak"),
    "metadata that are a list": (
        header_with(lambda header: header.update(__metadata__=[])), "cannot be read|not written by hf_trak"
    ),
    "metadata that are no JSON": (
        header_with(lambda header: header.update(__metadata__={"hf_trak": "["})), "not valid JSON"
    ),
    "rows of another shard": (
        lambda files: {**files, LAST: files[LAST].replace(b'\\"start\\": 32', b'\\"start\\": 31')},
        "the checksum of its metadata|another run",
    ),
    "checksum that the manifest does not have": (
        lambda files: {**shard(scale=lambda scale: scale * 2)(files), "trak_index.json": files["trak_index.json"]},
        "the manifest says",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_bad_shards(hub: Hub, client: Path, tmp_path: Path, files: Files, case: str) -> None:
    """They are refused as a whole, in part and as a clone, with a reason, and nothing of them is kept."""
    change, reason = BAD_SHARDS[case]
    bad = change(files)
    assert bad != files
    hub.put("dataset", "tester/index", bad, private=True)
    for read in (
        lambda: opened().train(0).read(2),
        lambda: opened().train(0).read(2, mapped=False),
        lambda: opened().train(0).prefix_of(2, 512),
        lambda: open_index(LocalFiles(clone(bad, tmp_path / "clone")), tmp_path / "work").train(0).read(2),
        lambda: open_index(LocalFiles(tmp_path / "clone"), tmp_path / "work").train(0).prefix_of(2, 512),
        lambda: pull_index("tester/index", tmp_path / "copy", token=TOKEN),
    ):
        with pytest.raises(RefusedIndexError, match=reason) as error:
            read()
        assert "was refused" in str(error.value) and "Delete this file" not in str(error.value)
        assert bad[LAST] not in {path.read_bytes() for path in below(client)}
    assert not [name for name in kept_heads(client) if "00002-of" in name]


def test_bits_after_the_last_number_are_refused(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Two encodings of one row would have two checksums."""
    files = published(hub, tmp_path, "int2", 93)

    def set_last(block: torch.Tensor) -> torch.Tensor:
        block[-1, -1] |= 64  # 93 numbers of 2 bits end with the second bit of the last byte
        return block

    assert int(load(files[LAST])["codes.00"][-1, -1]) < 4
    hub.put("dataset", "tester/index", shard(codes_00=set_last)(files), private=True)
    with pytest.raises(RefusedIndexError, match="bits after the last number of a row are set"):
        opened().train(0).read(2)


RANK_4, DIGESTS = "checkpoint-0/low_rank-4.safetensors", "checkpoint-0/row_digests.safetensors"


def renamed(old: str, new: str) -> Callable[[Files, Path], Files]:
    """List a file under another name."""
    return manifest(lambda m: m["files"].update({new: m["files"].pop(old)}))


def moved(old: str, new: str) -> Callable[[Files, Path], Files]:
    """Give a file another name, and list it under that."""
    return lambda files, tmp: renamed(old, new)({new if name == old else name: files[name] for name in files}, tmp)


def entry(change: Callable[[dict[str, Any]], Any]) -> Callable[[Files, Path], Files]:
    """Change what the manifest says of the checkpoint."""
    return manifest(lambda m: change(m["checkpoints"]["0"]))


def factors(name: str | None = None, value: float = 0.0, **changes: Any) -> Callable[[Files, Path], Files]:
    """Change the last number of a tensor of the eigenvalues, or their metadata."""

    def act(files: Files, tmp: Path) -> Files:
        path, changed = "checkpoint-0/low_rank-4.safetensors", dict(changes)
        tensors = load(files[path])
        if name is not None:
            tensors[name].view(-1)[-1] = value
        if "identity" in changed:
            changed["identity"] = {**metadata_of(files[path])["identity"], **changed["identity"]}
        return rewritten(files, path, tensors, **changed)

    return act


BAD_FACTS: dict[str, tuple[Callable[[Files, Path], Files], str]] = {
    "unknown rotation": (config(rotation="hadamard-9"), "`rotation` is 'hadamard-9'. Expected 'hadamard-1'"),
    "rotation that is a path": (config(rotation="../x"), "`rotation` is '../x'"),
    "no rotation": (config(rotation=None), "`rotation` is None"),
    "unknown levels": (config(levels=["x"]), r"`levels` is \['x'\]. Expected 'levels-1'"),
    "codes in a later format": (config(format_version=2), "format version 2, and this version"),
    "codes that are said to be floats": (config(feature_dtype="float32"), "belongs to the configuration"),
    "another number of bits": (config(feature_dtype="int4"), "belongs to the configuration"),
    "bits that are none": (config(feature_dtype="int3"), "`feature_dtype` is 'int3'"),
    "bits that are a list": (config(feature_dtype=["int8"]), "feature_dtype|unhashable"),
    "negative k": (config(proj_dim=-8), "`proj_dim` is -8"),
    "k without end": (config(proj_dim=1 << 30), "`proj_dim` is 1073741824, more than"),
    "negative seed": (config(seed=-1), "`seed` is -1"),
    "seed that is a text": (config(seed="7"), "`seed` is '7'"),
    "solver that is none": (renamed(RANK_4, "checkpoint-0/x.safetensors"), "which no index has|shards, not the"),
    "rank without end": (moved(RANK_4, "checkpoint-0/low_rank-1000000.safetensors"), "bytes, not"),
    "rank that is too long": (renamed(RANK_4, "checkpoint-0/low_rank-100000000.safetensors"), "shards, not the"),
    "rank that is a path": (renamed(RANK_4, "checkpoint-0/low_rank-../4.safetensors"), "shards, not the"),
    "another rank": (renamed(RANK_4, "checkpoint-0/low_rank-5.safetensors"), "low_rank-5.*(is missing|bytes, not)"),
    "solver without a checksum": (manifest(lambda m: m["files"][RANK_4].__setitem__(1, 1)), "digest 1"),
    "a Gram matrix instead": (renamed(RANK_4, "checkpoint-0/gram.safetensors"), "gram.*(is missing|bytes, not)"),
    "solver setting that is none": (
        manifest(lambda m: m["settings"].update(solver="os.system")), "`solver` is 'os.system'"
    ),
    "solver settings with more": (
        manifest(lambda m: m["settings"].update(output_dir="/tmp/x")), "`settings` is a dict"
    ),
    "row digests that are a path": (manifest(lambda m: m["files"][DIGESTS].__setitem__(1, "../x")), "the digest"),
    "history that is a text": (
        entry(lambda c: c.update(converted_from="int8")), "converted from 'int8'"
    ),
    "history of something else": (
        entry(lambda c: c.update(converted_from=["<b>"])), "converted from a list of 1"
    ),
    "huge row digests": (
        replaced("checkpoint-0/row_digests.safetensors", bytes(1 << 20)), "it has 1048576 bytes, not 328 to"
    ),
    "no row digests": (
        lambda files, tmp: {k: v for k, v in files.items() if "row_digests" not in k}, "row_digests.*is missing"
    ),
    "row digests of another dtype": (
        lambda files, tmp: rewritten(
            files, "checkpoint-0/row_digests.safetensors", {"digests": torch.zeros(N, dtype=torch.float64)}
        ),
        "expected torch.int64",
    ),
    "row digests of fewer rows": (
        lambda files, tmp: rewritten(
            files, "checkpoint-0/row_digests.safetensors",
            {"digests": torch.zeros(N // 2, dtype=torch.int64), "more": torch.zeros(N, dtype=torch.int64)},
        ),
        r"\(20,\), expected torch.int64 \(40,\)",
    ),
    "NaN eigenvectors": (factors("vectors", float("nan")), "`vectors` holds NaN or infinite"),
    "negative eigenvalues": (factors("eigenvalues", -1.0), "`eigenvalues` holds numbers below"),
    "infinite overlaps": (factors("overlaps", float("inf")), "`overlaps` holds NaN or infinite"),
    "NaN trace": (factors(facts={"trace": "NaN", "residual": 1.0}), "`trace` is 'NaN'"),
    "no facts": (factors(facts=None), "`trace` is None"),
    "negative residual": (factors(facts={"trace": 1.0, "residual": -1.0}), "`residual` is -1"),
    "other eigenvalues than the manifest's": (
        lambda files, tmp: {**factors("eigenvalues", 1.0)(files, tmp), "trak_index.json": files["trak_index.json"]},
        "low_rank-4.*its checksum is .*, the manifest says",
    ),
    "huge eigenvectors": (
        replaced("checkpoint-0/low_rank-4.safetensors", bytes(1 << 20)), "low_rank-4.*it has 1048576 bytes, not"
    ),
    "eigenvectors of other features": (
        factors(identity={"content": "0" * 32}), "it belongs to another run"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FACTS)
def test_bad_facts(hub: Hub, client: Path, tmp_path: Path, files: Files, case: str) -> None:
    """What an index says of its codes is checked like everything else, before anything is read that depends on it."""
    change, reason = BAD_FACTS[case]
    bad = change(files, tmp_path)
    hub.put("dataset", "tester/index", bad, private=True)
    for act in (
        lambda: use(opened(output_dir=tmp_path / "work")),
        lambda: use(open_index(LocalFiles(clone(bad, tmp_path / "clone")), tmp_path / "work")),
    ):
        with pytest.raises(RefusedIndexError, match=reason) as error:
            act()
        assert "was refused" in str(error.value)
    kept = {path.read_bytes() for path in below(client)}
    assert not {data for name, data in bad.items() if files.get(name) != data and not name.endswith(".json")} & kept


def use(store: IndexStore) -> None:
    store.fetch_solver(0)
    store.row_digests(0)
    decoded(store)


def test_the_good_index_is_not_refused(hub: Hub, client: Path, files: Files) -> None:
    store = opened()
    use(store)
    assert decoded(store).shape == (N, K)
