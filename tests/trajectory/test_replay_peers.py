"""Replays have the derivatives of bergson's MAGIC, of a run that both can follow. Skipped where bergson is missing."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from replay_runs import LENGTH, config, recorded
from transformers import GPT2Config, GPT2LMHeadModel

from hf_trak import TrakAttributor
from hf_trak.methods import Replay
from hf_trak.modelout_functions import CausalLMModelOutput
from hf_trak.trajectory.record import RunRecord

WORDS, ROWS, RATE = 4, 10, 1e-2


def peer(name: str) -> ModuleType:
    """Import a module of another library, or skip the test."""
    if name not in sys.modules and importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name.split('.')[0]} is not installed")
    return importlib.import_module(name)


def rows(count: int, seed: int) -> Dataset:
    """Rows that have every token before the last one: Adam's root has no derivative where a gradient is 0."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        more = torch.randint(WORDS, (LENGTH - WORDS - 1,), generator=generator)
        order = torch.cat([torch.arange(WORDS), more])[torch.randperm(LENGTH - 1, generator=generator)]
        made.append([*order.tolist(), int(torch.randint(WORDS, (1,), generator=generator))])
    return Dataset.from_dict({"input_ids": made, "labels": made})


def model(loss: Any) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    made = GPT2LMHeadModel(
        GPT2Config(
            n_layer=1, n_head=2, n_embd=8, vocab_size=WORDS, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, tie_word_embeddings=False, attn_implementation="eager",
        )
    ).double()  # fmt: skip
    made.transformer.wpe.requires_grad_(False)  # the last position has no gradient
    made.loss_function = loss
    return made


@pytest.mark.parametrize("clipped", [0.0, 0.5])
def test_runs_have_the_scores_of_magic(tmp_path: Path, clipped: float) -> None:
    magic, torchopt = peer("bergson.magic.trainer"), peer("torchopt")
    stream, loss = peer("bergson.magic.data_stream").DataStream, peer("bergson.utils.math").weighted_causal_lm_ce
    train, targets = rows(ROWS, 0), rows(2, 1)
    options = {"weight_decay": 0.0, "max_grad_norm": clipped, "gradient_accumulation_steps": 1}
    run = recorded(tmp_path, model(loss), rows=train, learning_rate=RATE, **options)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    scored = attributor.attribute(targets, top_k=None, method=Replay(of="run", smoothing=0.0))
    ours = torch.tensor(scored["trak_scores"], dtype=torch.float64)

    steps = RunRecord.open(tmp_path / "trak" / "trajectory" / "run").steps()
    order = [row for step in steps for row in step.rows]
    data = stream(train.select(order), len(steps[0].rows))
    optimizer = torchopt.adamw(lambda step: RATE * (1 - step / len(steps)), eps=1e-8, weight_decay=0.0)
    trainer, state = magic.Trainer.initialize(model(loss), optimizer)
    last = trainer.train(state, data, save_dir=str(tmp_path / "magic"), save_mode="all", max_grad_norm=clipped)
    own = dict(run.model.named_parameters())
    for name, value in last.params.items():
        torch.testing.assert_close(value, own[name], rtol=1e-3, atol=1e-5)  # torchopt counts steps in float32

    task = CausalLMModelOutput()
    for target, found in enumerate(ours):
        batch = {name: torch.tensor([targets[target][name]]) for name in ("input_ids", "labels")}
        output = task.output(run.model(**batch), batch).sum()
        slopes = torch.autograd.grad(output, [own[name] for name in last.params])
        moments = [one for one in peer("torchopt.pytree").tree_iter(last.opt_state) if torch.is_tensor(one)]
        empty = [torch.zeros_like(one) for one in moments if one.is_floating_point()]
        begin = magic.BackwardState(dict(zip(last.params, slopes, strict=True)), empty, torch.zeros_like(data.weights))
        back = trainer.backward(
            str(tmp_path / "magic"), data, begin, last, cleanup=False, save_mode="all", max_grad_norm=clipped
        )
        theirs = torch.zeros(ROWS, dtype=torch.float64).index_add_(
            0, torch.tensor(order), back.weight_grads.detach().double()
        )
        assert float((found - theirs).abs().max() / theirs.abs().max()) <= 1e-3
