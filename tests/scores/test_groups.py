"""Scores of groups of targets and of training rows equal means and sums of single scores."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from digit_models import digits, full_scores, make, relative_error, trained_net
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_trak import TrakAttributor
from hf_trak.attributor import last_result
from hf_trak.scores.groups import RowGroups

N_TRAIN, N_EVAL = 61, 23


@pytest.fixture(scope="module")
def targets() -> Dataset:
    return digits(1000, 1000 + N_EVAL)


@pytest.fixture(scope="module")
def attributor(tmp_path_factory: pytest.TempPathFactory) -> TrakAttributor:
    """An attributor of two independently trained models, for which the mean of the weights q matters."""
    rows = digits(0, N_TRAIN)
    nets = [trained_net(rows, seed=seed) for seed in (0, 1)]
    return make(nets[0], tmp_path_factory.mktemp("store"), rows).featurize(nets)


@pytest.fixture(scope="module")
def scores(attributor: TrakAttributor, targets: Dataset) -> np.ndarray:
    return full_scores(attributor, targets)


def stacked(dataset: Dataset, column: str) -> np.ndarray:
    return np.stack(dataset.with_format("numpy")[column][:])


# -- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_result_of_groups_is_shown_and_says_how_it_was_computed(attributor, targets):
    """Its facts are those of the method that was asked for, not those of the index."""
    attributor.attribute(targets, top_k=3, group_by="labels", method="exact", name="grouped")
    facts = last_result(attributor).facts(attributor.features)
    assert facts["projection"] == "none: exact scores, ekfac" and facts["ridge"] == "damping 0.1 relative"
    assert "helped most: row" in str(attributor.show(9))
    with pytest.raises(ValueError, match=r"`target` is 10. Expected"):
        attributor.show(10)  # as many groups as labels


def test_mean_of_targets_is_the_mean_of_scores(attributor, targets, scores):
    result = attributor.attribute(targets, top_k=None, group_by="all")
    assert len(result) == 1 and result["n_targets"][:] == [N_EVAL]
    assert relative_error(stacked(result, "trak_scores")[0], scores.mean(axis=1)) < 1e-5


def test_groups_of_targets_are_means_by_value(attributor, targets, scores):
    result = attributor.attribute(targets, top_k=None, group_by="labels")
    labels = np.array(targets["labels"])
    assert result["labels"][:] == sorted(set(labels.tolist()))
    for row in result:
        member = labels == row["labels"]
        assert row["n_targets"] == member.sum()
        assert relative_error(row["trak_scores"], scores[:, member].mean(axis=1)) < 1e-5


def test_top_k_of_groups_in_both_directions(attributor, targets, scores):
    by_source = [scores[:, np.array(targets["source"]) == name].mean(axis=1) for name in ("form", "photo", "scan")]
    result = attributor.attribute(targets, top_k=4, group_by="source")
    assert result["source"][:] == ["form", "photo", "scan"]
    for row, expected in zip(result, by_source, strict=True):
        assert row["trak_indices"] == np.argsort(-expected)[:4].tolist()
        assert row["trak_harmful_indices"] == np.argsort(expected)[:4].tolist()
        assert relative_error(row["trak_scores"], np.sort(expected)[::-1][:4]) < 1e-5
    turned = attributor.attribute(targets, top_k=1, group_by="source", per="train")
    assert [row[0] for row in turned["trak_indices"]] == np.argmax(by_source, axis=0).tolist()


def test_values_given_in_place_of_a_column(attributor, targets):
    named = attributor.attribute(targets, top_k=3, group_by="source")
    given_ = attributor.attribute(targets, top_k=3, group_by=np.array(targets["source"]))
    assert given_["group"][:] == named["source"][:]
    assert given_["trak_indices"][:] == named["trak_indices"][:]


def test_full_scores_of_different_groupings_do_not_overwrite_each_other(attributor, targets, scores):
    """Both results are memory-mapped from files. The first one does not change when the second one is made."""
    mean = attributor.attribute(targets, top_k=None, group_by="all", name="same")
    single = attributor.attribute(targets, top_k=None, name="same")
    grouped = attributor.attribute(targets, top_k=None, group_by="source", name="same")
    assert (len(mean), len(single), len(grouped)) == (1, N_EVAL, 3)
    reread = attributor.attribute(targets, top_k=None, group_by="all", name="same")
    assert stacked(mean, "trak_scores").tolist() == stacked(reread, "trak_scores").tolist()
    assert relative_error(stacked(single, "trak_scores").T, scores) < 1e-6


def test_no_target_is_computed_twice_for_another_grouping(attributor, targets, monkeypatch):
    attributor.attribute(targets, top_k=3)

    def refuse(*args, **kwargs):
        raise AssertionError("gradients were taken again")

    monkeypatch.setattr("hf_trak.featurize.featurizer.Featurizer._fill", refuse)
    attributor.attribute(targets, top_k=3, group_by="all")
    attributor.attribute(targets, top_k=3, group_by="labels")


# -- training rows ---------------------------------------------------------------------------------------------------


def test_scores_of_groups_of_training_rows_are_sums(attributor, targets, scores):
    result = attributor.group_scores(targets, "source")
    sources = np.array(attributor.train_dataset["source"])
    expected = np.stack([scores[sources == name].sum(axis=0) for name in ("form", "photo", "scan")], axis=1)
    assert stacked(result, "trak_group_scores").shape == (N_EVAL, 3)
    assert relative_error(stacked(result, "trak_group_scores"), expected) < 1e-5
    assert attributor.group_scores(result, "source").column_names == result.column_names
    assert result[0]["trak_groups"] == ["form", "photo", "scan"]
    assert result[5]["trak_group_sizes"] == [(sources == name).sum() for name in ("form", "photo", "scan")]
    assert result["labels"][:] == targets["labels"][:]


def test_class_by_class_view(attributor, targets, scores):
    """Results have one row per class of targets and one entry per class of training rows; classes help themselves."""
    result = attributor.group_scores(targets, "labels", group_by="labels")
    train, held_out = np.array(attributor.train_dataset["labels"]), np.array(targets["labels"])
    matrix = stacked(result, "trak_group_scores")
    expected = [
        [scores[np.ix_(train == b, held_out == a)].mean(axis=1).sum() for b in range(10)] for a in sorted({*held_out})
    ]
    assert relative_error(matrix, expected) < 1e-5
    assert (matrix.argmax(axis=1) == np.array(result["labels"])).mean() >= 0.8


# -- groups themselves -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([None, 3, -1, 7, 0]), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_means_and_sums_do_not_depend_on_the_cut(values, cuts):
    n = len(values)
    bounds = sorted({0, n, *(cut for cut in cuts if cut < n)})
    matrix = torch.arange(n * 3, dtype=torch.float32).reshape(n, 3).sin()
    groups = RowGroups(values)
    parts = [(a, b, matrix[a:b]) for a, b in pairwise(bounds)]
    means = groups.means((a, part) for a, _, part in parts)
    for g, value in enumerate(groups.values):
        rows = [i for i in range(n) if values[i] == value]
        assert torch.allclose(means[g], matrix[rows].double().mean(dim=0), atol=1e-12)
        assert torch.allclose(groups.sums(parts)[:, g], matrix[rows].double().sum(dim=0), atol=1e-12)
    assert int(groups.sizes.sum()) == n


def test_order_of_groups_and_their_types():
    rows = Dataset.from_dict({"kind": [2, 0, None, 2, 1]}).cast_column("kind", ClassLabel(names=["a", "b", "c"]))
    table = RowGroups.of(rows, "kind").table()
    assert table["kind"][:] == [0, 1, 2, None]
    assert table["n_targets"][:] == [1, 1, 2, 1]
    assert table.features["kind"] == rows.features["kind"]
    assert RowGroups(["b", 1, "b", None]).values == ["b", 1, None]  # cannot be sorted: as they come


@pytest.mark.parametrize(
    ("by", "error", "says"),
    [
        ("nothing", ValueError, "Expected one of the columns"),
        ("pixel_values", TypeError, "values that can form groups"),
        ([1, 2], ValueError, "2 values for 61 rows"),
        ([float("nan")] * 61, ValueError, "NaN"),
    ],
)
def test_what_cannot_be_a_group(by, error, says):
    with pytest.raises(error, match=says):
        RowGroups.of(digits(0, N_TRAIN), by)


def test_a_column_of_something_without_columns():
    with pytest.raises(TypeError, match="has no columns"):
        RowGroups.of([1, 2, 3], "label")


def test_unknown_column(attributor, targets):
    with pytest.raises(ValueError, match="'median'"):
        attributor.attribute(targets, group_by="median")


def test_unused_directory_of_scores_stays_in_the_store(attributor, targets):
    attributor.attribute(targets, top_k=None, group_by="all", name="inside")
    files = list(Path(attributor.args.output_dir, "scores", "inside").iterdir())
    assert len(files) == 1 and files[0].suffix == ".arrow"
