"""The curvature of an architecture: which of its parameters get a Kronecker structure, and which one number each.

Used by architectures.py, which builds the models. EK-FAC is fitted to a few rows, with the given labels, and two
targets are scored exactly. It is an error if a parameter is in no block or in two, or if a score is not finite.
"""

import json
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.config import CurvatureConfig
from hf_trak.curvature.blocks import CurvatureBlocks, KroneckerBlock
from hf_trak.curvature.curvature import FitPlan
from hf_trak.featurize.exact import ExactScores
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task

REPEATS = 2
"""How often the samples of a batch are taken as rows: each pass of a fit has two batches."""

TARGETS = 2

LARGEST_SIDE = 512
"""Longest side of a basis. Longer ones are cut, as those above 8,192 are by default."""

Row = dict[str, Any]


class Findings:
    """What was found, one architecture a line, in a file from which an interrupted run goes on."""

    def __init__(self, path: Path | None) -> None:
        """
        Args:
            path: the file; with `None`, nothing is kept.
        """
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.is_file() else []
        self._found = {(one["head"], one["architecture"]): one for one in map(json.loads, lines)}

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._found

    def __getitem__(self, key: tuple[str, str]) -> Row:
        return self._found[key]

    def add(self, head: str, architecture: str, found: Row) -> Row:
        """Write what was found, and return it."""
        row = {"head": head, "architecture": architecture, **found}
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        self._found[head, architecture] = row
        return row


def examine(model: nn.Module, batch: dict[str, Tensor], output_fn: Any) -> Row:
    """Fit a curvature, and score with it.

    Args:
        model: the model.
        batch: a batch of samples, whose first dimension is the batch.
        output_fn: f, of the model's output and the batch.

    Returns:
        Plain JSON: P, the number of Kronecker blocks, the parameters in these and in diagonal ones with their numbers
        of elements, which of the latter are no vectors though they have a gradient, and the parameters without one.

    Raises:
        ValueError: a parameter is not in exactly one block, or a score is not finite.
    """
    size = len(next(iter(batch.values())))
    rows = [{name: value[i % size] for name, value in batch.items()} for i in range(REPEATS * size)]
    with tempfile.TemporaryDirectory() as directory:
        args = TrakConfig(
            output_dir=directory,
            curvature=CurvatureConfig(labels="empirical"),
            per_device_batch_size=size,
            remove_unused_columns=False,
            use_cpu=True,
        )
        task = function_task(output_fn, model)
        attributor = TrakAttributor(model, args, rows, data_collator=_stacked, task=task)
        # Some models have a long layer that no setting shrinks, whose eigendecomposition alone would take minutes.
        with patch("hf_trak.featurize.exact.FitPlan", partial(FitPlan, largest_side=LARGEST_SIDE)):
            attributor.fit_curvature()
            curvature = ExactScores(attributor.features).fitted(0)
        scores = attributor.attribute(rows[:TARGETS], method="exact", top_k=None)["trak_scores"]
        if not bool(torch.isfinite(torch.tensor(scores)).all()):
            raise ValueError("An exact score is not finite.")
        _check_covered(curvature.blocks, ParameterLayout.from_model(model))
        return _described(curvature.blocks, model)


def cells(row: Row) -> list[str]:
    """Show what was found as cells of a table: [`HEADER`] without the head and the architecture."""
    if "error" in row:
        return ["–", "", "", "", row["error"]]
    total = row["parameters"]
    kronecker, diagonal = (sum(row[kind].values()) for kind in ("kronecker", "diagonal"))
    matrices = Counter(_pattern(name) for name in row["diagonal_matrices"])
    return [
        f"{total:,}",
        f"{row['blocks']} ({kronecker / total:.1%})",
        f"{len(row['diagonal'])} ({diagonal / total:.1%})",
        str(len(row["without_gradient"])),
        ", ".join(f"{name} × {count}" if count > 1 else name for name, count in matrices.items()),
    ]


HEADER = (
    "| head | architecture | P | Kronecker blocks (of P) | diagonal parameters (of P) | without gradient "
    "| diagonal matrices, or error |\n|---|---|---|---|---|---|---|"
)


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _check_covered(blocks: CurvatureBlocks, layout: ParameterLayout) -> None:
    """Raise `ValueError` if an element of the gradient vector is not in exactly one block."""
    times = torch.zeros(1, layout.total)
    for block in blocks.kronecker:
        once = torch.zeros_like(times)
        block.put(torch.ones(1, *block.shape), once)
        times += once
    for one in blocks.diagonal:
        times[:, one.start : one.start + one.numel] += 1
    for slot in layout.slots:
        part = times[0, slot.offset : slot.offset + slot.numel]
        if not bool((part == 1).all()):
            wrong = sorted(set(part[part != 1].int().tolist()))
            raise ValueError(f"{int((part != 1).sum())} elements of {slot.name!r} are in {wrong} blocks.")


def _described(blocks: CurvatureBlocks, model: nn.Module) -> Row:
    dimensions = {name: parameter.ndim for name, parameter in model.named_parameters()}
    kinds: dict[str, Counter[str]] = {"kronecker": Counter(), "diagonal": Counter()}
    for block in (*blocks.kronecker, *blocks.diagonal):
        kinds["kronecker" if isinstance(block, KroneckerBlock) else "diagonal"][block.name] += block.numel
    return {
        "parameters": blocks.numel,
        "blocks": len(blocks.kronecker),
        **{kind: dict(found) for kind, found in kinds.items()},
        "diagonal_matrices": [
            name for name in kinds["diagonal"] if dimensions[name] > 1 and name not in blocks.without_gradient
        ],
        "without_gradient": list(blocks.without_gradient),
    }


def _pattern(name: str) -> str:
    """Name a parameter without the numbers of its layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
