"""Banks of retrained models' outputs: built by several processes, killed and resumed, damaged, and asked wrongly."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_models import DigitNet, digits
from store_jobs import Job, start_group
from transformers import Trainer, TrainingArguments

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, NonFiniteError, StoreError
from hf_trak.evaluation import (
    Bank,
    TrainerRetraining,
    compare_lds,
    evaluate_bank,
    evaluate_lds,
    measure_reliability,
    random_subsets,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

N, M = 24, 5
MASKS = random_subsets(N, 6, 0.75)


def make_trainer(rows: Any, seed: int) -> Trainer:
    args = TrainingArguments(
        "unused", num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-2, seed=seed, use_cpu=True,
        save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    return Trainer(DigitNet(), args, train_dataset=rows)


def training(**options: Any) -> TrainerRetraining:
    return TrainerRetraining(make_trainer, digits(0, N), digits(40, 40 + M), "image_classification", **options)


def build(directory: Path, kill_in: int | None = None, job: int = 0, jobs: int = 1) -> None:
    """What each process does: a part with one seed, and its repeat from a perturbed start."""
    torch.set_num_threads(1)
    bank = Bank.create(directory, digits(0, N), digits(40, 40 + M), recipe={"epochs": 2})
    begun = 0
    for name, options, repeat_of in (("plain", {}, None), ("perturbed", {"perturbation": 1e-3}, "plain")):
        retrain = training(drop="mask", seed=3, **options)

        def counted(rows: np.ndarray, seed: int, retrain: TrainerRetraining = retrain) -> np.ndarray:
            nonlocal begun
            begun += 1
            outputs = retrain(rows, seed)
            if begun == kill_in:
                os.kill(os.getpid(), signal.SIGKILL)
            return outputs

        bank.add_part(name, MASKS, protocol=retrain.protocol, repeat_of=repeat_of)
        bank.build(name, retrain if kill_in is None else counted, job=job, jobs=jobs)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, jobs_with_one_thread: None) -> Path:
    """An uninterrupted bank, built by one process."""
    directory = tmp_path_factory.mktemp("bank")
    assert Job(directory / "report.json", build, directory / "whole").wait(300) == {"value": None}
    return directory / "whole"


def small(directory: Path, retrain: Callable[[np.ndarray, int], Any] | None = None, repeats: int = 1) -> Bank:
    """A bank of a function that stands for a training."""
    bank = Bank.create(directory, digits(0, N), digits(40, 40 + M))
    bank.add_part("half", random_subsets(N, 8), repeats=repeats)
    if retrain is not None:
        bank.build("half", retrain)
    return bank


def sums(rows: np.ndarray, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=M)
    return np.array([np.sum(np.sin(rows * (1 + target))) for target in range(M)]) + 0.1 * noise


@pytest.mark.slow
def test_killed_and_resumed_by_two_processes(whole: Path, tmp_path: Path) -> None:
    """Every file equals that of an uninterrupted bank, bit for bit."""
    killed = Job(tmp_path / "report.json", build, tmp_path / "bank", 4)
    assert killed.wait(300) is None and killed.process.exitcode == -signal.SIGKILL
    done = sorted((tmp_path / "bank" / "plain" / "trainings").glob("*.safetensors"))
    assert len(done) == 3 and not (tmp_path / "bank" / "plain" / "outputs.safetensors").exists()
    with pytest.raises(IncompleteStoreError, match="3 of 6 trainings"):
        Bank(tmp_path / "bank").part("plain")
    before = [path.stat().st_mtime_ns for path in done]
    jobs = start_group(tmp_path, 2, build, tmp_path / "bank", timeout=120)
    assert [job.wait(300) for job in jobs] == [{"value": None}] * 2
    assert [path.stat().st_mtime_ns for path in done] == before, "what was done is not done again"
    assert content(tmp_path / "bank") == content(whole)


@pytest.mark.slow
def test_jobs_of_an_array_divide_a_bank(whole: Path, tmp_path: Path) -> None:
    jobs = [Job(tmp_path / f"{job}.json", build, tmp_path / "bank", None, job, 3) for job in range(3)]
    assert [job.wait(300) for job in jobs] == [{"value": None}] * 3
    # whether a job's last look came before another's last training depends on their speed; one more call joins
    assert Job(tmp_path / "last.json", build, tmp_path / "bank").wait(300) == {"value": None}
    assert content(tmp_path / "bank") == content(whole)


def test_a_job_does_its_own_share_alone(tmp_path: Path) -> None:
    bank = small(tmp_path)
    assert not bank.build("half", sums, job=1, jobs=3)
    assert sorted(path.name[:13] for path in (tmp_path / "half" / "trainings").iterdir()) == [
        "subset-000001", "subset-000004", "subset-000007",
    ]  # fmt: skip
    assert not bank.build("half", sums, job=0, jobs=3) and not bank.is_complete("half")
    assert bank.build("half", sums, job=2, jobs=3) and bank.is_complete("half")


@pytest.mark.slow
def test_one_seed_without_perturbation_repeats_to_the_bit(whole: Path) -> None:
    bank = Bank(whole)
    part = bank.part("plain")
    again = np.stack([training(drop="mask", seed=3)(np.flatnonzero(mask), 99) for mask in part.masks[:2]])
    np.testing.assert_array_equal(part.outputs[0, :2], again)
    perturbed = bank.part("perturbed").outputs
    assert (perturbed != part.outputs).all() and np.abs(perturbed - part.outputs).max() < 1
    found = bank.reliability("plain", resamples=50)["perturbed"]
    expected = measure_reliability(np.concatenate([part.outputs, perturbed]), resamples=50)
    assert found.ceiling_of_one == expected.ceiling_of_one and found.noise.min() > 0


def test_the_perturbation_has_its_size_and_leaves_generators_alone() -> None:
    drawn = []

    def recorded(rows: Any, seed: int) -> Trainer:
        trainer = make_trainer(rows, seed)
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]

        class StoppedError(RuntimeError):
            pass

        def train() -> None:
            after = list(trainer.model.parameters())
            drawn.append((before, [parameter.detach().clone() for parameter in after], torch.rand(3)))
            raise StoppedError

        trainer.train = train
        return trainer

    for size in (0.0, 1e-2, 1e-2):
        retrain = TrainerRetraining(recorded, digits(0, N), digits(40, 45), drop="mask", seed=3, perturbation=size)
        with pytest.raises(RuntimeError):
            retrain(np.arange(N), 5)
    (_, unchanged, plain), (before, first, one), (_, second, _) = drawn
    changes = torch.cat([((a - b) / b)[b != 0] for b, a in zip(before, first, strict=True)])
    assert torch.equal(plain, one)
    assert all(torch.equal(a, b) for a, b in zip(before, unchanged, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "drawn from the training's own seed"
    # the standard deviation of N numbers has a relative standard error of 1/√(2N)
    assert changes.std().item() == pytest.approx(1e-2, rel=6 / (2 * len(changes)) ** 0.5)


@pytest.mark.parametrize("value", [-1e-6, float("nan"), float("inf"), "1e-6"])
def test_a_perturbation_that_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="Expected a finite number of at least 0"):
        training(perturbation=value)


def test_scores_of_methods_are_compared_on_the_same_resamples(tmp_path: Path) -> None:
    bank = small(tmp_path, sums, repeats=2)
    part = bank.part("half")
    truth = np.stack([np.sin(np.arange(N) * (1 + target)) for target in range(M)], axis=1)
    noise = np.random.default_rng(1).normal(size=truth.shape)
    good, bad = evaluate_bank(bank, {"exact": truth, "noise": noise}, resamples=100)
    assert good.lds == evaluate_lds(truth, part.masks, part.truth, resamples=100).mean
    assert good.difference is None and good.lds.value > 0.9 > bad.lds.value
    expected = compare_lds(noise, truth, part.masks, part.truth, resamples=100)
    assert bad.difference is not None
    for end in ("value", "low", "high"):
        assert getattr(bad.difference, end) == pytest.approx(getattr(expected, end), abs=1e-12)
    assert bad.ceilings["half"].value == bank.reliability("half", resamples=100)["half"].ceiling.value
    some = evaluate_bank(bank, {"exact": truth}, targets=[1, 3], resamples=20)[0]
    np.testing.assert_array_equal(some.per_target, good.per_target[[1, 3]])


def test_ceilings_are_those_of_the_targets_that_are_judged(tmp_path: Path) -> None:
    """Of targets without noise it is 1, whatever the noise of the others."""

    def first_without_noise(rows: np.ndarray, seed: int) -> np.ndarray:
        noise = np.random.default_rng(seed).normal(size=M)
        return sums(rows, 0) + np.where(np.arange(M) < 2, 0.0, 3.0) * noise

    bank = small(tmp_path, first_without_noise, repeats=2)
    scores = {"any": np.random.default_rng(0).normal(size=(N, M))}
    ceilings = [
        evaluate_bank(bank, scores, targets=targets, resamples=20)[0].ceilings["half"].value
        for targets in ([0, 1], None, range(2, M))
    ]
    assert ceilings[0] == pytest.approx(1.0) and ceilings[0] > ceilings[1] > ceilings[2]


def test_other_rows_targets_protocols_and_outputs_are_refused(tmp_path: Path) -> None:
    bank = Bank.create(tmp_path / "bank", digits(0, N), digits(40, 40 + M))
    bank.add_part("part", MASKS, protocol=training(drop="mask", seed=3).protocol)
    with pytest.raises(ConfigMismatchError, match="rows_fingerprint"):
        Bank.create(tmp_path / "bank", digits(1, N + 1), digits(40, 40 + M))
    with pytest.raises(ConfigMismatchError, match="targets_fingerprint"):
        Bank.create(tmp_path / "bank", digits(0, N), digits(41, 41 + M))
    with pytest.raises(ConfigMismatchError, match="recipe"):
        Bank.create(tmp_path / "bank", digits(0, N), digits(40, 40 + M), recipe={"epochs": 3})
    with pytest.raises(ConfigMismatchError, match=f"The {N} training rows have the fingerprint"):
        bank.check_rows(digits(1, N + 1))
    with pytest.raises(ConfigMismatchError, match=f"The {M} targets have the fingerprint"):
        bank.check_rows(None, digits(0, M))
    with pytest.raises(ConfigMismatchError, match="is trained in another way"):
        bank.build("part", training(drop="mask", seed=4))
    other = TrainerRetraining(make_trainer, digits(0, N), digits(0, M), "image_classification", drop="mask", seed=3)
    with pytest.raises(ConfigMismatchError, match="targets have the fingerprint"):
        bank.build("part", other)
    with pytest.raises(ValueError, match=r"returned the shape \(3,\); the bank has 5 targets"):
        bank.build("part", lambda rows, seed: np.zeros(3))
    with pytest.raises(NonFiniteError, match="after training on subset 0"):
        bank.build("part", lambda rows, seed: np.full(M, np.nan))
    with pytest.raises(ValueError, match=f"`masks` has 7 columns; the bank has {N} training rows"):
        bank.add_part("other", random_subsets(7, 4))
    with pytest.raises(ConfigMismatchError, match="masks"):
        bank.add_part("part", random_subsets(N, 6, 0.75, seed=9))
    with pytest.raises(ValueError, match="Expected its first subsets"):
        bank.add_part("again", random_subsets(N, 3, 0.75, seed=9), repeat_of="part")
    with pytest.raises(IncompleteStoreError, match="has no part 'nothing' "):
        bank.add_part("again", MASKS, repeat_of="nothing")
    with pytest.raises(ValueError, match="it starts with a dot"):
        bank.add_part("../outside", MASKS)
    with pytest.raises(ValueError, match="Expected a number from 0 to 1"):
        bank.build("part", sums, job=2, jobs=2)
    with pytest.raises(IncompleteStoreError, match="holds no bank"):
        Bank(tmp_path)
    with pytest.raises(IncompleteStoreError, match=r"no complete part .* its parts are: part"):
        evaluate_bank(bank, {"method": np.zeros((N, M))})


def test_scores_of_another_shape_or_with_nan_are_refused(tmp_path: Path) -> None:
    bank = small(tmp_path, sums)
    with pytest.raises(ValueError, match=r"'mine' have the shape \(5, 24\).*transposed: pass `scores.T`"):
        evaluate_bank(bank, {"mine": np.zeros((M, N))})
    with pytest.raises(ValueError, match=r"the shape \(24, 4\). Expected \(24, 5\)"):
        evaluate_bank(bank, {"mine": np.zeros((N, M - 1))})
    with pytest.raises(ValueError, match="no matrix of numbers"):
        evaluate_bank(bank, {"mine": [["a"]]})
    scores = np.zeros((N, M))
    scores[3, 2] = np.nan
    with pytest.raises(NonFiniteError, match="hold nan for training row 3 and target 2"):
        evaluate_bank(bank, {"mine": scores})
    with pytest.raises(ValueError, match="`scores` is empty"):
        evaluate_bank(bank, {})
    for targets in ([], [0, 0], [M], [-1], [0.5]):
        with pytest.raises(ValueError, match="Expected distinct numbers from 0 to 4"):
            evaluate_bank(bank, {"mine": np.zeros((N, M))}, targets=targets)


def test_damage_and_mixed_up_files_are_noticed(tmp_path: Path) -> None:
    """Every byte that changes, every file that is cut, and files of another part or bank."""
    small(tmp_path / "bank", sums)
    small(tmp_path / "other", lambda rows, seed: -sums(rows, seed), repeats=2)
    names = ["bank.json", "half/retraining.json", "half/subsets.safetensors", "half/outputs.safetensors"]
    rng = np.random.default_rng(0)
    for name in names:
        intact = (tmp_path / "bank" / name).read_bytes()
        damages = [intact[: int(rng.integers(len(intact)))] for _ in range(5)]
        for place in rng.integers(0, len(intact), 25):
            flipped = bytearray(intact)
            flipped[place] ^= 1 << int(rng.integers(8))
            damages.append(bytes(flipped))
        if name != "bank.json":  # which is the same in both
            damages.append((tmp_path / "other" / name).read_bytes())
        for damaged in damages:
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "bank", copy)
            (copy / name).write_bytes(damaged)
            if damaged != intact:
                with pytest.raises(StoreError):
                    Bank(copy).part("half")
            shutil.rmtree(copy)
