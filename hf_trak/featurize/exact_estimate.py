"""Arithmetic of what a curvature and exact scores take: disk, memory, passes over the training rows."""

import math
from dataclasses import dataclass

from torch import nn

from hf_trak.config import TrakConfig
from hf_trak.curvature.observation import SMALLEST_SIDE
from hf_trak.curvature.plan import LARGEST_SIDE, PARTS, ROWS_PER_PART
from hf_trak.curvature.target_forms import low_rank_numel
from hf_trak.featurize.exact_blocks import TARGET_SHARD_BYTES, target_dtype, target_rank
from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot


@dataclass(frozen=True)
class ExactEstimate:
    """Cost of one checkpoint's curvature, and of the exact scores of n training rows for m targets.

    Sizes are in bytes. Sides of layers are taken from the shapes of their parameters: channel groups, which have
    smaller ones, count as one layer.
    """

    curvature_bytes: int
    """Disk: bases and eigenvalues, 4 · Σ (I² + J² + I · J)."""
    progress_bytes: int
    """Disk, while a fit runs: bases, and sums for each part of the sample."""
    fit_memory: int
    """Memory of a process that fits: weights, and the sums of one pass. Activations and factors of one batch come on
    top."""
    targets_bytes: int
    """Disk: preconditioned targets, m rows of P numbers, or of matrices of low rank."""
    scores_bytes: int
    """Disk: scores of all rows, 4 · n · (m + 1)."""
    exact_memory: int
    """Memory of a process that scores: weights, and either the preconditioned targets of one pass, or the curvature
    with the whole gradients of one batch of targets, whichever is more. Activations of one batch come on top."""
    passes: int
    """Passes over the training rows to score them."""


def estimate_exact(
    model: nn.Module, layout: ParameterLayout, args: TrakConfig, n: int, m: int, weights: int
) -> ExactEstimate:
    """Work out what exact scores take.

    Args:
        model: the model.
        layout: the attributed parameters.
        args: the configuration.
        n: number of training rows.
        m: number of targets.
        weights: bytes of the model.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matrices = [_matrices(slot) for slot in layout.slots if id(parameters[slot.name]) not in tables]
    shapes = [shape for found in matrices for shape in found]
    bases = 0 if args.curvature == "diagonal" else sum(_cut_squares(side) for shape in shapes for side in shape)
    total, rank, itemsize = layout.total, target_rank(args), target_dtype(args).itemsize
    kept = total if rank is None else total - sum(i * j - low_rank_numel(i, j, rank) for i, j in shapes)
    targets_at_once = max(1, min(m, int(args.exact_memory * 2**30) // (itemsize * kept)))
    batch = min(args.per_device_batch_size, max(m, 1))
    largest = max((i * j for i, j in shapes), default=0)
    preconditioning = bases + 2 * total + batch * (total + 3 * largest)
    return ExactEstimate(
        curvature_bytes=4 * (bases + total),
        progress_bytes=4 * (min(PARTS, -(-n // ROWS_PER_PART)) * (bases + total) + bases),
        fit_memory=weights + max(8 * bases, 4 * bases + 8 * total),
        targets_bytes=itemsize * m * kept,
        scores_bytes=4 * n * (m + 1),
        exact_memory=weights
        + min(TARGET_SHARD_BYTES, itemsize * m * kept)
        + max(itemsize * targets_at_once * kept, 4 * preconditioning),
        passes=math.ceil(m / targets_at_once) + (args.curvature in ("auto", "hybrid")),
    )


def _matrices(slot: ParameterSlot) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a parameter; none for one with a diagonal curvature."""
    if len(slot.shape) < 2 or min(slot.shape[0], slot.numel // slot.shape[0]) < SMALLEST_SIDE:
        return []
    if len(slot.shape) == 3:
        return [(slot.shape[1], slot.shape[2])] * slot.shape[0]
    return [(slot.shape[0], slot.numel // slot.shape[0])]


def _cut_squares(side: int) -> int:
    """Return the elements of the bases of one side, which is cut where it is too long."""
    parts = -(-side // LARGEST_SIDE)
    return side * side // parts
