"""Batch sizes that are found, with a model that runs out of memory as CUDA and the CPU say it; progress of a pass."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_models import DigitNet, digits, full_scores, make, relative_error, trained_net
from safetensors.torch import load_file

from hf_trak.errors import GradientEngineError, StoreError
from hf_trak.featurize.featurizer import BatchSizeFinder
from hf_trak.gradient_computers.base import is_out_of_memory
from hf_trak.runtime.progress import RowProgress, duration
from hf_trak.store.sealed import write_sealed

N_TRAIN = 61

ERRORS = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
}


class SmallMemory(DigitNet):
    """Runs out of memory in the forward pass of more than `fits` rows, beginning with forward pass number `after`."""

    def __init__(self, weights: DigitNet, fits: int, error: str, after: int = 0) -> None:
        super().__init__()
        self.load_state_dict(weights.state_dict())
        self.fits, self.error, self.after = fits, error, after
        self.seen: list[int] = []

    def forward(self, pixel_values, labels=None):
        self.seen.append(len(pixel_values))
        if len(pixel_values) > self.fits and len(self.seen) > self.after:
            raise ERRORS[self.error]()
        return super().forward(pixel_values, labels)


@pytest.fixture(scope="module")
def weights() -> DigitNet:
    return trained_net(digits(0, N_TRAIN))


@pytest.fixture(autouse=True)
def first_batch(monkeypatch: pytest.MonkeyPatch):
    """Searches begin with 7 rows, or with as many as a test says."""

    def begin(size: int) -> None:
        monkeypatch.setattr("hf_trak.config.FIRST_BATCH", size)

    begin(7)
    return begin


def attributor(model: DigitNet, directory: Path, **options: Any):
    return make(model.eval(), directory, digits(0, N_TRAIN), **{"per_device_batch_size": "auto", **options})


def recorded(directory: Path) -> int:
    return json.loads((directory / "batch_size.json").read_text())["batch_size"]


def shards(directory: Path) -> dict[str, str]:
    """The bytes of all tensors; what files say of themselves names the settings of their model."""
    return {
        f"{path.relative_to(directory)} {name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for path in sorted(directory.rglob("*.safetensors"))
        for name, tensor in sorted(load_file(path).items())
    }


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", pytest.param("hooked", marks=pytest.mark.slow), "functional"])
@pytest.mark.parametrize("error", ERRORS)
def test_the_batch_size_that_fits_is_found(weights, tmp_path, error, engine):
    """7 → 6 → 5, and then what a run that begins with 5 does."""
    model = SmallMemory(weights, fits=5, error=error)
    found = attributor(model, tmp_path / "small", engine=engine).featurize()
    assert recorded(tmp_path / "small") == 5
    ample = SmallMemory(weights, fits=99, error=error)
    expected = attributor(ample, tmp_path / "large", engine=engine, per_device_batch_size=5).featurize()
    if engine != "functional":  # which cuts its own chunks by the free memory of the moment
        assert shards(tmp_path / "small") == shards(tmp_path / "large")
    targets = digits(1000, 1009)
    assert relative_error(full_scores(found, targets), full_scores(expected, targets)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
def test_the_engine_is_not_changed_for_lack_of_memory(weights, tmp_path, caplog, error):
    model = SmallMemory(weights, fits=5, error=error)
    with caplog.at_level(logging.INFO):
        attributor(model, tmp_path).featurize()
    used = [record.getMessage() for record in caplog.records if "Per-sample gradients of" in record.getMessage()]
    assert used == ["Per-sample gradients of SmallMemory by the hooked engine."]
    assert "Batches of 7 rows do not fit into memory; trying 6." in caplog.text


@pytest.mark.parametrize("error", ERRORS)
def test_without_it_the_error_reaches_the_user(weights, tmp_path, error):
    model = SmallMemory(weights, fits=5, error=error)
    with pytest.raises(RuntimeError) as caught:
        attributor(model, tmp_path, per_device_batch_size=7).featurize()
    assert is_out_of_memory(caught.value)
    assert not (tmp_path / "batch_size.json").exists()


@pytest.mark.slow
def test_shards_before_the_failure_are_kept_and_later_ones_have_one_batch_size_each(weights, tmp_path, first_batch):
    """Memory runs out in the second shard, when other rows need more: the first is not computed again."""
    probe = SmallMemory(weights, fits=99, error="cuda")
    sizes = {"shard_size": 32, "per_device_batch_size": 16}
    attributor(probe, tmp_path / "probe", **sizes).featurize()
    before_second = len(probe.seen) - 2  # 61 rows in batches of 16: two shards of two batches
    model = SmallMemory(weights, fits=12, error="cuda", after=before_second)
    first_batch(16)
    attributor(model, tmp_path / "small", shard_size=32).featurize()
    ample = SmallMemory(weights, fits=99, error="cuda")
    attributor(ample, tmp_path / "16", **sizes).featurize()
    attributor(ample, tmp_path / "12", **{**sizes, "per_device_batch_size": 12}).featurize()
    got = shards(tmp_path / "small")
    first, second = (f"checkpoint-0/train-0000{i}-of-00002.safetensors" for i in range(2))
    for tensor in ("grads", "out_to_loss"):
        assert got[f"{first} {tensor}"] == shards(tmp_path / "16")[f"{first} {tensor}"]
        assert got[f"{second} {tensor}"] == shards(tmp_path / "12")[f"{second} {tensor}"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_what_was_found(weights, tmp_path):
    """Lose a shard after the size was found: the resumed run writes the same bytes, and does not search again."""
    attributor(SmallMemory(weights, fits=5, error="cuda"), tmp_path).featurize()
    before = shards(tmp_path)
    for name in ("train-00001-of-00004.safetensors", "gram.safetensors"):
        (tmp_path / "checkpoint-0" / name).unlink()
    model = SmallMemory(weights, fits=5, error="cuda")
    attributor(model, tmp_path).featurize()
    assert shards(tmp_path) == before
    assert max(model.seen) == 5


@pytest.mark.slow
def test_the_next_checkpoint_and_the_targets_begin_with_it(weights, tmp_path):
    model = SmallMemory(weights, fits=5, error="cuda")
    run = attributor(model, tmp_path).featurize()
    model.seen.clear()
    full_scores(run, digits(1000, 1016))
    assert max(model.seen) == 5


@pytest.mark.slow
def test_not_even_one_row(weights, tmp_path):
    model = SmallMemory(weights, fits=0, error="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        attributor(model, tmp_path).featurize()
    assert any("Not even one row" in note for note in caught.value.__notes__)


def test_other_errors_are_not_retried(tmp_path):
    calls = []

    def fail(size: int) -> None:
        calls.append(size)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        BatchSizeFinder(16, tmp_path).run(fail)
    assert calls == [16]


@pytest.mark.slow
def test_memory_of_the_failed_batch_is_free_before_the_next(tmp_path):
    """What the frames of the error held must be gone when the smaller batch is tried."""
    alive: list[Any] = []

    class Held:
        def __init__(self) -> None:
            alive.append(self)

    import weakref

    references: list[weakref.ref] = []

    def attempt(size: int) -> None:
        assert all(reference() is None for reference in references)
        if size > 5:
            held = Held()
            alive.clear()
            references.append(weakref.ref(held))
            raise ERRORS["cuda"]()

    BatchSizeFinder(8, tmp_path).run(attempt)
    assert len(references) == 3


def test_a_damaged_record_is_an_error(tmp_path):
    (tmp_path / "batch_size.json").write_text('{"batch_size": "many"}')
    with pytest.raises(StoreError, match="checksum"):
        BatchSizeFinder(8, tmp_path)
    write_sealed(tmp_path / "batch_size.json", {"batch_size": "many"})
    with pytest.raises(StoreError, match="'many'"):
        BatchSizeFinder(8, tmp_path)


def test_what_counts_as_out_of_memory():
    refusal = GradientEngineError("the engine failed")
    refusal.__cause__ = ERRORS["cpu"]()
    assert is_out_of_memory(refusal)
    assert not is_out_of_memory(GradientEngineError("train-mode BatchNorm"))
    assert not is_out_of_memory(ValueError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


# -- the projection in the log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_projection_after_the_first_batches(caplog, processes):
    """4 rows a second after a first batch of 100 seconds, 1,000 rows: 984 are left after four batches."""
    now = np.cumsum([0.0, 100.0, *[1.0] * 40])
    ticks = iter(now[1:])
    with (
        caplog.at_level(logging.INFO),
        RowProgress(1000, "train rows", processes=processes, show=False, clock=lambda: float(next(ticks))) as progress,
    ):
        for _ in range(10):
            progress.update(4)
    (message,) = [record.getMessage() for record in caplog.records]
    alone = "train rows: 4.0 rows/s, about 4 min 6 s left for 984 rows"
    assert message == (alone if processes == 1 else alone.replace("4.0", "8.0") + " in each of 2 processes")


def test_short_runs_announce_nothing(caplog):
    with caplog.at_level(logging.INFO), RowProgress(20, "train rows", show=False, clock=lambda: 0.0) as progress:
        for _ in range(5):
            progress.update(4)
    assert not caplog.records


def test_durations():
    assert [duration(s) for s in (0.4, 59.4, 60, 3599, 3600, 7512)] == [
        "0.4 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "2 h 5 min",
    ]  # fmt: skip
