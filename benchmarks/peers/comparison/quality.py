"""Linear datamodeling scores of a library's scores: at its default λ, and at one tuned on other targets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.evaluation import linear_datamodeling_score

TUNED_ON, JUDGED_ON = slice(0, None, 2), slice(1, None, 2)
"""Every second target serves the choice of λ, and no other purpose."""

DEFAULT = "default"
Resampled = dict[str, tuple[float, np.ndarray]]
"""LDS and its resamples, by kind of λ."""
RESAMPLES = 200


@dataclass(frozen=True)
class Truth:
    """Masks `(s, n)` and outputs `(s, m)` of retrained models."""

    masks: np.ndarray
    outputs: np.ndarray

    def lds(self, scores: np.ndarray, part: slice = JUDGED_ON) -> float:
        return float(linear_datamodeling_score(scores[:, part], self.masks, self.outputs[:, part]).mean())

    def resampled(self, scores: list[np.ndarray]) -> np.ndarray:
        """Mean LDS over attributions, judged by resampled subsets and targets, `(RESAMPLES,)`.

        The same resamples for everyone, so that differences can be taken.
        """
        rng = np.random.default_rng(0)
        outputs = self.outputs[:, JUDGED_ON]
        means = np.empty(RESAMPLES)
        for index in range(RESAMPLES):
            rows = rng.integers(0, len(self.masks), len(self.masks))
            columns = rng.integers(0, outputs.shape[1], outputs.shape[1])
            judged = [
                linear_datamodeling_score(each[:, JUDGED_ON][:, columns], self.masks[rows], outputs[rows][:, columns])
                for each in scores
            ]
            means[index] = np.mean(judged)
        return means


def tune(path: Path, library: str, seed: int, truth: Truth) -> dict[str, Any]:
    """LDS of the tuning targets by λ, and the λ of the highest."""
    found = load(path, library, seed)
    broken = [name for name, scores in found.items() if not np.isfinite(scores).all()]
    by_lambda = {name: truth.lds(scores, TUNED_ON) for name, scores in found.items() if name not in (DEFAULT, *broken)}
    tuned = max(by_lambda, key=lambda name: by_lambda[name], default=DEFAULT)
    return {"by_lambda": by_lambda, "not_finite": broken, "tuned_lambda": tuned}


def judge(path: Path, library: str, seeds: list[int], tuned: str, truth: Truth) -> tuple[dict[str, Any], Resampled]:
    """LDS of the judging targets, by kind of λ, over projection seeds; and its resamples, for intervals."""
    result: dict[str, Any] = {}
    resampled: Resampled = {}
    for kind, name in ((DEFAULT, DEFAULT), ("tuned", tuned)):
        scores = [load(path, library, seed)[name] for seed in seeds]
        if not all(np.isfinite(each).all() for each in scores):
            continue
        per_seed = [truth.lds(each) for each in scores]
        resampled[kind] = (float(np.mean(per_seed)), truth.resampled(scores))
        result[kind] = {**interval(*resampled[kind]), "seeds": per_seed, "std": spread(per_seed)}
    return result, resampled


def differences(ours: Resampled, theirs: Resampled) -> dict[str, dict[str, float]]:
    """Subtract their LDS from ours, by kind of λ, on the same subsets and targets."""
    return {
        f"behind_{kind}": interval(ours[kind][0] - theirs[kind][0], ours[kind][1] - theirs[kind][1])
        for kind in theirs
        if kind in ours
    }


def interval(value: float, means: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(means, [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high)}


def spread(values: list[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def load(path: Path, library: str, seed: int) -> dict[str, np.ndarray]:
    return dict(np.load(path / f"{library}-{seed}.npz", allow_pickle=False))
