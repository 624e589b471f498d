"""The savers of the `trak` API, used directly: files, registration, resuming, and what they refuse."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, NonFiniteError, StoreError
from hf_trak.savers import AbstractSaver, MmapSaver, ModelIDException, SafetensorsSaver
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import ShardPlan
from hf_trak.traker.savers import finalized_files
from hf_trak.traker.savers import safetensors_saver as safetensors_saver_module
from hf_trak.traker.savers.mmap_saver import read_scores
from hf_trak.traker.savers.partial import PartialShard, RowWriter

ROOT = Path(__file__).parents[2]
N, K = 10, 4
SAVERS = [SafetensorsSaver, MmapSaver]


def make_saver(kind: type[Any], path: Path, **changes: Any) -> AbstractSaver:
    arguments = {
        "save_dir": path,
        "metadata": {"JL dimension": K},
        "train_set_size": N,
        "proj_dim": K,
        "load_from_save_dir": True,
        "logging_level": logging.WARNING,
        "use_half_precision": False,
    }
    return kind(**{**arguments, **changes})


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, K, generator=generator), torch.rand(n, generator=generator)


def make_writer(path: Path, shard_size: int = 4, **changes: Any) -> RowWriter:
    arguments = {"width": K, "dtype": torch.float32, "identity": {"checkpoint": "a"}, **changes}
    return RowWriter(ShardSet(path, "train", ShardPlan(N, shard_size), **arguments))


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize("half", [False, True])
def test_write_and_read_back(tmp_path, kind, half):
    grads, q = rows(N)
    saver = make_saver(kind, tmp_path, use_half_precision=half)
    saver.register_model_id(3, False)
    assert saver.current_model_id == 3 and list(saver.model_ids) == [3]
    order = torch.randperm(N).tolist()
    saver.write_rows(order[:6], grads[order[:6]], q[order[:6]])
    assert saver.featurized().nonzero()[0].tolist() == sorted(order[:6])
    assert saver.featurized(order).tolist() == [True] * 6 + [False] * 4
    saver = make_saver(kind, tmp_path, use_half_precision=half)
    saver.load_current_store(3)
    saver.write_rows(order[6:], grads[order[6:]], q[order[6:]])
    assert saver.featurized().all()
    dtype = torch.float16 if half else torch.float32
    assert torch.equal(saver.read_grads(), grads.to(dtype))
    assert saver.finalized_with(3) is None
    saver.write_features(2 * grads, {"lambda_reg": 0.5})
    saver = make_saver(kind, tmp_path, use_half_precision=half)
    assert saver.finalized_with(3) == {"lambda_reg": 0.5}
    saver.load_current_store(3)
    features, found = saver.read_features()
    assert torch.equal(features, (2 * grads).to(dtype)) and torch.equal(found, q)


@pytest.mark.parametrize("kind", SAVERS)
def test_registering_twice(tmp_path, kind):
    saver = make_saver(kind, tmp_path)
    saver.register_model_id(0, False)
    with pytest.raises(ModelIDException, match="Model id 0"):
        saver.register_model_id(0, False)
    with pytest.raises(ModelIDException, match="Model id 0"):
        make_saver(kind, tmp_path, load_from_save_dir=False).register_model_id(0, False)
    saver.register_model_id(0, True)
    saver.register_model_id(np.int64(11), False)
    assert sorted(make_saver(kind, tmp_path).model_ids) == [0, 11]
    assert make_saver(kind, tmp_path, load_from_save_dir=False).model_ids == {}
    for bad in (-1, "0", 0.5, True):
        with pytest.raises(ValueError, match="model_id"):
            saver.register_model_id(bad, False)


@pytest.mark.parametrize("kind", SAVERS)
def test_metadata_is_compared_as_a_whole(tmp_path, kind):
    """Every key counts, whereas the `trak` package compares three of them."""
    make_saver(kind, tmp_path)
    for change in (
        {"metadata": {"JL dimension": 5}},
        {"metadata": {"JL dimension": K, "seed": 1}},
        {"metadata": {}},
        {"train_set_size": N + 1},
        {"proj_dim": K + 1},
        {"use_half_precision": True},
    ):
        with pytest.raises(ConfigMismatchError, match=r"saved .* given"):
            make_saver(kind, tmp_path, **change)
    make_saver(kind, tmp_path, metadata=[("JL dimension", K)])


@pytest.mark.parametrize("kind", SAVERS)
def test_experiments(tmp_path, kind):
    grads, _ = rows(3)
    saver = make_saver(kind, tmp_path)
    with pytest.raises(IncompleteStoreError, match="Model id 0"):
        saver.init_experiment("a", 3, 0)
    saver.register_model_id(0, False)
    for name in ("", "..", "a/b", "../../x"):
        with pytest.raises(ValueError, match=r"experiment|exp_name"):
            saver.init_experiment(name, 3, 0)
    for count in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="num_targets"):
            saver.init_experiment("a", count, 0)
    assert make_saver(kind, tmp_path).experiments == {}
    saver.open_experiment("a", 3, 0)
    saver.write_target_rows([2, 0], grads[[2, 0]])
    assert saver.scored().tolist() == [True, False, True] and saver.scored([1, 2]).tolist() == [False, True]
    saver = make_saver(kind, tmp_path)
    assert saver.experiments["a"]["num_targets"] == 3
    with pytest.raises(ConfigMismatchError, match=r"(?s)a.*3.*4"):
        saver.init_experiment("a", 4, 0)
    assert saver.load_experiment("a", 0)
    saver.write_target_rows([1], grads[[1]])
    assert torch.equal(saver.read_targets(), grads)
    saver.register_model_id(1, False)
    assert not saver.load_experiment("a", 1)
    scores = torch.arange(N * 3.0).reshape(N, 3)
    saver.write_scores("a", scores, [0])
    found = saver.read_scores("a") if isinstance(saver, SafetensorsSaver) else read_scores(tmp_path, "a")
    assert torch.equal(found, scores)


@pytest.mark.parametrize("kind", SAVERS)
def test_deleting_gradients(tmp_path, kind):
    grads, q = rows(N)
    saver = make_saver(kind, tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    saver.write_features(grads, {})
    saver.open_experiment("a", 3, 0)
    saver.write_target_rows(range(3), grads[:3])
    saver.del_grads(0)
    saver.del_grads(0, target=True)
    saver = make_saver(kind, tmp_path)
    saver.load_current_store(0)
    assert saver.featurized().all()
    assert torch.equal(saver.read_features()[0], grads)
    assert not saver.load_experiment("a", 0)
    saver.load_current_store(0)
    with pytest.raises(IncompleteStoreError, match="deleted"):
        saver.read_grads()
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not {name for name in left if name.startswith(("train-", "targets-", "grads", "a_grads"))}


@pytest.mark.parametrize("kind", SAVERS)
def test_values_are_checked_before_anything_is_written(tmp_path, kind):
    """A cast to float16 may overflow."""
    grads, q = rows(3)
    saver = make_saver(kind, tmp_path, use_half_precision=True)
    saver.register_model_id(0, False)
    bad = grads.clone()
    bad[1, 2] = 7e4
    with pytest.raises(NonFiniteError, match=r"sample 5 .*float16"):
        saver.write_rows([4, 5, 6], bad, q)
    bad[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="projected gradient of sample 5 "):
        saver.write_rows([4, 5, 6], bad, q)
    with pytest.raises(NonFiniteError, match="output-to-loss gradient of sample 6 "):
        saver.write_rows([4, 5, 6], grads, torch.tensor([0, 0, float("inf")]))
    with pytest.raises(NonFiniteError, match="feature of sample 0 "):
        saver.write_features(torch.full((N, K), 1e6), {})
    assert not saver.featurized().any()
    assert saver.finalized_with(0) is None


# -- MmapSaver --------------------------------------------------------------------------------------------------------


def test_directory_of_the_mmap_saver(tmp_path):
    grads, q = rows(N)
    saver = make_saver(MmapSaver, tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    saver.init_experiment("exp", 2, 0)
    saver.current_store["exp_scores"] = np.ones((N, 2), dtype=np.float32)
    saver.save_scores("exp")
    saver.serialize_current_model_id_metadata()
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files - {".experiments.lock"} == {
        "metadata.json",
        "experiments.json",
        "0.json",
        "scores/exp.mmap",
        *(
            f"0/{name}"
            for name in (
                "id_metadata.json",
                "grads.mmap",
                "out_to_loss.mmap",
                "features.mmap",
                "_is_featurized.mmap",
                "exp_grads.mmap",
                "exp_is_scored.mmap",
            )
        ),
    }
    load = lambda name: np.load(tmp_path / name, allow_pickle=False)  # noqa: E731
    assert np.array_equal(load("0/grads.mmap"), grads.numpy())
    assert np.array_equal(load("0/out_to_loss.mmap")[:, 0], q.numpy())
    assert load("0/_is_featurized.mmap").tolist() == [[1]] * N
    assert load("scores/exp.mmap").tolist() == [[1.0, 1.0]] * N
    experiments = json.loads((tmp_path / "experiments.json").read_text())["experiments"]
    assert experiments["exp"]["num_targets"] == 2
    assert json.loads((tmp_path / "0/id_metadata.json").read_text())["model_id"] == 0


def test_a_truncated_memory_map_is_not_extended_with_zeros(tmp_path):
    saver = make_saver(MmapSaver, tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), *rows(N))
    path = tmp_path / "0" / "grads.mmap"
    content = path.read_bytes()
    for broken in (content[:-8], content[:40], b"", content + b"xx"):
        path.write_bytes(broken)
        with pytest.raises(StoreError, match=r"grads\.mmap"):
            make_saver(MmapSaver, tmp_path).load_current_store(0)
        assert path.read_bytes() == broken
    np.save(tmp_path / "other.npy", np.zeros((N, K + 1), dtype=np.float32))
    path.write_bytes((tmp_path / "other.npy").read_bytes())
    with pytest.raises(StoreError, match=r"\(10, 5\).*expected float32 \(10, 4\)"):
        make_saver(MmapSaver, tmp_path).load_current_store(0)
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    path.write_bytes((tmp_path / "pickle.npy").read_bytes())
    with pytest.raises(StoreError, match=r"grads\.mmap"):
        make_saver(MmapSaver, tmp_path).load_current_store(0)
    path.unlink()
    with pytest.raises(StoreError, match="missing"):
        make_saver(MmapSaver, tmp_path).load_current_store(0)


def test_opening_modes_of_the_mmap_saver(tmp_path):
    saver = make_saver(MmapSaver, tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), *rows(N))
    saver.load_current_store(0, mode="r")
    with pytest.raises(ValueError, match="read-only"):
        saver.current_store["grads"][0] = 1
    saver.load_current_store(0, mode="w+")
    assert not saver.featurized().any()


def test_two_processes_may_add_experiments_at_once(tmp_path):
    make_saver(MmapSaver, tmp_path).register_model_id(0, False)
    script = (
        "import sys, pathlib, tests.test_savers as t\n"
        "saver = t.make_saver(t.MmapSaver, pathlib.Path(sys.argv[1]))\n"
        "for i in range(20): saver.init_experiment(f'{sys.argv[2]}{i}', 2, 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), n], env=environment) for n in "ab"]
    assert [process.wait() for process in running] == [0, 0]
    assert len(make_saver(MmapSaver, tmp_path).experiments) == 40


# -- SafetensorsSaver: rows that arrive in any order ------------------------------------------------------------------


def test_shards_appear_when_their_last_row_arrives(tmp_path):
    grads, q = rows(N)
    writer = make_writer(tmp_path)
    writer.write([0, 1, 2, 5, 9], grads[[0, 1, 2, 5, 9]], q[[0, 1, 2, 5, 9]])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".partial"] * 3
    writer.write([8, 3], grads[[8, 3]], q[[8, 3]])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "train-00000-of-00003.safetensors",
        "train-00001-of-00003.partial",
        "train-00002-of-00003.safetensors",
    ]
    with pytest.raises(IncompleteStoreError, match=r"3 of 10 rows .*\[4, 6, 7\]"):
        writer.read_all()
    writer.write([4, 6, 7], grads[[4, 6, 7]], q[[4, 6, 7]])
    assert torch.equal(writer.read_all()[0], grads) and torch.equal(writer.read_all()[1], q)
    assert not writer.shards.unwritten() and len(list(tmp_path.iterdir())) == 3


def test_a_finished_shard_has_the_bytes_of_one_written_at_once(tmp_path):
    grads, q = rows(N)
    writer = make_writer(tmp_path / "rows")
    for row in torch.randperm(N).tolist():
        writer.write([row], grads[[row]], q[[row]])
    whole = make_writer(tmp_path / "whole").shards
    for index in range(3):
        part = whole.plan.rows(index)
        whole.write(index, grads[part.start : part.stop], q[part.start : part.stop])
        assert writer.shards.path(index).read_bytes() == whole.path(index).read_bytes()


@pytest.mark.parametrize("where", ["grads", "out_to_loss", "hashes"])
def test_a_row_that_is_there_in_part_is_missing(tmp_path, where):
    """As after a power failure, when the mark of a row reached the disk and its values did not."""
    grads, q = rows(N)
    writer = make_writer(tmp_path)
    writer.write([0, 1, 2], grads[:3], q[:3])
    partial = PartialShard(writer.shards, 0)
    partial.__dict__[where][1] = 7
    del partial
    writer = make_writer(tmp_path)
    assert writer.done()[:4].tolist() == [True, False, True, False]
    writer.write([1, 3], grads[[1, 3]], q[[1, 3]])
    assert torch.equal(writer.shards.read(0).grads, grads[:4])


def test_values_without_a_mark_are_missing(tmp_path):
    grads, q = rows(N)
    writer = make_writer(tmp_path)
    PartialShard(writer.shards, 0).write(np.arange(4), grads[:4], q[:4])
    assert not writer.done().any()


def test_killed_between_the_last_row_and_the_shard(tmp_path):
    grads, q = rows(N)
    writer = make_writer(tmp_path, shard_size=N)
    partial = PartialShard(writer.shards, 0)
    partial.write(np.arange(N), grads, q)
    partial.mark(np.arange(N))
    assert writer.done().all() and writer.shards.unwritten()
    assert torch.equal(make_writer(tmp_path, shard_size=N).read_all()[0], grads)
    assert not writer.shards.unwritten()


@pytest.mark.parametrize(
    "change", [{"identity": {"checkpoint": "b"}}, {"width": 5}, {"dtype": torch.float16}], ids=str
)
def test_an_unfinished_shard_of_another_run_is_refused(tmp_path, change):
    make_writer(tmp_path).write([0], *rows(1))
    with pytest.raises(StoreError, match=r"\.partial.*Delete this file"):
        make_writer(tmp_path, **change).done()


@pytest.mark.parametrize("keep", [0, 100, 4200, -1])
def test_a_truncated_unfinished_shard_is_refused(tmp_path, keep):
    make_writer(tmp_path, shard_size=2000, width=K).write([0], *rows(1))
    path = next(tmp_path.glob("*.partial"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StoreError, match=r"truncated.*Delete this file"):
        make_writer(tmp_path, shard_size=2000).done()


def test_two_writers_share_an_unfinished_shard(tmp_path):
    grads, q = rows(N)
    first, second = make_writer(tmp_path, shard_size=N), make_writer(tmp_path, shard_size=N)
    for row in range(N):
        writer = (first, second)[row % 2]
        assert (second, first)[row % 2].done().sum() == row
        writer.write([row], grads[[row]], q[[row]])
    assert torch.equal(first.read_all()[0], grads) and torch.equal(second.read_all()[0], grads)
    second.write([0], grads[[5]], q[[5]])  # rows of a finished shard stay as they are
    assert torch.equal(make_writer(tmp_path, shard_size=N).read_all()[0], grads)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_more_unfinished_shards_than_files_are_kept_open(tmp_path):
    grads = torch.randn(400, K)
    writer = RowWriter(ShardSet(tmp_path, "train", ShardPlan(400, 2), K, torch.float32, {"checkpoint": "a"}))
    for start in (0, 1):
        for row in range(start, 400, 2):
            writer.write([row], grads[[row]], torch.zeros(1))
        if start == 0:
            assert len(list(tmp_path.glob("*.partial"))) == 200 and len(writer._open) <= 64
    assert torch.equal(writer.read_all()[0], grads)
    assert not list(tmp_path.glob("*.partial"))


def test_large_rows_are_cut_into_many_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_saver_module, "SHARD_BYTES", 3 * K * 4)
    grads, q = rows(N)
    saver = make_saver(SafetensorsSaver, tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    saver.write_features(grads + 1, {"lambda_reg": 0.0})
    saver.open_experiment("a", 7, 0)
    saver.write_target_rows(range(7), grads[:7])
    assert len(list((tmp_path / "checkpoint-0").glob("train-*-of-00004.safetensors"))) == 4
    assert len(list((tmp_path / "checkpoint-0").glob("features-*-of-00004.safetensors"))) == 4
    assert len(list((tmp_path / "experiments/a/checkpoint-0").glob("targets-*-of-00003.safetensors"))) == 3
    saver = make_saver(SafetensorsSaver, tmp_path)
    saver.load_current_store(0)
    assert torch.equal(saver.read_grads(), grads)
    assert torch.equal(saver.read_features()[0], grads + 1) and torch.equal(saver.read_features()[1], q)
    assert saver.load_experiment("a", 0) and torch.equal(saver.read_targets(), grads[:7])


def test_corrupted_features_and_scores_are_refused(tmp_path):
    grads, q = rows(N)
    saver = make_saver(SafetensorsSaver, tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    saver.write_features(grads, {"lambda_reg": 0.0})
    saver.open_experiment("a", 3, 0)
    saver.write_scores("a", torch.zeros(N, 3), [0])
    for path, read, remedy in (
        (next(tmp_path.glob("checkpoint-0/features-*.safetensors")), saver.read_features, "features.json"),
        (tmp_path / "scores/a/scores.safetensors", lambda: saver.read_scores("a"), "Delete"),
    ):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        os.utime(path, (1, 1))
        with pytest.raises(StoreError, match=f"checksum.*{remedy}"):
            read()


def test_finalizing_that_was_killed_does_not_count(tmp_path, monkeypatch):
    """Features of the first shards must not be taken for those of all."""
    monkeypatch.setattr(safetensors_saver_module, "SHARD_BYTES", 3 * K * 4)
    grads, q = rows(N)
    saver = make_saver(SafetensorsSaver, tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    saver.write_features(grads, {"lambda_reg": 0.0})
    write = finalized_files.write_tensors
    written = []

    def fail(path: Path, *args: Any, **kwargs: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, *args, **kwargs)

    monkeypatch.setattr(finalized_files, "write_tensors", fail)
    with pytest.raises(KeyboardInterrupt):
        saver.write_features(grads * 2, {"lambda_reg": 1.0})
    saver = make_saver(SafetensorsSaver, tmp_path)
    assert saver.finalized_with(0) is None
    saver.load_current_store(0)
    with pytest.raises(IncompleteStoreError, match="finalize_features"):
        saver.read_features()
