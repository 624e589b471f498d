"""A first pass over the first bytes of every row, and a second one over the whole rows of the best."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from digit_models import DigitNet, digits, full_scores, make, trained_net

from hf_trak import Index, TrakAttributor
from hf_trak.errors import StoreError
from hf_trak.runtime.processes import share_of
from hf_trak.scores import shortlist as first_pass
from hf_trak.store.revised import PrefixStore, RevisedPlan

N, K = 700, 16384
FIRST = 512


@pytest.fixture(scope="module")
def nets() -> list[DigitNet]:
    return [trained_net(digits(0, N), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def attributor(nets, tmp_path_factory) -> TrakAttributor:
    directory = tmp_path_factory.mktemp("store")
    options = {"proj_dim": K, "feature_dtype": "int2", "shard_size": 128, "per_device_batch_size": 64}
    return make(nets[0], directory, digits(0, N), **options).featurize(nets)


def column(scored, name: str) -> np.ndarray:
    return np.stack(scored.with_format("numpy")[name][:])


@pytest.mark.slow
def test_the_scores_are_those_of_whole_rows(attributor):
    """Listed rows have the scores of the full scan, and none of the listed ones is better than those returned."""
    targets = digits(1000, 1006)
    everything = full_scores(attributor, targets)
    found = attributor.attribute(targets, top_k=5, method=Index(first_pass_bytes=FIRST, candidates=20))
    indices, scores = column(found, "trak_indices"), column(found, "trak_scores")
    for target in range(6):
        np.testing.assert_allclose(scores[target], everything[indices[target], target], rtol=1e-4)
    assert (np.diff(scores, axis=1) <= 0).all()


@pytest.mark.slow
def test_all_rows_as_candidates_are_the_full_scan(attributor):
    targets = digits(1000, 1006)
    expected = attributor.attribute(targets, top_k=5)
    found = attributor.attribute(targets, top_k=5, method=Index(first_pass_bytes=FIRST, candidates=N))
    for name in ("trak_indices", "trak_harmful_indices"):
        np.testing.assert_array_equal(column(found, name), column(expected, name))
    assert found.column_names == expected.column_names
    assert found.features == expected.features


@pytest.mark.slow
def test_most_of_the_best_rows_are_found(attributor):
    """An eighth of the bytes, and the whole rows of 120 candidates of 700 for each target and end."""
    targets = digits(1000, 1020)
    expected = column(attributor.attribute(targets, top_k=10), "trak_indices")
    found = column(
        attributor.attribute(targets, top_k=10, method=Index(first_pass_bytes=FIRST, candidates=60)), "trak_indices"
    )
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(expected, found, strict=True)]) > 0.9


def test_the_first_columns_are_a_store_of_their_own(attributor):
    store = PrefixStore(attributor.features.store, FIRST)
    assert store.proj_dim == 2048
    for whole, part in zip(attributor.features.store.train(0), store.train(0), strict=True):
        torch.testing.assert_close(part.grads, whole.grads[:, :2048], rtol=0, atol=0)
        torch.testing.assert_close(part.out_to_loss, whole.out_to_loss, rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2, 3, 9])
@pytest.mark.parametrize("together", [1, 4, 1000])
def test_every_candidate_is_read_once_in_order(monkeypatch, world, together):
    """By any number of processes, from shards of unequal sizes, some without a candidate."""
    monkeypatch.setattr(first_pass, "_ROWS", together)
    plan = RevisedPlan(100, 40, (0, 7, 8, 48, 60, 61, 100))
    rows = torch.tensor([0, 6, 8, 9, 30, 47, 60, 61, 62, 99])
    found = []
    for rank in range(world):
        processes = SimpleNamespace(share=lambda count, rank=rank: share_of(count, rank, world))
        parts = list(first_pass._parts(plan, rows, processes))
        assert all(sum(map(len, part.wanted.values())) >= together for part in parts[:-1])
        for part in parts:
            assert part.start == len(found)
            found += [plan.rows(index).start + row for index, chosen in part.wanted.items() for row in chosen]
    assert found == rows.tolist()


@pytest.mark.slow
def test_what_a_first_pass_misses_is_measured(attributor):
    measured = [attributor.fidelity(of=Index(first_pass_bytes=count), targets=12) for count in (512, 2048, 4096)]
    correlations = [one.scores.mean_spearman for one in measured]
    assert correlations == sorted(correlations)
    assert correlations[0] > 0.3
    assert correlations[2] == pytest.approx(1.0, abs=1e-6)  # 4,096 bytes are whole rows
    assert (measured[0].bytes_before, measured[0].bytes_after) == (4100, 516)


@pytest.mark.slow
def test_groups_of_targets(attributor):
    targets = digits(1000, 1012)
    expected = attributor.attribute(targets, top_k=5, group_by="source")
    found = attributor.attribute(
        targets, top_k=5, group_by="source", method=Index(first_pass_bytes=FIRST, candidates=N)
    )
    np.testing.assert_array_equal(column(found, "trak_indices"), column(expected, "trak_indices"))
    assert found["source"] == expected["source"]


def test_rows_left_out_and_rows_added(attributor):
    """The first bytes of a revision are those of its rows; all rows as candidates are the full scan."""
    targets, more = digits(1000, 1006), digits(1100, 1110)
    revised = attributor.exclude([0, 5, N - 1]).extend(more)
    expected = revised.attribute(targets, top_k=5, method=Index())
    found = revised.attribute(targets, top_k=5, method=Index(first_pass_bytes=FIRST, candidates=N + len(more)))
    for name in ("trak_indices", "trak_scores", "trak_harmful_indices"):
        np.testing.assert_array_equal(column(found, name), column(expected, name))
    whole, first = revised.features.store.train(0), PrefixStore(revised.features.store, FIRST).train(0)
    for index in range(len(whole.plan)):
        a, b = whole.read(index), first.read(index)
        assert (a.start, a.stop) == (b.start, b.stop) and torch.equal(a.out_to_loss, b.out_to_loss)
        assert len(b.coded.blocks) == 1 and torch.equal(a.coded.blocks[0], b.coded.blocks[0])


def _flip(path: Path, tensor: str) -> None:
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8:begin])[tensor]["data_offsets"]
    data[begin + start + 5] ^= 1
    path.write_bytes(data)


@pytest.mark.few(2)
@pytest.mark.parametrize("tensor", ["scale", "codes.00", "out_to_loss", "codes.01"])
def test_what_is_read_is_checked(nets, tmp_path, tensor):
    options = {"proj_dim": K, "feature_dtype": "int2", "shard_size": 32, "per_device_batch_size": 32}
    small = make(nets[0], tmp_path, digits(0, 64), **options).featurize()
    path = small.features.store.train(0).path(1)
    _flip(path, tensor)
    shards = PrefixStore(small.features.store, FIRST).train(0)
    if tensor == "codes.01":
        shards.read(1)  # the second block is not read
    else:
        with pytest.raises(StoreError, match=f"checksum of its tensors is not the one .* in '{tensor}'"):
            shards.read(1)
    with pytest.raises(StoreError, match="checksum"):
        small.features.store.train(0).read(1)


def test_truncated_files_and_small_rows(nets, tmp_path):
    options = {"proj_dim": 3000, "feature_dtype": "int1", "shard_size": 32}
    small = make(nets[0], tmp_path, digits(0, 64), **options).featurize()
    # 375 bytes are one block, which is all of the row.
    targets = digits(1000, 1003)
    expected = small.attribute(targets, top_k=3)
    found = small.attribute(targets, top_k=3, method=Index(first_pass_bytes=512))
    np.testing.assert_array_equal(column(found, "trak_indices"), column(expected, "trak_indices"))
    with pytest.raises(ValueError, match="first block"):
        small.attribute(targets, top_k=3, method=Index(first_pass_bytes=100))
    path = small.features.store.train(0).path(0)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreError, match="cannot be"):
        PrefixStore(small.features.store, 512).train(0).read(0)


def test_arguments_that_do_not_fit(attributor, nets, tmp_path):
    targets = digits(1000, 1003)
    with pytest.raises(ValueError, match="top_k"):
        attributor.attribute(targets, top_k=None, method=Index(first_pass_bytes=FIRST))
    with pytest.raises(ValueError, match="candidates"):
        attributor.attribute(targets, top_k=5, method=Index(first_pass_bytes=FIRST, candidates=4))
    with pytest.raises(ValueError, match="first_pass_bytes"):
        attributor.attribute(targets, top_k=5, method=Index(first_pass_bytes=0))
    floats = make(nets[0], tmp_path, digits(0, 64)).featurize()
    with pytest.raises(ValueError, match="hf-trak convert"):
        floats.attribute(targets, top_k=5, method=Index(first_pass_bytes=FIRST))


@pytest.mark.slow
def test_a_rank_that_is_larger_than_the_first_columns(nets, tmp_path):
    options = {"proj_dim": 1100, "feature_dtype": "int8", "shard_size": 256, "per_device_batch_size": 64}
    one = make(nets[0], tmp_path, digits(0, N), solver="low_rank-600", **options).featurize()
    found = one.attribute(digits(1000, 1003), top_k=3, method=Index(first_pass_bytes=512))
    assert column(found, "trak_indices").shape == (3, 3)
