"""Retraining on subsets: resumed runs, two processes and `Trainer` find what one plain run finds."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from digit_models import DigitNet, digits
from regressions import Line
from rounding import gamma
from store_jobs import Job, start_group
from transformers import Trainer, TrainingArguments

from hf_trak.errors import ConfigMismatchError, NonFiniteError, StoreError
from hf_trak.evaluation import (
    TrainerRetraining,
    masks_and_outputs,
    model_outputs,
    random_subsets,
    retrain_on_subsets,
)

ROOT = Path(__file__).parents[2]
N = 12


def noisy_sum(rows: np.ndarray, seed: int) -> np.ndarray:
    """Depends on the rows and on the seed, as a training does."""
    return np.array([rows.sum(), (rows**2).sum(), len(rows)]) + np.random.default_rng(seed).normal(size=3)


def digest(directory: Path) -> str:
    joined = (directory / "subsets.safetensors", directory / "outputs.safetensors")
    return hashlib.sha256(b"".join(path.read_bytes() for path in joined)).hexdigest()


def make_trainer(rows, seed: int) -> Trainer:
    args = TrainingArguments(
        "unused",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
    )
    return Trainer(DigitNet(), args, train_dataset=rows)


def retrain_digits(directory: Path) -> None:
    retrain = TrainerRetraining(make_trainer, digits(0, 40), digits(40, 50), task="image_classification")
    retrain_on_subsets(random_subsets(40, 3), retrain, directory / "trainer", seed=7)


def retrain_both(directory: Path) -> list[int]:
    """What each process does: retrain a function and `Trainer`; the seeds of its own trainings."""
    counted: list[int] = []

    def counting(rows: np.ndarray, seed: int) -> np.ndarray:
        counted.append(seed)
        return noisy_sum(rows, seed)

    retrain_on_subsets(random_subsets(N, 5), counting, directory / "plain", repeats=2)
    retrain_digits(directory)
    return counted


def test_one_row_per_training(tmp_path: Path) -> None:
    masks = random_subsets(N, 5)
    result = retrain_on_subsets(masks, noisy_sum, tmp_path, repeats=2, seed=3)
    assert result["subset"][:] == [0, 1, 2, 3, 4] * 2 and result["repeat"][:] == [0] * 5 + [1] * 5
    assert len(set(result["seed"][:])) == 10
    for row in result:
        np.testing.assert_array_equal(row["mask"], masks[row["subset"]])
        np.testing.assert_array_equal(row["outputs"], noisy_sum(np.flatnonzero(row["mask"]), row["seed"]))
    found, outputs = masks_and_outputs(result)
    np.testing.assert_array_equal(found, masks)
    mean = np.mean([result[2]["outputs"], result[7]["outputs"]], axis=0)
    np.testing.assert_allclose(outputs[2], mean, rtol=2 * gamma(1, torch.float64))  # one addition each
    with pytest.raises(ValueError, match="7 trainings of 5 subsets, in up to 2 repeats"):
        masks_and_outputs(result.select(range(7)))


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    """A training that fails loses itself alone; more repeats and more subsets later keep what is there."""
    calls: list[int] = []

    def failing(rows: np.ndarray, seed: int) -> np.ndarray:
        calls.append(seed)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return noisy_sum(rows, seed)

    masks = random_subsets(N, 5)
    with pytest.raises(KeyboardInterrupt):
        retrain_on_subsets(masks[:3], failing, tmp_path / "resumed", repeats=2)
    retrain_on_subsets(masks[:3], failing, tmp_path / "resumed", repeats=2)
    assert len(calls) == 4 + 3 and len(set(calls)) == 6
    retrain_on_subsets(masks, failing, tmp_path / "resumed", repeats=2)
    assert len(calls) == 4 + 3 + 4
    retrain_on_subsets(masks, noisy_sum, tmp_path / "whole", repeats=2)
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed: saved 0, given 1"),
        ({"settings": {"lr": 0.1}}, '"lr": 0.2.*"lr": 0.1'),
        ({"masks": random_subsets(N, 3, seed=9)}, "belongs to a subset"),
        ({"masks": random_subsets(N + 1, 3)}, "rows: saved 12, given 13"),
    ],
)
def test_other_retrainings_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    given = {"masks": random_subsets(N, 3), "seed": 0, "settings": {"lr": 0.2}}
    retrain_on_subsets(retrain=noisy_sum, output_dir=tmp_path, **given)
    with pytest.raises(ConfigMismatchError, match=message):
        retrain_on_subsets(retrain=noisy_sum, output_dir=tmp_path, **{**given, **change})


def test_outputs_of_other_targets_and_trainings_are_refused(tmp_path: Path) -> None:
    """The directory of a `TrainerRetraining` answers for its own rows, targets and protocol alone."""

    class Fake:
        train_dataset, eval_dataset, protocol = digits(0, N), digits(40, 42), {"drop": "rows"}

        def __init__(self, **changes: Any) -> None:
            vars(self).update(changes)

        def __call__(self, rows: np.ndarray, seed: int) -> np.ndarray:
            return noisy_sum(rows, seed)

    masks = random_subsets(N, 3)
    retrain_on_subsets(masks, Fake(), tmp_path)
    assert len(retrain_on_subsets(masks, Fake(), tmp_path)) == 3
    changes = ({"train_dataset": digits(1, N + 1)}, {"eval_dataset": digits(41, 43)}, {"protocol": {"drop": "mask"}})
    for change in changes:
        with pytest.raises(ConfigMismatchError, match=next(iter(change))):
            retrain_on_subsets(masks, Fake(**change), tmp_path)


def test_bad_trainings_are_named(tmp_path: Path) -> None:
    masks = random_subsets(N, 3)
    with pytest.raises(NonFiniteError, match=r"Target 1 .* subset 0"):
        retrain_on_subsets(masks, lambda rows, seed: np.array([0, np.nan]), tmp_path / "nan")
    with pytest.raises(ValueError, match=r"the shape \(2, 2\) for subset 0"):
        retrain_on_subsets(masks, lambda rows, seed: np.ones((2, 2)), tmp_path / "shape")
    sizes = iter([2, 2, 3])
    with pytest.raises(ValueError, match=r"\[2, 3\] outputs"):
        retrain_on_subsets(masks, lambda rows, seed: np.ones(next(sizes)), tmp_path / "sizes")
    with pytest.raises(ValueError, match="Subset 1 has no rows"):
        retrain_on_subsets([[1, 0], [0, 0]], noisy_sum, tmp_path / "empty")
    retrain_on_subsets(masks, noisy_sum, tmp_path / "damaged")
    file = sorted((tmp_path / "damaged" / "trainings").iterdir())[0]
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(StoreError, match=f"{file.name} is damaged"):
        retrain_on_subsets(masks, noisy_sum, tmp_path / "damaged")


def test_model_outputs_are_margins_in_eval_mode() -> None:
    net, rows = DigitNet().train(), digits(0, 9)
    found = model_outputs(net, rows, "image_classification", batch_size=4)
    assert net.training
    with torch.no_grad():
        logits = net.eval()(torch.tensor(np.array(rows["pixel_values"]), dtype=torch.float32)).logits.double()
    for row, label in enumerate(rows["labels"]):
        others = torch.cat([logits[row, :label], logits[row, label + 1 :]])
        assert found[row] == pytest.approx(float(logits[row, label] - others.logsumexp(0)), abs=1e-4)


@pytest.mark.slow
def test_trainer_trains_on_the_subset_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def recording(rows, seed: int) -> Trainer:
        seen.append((rows["labels"][:], seed))
        return make_trainer(rows, seed)

    monkeypatch.chdir(tmp_path)
    train, targets = digits(0, 40), digits(40, 50)
    retrain = TrainerRetraining(recording, train, targets, task="image_classification")
    masks = random_subsets(40, 2)
    result = retrain_on_subsets(masks, retrain, tmp_path / "lds")
    for row, (labels, seed) in zip(result, seen, strict=True):
        assert labels == [train["labels"][i] for i in np.flatnonzero(row["mask"])] and seed == row["seed"]
    np.testing.assert_array_equal(retrain(np.flatnonzero(masks[0]), seen[0][1]), result[0]["outputs"])
    assert not np.allclose(result[0]["outputs"], result[1]["outputs"])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with a function and with `Trainer`, which must not synchronize gradients of different subsets."""
    monkeypatch.chdir(tmp_path)
    alone = (Job(tmp_path / "report.json", retrain_both, tmp_path / "1").wait(300) or {})["value"]
    jobs = start_group(tmp_path, 2, retrain_both, tmp_path / "2", timeout=120)
    both = [(job.wait(300) or {})["value"] for job in jobs]
    assert [len(part) for part in both] == [5, 5] and both[0] + both[1] == alone
    for name in ("plain", "trainer"):
        assert digest(tmp_path / "1" / name) == digest(tmp_path / "2" / name)


def test_outputs_keep_their_precision(tmp_path: Path) -> None:
    """Outputs are float64, also where they differ by less than float32 can tell."""
    values = [1.0, 1.0 + 2**-40, 1.0 + 2**-50]
    retrained = retrain_on_subsets(np.eye(3, dtype=bool), lambda rows, seed: [values[int(rows[0])]], tmp_path / "bank")
    assert masks_and_outputs(retrained)[1].ravel().tolist() == values


def test_the_task_of_a_model_of_ones_own_is_that_of_its_trainer(tmp_path: Path) -> None:
    draws = np.random.default_rng(0).normal(size=(24, 4))
    rows = Dataset.from_dict({"x": draws[:, :3].tolist(), "labels": draws[:, 3].tolist()})
    made: list[Trainer] = []

    def make(given: Any, seed: int) -> Trainer:
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
        made.append(Trainer(Line(), arguments, train_dataset=given))
        return made[-1]

    found = TrainerRetraining(make, rows.select(range(20)), rows.select(range(20, 24)))(np.arange(20), seed=1)
    predicted = made[-1].model.line(torch.tensor(draws[20:, :3], dtype=torch.float32))[:, 0]
    assert np.allclose(found, predicted.detach().numpy(), atol=1e-6)
