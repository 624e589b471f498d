"""Publishing a feature store and reading it back over real HTTP, from a local Hub."""

import logging
import re
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Fault, Hub, client, hub
from huggingface_hub import DatasetCard, constants

from hf_trak import TrakConfig
from hf_trak.errors import ConfigMismatchError, HubAccessError, IncompleteStoreError, StoreError
from hf_trak.hub import open_repo, pull_index, push_index
from hf_trak.hub.manifest import TrainSource
from hf_trak.runtime.processes import Processes
from hf_trak.scores import gram_sample
from hf_trak.scores.scorer import Scorer
from hf_trak.store.references import write_references
from hf_trak.store.store import FeatureStore

__all__ = ["client", "hub"]  # fixtures

K, N, SHARD = 6, 20, 8
CONFIG = {
    "feature_dtype": "float32",
    "hf_trak_version": "0.1.0",
    "model_class": "BertForSequenceClassification",
    "model_dtype": None,
    "model_name": "tester/model",
    "model_revision": "0" * 40,
    "parameters": [["weight", [3, 4], 0], ["bias", [3], 12]],
    "proj_dim": K,
    "proj_nonzeros": 1,
    "projection": "sjlt-1",
    "seed": 7,
    "shard_size": SHARD,
    "task": {"class": "hf_trak.modelout_functions.classification.TextClassificationModelOutput", "settings": {}},
    "train_fingerprint": "f" * 32,
    "train_size": N,
}
FILES = {
    "README.md",
    "trak_config.json",
    "trak_index.json",
    *(f"checkpoint-{c}/{name}" for c in (0, 1) for name in ("checkpoint.json", "gram.safetensors")),
    *(f"checkpoint-{c}/train-{i:05d}-of-00003.safetensors" for c in (0, 1) for i in range(3)),
}


def make_store(path: Path, ids: tuple[int, ...] = (0, 1), **changes: object) -> FeatureStore:
    """Write a finished store of random features."""
    store = FeatureStore.open(path, {**CONFIG, **changes})
    size = store.config["train_size"]
    for model_id in ids:
        generator = torch.Generator().manual_seed(model_id)
        x, q = torch.randn(size, K, generator=generator), torch.rand(size, generator=generator)
        store.register_checkpoint(model_id, f"{model_id:032x}", f"{path}/checkpoint-{model_id}")
        shards = store.train(model_id)
        for index in range(len(shards)):
            rows = shards.plan.rows(index)
            shards.write(index, x[rows.start : rows.stop], q[rows.start : rows.stop])
        store.write_gram(model_id, x.double().T @ x.double(), size)
    return store


def features(store: FeatureStore, model_id: int) -> torch.Tensor:
    return torch.cat([shard.grads for shard in store.train(model_id)])


def everything_below(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


def test_push_and_read_back(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Everything comes back bit for bit, and each file is downloaded once, when it is first read."""
    local = make_store(tmp_path / "store")
    commit = push_index(local, "tester/index", token=TOKEN, settings=TrakConfig(lambda_relative=0.25), private=False)
    assert set(hub.dataset("tester/index")) == FILES | {".gitattributes"}
    assert commit.oid == hub.repos["dataset", "tester/index"].refs["main"]
    store = open_repo("tester/index")
    assert hub.downloads() == ["trak_config.json", "trak_index.json"]
    assert store.model_ids == [0, 1] and store.config_hash == local.config_hash
    assert store.manifest.settings["lambda_relative"] == 0.25
    shard = store.train(1).read(2)
    assert hub.downloads()[2:] == ["checkpoint-1/train-00002-of-00003.safetensors"]
    assert torch.equal(shard.grads, local.train(1).read(2).grads)
    assert torch.equal(store.read_gram(1).matrix, local.read_gram(1).matrix)
    assert hub.downloads()[3:] == ["checkpoint-1/gram.safetensors"]
    assert torch.equal(features(store, 1), features(local, 1))
    assert sorted(hub.downloads()[4:]) == [f"checkpoint-1/train-{i:05d}-of-00003.safetensors" for i in (0, 1)]
    assert not hub.downloads("checkpoint-0/")
    before = len(hub.log)
    assert torch.equal(features(open_repo("tester/index", revision=commit.oid), 1), features(local, 1))
    assert len(hub.log) == before  # a commit that is in the cache needs no request


def test_a_sampled_gram_comes_back(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With its error, which readers are told, too."""
    monkeypatch.setattr(gram_sample, "SAMPLED_FROM", N)
    monkeypatch.setattr(gram_sample, "ROWS_PER_FEATURE", 1)
    local, processes = make_store(tmp_path / "store"), Processes(use_cpu=True)
    for model_id in local.model_ids:
        (local.checkpoint_dir(model_id) / "gram.safetensors").unlink()
    scorer = Scorer(local, processes, processes.device, 0.25)
    sampled, _ = scorer.gram(0), scorer.gram(1)
    push_index(local, "tester/index", token=TOKEN, private=False)
    assert sampled is not None and sampled.sample is not None and sampled.spread is not None
    lazy, pulled = open_repo("tester/index"), pull_index("tester/index", tmp_path / "pulled")
    for store in (lazy, pulled):
        found = store.read_gram(0)
        assert found is not None and (found.n, found.sample, found.trace) == (N, sampled.sample, sampled.trace)
        assert torch.equal(found.matrix, sampled.matrix) and torch.equal(found.spread, sampled.spread)
        reader = Scorer(store, processes, processes.device, 0.25)
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_trak"):
            assert reader.system(0, found).error == scorer.system(0, sampled).error
        assert caplog.text.count(f"is estimated from {sampled.sample} of {N} rows") == 2
        assert reader.identity([0, 1], [local.train(0)] * 2) == scorer.identity([0, 1], [local.train(0)] * 2)


def test_second_push_sends_nothing_and_makes_no_commit(hub: Hub, client: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    push_index(store, "tester/index", token=TOKEN, private=False)
    before, uploads = dict(hub.repos["dataset", "tester/index"].refs), len(hub.uploads())
    assert uploads == 8
    push_index(store, "tester/index", token=TOKEN, private=False)
    assert hub.repos["dataset", "tester/index"].refs == before
    assert len(hub.uploads()) == uploads


def test_interrupted_push_is_finished_by_the_same_call(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that had arrived are not sent again, and nothing is visible before everything has arrived."""
    monkeypatch.setattr("hf_trak.hub.push._UPLOAD_FILES", 4)
    store = make_store(tmp_path / "store")
    hub.faults.append(Fault("PUT", "^/lfs/", 403, skip=5))
    with pytest.raises(HubAccessError, match="403"):
        push_index(store, "tester/index", token=TOKEN, private=False)
    assert set(hub.dataset("tester/index")) == {".gitattributes"}
    arrived = hub.uploads()
    assert 1 <= len(arrived) <= 5
    hub.faults.clear()
    push_index(store, "tester/index", token=TOKEN, private=False)
    assert len(hub.uploads()) == len(set(hub.uploads())) == 8
    assert set(hub.dataset("tester/index")) == FILES | {".gitattributes"}


def test_new_checkpoint_uploads_only_itself(hub: Hub, client: Path, tmp_path: Path) -> None:
    push_index(make_store(tmp_path / "store", ids=(0,)), "tester/index", token=TOKEN, private=False)
    sent = len(hub.uploads())
    push_index(make_store(tmp_path / "both"), "tester/index", token=TOKEN, private=False)
    assert len(hub.uploads()) == sent + 4
    assert open_repo("tester/index").model_ids == [0, 1]


def test_replaced_index_leaves_no_stale_files_and_touches_no_others(hub: Hub, client: Path, tmp_path: Path) -> None:
    push_index(make_store(tmp_path / "old"), "tester/index", token=TOKEN, private=False)
    others = {"checkpoint-9/model.safetensors": b"mine", "data/train.parquet": b"mine too"}
    hub.put("dataset", "tester/index", {**hub.dataset("tester/index"), **others})
    new = make_store(tmp_path / "new", ids=(0,), shard_size=16)
    push_index(new, "tester/index", token=TOKEN, private=False)
    left = set(hub.dataset("tester/index"))
    assert {name for name in left if "train-" in name} == {
        f"checkpoint-0/train-{i:05d}-of-00002.safetensors" for i in (0, 1)
    }
    assert others.items() <= hub.dataset("tester/index").items()
    assert torch.equal(features(open_repo("tester/index"), 0), features(new, 0))


def test_files_of_such_names_in_a_repo_without_an_index_stay(hub: Hub, client: Path, tmp_path: Path) -> None:
    mine = {"checkpoint-7/gram.safetensors": b"mine"}
    hub.put("dataset", "tester/index", mine)
    push_index(make_store(tmp_path / "store"), "tester/index", token=TOKEN, private=False)
    assert mine.items() <= hub.dataset("tester/index").items()


@pytest.mark.slow
def test_nothing_of_this_machine_is_published(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Neither paths of checkpoints and of the model nor the token are published."""
    (tmp_path / "my-model").mkdir()
    store = make_store(tmp_path / "store", model_name=str(tmp_path / "my-model"))
    assert str(tmp_path).encode() in everything_below(tmp_path / "store")
    push_index(store, "tester/index", token=TOKEN, private=False)
    published = b"".join(hub.dataset("tester/index").values())
    assert str(tmp_path).encode() not in published and TOKEN.encode() not in published
    assert open_repo("tester/index").config["model_name"] is None


def test_token_is_sent_and_kept_nowhere(
    hub: Hub, client: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    push_index(make_store(tmp_path / "store"), "tester/index", token=TOKEN, private=True)
    assert hub.repos["dataset", "tester/index"].private
    features(open_repo("tester/index", tmp_path / "work", token=TOKEN), 0)
    pull_index("tester/index", tmp_path / "copy", token=TOKEN)
    for pattern in ("/api/repos/create", "/commit/", "/resolve/"):
        found = [entry for entry in hub.log if pattern in entry.path]
        assert found and {entry.token for entry in found} == {TOKEN}
    with pytest.raises(HubAccessError) as error:
        open_repo("tester/index", token=f"{TOKEN}x")
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err, repr(error.value), str(error.value)):
        assert TOKEN not in text
    assert TOKEN.encode() not in everything_below(tmp_path)
    assert not [entry for entry in hub.log if "telemetry" in entry.path]


def test_an_index_is_private_unless_that_is_said(hub: Hub, client: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    push_index(store, "tester/mine", token=TOKEN)
    assert hub.repos["dataset", "tester/mine"].private
    push_index(store, "tester/open", token=TOKEN, private=False)
    assert not hub.repos["dataset", "tester/open"].private
    with pytest.raises(ValueError, match=r"exists and is public.*`private=False`"):
        push_index(store, "tester/open", token=TOKEN)


@pytest.mark.parametrize("name", ["pubdir", "./published", "../pubdir", "/pubdir", "a/b/c", "~", "", "."])
def test_a_directory_is_no_repo(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pubdir").mkdir()
    store, before = make_store(tmp_path / "store"), set(hub.repos)
    with pytest.raises(ValueError, match=r"`repo_id` is .*save_pretrained"):
        push_index(store, name, token=TOKEN)
    assert set(hub.repos) == before and not list((tmp_path / "pubdir").iterdir())
    assert not any(request.method == "POST" for request in hub.log)


def test_private_repo_is_not_faked_by_a_public_one(hub: Hub, client: Path, tmp_path: Path) -> None:
    hub.put("dataset", "tester/index", {})
    with pytest.raises(ValueError, match="is public, and `private` is True"):
        push_index(make_store(tmp_path / "store"), "tester/index", token=TOKEN, private=True)
    assert hub.dataset("tester/index") == {} and not hub.uploads()


def test_branches_and_pull_requests(hub: Hub, client: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    push_index(store, "tester/index", token=TOKEN, revision="v1", private=False)
    repo = hub.repos["dataset", "tester/index"]
    assert set(repo.main) == {".gitattributes"} and set(repo.commits[repo.refs["v1"]]) == FILES | {".gitattributes"}
    commit = push_index(store, "tester/index", token=TOKEN, create_pr=True, private=False)
    assert commit.pr_url and set(repo.main) == {".gitattributes"}
    for revision in ("v1", "refs/pr/1", repo.refs["v1"]):
        assert open_repo("tester/index", revision=revision).model_ids == [0, 1]
    with pytest.raises(HubAccessError, match="lacks a file"):
        open_repo("tester/index")


def test_what_cannot_be_published(hub: Hub, client: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    for arguments, message in [
        ({"checkpoints": {5: "tester/model@main"}}, r"\[5\]"),
        ({"checkpoints": {0: "tester/model"}}, "hf://user/model@revision"),
        ({"checkpoints": {0: "../../x@main"}}, "hf://user/model@revision"),
        ({"model_name": "no/such/name"}, "model_name"),
        ({"model_revision": "../main"}, "model_revision"),
        ({"lds": 7.0}, "lds"),
        ({"train_dataset": TrainSource("../data")}, "train_dataset"),
    ]:
        with pytest.raises(ValueError, match=message):
            push_index(store, "tester/index", token=TOKEN, **arguments, private=False)
    store.train(1).path(1).unlink()
    with pytest.raises(IncompleteStoreError, match="rows 8–15"):
        push_index(store, "tester/index", token=TOKEN, private=False)
    unfinished = FeatureStore.open(tmp_path / "empty", CONFIG)
    with pytest.raises(IncompleteStoreError, match="no checkpoint"):
        push_index(unfinished, "tester/index", token=TOKEN, private=False)
    assert hub.log == []
    with pytest.raises(HubAccessError, match="token"):
        push_index(make_store(tmp_path / "whole"), "tester/index", private=False)
    assert hub.repos == {}


def test_concurrent_change_is_not_overwritten(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user edits the card after it was read and before the commit."""
    store = make_store(tmp_path / "store")
    push_index(store, "tester/index", token=TOKEN, private=False)
    from hf_trak.hub import push

    def meanwhile(*args: object, **kwargs: object) -> str:
        edited = hub.dataset("tester/index")["README.md"] + b"\nTheir words.\n"
        hub.put("dataset", "tester/index", {**hub.dataset("tester/index"), "README.md": edited})
        return card(*args, **kwargs)

    card = push.index_card
    monkeypatch.setattr(push, "index_card", meanwhile)
    with pytest.raises(HubAccessError, match="commit has happened since"):
        push_index(store, "tester/index", token=TOKEN, lds=0.3, private=False)
    assert b"Their words." in hub.dataset("tester/index")["README.md"]


# -- references ------------------------------------------------------------------------------------------------------


def test_references_travel_with_the_index(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Tensors that a task computed from training rows (negatives of CLIP) are fetched with the first targets."""
    local = make_store(tmp_path / "store", ids=(0,))
    write_references(local, 0, {"image_embeddings": torch.randn(5, 3)})
    push_index(local, "tester/index", token=TOKEN, private=False)
    store = open_repo("tester/index")
    assert not hub.downloads("references")
    store.targets("exam", 0, 4, "d" * 32)
    assert hub.downloads("references") == ["checkpoint-0/references.safetensors"]
    from hf_trak.store.references import read_references

    assert torch.equal(read_references(store, 0)["image_embeddings"], read_references(local, 0)["image_embeddings"])


# -- offline, local --------------------------------------------------------------------------------------------------


def test_offline_from_the_cache(hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = make_store(tmp_path / "store")
    push_index(local, "tester/index", token=TOKEN, private=False)
    with pytest.raises(HubAccessError, match="not in the cache"):
        open_repo("tester/index", local_files_only=True)
    features(open_repo("tester/index"), 0)
    before = len(hub.log)
    store = open_repo("tester/index", local_files_only=True)
    assert torch.equal(features(store, 0), features(local, 0))
    with pytest.raises(HubAccessError, match=r"checkpoint-1/train-00000.* is not in the cache"):
        features(store, 1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(features(open_repo("tester/index"), 0), features(local, 0))
    with pytest.raises(HubAccessError, match="offline"):
        push_index(local, "tester/index", token=TOKEN, private=False)
    assert len(hub.log) == before


@pytest.mark.slow
def test_pull_makes_a_store_that_needs_no_hub(hub: Hub, client: Path, tmp_path: Path) -> None:
    local = make_store(tmp_path / "store")
    push_index(local, "tester/index", token=TOKEN, checkpoints={1: "tester/model@step-1"}, private=False)
    pull_index("tester/index", tmp_path / "copy")
    assert {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.*")} == (
        FILES - {"README.md"}
    )
    plain = FeatureStore.load(tmp_path / "copy")
    for model_id in (0, 1):
        assert torch.equal(features(plain, model_id), features(local, model_id))
        assert torch.equal(plain.read_gram(model_id).matrix, local.read_gram(model_id).matrix)
    assert plain.checkpoint_info(1)["source"] == "hf://tester/model@step-1"
    again = pull_index("tester/index", tmp_path / "copy")
    assert again.model_ids == [0, 1]
    push_index(plain, "tester/fork", token=TOKEN, private=False)
    assert str(open_repo("tester/fork").manifest.checkpoints[1].source) == "hf://tester/model@step-1"
    push_index(make_store(tmp_path / "other", seed=8), "tester/other", token=TOKEN, private=False)
    with pytest.raises(ConfigMismatchError, match="another configuration"):
        pull_index("tester/other", tmp_path / "copy")
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    with pytest.raises(ConfigMismatchError, match="computed there, which a copy would replace"):
        pull_index("tester/index", tmp_path / "store")
    assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()} == before


def test_what_no_reader_takes_is_not_published(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", ids=(0,))
    monkeypatch.setattr("hf_trak.hub.push.MAX_JSON_BYTES", 100)
    with pytest.raises(ValueError, match=r"trak_config\.json has \d+ bytes, and readers take at most 100"):
        push_index(store, "tester/index", token=TOKEN, private=False)
    assert hub.log == []


def test_an_index_is_read_only(hub: Hub, client: Path, tmp_path: Path) -> None:
    push_index(make_store(tmp_path / "store"), "tester/index", token=TOKEN, private=False)
    store = open_repo("tester/index")
    for call in (
        lambda: store.register_checkpoint(2, "x"),
        lambda: store.write_gram(0, torch.eye(K), N),
        lambda: store.train(0).write(0, torch.zeros(SHARD, K), torch.zeros(SHARD)),
    ):
        with pytest.raises(StoreError, match="only read here"):
            call()
    with pytest.raises(IncompleteStoreError, match=r"Model id 5 .*\[0, 1\]"):
        store.train(5)


# -- broken lines ----------------------------------------------------------------------------------------------------


def cached_shards(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("train-*.safetensors"))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["drop", "half", 500, "flip"])
def test_broken_download_leaves_the_cache_clean(hub: Hub, client: Path, tmp_path: Path, kind: str | int) -> None:
    """After a lost connection or damage there is a clear error, nothing is kept, and the next call succeeds."""
    local = make_store(tmp_path / "store")
    push_index(local, "tester/index", token=TOKEN, private=False)
    store = open_repo("tester/index")
    before = {path for path in client.rglob("*") if path.is_file() and path.suffix != ".lock"}
    hub.faults.append(Fault("GET", "train-00001", kind))
    with pytest.raises((HubAccessError, StoreError)) as error:
        store.train(0).read(1)
    assert re.search("Try again|another revision|the Hub answered", str(error.value))
    after = {path for path in client.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert after == before
    hub.faults.clear()
    assert torch.equal(features(store, 0), features(local, 0))
    assert len(cached_shards(client)) == 3


def test_missing_repos_and_revisions(hub: Hub, client: Path, tmp_path: Path) -> None:
    push_index(make_store(tmp_path / "store"), "tester/index", token=TOKEN, private=True)
    with pytest.raises(HubAccessError, match=r"does not exist .* or is private"):
        open_repo("tester/nothing")
    with pytest.raises(HubAccessError, match=r"or is private.*`token`"):
        open_repo("tester/index")
    with pytest.raises(HubAccessError, match=r"revision 'v9'.*branches, tags or commits"):
        open_repo("tester/index", revision="v9", token=TOKEN)
    for name in ("a/b/c", "no good", "../index", ""):
        with pytest.raises(HubAccessError, match="neither a directory nor the name of a repo"):
            open_repo(name)
    hub.put("dataset", "tester/plain", {"data.csv": b"1"})
    with pytest.raises(HubAccessError, match="lacks a file"):
        open_repo("tester/plain")
    hub.faults.append(Fault("GET", "/api/datasets/tester/index", "drop"))
    with pytest.raises(HubAccessError, match="connection"):
        open_repo("tester/index", token=TOKEN)
    assert not (client / "hf_trak").exists()


# -- cards -----------------------------------------------------------------------------------------------------------


def test_card_tells_what_was_attributed(hub: Hub, client: Path, tmp_path: Path) -> None:
    push_index(
        make_store(tmp_path / "store"),
        "tester/index",
        token=TOKEN,
        settings=TrakConfig(lambda_relative=0.25),
        train_dataset=TrainSource("tester/reviews", "plain", "train", "abc123"),
        checkpoints={1: "tester/model@step-1"},
        lds=0.4321,
        private=False,
    )
    card = DatasetCard(hub.dataset("tester/index")["README.md"].decode())
    assert card.data.tags == ["trak", "data-attribution", "hf_trak"]
    for fact in (
        "tester/model", "0" * 40, "BertForSequenceClassification", "15 parameters", "TextClassificationModelOutput",
        "| 6, stored as float32", "sjlt-1", "seed 7", "0.25 · trace", "tester/reviews", "abc123", "f" * 32, "20 rows",
        f"{1:032x}", "hf://tester/model@step-1", "0.432", "Sign", "Scale", "reveals", "Do not publish",
        "park2023trak", 'from_pretrained("tester/index")',
    ):  # fmt: skip
        assert fact in card.text, fact
    assert "{{" not in card.text.replace("title = {{TRAK}: ", "") and "{%" not in card.text and "None" not in card.text
    bibtex = re.search(r"```bibtex\n(.*?)```", card.text, flags=re.DOTALL)
    assert bibtex and bibtex[1].count("{") == bibtex[1].count("}")
    code = re.search(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    assert code and len([line for line in code[1].splitlines() if line.strip()]) <= 5
    compile(code[1], "card", "exec")
