"""Configurations from flat options, as the command line has them, and ridges of a given size."""

from typing import Any

import torch

from hf_trak import TrakAttributor, TrakConfig


def trak_config(*args: Any, **options: Any) -> TrakConfig:
    """Make a configuration; options `curvature_…` are fields of its curvature, and `curvature` is its kind.

    Scores are those of the index where no method and no budget is named.
    """
    curvature = options.pop("curvature", {})
    curvature = {"kind": curvature} if isinstance(curvature, str) else curvature
    names = [name for name in options if name.startswith("curvature_")]
    flat = {name.removeprefix("curvature_"): options.pop(name) for name in names}
    return TrakConfig(*args, curvature={**curvature, **flat}, **{"budget": "fast", **options})


def relative_ridge(attributor: TrakAttributor, lam: float, model_id: int = 0) -> float:
    """Return the `lambda_relative` that makes `lam` the ridge of a featurized attributor."""
    features = torch.cat([shard.grads.double() for shard in attributor.features.store.train(model_id)])
    return lam * min(features.shape) / float(features.square().sum())
