"""Which scores agree with a replay: figures of methods on the same targets, and the choice by cross-validation.

`sums` of a target is Pearson's correlation over training rows. That is what the correlation of sums over random
subsets of one size, the predictions of retraining on these, tends to. `rows` is the rank correlation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hf_trak.curvature.conjugate_gradients import Refinement
from hf_trak.methods import AnyMethod, Combination, Exact, Index, Replay

LEAST_TARGETS = 3
"""Targets below which leaving one out says nothing."""

_RIDGE = 0.01
"""Ridge of the weights of a combination, relative to the squared norm of a table."""

_LEAST_GAIN = 0.01
"""Gain in correlation below which a method is not worth a higher price."""

_LEAST_SHARE = 0.05
"""Part of a combination, relative to the largest, below which it is left out."""

_ROUNDS = 200


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank numbers from 1, equal ones by their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: np.ndarray = np.cumsum(counts) - (counts - 1) / 2
    return means[places]


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Correlate two lists of ranks. The result is 0 if one is constant."""
    first, second = first - first.mean(), second - second.mean()
    norm = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norm if norm > 0 else 0.0


@dataclass(frozen=True)
class Judged:
    """Agreement of a method with the replay, for each target.

    Attributes:
        method (`Index`, `Exact` or `Combination`): the method.
        sums (`tuple[float, ...]`): correlations of scores over training rows.
        rows (`tuple[float, ...]`): rank correlations over training rows.
        passes (`int`): forward and backward passes of single rows that it takes beside the index.
    """

    method: Index | Exact | Combination
    sums: tuple[float, ...]
    rows: tuple[float, ...]
    passes: int

    @property
    def agrees(self) -> bool:
        """Tell whether the mean correlation is above zero by more than twice its error."""
        return float(np.mean(self.sums)) > 2 * _error(np.array(self.sums))

    def __str__(self) -> str:
        cost = f"{self.passes:,} row passes" if self.passes else "as cheap as the index"
        return (
            f"{np.mean(self.sums):6.3f} ± {np.std(self.sums):.3f}  {np.mean(self.rows):6.3f}  "
            f"{named(self.method)}, {cost}"
        )


@dataclass(frozen=True)
class Calibration:
    """What a few replayed targets say of cheaper methods. `str()` is a table.

    Attributes:
        by (`Replay`): the replay that judged.
        candidates (`tuple[Judged, ...]`): the methods, best first.
        chosen (`Judged`): the method to take. Its figures are those of targets that its choice has not seen.
        index (`Index`): the index at its best ridge, for a budget that allows no more.
    """

    by: Replay
    candidates: tuple[Judged, ...]
    chosen: Judged
    index: Index

    def __str__(self) -> str:
        lines = [
            f"Judged by a replay of the {self.by.of}, {len(self.chosen.sums)} targets.",
            "  sums ± spread    rows  method",
            *(f"{one}" for one in self.candidates),
            f"Chosen, on targets left out of the choice: {self.chosen}",
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as plain JSON."""
        return {
            "by": asdict(self.by),
            "candidates": [_judged_to_json(one) for one in self.candidates],
            "chosen": _judged_to_json(self.chosen),
            "index": _method_to_json(self.index),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Calibration":
        """Read a calibration, also from an untrusted source.

        Raises:
            ValueError: a value is one that this library does not write.
        """
        try:
            index = _method_of_json(content["index"])
            candidates = tuple(_judged_of_json(one) for one in content["candidates"])
            found = cls(Replay(**content["by"]), candidates, _judged_of_json(content["chosen"]), Index())
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"its figures are none that hf_trak writes ({error})") from error
        if not isinstance(index, Index):
            raise ValueError(f"its index is {index}, which is another method")
        return cls(found.by, found.candidates, found.chosen, index)


def named(method: AnyMethod) -> str:
    """Return a method as the code that makes it, without what has its default."""
    if isinstance(method, Combination):
        parts = zip(method.weights, method.methods, strict=True)
        return " + ".join(f"{weight:.3g} · {named(one)}" for weight, one in parts)
    usual = asdict(type(method)())
    given = {name: value for name, value in vars(method).items() if value != usual[name]}
    if given.get("refine") == Refinement():
        given["refine"] = "cg"
    return f"{type(method).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _method_to_json(method: Index | Exact | Combination) -> dict[str, Any]:
    """Return the options that a calibration varies."""
    if isinstance(method, Combination):
        return {"methods": [_method_to_json(one) for one in method.methods], "weights": list(method.weights)}
    if isinstance(method, Index):
        return {"lambda_relative": method.lambda_relative}
    return {"curvature": method.curvature, "damping": method.damping, "refine": method.refine is not None}


def _method_of_json(content: Mapping[str, Any]) -> Index | Exact | Combination:
    """Read what [`_method_to_json`] returns. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
    if "methods" in content:
        parts = tuple(_method_of_json(one) for one in content["methods"][:8])
        return Combination(parts, tuple(float(one) for one in content["weights"]))  # type: ignore[arg-type]
    if "curvature" in content:
        return Exact(content["curvature"], "cg" if content["refine"] else None, content["damping"])
    return Index(lambda_relative=content["lambda_relative"])


def _judged_to_json(one: Judged) -> dict[str, Any]:
    return {**asdict(one), "method": _method_to_json(one.method)}


def _judged_of_json(content: Mapping[str, Any]) -> Judged:
    sums, rows = (tuple(float(one) for one in content[name]) for name in ("sums", "rows"))
    if len(sums) < LEAST_TARGETS or len(sums) != len(rows) or not all(-1.001 <= one <= 1.001 for one in sums + rows):
        raise ValueError(f"correlations are {sums!r:.100} and {rows!r:.100}")
    return Judged(_method_of_json(content["method"]), sums, rows, int(content["passes"]))


# -- agreement and choice -------------------------------------------------------------------------------------------


def choose(
    tables: Mapping[Index | Exact, np.ndarray],
    passes: Mapping[Index | Exact, int],
    replayed: np.ndarray,
    by: Replay,
) -> Calibration:
    """Choose a method by leaving out one target at a time.

    Of methods that are as good as the best within the error of their difference, or .01, the cheapest is taken. A
    combination of the best of each kind, with weights that are fitted to the other targets, is taken where it gains
    more than that on the targets left out.

    Args:
        tables: scores of the same targets by each method, `(n, m)`. At least one is an [`Index`].
        passes: what each takes beside the index.
        replayed: scores of the replay, `(n, m)`.
        by: the replay.
    """
    judged = {
        method: Judged(method, _sums(table, replayed), _rows(table, replayed), passes[method])
        for method, table in tables.items()
    }
    targets = range(replayed.shape[1])
    others = [[one for one in targets if one != left] for left in targets]
    picked = [_picked(judged, rest) for rest in others]
    single = _left_out(_picked(judged, targets), picked, judged)
    mixed = [_combined(tables, judged, replayed, rest) for rest in others]
    whole = _combined(tables, judged, replayed, targets)
    chosen = single
    if isinstance(whole, Combination):
        scored = np.stack([weighed(tables, one)[:, left] for left, one in zip(targets, mixed, strict=True)], axis=1)
        cost = sum(passes[one] for one in whole.methods)
        combined = Judged(whole, _sums(scored, replayed), _rows(scored, replayed), cost)
        gain = np.subtract(combined.sums, single.sums)
        if gain.mean() > max(_error(gain), _LEAST_GAIN):
            chosen = combined
    best = sorted(judged.values(), key=lambda one: -float(np.mean(one.sums)))
    index = next(one.method for one in best if isinstance(one.method, Index))
    return Calibration(by, tuple(best), chosen, index)


def _left_out(method: Index | Exact, picked: Sequence[Index | Exact], judged: Mapping[Any, Judged]) -> Judged:
    """Return a method with the figures of what was picked by the other targets."""
    sums = tuple(judged[one].sums[left] for left, one in enumerate(picked))
    rows = tuple(judged[one].rows[left] for left, one in enumerate(picked))
    return Judged(method, sums, rows, judged[method].passes)


def _picked(judged: Mapping[Index | Exact, Judged], targets: Sequence[int]) -> Index | Exact:
    """Pick the cheapest method that is as good as the best on some targets, within the error of the difference."""
    chosen = list(targets)
    sums = {method: np.array(one.sums)[chosen] for method, one in judged.items()}
    best = max(sums, key=lambda method: float(sums[method].mean()))
    behind = {method: sums[best] - sums[method] for method in sums}
    near = [method for method, one in behind.items() if one.mean() <= max(_error(one), _LEAST_GAIN)]
    return min(near, key=lambda method: (judged[method].passes, -float(sums[method].mean())))


def _error(differences: np.ndarray) -> float:
    """Return the standard error of a mean."""
    return float(differences.std(ddof=1) / np.sqrt(len(differences)))


def _combined(
    tables: Mapping[Index | Exact, np.ndarray],
    judged: Mapping[Index | Exact, Judged],
    replayed: np.ndarray,
    targets: Sequence[int],
) -> Index | Exact | Combination:
    """Fit weights of at least 0 to some targets, for the best method of each kind."""
    chosen, best = list(targets), dict[Any, Index | Exact]()
    for method in sorted(tables, key=lambda one: float(np.array(judged[one].sums)[chosen].mean())):
        best[(type(method), getattr(method, "curvature", None), getattr(method, "refine", None) is None)] = method
    methods = list(best.values())
    weights = _fitted([tables[one][:, chosen] for one in methods], replayed[:, chosen])
    kept = [(one, float(weight)) for one, weight in zip(methods, weights, strict=True) if weight > 0]
    if len(kept) < 2:
        return kept[0][0] if kept else methods[-1]
    return Combination(tuple(one for one, _ in kept), tuple(weight for _, weight in kept))


def weighed(tables: Mapping[Index | Exact, np.ndarray], method: Index | Exact | Combination) -> np.ndarray:
    """Return the scores of a method, or the weighted sum of those of several: `(n, m)`."""
    if not isinstance(method, Combination):
        return tables[method]
    parts = [weight * tables[one] for one, weight in zip(method.methods, method.weights, strict=True)]
    return np.sum(parts, axis=0)


def _fitted(tables: Sequence[np.ndarray], replayed: np.ndarray) -> np.ndarray:
    """Minimize |y − Σ w x|² + ridge over w ≥ 0 by descent in one coordinate at a time, and again without small ones.

    Each target counts the same.
    """
    scale = np.maximum(replayed.std(0), np.finfo(float).tiny)
    x = np.stack([((one - one.mean(0)) / scale).ravel() for one in tables], axis=1)
    y = ((replayed - replayed.mean(0)) / scale).ravel()
    sizes = np.maximum(np.linalg.norm(x, axis=0), np.finfo(float).tiny)
    x = x / sizes
    gram, right = x.T @ x + _RIDGE * np.eye(len(sizes)), x.T @ y
    weights, kept = np.zeros(len(sizes)), np.ones(len(sizes), dtype=bool)
    for _ in range(2):
        for _ in range(_ROUNDS):
            for i in kept.nonzero()[0]:
                weights[i] = max(0.0, weights[i] + (right[i] - gram[i] @ weights) / gram[i, i])
        kept = weights > _LEAST_SHARE * weights.max()
        weights[~kept] = 0.0
    return weights / sizes


def _sums(table: np.ndarray, replayed: np.ndarray) -> tuple[float, ...]:
    """Correlate the scores of each target over training rows."""
    return tuple(correlation(one, other) for one, other in zip(table.T, replayed.T, strict=True))


def _rows(table: np.ndarray, replayed: np.ndarray) -> tuple[float, ...]:
    """Correlate the ranks of training rows for each target."""
    return tuple(correlation(ranks(one), ranks(other)) for one, other in zip(table.T, replayed.T, strict=True))
