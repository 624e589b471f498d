"""Replay beside the index, exact scores and retraining, on tiny models that `Trainer` trains.

    python benchmarks/replay.py run --work replay
    python benchmarks/replay.py page

`run` trains every case of `replay_cases.py` again without random 1, 5 and 50 % of its rows, which weigh zero in the
loss: from the same weights, with the same seed, so in the same order; some also in other orders. It asks every method
for scores, and keeps the linear datamodeling scores in `replay.json`, with 95 % intervals from resampled subsets and
targets. What is there already, a training or the scores of a method, is not made again. `page` writes the tables of
`pages/replay.md`.
"""

import argparse
import json
import logging
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars
from replay_cases import CASES, Case
from transformers.utils import logging as transformers_logging

from hf_trak import Exact, Replay, TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.errors import HfTrakError
from hf_trak.evaluation import TrainerRetraining, evaluate_lds, masks_and_outputs, random_subsets, retrain_on_subsets

SHARES = {"1 %": 0.01, "5 %": 0.05, "50 %": 0.5}
RESULTS, PAGE = Path(__file__).with_name("replay.json"), Path(__file__).parent / "pages" / "replay.md"

METHODS: dict[str, Any] = {
    "index": "index",
    "EK-FAC": Exact("ekfac"),
    "hybrid": Exact("hybrid"),
    "recipe": Replay(),
    "plain": Replay(of="run", smoothing=0.0),
    "recorded": Replay(of="run"),
    "epochs": Replay(of="run", name="checkpoints"),
}
SHOWN = ("index", "EK-FAC", "hybrid", "plain", "recorded", "epochs", "recipe")


# -- the truth --------------------------------------------------------------------------------------------------------


def bank(case: Case, place: Path, share: float, order: int, train: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """Train without some rows, or read what was trained: rows that were kept `(s, n)`, and outputs `(s, m)`."""
    path = place / (f"without-{share:g}" + (f"-order-{order}" if order else "") + ".npz")
    if train and not (path.exists() and len(np.load(path)["kept"]) >= case.retrainings):
        rows, targets = case.split()
        masks = random_subsets(case.rows, 200, fraction=1 - share, seed=int(1000 * share))[: case.retrainings]
        retrain = TrainerRetraining(
            lambda rows, seed: case.trainer(place, rows, seed), rows, targets, case.task, drop="mask", seed=order
        )
        kept, outputs = masks_and_outputs(retrain_on_subsets(masks, retrain, path.with_name(path.stem)))
        np.savez(path, kept=kept, outputs=outputs)
    if not path.exists():
        return None
    found = np.load(path)
    return found["kept"], found["outputs"][:, : case.targets]


# -- methods ----------------------------------------------------------------------------------------------------------


def recorded(case: Case, place: Path, rows: Dataset) -> TrakAttributor:
    """Train with a record and a checkpoint after each epoch, and return the attributor of the run."""
    for old in ("out", "trak"):
        shutil.rmtree(place / old, ignore_errors=True)
    config = TrakConfig(str(place / "trak"), per_device_batch_size=30, use_cpu=True)
    run = case.trainer(place, rows, save_strategy="epoch", logging_strategy="epoch")
    run.add_callback(TrakCallback(config, record=True))
    run.save_model(str(place / "out" / "checkpoint-0"))
    begun = time.process_time()
    run.train()
    losses = [round(entry["loss"], 3) for entry in run.state.log_history if "loss" in entry]
    trained = sum(value.numel() for value in run.model.parameters() if value.requires_grad)
    about = {
        "title": case.title, "parameters": trained, "rows": case.rows, "steps": run.state.global_step,
        "losses": losses, "seconds": round(time.process_time() - begun, 2),
    }  # fmt: skip
    (place / "about.json").write_text(json.dumps(about))
    return TrakAttributor.from_trainer(run, config, case.task)


def score(case: Case, place: Path, names: list[str]) -> None:
    """Ask methods whose scores are not there."""
    missing = [name for name in names if not (place / f"scores-{name}.npz").exists()]
    if not missing:
        return
    rows, targets = case.split()
    attributor = recorded(case, place, rows)
    attributor.featurize()
    for name in missing:
        begun = time.process_time()
        try:
            found = attributor.attribute(targets, top_k=None, method=METHODS[name])
        except HfTrakError as error:
            print(f"  {name}: {error}", flush=True)
            continue
        table = np.array(found["trak_scores"]).T
        seconds = time.process_time() - begun
        np.savez(place / f"scores-{name}.npz", scores=table, seconds=seconds)
        print(f"  {name}: {seconds:.1f} s", flush=True)


# -- figures ----------------------------------------------------------------------------------------------------------


def judge(case: Case, place: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Compute the scores of methods by the trainings that are there, but for figures that are known."""
    banks = {name: found for name, share in SHARES.items() if (found := bank(case, place, share, 0, False))}
    orders = [found for order in range(1, case.orders + 1) if (found := bank(case, place, 0.05, order, False))]
    if orders and len(orders) == case.orders:
        others = np.stack([outputs for _, outputs in orders])
        banks["other orders"] = orders[0][0], others.mean(0)
    found: dict[str, Any] = {**known, "about": json.loads((place / "about.json").read_text())}
    found["retrainings"] = {name: len(kept) for name, (kept, _) in banks.items()}
    if "other orders" in banks:
        kept = orders[0][0]
        own = banks["5 %"][1]
        ceilings = [rank_agreement(one, np.delete(others, i, 0).mean(0)) for i, one in enumerate(others)]
        found["ceiling"] = round(float(np.mean(ceilings)), 3)
        found["own order"] = round(rank_agreement(own[: len(kept)], others.mean(0)), 3)
    methods = dict(known.get("methods", {}))
    for path in sorted(place.glob("scores-*.npz")):
        name, stored = path.stem.removeprefix("scores-"), np.load(path)
        figures = dict(methods.get(name, {}))
        if figures.get("seconds") != round(float(stored["seconds"]), 1):
            figures = {"seconds": round(float(stored["seconds"]), 1)}
        for share, truth in banks.items():
            if share not in figures or known["retrainings"].get(share) != len(truth[0]):
                mean = evaluate_lds(stored["scores"], *truth).mean
                figures[share] = [round(one, 3) for one in (mean.value, mean.low, mean.high)]
        methods[name] = figures
    found["methods"] = methods
    return found


def rank_agreement(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean rank correlation of outputs `(s, m)`, over targets."""
    from scipy.stats import spearmanr

    return float(np.mean([spearmanr(a, b).statistic for a, b in zip(one.T, other.T, strict=True)]))


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def run(work: Path, name: str, methods: list[str]) -> None:
    case, place = CASES[name], work / name
    place.mkdir(parents=True, exist_ok=True)
    print(name, flush=True)
    score(case, place, methods)
    for share in ("5 %", "1 %", "50 %"):
        bank(case, place, SHARES[share], 0, True)
    for order in range(1, case.orders + 1):
        bank(case, place, 0.05, order, True)
    found = judge(case, place, read().get(name, {}))
    results = {**read(), name: found}
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(results, indent=1))
    RESULTS.write_text(text + "\n")
    for method, figures in results[name]["methods"].items():
        print(f"  {method}: {figures}", flush=True)


# -- the page ---------------------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Make the tables of the page from the stored figures, by name."""
    cases = {name: results[name] for name in CASES if name in results}
    found = {share: _table(cases, share, SHOWN) for share in SHARES}
    ordered = {name: one for name, one in cases.items() if "ceiling" in one}
    found["other orders"] = _table(ordered, "other orders", SHOWN, ("own order", "ceiling"))
    header = ("case", "parameters", "rows", "steps", "loss, first and last epoch", "retrainings", "a training")
    lines = [_line(header), _rule(len(header))]
    for one in cases.values():
        about, counts = one["about"], sorted({*one["retrainings"].values()})
        losses = ", ".join(f"{loss:.2f}" for loss in about["losses"][:: max(1, len(about["losses"]) - 1)])
        cells = (about["title"], f"{about['parameters']:,}", about["rows"], about["steps"], losses,
                 ", ".join(map(str, counts)), f"{about['seconds']:.1f} s")  # fmt: skip
        lines.append(_line(cells))
    found["cases"] = "\n".join(lines)
    lines = [_line(("seconds", *SHOWN)), _rule(len(SHOWN) + 1)]
    for one in cases.values():
        seconds = [one["methods"].get(method, {}).get("seconds") for method in SHOWN]
        lines.append(_line((one["about"]["title"], *("" if s is None else f"{s:.{int(s < 10)}f}" for s in seconds))))
    found["seconds"] = "\n".join(lines)
    return found


def _table(cases: dict[str, Any], share: str, methods: tuple[str, ...], more: tuple[str, ...] = ()) -> str:
    lines = [_line((share, *methods, *more)), _rule(1 + len(methods) + len(more))]
    for one in cases.values():
        figures = [one["methods"].get(method, {}).get(share) for method in methods]
        best = max((f[0] for f in figures if f), default=None)
        cells = [_cell(f, best) for f in figures] + [_number(one[name]) for name in more]
        lines.append(_line((one["about"]["title"], *cells)))
    return "\n".join(lines)


def _cell(figures: list[float] | None, best: float | None) -> str:
    if figures is None:
        return ""
    value, low, high = map(_number, figures)
    shown = f"**{value}**" if best is not None and value == _number(best) else value
    return f"{shown} ({low}–{high})"


def _number(value: float) -> str:
    return f"{'−' if value < 0 else ''}{f'{abs(value):.2f}'.removeprefix('0')}"


def _line(cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rule(count: int) -> str:
    return "|" + "---|" * count


def page(text: str, results: dict[str, Any]) -> str:
    """Put the tables between the marks of a page: `<!-- 5 % -->` and `<!-- end -->`."""
    for name, table in tables(results).items():
        mark = f"<!-- {name} -->"
        before, after = text.split(f"{mark}\n")
        text = f"{before}{mark}\n{table}\n{after[after.index('<!-- end -->') :]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "page"))
    parser.add_argument("--work", type=Path, default=Path("replay"), help="directory of trainings and scores")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--methods", nargs="*", default=list(SHOWN), choices=list(METHODS))
    given = parser.parse_args()
    if given.command == "page":
        PAGE.write_text(page(PAGE.read_text("utf-8"), read()), "utf-8")
        return
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    logging.getLogger("hf_trak").setLevel(logging.WARNING)
    for name in given.cases:
        run(given.work, name, given.methods)


if __name__ == "__main__":
    main()
