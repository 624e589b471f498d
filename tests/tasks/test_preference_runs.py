"""Recorded runs of TRL's trainers of pairs, whose loss is none of those that their model returns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_runs import config
from test_preferences_trl import pairs, scorer
from test_trl import arguments, llama, tokenizer

from hf_trak import Exact, TrakAttributor
from hf_trak.callbacks import TrakCallback
from hf_trak.data.preferences import prepared_rows
from hf_trak.evaluation import TrainerRetraining
from hf_trak.methods import Replay
from hf_trak.report.training import effects_of_training

trl = pytest.importorskip("trl")

STEP = 1e-2
ROWS = (0, 3)


def weighted(kind: type) -> type:
    """A trainer that counts some pairs more or less, by the loss of each alone."""

    class Weighted(kind):  # type: ignore[misc]
        of: dict[int, float]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> torch.Tensor:
            parts = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            total, size = super().compute_loss(model, inputs), len(parts["input_ids"]) // 2
            for place, ids in enumerate(parts["input_ids"].tolist()[:size]):
                row = next(row for row, start in enumerate(self.starts) if start == ids[: len(start)])
                if (weight := self.of.get(row, 1.0)) != 1.0:
                    alone = {
                        name: one[[place, place + size]] if len(one) == 2 * size else one[place : place + 1]
                        for name, one in parts.items()
                    }
                    total = total + (weight - 1) / size * super().compute_loss(model, alone)
            return total

    Weighted.__name__ = kind.__name__
    return Weighted


def trained(kind: type, configured: type, directory: Path, of: dict[int, float], **options: Any) -> Any:
    args = arguments(
        directory, configured, per_device_train_batch_size=2, num_train_epochs=1, learning_rate=1e-2, seed=3,
        adam_epsilon=1e-2, gradient_accumulation_steps=2, gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    model = (llama() if kind is trl.DPOTrainer else scorer()).double()
    run = (weighted(kind) if of else kind)(
        model, args=args, train_dataset=pairs(8), processing_class=tokenizer(), **options
    )
    run.of = of
    run.starts = [row.get("prompt_ids", []) + row["chosen_ids"] for row in run.train_dataset]
    run.train()
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "configured"), [(trl.DPOTrainer, trl.DPOConfig), (trl.RewardTrainer, trl.RewardConfig)]
)
def test_retraining_with_other_weights_of_pairs(tmp_path: Path, kind: type, configured: type) -> None:
    """Central differences by the weight of a pair, of the margin of pairs that were not trained on."""
    reference = {"ref_model": llama().double()} if kind is trl.DPOTrainer else {}
    callback = TrakCallback(config(tmp_path), record=True)
    run = trained(kind, configured, tmp_path, {}, callbacks=[callback], **reference)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    method = Replay(of="run", smoothing=0.0)
    found = attributor.attribute(pairs(2, seed=9), top_k=None, method=method, name="pairs")["trak_scores"]

    asked = prepared_rows(run, pairs(2, seed=9))

    def outputs(of: dict[int, float]) -> torch.Tensor:
        model = trained(kind, configured, tmp_path / "again", of, **reference).model.eval()
        with torch.no_grad():
            return torch.stack([value(model, row, "chosen") - value(model, row, "rejected") for row in asked])

    def value(model: Any, row: Any, side: str) -> torch.Tensor:
        """The reward of an answer, or β log of its probability; that of the reference is no matter of training."""
        ids = torch.tensor([row.get("prompt_ids", []) + row[f"{side}_ids"]])
        if kind is trl.RewardTrainer:
            return model(input_ids=ids).logits[0, 0]
        said = model(input_ids=ids).logits[0, :-1].log_softmax(1).gather(1, ids[0, 1:, None])
        return run.args.beta * said[-len(row[f"{side}_ids"]) :].sum()

    measured = torch.stack([(outputs({row: 1 + STEP}) - outputs({row: 1 - STEP})) / (2 * STEP) for row in ROWS], 1)
    error = (torch.tensor(found[:], dtype=torch.float64)[:, list(ROWS)] - measured).abs().max()
    assert float(error / measured.abs().max()) <= 5e-3  # TRL computes log-probabilities in float32


@pytest.mark.slow
def test_the_report_of_a_training_on_preferences(tmp_path: Path) -> None:
    """The loss and its gradients, by the trainer's own `compute_loss` of validation pairs that nobody has prepared."""
    run = trained(trl.DPOTrainer, trl.DPOConfig, tmp_path, {}, ref_model=llama().double())
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    found = effects_of_training(attributor.features, pairs(3, seed=9), Exact("identity"))
    reviewed = attributor.review(pairs(3, seed=9))
    weights = [one for one in run.model.eval().parameters() if one.requires_grad]

    def loss(rows: Any) -> torch.Tensor:
        return run.compute_loss(run.model, run.data_collator(list(rows)))

    def gradient(rows: Any) -> torch.Tensor:
        parts = torch.autograd.grad(loss(rows), weights, allow_unused=True, materialize_grads=True)
        return torch.cat([one.flatten() for one in parts])

    asked = prepared_rows(run, pairs(3, seed=9))
    assert found.loss == pytest.approx(float(loss(asked)), rel=1e-5)
    expected = [-float(gradient(run.train_dataset.select([row])) @ gradient(asked)) / 8 for row in range(8)]
    assert found.effects == pytest.approx(expected, rel=1e-3, abs=1e-4 * max(map(abs, expected)))
    assert np.isfinite(reviewed["effect"][:]).all()


@pytest.mark.slow
def test_retrainings_take_task_and_settings_from_their_trainer(tmp_path: Path) -> None:
    """Of pairs as people have them, with the trainer's own β."""
    made = []

    def make(rows: Any, seed: int) -> Any:
        args = arguments(
            tmp_path, trl.DPOConfig, per_device_train_batch_size=4, num_train_epochs=1, seed=seed, beta=0.5,
            learning_rate=1e-2, gradient_checkpointing=False, max_length=None,
        )  # fmt: skip
        reference = llama().double()
        made.append(
            trl.DPOTrainer(llama().double(), reference, args, train_dataset=rows, processing_class=tokenizer())
        )
        return made[-1]

    asked = pairs(2, seed=9)
    found = TrainerRetraining(make, pairs(8), asked)(np.arange(8), seed=3)
    run = made[-1]

    def said(row: Any, side: str) -> float:
        ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
        steps = run.model.eval()(input_ids=ids).logits[0, :-1].log_softmax(1).gather(1, ids[0, 1:, None])
        return float(steps[-len(row[f"{side}_ids"]) :].sum())

    expected = [0.5 * (said(row, "chosen") - said(row, "rejected")) for row in prepared_rows(run, asked)]
    assert found == pytest.approx(expected, rel=1e-4)
