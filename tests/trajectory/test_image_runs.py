"""A replay of a vision transformer against retraining, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from replay_runs import ROWS, TARGETS, RowWeights, config, differences, recorded, trainer
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from hf_trak import TrakAttributor
from hf_trak.evaluation.trainer_retraining import model_outputs
from hf_trak.methods import Replay


def images(count: int, seed: int) -> Dataset:
    """Images, each of a class of its own."""
    pixels = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return Dataset.from_list([{"pixel_values": one.tolist(), "labels": i} for i, one in enumerate(pixels)])


TRAIN, EVAL = images(ROWS, 0), images(TARGETS, 1)


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pixels = torch.tensor([row["pixel_values"] for row in rows], dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_retraining_with_other_weights(tmp_path: Path, schedule: str) -> None:
    """Central differences by the weight of an image, with clipping, accumulation, warmup and groups of decay."""
    weights = RowWeights()
    options = {"rows": TRAIN, "data_collator": collate, "lr_scheduler_type": schedule, "warmup_steps": 0.1}

    def loss(labels: torch.Tensor, logits: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        each = torch.tensor([weights.of.get(int(label), 1.0) for label in labels], dtype=torch.float64)
        return (functional.cross_entropy(logits, labels, reduction="none") * each).mean()

    def model() -> Any:
        torch.manual_seed(1)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "image_size": 4, "patch_size": 2, "num_labels": ROWS}
        made = ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)).double()
        made.loss_function = loss
        return made

    def train() -> torch.Tensor:
        other = trainer(tmp_path, model(), **options)
        other.train()
        return torch.from_numpy(model_outputs(other.model, EVAL, data_collator=collate))

    run = recorded(tmp_path, model(), **options)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    scored = attributor.attribute(EVAL, top_k=None, method=Replay(of="run", smoothing=0.0))
    measured = differences(weights, train)
    found = torch.tensor(scored["trak_scores"], dtype=torch.float64)
    assert float((found - measured).abs().max() / measured.abs().max()) <= 1e-6
