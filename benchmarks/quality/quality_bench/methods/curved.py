"""Exact scores of hf_trak under a curvature, and the hybrid of curvature and ridge.

Damping and λ do not change what is fitted, so that all variants come from one fit.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import nn

from hf_trak import TrakAttributor
from quality_bench.job import Cost, Job, Method, Scores

DAMPINGS = (0.001, 0.01, 1.0, 10.0)
HYBRIDS = ((0.01, 3.0), (0.1, 1.0), (0.1, 3.0), (1.0, 3.0), (1.0, 10.0), (10.0, 1.0), (10.0, 3.0))
"""Damping c and relative λ beside the default."""


def exact(
    attributor: Callable[..., TrakAttributor], models: Callable[[Job], list[nn.Module]], curvature: str
) -> Method:
    """Make a method of exact scores.

    Args:
        attributor: makes the attributor of a job.
        models: gives the checkpoints.
        curvature: as in `TrakConfig`.
    """

    def attribute(job: Job, cost: Cost) -> Scores:
        checkpoints = models(job)
        own = attributor(job, checkpoints[0], False, curvature=curvature)

        def scores(**options: float) -> np.ndarray:
            curvature_args = replace(own.args.curvature, **options)  # type: ignore[arg-type]
            own.features.args = replace(own.args, curvature=curvature_args)
            scored = own.attribute(job.case.targets, top_k=None, checkpoints=checkpoints, method="exact")
            return np.stack(scored.with_format("numpy")["trak_scores"][:]).T.astype(np.float64)

        cost.time("fit", lambda: own.fit_curvature(checkpoints))
        found = {"default": cost.time("score", scores)}
        cost.bytes_per_row = 4.0 * own.features.proj_dim * len(checkpoints) if curvature == "hybrid" else 0.0
        if curvature == "hybrid":
            for damping, ridge in HYBRIDS:
                found[f"c = {damping:g}, λ = {ridge:g}"] = scores(damping=damping, hybrid_lambda=ridge)
        else:
            found |= {f"c = {value:g}": scores(damping=value) for value in DAMPINGS}
        return found

    return attribute
