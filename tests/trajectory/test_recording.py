"""The record of real `Trainer` runs: what it holds, that training does not notice, and what kills and damage do."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_runs import (
    EVAL,
    config,
    in_process,
    record_files,
    recorded,
    tiny,
    train_and_die,
    trainer,
    watched,
)
from transformers import TrainerCallback

from hf_trak import Replay, TrakAttributor
from hf_trak.callbacks import TrakCallback
from hf_trak.cli.main import main
from hf_trak.errors import ConfigMismatchError, HfTrakError, IncompleteStoreError, StoreError
from hf_trak.store.atomic import leftovers
from hf_trak.trajectory.record import RunRecord, trained_weights, verify_record
from hf_trak.trajectory.recorder import check_moments


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums of several threads have other bits, and processes that are killed have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Seen(TrainerCallback):
    """Notes the weights after every step, and their gradients' norms."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(torch.cat([one.detach().clone().flatten() for one in model.parameters()]))


def record_of(directory: Path) -> RunRecord:
    return RunRecord.open(directory / "trak" / "trajectory" / "run")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 3},
        {"gradient_accumulation_steps": 3, "dataloader_drop_last": True, "per_device_train_batch_size": 3},
        {"train_sampling_strategy": "group_by_length"},
        {"max_steps": 4},
        {"dataloader_num_workers": 1},
    ],
    ids=["accumulated", "ragged", "dropped", "grouped", "stopped", "workers"],
)
def test_rows_are_those_of_the_batches(tmp_path: Path, options: dict[str, Any]) -> None:
    model = tiny()
    seen = watched(model)
    recorded(tmp_path, model, **options)
    steps = record_of(tmp_path).steps()
    assert [list(batch.rows) for step in steps for batch in step.batches] == seen


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}], ids=["plain", "bf16", "own"]
)
def test_training_does_not_notice(tmp_path: Path, options: dict[str, Any]) -> None:
    alone, beside = Seen(), Seen()
    options |= {"logging_strategy": "steps", "logging_steps": 1}
    dtype = torch.float32 if "bf16" in options else torch.float64
    run = trainer(tmp_path / "a", tiny(dtype, dropout=0.1), callbacks=[alone], **options)
    run.train()
    other = recorded(tmp_path / "b", tiny(dtype, dropout=0.1), callbacks=[beside], **options)
    assert len(alone.weights) == 9
    assert all(torch.equal(a, b) for a, b in zip(alone.weights, beside.weights, strict=True))
    losses = [[entry.get("loss") for entry in one.state.log_history] for one in (run, other)]
    assert losses[0] == losses[1]


def test_states_rates_and_norms(tmp_path: Path) -> None:
    seen = Seen()
    run = recorded(tmp_path, every=4, callbacks=[seen], logging_strategy="steps", logging_steps=1)
    record = record_of(tmp_path)
    assert record.states() == [0, 4, 8, 9]
    for step in (4, 8, 9):
        assert torch.equal(record.weights(step), seen.weights[step - 1])
    assert torch.equal(record.weights(0), trained_weights(dict(tiny().named_parameters()), record.layout))
    logged = [entry for entry in run.state.log_history if "grad_norm" in entry]
    for step, entry in zip(record.steps(), logged, strict=True):
        assert step.norm == pytest.approx(min(entry["grad_norm"], 0.5), rel=1e-5)
        assert sum(batch.loss for batch in step.batches) == pytest.approx(entry["loss"], rel=1e-6)
    rates = [step.rates[0] for step in record.steps()]
    assert rates == pytest.approx([1e-2 * (9 - step) / 9 for step in range(9)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed, with checkpoints."""
    directory = tmp_path_factory.mktemp("whole")
    recorded(directory, tiny(dropout=0.1), save_strategy="steps", save_steps=2)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(i, marks=[] if i == 3 else pytest.mark.slow) for i in range(1, 11)])
@pytest.mark.parametrize("after", [False, True])
def test_killed_and_resumed_runs_have_the_same_bytes(whole: Path, tmp_path: Path, number: int, after: bool) -> None:
    killed = tmp_path / "killed"
    assert in_process(train_and_die, killed, number, after) < 0
    place = killed / "trak" / "trajectory" / "run"
    assert all(one.state in ("intact", "leftover") for one in verify_record(place))
    if not (killed / "out").is_dir() or not any((killed / "out").glob("checkpoint-*")):
        shutil.rmtree(place)  # nothing to resume from
    for left in leftovers(place):
        assert left.remove()
    recorded(killed, tiny(dropout=0.1), save_strategy="steps", save_steps=2)
    assert record_files(killed) == record_files(whole)


def test_resumed_without_its_record(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    run.train()
    with pytest.raises(IncompleteStoreError, match=r"resumed from step 4, and its first steps .* leave out `record="):
        recorded(tmp_path, max_steps=8)


def test_another_run_is_not_recorded_over(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(ConfigMismatchError, match=r"up to step 9.*`TrakCallback\(overwrite=True\)`"):
        recorded(tmp_path)
    with pytest.raises(ConfigMismatchError, match="record of another run"):
        recorded(tmp_path, max_grad_norm=1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs without checkpoints, of two seeds."""
    directory = tmp_path_factory.mktemp("runs")
    recorded(directory / "a")
    recorded(directory / "b", seed=4)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("change", ["flip", "cut", "lost", "foreign"])
@pytest.mark.parametrize("step", [0, 4, 9])
def test_damaged_records_are_refused(runs: Path, tmp_path: Path, change: str, step: int) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    record = record_of(tmp_path / "a")
    path = record.path(step)
    content = path.read_bytes()
    if change == "flip":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif change == "cut":
        path.write_bytes(content[:-1])
    elif change == "lost":
        path.unlink()
    else:
        shutil.copy(record_of(runs / "b").path(step), path)
    if change == "lost" and step == 9:  # as after a kill: what is there is valid
        assert len(record.steps()) == 8
        return
    if change == "foreign" and step == 0:  # the same initial weights
        assert record.steps()
        return
    with pytest.raises(StoreError):
        record.steps()
    assert any(one.state in ("damaged", "missing") for one in verify_record(record.directory))
    assert main(["inspect", "--output_dir", str(tmp_path / "a" / "trak"), "--check"]) == (change != "lost")


@pytest.mark.slow
def test_runs_that_cannot_be_followed_are_refused(tmp_path: Path) -> None:
    model = tiny()
    model.config.encoder_layerdrop = 0.1
    with pytest.raises(HfTrakError, match=r"leaves out whole layers at random \({'encoder_layerdrop': 0.1}\)"):
        recorded(tmp_path, model)
    with pytest.raises(HfTrakError, match=r"are torch.bfloat16 \('transformer.wte.weight'\)"):
        recorded(tmp_path, tiny(torch.bfloat16))


def test_moments_of_other_steps_are_refused(tmp_path: Path) -> None:
    """The optimizer of an earlier training, of a checkpoint without its optimizer, and one with SGD's momentum."""
    run = recorded(tmp_path / "twice", max_steps=3)
    run.add_callback(TrakCallback(config(tmp_path / "other"), record=True))
    with pytest.raises(HfTrakError, match="has the moments of 3 steps, and the training begins at step 0"):
        run.train()
    saving = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    recorded(tmp_path, max_steps=2, **saving)
    with pytest.raises(HfTrakError, match=r"moments of 0 steps, and .* at step 2.*`save_only_model=False`"):
        recorded(tmp_path, max_steps=4, **saving)
    sgd = torch.optim.SGD(tiny().parameters(), lr=0.1, momentum=0.9)
    check_moments(sgd, 0)
    sgd.param_groups[0]["params"][0].grad = torch.zeros_like(sgd.param_groups[0]["params"][0])
    sgd.step()
    check_moments(sgd, 1)
    with pytest.raises(HfTrakError, match="The optimizer has moments, and the training begins at step 0"):
        check_moments(sgd, 0)


def test_decomposed_weights_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    dora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)
    with pytest.raises(HfTrakError, match=r"decomposes \(`use_dora=True`\)"):
        recorded(tmp_path, peft.get_peft_model(tiny(), dora))


class Interrupts(TrainerCallback):
    """Ends the first training after a step, as Ctrl-C in a notebook does."""

    def __init__(self) -> None:
        self.done = False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and not self.done:
            self.done = True
            raise KeyboardInterrupt


def test_an_interrupted_training_is_recorded_by_the_next_one(tmp_path: Path) -> None:
    callback = TrakCallback(config(tmp_path / "again"), record=True, overwrite=True)
    run = trainer(tmp_path / "again", callbacks=[callback, Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.model.load_state_dict(tiny().state_dict())
    trainer(tmp_path / "again", run.model, callbacks=[callback]).train()
    recorded(tmp_path / "once")
    found, expected = (record_of(tmp_path / name).steps() for name in ("again", "once"))
    assert [one.batches for one in found] == [one.batches for one in expected]


def test_a_training_that_died_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    """As a job does that is started again: there is nothing to resume from. Another run is refused as before."""
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path / "again", callbacks=[Interrupts()])
    recorded(tmp_path / "again")
    recorded(tmp_path / "once")
    assert record_files(tmp_path / "again") == record_files(tmp_path / "once")
    for longer in ({}, {"num_train_epochs": 4}):  # it was complete
        with pytest.raises(ConfigMismatchError, match="has the record of a run up to step 9"):
            recorded(tmp_path / "once", **longer)
    assert record_files(tmp_path / "again") == record_files(tmp_path / "once")
    saving = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path / "saved", callbacks=[Interrupts()], **saving)
    callback = TrakCallback(config(tmp_path / "saved"), record=True)
    with pytest.raises(ConfigMismatchError, match=r"or resume with .*resume_from_checkpoint=True"):
        trainer(tmp_path / "saved", callbacks=[callback], **saving).train()  # the record goes on from a checkpoint
    recorded(tmp_path / "saved", **saving)
    assert [one.batches for one in record_of(tmp_path / "saved").steps()] == [
        one.batches for one in record_of(tmp_path / "once").steps()
    ]


def test_noise_in_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HfTrakError, match=r"`neftune_noise_alpha` is 5\.0, .* Leave out `neftune_noise_alpha` or"):
        recorded(tmp_path, neftune_noise_alpha=5.0)


def test_unknown_optimizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HfTrakError, match="Adafactor"):
        recorded(tmp_path, optim="adafactor")


def test_every_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`every` is 0"):
        TrakCallback(record=True, every=0)


class Changes(TrainerCallback):
    """Changes something about the optimizer or the model after the first step."""

    def __init__(self, change) -> None:
        self.change = change

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.change(model, getattr(optimizer, "optimizer", optimizer).param_groups)


@pytest.mark.parametrize(
    ("change", "said", "every"),
    [
        (lambda model, groups: groups[0].update(betas=(0.8, 0.999)), r"`beta1` .* was 0.9 and is 0.8 now", 1),
        (lambda model, groups: groups[0].update(weight_decay=0.5), r"`decay` .* was 0.1 and is 0.5 now", 4),
        (lambda model, groups: model.lm_head.requires_grad_(False), r"frozen or released 'transformer.wte.weight'", 1),
    ],
)
def test_numbers_and_parameters_that_change_end_the_record(
    tmp_path: Path, change: Any, said: str, every: int, caplog: Any
) -> None:
    """A replay would take the first ones for all steps. The training goes on."""
    run = recorded(tmp_path, every=every, callbacks=[Changes(change)])
    warned = [one.getMessage() for one in caplog.records if "The record ends here" in one.getMessage()]
    assert len(warned) == 1 and re.search(said, warned[0])
    assert run.state.global_step == 9 and record_of(tmp_path).states() == [0, 1][: 1 + (every == 1)]
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    with pytest.raises(
        (HfTrakError, StoreError), match=r"run ended with|Expected the same ones|without a complete step"
    ):
        attributor.attribute(EVAL, top_k=None, method=Replay(of="run"))


def test_cycled_momentum_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, callbacks=[TrakCallback(config(tmp_path), record=True)])
    run.create_optimizer()
    run.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 1e-2, total_steps=9)
    with pytest.raises(HfTrakError, match="a OneCycleLR with `cycle_momentum=True`"):
        run.train()


class Sometimes(torch.nn.Module):
    """A layer with another one before it, which is used in every second pass or never."""

    def __init__(self, layer: torch.nn.Module, often: bool) -> None:
        super().__init__()
        self.layer, self.extra, self.often, self.passes = layer, torch.nn.Linear(8, 8).double(), often, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.layer(x + self.extra(x) if self.often and self.passes % 2 else x)


@pytest.mark.parametrize("often", [True, False])
def test_a_gradient_that_is_missing_in_some_steps_is_warned_of(tmp_path: Path, caplog: Any, often: bool) -> None:
    """The optimizer skips the parameter there. One that never has a gradient is never moved."""
    model = tiny()
    model.transformer.h[0].mlp = Sometimes(model.transformer.h[0].mlp, often)
    recorded(tmp_path, model, gradient_accumulation_steps=1)
    said = [one.getMessage() for one in caplog.records if "in some steps and none in others" in one.getMessage()]
    assert len(said) == often
    assert not often or said[0].startswith("'transformer.h.0.mlp.extra.")
