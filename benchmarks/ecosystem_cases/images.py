"""Classifiers of timm and torchvision."""

from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch.utils.data import TensorDataset

from ecosystem_cases.case import CLASSES, EcosystemCase
from ecosystem_cases.truth import of_loop
from hf_trak import TrakAttributor, TrakConfig

SIDE = 64
OF_TIMM = (
    "resnet10t", "mobilenetv3_small_050", "efficientnet_b0", "convnext_atto", "regnetx_002", "ghostnet_050",
    "edgenext_xx_small", "mobilevit_xxs",
)  # fmt: skip
OF_TORCHVISION = ("resnet18", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "densenet121")


def rows(count: int = 4) -> TensorDataset:
    pixels = torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    return TensorDataset(pixels, torch.arange(count) % CLASSES)


def classifier(directory: Path, args: TrakConfig, *, make: Any) -> TrakAttributor:
    torch.manual_seed(0)
    return of_loop(make().eval(), args, rows(), task="image_classification")


IMAGES = (
    *(
        EcosystemCase(
            f"timm: {name}", partial(classifier, make=partial(timm.create_model, name, num_classes=CLASSES)),
            '`task="image_classification"`',
        )
        for name in OF_TIMM
    ),
    *(
        EcosystemCase(
            f"torchvision: {name}",
            partial(classifier, make=partial(torchvision.models.get_model, name, num_classes=CLASSES)),
            '`task="image_classification"`',
        )
        for name in OF_TORCHVISION
    ),
)  # fmt: skip
