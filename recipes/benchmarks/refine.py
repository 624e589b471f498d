"""What conjugate gradients add to exact scores, on cases of the benchmark of quality whose banks are built.

    python recipes/benchmarks/quality build --cases gpt2 --work quality --downloads downloads
    python recipes/benchmarks/refine.py lds gpt2 --work quality --downloads downloads
    python recipes/benchmarks/refine.py removal gpt2 --work quality --downloads downloads

`lds` refines EK-FAC at several dampings and numbers of rows, and judges the scores after some of the steps: the median
relative residual, the mean rank correlation with EK-FAC's scores, LDS by share of dropped rows, and seconds. `removal`
trains again without the first rows of EK-FAC, and of EK-FAC refined as by default, for some targets.
"""

import argparse
import logging
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent / "quality"))

import numpy as np
import torch
from datasets import disable_progress_bars
from quality_bench.banks import SEED, open_bank
from quality_bench.case import Case
from quality_bench.cases import CASES, make_case
from quality_bench.job import BATCH, Job
from quality_bench.removals import DRAWS, SUBSET_SEED, TARGETS, reusing
from quality_bench.scored import judging_targets
from torch import Tensor

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.curvature.conjugate_gradients import Solutions
from hf_trak.curvature.refinement import Refinement
from hf_trak.evaluation import Bank, evaluate_bank, linear_datamodeling_score
from hf_trak.evaluation.bank_scores import judged_parts
from hf_trak.evaluation.removal_effects import evaluate_removal
from hf_trak.evaluation.tail_removal import removal_plan
from hf_trak.featurize.fidelity import Agreement
from hf_trak.modelout_functions import get_task
from hf_trak.modelout_functions.loss import LossModelOutput

DAMPINGS = (0.01, 0.1, 1.0, 10.0)
STEPS = (1, 2, 3, 5, 10, 20)
FRACTION = 0.05


class Question:
    """One case: its model, rows and targets."""

    def __init__(self, job: Job, directory: Path, count: int | None = None) -> None:
        """
        Args:
            job: the case and its models.
            directory: where stores are made.
            count: of the targets only so many, evenly spaced; `None` for all.
        """
        self.job, self.directory = job, directory
        self.task = get_task(job.case.task)
        m = len(job.case.targets)
        self.columns = list(range(0, m, -(-m // (count or m))))
        self.targets = job.case.targets.select(self.columns)

    def attributor(self, name: str, **options: Any) -> TrakAttributor:
        """Attribute in a directory of its own; the curvature is that of all."""
        defaults = {"per_device_batch_size": BATCH, "disable_tqdm": True, "curvature": "ekfac"}
        args = TrakConfig(str(self.directory / name), **{**defaults, **options})
        return TrakAttributor(self.job.model, args, self.job.case.train, task=self.task)

    def scores(self, damping: float | None = None, refine: Refinement | None = None) -> np.ndarray:
        """Exact scores `(n, m)`."""
        own = self.attributor("exact", damping=damping)
        scored = own.attribute(self.targets, top_k=None, exact=True, refine=refine).with_format("numpy")
        return np.stack(scored["trak_scores"][:]).T.astype(np.float64)

    def gradients(self) -> Tensor:
        """Gradients of minus the loss of all training rows, `(n, P)`."""
        loss = TrakConfig(
            str(self.directory / "gradients"), proj_type="none", feature_dtype="float32", per_device_batch_size=BATCH,
            disable_tqdm=True,
        )  # fmt: skip
        own = TrakAttributor(self.job.model, loss, self.job.case.train, task=LossModelOutput(of=self.task))
        return torch.cat([shard.grads for shard in own.featurize().store.train(0)])


class Snapshots:
    """Solutions after some steps, and the seconds that these took."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.found: dict[int, Tensor] = {}
        self.residuals: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self._taken, self._started = 0, time.perf_counter()
        self._advance = Solutions.advance

    def __enter__(self) -> "Snapshots":
        kept = self

        def advance(state: Solutions, *args: Any) -> None:
            kept._advance(state, *args)
            kept.note(state)

        self._patch = patch.object(Solutions, "advance", advance)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def note(self, state: Solutions) -> None:
        self._taken += 1
        if self._taken in self.steps or not len(state.running):
            self.found[self._taken] = state.found.clone()
            self.residuals[self._taken] = float(np.median([one.residual for one in state.report()]))
            self.seconds[self._taken] = time.perf_counter() - self._started


def cells_of(bank: Bank, columns: list[int], scores: np.ndarray, plain: np.ndarray) -> list[str]:
    """Rank correlation with other scores, and LDS by part and on average."""
    parts = [bank.part(name) for name in judged_parts(bank)]
    found = [float(linear_datamodeling_score(scores, part.masks, part.truth[:, columns]).mean()) for part in parts]
    agreement = Agreement.of(scores, plain, top=10).mean_spearman
    return [f"{agreement:.3f}", *(f"{one:.3f}" for one in found), f"**{np.mean(found):.3f}**"]


def lds(case: Case, bank: Bank, job: Job, directory: Path, args: argparse.Namespace) -> None:
    """Print a table as it grows."""
    question = Question(job, directory, args.targets)
    columns = question.columns
    question.attributor("exact").fit_curvature()
    gradients = question.gradients()
    shares = [f"LDS, {part.removeprefix('drop-')}" for part in judged_parts(bank)]
    head = [case.title, "damping", "rows", "steps", "residual", "rank correlation", *shares, "mean", "seconds"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for damping in args.dampings:
        started = time.perf_counter()
        plain = question.scores(damping)
        seconds = time.perf_counter() - started
        cells = ["EK-FAC", f"{damping:g}", "", "", "", *cells_of(bank, columns, plain, plain), f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        for rows in args.rows:
            options = Refinement(steps=max(args.steps), rows=rows, tolerance=0.0, damping=damping, form=args.form)
            with Snapshots(tuple(args.steps)) as kept:
                question.scores(damping, options)
            for step, found in kept.found.items():
                scores = (gradients @ found.T.float()).double().numpy()
                quality = cells_of(bank, columns, scores, plain)
                measured = [f"{kept.residuals[step]:.2g}", *quality, f"{kept.seconds[step]:.0f}"]
                used = min(rows, len(case.train))
                print(f"| refined | {damping:g} | {used} | {step} | {' | '.join(measured)} |", flush=True)


def removal(case: Case, bank: Bank, job: Job, directory: Path, args: argparse.Namespace) -> None:
    """Retrain without the first 5 % of rows, and print LDS and effects with their intervals."""
    question = Question(job, directory)
    refinement = replace(Refinement(), form=args.form)
    if args.dampings != list(DAMPINGS):
        refinement = replace(refinement, damping=args.dampings[0])
    given = {"EK-FAC": question.scores(), "EK-FAC, refined": question.scores(refine=refinement)}
    for one in evaluate_bank(bank, given):
        change = "" if one.difference is None else f"; more than EK-FAC by {one.difference}"
        print(f"{case.title}, {one.part}: {one.method}: LDS {one.lds}{change}", flush=True)
    targets = judging_targets(bank.n_targets)[: case.options.get("removal_targets", TARGETS)]
    plan = removal_plan(given, (FRACTION,), targets=targets, random_draws=DRAWS, seed=SUBSET_SEED)
    retrain = case.retraining(drop="mask", seed=SEED)
    training = reusing(bank, retrain, retrain.protocol)
    outputs = np.stack([training(np.flatnonzero(mask), 0) for mask in plan.masks])
    print(evaluate_removal(plan, plan.masks, outputs), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lds", "removal"))
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--work", type=Path, default=Path("quality"), help="directory of banks")
    parser.add_argument("--downloads", type=Path, default=Path("downloads"), help="directory of fetched data")
    parser.add_argument("--dampings", type=float, nargs="+", default=list(DAMPINGS))
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--targets", type=int, help="`lds` on so many targets alone, evenly spaced")
    parser.add_argument("--form", default="auto", help="of derivatives along a direction")
    args = parser.parse_args()
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    disable_progress_bars()
    for name in args.cases:
        case, work = make_case(name, args.downloads), args.work / name
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as stores:
            job = Job(case, Path(scratch), work)
            (lds if args.what == "lds" else removal)(case, open_bank(case, work), job, Path(stores), args)


if __name__ == "__main__":
    main()
