"""From the name of a map to a projector."""

from typing import Literal, get_args

import torch

from hf_trak.projectors.base import BlockProjector
from hf_trak.projectors.dense import NormalProjector, RademacherProjector
from hf_trak.projectors.noop import NoOpProjector
from hf_trak.projectors.sparse import SparseProjector

MapName = Literal["sjlt", "rademacher", "normal", "none"]


def make_projector(
    proj_type: MapName,
    grad_dim: int,
    proj_dim: int,
    seed: int,
    device: str | torch.device,
    nonzeros: int = 1,
) -> BlockProjector:
    """The projector of a map.

    Args:
        proj_type: `sjlt` (sparse, cost independent of k), `rademacher` (the paper's), `normal`, `none` (the identity).
        grad_dim: P.
        proj_dim: k. Ignored for `none`, whose k is P.
        seed: 0 ≤ seed < 2⁶³.
        device: where `project` expects gradients. Not touched before the first batch.
        nonzeros: s, entries per row of the `sjlt` map.

    Raises:
        TypeError, ValueError: an unknown name, or as [`BlockProjector`].
    """
    if proj_type == "sjlt":
        return SparseProjector(grad_dim, proj_dim, seed, device=device, nonzeros=nonzeros)
    if nonzeros != 1:
        raise ValueError(f"`nonzeros` is {nonzeros}, but only 'sjlt' has that setting; `proj_type` is '{proj_type}'.")
    if proj_type == "rademacher":
        return RademacherProjector(grad_dim, proj_dim, seed, device=device)
    if proj_type == "normal":
        return NormalProjector(grad_dim, proj_dim, seed, device=device)
    if proj_type == "none":
        return NoOpProjector(grad_dim, grad_dim, seed, device=device)
    raise ValueError(f"`proj_type` is {proj_type!r}. Expected one of {', '.join(map(repr, get_args(MapName)))}.")
