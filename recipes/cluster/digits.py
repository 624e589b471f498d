"""The model, its rows and its attributor, which all workers import.

A model of the script itself would have another name in each process, and features of models with different names are
not mixed.
"""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hf_trak import TrakAttributor, TrakConfig


class Network(nn.Module):
    """A classifier of 8 × 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layers(pixel_values)


def data() -> tuple[Dataset, Dataset]:
    """Load training rows and targets."""
    digits = load_digits()
    rows = {"pixel_values": (digits.images / 16.0).astype(np.float32), "labels": digits.target}
    dataset = Dataset.from_dict(rows).with_format("torch")
    return dataset.select(range(1500)), dataset.select(range(1500, 1510))


def train(weights: Path) -> None:
    """Train for some steps on all rows."""
    rows, _ = data()
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows["pixel_values"][:]), rows["labels"][:]).backward()
        optimizer.step()
    weights.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), weights)


def attributor(directory: Path) -> TrakAttributor:
    config = TrakConfig(output_dir=str(directory / "trak"), proj_dim=2048, shard_size=100, use_cpu=True)
    return TrakAttributor(Network(), config, train_dataset=data()[0], task="image_classification")
