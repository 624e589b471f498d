"""Forms of a question to the replay of a run: against retraining with other weights of rows, and plain loops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from replay_runs import EVAL, LENGTH, ROWS, TRAIN, RowWeights, config, recorded, tiny, trainer

from hf_trak import Span, TrakAttributor
from hf_trak.evaluation.trainer_retraining import model_outputs
from hf_trak.methods import Replay

PLAIN = Replay(of="run", smoothing=0.0)


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
