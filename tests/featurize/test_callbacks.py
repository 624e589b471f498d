"""TrakCallback in real Trainer runs with dropout and shuffling: what it keeps, and that training does not notice."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from digit_models import DigitNet, digits, full_scores
from safetensors.torch import load_file, save_file
from torch import Tensor
from trak_options import trak_config
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback

STEPS = 12


class Watch(TrainerCallback):
    """Records the weights after every step; ends the run like a kill where it is told to."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.stop_at = stop_at

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.stop_at:
            raise KeyboardInterrupt


def rows() -> Dataset:
    return digits(0, 40)


def config(directory: Path, **options: Any) -> TrakConfig:
    return trak_config(str(directory), proj_dim=32, shard_size=16, use_cpu=True, **options)


def trainer(directory: Path, callbacks: Sequence[TrainerCallback] = (), seed: int = 3, **options: Any) -> Trainer:
    """12 steps of a network with dropout over shuffled rows; the last batch of an epoch is ragged."""
    defaults = {"save_strategy": "steps", "save_steps": 3}
    arguments = TrainingArguments(
        str(directory), max_steps=STEPS, per_device_train_batch_size=16, learning_rate=1e-2, logging_steps=1,
        use_cpu=True, seed=seed, **{**defaults, **options},
    )  # fmt: skip
    torch.manual_seed(seed)
    return Trainer(DigitNet(), arguments, train_dataset=rows(), callbacks=list(callbacks))


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def steps_of(callback: TrakCallback) -> list[int]:
    return [int(Path(path).name.split("-")[1]) for path in callback.checkpoints]


def assert_holds(callback: TrakCallback, watch: Watch) -> None:
    """Every collected checkpoint has the weights of its step, bit by bit."""
    for path, step in zip(callback.checkpoints, steps_of(callback), strict=True):
        saved = load_file(Path(path) / "model.safetensors")
        assert saved.keys() == watch.weights[step].keys()
        assert all(torch.equal(saved[name], watch.weights[step][name]) for name in saved)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Watch, tuple[Any, ...]]:
    """The run without the callback, and the random states that it ends with."""
    watch = Watch()
    run = trainer(tmp_path_factory.mktemp("plain"), [watch])
    run.train()
    return run, watch, random_states()


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


# -- training does not notice ----------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("collect", "training"),
    [
        ({}, {}),
        ({"last": 2}, {"save_total_limit": 1}),
        ({"steps": [2, 7, 12]}, {"save_strategy": "no"}),
        ({"last": 2, "featurize_at_end": True}, {}),
    ],
    ids=["every save", "last", "by step", "featurize at end"],
)
def test_training_is_bit_identical_with_the_callback(plain, tmp_path, collect, training):
    expected, watched, states = plain
    watch = Watch()
    run = trainer(tmp_path / "out", [watch], **training)
    if "featurize_at_end" in collect:
        collect = {**collect, "trainer": run, "task": TASK}
    run.add_callback(TrakCallback(config(tmp_path / "trak"), **collect))
    run.train()
    assert len(losses(run)) == STEPS
    assert losses(run) == losses(expected)
    for step in range(1, STEPS + 1):
        assert all(torch.equal(watch.weights[step][name], value) for name, value in watched.weights[step].items())
    final = run.model.state_dict()
    assert all(torch.equal(final[name], value) for name, value in expected.model.state_dict().items())
    assert random_states() == states
    assert run.model.training == expected.model.training
    assert all(parameter.requires_grad for parameter in run.model.parameters())


@pytest.mark.slow
def test_dropout_and_shuffling_matter_in_this_run(plain, tmp_path):
    """The comparison above could not fail if the run drew no random numbers."""
    other = trainer(tmp_path, seed=4)
    other.model.load_state_dict(trainer(tmp_path).model.state_dict())
    torch.manual_seed(4)
    other.train()
    assert losses(other)[1:] != losses(plain[0])[1:]


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("collect", "training", "kept"),
    [
        ({}, {"save_total_limit": 1}, [3, 6, 9, 12]),
        ({"last": 2}, {"save_total_limit": 1}, [9, 12]),
        ({"last": 3}, {}, [6, 9, 12]),
        ({"steps": [6, 12]}, {}, [6, 12]),
        ({"steps": [1, 7, 11], "last": 2}, {"save_strategy": "no"}, [7, 11]),
        ({}, {"save_strategy": "epoch"}, [3, 6, 9, 12]),
    ],
)
def test_which_checkpoints_are_kept(tmp_path, collect, training, kept):
    watch, callback = Watch(), TrakCallback(config(tmp_path / "trak"), **collect)
    trainer(tmp_path / "out", [watch, callback], **training).train()
    assert steps_of(callback) == kept
    assert_holds(callback, watch)
    assert not any("optimizer" in path.name for path in callback.directory.rglob("*"))


@pytest.mark.slow
def test_weights_take_no_space_until_the_trainer_deletes_its_own(tmp_path):
    callback = TrakCallback(config(tmp_path / "trak"))
    trainer(tmp_path / "out", [callback], save_total_limit=1).train()
    shared = [(Path(path) / "model.safetensors").stat().st_nlink for path in callback.checkpoints]
    assert shared == [1, 1, 1, 2]


@pytest.mark.slow
def test_copies_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("hf_trak.callbacks.os.link", refuse)
    watch, callback = Watch(), TrakCallback(config(tmp_path / "trak"))
    trainer(tmp_path / "out", [watch, callback], save_total_limit=1).train()
    assert steps_of(callback) == [3, 6, 9, 12]
    assert_holds(callback, watch)


@pytest.mark.slow
def test_saving_again_over_a_linked_file_leaves_the_collected_one(tmp_path):
    """What makes hard links safe: safetensors replaces files, it does not write into them."""
    watch, callback = Watch(), TrakCallback(config(tmp_path / "trak"))
    trainer(tmp_path / "out", [watch, callback]).train()
    for path in (tmp_path / "out").glob("checkpoint-*/model.safetensors"):
        save_file({"zero": torch.zeros(3)}, path)
    assert_holds(callback, watch)


# -- interruptions ---------------------------------------------------------------------------------------------------


def digest(callback: TrakCallback) -> dict[str, str]:
    files = sorted(path for path in callback.directory.rglob("*.safetensors"))
    return {str(path.relative_to(callback.directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("collect", [{}, {"last": 2}])
def test_a_killed_and_resumed_run_collects_the_same(plain, tmp_path, collect):
    whole = TrakCallback(config(tmp_path / "whole"), **collect)
    trainer(tmp_path / "whole-out", [whole]).train()
    first = TrakCallback(config(tmp_path / "trak"), **collect)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "out", [first, Watch(stop_at=6)], save_total_limit=1).train()
    resumed = TrakCallback(config(tmp_path / "trak"), **collect)
    run = trainer(tmp_path / "out", [resumed], save_total_limit=1)
    run.train(resume_from_checkpoint=True)
    assert steps_of(resumed) == steps_of(whole)
    assert digest(resumed) == digest(whole)
    assert losses(run) == losses(plain[0])


@pytest.mark.slow
def test_a_checkpoint_saved_just_before_the_kill_is_taken_in(tmp_path):
    """The kill comes after the trainer's save of step 6 and before the callback's turn."""
    callback = TrakCallback(config(tmp_path / "trak"))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "out", [Watch(stop_at=6), callback]).train()
    assert steps_of(callback) == [3]
    (callback.directory / ".unfinished-0123").mkdir()
    watch = Watch()
    run = trainer(tmp_path / "out", [watch, callback])
    run.train(resume_from_checkpoint=True)
    assert steps_of(callback) == [3, 6, 9, 12]
    assert not list(callback.directory.glob(".unfinished-*"))


@pytest.mark.slow
def test_resuming_from_an_earlier_step_drops_the_later_ones(tmp_path):
    callback = TrakCallback(config(tmp_path / "trak"))
    trainer(tmp_path / "out", [callback]).train()
    before, watch = digest(callback), Watch(stop_at=6)
    run = trainer(tmp_path / "out", [callback, watch], max_grad_norm=0.1)
    with pytest.raises(KeyboardInterrupt):
        run.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    after = digest(callback)
    assert steps_of(callback) == [3, 6]  # 9 and 12 were of the continuation that is given up
    assert after["checkpoint-3/model.safetensors"] == before["checkpoint-3/model.safetensors"]
    assert after["checkpoint-6/model.safetensors"] != before["checkpoint-6/model.safetensors"]
    saved = load_file(callback.directory / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in watch.weights[6].items())


@pytest.mark.slow
def test_another_run_does_not_mix_with_what_is_there(tmp_path):
    trainer(tmp_path / "a", [TrakCallback(config(tmp_path / "trak"))]).train()
    again = TrakCallback(config(tmp_path / "trak"))
    with pytest.raises(ValueError, match="checkpoints of steps \\[3, 6, 9, 12\\] of another run"):
        trainer(tmp_path / "b", [again]).train()
    replacing = TrakCallback(config(tmp_path / "trak"), overwrite=True, steps=[12])
    watch = Watch()
    trainer(tmp_path / "c", [replacing, watch], seed=8).train()
    assert steps_of(replacing) == [12]
    assert_holds(replacing, watch)


# -- attribution -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_featurize_at_end_is_featurizing_the_collected_checkpoints(tmp_path):
    run = trainer(tmp_path / "out")
    callback = TrakCallback(config(tmp_path / "trak"), last=2, trainer=run, featurize_at_end=True, task=TASK)
    run.add_callback(callback)
    run.train()
    scores = full_scores(callback.attributor, digits(1000, 1009))
    later = TrakAttributor.from_trainer(run, config(tmp_path / "trak"), TASK)
    assert np.array_equal(full_scores(later, digits(1000, 1009)), scores)  # the store is that of `from_trainer`
    by_hand = TrakAttributor.from_trainer(run, config(tmp_path / "by-hand"), TASK).featurize(callback.checkpoints)
    assert np.array_equal(full_scores(by_hand, digits(1000, 1009)), scores)


@pytest.mark.slow
def test_independently_trained_models_share_one_store(tmp_path):
    targets, collected = digits(1000, 1009), []
    for number in range(2):
        run = trainer(tmp_path / f"out-{number}", seed=number)
        callback = TrakCallback(
            config(tmp_path / "trak"), steps=[12], name=f"seed-{number}", trainer=run, featurize_at_end=True,
            first_model_id=number, task=TASK,
        )  # fmt: skip
        run.add_callback(callback)
        run.train()
        collected += callback.checkpoints
    assert callback.attributor.features.store.model_ids == [0, 1]
    together = TrakAttributor.from_trainer(run, config(tmp_path / "together"), TASK).featurize(collected)
    scores = full_scores(callback.attributor, targets)
    assert np.array_equal(scores, full_scores(together, targets))
    assert not np.allclose(scores, full_scores(together, targets, checkpoints=[1], name="one"), rtol=1e-2)


TASK = "image_classification"


# -- what cannot work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collect", "says"),
    [
        ({"last": 0}, "`last` is 0"),
        ({"steps": []}, "`steps` is \\[\\]"),
        ({"steps": [3, -1]}, "step numbers of at least 1"),
        ({"featurize_at_end": True}, "without a `trainer`"),
        ({"name": "some/where"}, "path separator"),
    ],
)
def test_arguments_out_of_range(tmp_path, collect, says):
    with pytest.raises(ValueError, match=says):
        TrakCallback(config(tmp_path), **collect)


def test_what_cannot_be_featurized_is_refused_before_training(tmp_path):
    run = trainer(tmp_path / "out")
    run.add_callback(TrakCallback(config(tmp_path / "trak"), trainer=run, featurize_at_end=True))
    run.compute_loss = lambda model, inputs, **_: model(**inputs)["logits"].logsumexp(0).square().sum()
    with pytest.raises(ValueError, match=r"`Trainer\.compute_loss` compares the rows of a batch"):
        run.train()
    assert run.state.global_step == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("collect", "training", "says"),
    [
        ({}, {"save_strategy": "no"}, "save_strategy='no'"),
        ({"steps": [5, 99]}, {}, "\\[99\\], but this training ends at step 12"),
    ],
)
def test_runs_that_would_collect_nothing(tmp_path, collect, training, says):
    with pytest.raises(ValueError, match=says):
        trainer(tmp_path / "out", [TrakCallback(config(tmp_path / "trak"), **collect)], **training).train()


def test_the_trainers_own_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the trainer's own"):
        trainer(tmp_path, [TrakCallback(config(tmp_path))]).train()


def test_a_checkpoint_without_weights_is_an_error(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    callback = TrakCallback(config(tmp_path / "trak"))
    run = trainer(tmp_path)
    run.state.global_step = 3
    with pytest.raises(FileNotFoundError, match="FULL_STATE_DICT"):
        callback.on_save(run.args, run.state, run.control)


def test_a_configuration_of_another_kind_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"`args` is a TrainingArguments.*Expected a `TrakConfig`"):
        TrakCallback(trainer(tmp_path).args)
