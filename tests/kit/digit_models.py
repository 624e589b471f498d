"""Scikit-learn's digits as datasets, and a small classifier of them, for several test modules."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from torch import Tensor, nn
from trak_options import trak_config
from transformers.modeling_outputs import ImageClassifierOutput

from hf_trak import TrakAttributor


class DigitNet(nn.Module):
    """A classifier of 8 × 8 digits with the calling convention of transformers: 1,960 parameters, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 26), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(26, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        logits = self.head(self.body(pixel_values))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def digits(start: int, stop: int) -> Dataset:
    """Load rows `start … stop` of the digits, with a column that no model takes."""
    data = load_digits()
    source = ["scan", "photo", "form"]
    rows = {
        "pixel_values": data.images[start:stop] / 16.0,
        "labels": data.target[start:stop],
        "source": [source[i % 3] for i in range(start, stop)],
    }
    return Dataset.from_dict(rows)


def trained_net(rows: Dataset, steps: int = 30, seed: int = 0) -> DigitNet:
    """Train a network on these rows for a few steps."""
    torch.manual_seed(seed)
    net = DigitNet()
    pixels = torch.tensor(np.array(rows["pixel_values"]), dtype=torch.float32)
    labels = torch.tensor(rows["labels"])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(pixels, labels).loss.backward()
        optimizer.step()
    return net.eval()


def make(model: nn.Module, directory: Path, train_dataset: Any, **options: Any) -> TrakAttributor:
    """Make an attributor with small shards, and batches whose size divides nothing."""
    defaults = {"proj_type": "sjlt", "proj_dim": 64, "shard_size": 16, "per_device_batch_size": 5}
    config = trak_config(output_dir=str(directory), use_cpu=True, **{**defaults, **options})
    return TrakAttributor(model, config, train_dataset=train_dataset, task="image_classification")


def full_scores(attributor: TrakAttributor, rows: Any, **options: Any) -> np.ndarray:
    """All scores, `(n_train, n_targets)`."""
    scored = attributor.attribute(rows, top_k=None, **options)
    return np.stack(scored.with_format("numpy")["trak_scores"][:]).T


def relative_error(got: Any, expected: Any) -> float:
    """‖got − expected‖ / ‖expected‖."""
    got, expected = np.asarray(got, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
