"""hf_trak beside traker 0.3.2, dattri 0.3.0 and bergson 2.5.1: time, memory and LDS on the same work in one run.

    python benchmarks/peers --peers peers --json peers.json --plot peers.png

`--peers` names a directory into which each library that is not there yet is installed, into a folder of its own.
Three tasks: a CNN on images of digits, a BERT classifier and a GPT-2, both tiny, on texts that Python brings along.
Networks retrained on random halves say what attributions should have predicted. Each library runs as its documentation
shows, on the same checkpoints, at one k, at its own default λ, and with λ tuned: chosen from one relative grid by the
LDS of one half of the targets, for the first projection seed; both are reported on the other half, over all seeds.

Every library has a process of its own, with no other library on its path; in timed rounds they take turns, and each
has done the work once before. A library that cannot do it stands in the table with its error. With `--work`, nothing
is computed twice, not even timed rounds.
"""

import argparse
import functools
import json
import logging
import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from comparison.cases import CASES, Size
from comparison.job import SETTINGS, Settings, serve
from comparison.libraries import LIBRARIES, Worker, install, kept
from comparison.quality import Truth, differences, judge, tune
from comparison.report import Results, plot, quality_table, speed_table
from comparison.retraining import checkpoints, ground_truth


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="directory of the installed libraries")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--checkpoints", type=int, default=1, help="models trained on all rows, independently")
    parser.add_argument("--proj-dim", type=int, default=128, help="k of all libraries")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of projections; the first tunes λ")
    parser.add_argument("--lambdas", nargs="*", type=float, default=[0.01, 0.1, 0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--train-rows", type=int, help="n; by default 1000 images, 400 texts")
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--hidden-size", type=int, default=32, help="of the transformers")
    parser.add_argument("--epochs", type=int, help="by default what suits the case")
    parser.add_argument("--subsets", type=int, default=60, help="random halves to retrain on")
    parser.add_argument("--repeats", type=int, default=1, help="trainings averaged per subset")
    parser.add_argument("--batch-size", type=int, default=50, help="rows per batch of all libraries")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; 0 judges quality alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, help="directory that keeps what was computed between runs")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    parser.add_argument("--worker", nargs=2, metavar=("LIBRARY", "DIRECTORY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(args: argparse.Namespace, name: str, work_directory: Path) -> tuple[str, Results, int]:
    """Title, results by library, and rows that one featurizing goes through."""
    size = Size(args.train_rows, args.targets, args.epochs, args.hidden_size)
    settings = Settings(name, size, args.proj_dim, args.checkpoints, args.threads, args.batch_size)
    case = CASES[name](size)
    trained = work_directory / f"{name}-{case.train_rows}-{args.targets}-{case.epochs}-{args.hidden_size}"
    path = trained / f"{args.proj_dim}-{args.checkpoints}-{args.threads}-{args.batch_size}"
    path.mkdir(parents=True, exist_ok=True)
    settings.save(path / SETTINGS)
    truth = Truth(*ground_truth(case, args.subsets, args.repeats, trained))
    models = checkpoints(case, args.checkpoints, trained)
    parameters = sum(parameter.numel() for parameter in models[0].parameters())

    results: Results = {}
    ours = None
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, path, args.peers)) for name in args.libraries}
        for library, worker in workers.items():
            entry = attributed(args, worker, truth)
            results[library] = entry
            if "error" not in entry:
                entry["lds"], resampled = judge(path, library, args.seeds, entry["tuning"]["tuned_lambda"], truth)
                if library == "hf_trak":
                    ours = resampled
                elif ours is not None:
                    entry["lds"] |= differences(ours, resampled)
            print(name, library, json.dumps(entry), file=sys.stderr, flush=True)
        time_rounds(args, workers, results)
    title = (
        f"{case.title}: P = {parameters:,}, n = {case.train_rows}, k = {args.proj_dim}, {args.checkpoints} "
        f"checkpoint(s); {args.subsets} halves × {args.repeats}"
    )
    return title, results, case.train_rows * args.checkpoints


def attributed(args: argparse.Namespace, worker: Worker, truth: Truth) -> dict[str, Any]:
    """Scores of all seeds in files, and how λ was tuned; or the library's error."""
    first, *others = args.seeds
    library, path = worker.library, worker.path
    key: dict[str, Any] = {"seed": first, "lambdas": args.lambdas}
    made = kept(path / f"{library}-tuning.json", key, lambda: worker.ask([first], args.lambdas))
    if "error" in made:
        return made
    tuning = tune(path, library, first, truth)
    if others:
        tuned = [] if tuning["tuned_lambda"] == "default" else [float(tuning["tuned_lambda"])]
        key = {"seeds": others, "lambdas": tuned}
        made = kept(path / f"{library}-seeds.json", key, lambda: worker.ask(others, tuned))
        if "error" in made:
            return made
    return {"tuning": tuning}


def time_rounds(args: argparse.Namespace, workers: dict[str, Worker], results: Results) -> None:
    """Every library once in each round, so that all see the same machine."""
    working = {library: worker for library, worker in workers.items() if "error" not in results[library]}
    for library in working:
        results[library]["rounds"] = []
    for index in range(args.rounds):
        for library, worker in working.items():
            path = worker.path / f"{library}-round-{index}.json"
            key = {"seed": args.seeds[0], "libraries": list(working)}
            once = kept(path, key, functools.partial(worker.ask, args.seeds[:1], [], timed=True))
            if "error" in once:
                raise RuntimeError(f"{library} scored, but failed in a timed round: {once['error']}")
            results[library]["rounds"].append(once)


def main() -> None:
    started = time.perf_counter()
    args = arguments()
    logging.disable(logging.WARNING)
    if args.worker:
        serve(args.worker[0], Path(args.worker[1]))
        return
    torch.set_num_threads(args.threads)
    args.libraries = [library for library in LIBRARIES if library in args.libraries]  # ours first, for differences
    for library in args.libraries:
        install(library, args.peers)
    facts = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    written: dict[str, Any] = {
        "settings": {name: str(value) for name, value in vars(args).items()},
        "facts": {**facts, "torch": torch.__version__},
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.cases:
            title, results, rows = compare(args, name, args.work or Path(scratch))
            written["cases"][name] = {"title": title, "results": results}
            print(f"\n{title}\n\n{quality_table(results)}")
            if args.rounds:
                print(
                    f"\n{args.rounds} round(s), {args.threads} thread(s)\n\n{speed_table(results, rows)}", flush=True
                )
    minutes = (time.perf_counter() - started) / 60
    written["facts"]["minutes"] = minutes
    print(f"\n{minutes:.1f} minutes in total")
    if args.json is not None:
        args.json.write_text(json.dumps(written, indent=2) + "\n")
    if args.plot is not None:
        plot({name: each["results"] for name, each in written["cases"].items()}, args.plot)


if __name__ == "__main__":
    main()
