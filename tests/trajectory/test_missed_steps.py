"""A replay compares every step whose weights are known before and after it, and names one that is another one now."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from replay_runs import EVAL, TRAIN, config, tiny, trainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_trak import TrakAttributor
from hf_trak.callbacks import TrakCallback
from hf_trak.methods import Replay
from hf_trak.trajectory.record import RunRecord


class Scaled(TrainerCallback):
    """Changes gradients between the loss and the optimizer's step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters() if state.global_step > 3 else ():
            parameter.grad.mul_(0.5)


SWAPPED = TRAIN.select([0, 2, 1, *range(3, len(TRAIN))])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("callbacks", "rows", "missed"),
    [([], TRAIN, False), ([], SWAPPED, True), ([Scaled()], TRAIN, True)],
    ids=["the same", "rows in another order", "scaled gradients"],
)
def test_a_step_that_is_another_one_is_named(
    callbacks: list[Any], rows: Any, missed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, callbacks=[*callbacks, TrakCallback(config(tmp_path), record=True)])
    run.train()
    run.train_dataset = rows
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    attributor.attribute(EVAL, top_k=None, method=Replay(of="run"))
    assert any("of the run, taken again, ends " in text for text in caplog.messages) == missed


def test_rounding_of_weights_is_no_other_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In float32, steps of a low rate are hardly longer than what rounding does to the weights."""
    callback = TrakCallback(config(tmp_path), record=True)
    run = trainer(tmp_path, tiny(torch.float32), callbacks=[callback], learning_rate=1e-7)
    run.train()
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    attributor.attribute(EVAL, top_k=None, method=Replay(of="run"))
    assert not [text for text in caplog.messages if "taken again" in text]


def test_steps_of_gradients_that_are_rounding_are_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No output depends on the biases of keys. Their gradient is what rounding leaves, and Adam makes steps of it."""
    callback = TrakCallback(config(tmp_path), record=True)
    run = trainer(tmp_path, tiny(torch.float32), callbacks=[callback], learning_rate=1e-3, adam_epsilon=1e-15)
    before = run.model.transformer.h[0].attn.c_attn.bias[8:16].detach().clone()
    run.train()
    moved = run.model.transformer.h[0].attn.c_attn.bias[8:16].detach() - before
    assert float(moved.abs().mean()) > 1e-4
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    attributor.attribute(EVAL, top_k=None, method=Replay(of="run"))
    assert not [text for text in caplog.messages if "taken again" in text]


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_rows_of_any_step_between_two_states_are_compared(
    optim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those whose tokens, and with them the rows of the table that they move, the last step has not."""
    tokens = torch.randperm(192, generator=torch.Generator().manual_seed(0)).reshape(32, 6).tolist()
    rows = Dataset.from_list([{"input_ids": one, "labels": one} for one in tokens])
    torch.manual_seed(1)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 200, "n_positions": 8}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **none, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("wte" in name)
    callback = TrakCallback(config(tmp_path), record=True, every=4)
    rate = 1.0 if optim == "sgd" else 1e-2
    run = trainer(tmp_path, model, rows, callbacks=[callback], num_train_epochs=1, per_device_train_batch_size=4,
                  weight_decay=0.0, optim=optim, learning_rate=rate)  # fmt: skip
    run.train()
    steps = RunRecord.open(tmp_path / "trak" / "trajectory" / "run").steps()
    changed = {row for step in steps[1:3] for row in step.rows}
    other = [one[::-1] if row in changed else one for row, one in enumerate(tokens)]
    run.train_dataset = Dataset.from_list([{"input_ids": one, "labels": one} for one in other])
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    attributor.attribute(EVAL, top_k=None, method=Replay(of="run"))
    assert any("missed the next known weights by" in text for text in caplog.messages)
