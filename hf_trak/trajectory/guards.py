"""When not to believe a replay: signs of it in what a sweep has seen, each with what to do about it."""

import math
from typing import Any

import torch
from torch import Tensor

from hf_trak.trajectory.states import RunPath
from hf_trak.trajectory.swept_targets import SweepResult

LOSS_DEVIATION = 0.05
"""Relative deviation of the loss along the path, in the mean of its steps, above which the path is not the run's.
Runs that interpolated weights follow well had up to .019, those that they do not had .10 and more."""

GROWTH = 10.0
"""Growth of the derivatives of targets along the sweep above which they say little of rows that are left out. On the
banks they grew 3 times at most where a replay is the best method, and 14 and 16 times where it is not."""


GRID_AGREEMENT = 0.7
"""Rank correlation of the scores from every second state with those from all, below which states are too few."""

SPREAD = 1e3
"""Largest score of a target, relative to the median, above which one row is likely to be an error of the sweep."""


def warnings_of(found: SweepResult, path: RunPath, method: Any, coarse: Tensor | None = None) -> list[str]:
    """Describe what speaks against the scores of a sweep.

    Args:
        found: what it found.
        path: the run.
        method: the options, with `hessian_share` and `products`.
        coarse: the scores of the first target from every second state, `(n, 1)`.
    """
    texts = []
    deviations = [
        abs(float(found.forward[0, steps.start : steps.stop].mean()) - loss) / max(abs(loss), 1e-12)
        for steps, loss in path.logged
    ]
    deviation = sum(deviations) / max(1, len(deviations))
    if deviation > LOSS_DEVIATION:
        remedy = (
            f"Record the weights more often than every {path.gap} steps (`TrakCallback(record=True, every=...)`)"
            if path.gap > 1
            else "Give the training dataset, the collator and the precision of the run"
        )
        texts.append(
            f"The loss along the replayed path differs from that of the training by {deviation:.1%} in the mean. "
            f"Expected less than {LOSS_DEVIATION:.0%}. {remedy}."
        )
    missed = found.forward[1].nan_to_num(0.0, posinf=math.inf)
    if path.gap == 1 and float(missed.max()) > path.most_missed:
        texts.append(
            f"Step {int(missed.argmax())} of the run, taken again, ends {float(missed.max()):.1%} of its length away "
            f"from the weights that the training had after it. Expected {path.most_missed:.0%} at most. Give rows, "
            "order, collator and loss of the training, whose gradients nothing else may have changed before the step."
        )
    if coarse is not None and (agreed := _rank_correlation(found.scores[:, 0], coarse[:, 0])) < GRID_AGREEMENT:
        texts.append(
            f"Scores from every second one of the known weights have a rank correlation of {agreed:.2f} with those "
            f"from all. Expected {GRID_AGREEMENT} at least: weights at every {path.gap} steps are too few. Record "
            "them more often (`TrakCallback(record=True, every=...)`)."
        )
    # No score depends on what is before the first step that moves the weights. There the derivatives by the gradients
    # of LoRA's A are divided by ε alone: these gradients are zero as long as B is.
    moves = int((path.numbers.rates.max(1).values > 0).long().argmax())
    growth = max(torch.nan_to_num(found.growth[moves + 1 :], nan=torch.inf).tolist(), default=0.0)
    if growth > GROWTH:
        if method.hessian_share < 1:
            remedy = f"Take more of each batch (`hessian_share`, now {method.hessian_share:g})"
        elif method.products == "hessian":
            remedy = "The Gauss-Newton matrix may do better (`Replay(of='run', form='gauss-newton')`)"
        else:
            remedy = "Take `of='recipe'`, or compare with retraining"
        texts.append(
            f"The derivatives of the targets grew {growth:.2g} times on the way back. Expected less than {GROWTH:g} "
            f"times: of such a run they say little of rows that are left out. {remedy}."
        )
    sizes = found.scores[sorted({row for step in path.steps for row in step.rows})].abs()
    spread = float((sizes.max(0).values / sizes.median(0).values.clamp_min(1e-300)).max())
    if spread > SPREAD:
        texts.append(
            f"The largest score of a target is {spread:.2g} times the median. Expected less than {SPREAD:g} times: "
            "one row may have an update that no derivative describes. Look at that row, or raise `smoothing`, now "
            f"{method.smoothing:g}."
        )
    return texts


def _rank_correlation(first: Tensor, second: Tensor) -> float:
    ranks = [one.argsort().argsort().double() for one in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
