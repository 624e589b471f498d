"""What calibration chooses on a real run, against retraining without rows."""

from pathlib import Path

import numpy as np
import pytest
from test_replay import DigitNet, Digits, scores_of
from transformers import Trainer, TrainingArguments

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.evaluation import TrainerRetraining, linear_datamodeling_score, random_subsets


@pytest.mark.slow
def test_the_choice_predicts_retraining(tmp_path: Path) -> None:
    """Of methods between .1 and more apart, by retraining on targets that calibration has not seen."""
    rows, seen, targets = Digits(range(200)), Digits(range(1000, 1006)), Digits(range(1100, 1124))
    args = TrakConfig(str(tmp_path / "trak"), proj_dim=1024, use_cpu=True)

    def make(train, seed, callbacks=()):
        arguments = TrainingArguments(
            str(tmp_path / "run"), per_device_train_batch_size=20, num_train_epochs=6, learning_rate=5e-3, seed=seed,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        return Trainer(DigitNet(), arguments, train_dataset=train, callbacks=list(callbacks))

    trainer = make(rows, 1, [TrakCallback(args, record=True)])
    trainer.train()
    attributor = TrakAttributor.from_trainer(trainer, args, task="image_classification").featurize()
    found = attributor.calibrate(seen)
    masks = random_subsets(len(rows), 24, 0.9)
    retrain = TrainerRetraining(make, rows, targets, "image_classification", drop="mask", seed=1)
    truth = np.stack([retrain(np.flatnonzero(mask), 0) for mask in masks])

    def lds(method: object) -> float:
        scores = scores_of(attributor, targets, method).numpy()
        return float(linear_datamodeling_score(scores, masks, truth).mean())

    by_retraining = [lds(one.method) for one in found.candidates]
    assert max(by_retraining) > min(by_retraining) + 0.1, (str(found), by_retraining)
    assert lds(found.chosen.method) > max(by_retraining) - 0.05, (str(found), by_retraining)
    print(found, by_retraining, lds(found.chosen.method))
