"""Exact scores of small models, and the curvatures behind them, for several test modules."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trak_options import trak_config

from hf_trak import TrakAttributor
from hf_trak.curvature.curvature import Curvature, KroneckerValues
from hf_trak.curvature.files import CURVATURE_FILE, CurvatureFiles

Rows = list[dict[str, Any]]


def rows_of(**columns: Tensor) -> Rows:
    """Make rows from columns of equal length."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def exact_scores(model: nn.Module, directory: Path, train: Rows, targets: Rows, task: Any, **options: Any) -> Tensor:
    """Fit a curvature and score under it.

    Args:
        model: the model.
        directory: an empty directory.
        train: training rows.
        targets: targets.
        task: name of the task, or the task.
        options: fields of the configuration.

    Returns:
        Scores `(n_train, n_targets)`, float32.
    """
    defaults = {"use_cpu": True, "shard_size": 64, "per_device_batch_size": 48}
    args = trak_config(output_dir=str(directory), **{**defaults, **options})
    attributor = TrakAttributor(model, args, train_dataset=train, task=task).fit_curvature()
    scored = attributor.attribute(targets, method="exact", top_k=None)
    return torch.tensor(scored["trak_scores"][:]).T


def written_curvature(directory: Path) -> Curvature:
    """Read the curvature of the first checkpoint."""
    place = directory / "curvature" / "0"
    identity = json.loads((place / CURVATURE_FILE).read_text())["identity"]
    return CurvatureFiles(place, identity).read()


def factored_blocks(curvature: Curvature) -> list[tuple[Tensor, Tensor, KroneckerValues]]:
    """Kronecker blocks as dense matrices, with the positions of their parameters `(I, J)`, and their values."""
    whole = torch.arange(curvature.numel, dtype=torch.float64)[None]
    found = []
    for block, values in zip(curvature.blocks.kronecker, curvature.kronecker, strict=True):
        assert values.bases is not None
        basis = torch.kron(*(one.double() for one in values.bases))
        matrix = basis * values.eigenvalues.double().flatten() @ basis.T
        found.append((matrix, block.matrix(whole)[0].long(), values))
    return found


def assembled(curvature: Curvature) -> Tensor:
    """The whole curvature as one matrix `(P, P)`, float64."""
    matrix = torch.zeros(curvature.numel, curvature.numel, dtype=torch.float64)
    for block, places, _ in factored_blocks(curvature):
        matrix[places.flatten()[:, None], places.flatten()] = block
    for one, values in zip(curvature.blocks.diagonal, curvature.diagonal, strict=True):
        part = slice(one.start, one.start + one.numel)
        matrix[part, part] = values.double().diag()
    return matrix


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number expected."""
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())
