"""`method="auto"` on tiny models that `Trainer` trains: what it takes, what that removes, whether its price is true.

    python benchmarks/auto.py prices --work replay
    python benchmarks/auto.py remove --work replay
    python benchmarks/auto.py calibrate --work replay
    python benchmarks/auto.py ridges --work replay

The cases are those of `replay_cases.py`. `prices` asks every method that is at hand for the best rows of all targets,
and compares its seconds with those that `method="auto"` and `recommend` name beforehand. `remove` trains again without
the first 1 % of the rows of each method, for each target by itself, from the same weights and in the same order.
`calibrate` calibrates with some targets, and compares the choice with other methods on other targets, by the
retrainings of `replay.py`; `ridges` judges the index with other λ by them. Results are kept in `--work`, and the
tables of `pages/auto.md` are printed from there.
"""

import argparse
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from datasets import disable_progress_bars
from replay import SHARES, bank
from replay_cases import CASES, Case
from transformers.utils import logging as transformers_logging

from hf_trak import Exact, Index, Replay, TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.evaluation import (
    TrainerRetraining,
    evaluate_lds,
    evaluate_removal,
    masks_and_outputs,
    removal_plan,
    retrain_on_subsets,
)
from hf_trak.featurize.calibration import named
from hf_trak.featurize.choosing import options
from hf_trak.featurize.pricing import price
from hf_trak.methods import AnyMethod

NAMES = ("mlp", "cnn", "vit", "bert", "lora-cool", "gpt2-300")
TOP, FRACTION, DRAWS = 20, 0.01, 20

METHODS: dict[str, AnyMethod | str] = {
    "index": "index",
    "EK-FAC": Exact("ekfac"),
    "hybrid": Exact("hybrid"),
    "refined": Exact("ekfac", "cg"),
    "recipe": Replay(),
    "run": Replay(of="run"),
    "run, half of the rows in the curvature": Replay(of="run", hessian_share=0.5),
}


def fresh(case: Case, place: Path, record: bool) -> TrakAttributor:
    """Train, with a record or without, and featurize."""
    shutil.rmtree(place, ignore_errors=True)
    config = TrakConfig(str(place / "trak"), per_device_batch_size=30, use_cpu=True)
    rows, _ = case.split()
    run = case.trainer(place, rows)
    if record:
        run.add_callback(TrakCallback(config, record=True))
    run.train()
    return TrakAttributor.from_trainer(run, config, case.task).featurize()


# -- prices -----------------------------------------------------------------------------------------------------------


def prices(case: Case, work: Path, place: Path) -> None:
    """Ask each method that is at hand, and compare the time with the one that was foretold."""
    path = place / "prices.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    _, targets = case.split()
    for record in (True, False):
        attributor = fresh(case, place / f"auto-{record}", record)
        features, ids = attributor.features, attributor.features.chosen(None)[0]
        rate = features.rate()
        assert rate is not None
        found = options(features, len(targets), ids, TOP, None, measure=True)
        for one in found.options:
            name = named(one.method)
            if name in known:
                continue
            shutil.rmtree(place / f"auto-{record}" / "trak" / "curvature", ignore_errors=True)
            passes = price(features, one.method, len(targets), ids).passes
            begun = time.perf_counter(), time.process_time()
            attributor.attribute(targets, top_k=TOP, method=one.method)
            known[name] = {
                "passes": passes, "foretold": one.lasts(rate), "seconds": time.perf_counter() - begun[0],
                "busy": time.process_time() - begun[1], "rate": rate, "record": record,
            }  # fmt: skip
            print(place.name, name, {key: round(value, 2) for key, value in known[name].items()}, flush=True)
            path.write_text(json.dumps(known, indent=1))


# -- removal ----------------------------------------------------------------------------------------------------------


def remove(case: Case, work: Path, place: Path) -> None:
    """Train without the first 1 % of the rows of each method, and keep the changes of each target's output."""
    if (place / "removed.json").exists():
        return
    rows, targets = case.split()
    attributor = fresh(case, place / "auto-removal", True)
    scores = {name: np.array(attributor.attribute(targets, top_k=None, method=one)["trak_scores"]).T
              for name, one in METHODS.items()}  # fmt: skip
    plan = removal_plan(scores, (FRACTION,), random_draws=DRAWS)
    retrain = TrainerRetraining(
        lambda rows, seed: case.trainer(place / "retrained", rows, seed), rows, targets, case.task, drop="mask", seed=0
    )
    outputs = masks_and_outputs(retrain_on_subsets(plan.masks, retrain, place / "removed"))
    result = evaluate_removal(plan, *outputs)
    changes = {one.name: [one.own.value, one.own.low, one.own.high] for one in result.effects}
    print(place.name, changes, flush=True)
    (place / "removed.json").write_text(json.dumps(changes, indent=1))


# -- calibration ------------------------------------------------------------------------------------------------------


def calibrate(case: Case, work: Path, place: Path) -> None:
    """Calibrate with four targets and with training rows, and judge the choices on the other targets by retraining."""
    path = place / "calibrated.json"
    _, targets = case.split()
    banks = {name: found for name, share in SHARES.items() if (found := bank(case, work / place.name, share, 0, True))}
    attributor = fresh(case, place / "auto-calibration", True)
    seen, others = range(0, 4), list(range(4, case.targets))
    chosen = {
        "calibrated, 4 targets": attributor.calibrate(targets.select(seen), 4),
        "calibrated, 6 training rows": attributor.calibrate(),
    }
    methods: dict[str, AnyMethod | str] = {**METHODS, **{name: one.chosen.method for name, one in chosen.items()}}
    results: dict[str, Any] = {}
    for name, method in methods.items():
        scores = np.array(attributor.attribute(targets.select(others), top_k=None, method=method)["trak_scores"]).T
        results[name] = {"method": method if isinstance(method, str) else named(method)}
        for share, (kept, outputs) in banks.items():
            mean = evaluate_lds(scores, kept, outputs[:, others]).mean
            results[name][share] = [round(one, 3) for one in (mean.value, mean.low, mean.high)]
        print(place.name, name, results[name], flush=True)
    path.write_text(json.dumps({"choices": {name: str(one) for name, one in chosen.items()}, **results}, indent=1))


def ridges(case: Case, work: Path, place: Path) -> None:
    """Judge the index with one λ after the other, for all targets."""
    _, targets = case.split()
    banks = {name: found for name, share in SHARES.items() if (found := bank(case, work / place.name, share, 0, True))}
    attributor, results = fresh(case, place / "auto-ridges", False), dict[str, list[float]]()
    for ridge in (0.3, 3.0, 10.0, 30.0, 100.0, 1000.0):
        found = attributor.attribute(targets, top_k=None, method=Index(lambda_relative=ridge))
        scores = np.array(found["trak_scores"]).T
        results[f"{ridge:g}"] = [round(evaluate_lds(scores, *truth).mean.value, 3) for truth in banks.values()]
    (place / "ridges.json").write_text(json.dumps(results, indent=1))


# -- tables -----------------------------------------------------------------------------------------------------------


def table(command: str, work: Path, names: list[str]) -> None:
    """Print what is known."""
    file = {"remove": "removed.json", "calibrate": "calibrated.json"}.get(command, f"{command}.json")
    for name in names:
        path = work / name / file
        if path.exists():
            print(f"\n## {CASES[name].title}\n")
            for method, one in json.loads(path.read_text()).items():
                print(f"| {method} | {one} |")


def main() -> None:
    commands = {"prices": prices, "remove": remove, "calibrate": calibrate, "ridges": ridges}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    parser.add_argument("--work", type=Path, default=Path("replay"), help="directory of trainings and scores")
    parser.add_argument("--cases", nargs="*", default=list(NAMES), choices=list(CASES))
    given = parser.parse_args()
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    logging.getLogger("hf_trak").setLevel(logging.WARNING)
    for name in given.cases:
        place = given.work / name
        place.mkdir(parents=True, exist_ok=True)
        commands[given.command](CASES[name], given.work, place)
    table(given.command, given.work, given.cases)


if __name__ == "__main__":
    main()
