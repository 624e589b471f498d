"""What the targets of a sweep have in common, for which all rows of a step are used instead of a share.

On the way back the derivatives γ of different targets become alike. So a few directions V, the first ones of a
singular value decomposition of all γ/‖γ‖, are multiplied by the curvature of all rows of a step, and what is left of
every target by that of some rows alone. The number of directions is the one with the least noise for the same work.
"""

import torch
from torch import Tensor

_SLICE = 2**20
"""Parameters that are multiplied at a time, in float64."""


def inner_products(rows: Tensor, directions: Tensor) -> Tensor:
    """Multiply rows `(B, P)` and directions `(m, P)`: `(B, m)`, in float64."""
    total = torch.zeros(len(rows), len(directions), dtype=torch.float64, device=directions.device)
    for first in range(0, rows.shape[1], _SLICE):
        part = slice(first, first + _SLICE)
        total += rows[:, part].double() @ directions[:, part].double().T
    return total


def divided(gamma: Tensor, total: int, count: int) -> tuple[Tensor, Tensor, int]:
    """Divide the directions of targets into common ones and the rest.

    Args:
        gamma: γ, `(m, P)`.
        total: rows of the step.
        count: rows whose curvature each target may use.

    Returns:
        The common directions `(r, P)`, the part of each target in them `(m, r)`, and the number of rows for the rest.
    """
    none = gamma[:0], gamma.new_zeros(len(gamma), 0), count
    most = (count - 1) * len(gamma) // total
    if count == total or most < 1:
        return none
    products = inner_products(gamma, gamma)
    norms = products.diagonal().sqrt()
    if not bool((norms > 0).all() and torch.isfinite(norms).all()):
        return none
    energies, vectors = torch.linalg.eigh(products / norms.outer(norms))
    energies, vectors = energies.flip(0).clamp_min(0), vectors.flip(1)
    left = len(gamma) - torch.cat([energies.new_zeros(1), energies.cumsum(0)])
    rows = [count - -(-r * total // len(gamma)) for r in range(most + 1)]
    noise = [float(left[r]) * (total / max(rows[r], 1e-9) - 1) for r in range(most + 1) if rows[r] > 0]
    r = min(range(len(noise)), key=noise.__getitem__)
    if r == 0:
        return none
    scale = energies[:r].clamp_min(1e-300).sqrt()
    common = (vectors[:, :r] / norms.unsqueeze(1) / scale).T.to(gamma) @ gamma
    return common, (norms.unsqueeze(1) * vectors[:, :r] * scale).to(gamma), rows[r]
