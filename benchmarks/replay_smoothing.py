"""How far the smoothing of a replayed run goes: what it predicts of random rows, and of the rows that it names first.

    python benchmarks/replay_smoothing.py --work replay
    python benchmarks/replay_smoothing.py --work replay --cases gpt2-300 --kappas 0.03 0.1 0.3 1 3 10

The cases are those of `replay_cases.py`, and the retrainings those of `replay.py`. For
each κ it prints LDS, and what the removal of the first 1 % of the rows of each target does, predicted and measured.
"""

import argparse
import logging
from pathlib import Path

import numpy as np
from auto import FRACTION, fresh
from datasets import disable_progress_bars
from replay import SHARES, bank
from replay_cases import CASES, Case
from transformers.utils import logging as transformers_logging

from hf_trak import Replay
from hf_trak.evaluation import TrainerRetraining, evaluate_lds, masks_and_outputs, retrain_on_subsets


def scores_of(case: Case, place: Path, kappas: list[float], share: float) -> dict[str, np.ndarray]:
    """Return the scores `(n, m)` of the recipe and of the run for each κ, computed once."""
    path, names = place / f"smoothing-{share:g}.npz", {f"κ = {kappa:g}": kappa for kappa in kappas}
    known = dict(np.load(path)) if path.exists() else {}
    if missing := [name for name in ("recipe", *names) if name not in known]:
        _, targets = case.split()
        attributor = fresh(case, place / "smoothing", True)
        for name in missing:
            run = Replay() if name == "recipe" else Replay(of="run", hessian_share=share, smoothing=names[name])
            known[name] = np.array(attributor.attribute(targets, top_k=None, method=run)["trak_scores"]).T
        np.savez(path, **known)
    return {name: known[name] for name in ("recipe", *names)}


def removals(case: Case, place: Path, scores: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Train without the first rows of each target: predicted and measured changes of its output, `(m,)` each."""
    rows, targets = case.split()
    first = {name: np.argsort(-one, axis=0)[: max(1, round(FRACTION * case.rows))] for name, one in scores.items()}
    sets = {tuple(sorted(column)) for one in first.values() for column in one.T.tolist()}
    masks = np.ones((1 + len(sets), case.rows), dtype=bool)
    for mask, left_out in zip(masks[1:], sorted(sets), strict=True):
        mask[list(left_out)] = False
    retrain = TrainerRetraining(
        lambda rows, seed: case.trainer(place / "retrained", rows, seed), rows, targets, case.task, drop="mask", seed=0
    )
    kept, outputs = masks_and_outputs(retrain_on_subsets(masks, retrain, place / "removed-smoothing"))
    found = {tuple(np.flatnonzero(~mask).tolist()): output for mask, output in zip(kept, outputs, strict=True)}
    return {
        name: (
            -np.take_along_axis(scores[name], one, 0).sum(0),
            np.array([(found[tuple(sorted(column))] - found[()])[q] for q, column in enumerate(one.T.tolist())]),
        )
        for name, one in first.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("replay"), help="directory of trainings and scores")
    parser.add_argument("--cases", nargs="*", default=["gpt2-300", "vit"], choices=list(CASES))
    parser.add_argument("--kappas", nargs="*", type=float, default=[0.1, 1.0, 3.0])
    parser.add_argument("--share", type=float, default=1.0, help="part of the rows in the curvature")
    given = parser.parse_args()
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    for name in given.cases:
        case, place = CASES[name], given.work / name
        place.mkdir(parents=True, exist_ok=True)
        scores = scores_of(case, place, given.kappas, given.share)
        changes = removals(case, place, scores)
        banks = [bank(case, place, share, 0, True) for share in SHARES.values()]
        head = ["", *SHARES, "predicted", "measured", "of single targets"]
        print(f"\n{case.title}\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
        for method, one in scores.items():
            lds = ["" if found is None else f"{evaluate_lds(one, *found).mean.value:.2f}" for found in banks]
            predicted, measured = changes[method]
            single = ", ".join(f"{a:.2f} → {b:.2f}" for a, b in zip(predicted, measured, strict=True))
            cells = (*lds, f"{predicted.mean():+.2f}", f"{measured.mean():+.2f}", single)
            print(f"| {method} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
