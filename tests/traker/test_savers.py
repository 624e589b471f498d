"""The savers of the `trak` API, used directly: files, registration, resuming, and what they refuse."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_jobs import Job

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, NonFiniteError, StoreError
from hf_trak.savers import MmapSaver, ModelIDException
from hf_trak.traker.savers.row_files import RowFile

N, K = 10, 4


def make_saver(path: Path, **changes: Any) -> MmapSaver:
    arguments = {
        "save_dir": path,
        "metadata": {"JL dimension": K},
        "train_set_size": N,
        "proj_dim": K,
        "load_from_save_dir": True,
        "logging_level": logging.WARNING,
        "use_half_precision": False,
    }
    return MmapSaver(**{**arguments, **changes})


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, K, generator=generator), torch.rand(n, generator=generator)


@pytest.mark.parametrize("half", [False, True])
def test_write_and_read_back(tmp_path, half):
    grads, q = rows(N)
    saver = make_saver(tmp_path, use_half_precision=half)
    saver.register_model_id(3, False)
    assert saver.current_model_id == 3 and list(saver.model_ids) == [3]
    order = torch.randperm(N).tolist()
    saver.write_rows(order[:6], grads[order[:6]], q[order[:6]])
    assert saver.featurized().nonzero()[0].tolist() == sorted(order[:6])
    assert saver.featurized(order).tolist() == [True] * 6 + [False] * 4
    saver = make_saver(tmp_path, use_half_precision=half)
    saver.load_current_store(3)
    saver.write_rows(order[6:], grads[order[6:]], q[order[6:]])
    assert saver.featurized().all()
    dtype = torch.float16 if half else torch.float32
    assert torch.equal(saver.read_grads(), grads.to(dtype))
    assert saver.finalized_with(3) is None
    saver.write_features(2 * grads, {"lambda_reg": 0.5})
    saver = make_saver(tmp_path, use_half_precision=half)
    assert saver.finalized_with(3) == {"lambda_reg": 0.5}
    saver.load_current_store(3)
    features, found = saver.read_features()
    assert torch.equal(features, (2 * grads).to(dtype)) and torch.equal(found, q)


def test_registering_twice(tmp_path):
    saver = make_saver(tmp_path)
    saver.register_model_id(0, False)
    with pytest.raises(ModelIDException, match="Model id 0"):
        saver.register_model_id(0, False)
    with pytest.raises(ModelIDException, match="Model id 0"):
        make_saver(tmp_path, load_from_save_dir=False).register_model_id(0, False)
    saver.register_model_id(0, True)
    saver.register_model_id(np.int64(11), False)
    assert sorted(make_saver(tmp_path).model_ids) == [0, 11]
    assert make_saver(tmp_path, load_from_save_dir=False).model_ids == {}
    for bad in (-1, "0", 0.5, True):
        with pytest.raises(ValueError, match="model_id"):
            saver.register_model_id(bad, False)


def test_metadata_is_compared_as_a_whole(tmp_path):
    """Every key counts, whereas the `trak` package compares three of them."""
    make_saver(tmp_path)
    for change in (
        {"metadata": {"JL dimension": 5}},
        {"metadata": {"JL dimension": K, "seed": 1}},
        {"metadata": {}},
        {"train_set_size": N + 1},
        {"proj_dim": K + 1},
        {"use_half_precision": True},
    ):
        with pytest.raises(ConfigMismatchError, match=r"saved .* given"):
            make_saver(tmp_path, **change)
    make_saver(tmp_path, metadata=[("JL dimension", K)])


def test_experiments(tmp_path):
    grads, _ = rows(3)
    saver = make_saver(tmp_path)
    with pytest.raises(IncompleteStoreError, match="Model id 0"):
        saver.init_experiment("a", 3, 0)
    saver.register_model_id(0, False)
    for name in ("", "..", "a/b", "../../x"):
        with pytest.raises(ValueError, match=r"experiment|exp_name"):
            saver.init_experiment(name, 3, 0)
    for count in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="num_targets"):
            saver.init_experiment("a", count, 0)
    assert make_saver(tmp_path).experiments == {}
    saver.open_experiment("a", 3, 0)
    saver.write_target_rows([2, 0], grads[[2, 0]])
    assert saver.scored().tolist() == [True, False, True] and saver.scored([1, 2]).tolist() == [False, True]
    saver = make_saver(tmp_path)
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
    assert torch.equal(saver.read_scores("a"), scores)


def test_deleting_gradients(tmp_path):
    grads, q = rows(N)
    saver = make_saver(tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    saver.write_features(grads, {})
    saver.open_experiment("a", 3, 0)
    saver.write_target_rows(range(3), grads[:3])
    saver.del_grads(0)
    saver.del_grads(0, target=True)
    saver = make_saver(tmp_path)
    saver.load_current_store(0)
    assert saver.featurized().all()
    assert torch.equal(saver.read_features()[0], grads)
    assert not saver.load_experiment("a", 0)
    saver.load_current_store(0)
    with pytest.raises(IncompleteStoreError, match="deleted"):
        saver.read_grads()
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not {name for name in left if name.startswith(("grads", "a_grads"))}


def test_values_are_checked_before_anything_is_written(tmp_path):
    """A cast to float16 may overflow."""
    grads, q = rows(3)
    saver = make_saver(tmp_path, use_half_precision=True)
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


def test_directory_of_the_mmap_saver(tmp_path):
    grads, q = rows(N)
    saver = make_saver(tmp_path)
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
    saver = make_saver(tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), *rows(N))
    path = tmp_path / "0" / "grads.mmap"
    content = path.read_bytes()
    for broken in (content[:-8], content[:40], b"", content + b"xx"):
        path.write_bytes(broken)
        with pytest.raises(StoreError, match=r"grads\.mmap"):
            make_saver(tmp_path).load_current_store(0)
        assert path.read_bytes() == broken
    np.save(tmp_path / "other.npy", np.zeros((N, K + 1), dtype=np.float32))
    path.write_bytes((tmp_path / "other.npy").read_bytes())
    with pytest.raises(StoreError, match=r"\(10, 5\).*expected float32 \(10, 4\)"):
        make_saver(tmp_path).load_current_store(0)
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    path.write_bytes((tmp_path / "pickle.npy").read_bytes())
    with pytest.raises(StoreError, match=r"grads\.mmap"):
        make_saver(tmp_path).load_current_store(0)
    path.unlink()
    with pytest.raises(StoreError, match="missing"):
        make_saver(tmp_path).load_current_store(0)


def test_opening_modes_of_the_mmap_saver(tmp_path):
    saver = make_saver(tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), *rows(N))
    saver.load_current_store(0, mode="r")
    with pytest.raises(ValueError, match="read-only"):
        saver.current_store["grads"][0] = 1
    saver.load_current_store(0, mode="w+")
    assert not saver.featurized().any()


def test_minus_one_stands_for_the_saved_number_of_targets(tmp_path):
    saver = make_saver(tmp_path)
    saver.register_model_id(0, False)
    saver.open_experiment("a", 3, 0)
    saver.load_current_store(0, "a", -1)
    assert saver.current_store["a_grads"].shape == (3, K)


def test_a_file_without_checksums_is_compared_with_nothing(tmp_path):
    file = RowFile("marks", tmp_path / "marks.mmap", (N, 1), np.dtype("int32"), "Again.", checked=False)
    file.create()
    wrong, bare = file.open("r").compare(np.arange(N), seed=0)
    assert len(wrong) == len(bare) == 0


def add_experiments(directory: Path, name: str) -> None:
    saver = make_saver(directory)
    for i in range(20):
        saver.init_experiment(f"{name}{i}", 2, 0)


@pytest.mark.usefixtures("jobs_with_one_thread")
def test_two_processes_may_add_experiments_at_once(tmp_path):
    make_saver(tmp_path / "run").register_model_id(0, False)
    running = [Job(tmp_path / f"{name}.json", add_experiments, tmp_path / "run", name) for name in "ab"]
    assert [job.wait() for job in running] == [{"value": None}] * 2
    assert len(make_saver(tmp_path / "run").experiments) == 40


def test_corrupted_features_and_scores_are_refused(tmp_path):
    grads, q = rows(N)
    saver = make_saver(tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    saver.write_features(grads, {"lambda_reg": 0.0})
    saver.open_experiment("a", 3, 0)
    saver.write_scores("a", torch.zeros(N, 3), [0])
    saver.load_current_store(0)
    for path, read, remedy in (
        (tmp_path / "0" / "features.mmap", saver.read_features, "finalize_features"),
        (tmp_path / "scores" / "a.mmap", lambda: saver.read_scores("a"), "finalize_scores"),
    ):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        with open(path, "r+b") as file:
            file.write(content)
        os.utime(path, (1, 1))
        with pytest.raises(StoreError, match=f"checksum.*{remedy}"):
            read()


def test_scores_of_features_that_were_replaced_are_refused(tmp_path):
    """They stay valid when the features are deleted, and when the same features are written again."""
    grads, q = rows(N)
    saver = make_saver(tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    scores = torch.arange(N * 3.0).reshape(N, 3)
    for written in (0.0, 1.0):
        saver.write_features(grads, {"lambda_reg": written})
        saver.open_experiment("a", 3, 0)
        saver.write_scores("a", scores, [0])
        saver.load_current_store(0)
    assert torch.equal(saver.read_scores("a"), scores)
    saver.write_features(grads, {"lambda_reg": 1.0})
    assert torch.equal(saver.read_scores("a"), scores)
    saver.write_features(grads, {"lambda_reg": 2.0})
    with pytest.raises(StoreError, match=r"a\.mmap was computed from other features.*id_metadata.*finalize_scores"):
        saver.read_scores("a")
    (tmp_path / "0" / "features.mmap").unlink()
    saver.load_current_store(0)
    assert torch.equal(saver.read_scores("a"), scores)


def test_finalizing_that_was_killed_does_not_count(tmp_path, monkeypatch):
    """Features with some new rows must be taken neither for the old ones nor for the new ones."""
    grads, q = rows(N)
    saver = make_saver(tmp_path)
    saver.register_model_id(0, False)
    saver.write_rows(range(N), grads, q)
    saver.write_features(grads, {"lambda_reg": 0.0})

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RowFile, "seal", killed)
    with pytest.raises(KeyboardInterrupt):
        saver.write_features(grads * 2, {"lambda_reg": 1.0})
    assert make_saver(tmp_path).finalized_with(0) is None
