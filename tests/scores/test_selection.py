"""`select` and its parts: the rows chosen, their order, the type of dataset, and the benefit of the choice."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from digit_models import DigitNet, digits, full_scores, make, relative_error, trained_net
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset
from transformers import Trainer, TrainingArguments

from hf_trak import TrakAttributor
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.selection import best_rows, selection_size

N_TRAIN, N_EVAL = 61, 23


@pytest.fixture(scope="module")
def targets() -> Dataset:
    return digits(1000, 1000 + N_EVAL)


@pytest.fixture(scope="module")
def attributor(tmp_path_factory: pytest.TempPathFactory) -> TrakAttributor:
    rows = digits(0, N_TRAIN)
    net = trained_net(rows)
    return make(net, tmp_path_factory.mktemp("store"), rows).featurize()


@pytest.fixture(scope="module")
def scores(attributor: TrakAttributor, targets: Dataset) -> np.ndarray:
    return full_scores(attributor, targets)


def test_most_helpful_rows_by_their_mean_score(attributor, targets, scores):
    subset = attributor.select(9, targets)
    expected = np.argsort(-scores.mean(axis=1), kind="stable")[:9]
    assert subset["trak_index"][:] == expected.tolist()
    assert relative_error(subset["trak_score"][:], scores.mean(axis=1)[expected]) < 1e-5
    assert subset["labels"][:] == [attributor.train_dataset[int(i)]["labels"] for i in expected]


def test_least_harmful_rows_by_their_lowest_score(attributor, targets, scores):
    subset = attributor.select(0.5, targets, criterion="least_harmful")
    worst = scores.min(axis=1)
    assert subset["trak_index"][:] == np.argsort(-worst, kind="stable")[: round(0.5 * N_TRAIN)].tolist()
    assert subset["trak_index"][:] != attributor.select(0.5, targets)["trak_index"][:]


def test_groups_of_targets_count_the_same(attributor, targets, scores):
    labels = np.array(targets["labels"])
    balanced = np.mean([scores[:, labels == label].mean(axis=1) for label in set(labels)], axis=0)
    subset = attributor.select(12, targets, group_by="labels")
    assert subset["trak_index"][:] == np.argsort(-balanced, kind="stable")[:12].tolist()


def test_strata_keep_their_shares(attributor, targets, scores):
    subset = attributor.select(20, targets, stratify_by="source")
    everywhere = np.array(attributor.train_dataset["source"])
    for name in ("form", "photo", "scan"):
        rows = [i for i in subset["trak_index"] if everywhere[i] == name]
        assert abs(len(rows) - 20 * (everywhere == name).sum() / N_TRAIN) < 1
        of_kind = np.flatnonzero(everywhere == name)
        assert rows == of_kind[np.argsort(-scores.mean(axis=1)[of_kind], kind="stable")][: len(rows)].tolist()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_quota_is_met_exactly(data):
    members = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=30))
    values = data.draw(st.lists(st.integers(-5, 5), min_size=len(members), max_size=len(members)))
    n = data.draw(st.integers(1, len(members)))
    strata = RowGroups(members)
    rows = best_rows(torch.tensor(values, dtype=torch.float32), n, strata)
    assert len(rows) == len(set(rows)) == n
    assert [values[i] for i in rows] == sorted((values[i] for i in rows), reverse=True)
    for number, size in enumerate(strata.sizes.tolist()):
        assert abs(sum(strata.member[i] == number for i in rows) - n * size / len(members)) < 1


def test_a_selection_trains_with_trainer(attributor, targets, tmp_path):
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, save_strategy="no")
    result = Trainer(DigitNet(), arguments, train_dataset=attributor.select(16, targets)).train()
    assert np.isfinite(result.training_loss)


def test_a_transform_on_the_training_dataset_stays(targets, tmp_path):
    def halve(rows):
        return {**rows, "pixel_values": [torch.tensor(image) / 2 for image in rows["pixel_values"]]}

    rows = digits(0, 30).with_transform(halve)
    attributor = make(trained_net(digits(0, 30)), tmp_path, rows).featurize()
    subset = attributor.select(5, targets)
    for row in subset:
        original = digits(0, 30)[row["trak_index"]]["pixel_values"]
        assert torch.allclose(row["pixel_values"], torch.tensor(original) / 2)


def test_other_datasets_give_a_subset(tmp_path, targets):
    rows = list(digits(0, 30).select_columns(["pixel_values", "labels"]))
    attributor = make(trained_net(digits(0, 30)), tmp_path, rows).featurize()
    subset = attributor.select(4, targets)
    assert isinstance(subset, Subset)
    assert subset.indices == attributor.attribute(targets, 4, group_by="all")[0]["trak_indices"]


@pytest.mark.parametrize("n", [0, N_TRAIN + 1, -3, 1.5, 0.0, True, "5", None])
def test_sizes_that_make_no_sense(attributor, targets, n):
    with pytest.raises(ValueError, match="fraction between 0 and 1"):
        attributor.select(n, targets)


def test_fractions_round_and_give_at_least_one():
    assert (selection_size(0.5, 61), selection_size(0.001, 61), selection_size(61, 61)) == (30, 1, 61)


def test_unknown_criterion(attributor, targets):
    with pytest.raises(ValueError, match="'most_harmful'"):
        attributor.select(3, targets, criterion="most_harmful")


@pytest.mark.slow
def test_the_selected_half_trains_a_better_network_than_the_rejected_half(tmp_path: Path):
    """Of 800 digits, a third have a wrong label; 400 others are used to choose rows, and 300 to judge the choice."""
    rng = np.random.default_rng(0)
    rows = digits(0, 800)
    labels = np.array(rows["labels"])
    wrong = rng.permutation(800)[:266]
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, size=266)) % 10
    rows = rows.remove_columns("labels").add_column("labels", labels)
    attributor = make(trained_net(rows, 60), tmp_path, rows, proj_dim=512, shard_size=256, per_device_batch_size=64)
    ranked = attributor.featurize().select(800, digits(800, 1200))
    judged = digits(1400, 1700)
    pixels, truth = torch.tensor(np.array(judged["pixel_values"]), dtype=torch.float32), np.array(judged["labels"])

    def accuracy(subset: Dataset) -> float:
        return float((trained_net(subset, 60)(pixels).logits.argmax(dim=1).numpy() == truth).mean())

    kept, left = accuracy(ranked.select(range(400))), accuracy(ranked.select(range(400, 800)))
    assert np.isin(ranked["trak_index"][:400], wrong).mean() < 0.5 * len(wrong) / 800  # by chance it is their share
    assert kept > left + 0.2
