"""What choices within a curvature do to exact scores, on a case of the benchmark of quality whose bank is built.

    python benchmarks/quality build --cases gpt2 --work quality --downloads downloads
    python benchmarks/curvature_choices.py gpt2 --work quality --downloads downloads

EK-FAC with bases from fewer rows, with other draws of the labels, with eigenvalues measured on the labels that bases
come from, and with targets that are kept in bfloat16 or in low rank. Of each: the rank correlation of scores with the
default, mean over targets, and LDS by share of dropped rows.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent / "quality"))

import numpy as np
import torch
from quality_bench.case import Case
from quality_bench.each_case import each_case
from quality_bench.job import BATCH, Job

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.curvature import curvature as plan
from hf_trak.evaluation import Bank, evaluate_bank
from hf_trak.evaluation.bank_scores import judged_parts
from hf_trak.featurize import exact
from hf_trak.featurize.fidelity import Agreement, fitted_curvature
from hf_trak.modelout_functions import get_task
from hf_trak.modelout_functions.sampled import SampledLikelihood

ROWS = (512, 256, 128, 64, 32, 16)
RANKS = (32, 16, 8, 4)

Found = tuple[np.ndarray, float]
"""Scores `(n, m)`, and the least number of positions per row of the longer side of a basis."""


def scores(job: Job, *patches: Any, **options: Any) -> Found:
    """Score all rows exactly."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        args = TrakConfig(directory, per_device_batch_size=BATCH, disable_tqdm=True, curvature="ekfac", **options)
        own = TrakAttributor(job.model, args, job.case.train, task=get_task(job.case.task))
        scored = own.attribute(job.case.targets, top_k=None, method="exact").with_format("numpy")
        curvature = fitted_curvature(exact.ExactScores(own.features), 0)
        counts = [values.count / max(values.eigenvalues.shape) for values in curvature.kronecker]
        return np.stack(scored["trak_scores"][:]).T.astype(np.float64), min(counts)


def variants(job: Job) -> Iterator[tuple[str, Found]]:
    """Compute the default, and one change at a time."""
    n = len(job.case.train)
    yield "default", scores(job)
    yield "other draws", scores(job, seed=1)
    yield "labels drawn once", scores(job, patch.object(exact, "SampledLikelihood", _drawn_once))
    yield "labels of the data", scores(job, curvature_labels="empirical")
    for rows in (n, *(count for count in ROWS if count < n)):
        few = patch.object(plan, "BASIS_POSITIONS", 0), patch.object(plan, "BASIS_ROWS", rows)
        yield f"bases from {rows} rows", scores(job, *few)
    yield "targets in bfloat16", scores(job, _kept_as(torch.bfloat16, None))
    for rank in RANKS:
        yield f"targets of rank {rank}", scores(job, _kept_as(torch.float32, rank))


def _drawn_once(task: Any, seed: int, second: bool = False) -> SampledLikelihood:
    return SampledLikelihood(task, seed)


def _kept_as(dtype: torch.dtype, rank: int | None) -> Any:
    return patch.multiple(exact, target_dtype=lambda args: dtype, target_rank=lambda args: rank)


def table(case: Case, bank: Bank, job: Job) -> None:
    """Print a table as it grows."""
    parts = judged_parts(bank)
    shares = [f"LDS, {part.removeprefix('drop-')}" for part in parts]
    head = [case.title, "positions per side, least", "rank correlation", *shares]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    default: np.ndarray | None = None
    for name, (found, positions) in variants(job):
        default = found if default is None else default
        agreement = Agreement.of(found, default, top=10).mean_spearman
        lds = {one.part: one.lds.value for one in evaluate_bank(bank, {name: found}, parts=parts)}
        cells = [name, f"{positions:.1f}", f"{agreement:.3f}", *(f"{lds[part]:.3f}" for part in parts)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    each_case(__doc__, table)
