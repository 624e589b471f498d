"""How much of a removal is left for a derivative to say: rows that count a little less, and not at all.

    python benchmarks/replay.py run --work replay --cases lora lora-cool --methods recorded
    python benchmarks/replay_linearity.py --work replay

Each case of `replay_cases.py` is trained again in its own order, with a part of the weight of a random 1 % of its
rows. A training in which they keep .99 of it shows the derivative of the run itself, without any library. Spearman's
correlation over subsets of its effect and that of leaving the rows out, in the mean of the targets, is what the best
derivative can reach. The scores of the recorded run, of `replay.py`, are compared with both.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from datasets import disable_progress_bars
from replay_cases import CASES, Case
from scipy.stats import spearmanr
from transformers import set_seed
from transformers.utils import logging as transformers_logging

from hf_trak.evaluation import mask_rows, masks_and_outputs, model_outputs, random_subsets, retrain_on_subsets

SHARE, WEIGHTS = 0.01, (0.0, 0.5, 0.9, 0.99)


def weigh_rows(trainer: Any, kept: np.ndarray, weight: float) -> None:
    """Change a trainer before `train()` so that the rows that are not kept have this weight in the loss."""
    whole = trainer.compute_loss
    mask_rows(trainer, kept)
    masked = trainer.compute_loss

    def loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        without = masked(model, inputs, False, num_items_in_batch)  # takes the numbers of the rows out of the inputs
        return (
            without
            if weight == 0
            else (1 - weight) * without + weight * whole(model, inputs, False, num_items_in_batch)
        )

    trainer.compute_loss = loss


def effects(case: Case, place: Path, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Train with and without a part of the weight: rows that were kept `(s, n)`, and changes for the whole of it."""
    path = place / f"weight-{weight:g}.npz"
    if not path.exists():
        rows, targets = case.split()

        def retrain(chosen: np.ndarray, seed: int) -> np.ndarray:
            set_seed(0)
            trainer, kept = case.trainer(place, rows), np.zeros(case.rows, dtype=bool)
            kept[chosen] = True
            collator = trainer.data_collator
            weigh_rows(trainer, kept, weight)
            trainer.train()
            return model_outputs(trainer.model, targets, case.task, collator)

        masks = random_subsets(case.rows, 200, fraction=1 - SHARE, seed=int(1000 * SHARE))[: case.retrainings]
        masks = np.concatenate([np.ones((1, case.rows), dtype=bool), masks])
        kept, outputs = masks_and_outputs(retrain_on_subsets(masks, retrain, path.with_suffix("")))
        np.savez(path, kept=kept, outputs=outputs)
    found = np.load(path)
    return found["kept"][1:], (found["outputs"][1:] - found["outputs"][0]) / (1 - weight)


def agreement(first: np.ndarray, second: np.ndarray) -> float:
    """Return the mean over targets of Spearman's correlation over subsets, of `(s, m)` and `(s, m)`."""
    return float(np.mean([spearmanr(one, other)[0] for one, other in zip(first.T, second.T, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("replay"), help="directory of trainings and scores")
    parser.add_argument("--cases", nargs="*", default=["lora", "lora-cool"], choices=list(CASES))
    given = parser.parse_args()
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    for name in given.cases:
        case, place = CASES[name], given.work / name
        scores = np.load(place / "scores-recorded.npz")["scores"]
        print(
            f"\n{case.title}\n\n| weight left | effect | with leaving out | with the replay | slope |\n{'|---' * 5}|"
        )
        whole = effects(case, place, 0.0)[1]
        for weight in WEIGHTS:
            kept, changes = effects(case, place, weight)
            predicted = -(~kept).astype(float) @ scores
            slope = float((predicted * changes).sum() / np.square(predicted).sum())
            numbers = [np.abs(changes).mean(), agreement(changes, whole), agreement(changes, predicted), slope]
            print(f"| {weight:g} | {' | '.join(f'{number:.2f}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
