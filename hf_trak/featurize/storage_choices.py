"""What features are worth by their form and bytes per row, to compare settings before anything is computed."""

from dataclasses import dataclass

from hf_trak.config import BITS, SolverName
from hf_trak.scores.solver_choice import SolverCost, choose_solver, solver_cost

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
"""Bytes per row that were measured."""

QUALITY = {
    "float32": (0.62, 0.72, 0.84, 0.88, 0.96, 1.00),
    "int8": (0.84, 0.88, 0.96, 1.00, 1.06, 1.07),
    "int4": (0.87, 0.96, 1.01, 1.06, 1.08, 1.09),
    "int2": (0.91, 0.99, 1.05, 1.09, 1.11, 1.12),
    "int1": (0.88, 0.98, 1.02, 1.07, 1.08, 1.09),
}
"""Linear datamodeling score with ridge, the mean over seven banks, relative to float32 with 16,384 bytes:
`recipes/benchmarks/quality/CODES.md`. Models of other kinds may rank them differently."""

_COMPARED = (("int2", 512), ("int2", 1024), ("int4", 2048), ("int2", 2048), ("int2", 4096), ("float32", 16384))


@dataclass(frozen=True)
class StorageChoice:
    """A form of the features of a row.

    Attributes:
        feature_dtype (`str`): as in `TrakConfig`.
        proj_dim (`int`): k.
        row_bytes (`int`): bytes of a row's features.
        quality (`float`):
            Expected linear datamodeling score, relative to float32 with 16,384 bytes.
        solver (`SolverCost`):
            The solver of the ridge regression with its cost, for one checkpoint.
    """

    feature_dtype: str
    proj_dim: int
    row_bytes: int
    quality: float
    solver: SolverCost

    def __str__(self) -> str:
        return (
            f"{self.feature_dtype} × {self.proj_dim:,} ({self.row_bytes:,} bytes per row, quality {self.quality:.2f}, "
            f"{self.solver.kind} solver with {self.solver.multiply_adds:.1e} multiply-adds)"
        )


def storage_choices(solver: SolverName, solver_rank: int | None, n: int, m: int, free: int) -> list[StorageChoice]:
    """List forms with different numbers of bytes, from the smallest on.

    Args:
        solver, solver_rank: the settings.
        n: number of training rows.
        m: number of targets.
        free: bytes of memory that are free.
    """
    found = []
    for form, size in _COMPARED:
        k = size * 8 // BITS[form]
        rank = None if solver_rank is None else min(solver_rank, n, k)
        cost = solver_cost(choose_solver(solver, rank, n, k, free), n, k, m)
        found.append(StorageChoice(form, k, size, QUALITY[form][SIZES.index(size)], cost))
    return found
