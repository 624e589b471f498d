"""Arithmetic of what refined targets take."""

import math
from dataclasses import dataclass

from hf_trak.curvature.refinement import Refinement
from hf_trak.featurize.exact_blocks import TARGET_SHARD_BYTES
from hf_trak.runtime.memory import byte_size
from hf_trak.runtime.progress import duration

PASSES_PER_PRODUCT = 4
"""Forward and backward passes of one row that a product with the Gauss-Newton matrix costs: two of each."""
VECTORS_IN_MEMORY = 6
"""Vectors of P numbers that a target has while it is refined: gradient, solution, residual, direction, product and
their sum."""


@dataclass(frozen=True)
class RefineEstimate:
    """Cost of `attribute(..., refine=...)`, over all checkpoints. It comes on top of exact scores."""

    steps: int
    """Products per target, at most."""
    rows: int
    """Training rows whose Gauss-Newton matrix refines the targets."""
    products: int
    """Products of one row and one target: C · steps · rows · m, at most."""
    row_passes: int
    """Forward and backward passes of single rows for these, at most."""
    memory: int
    """Memory, in bytes, for the targets that are refined together, beside the weights and the curvature. The
    activations of one batch come on top."""
    disk_bytes: int
    """Disk while targets are refined: their gradients, and the state of the iterations of one file of them."""
    seconds: float | None
    """Seconds for these passes at the rate of featurizing, whose rows take one forward and one backward pass."""

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {duration(self.seconds)}"
        return (
            f"refining targets: at most {self.steps} steps on {self.rows:,} rows each, {self.row_passes:,} passes of "
            f"single rows{time}; memory {byte_size(self.memory)}; disk {byte_size(self.disk_bytes)} meanwhile"
        )


def estimate_refinement(
    refinement: Refinement,
    n: int,
    m: int,
    checkpoints: int,
    parameters: int,
    processes: int,
    rows_per_second: float | None,
) -> RefineEstimate:
    """Work out what refined targets take.

    Args:
        refinement: the options.
        n: number of training rows.
        m: number of targets.
        checkpoints: number of checkpoints.
        parameters: P, the number of attributed parameters.
        processes: number of processes.
        rows_per_second: gradients per second of one process, where it was measured.
    """
    rows = min(n, refinement.rows)
    products = checkpoints * refinement.steps * rows * m
    together = max(1, min(m, TARGET_SHARD_BYTES // (4 * parameters)))
    passes = PASSES_PER_PRODUCT * products
    seconds = None if rows_per_second is None else math.ceil(passes / 2) / rows_per_second / processes
    return RefineEstimate(
        steps=refinement.steps,
        rows=rows,
        products=products,
        row_passes=passes,
        memory=VECTORS_IN_MEMORY * 4 * together * parameters,
        disk_bytes=4 * parameters * (m + 3 * together),
        seconds=seconds,
    )
