"""Preconditioned targets of several checkpoints: what every way of scoring starts from."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_trak.scores.streaming import ScaledRows
from hf_trak.store.shard_set import ShardSet


@dataclass(frozen=True)
class PreconditionedTargets:
    """The rows A_c = t_c (X_cᵀX_c + λ_c I)⁻¹ of m targets, or of the means of m groups, for every checkpoint c.

    Attributes:
        name (`str`):
            Name of the experiment.
        model_ids (`list[int]`):
            The checkpoints.
        features (`Sequence[ShardSet]`):
            The features t_c of the targets, `(targets, k)` for each checkpoint.
        rows (`Sequence[ScaledRows]`):
            A_c, `(m, k)` for each checkpoint.
    """

    name: str
    model_ids: list[int]
    features: Sequence[ShardSet]
    rows: Sequence[ScaledRows]
