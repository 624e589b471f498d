"""The feature store: what it writes is complete, valid and reproducible, and what is not is refused."""

import hashlib
import json
import os
import shutil
import signal
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from store_jobs import Job, wait_for

from hf_trak.errors import (
    CheckpointMismatchError,
    ConfigMismatchError,
    IncompleteStoreError,
    NonFiniteError,
    StoreError,
)
from hf_trak.store.atomic import (
    atomic_directory,
    atomic_path,
    create_bytes,
    leftovers,
    remove_stale_temporaries,
    safe_name,
    temporary_name,
    write_bytes,
)
from hf_trak.store.sealed import sealed_bytes
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import ShardPlan
from hf_trak.store.store import FeatureStore

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

ROOT = Path(__file__).parents[2]
CONFIG = {"train_size": 10, "proj_dim": 4, "feature_dtype": "float32", "shard_size": 4, "hf_trak_version": "0.1.0"}


def rows(n: int, k: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator), torch.rand(n, generator=generator)


def make_store(path: Path, **changes: object) -> FeatureStore:
    store = FeatureStore.open(path, {**CONFIG, **changes})
    store.register_checkpoint(0, "weights-a", "checkpoint-100")
    return store


def fill(shards: ShardSet, seed: int = 0) -> None:
    grads, q = rows(shards.plan.n_rows, shards.width, seed)
    for index in shards.unwritten():
        part = shards.plan.rows(index)
        shards.write(index, grads[part.start : part.stop], q[part.start : part.stop])


def digests(directory: Path) -> dict[str, str]:
    """Every file below a directory, temporaries included, and the hash of its bytes."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_plan_depends_on_sizes_alone():
    plan = ShardPlan(10, 4)
    assert [list(plan.rows(i)) for i in range(len(plan))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [plan.shard_of(row) for row in range(10)] == [0] * 4 + [1] * 4 + [2] * 2
    assert plan.file_name(0, "train") == "train-00000-of-00003.safetensors"
    assert len(ShardPlan(8, 4)) == 2 and len(ShardPlan(1, 4)) == 1
    with pytest.raises(ValueError, match="n_rows"):
        ShardPlan(0, 4)
    with pytest.raises(IndexError):
        plan.rows(3)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_round_trip(tmp_path, name):
    store = make_store(tmp_path, feature_dtype=name)
    shards = store.train(0)
    assert shards.unwritten() == [0, 1, 2] and shards.unwritten()
    fill(shards)
    assert not shards.unwritten()
    grads, q = rows(10)
    shards = FeatureStore.load(tmp_path).train(0)
    assert torch.equal(torch.cat([s.grads for s in shards]), grads.to(getattr(torch, name)))
    assert torch.equal(torch.cat([s.out_to_loss for s in shards]), q)
    assert [(s.start, s.stop) for s in shards] == [(0, 4), (4, 8), (8, 10)]


def whole_store(directory: Path) -> int:
    """Write a store with everything, and return a number that differs with the hash seed of the process."""
    store = make_store(directory)
    fill(store.train(0))
    fill(store.targets("e", 0, 3, "d"))
    store.write_gram(0, torch.eye(4), 10)
    return hash("seed")


@pytest.mark.slow
def test_same_content_gives_the_same_bytes_in_every_process(tmp_path):
    """safetensors writes several metadata keys in random order; a shard has one, so its bytes are reproducible."""
    report = Job(tmp_path / "report.json", whole_store, tmp_path / "there").wait()
    seed = whole_store(tmp_path / "here")
    assert report["value"] != seed or "PYTHONHASHSEED" in os.environ
    found = digests(tmp_path / "here")
    assert found == digests(tmp_path / "there")
    assert sum(name.endswith(".safetensors") for name in found) == 5


def test_rewriting_a_shard_changes_nothing(tmp_path):
    store = make_store(tmp_path)
    fill(store.train(0))
    before = digests(tmp_path)
    grads, q = rows(10)
    store.train(0).write(1, grads[4:8].clone(), q[4:8].clone())
    assert digests(tmp_path) == before


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_permissions_of_the_umask(tmp_path, umask, mode):
    previous = os.umask(umask)
    try:
        fill(make_store(tmp_path).train(0))
    finally:
        os.umask(previous)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}


def test_config_mismatch_names_every_key_and_leaves_the_store_alone(tmp_path):
    fill(make_store(tmp_path).train(0))
    before = digests(tmp_path)
    with pytest.raises(ConfigMismatchError) as error:
        FeatureStore.open(tmp_path, {**CONFIG, "feature_dtype": "float16", "seed": 3, "train_size": 11})
    for text in (
        'feature_dtype: saved "float32", given "float16"',
        "seed: saved (absent), given 3",
        "saved 10, given 11",
    ):
        assert text in str(error.value)
    assert "proj_dim" not in str(error.value)
    assert digests(tmp_path) == before
    # the version is for the reader alone
    store = FeatureStore.open(tmp_path, {**CONFIG, "hf_trak_version": "9"})
    assert store.config["hf_trak_version"] == "0.1.0"
    assert not store.train(0).unwritten()


def test_config_is_checked(tmp_path):
    with pytest.raises(ValueError, match="shard_size"):
        FeatureStore.open(tmp_path, {"train_size": 1, "proj_dim": 1, "feature_dtype": "float16"})
    with pytest.raises(ValueError, match="feature_dtype"):
        FeatureStore.open(tmp_path, {**CONFIG, "feature_dtype": "int3"})
    with pytest.raises(ValueError, match="JSON"):
        FeatureStore.open(tmp_path, {**CONFIG, "lambda": float("nan")})
    with pytest.raises(ValueError, match="train_size"):
        FeatureStore.open(tmp_path, {**CONFIG, "train_size": 0})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(IncompleteStoreError, match="Featurize first"):
        FeatureStore.load(tmp_path)
    (tmp_path / "trak_config.json").write_text("{")
    with pytest.raises(StoreError, match="not valid JSON"):
        FeatureStore.open(tmp_path, CONFIG)


def test_a_tuple_in_the_config_equals_the_list_that_json_makes_of_it(tmp_path):
    FeatureStore.open(tmp_path, {**CONFIG, "shape": (1, 2)})
    assert FeatureStore.open(tmp_path, {**CONFIG, "shape": [1, 2]}).config["shape"] == [1, 2]


def test_a_model_id_belongs_to_one_set_of_weights(tmp_path):
    """Two checkpoints under one model id are refused."""
    store = make_store(tmp_path)
    before = digests(tmp_path)
    store.register_checkpoint(0, "weights-a", "another path to the same weights")
    with pytest.raises(CheckpointMismatchError, match=r"weights-a.*checkpoint-100.*weights-b"):
        store.register_checkpoint(0, "weights-b")
    assert digests(tmp_path) == before
    store.register_checkpoint(7, "weights-b")
    assert store.model_ids == [0, 7]
    assert store.checkpoint_info(7)["fingerprint"] == "weights-b"
    with pytest.raises(IncompleteStoreError, match=r"Model id 3 .*\[0, 7\]"):
        store.train(3)
    for bad in (-1, "0", True, 1.0):
        with pytest.raises(ValueError, match="model_id"):
            store.register_checkpoint(bad, "w")


def test_experiments_keep_their_targets(tmp_path):
    store = make_store(tmp_path)
    fill(store.targets("test", 0, 6, "data-1", {"split": "test"}))
    before = digests(tmp_path)
    assert not store.targets("test", 0, 6, "data-1", {"split": "test"}).unwritten()
    with pytest.raises(ConfigMismatchError, match="num_targets: saved 6, given 7"):
        store.targets("test", 0, 7, "data-1", {"split": "test"})
    with pytest.raises(ConfigMismatchError, match='dataset_fingerprint: saved "data-1", given "data-2"'):
        store.targets("test", 0, 6, "data-2", {"split": "test"})
    with pytest.raises(IncompleteStoreError, match="Model id 5"):
        store.targets("new", 5, 6, "data-1")
    assert digests(tmp_path) == before
    assert store.experiments == ["test"]
    assert store.experiment_info("test") == {"num_targets": 6, "dataset_fingerprint": "data-1", "split": "test"}
    with pytest.raises(IncompleteStoreError, match="nothing"):
        store.experiment_info("nothing")


ESCAPES = [
    "",
    " ",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc",
    "a\\b",
    "C:x",
    ".hidden",
    "nul\0",
    "new\nline",
    "x" * 201,
    "é" * 150,
]


@pytest.mark.parametrize("name", ESCAPES)
def test_names_cannot_leave_the_output_directory(tmp_path, name):
    store = make_store(tmp_path / "out")
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=r"[Ee]xpected"):
        store.targets(name, 0, 3, "data")
    assert digests(tmp_path) == before


@pytest.mark.parametrize("name", ["test", "my run", "lr=1e-3", "run:1", "élan", "a..b", "x" * 200])
def test_ordinary_names_are_accepted(tmp_path, name):
    fill(make_store(tmp_path).targets(name, 0, 3, "data"))
    with pytest.raises(TypeError):
        safe_name(3)  # type: ignore[arg-type]


def shard_file(tmp_path: Path) -> tuple[FeatureStore, Path]:
    store = make_store(tmp_path)
    fill(store.train(0))
    return store, store.train(0).path(1)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_shard(tmp_path, keep):
    """A half-written file must not count as done."""
    store, path = shard_file(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    for call in (store.train(0).unwritten, lambda: store.train(0).read(1)):
        with pytest.raises(StoreError, match="Delete this file") as error:
            call()
        assert str(path) in str(error.value)
    path.unlink()
    assert store.train(0).unwritten() == [1]


@pytest.mark.parametrize("position", [-1, -20, -60])
def test_flipped_bit(tmp_path, position):
    store, path = shard_file(tmp_path)
    store.train(0).read(1)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    os.utime(path, (1, 1))  # a clock tick may be too coarse to tell the two versions of the file apart
    with pytest.raises(StoreError, match="checksum"):
        store.train(0).read(1)
    store.train(0).read(1, verify=False)
    with pytest.raises(StoreError, match="checksum"):
        store.train(0).read(1)


def test_foreign_files(tmp_path):
    store, path = shard_file(tmp_path)
    grads, q = rows(4)
    save_file({"grads": grads, "out_to_loss": q}, path)
    with pytest.raises(StoreError, match="not written by hf_trak"):
        store.train(0).unwritten()
    # a shard of the same shape from another checkpoint, another configuration, another range of rows
    store.register_checkpoint(1, "weights-b")
    fill(store.train(1))
    path.write_bytes(store.train(1).path(1).read_bytes())
    with pytest.raises(StoreError, match=r"another run.*weights-b.*weights-a"):
        store.train(0).read(1)
    other = make_store(tmp_path / "other", seed=5)
    fill(other.train(0))
    path.write_bytes(other.train(0).path(1).read_bytes())
    with pytest.raises(StoreError, match=r"another run.*config"):
        store.train(0).read(1)
    path.write_bytes(store.train(0).path(0).read_bytes())
    with pytest.raises(StoreError, match="start: saved 0, given 4"):
        store.train(0).read(1)
    wide = make_store(tmp_path / "wide", proj_dim=5)
    fill(wide.train(0))
    identity = store.train(0).identity
    impostor = ShardSet(tmp_path / "x", "train", wide.train(0).plan, 5, torch.float32, identity)
    fill(impostor)
    path.write_bytes(impostor.path(1).read_bytes())
    with pytest.raises(StoreError, match=r"\(4, 5\), expected torch.float32 \(4, 4\)"):
        store.train(0).read(1)


def test_missing_shard_names_the_rows(tmp_path):
    store, path = shard_file(tmp_path)
    path.unlink()
    with pytest.raises(IncompleteStoreError, match="rows 4–7"):
        store.train(0).require_complete("Featurize them.")
    with pytest.raises(StoreError, match="is missing"):
        list(store.train(0))


def test_config_edited_by_hand_is_noticed(tmp_path):
    """A store reopened with another dtype must not keep the old rows silently."""
    store = make_store(tmp_path)
    fill(store.train(0))
    path = tmp_path / "trak_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "feature_dtype": "float16"}))
    with pytest.raises(StoreError, match="configuration"):
        FeatureStore.load(tmp_path).train(0)


def test_values_that_do_not_fit_are_refused(tmp_path):
    """A cast to fp16 overflows above 65504 and vanishes below 6e-8."""
    store = make_store(tmp_path, feature_dtype="float16")
    shards = store.train(0)
    grads, q = rows(10)
    with pytest.raises(NonFiniteError, match=r"sample 6 .*7e\+04.*float16"):
        shards.write(1, torch.where(torch.arange(4)[:, None] == 2, 7e4, grads[4:8]), q[4:8])
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError, match="sample 9 "):
            shards.write(2, torch.tensor([[0.0] * 4, [0.0, bad, 0.0, 0.0]]), q[8:])
    with pytest.raises(NonFiniteError, match="output-to-loss gradient of sample 8 "):
        shards.write(2, grads[8:], torch.tensor([float("nan"), 0.0]))
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        shards.write(0, grads[:3], q[:3])
    assert shards.unwritten() == [0, 1, 2]
    with pytest.warns(UserWarning, match="float32 instead") as record:
        shards.write(0, grads[:4] * 1e-9, q[:4])
        shards.write(1, grads[4:8] * 1e-7, q[4:8])
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.train(0).write(2, grads[8:], q[8:])
        make_store(tmp_path / "bf16", feature_dtype="bfloat16").train(0).write(2, grads[8:] * 1e-9, q[8:])


def test_gram(tmp_path):
    store = make_store(tmp_path)
    gram = torch.tensor([[2.0, 1.0, 0, 0], [1, 3, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.float64)
    with pytest.raises(IncompleteStoreError, match="3 of 3"):
        store.write_gram(0, gram, 10)
    fill(store.train(0))
    assert store.read_gram(0) is None
    for bad, n in ((gram.half(), 10), (gram[:3], 10), (gram, 9)):
        with pytest.raises(ValueError, match="Gram"):
            store.write_gram(0, bad, n)
    with pytest.raises(NonFiniteError):
        store.write_gram(0, gram / 0, 10)
    store.write_gram(0, gram, 10)
    saved = store.read_gram(0)
    assert saved is not None and torch.equal(saved.matrix, gram) and (saved.trace, saved.n) == (7.0, 10)
    # rows that were computed anew with another outcome have another Gram matrix
    grads, q = rows(10, seed=1)
    store.train(0).write(0, grads[:4], q[:4])
    with pytest.raises(StoreError, match="content"):
        store.read_gram(0)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from /proc")
def test_slices_are_read_from_the_mapped_file(tmp_path):
    """Streaming must not read a shard to get at some of its rows: the tensor is a view of the mapped file."""
    store = make_store(tmp_path, train_size=4096, shard_size=4096, proj_dim=2048)  # 32 MiB
    shards = store.train(0)
    shards.write(0, torch.ones(4096, 2048), torch.ones(4096))
    assert Job(tmp_path / "report.json", memory_of_ten_rows, tmp_path).wait()["value"] < 16 * 2**20


def memory_of_ten_rows(directory: Path) -> int:
    """Count the bytes of memory that come with a shard where ten of its rows are used."""
    before = resident()
    shards = FeatureStore.load(directory).train(0)
    grads = shards.read(0, verify=False).grads
    assert grads[100:110].sum() == 20480
    return resident() - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def created(directory: Path, name: str) -> list[int]:
    """The files that this process was the first to create."""
    return [i for i in range(200) if create_bytes(directory / str(i), (name * 5000).encode())]


@pytest.mark.slow
def test_creation_has_one_winner(tmp_path):
    place = tmp_path / "files"
    place.mkdir()
    running = [Job(tmp_path / f"{name}.json", created, place, name) for name in "ab"]
    winners = [set(job.wait()["value"]) for job in running]
    assert winners[0].isdisjoint(winners[1]) and winners[0] | winners[1] == set(range(200))
    for i in range(200):
        assert (place / str(i)).read_text() == ("a" if i in winners[0] else "b") * 5000
    assert len(list(place.iterdir())) == 200
    assert not create_bytes(place / "0", b"later")


def fill_many(directory: Path) -> None:
    fill(make_store(directory, train_size=400, shard_size=2, proj_dim=512).train(0))


def temporary_in(directory: Path) -> str:
    path = directory / temporary_name()
    create_bytes(path, b"")
    return str(path)


@pytest.mark.slow
def test_a_killed_writer_loses_only_the_shard_in_flight(tmp_path):
    """SIGKILL at a random moment: the second run ends with the bytes of an uninterrupted one."""
    killed = tmp_path / "killed"
    job = Job(tmp_path / "report.json", fill_many, killed)
    wait_for(lambda: len(list(killed.glob("checkpoint-0/train-*"))) >= 20)
    job.kill()
    assert job.wait() is None and job.process.exitcode == -signal.SIGKILL
    shards = FeatureStore.load(killed).train(0)
    missing = shards.unwritten()
    assert 0 < len(missing) <= 180
    for index in set(range(200)) - set(missing):
        shards.read(index)  # what is there is complete
    fill(shards)
    whole = make_store(tmp_path / "whole", train_size=400, shard_size=2, proj_dim=512)
    fill(whole.train(0))
    finished = {name: digest for name, digest in digests(killed).items() if "hf_trak-tmp" not in name}
    assert finished == digests(tmp_path / "whole")


def killed_by_its_library(directory: Path) -> None:
    """End as a process that is killed while another library writes a temporary file of its own beside the path."""
    with atomic_path(directory / "shard") as temporary:
        (temporary.parent / ".tmpAb3xYz").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_temporary_files_of_the_writing_library_are_found_and_cleaned(tmp_path: Path) -> None:
    job = Job(tmp_path / "report.json", killed_by_its_library, tmp_path / "store")
    assert job.wait() is None
    (left,) = leftovers(tmp_path / "store")
    assert (left.alive, left.removable, left.stale) == (False, True, False)
    assert [path.parent for path in (tmp_path / "store").rglob(".tmp*")] == [left.path]
    for path in [*left.path.iterdir(), left.path]:
        os.utime(path, (0, 0))
    remove_stale_temporaries(tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())


def write_directory(path: Path, data: bytes) -> None:
    with atomic_directory(path) as directory:
        (directory / "file").write_bytes(data)


INTERRUPTED = [
    *((write_directory, place, call) for place, call in ((Path, "mkdir"), (shutil, "rmtree"))),
    *((write_bytes, place, call) for place, call in ((Path, "mkdir"), (os, "open"), (shutil, "rmtree"))),
    *((create_bytes, place, call) for place, call in ((os, "open"), (os, "link"), (Path, "unlink"))),
]


@pytest.mark.parametrize(("write", "place", "call"), INTERRUPTED)
def test_ctrl_c_leaves_no_temporary_files(write: Any, place: Any, call: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Its handler runs when a call of the system returns."""
    original, interrupted = getattr(place, call), list[Path]()

    def returns_interrupted(path: Any, *given: Any, **options: Any) -> Any:
        found = original(path, *given, **options)
        if not interrupted and "hf_trak-tmp" in str(path):
            interrupted.append(path)
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(place, call, returns_interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "written", b"content")
    assert interrupted and [one.name for one in tmp_path.iterdir()] in ([], ["written"])


def test_files_of_dead_processes_are_ignored_and_cleaned(tmp_path):
    store = make_store(tmp_path)
    directory = store.checkpoint_dir(0)
    job = Job(tmp_path / "report.json", temporary_in, directory)
    dead = Path(job.wait()["value"])
    alive = directory / dead.name.replace(str(job.process.pid), str(os.getpid()))
    elsewhere = directory / dead.name.replace("tmp-", "tmp-another-host-")
    for path in (dead, alive, elsewhere):
        path.write_bytes(b"half")
    fill(store.train(0))
    assert not store.train(0).unwritten() and dead.exists()  # an hour has to pass
    for path in (dead, alive, elsewhere):
        os.utime(path, (0, 0))
    remove_stale_temporaries(directory)
    assert not dead.exists() and alive.exists() and elsewhere.exists()


def test_a_directory_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows"
    for content in ("first", "second"):
        with atomic_directory(path) as temporary:
            (temporary / "inner").mkdir()
            (temporary / "inner" / "a.txt").write_text(content)
            assert not path.exists() or (path / "inner" / "a.txt").read_text() == "first"
        assert (path / "inner" / "a.txt").read_text() == content
    with pytest.raises(KeyError), atomic_directory(path) as temporary:
        (temporary / "b.txt").write_text("third")
        raise KeyError
    assert [entry.name for entry in path.rglob("*.txt")] == ["a.txt"]
    assert [entry.name for entry in path.parent.iterdir()] == ["rows"]  # nothing temporary is left
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"), atomic_directory(tmp_path / "file" / "rows"):
        pass


def test_a_store_of_another_format_version_is_refused(tmp_path):
    store = make_store(tmp_path)
    fill(store.train(0))
    (tmp_path / "trak_config.json").write_bytes(sealed_bytes({**store.config, "format_version": 2}))
    with pytest.raises(StoreError, match=r"trak_config\.json has format version 2, expected 1: .*`featurize`"):
        FeatureStore.load(tmp_path)
