"""Training rows left out or added: equal to featurizing the changed dataset from scratch, without doing so."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from digit_models import DigitNet, digits, full_scores, make, relative_error, trained_net
from hypothesis import given, settings
from hypothesis import strategies as st
from store_jobs import Job, start_group

from hf_trak import TrakAttributor
from hf_trak.errors import CheckpointMismatchError, HfTrakError, IncompleteStoreError, StoreError
from hf_trak.featurize.featurizer import Featurizer
from hf_trak.featurize.revising import _ranges
from hf_trak.store.tables import write_table

N_TRAIN, SHARD = 61, 16
DROPPED = [0, 5, 6, *range(16, 32), 60]
"""The first row, the last one, two in the middle of a shard, and one whole shard."""


@pytest.fixture(scope="module")
def nets() -> list[DigitNet]:
    return [trained_net(digits(0, N_TRAIN), seed=seed) for seed in (0, 1)]


@pytest.fixture
def original(nets, tmp_path) -> TrakAttributor:
    return make(nets[0], tmp_path / "store", digits(0, N_TRAIN)).featurize(nets)


@pytest.fixture(scope="module")
def targets() -> Dataset:
    return digits(1000, 1009)


@pytest.fixture
def featurized_rows(monkeypatch) -> list[int]:
    """The numbers of all rows whose gradients are taken, without the two that are compared with what is stored."""
    seen: list[int] = []
    features, compare = Featurizer.features_of, Featurizer._compare

    def compared(self: Featurizer, *args: Any) -> None:
        before = list(seen)
        compare(self, *args)
        assert len(seen) <= len(before) + 2
        seen[:] = before

    monkeypatch.setattr(Featurizer, "_compare", compared)

    def counted(self: Featurizer, rows: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(rows)
        return features(self, rows, *args, **kwargs)

    monkeypatch.setattr(Featurizer, "features_of", counted)
    return seen


def contents(directory: Path) -> dict[str, tuple[str, int]]:
    """Digest and modification time of every training shard and Gram matrix of the original."""
    return {
        str(path.relative_to(directory)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(directory.glob("checkpoint-*/*.safetensors"))
    }


def grams(attributor: TrakAttributor) -> list[torch.Tensor]:
    return [attributor.features.store.read_gram(model_id).matrix for model_id in attributor.features.store.model_ids]


def assert_same(revised: TrakAttributor, scratch: TrakAttributor, targets: Dataset) -> None:
    """Features to rounding, XᵀX, scores, self-influence."""
    for model_id in (0, 1):
        got, expected = (one.features.store.train(model_id) for one in (revised, scratch))
        for name in ("grads", "out_to_loss"):
            rows = [torch.cat([getattr(shard, name) for shard in shards]) for shards in (got, expected)]
            assert torch.allclose(*rows, rtol=1e-4, atol=1e-5 * float(rows[1].abs().max()))
    assert relative_error(full_scores(revised, targets), full_scores(scratch, targets)) < 1e-4
    for got, expected in zip(grams(revised), grams(scratch), strict=True):
        assert relative_error(got, expected) < 1e-5
    assert relative_error(revised.self_influence(), scratch.self_influence()) < 1e-4


@pytest.mark.slow
def test_rows_left_out(original, nets, targets, tmp_path, featurized_rows):
    full_scores(original, targets)
    before = contents(Path(original.args.output_dir))
    featurized_rows.clear()
    smaller = original.exclude(DROPPED)
    scores = full_scores(smaller, targets)
    assert featurized_rows == []  # neither training rows nor targets
    assert contents(Path(original.args.output_dir)) == before
    kept = digits(0, N_TRAIN).select([i for i in range(N_TRAIN) if i not in DROPPED])
    assert smaller.train_dataset["pixel_values"][:] == kept["pixel_values"][:]
    assert scores.shape == (len(kept), len(targets))
    assert_same(smaller, make(nets[0], tmp_path / "scratch", kept).featurize(nets), targets)


@pytest.mark.slow
def test_rows_added(original, nets, targets, tmp_path, featurized_rows):
    full_scores(original, targets)
    before = contents(Path(original.args.output_dir))
    featurized_rows.clear()
    larger = original.extend(digits(200, 219))
    assert sorted(featurized_rows) == sorted([*range(N_TRAIN, N_TRAIN + 19)] * 2)  # two checkpoints
    featurized_rows.clear()
    full_scores(larger, targets)
    assert featurized_rows == []
    assert contents(Path(original.args.output_dir)) == before
    both = Dataset.from_dict({name: digits(0, N_TRAIN)[name][:] + digits(200, 219)[name][:] for name in COLUMNS})
    assert larger.train_dataset["labels"][:] == both["labels"][:]
    assert_same(larger, make(nets[0], tmp_path / "scratch", both).featurize(nets), targets)


COLUMNS = ("pixel_values", "labels", "source")


@pytest.mark.slow
def test_a_revision_of_a_revision(original, nets, targets, tmp_path):
    """Left out, added, and left out again, among them an added row."""
    revised = original.exclude([3, 4]).extend(digits(200, 205)).exclude([0, 59, 61])
    rows = [i for i in range(N_TRAIN) if i not in (3, 4)]
    first = digits(0, N_TRAIN).select(rows)
    both = Dataset.from_dict({name: first[name][:] + digits(200, 205)[name][:] for name in COLUMNS})
    expected = both.select([i for i in range(len(both)) if i not in (0, 59, 61)])
    assert revised.train_dataset["pixel_values"][:] == expected["pixel_values"][:]
    assert_same(revised, make(nets[0], tmp_path / "scratch", expected).featurize(nets), targets)


@pytest.mark.slow
def test_more_than_half_left_out_sums_the_rest(original, nets, targets, tmp_path):
    few = [2, 20, 33, 50, 59]
    smaller = original.exclude(np.setdiff1d(np.arange(N_TRAIN), few))
    scratch = make(nets[0], tmp_path / "scratch", digits(0, N_TRAIN).select(few)).featurize(nets)
    assert_same(smaller, scratch, targets)


def test_a_row_that_outweighs_all_others_is_left_out(targets, tmp_path):
    """A number such as 9,999,999 for a missing value: the sum over all rows has no digits left for the others."""
    net = DigitNet()
    net.body, net.head = torch.nn.Flatten(), torch.nn.Linear(64, 10)
    pixels = np.array(digits(0, N_TRAIN)["pixel_values"][:])
    pixels[7] *= 1e8
    rows = digits(0, N_TRAIN).remove_columns("pixel_values").add_column("pixel_values", pixels.tolist())
    smaller = make(net, tmp_path / "store", rows).featurize().exclude([7])
    kept = rows.select([row for row in range(N_TRAIN) if row != 7])
    expected = full_scores(make(net, tmp_path / "scratch", kept).featurize(), targets)
    assert relative_error(full_scores(smaller, targets), expected) < 1e-5


def test_the_gram_matrix_is_corrected_not_summed_anew(original, monkeypatch):
    """Of four shards only the one that loses a row is read for XᵀX."""
    read = []
    from hf_trak.store.shard_set import ShardSet

    plain = ShardSet.read

    def counted(self, index, verify=None):
        read.append((self.path(index).parent.name, index))
        return plain(self, index, verify)

    monkeypatch.setattr(ShardSet, "read", counted)
    smaller = original.exclude([17])
    smaller.features.store.read_gram(0)
    assert read == [("checkpoint-0", 1)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_rows_of_any_shards(data, tmp_path_factory):
    """Stores without a model: shards of random numbers, any cut, any rows left out, any number added."""
    from hf_trak.store.revised import RevisedStore
    from hf_trak.store.store import FeatureStore

    n = data.draw(st.integers(1, 30), "n")
    size = data.draw(st.integers(1, 12), "shard_size")
    excluded = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1), "excluded"))
    added = data.draw(st.integers(0, 9), "added")
    directory = tmp_path_factory.mktemp("store")
    generator = torch.Generator().manual_seed(n * 100 + size)

    def filled(path: Path, rows: int) -> tuple[FeatureStore, torch.Tensor]:
        config = {"train_size": rows, "proj_dim": 3, "feature_dtype": "float32", "shard_size": size}
        store = FeatureStore.open(path, config)
        store.register_checkpoint(0, "weights")
        matrix = torch.randn(rows, 3, generator=generator)
        shards = store.train(0)
        for index in range(len(shards)):
            part = matrix[shards.plan.rows(index).start : shards.plan.rows(index).stop]
            shards.write(index, part, part.sum(dim=1))
        store.write_gram(0, matrix.double().T @ matrix.double(), rows)
        return store, matrix

    base, matrix = filled(directory / "base", n)
    more, new_rows = filled(directory / "added", added) if added else (None, torch.empty(0, 3))
    expected = torch.cat([matrix[[i for i in range(n) if i not in excluded]], new_rows])
    config = {**base.config, "train_size": len(expected)}
    store = RevisedStore(directory / "revision", config, base, excluded, more)
    shards = store.train(0)
    assert [row for index in range(len(shards)) for row in shards.plan.rows(index)] == [*range(len(expected))]
    assert torch.equal(torch.cat([shard.grads for shard in shards]), expected)
    assert torch.equal(torch.cat([shard.out_to_loss for shard in shards]), expected.sum(dim=1))
    assert all(row in shards.plan.rows(shards.plan.shard_of(row)) for row in range(len(expected)))
    gram = store.read_gram(0)
    if gram is None:
        assert 2 * len(excluded) > n
    else:
        assert torch.allclose(gram.matrix, expected.double().T @ expected.double(), atol=1e-12)
        assert gram.n == len(expected)


@pytest.mark.slow
def test_an_interrupted_extension_goes_on(original, nets, targets, featurized_rows):
    complete = original.extend(digits(200, 240))
    before = full_scores(complete, targets)
    path = complete.features.store.added.train(1).path(1)
    content = path.read_bytes()
    path.unlink()
    (Path(complete.args.output_dir) / "checkpoint-1" / "gram.safetensors").unlink()
    featurized_rows.clear()
    again = original.extend(digits(200, 240))
    assert sorted(featurized_rows) == [*range(N_TRAIN + SHARD, N_TRAIN + 2 * SHARD)]
    assert path.read_bytes() == content
    assert np.array_equal(full_scores(again, targets), before)


def test_revisions_of_one_store_do_not_mix(original, targets):
    first, second = original.exclude([1]), original.exclude([2])
    assert first.args.output_dir != second.args.output_dir
    assert relative_error(full_scores(first, targets), full_scores(second, targets)) > 1e-3
    assert original.exclude([1]).args.output_dir == first.args.output_dir


@pytest.mark.slow
def test_a_transform_stays(nets, targets, tmp_path):
    def halve(rows):
        return {**rows, "pixel_values": [torch.tensor(image) / 2 for image in rows["pixel_values"]]}

    original = make(nets[0], tmp_path / "a", digits(0, 40).with_transform(halve)).featurize()
    larger = original.extend(digits(40, N_TRAIN))
    scratch = make(nets[0], tmp_path / "b", digits(0, N_TRAIN).with_transform(halve)).featurize()
    assert relative_error(full_scores(larger, targets), full_scores(scratch, targets)) < 1e-4

    def stored(start: int, stop: int) -> Dataset:
        return digits(start, stop).rename_column("pixel_values", "image")

    def halved(rows):  # without which no model takes the rows
        return halve({"pixel_values": rows["image"], "labels": rows["labels"]})

    larger = (
        make(nets[0], tmp_path / "c", stored(0, 40).with_transform(halved)).featurize().extend(stored(40, N_TRAIN))
    )
    assert relative_error(full_scores(larger, targets), full_scores(scratch, targets)) < 1e-4


@pytest.mark.slow
def test_datasets_without_columns(nets, targets, tmp_path):
    rows = list(digits(0, N_TRAIN).select_columns(["pixel_values", "labels"]))
    original = make(nets[0], tmp_path / "a", rows[:40]).featurize()
    revised = original.exclude([7]).extend(rows[40:])
    scratch = make(nets[0], tmp_path / "b", rows[:7] + rows[8:]).featurize()
    assert relative_error(full_scores(revised, targets), full_scores(scratch, targets)) < 1e-4


def test_top_k_and_selection_count_the_revised_rows(original, targets):
    smaller = original.exclude(DROPPED)
    scores = full_scores(smaller, targets)
    top = smaller.attribute(targets, top_k=3)
    assert np.array_equal(top["trak_indices"][:], np.argsort(-scores, axis=0, kind="stable")[:3].T)
    subset = smaller.select(4, targets)
    assert subset["labels"][:] == [smaller.train_dataset[i]["labels"] for i in subset["trak_index"]]


# -- two processes ---------------------------------------------------------------------------------------------------


def revised_job(directory: Path) -> dict[str, Any]:
    targets = digits(1000, 1009)
    attributor = make(trained_net(digits(0, N_TRAIN)), directory, digits(0, N_TRAIN)).featurize()
    revised = attributor.exclude([3, 17, 60]).extend(digits(200, 219))
    subset = revised.select(9, targets, group_by="labels", stratify_by="source")
    return {
        "processes": revised.features.processes.num_processes,
        "selected": [subset["trak_index"][:], subset["trak_score"][:]],
        "groups": revised.group_scores(targets, "labels", group_by="all")["trak_group_scores"][:],
        "mean": revised.attribute(targets, top_k=5, group_by="all")["trak_scores"][:],
        "self_influence": revised.self_influence().tolist(),
    }


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_two_processes_find_what_one_finds(tmp_path):
    """Both get the same revision, selection and groups, with the same bits."""
    alone = (Job(tmp_path / "report.json", revised_job, tmp_path / "alone").wait(300) or {})["value"]
    jobs = start_group(tmp_path, 2, revised_job, tmp_path / "two", timeout=120)
    both = [(job.wait(300) or {})["value"] for job in jobs]
    assert [found.pop("processes") for found in (alone, *both)] == [1, 2, 2]
    assert both == [alone] * 2


# -- what cannot work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[61], [-1], [1.5], [True], ["3"]])
def test_rows_that_do_not_exist(original, rows):
    with pytest.raises(ValueError, match="from 0 to 60"):
        original.exclude(rows)


def test_nothing_left(original):
    with pytest.raises(ValueError, match="All 61 training rows"):
        original.exclude(range(N_TRAIN))


def test_missing_columns(original):
    with pytest.raises(ValueError, match=r"columns of the training dataset"):
        original.extend(digits(0, 5).remove_columns("labels"))


def test_an_original_that_is_not_featurized(nets, tmp_path):
    with pytest.raises(IncompleteStoreError):
        make(nets[0], tmp_path, digits(0, N_TRAIN)).exclude([3])


def test_other_weights_for_added_rows(original):
    with pytest.raises(CheckpointMismatchError, match="Expected the same weights"):
        original.extend(digits(200, 205), checkpoints=[trained_net(digits(0, 50), seed=s) for s in (7, 8)])


def test_tasks_whose_features_depend_on_the_whole_dataset(original, monkeypatch):
    monkeypatch.setattr(original.task, "reference_rows", lambda n: [0, 1], raising=False)
    with pytest.raises(HfTrakError, match="simulated negatives"):
        original.exclude([3])


def test_a_table_of_a_revision_is_refused(original, tmp_path):
    with pytest.raises(StoreError, match="is a revision, and no table can hold it"):
        write_table(original.exclude([3]).features.store, 0, tmp_path / "revision.parquet")


def test_publishing_a_revision_is_refused(original):
    with pytest.raises(HfTrakError, match="output directory of its own"):
        original.exclude([3]).push_to_hub("someone/index", private=False)


def test_ranges_are_readable():
    assert _ranges([3, 17, 18, 19, 20, 22, 23]) == "3, 17-20, 22-23"
    assert _ranges([]) == ""
