"""What conjugate gradients add to exact scores, on cases of the benchmark of quality whose banks are built.

    python benchmarks/quality build --cases gpt2 --work quality --downloads downloads
    python benchmarks/refine.py lds gpt2 --work quality --downloads downloads
    python benchmarks/refine.py removal gpt2 --work quality --downloads downloads
    python benchmarks/refine.py woodbury gpt2 --work quality --downloads downloads

`lds` refines EK-FAC at several dampings and numbers of rows, and judges the scores after some of the steps: the median
relative residual, the mean rank correlation with EK-FAC's scores, LDS by share of dropped rows, and seconds. `removal`
trains again without the first rows of EK-FAC, and of EK-FAC refined as by default, for some targets. `woodbury` puts
the Gram matrix of some rows B over EK-FAC's curvature P, without a sketch: with K = G P⁻¹ Gᵀ and C the exact scores,

    scores = C − K[:, B] (K[B, B] + λI)⁻¹ C[B],    λ relative to the mean diagonal of K[B, B].
"""

import argparse
import logging
import sys
import tempfile
import time
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

from hf_trak import Exact, TrakAttributor, TrakConfig
from hf_trak.curvature.conjugate_gradients import Refinement, Solutions
from hf_trak.evaluation import Bank, linear_datamodeling_score
from hf_trak.evaluation.bank import judged_parts
from hf_trak.evaluation.removal import evaluate_removal, removal_plan
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.fidelity import Agreement, fitted_curvature
from hf_trak.modelout_functions import get_task
from hf_trak.modelout_functions.loss import GaussNewtonModelOutput, LossModelOutput

DAMPINGS = (0.01, 0.1, 1.0, 10.0)
STEPS = (1, 2, 3, 5, 10, 20)
RIDGES = (1.0, 3.0, 10.0)
FRACTION = 0.05


class Question:
    """One case: its model, rows and targets."""

    def __init__(self, job: Job, directory: Path, count: int | None = None, columns: list[int] | None = None) -> None:
        """
        Args:
            job: the case and its models.
            directory: where stores are made.
            count: of the targets only so many, evenly spaced; `None` for all.
            columns: of the targets only these.
        """
        self.job, self.directory = job, directory
        self.task = get_task(job.case.task)
        m = len(job.case.targets)
        self.columns = list(range(0, m, -(-m // (count or m)))) if columns is None else columns
        self.targets = job.case.targets.select(self.columns)

    def attributor(self, name: str, **options: Any) -> TrakAttributor:
        """Attribute in a directory of its own; the curvature is that of all."""
        defaults = {"per_device_batch_size": BATCH, "curvature": "ekfac"}
        args = TrakConfig(str(self.directory / name), **{**defaults, **options})
        return TrakAttributor(self.job.model, args, self.job.case.train, task=self.task)

    def scores(self, damping: float | None = None, refine: Refinement | None = None) -> np.ndarray:
        """Exact scores `(n, m)`."""
        own = self.attributor("exact", curvature={"damping": damping})
        scored = own.attribute(self.targets, top_k=None, method=Exact(refine=refine)).with_format("numpy")
        return np.stack(scored["trak_scores"][:]).T.astype(np.float64)

    def gradients(self, task: LossModelOutput | None = None) -> Tensor:
        """Gradients of minus the loss of all training rows, or of another task, `(n, P)`."""
        loss = TrakConfig(
            str(self.directory / "gradients"), proj_type="none", feature_dtype="float32", per_device_batch_size=BATCH,
        )  # fmt: skip
        task = LossModelOutput(of=self.task) if task is None else task
        own = TrakAttributor(self.job.model, loss, self.job.case.train, task=task)
        shards = list(own.featurize().features.store.train(0))
        self.weights = torch.cat([shard.out_to_loss for shard in shards]).numpy()
        return torch.cat([shard.grads for shard in shards])


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


def woodbury(case: Case, bank: Bank, job: Job, directory: Path, args: argparse.Namespace) -> None:
    """Print a table as it grows."""
    question = Question(job, directory, args.targets)
    own = question.attributor("exact").fit_curvature()
    curvature = fitted_curvature(ExactScores(own.features), 0)
    roots = GaussNewtonModelOutput(of=question.task)
    gradients = question.gradients(roots)
    weights = torch.from_numpy(question.weights).float()
    order = np.random.Generator(np.random.Philox(0)).permutation(len(gradients))
    shares = [f"LDS, {part.removeprefix('drop-')}" for part in judged_parts(bank)]
    head = [case.title, "damping", "rows", "λ", "rank correlation", *shares, "mean"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for damping in args.dampings:
        plain = question.scores(damping)
        cells = ["EK-FAC", f"{damping:g}", "", "", *cells_of(bank, question.columns, plain, plain)]
        print(f"| {' | '.join(cells)} |", flush=True)
        products = torch.from_numpy(plain) / weights.double().unsqueeze(1)
        for rows in args.rows:
            chosen = torch.from_numpy(np.sort(order[:rows]))
            conditioned = torch.cat([curvature.precondition(part, damping) for part in gradients[chosen].split(64)])
            kernel = (gradients @ conditioned.T).double()
            for ridge in RIDGES:
                damped = kernel[chosen] + ridge * kernel[chosen].diagonal().mean() * torch.eye(len(chosen))
                removed = kernel @ torch.linalg.solve(damped, products[chosen])
                scores = ((products - removed) * weights.double().unsqueeze(1)).numpy()
                quality = cells_of(bank, question.columns, scores, plain)
                print(f"| over rows | {damping:g} | {len(chosen)} | {ridge:g} | {' | '.join(quality)} |", flush=True)


def removal(case: Case, bank: Bank, job: Job, directory: Path, args: argparse.Namespace) -> None:
    """Retrain without the first 5 % of rows, and print the effects with their intervals."""
    targets = judging_targets(bank.n_targets)[: case.options.get("removal_targets", TARGETS)]
    question = Question(job, directory, columns=targets)
    given = {}
    for name, refinement in {"EK-FAC": None, "EK-FAC, refined": Refinement(form=args.form)}.items():
        started = time.perf_counter()
        given[name] = np.zeros((len(case.train), bank.n_targets))
        given[name][:, targets] = question.scores(refine=refinement)
        print(f"{case.title}: {name}, {len(targets)} targets: {time.perf_counter() - started:.0f} s", flush=True)
    plan = removal_plan(given, (FRACTION,), targets=targets, random_draws=DRAWS, seed=SUBSET_SEED)
    retrain = case.retraining(drop="mask", seed=SEED)
    training = reusing(bank, retrain, retrain.protocol)
    outputs = np.stack([training(np.flatnonzero(mask), 0) for mask in plan.masks])
    print(evaluate_removal(plan, plan.masks, outputs), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lds", "removal", "woodbury"))
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
            run = {"lds": lds, "removal": removal, "woodbury": woodbury}[args.what]
            run(case, open_bank(case, work), job, Path(stores), args)


if __name__ == "__main__":
    main()
