"""hf_trak: `fit_curvature`, exact scores, and what the hybrid costs on top."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from curvature_bench.measure import Meter
from curvature_bench.stages import (
    BASES,
    EIGEN,
    EIGENVALUES,
    FIT,
    HYBRID,
    HYBRID_FEATURES,
    HYBRID_REST,
    HYBRID_SYSTEM,
    SCORES,
    SCORING,
    TARGETS,
)
from curvature_bench.work import Work, linear_parameters
from hf_trak import TrakAttributor, TrakConfig
from hf_trak.config import CurvatureConfig
from hf_trak.curvature.fit import CurvatureFit
from hf_trak.curvature.maps import HybridSystem
from hf_trak.featurize.estimate import estimate
from hf_trak.featurize.exact import ExactScores


def run(work: Work, meter: Meter, directory: Path, linear_only: bool = False) -> None:
    """Fit, score and score with the hybrid.

    Args:
        work: the work.
        meter: measures it.
        directory: an empty one.
        linear_only: whether to attribute the layers that the other libraries follow, instead of all parameters, and
            to leave the hybrid out, which the others do not have.
    """
    model = work.model()
    train, targets = work.datasets()
    args = TrakConfig(
        output_dir=str(directory),
        # All targets in one pass over the rows, as the other libraries do.
        curvature=CurvatureConfig(rows=work.rows, damping=0.1, memory=8.0),
        per_device_batch_size=work.batch_size,
        grad_wrt=linear_parameters(model) if linear_only else None,
        use_cpu=True,
    )
    attributor = TrakAttributor(model, args, train, task="causal_lm")
    with (
        meter.stages(FIT),
        meter.calls(CurvatureFit, "_pass", _stage_of_pass),
        meter.calls(CurvatureFit, "_decompose", EIGEN),
    ):
        attributor.fit_curvature()
    with meter.stages(SCORING, rest=TARGETS), meter.calls(ExactScores, "_scores", SCORES):
        attributor.attribute(targets, method="exact", top_k=10)
    _promise(work, meter, model, args)
    if linear_only:
        return
    over = replace(args, curvature=replace(args.curvature, kind="hybrid"))
    hybrid = TrakAttributor(model, over, train, task="causal_lm")
    with (
        meter.stages(HYBRID, rest=HYBRID_REST),
        meter.calls(ExactScores, "_whitened", HYBRID_FEATURES),
        meter.calls(HybridSystem, "__init__", HYBRID_SYSTEM),
    ):
        hybrid.attribute(targets, method="exact", top_k=10)


def _stage_of_pass(_: CurvatureFit, stage: str, *__: Any) -> str:
    return {"bases": BASES, "squares": EIGENVALUES}[stage]


def _promise(work: Work, meter: Meter, model: Any, args: TrakConfig) -> None:
    """What the estimate says, without weights, which are there before, and with the activations of a plain pass."""
    stages = estimate(model, work.rows, args, eval_dataset=work.targets, method="exact").stages
    if "plain" not in meter.measured.peak_mib:
        return
    numbers = sum(parameter.numel() for parameter in model.parameters())
    activations = meter.measured.peak_mib["plain"] - 4 * numbers / 2**20
    scoring = max(stages["exact targets"].memory, stages["exact scores"].memory)
    for group, promised in ((FIT, stages["curvature"].memory), (SCORING, scoring)):
        meter.measured.promised_mib[group] = (promised - 4 * numbers) / 2**20 + activations
