"""The best λ on several tasks, and rules that choose λ from the data compared with a fixed number.

    python benchmarks/lambda_sweep.py --work lambda_work --json lambda_sweep.json --png lambda_sweep.png

Cases are the tasks of lambda_cases.py, with one and several checkpoints, from independent trainings and from one, and
k below, near and above n. `--work` keeps retrained outputs and spectra, so that the command can be interrupted and
continued. The first table says which part of the best linear datamodeling score (LDS) of a case each fixed λ reaches.
The second one judges the rules of lambda_rules.py: the constant of a rule is the best one on the other tasks.

Other cases, judged with constants that were chosen on those of the first run: `--rows 250 --longer 2`, `--ratios 0.03
0.1` or `--longer 4`, each with `--constants-from lambda_sweep.json`. Less noise: `--subsets 200 --repeats 4`.
"""

import argparse
import json
import logging
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars
from lambda_cases import TASKS, Checkpoint, Prepared, Settings
from lambda_rules import FIXED, RULES, Evidence, Rule, evidence, predictions
from scipy.stats import rankdata

from hf_trak.evaluation import Interval

LAMBDAS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
GRID = np.unique(np.round([*LAMBDAS, *(0.01 * 10 ** (np.arange(29) / 8))], 6))
"""Relative λ from 0.01 to 30 that rules choose from."""


@dataclass
class Case:
    """One task, k, number and kind of checkpoints.

    Attributes:
        lds: `(λ,)`, mean over targets.
        resampled: `(resamples, λ)`, the same over resampled subsets and targets.
    """

    task: str
    kind: str
    k: int
    count: int
    known: Evidence
    lds: np.ndarray
    resampled: np.ndarray

    def at(self, relative: float) -> int:
        """The nearest λ of the grid."""
        return int(np.abs(np.log(GRID / np.clip(relative, GRID[0], GRID[-1]))).argmin())

    def part(self, relative: float) -> float:
        """LDS at a λ, as a part of the best one."""
        return float(self.lds[self.at(relative)] / self.lds.max())

    def title(self) -> str:
        return f"{self.task}, k = {self.k}, " + ("1" if self.count == 1 else f"{self.count} ({self.kind})")


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    logging.disable(logging.WARNING)
    disable_progress_bars()
    start = time.perf_counter()
    settings = Settings(
        args.work, args.ratios, args.counts, args.targets, args.subsets, args.repeats, args.rows, args.longer
    )
    given = (args.tasks, [settings] * len(args.tasks), [args.resamples] * len(args.tasks))
    if args.processes == 1:
        found = list(map(cases, *given))
    else:  # a process per task, of one thread, which is all that such small networks have work for
        os.environ["OMP_NUM_THREADS"] = "1"
        with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(cases, *given))
    every = [case for of_task, _ in found for case in of_task]
    seconds = {name: stages for name, (_, stages) in zip(args.tasks, found, strict=True)}

    print(f"{len(every)} cases: part of the best LDS that a fixed λ ÷ (trace(XᵀX) / min(n, k)) reaches\n")
    print(fixed_table(every))
    others = every if args.constants_from is None else read_cases(args.constants_from)
    judged = [judge(rule, every, others) for rule in RULES] if len({case.task for case in others}) > 1 else []
    print(
        "\nrules, with the constant that is best on the other tasks"
        + ("\n" if args.constants_from is None else f" of {args.constants_from}\n")
    )
    print(rule_table(judged))
    spent = time.perf_counter() - start
    rounded = {name: {stage: round(value, 1) for stage, value in stages.items()} for name, stages in seconds.items()}
    print("\nseconds of one thread by stage: " + json.dumps(rounded))
    print(f"this run: {spent:.0f} s")
    if args.json is not None:
        content = {
            "settings": {**asdict(settings), "resamples": args.resamples},
            "seconds": rounded,
            "this_run": spent,
            "relative": GRID.tolist(),
            "cases": [report(case) for case in every],
            "rules": judged,
        }
        args.json.write_text(json.dumps(content, indent=2, default=str) + "\n")
    if args.png is not None:
        plot(every, args.png)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("lambda_work"), help="directory that keeps what is computed")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["cnn", "language", "text", "mlp"])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 3, 10], help="checkpoints")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 1.0, 4.0], help="k ÷ n")
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--subsets", type=int, default=60, help="random halves that are trained on")
    parser.add_argument("--repeats", type=int, default=2, help="trainings averaged per half")
    parser.add_argument("--rows", type=int, help="training rows; as many as the task has by default")
    parser.add_argument("--longer", type=float, default=1.0, help="factor of the number of epochs")
    parser.add_argument("--resamples", type=int, default=500, help="bootstrap samples")
    parser.add_argument("--constants-from", type=Path, help="JSON of another run, to choose constants of rules on")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--png", type=Path, help="file to plot the results to; needs matplotlib")
    return parser.parse_args(arguments)


def cases(name: str, settings: Settings, resamples: int) -> tuple[list[Case], dict[str, float]]:
    """All cases of a task, and the seconds that its files took to compute. Runs in a process of its own."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    disable_progress_bars()
    prepared = Prepared(name, settings)
    outputs = prepared.retrained()
    probes = np.random.default_rng(1).choice([-1.0, 1.0], (100, prepared.n))
    found = []
    for kind in prepared.kinds:
        for dim in prepared.dims():
            checkpoints = prepared.checkpoints(kind, dim)
            for count in settings.counts:
                if count == 1 and kind != prepared.kinds[0]:
                    continue  # the last checkpoint of a run is that of an independent training
                # Evenly spaced, of one run; of independent trainings it does not matter which.
                chosen = np.linspace(0, len(checkpoints), count, endpoint=False).astype(int)
                ensemble = [checkpoints[index] for index in chosen]
                lds, resampled = measured(ensemble, prepared.masks, outputs, resamples)
                known = evidence(
                    [one.features for one in ensemble],
                    ensemble[0].again,
                    [one.outputs for one in ensemble],
                    [one.target_outputs for one in ensemble],
                    probes,
                    GRID,
                )
                found.append(Case(name, kind, dim, count, known, lds, resampled))
    return found, prepared.seconds()


def measured(
    ensemble: list[Checkpoint], masks: np.ndarray, outputs: np.ndarray, resamples: int
) -> tuple[np.ndarray, np.ndarray]:
    """LDS for every λ: the mean over targets, and that over resampled subsets and targets.

    Ranks are those among all subsets, a resampled subset counts as often as it is drawn. The draws are the same for
    all cases of a task, so that differences can be taken before intervals.
    """
    weights = masks * np.mean([one.features.q for one in ensemble], axis=0)
    predicted = np.mean([predictions(one.features, weights, GRID) for one in ensemble], axis=0)
    ranks, truth = rankdata(predicted, axis=1), rankdata(outputs, axis=0)
    rng = np.random.default_rng(0)
    s, m = outputs.shape
    drawn = np.stack([np.bincount(rng.integers(0, s, s), minlength=s) for _ in range(resamples)]) / s
    targets = np.stack([np.bincount(rng.integers(0, m, m), minlength=m) for _ in range(resamples)]) / m
    drawn = np.concatenate([np.full((1, s), 1 / s), drawn])
    targets = np.concatenate([np.full((1, m), 1 / m), targets])
    means = np.stack([(weighted_correlation(each, truth, drawn) * targets).sum(1) for each in ranks], axis=1)
    return means[0], means[1:]


def weighted_correlation(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Pearson's correlation over s of each column of `x` and `y` `(s, m)`, by weights `(b, s)` of sum 1: `(b, m)`."""
    x, y = x - x.mean(0), y - y.mean(0)
    mean_x, mean_y = weights @ x, weights @ y
    covariance = weights @ (x * y) - mean_x * mean_y
    variances = (weights @ x**2 - mean_x**2) * (weights @ y**2 - mean_y**2)
    return covariance / np.sqrt(variances.clip(1e-12))


def fixed_table(every: list[Case]) -> str:
    """Mean and least part of the best LDS by λ, over all cases and within groups of them."""
    tasks = list(dict.fromkeys(case.task for case in every))
    groups = {"mean": every, **{name: [case for case in every if case.task == name] for name in tasks}}
    groups["1 checkpoint"] = [case for case in every if case.count == 1]
    groups["several, independent"] = [case for case in every if case.count > 1 and case.kind == "independent"]
    groups["several, one run"] = [case for case in every if case.count > 1 and case.kind == "one run"]
    for name, low, high in (("k < n / 2", 0, 0.5), ("k near n", 0.5, 2), ("k > 2 n", 2, np.inf)):
        groups[name] = [case for case in every if low <= case.k / case.known.n < high]
    lines = ["| λ | " + " | ".join(f"{value:g}" for value in LAMBDAS) + " |", "|---" * (len(LAMBDAS) + 1) + "|"]
    for name, group in groups.items():
        if group:
            lines.append(_row(name, [np.mean([case.part(value) for case in group]) for value in LAMBDAS]))
        if name == "mean":
            lines.append(_row("worst case", [min(case.part(value) for case in group) for value in LAMBDAS]))
    return "\n".join(lines)


def _row(name: str, values: list[Any]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |"


def judge(rule: Rule, every: list[Case], known: list[Case]) -> dict[str, Any]:
    """Judge a rule on every task, with the constant that is best on average on the other tasks among `known`."""
    chosen: list[float] = []
    constants: dict[str, float] = {}
    for name in dict.fromkeys(case.task for case in every):
        others = [case for case in known if case.task != name]
        mean_parts = [np.mean([c.part(rule.choose(c.known, constant)) for c in others]) for constant in rule.constants]
        constants[name] = rule.constants[int(np.argmax(mean_parts))]
    for case in every:
        chosen.append(float(GRID[case.at(rule.choose(case.known, constants[case.task]))]))
    parts = np.array([case.part(value) for case, value in zip(every, chosen, strict=True)])
    return {
        "rule": rule.name,
        "constants": constants,
        "chosen": chosen,
        "mean": float(parts.mean()),
        "worst": float(parts.min()),
        "tasks": {
            name: float(np.mean([p for c, p in zip(every, parts, strict=True) if c.task == name]))
            for name in constants
        },
        "more_than_fixed": difference(every, chosen).to_dict(),
    }


def difference(every: list[Case], chosen: list[float], reference: float = FIXED) -> Interval:
    """Mean part of the best LDS at the chosen λ minus that at the fixed one, with its bootstrap interval.

    Subsets and targets are resampled, within each task and for all of its cases alike; cases are taken as given.
    """
    value = np.mean([case.part(one) - case.part(reference) for case, one in zip(every, chosen, strict=True)])
    samples = np.zeros(len(every[0].resampled))
    tasks = list(dict.fromkeys(case.task for case in every))
    for case, one in zip(every, chosen, strict=True):
        more = case.resampled[:, case.at(one)] - case.resampled[:, case.at(reference)]
        # Tasks with as many rows have drawn the same numbers: shifted, they are as good as independent ones.
        samples += np.roll(more, tasks.index(case.task)) / case.lds.max() / len(every)
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(float(value), float(low), float(high))


def rule_table(judged: list[dict[str, Any]]) -> str:
    if not judged:
        return "(no other task to choose constants on: give two --tasks or more)"
    tasks = list(judged[0]["tasks"])
    lines = [
        f"| rule | c | mean | worst | more than {FIXED:g} [95 %] | " + " | ".join(tasks) + " |",
        "|---" * (5 + len(tasks)) + "|",
    ]
    for each in judged:
        constants = sorted(set(each["constants"].values()))
        shown = f"{constants[0]:.2g}" if len(constants) == 1 else f"{constants[0]:.2g} … {constants[-1]:.2g}"
        more = each["more_than_fixed"]
        values = " | ".join(f"{value:.3f}" for value in each["tasks"].values())
        lines.append(
            f"| {each['rule']} | {shown} | {each['mean']:.3f} | {each['worst']:.3f} | "
            f"{more['value']:+.3f} [{more['low']:+.3f}, {more['high']:+.3f}] | {values} |"
        )
    return "\n".join(lines)


def report(case: Case) -> dict[str, Any]:
    """A case as plain JSON values."""
    return {
        "task": case.task,
        "kind": case.kind,
        "k": case.k,
        "n": case.known.n,
        "checkpoints": case.count,
        "lds": case.lds.round(5).tolist(),
        "best": float(GRID[case.lds.argmax()]),
        "curves": {name: curve.round(6).tolist() for name, curve in case.known.curves.items()},
        "eigenvalues": case.known.eigenvalues,
    }


def read_cases(path: Path) -> list[Case]:
    """The cases of another run, with all that constants are chosen by."""
    content = json.loads(path.read_text())
    if not np.allclose(content["relative"], GRID):
        raise ValueError(f"{path} was written with other λ. Expected the JSON of this version of the script.")
    found = []
    for case in content["cases"]:
        curves = {name: np.array(curve) for name, curve in case["curves"].items()}
        known = Evidence(case["n"], case["k"], case["checkpoints"], GRID, curves, case["eigenvalues"])
        lds = np.array(case["lds"])
        found.append(Case(case["task"], case["kind"], case["k"], case["checkpoints"], known, lds, lds[None]))
    return found


def plot(every: list[Case], path: Path) -> None:
    """LDS over λ relative to the best of each case: tasks in rows, k in columns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(case.task for case in every))
    columns = max(len({case.k for case in every if case.task == name}) for name in tasks)
    figure, axes = pyplot.subplots(
        len(tasks), columns, figsize=(4 * columns, 2.6 * len(tasks)), sharex=True, sharey=True, squeeze=False
    )
    for row, name in enumerate(tasks):
        for column, k in enumerate(sorted({case.k for case in every if case.task == name})):
            axis = axes[row][column]
            for case in every:
                if (case.task, case.k) == (name, k):
                    line = ":" if case.count == 1 else "-" if case.kind == "independent" else "--"
                    label = "1" if case.count == 1 else f"{case.count}, {case.kind}"
                    axis.semilogx(GRID, case.lds / case.lds.max(), line, label=f"{label}: {case.lds.max():.2f}")
            axis.axvline(FIXED, color="0.7", zorder=0)
            axis.set_title(f"{name}, n = {case_n(every, name)}, k = {k}", fontsize=9)
            axis.legend(title="checkpoints: best LDS", fontsize=6, title_fontsize=6, loc="lower center")
    axes[0][0].set_ylim(0.4, 1.02)
    for axis in axes[-1]:
        axis.set_xlabel("λ ÷ (trace(XᵀX) / min(n, k))")
    for row_axes in axes:
        row_axes[0].set_ylabel("LDS ÷ best")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def case_n(every: list[Case], name: str) -> int:
    return next(case.known.n for case in every if case.task == name)


if __name__ == "__main__":
    main()
