"""`make_projector`: build a projector from the name of its map."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from hf_trak.projectors.base import BlockProjector
from hf_trak.projectors.dense import NoOpProjector, NormalProjector, RademacherProjector, SparseProjector
from hf_trak.projectors.factored import DEFAULT_FACTORED_DIM, FactoredProjector

MapName = Literal["sjlt", "factored", "rademacher", "normal", "none"]
"""Names of the maps: sparse, two-sided and then sparse, dense ±1, dense normal, and the identity."""


def make_projector(
    proj_type: MapName,
    grad_dim: int,
    proj_dim: int,
    seed: int,
    device: str | torch.device,
    nonzeros: int = 1,
    shapes: Sequence[Sequence[int]] | None = None,
    factored_dim: int = DEFAULT_FACTORED_DIM,
) -> BlockProjector:
    """Build the projector of a map.

    Args:
        proj_type (`str`):
            Name of the map: `"sjlt"` (sparse, cost independent of k), `"factored"` (two-sided for large matrices, then
            `"sjlt"`), `"rademacher"` (that of the TRAK paper), `"normal"`, or `"none"` (the identity).
        grad_dim (`int`):
            P, length of a gradient vector, 1 ≤ P < 2⁶³.
        proj_dim (`int`):
            k, length of a projected gradient, 1 ≤ k ≤ 2²⁴. Ignored for `"none"`, whose k is P.
        seed (`int`):
            Seed of the random matrix, 0 ≤ seed < 2⁶³.
        device (`str` or `torch.device`):
            Device on which `project` expects gradients. Not touched before the first batch.
        nonzeros (`int`, *optional*, defaults to 1):
            s, the number of entries per row of the `"sjlt"` map, also of the one that follows `"factored"`.
        shapes (`Sequence[Sequence[int]]`, *optional*):
            Shapes of the parameters, in their order in the gradient vector, which `"factored"` needs.
        factored_dim (`int`, *optional*, defaults to 128):
            p of the `"factored"` map.

    Returns:
        `BlockProjector`: a `SparseProjector`, `FactoredProjector`, `RademacherProjector`, `NormalProjector` or
        `NoOpProjector`.

    Raises:
        TypeError: a number is not an integer.
        ValueError: the name is unknown, a number is outside its range, `nonzeros` is set for another map, or
            `"factored"` gets no shapes or none of a large matrix.
    """
    if proj_type == "sjlt":
        return SparseProjector(grad_dim, proj_dim, seed, device=device, nonzeros=nonzeros)
    if proj_type == "factored":
        if shapes is None:
            raise ValueError(
                "`proj_type` is 'factored' and `shapes` is missing. Expected the shapes of the parameters, in their "
                "order in the gradient vector."
            )
        return FactoredProjector(
            grad_dim, proj_dim, seed, device=device, nonzeros=nonzeros, shapes=shapes, factored_dim=factored_dim
        )
    if nonzeros != 1:
        raise ValueError(
            f"`nonzeros` is {nonzeros} and `proj_type` is '{proj_type}'. Expected `nonzeros` with 'sjlt' and "
            "'factored' alone: leave it out."
        )
    if proj_type == "rademacher":
        return RademacherProjector(grad_dim, proj_dim, seed, device=device)
    if proj_type == "normal":
        return NormalProjector(grad_dim, proj_dim, seed, device=device)
    if proj_type == "none":
        return NoOpProjector(grad_dim, grad_dim, seed, device=device)
    raise ValueError(f"`proj_type` is {proj_type!r}. Expected one of {', '.join(map(repr, get_args(MapName)))}.")
