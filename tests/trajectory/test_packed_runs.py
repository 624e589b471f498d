"""Recorded runs of TRL's `SFTTrainer`, whose rows are two documents each and lie end to end in a batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from doc_examples import word_tokenizer
from replay_runs import LENGTH, ROWS, TRAIN, RowWeights, config, differences, outputs, replayed, sentences, tiny

from hf_trak.callbacks import TrakCallback
from hf_trak.methods import Replay

trl = pytest.importorskip("trl")

DOCUMENTS = sentences(2 * ROWS, 0).select_columns("input_ids")


def packing_trainer(directory: Path, rows: Any = None, accumulated: int = 1, **options: Any) -> Any:
    args = trl.SFTConfig(
        str(directory / "out"), packing=rows is None, gradient_accumulation_steps=accumulated,
        max_length=2 * LENGTH, num_train_epochs=2, learning_rate=1e-2,
        per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        save_strategy="no", disable_tqdm=True, seed=3,
    )  # fmt: skip
    return trl.SFTTrainer(
        tiny(), args=args, train_dataset=rows or DOCUMENTS, processing_class=word_tokenizer(), **options
    )


@pytest.mark.slow
def test_retraining_with_other_weights_of_packed_rows(tmp_path: Path) -> None:
    """Central differences by the weight of a packed row in the loss, in float64."""
    packed = packing_trainer(tmp_path).train_dataset
    assert len(packed) == ROWS and packed["seq_lengths"][:] == [[LENGTH, LENGTH]] * ROWS
    weights = RowWeights({i: [row["input_ids"][:LENGTH], row["input_ids"][LENGTH:]] for i, row in enumerate(packed)})

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return weights(outputs.logits, labels, num_items_in_batch=num_items_in_batch)

    def trained(**options: Any) -> Any:
        run = packing_trainer(tmp_path, compute_loss_func=loss, **options)
        run.train()
        return run

    run = trained(callbacks=[TrakCallback(config(tmp_path), record=True)])
    found = replayed(run, tmp_path, Replay(of="run", smoothing=0.0))["trak_scores"]
    measured = differences(weights, lambda: outputs(trained().model))
    error = (torch.tensor(found, dtype=torch.float64) - measured).abs().max()
    assert float(error / measured.abs().max()) <= 1e-6


@pytest.mark.slow
def test_retraining_with_other_weights_of_rows_that_trl_counts(tmp_path: Path) -> None:
    """TRL divides by the tokens of both batches of a step, and gives their number to no model."""
    rows = [
        {**row, "labels": [token if i % 2 or place > 3 else -100 for place, token in enumerate(row["input_ids"])]}
        for i, row in enumerate(TRAIN)
    ]
    weights, given = RowWeights({i: [row["labels"]] for i, row in enumerate(rows)}), Dataset.from_list(rows)

    def trained(**options: Any) -> Any:
        run = packing_trainer(tmp_path, rows=given, accumulated=2, **options)
        run.train()
        return run

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return weights(outputs.logits, labels, num_items_in_batch=num_items_in_batch)

    run = trained(callbacks=[TrakCallback(config(tmp_path), record=True)])
    found = replayed(run, tmp_path, Replay(of="run", smoothing=0.0))["trak_scores"]
    measured = differences(weights, lambda: outputs(trained(compute_loss_func=loss).model))
    error = (torch.tensor(found, dtype=torch.float64) - measured).abs().max()
    assert float(error / measured.abs().max()) <= 1e-4  # TRL computes log-probabilities in float32
