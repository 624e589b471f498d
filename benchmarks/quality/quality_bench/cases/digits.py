"""Images of digits, 8 × 8 pixels, from scikit-learn: a convolutional network and a small ViT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

from quality_bench.case import Case
from quality_bench.cases.images import Classifier, pixel_values, split

TRAIN = 1000
SHAPE = (1, 8, 8)
"""Channels, rows and columns of an image."""

COMMON: dict[str, Any] = {"lr_scheduler_type": "linear", "max_grad_norm": 0.0}


def digits_cnn(downloads: Path) -> Case:
    """Two convolutions and a linear layer. Nothing is downloaded."""
    return _case(
        "digits-cnn",
        "CNN on images of digits",
        cnn,
        {"per_device_train_batch_size": 50, "num_train_epochs": 10, "learning_rate": 2e-3, "optim": "adamw_torch"},
        "head",
        subsets=50,
        perturbed=12,
        other_seed=25,
    )


def digits_vit(downloads: Path) -> Case:
    """A ViT of two layers on patches of 2 × 2 pixels. Nothing is downloaded."""
    return _case(
        "digits-vit",
        "ViT on images of digits",
        vit,
        {
            "per_device_train_batch_size": 50,
            "num_train_epochs": 10,
            "learning_rate": 3e-3,
            "warmup_steps": 20,
            "optim": "adamw_torch",
        },
        "classifier",
    )


def _case(
    name: str, title: str, make_model: Callable[[], nn.Module], training: dict[str, Any], head: str, **sizes: int
) -> Case:
    train, targets = digits()
    training = COMMON | training
    task = "image_classification"
    return Case(name, title, task, train, targets, make_model, training, pixel_values, head, **sizes)


def digits() -> tuple[Dataset, Dataset]:
    """Training rows and targets, with pixels in [0, 1]."""
    data = load_digits()
    return split(data.data / 16, np.asarray(data.target), TRAIN)


def cnn() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU(), nn.Flatten()
    )
    return Classifier(SHAPE, body, nn.Linear(512, 10))


class FlatViTForImageClassification(ViTForImageClassification):
    """A ViT that gives pixels their shape."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        return super().forward(pixel_values.reshape(-1, *SHAPE), labels=labels)


def vit() -> nn.Module:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=10,
        problem_type="single_label_classification",
        initializer_range=0.15,  # near 1 / √32; the default .02 makes training sensitive to a start perturbed by 1e-6
        attn_implementation="eager",  # the fused attention cannot be mapped over rows with `torch.func.vmap`
    )
    return FlatViTForImageClassification(config)
