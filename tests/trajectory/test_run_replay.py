"""Replays of recorded `Trainer` runs against retraining, kills, and what is refused."""

import dataclasses
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_runs import (
    EVAL,
    ROWS,
    TARGETS,
    RowWeights,
    config,
    differences,
    in_process,
    outputs,
    recorded,
    replay_and_die,
    replay_in_group,
    replay_saved,
    replayed,
    sentences,
    tiny,
    train_in_group,
    trainer,
)
from store_jobs import start_group
from transformers import DataCollatorWithFlattening

from hf_trak import TrakAttributor
from hf_trak.errors import CheckpointMismatchError, HfTrakError, IncompleteStoreError
from hf_trak.featurize.pricing import recorded_run
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.methods import Replay
from hf_trak.trajectory.passes import StepPasses
from hf_trak.trajectory.record import RunRecord
from hf_trak.trajectory.saved_run import SavedRun
from hf_trak.trajectory.states import RunPath

PLAIN = Replay(of="run", smoothing=0.0)


def scores_of(scored: Any) -> torch.Tensor:
    return torch.tensor(scored["trak_scores"], dtype=torch.float64)


def lora(weights: RowWeights) -> Any:
    """A model with adapters of rank 2, which are trained, and their B not zero."""
    from peft import LoraConfig, get_peft_model

    base = tiny()
    base.loss_function = weights
    torch.manual_seed(2)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_alpha=4))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    return model.double()


def plain_model(weights: RowWeights) -> Any:
    model = tiny()
    model.loss_function = weights
    return model


CASES = {
    "linear": (plain_model, {"max_grad_norm": 0.5}),
    "cosine-warmup": (plain_model, {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 0.1}),
    "unclipped": (plain_model, {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine"}),
    "warmup": (plain_model, {"max_grad_norm": 0.5, "warmup_steps": 0.1}),
    "cosine": (plain_model, {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}),
    "sgd": (plain_model, {"optim": "sgd", "learning_rate": 0.1, "warmup_steps": 0.1}),
    "lora": (lora, {"warmup_steps": 0.1}),
    "padding-free": (plain_model, {"data_collator": DataCollatorWithFlattening(), "remove_unused_columns": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "linear" else pytest.mark.slow) for case in CASES]
)
def test_retraining_with_other_weights(tmp_path: Path, case: str) -> None:
    """Central differences by the weight of a row in the loss, in float64: the derivative without smoothing."""
    make, options = CASES[case]
    weights = RowWeights()
    run = recorded(tmp_path, make(weights), **options)
    found = scores_of(replayed(run, tmp_path, PLAIN))

    def train() -> torch.Tensor:
        other = trainer(tmp_path, make(weights), **options)
        other.train()
        return outputs(other.model)

    measured = differences(weights, train)
    assert float(measured.abs().min()) > 0
    assert float((found - measured).abs().max() / measured.abs().max()) <= 1e-6


MOMENTS = [*(("file", number) for number in range(1, 8)), *(("product", number) for number in (2, 5, 8))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [pytest.param(*one, marks=[] if one == ("file", 5) else pytest.mark.slow) for one in MOMENTS],
)
@pytest.mark.parametrize("after", [False, True])
def test_killed_sweeps_go_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: int, after: bool
) -> None:
    monkeypatch.setattr("hf_trak.trajectory.sweep.KEPT_BYTES", 0)  # which is put back
    for place in ("a", "b"):
        run = recorded(tmp_path / place, tiny(dropout=0.1))
        torch.save(run.model.state_dict(), tmp_path / place / "last.pt")
    whole = scores_of(replay_saved(tmp_path / "a"))
    code = in_process(replay_and_die, tmp_path / "b", moment, number, after)
    assert code < 0
    assert torch.equal(scores_of(replay_saved(tmp_path / "b")), whole)


@pytest.mark.slow
@pytest.mark.parametrize("across", [False, True])
def test_runs_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, across: bool) -> None:
    """Rows of a step are those of both, and its loss and gradient are those that the optimizer got."""
    monkeypatch.setattr("hf_trak.trajectory.sweep.KEPT_BYTES", 0)  # which is put back
    jobs = start_group(tmp_path, 2, train_in_group, str(tmp_path), across)
    seen = [job.wait() for job in jobs]
    assert seen[0] is not None and seen[1] is not None
    steps = RunRecord.open(tmp_path / "trak" / "trajectory" / "run").steps()
    by_rank = [[list(batch.rows) for step in steps for batch in _of_rank(step.batches, rank)] for rank in (0, 1)]
    assert by_rank == [one["value"] for one in seen]
    found = scores_of(replay_saved(tmp_path))
    assert found.abs().min() > 0


@pytest.mark.slow
def test_processes_divide_products_with_the_same_bits(tmp_path: Path) -> None:
    run = recorded(tmp_path / "alone")
    torch.save(run.model.state_dict(), tmp_path / "alone" / "last.pt")
    shutil.copytree(tmp_path / "alone", tmp_path / "both")
    found = {}
    for place, world in (("alone", 1), ("both", 2)):
        jobs = start_group(tmp_path / place, world, replay_in_group, str(tmp_path / place))
        found[place] = [one["value"] for job in jobs if (one := job.wait())]
    assert len(found["both"]) == 2
    assert [one["scores"] for one in found["both"]] == [found["alone"][0]["scores"]] * 2
    products = [[one["products"] for one in found[place]] for place in ("alone", "both")]
    assert sum(products[1]) == sum(products[0]) and min(products[1]) > 0


def _of_rank(batches: Any, rank: int) -> Any:
    half = len(batches) // 2
    return batches[half:] if rank else batches[:half]


@pytest.mark.slow
def test_other_gradients_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path, max_grad_norm=0.0)
    monkeypatch.setattr(RunRecord, "_scale", lambda *given: 0.5)
    with pytest.raises(HfTrakError, match="The gradient of the first step has the norm"):
        replayed(run, tmp_path, Replay(of="run"))


@pytest.mark.slow
def test_parts_of_a_run_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps, rows = recorded(tmp_path / "run", every=4), list[int](), StepPasses.rows
    monkeypatch.setattr(StepPasses, "rows", lambda self, given: (steps.append(len(given)), rows(self, given))[1])
    whole = scores_of(replayed(run, tmp_path / "run", Replay(of="run")))
    assert len(steps) == 9  # gradients that fit into memory are computed once
    monkeypatch.setattr("hf_trak.trajectory.sweep.KEPT_BYTES", 0)
    monkeypatch.setattr("hf_trak.trajectory.passes.ROW_BYTES", 1)
    (tmp_path / "run" / "trak" / "experiments").rename(tmp_path / "before")
    again = scores_of(replayed(run, tmp_path / "run", Replay(of="run")))
    assert len(steps) == 9 + 6 + 9 + 2 * 9  # forwards to the last part, in each part, and twice backwards
    torch.testing.assert_close(again, whole, rtol=1e-6, atol=1e-8)


def test_what_there_is_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path, every=4)
    found = TrakAttributor.from_trainer(run, config(tmp_path)).trajectory()
    assert (found.steps, found.rows, found.states, found.gap) == (9, 3 * ROWS, 4, 4)
    assert found.rates == pytest.approx((1e-2, 1e-2 / 9, 1e-2))
    assert found.clipped == 1.0
    assert found.passes(1) == pytest.approx(3 * (1 + 2))  # gradients once, products twice
    assert found.passes(3, 0.25) == pytest.approx(3 * (1 + 4 / 3 * 0.25 * 3))
    with monkeypatch.context() as patch:
        patch.setattr("hf_trak.trajectory.sweep.KEPT_BYTES", 0)
        assert found.passes(1) == pytest.approx(3 * (3 + 2))
    assert "9 steps over 30 rows (3 epochs), as recorded" in str(found)
    model, batch = run.model, run.data_collator([run.train_dataset[row] for row in range(4)])  # 4 rows, 4 and 2
    inputs = 7 * model.config.n_embd * model.config.n_layer * batch["input_ids"].numel()  # of linear layers alone
    assert 8 * inputs < found.activations < 8 * 8 * inputs
    assert found.memory(8) - found.memory(1) > 7 * 2 * found.activations
    assert found.memory(8) - found.memory(8, 0.01) > 8 * 2 * found.activations  # a row has a product, not the batch

    def failed(*given: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("hf_trak.featurize.run_replaying.run_model", failed)
    again = TrakAttributor.from_trainer(run, config(tmp_path)).trajectory()
    assert again == dataclasses.replace(found, activations=0)


@pytest.mark.slow
def test_a_retraining_is_predicted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.002, "max_grad_norm": 0.0}
    run = recorded(tmp_path, **options)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))

    def make(rows: Any, seed: int) -> Any:
        return trainer(tmp_path, rows=rows, **options)

    found = attributor.verify_replay(EVAL, make, 0.2)
    assert len(found.dropped) == 2
    assert found.r_squared > 0.95
    report = attributor.report(tmp_path / "report.html").read_text("utf-8")
    assert str(found) in report and f"over {TARGETS} targets" in report
    with pytest.raises(ValueError, match="leaves out 0 of 10 rows"):
        attributor.verify_replay(EVAL, make, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 5])
def test_the_best_weights_are_followed_back_from_their_step(tmp_path: Path, every: int) -> None:
    """As `load_best_model_at_end` loads them: scores are those of a training that ends there."""
    options = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 5, "eval_dataset": EVAL}
    whole = recorded(tmp_path / "whole", every=every, **options)
    short = recorded(tmp_path / "short", every=every, max_steps=5, **options)
    whole.model.load_state_dict(short.model.state_dict())
    expected = scores_of(replayed(short, tmp_path / "short", PLAIN))
    assert torch.equal(scores_of(replayed(whole, tmp_path / "whole", PLAIN)), expected)
    attributor = TrakAttributor.from_trainer(whole, config(tmp_path / "whole"))
    assert recorded_run(attributor.features) == Replay(of="run")
    assert attributor.trajectory().steps == 5
    with torch.no_grad():
        whole.model.lm_head.weight += 1e-3
    assert recorded_run(attributor.features) is None


@pytest.mark.slow
def test_groups_and_rows_of_the_result(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    every = scores_of(replayed(run, tmp_path, PLAIN))
    mean = scores_of(replayed(run, tmp_path, PLAIN, group_by="all"))
    torch.testing.assert_close(mean[0], every.mean(0), rtol=1e-5, atol=1e-7)
    rows = scores_of(replayed(run, tmp_path, PLAIN, per="train"))
    assert torch.equal(rows.T, every)
    best = TrakAttributor.from_trainer(run, config(tmp_path)).attribute(EVAL, top_k=2, method=PLAIN)
    assert best["trak_indices"][0] == every[0].topk(2).indices.tolist()


@pytest.mark.slow
def test_smoothing_and_shares_change_scores(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    half = Replay(of="run", hessian_share=0.5)
    methods = (PLAIN, Replay(of="run"), half, replace(half, form="gauss-newton"))
    found = [scores_of(replayed(run, tmp_path, method)) for method in methods]
    assert all(not torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.slow
def test_other_rows_and_weights_are_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "trak" / "trajectory", other / "trak" / "trajectory")
    with pytest.raises(HfTrakError, match="The loss of the first batch was"):
        replayed(trainer(tmp_path, run.model, rows=sentences(ROWS, 5)), other, Replay(of="run"))
    with pytest.raises(CheckpointMismatchError, match="does not have the weights"):
        replayed(trainer(tmp_path, tiny()), tmp_path, Replay(of="run"))


@pytest.mark.slow
def test_the_model_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    replayed(run, tmp_path, Replay(of="run"))
    monkeypatch.setattr(StepPasses, "curvature", _broken)
    with pytest.raises(RuntimeError, match="broken"):
        replayed(run, tmp_path, Replay(of="run", hessian_share=0.5))
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def _broken(*arguments: Any) -> None:
    raise RuntimeError("broken")


@pytest.mark.slow
def test_a_path_that_is_not_the_runs_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_trak.trajectory.sweep.MISSED", 0.0)  # so weights between lie on lines
    run = recorded(tmp_path, every=100, learning_rate=0.3)
    replayed(run, tmp_path, Replay(of="run"))
    assert "Record the weights more often than every 9 steps" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == "linear" else pytest.mark.slow) for case in CASES],
)
@pytest.mark.parametrize("parts", [False, True])
def test_first_and_last_weights_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str, parts: bool
) -> None:
    """Steps that are taken again lead through the weights of the training, whatever they were made of."""
    make, options = CASES[case]
    every = scores_of(replayed(recorded(tmp_path / "a", make(RowWeights()), **options), tmp_path / "a", PLAIN))
    if parts:
        monkeypatch.setattr("hf_trak.trajectory.sweep.KEPT_BYTES", 0)
    run = recorded(tmp_path / "b", make(RowWeights()), every=100, **options)
    found = scores_of(replayed(run, tmp_path / "b", PLAIN))
    assert float((found - every).abs().max() / every.abs().max()) <= 1e-9
    assert not caplog.records


@pytest.mark.slow
def test_steps_that_miss_the_next_weights_give_way_to_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights after half of the run are others than the training made, as after a dropout that nobody recorded."""
    monkeypatch.setattr("hf_trak.trajectory.sweep.KEPT_BYTES", 0)
    run = recorded(tmp_path, learning_rate=1e-3)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    whole = RunReplay(attributor.features, Replay(of="run")).path
    moved = {step: whole.weights(step) for step in (0, 5, 9)}
    way = moved[5] - moved[0]
    moved[5] = moved[5] + 0.5 * way.norm() * torch.nn.functional.normalize(torch.randn_like(way), dim=0)
    line = [torch.lerp(moved[0], moved[5], step / 5) for step in range(5)]
    line += [torch.lerp(moved[5], moved[9], step / 4) for step in range(5)]
    found = {}
    for name, states, read in (("sparse", moved, moved.__getitem__), ("lines", range(10), line.__getitem__)):
        path = RunPath(whole.steps, whole.numbers, states, read, whole.logged)
        monkeypatch.setattr(RunReplay, "path", path)
        found[name] = scores_of(attributor.attribute(EVAL, top_k=None, method=Replay(of="run"), name=name))
    assert torch.equal(found["sparse"], found["lines"])
    missed = re.search(r"taken again, missed the next known weights by (\d+) % of the way to them", caplog.text)
    assert missed is not None and int(missed[1]) >= 50  # half the way, and more where it begins elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 1}, {"dataloader_drop_last": True, "max_steps": 5}]
)
def test_runs_without_a_record(tmp_path: Path, options: dict[str, Any]) -> None:
    """Order, losses and rates are those of the record, and so are scores where a checkpoint is at every step."""
    run = recorded(tmp_path, save_strategy="steps", save_steps=1, logging_strategy="steps", **options)
    tiny().save_pretrained(tmp_path / "out" / "checkpoint-0")
    method = Replay(of="run", name="nothing")
    features = TrakAttributor.from_trainer(run, config(tmp_path)).features
    saved, record = RunReplay(features, method).record, RunReplay(features, Replay(of="run")).record
    assert isinstance(saved, SavedRun)
    for one, other in zip(saved.steps(), record.steps(), strict=True):
        assert [batch.rows for batch in one.batches] == [batch.rows for batch in other.batches]
        assert [batch.items for batch in one.batches] == [batch.items for batch in other.batches]
        assert one.rates == pytest.approx(other.rates)
    torch.testing.assert_close(
        scores_of(replayed(run, tmp_path, method)), scores_of(replayed(run, tmp_path, Replay(of="run")))
    )


@pytest.mark.slow
def test_checkpoints_are_enough_for_a_new_trainer(tmp_path: Path) -> None:
    """One with the same arguments, which has not trained, in a directory that has no record."""
    options = {"save_strategy": "steps", "save_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
    run = trainer(tmp_path, **options)
    run.train()
    tiny().save_pretrained(tmp_path / "out" / "checkpoint-0")
    expected = scores_of(replayed(run, tmp_path / "a", Replay(of="run")))
    model = type(run.model).from_pretrained(tmp_path / "out" / "checkpoint-9", dtype=torch.float64)
    again = trainer(tmp_path, model, **options)
    for one in (tmp_path / "out").rglob("training_args.bin"):
        one.unlink()  # never read
    assert torch.equal(scores_of(replayed(again, tmp_path / "b", Replay(of="run"))), expected)
    states = RunReplay(TrakAttributor.from_trainer(again, config(tmp_path / "b")).features, Replay(of="run")).record
    assert [steps for steps, _ in states.logged()] == [range(i, i + 1) for i in range(9)]


def test_runs_without_first_weights_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="steps", save_steps=9)
    with pytest.raises(IncompleteStoreError, match=r"has no checkpoint and .* this trainer has not trained\."):
        replayed(run, tmp_path, Replay(of="run"))
    run.train()
    with pytest.raises(IncompleteStoreError, match=r"no record, .* steps \[9\] of 9 and no `checkpoint-0`\."):
        replayed(run, tmp_path, Replay(of="run"))
    tiny().save_pretrained(tmp_path / "first")
    found = scores_of(replayed(run, tmp_path, Replay(of="run", start=str(tmp_path / "first"))))
    assert found.abs().min() > 0


def test_unknown_orders_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, train_sampling_strategy="group_by_length")
    run.train()
    with pytest.raises(HfTrakError, match="draws its rows with LengthGroupedSampler"):
        replayed(run, tmp_path, Replay(of="run", start="somewhere"))
