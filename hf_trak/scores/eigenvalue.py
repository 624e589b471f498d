"""Extreme eigenvalues of positive semidefinite matrices, for condition numbers."""

import torch
from torch import Tensor

from hf_trak.scores.random_vectors import random_normals

_DENSE = 1024
"""Size up to which all eigenvalues are computed in any case."""
_ITERATIONS = 100


def extreme_eigenvalues(matrix: Tensor, wanted: int | None) -> dict[str, float]:
    """Compute the largest eigenvalue of a matrix, and another one.

    Where all eigenvalues would take long and no other one is wanted, the largest comes from LOBPCG (Knyazev 2001, SIAM
    J. Sci. Comput. 23:517), from below, and the closer the more it stands out.

    Args:
        matrix: symmetric, positive semidefinite, float64.
        wanted: number of the other one in ascending order, or `None`, for which 0 is returned.

    Returns:
        `largest_eigenvalue` and `smallest_eigenvalue`.
    """
    if wanted is not None or len(matrix) <= _DENSE:
        values = torch.linalg.eigvalsh(matrix).clamp_min(0)
        return {
            "largest_eigenvalue": float(values[-1]),
            "smallest_eigenvalue": 0.0 if wanted is None else float(values[wanted]),
        }
    if not bool(matrix.diagonal().any()):
        return {"largest_eigenvalue": 0.0, "smallest_eigenvalue": 0.0}
    start = random_normals(len(matrix), 1, seed=0, model_id=0)
    values, _ = torch.lobpcg(matrix, X=start, largest=True, niter=_ITERATIONS, tol=1e-9)
    return {"largest_eigenvalue": float(values[0]), "smallest_eigenvalue": 0.0}
