"""`make_projector`: build a projector from the name of its map."""

from typing import Literal, get_args

import torch

from hf_trak.projectors.base import BlockProjector
from hf_trak.projectors.dense import NormalProjector, RademacherProjector
from hf_trak.projectors.noop import NoOpProjector
from hf_trak.projectors.sparse import SparseProjector

MapName = Literal["sjlt", "rademacher", "normal", "none"]
"""Names of the maps: sparse, dense ±1, dense normal, and the identity."""


def make_projector(
    proj_type: MapName,
    grad_dim: int,
    proj_dim: int,
    seed: int,
    device: str | torch.device,
    nonzeros: int = 1,
) -> BlockProjector:
    """Build the projector of a map.

    Args:
        proj_type (`str`):
            Name of the map: `"sjlt"` (sparse, cost independent of k), `"rademacher"` (that of the TRAK paper),
            `"normal"`, or `"none"` (the identity).
        grad_dim (`int`):
            P, length of a gradient vector, 1 ≤ P < 2⁶³.
        proj_dim (`int`):
            k, length of a projected gradient, 1 ≤ k ≤ 2²⁴. Ignored for `"none"`, whose k is P.
        seed (`int`):
            Seed of the random matrix, 0 ≤ seed < 2⁶³.
        device (`str` or `torch.device`):
            Device on which `project` expects gradients. Not touched before the first batch.
        nonzeros (`int`, *optional*, defaults to 1):
            s, the number of entries per row of the `"sjlt"` map.

    Returns:
        `BlockProjector`: a `SparseProjector`, `RademacherProjector`, `NormalProjector` or `NoOpProjector`.

    Raises:
        TypeError: a number is not an integer.
        ValueError: the name is unknown, a number is outside its range, or `nonzeros` is set for another map.
    """
    if proj_type == "sjlt":
        return SparseProjector(grad_dim, proj_dim, seed, device=device, nonzeros=nonzeros)
    if nonzeros != 1:
        raise ValueError(
            f"`nonzeros` is {nonzeros} and `proj_type` is '{proj_type}'. Expected `nonzeros` with 'sjlt' alone: leave "
            "it out."
        )
    if proj_type == "rademacher":
        return RademacherProjector(grad_dim, proj_dim, seed, device=device)
    if proj_type == "normal":
        return NormalProjector(grad_dim, proj_dim, seed, device=device)
    if proj_type == "none":
        return NoOpProjector(grad_dim, grad_dim, seed, device=device)
    raise ValueError(f"`proj_type` is {proj_type!r}. Expected one of {', '.join(map(repr, get_args(MapName)))}.")
