"""Forms of a question to the replay of a run: against retraining with other weights of rows, and plain loops."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from replay_runs import EVAL, LENGTH, ROWS, TRAIN, RowWeights, config, recorded, tiny, trainer
from transformers import TrainerCallback

from hf_trak import Span, TrakAttributor
from hf_trak.attributor import last_result
from hf_trak.callbacks import TrakCallback
from hf_trak.errors import HfTrakError
from hf_trak.evaluation.trainer_retraining import model_outputs
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.hub.scores import check_scores
from hf_trak.methods import Replay

PLAIN = Replay(of="run", smoothing=0.0, hessian_share=1.0)


def weighted(weights: RowWeights) -> Any:
    model = tiny()
    model.loss_function = weights
    return model


def differences(directory: Path, rows: Any, of: Any) -> torch.Tensor:
    """Central differences of model outputs by the weights of training rows, `(rows, m)`."""
    weights, step, found = RowWeights(), 1e-6, []
    for row in rows:
        sides = []
        for sign in (1, -1):
            weights.of = {row: 1 + sign * step}
            run = trainer(directory, weighted(weights))
            run.train()
            sides.append(torch.from_numpy(model_outputs(run.model, of, batch_size=1)))
        found.append((sides[0] - sides[1]) / (2 * step))
    return torch.stack(found)


def masked(tokens: Any) -> Dataset:
    """The targets, each with the labels at some places alone."""
    masks = [[int(place in tokens) for place in range(LENGTH)]] * len(EVAL)
    return EVAL.add_column("target_mask", masks)


@pytest.mark.slow
def test_parts_of_targets_and_rows_themselves(tmp_path: Path) -> None:
    """Spans, tokens, and training rows as their own targets: the derivatives that retraining measures."""
    run = recorded(tmp_path, weighted(RowWeights()))
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    rows, singles = (0, 3, 8), [masked({place}) for place in range(1, LENGTH)]
    span = attributor.attribute(EVAL, top_k=None, method=PLAIN, part=Span(tokens=(2, 4)))
    tokens = attributor.attribute(EVAL, top_k=ROWS, method=PLAIN, per_token=True)
    own = attributor.self_influence(PLAIN)
    every = Dataset.from_list([dict(one) for part in (masked({2, 3}), *singles) for one in part])
    measured = differences(tmp_path, rows, every).unflatten(1, (LENGTH, len(EVAL)))
    bound = 2e-6 * float(measured.abs().max())
    itself = differences(tmp_path, rows, TRAIN)
    for place, row in enumerate(rows):
        for target in range(len(EVAL)):
            assert span[target]["trak_scores"][row] == pytest.approx(float(measured[place, 0, target]), abs=bound)
            rank = tokens[target]["trak_indices"].index(row)
            found = torch.tensor(tokens[target]["trak_token_scores"][rank], dtype=torch.float64)
            torch.testing.assert_close(found, measured[place, 1:, target], rtol=0, atol=bound)
        assert float(own[row]) == pytest.approx(float(itself[place, row]), rel=1e-5)


class Changed(TrainerCallback):
    """Changes the learning rate or the weight decay of one step by a factor."""

    def __init__(self, name: str, step: int, factor: float) -> None:
        self.name, self.step, self.factor = name, step, factor
        self.before: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        groups = optimizer.param_groups
        if state.global_step == self.step:
            self.before = [group[self.name] for group in groups]
            for group in groups:
                group[self.name] *= self.factor

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        if state.global_step == self.step:
            for group, value in zip(optimizer.param_groups, self.before, strict=True):
                group[self.name] = value


@pytest.mark.slow
def test_learning_rate_and_weight_decay_of_every_step(tmp_path: Path) -> None:
    """How outputs depend on them is what training with others shows, step by step, and a report says it."""
    run = recorded(tmp_path, weighted(RowWeights()))
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    attributor.attribute(EVAL, top_k=2, method=PLAIN)
    last = last_result(attributor)
    found = RunReplay(attributor.features, PLAIN)._found(last.question, PLAIN)
    assert found.settings.shape == (2, 9, len(EVAL))
    change = 1e-5
    for place, name in enumerate(("lr", "weight_decay")):
        for step in (0, 4, 8):
            sides = []
            for factor in (1 + change, 1 - change):
                other = trainer(tmp_path, weighted(RowWeights()), callbacks=[Changed(name, step, factor)])
                other.train()
                sides.append(torch.from_numpy(model_outputs(other.model, EVAL, batch_size=1)))
            measured = (sides[0] - sides[1]) / (2 * change)
            bound = 1e-6 * float(found.settings[place].abs().max())
            torch.testing.assert_close(found.settings[place, step], measured, rtol=1e-5, atol=bound)
    facts = last.facts(attributor.features)
    assert facts["run"] == "9 steps over 30 rows (3 epochs), as recorded"
    mean = 0.1 * float(found.settings[0].mean(1).sum())
    assert facts["learning rate"].startswith(f"10 % more changes the targets' outputs by {mean:+.3g} in the mean")
    assert "weight decay" in facts


@pytest.mark.slow
def test_an_estimate_says_what_a_replay_took(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    cost = attributor.estimate(len(EVAL), method=PLAIN).stages["replay"]
    assert cost.passes == 3 * ROWS * (1 + 2 * len(EVAL))
    half = attributor.estimate(EVAL, method=Replay(of="run", hessian_share=0.5)).stages["replay"]
    assert half.passes == 3 * ROWS * (1 + 2 * len(EVAL) / 2)
    many = attributor.estimate(200, method=Replay(of="run")).stages["replay"].passes / (3 * ROWS)
    assert many == 1 + 2 * 200
    fewer = attributor.estimate(200, method=Replay(of="run", hessian_share=0.25)).stages["replay"].passes / (3 * ROWS)
    assert fewer == pytest.approx(1 + 4 / 3 * 0.25 * 200)
    attributor.attribute(EVAL, top_k=None, method=PLAIN)
    place = tmp_path / "trak" / "experiments"
    files = list(place.rglob("scores.safetensors"))
    assert sum(path.stat().st_size for path in files) == pytest.approx(cost.disk, abs=700)
    measured = attributor.estimate(EVAL, measure=True, method=PLAIN)
    assert measured.stages["replay"].seconds == cost.passes / measured.rows_per_second
    parameters = attributor.trajectory().parameters
    attributor.args.curvature.memory = 2.5 * 4 * 8 * parameters / 2**30
    assert attributor.estimate(len(EVAL), method=PLAIN).stages["replay"].passes == 3 * ROWS * (2 * 1 + 2 * len(EVAL))
    with pytest.raises(ValueError, match="nothing is known of its steps"):
        attributor.features.estimate(1, method=PLAIN)


@pytest.mark.slow
def test_a_record_of_another_name(tmp_path: Path) -> None:
    recorded(tmp_path)
    other = TrakCallback(config(tmp_path), record=True, every=3, name="second")
    run = trainer(tmp_path, callbacks=[other])
    run.train()
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    assert (attributor.trajectory().gap, attributor.trajectory("second").gap) == (1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("method", [PLAIN, Replay(rows=3)])
def test_forms_of_a_question_are_loops_over_scores(tmp_path: Path, method: Replay) -> None:
    run = recorded(tmp_path)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    every = torch.tensor(attributor.attribute(EVAL, top_k=None, method=method)["trak_scores"][:])
    bound = {"rtol": 1e-4, "atol": 1e-6 * float(every.abs().max())}
    kinds, sources = ["a", "b", "a"], [row % 3 for row in range(ROWS)]
    grouped = attributor.attribute(EVAL, top_k=None, method=method, group_by=kinds)
    assert grouped["n_targets"][:] == [2, 1]
    means = torch.stack([(every[0] + every[2]) / 2, every[1]])
    torch.testing.assert_close(torch.tensor(grouped["trak_scores"][:]), means, **bound)
    summed = attributor.group_scores(EVAL, sources, method=method)
    for target, row in enumerate(summed):
        for group, found in zip(row["trak_groups"], row["trak_group_scores"], strict=True):
            expected = sum(float(every[target, i]) for i in range(ROWS) if sources[i] == group)
            assert found == pytest.approx(expected, rel=1e-4, abs=10 * bound["atol"])
    best = attributor.select(3, EVAL, method=method)
    assert best["trak_index"][:] == every.mean(0).topk(3).indices.tolist()
    worst = attributor.select(ROWS, EVAL, "least_harmful", method=method)["trak_index"][:]
    assert worst == every.min(0).values.argsort(descending=True).tolist()
    tokens = attributor.attribute(EVAL, top_k=ROWS, method=method, per_token=True)
    for one in tokens:
        parts = torch.tensor(one["trak_token_scores"])
        torch.testing.assert_close(parts.sum(1), torch.tensor(one["trak_scores"]), **bound)
    check_scores(attributor.attribute(EVAL, top_k=3, method=method))


class Drawn(torch.utils.data.Dataset[Any]):
    """Targets that are others at every look."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        drawn = torch.randint(0, 17, (LENGTH,))
        return {"input_ids": drawn, "labels": drawn}


@pytest.mark.slow
def test_questions_to_other_rows_or_several_checkpoints_are_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    attributor.featurize([tiny(), run.model])
    with pytest.raises(ValueError, match=r"`checkpoints` are \[0, 1\], and a replay follows one run"):
        attributor.attribute(EVAL, method=PLAIN, checkpoints=[0, 1])
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "trak" / "trajectory", other / "trak" / "trajectory")
    fewer = TrakAttributor.from_trainer(trainer(tmp_path, run.model, rows=TRAIN.select(range(9))), config(other))
    with pytest.raises(HfTrakError, match="was trained on 10 rows, and the training dataset has 9"):
        fewer.attribute(EVAL, method=PLAIN)


@pytest.mark.slow
def test_several_draws_of_targets_are_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path, num_draws=2))
    with pytest.raises(HfTrakError, match=r"and rows come at random\. A replay follows one draw"):
        attributor.attribute(Drawn(), method=PLAIN)
