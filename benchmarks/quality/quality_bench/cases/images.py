"""What the cases of images share: rows, and a loss beside the logits of a classifier."""

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

TARGETS = 60
"""Targets of every case, m."""


def image_rows(pixels: np.ndarray, labels: np.ndarray) -> Dataset:
    """Rows of images `(n, pixels)` and labels `(n,)`.

    Pixels are one list per row, which `datasets` reads five times as fast as nested lists; models give it its shape.
    """
    features = Features(pixel_values=List(Value("float32"), length=pixels.shape[1]), labels=Value("int64"))
    columns = {"pixel_values": pixels.astype(np.float32), "labels": labels}
    return Dataset.from_dict(columns, features=features).with_format("numpy")


def split(pixels: np.ndarray, labels: np.ndarray, train: int) -> tuple[Dataset, Dataset]:
    """Training rows and as many targets as every case has, in a fixed random order."""
    order = np.random.default_rng(0).permutation(len(labels))
    first, second = order[:train], order[train : train + TARGETS]
    return image_rows(pixels[first], labels[first]), image_rows(pixels[second], labels[second])


def pixel_values(rows: Dataset) -> dict[str, Tensor]:
    """Images `(n, pixels)` by the name of the model's argument."""
    return {"pixel_values": torch.from_numpy(rows["pixel_values"][:])}


class Classifier(nn.Module):
    """Logits, and the mean cross-entropy of the labels that are not -100."""

    def __init__(self, shape: tuple[int, ...], body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.shape, self.body, self.head = shape, body, head

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        logits = self.head(self.body(pixel_values.reshape(-1, *self.shape)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)
