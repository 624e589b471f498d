"""Evidence to choose λ from: the spectrum of the features, errors of ridge regressions, agreement of checkpoints.

Everything follows from one eigendecomposition per checkpoint, for any number of λ. With X = U √S Vᵀ of rank r:

    X (XᵀX + λI)⁻¹ Tᵀ = (XXᵀ + λI)⁻¹ X Tᵀ = U (S + λI)⁻¹ Uᵀ X Tᵀ
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np


@dataclass
class Spectrum:
    """Features of n training rows and m targets under one checkpoint, in the eigenbasis of XXᵀ.

    Attributes:
        vectors: U `(n, r)`, float32.
        values: S `(r,)`, ascending, float64.
        cross: Uᵀ X Tᵀ `(r, m)`, float32.
        q: output-to-loss gradients `(n,)`.
        k: number of features.
    """

    vectors: np.ndarray
    values: np.ndarray
    cross: np.ndarray
    q: np.ndarray
    k: np.ndarray

    def to_arrays(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], suffix: str) -> "Spectrum":
        return cls(**{field.name: arrays[f"{field.name}{suffix}"] for field in fields(cls)})

    @property
    def n(self) -> int:
        return len(self.q)

    @property
    def scale(self) -> float:
        """trace(XᵀX) / min(n, k): what relative λ refer to."""
        return float(self.values.sum() / min(self.n, int(self.k)))

    def filters(self, relative: np.ndarray) -> np.ndarray:
        """1 / (S + λ) for every λ: `(λ, r)`."""
        return 1 / (self.values + np.asarray(relative)[:, None] * self.scale)


def spectrum(features: np.ndarray, targets: np.ndarray, q: np.ndarray) -> Spectrum:
    """The spectrum of features `(n, k)` and `(m, k)`, from the smaller one of the two Gram matrices.

    Directions whose eigenvalue cannot be told from zero are left out: at any λ > 0 they add nothing to scores, since
    U and X Tᵀ vanish in them together.
    """
    x, t = features.astype(np.float64), targets.astype(np.float64)
    n, k = x.shape
    if k < n:
        values, right = np.linalg.eigh(x.T @ x)
        kept = values > values[-1] * n * np.finfo(np.float64).eps
        values, right = values[kept], right[:, kept]
        vectors = x @ right / np.sqrt(values)
    else:
        values, vectors = np.linalg.eigh(x @ x.T)
        kept = values > values[-1] * n * np.finfo(np.float64).eps
        values, vectors = values[kept], vectors[:, kept]
    cross = (vectors.T @ x) @ t.T
    return Spectrum(vectors.astype(np.float32), values, cross.astype(np.float32), q, np.array(k))


def scores(ensemble: list[Spectrum], relative: float) -> np.ndarray:
    """τ `(n, m)` at a relative λ: mean of products times mean of q."""
    mean = np.mean([one.vectors @ (one.filters(np.array([relative])).T * one.cross) for one in ensemble], axis=0)
    return mean * np.mean([one.q for one in ensemble], axis=0)[:, None]


def predictions(one: Spectrum, weights: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Σ_i w_i x_iᵀ (XᵀX + λI)⁻¹ t for every λ: `(λ, s, m)`, with `weights` `(s, n)`, which q is a factor of."""
    left = weights @ one.vectors.astype(np.float64)
    return np.stack([(left * each) @ one.cross.astype(np.float64) for each in one.filters(relative)])


@dataclass
class Evidence:
    """Everything known about a case without retraining. Every λ is relative to trace(XᵀX) / min(n, k).

    Attributes:
        n, k, count: training rows, features, and checkpoints.
        relative: the λ to choose from `(λ,)`, ascending.
        curves: by name, a number for each of them `(λ,)`.
        eigenvalues: by name, one λ.
    """

    n: int
    k: int
    count: int
    relative: np.ndarray
    curves: dict[str, np.ndarray]
    eigenvalues: dict[str, float]


def evidence(
    ensemble: list[Spectrum],
    again: Spectrum | None,
    outputs: list[np.ndarray],
    target_outputs: list[np.ndarray],
    probes: np.ndarray,
    relative: np.ndarray,
) -> Evidence:
    """All that the rules ask for.

    Args:
        ensemble: C checkpoints.
        again: the first one under another projection seed.
        outputs: f of training rows `(n,)`, by checkpoint.
        target_outputs: f of targets `(m,)`.
        probes: random signs `(s, n)`; agreement is that of Σ_i w_i τ_ij over probes w.
        relative: the λ to choose from.
    """
    first = ensemble[0]
    weights = probes * np.mean([one.q for one in ensemble], axis=0)
    shown = [_standardized(predictions(one, weights, relative)) for one in ensemble]
    curves = {"degrees": np.mean([_degrees(one, relative) for one in ensemble], axis=0)}
    if len(ensemble) > 1:
        curves["agreement"] = _mean_correlation(shown)
        changes = [f - outputs[0] for f in outputs[1:]]
        target_changes = [f - target_outputs[0] for f in target_outputs[1:]]
        curves["loo changes"] = _loo(first, np.stack(changes), relative)
        curves["held-out changes"] = _held_out(first, np.stack(changes), np.stack(target_changes), relative)
    elif again is not None:
        curves["agreement"] = _mean_correlation([shown[0], _standardized(predictions(again, weights, relative))])
    f, t = outputs[0], target_outputs[0]
    curves["loo outputs"] = _loo(first, f[None], relative)
    curves["gcv outputs"] = _gcv(first, f[None], relative)
    curves["loo q"] = _loo(first, first.q[None], relative)
    curves["held-out outputs"] = _held_out(first, f[None], t[None], relative)
    leverages, weight = newton(first, relative)
    without = f - leverages / weight * first.q / (1 - leverages).clip(1e-3)
    curves["optimism"] = (without.mean(1) - t.mean()) / max(float(f.mean() - t.mean()), 1e-9)
    curves["loss"] = np.logaddexp(0, -without.clip(-50)).mean(1) / np.logaddexp(0, -t).mean() - 1
    values = first.values / first.scale
    return Evidence(
        first.n,
        int(first.k),
        len(ensemble),
        relative,
        curves,
        {
            "median": float(np.median(values)),
            "geometric mean": float(np.exp(np.log(values.clip(1e-9)).mean())),
            "participation": float((values**2).sum() / values.sum()),
            "largest": float(values[-1]),
        },
    )


def newton(one: Spectrum, relative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Leverages of the logistic regression that TRAK linearizes (TRAK paper, Section 3), with R = q (1 − q).

    h_i = R_i x_iᵀ (XᵀRX + λI)⁻¹ x_i, λ relative to trace(XᵀRX) / min(n, k). One Newton step without row i changes its
    own output by −q_i (h_i / R_i) / (1 − h_i). For outputs that are sums over tokens q is divided by its maximum in R.

    Returns:
        h `(λ, n)` and R `(n,)`.
    """
    share = one.q / max(1.0, float(one.q.max()))
    weight = np.maximum(share * (1 - share), 1e-6)
    half = np.sqrt(weight)[:, None] * one.vectors.astype(np.float64) * np.sqrt(one.values)
    values, vectors = np.linalg.eigh(half.T @ half)
    kept = values > values[-1] * 1e-12
    squares = (half @ vectors[:, kept]) ** 2 / values[kept]
    absolute = np.asarray(relative)[:, None] * values.sum() / min(one.n, int(one.k))
    return (values[kept] / (values[kept] + absolute)) @ squares.T, weight


def _degrees(one: Spectrum, relative: np.ndarray) -> np.ndarray:
    """Effective dimension Σ S / (S + λ), `(λ,)`."""
    return (one.values * one.filters(relative)).sum(1)


def _standardized(found: np.ndarray) -> np.ndarray:
    """`(λ, s, m)`, of mean 0 and norm 1 over s."""
    centred = found - found.mean(1, keepdims=True)
    return centred / np.linalg.norm(centred, axis=1, keepdims=True).clip(1e-30)


def _mean_correlation(standardized: list[np.ndarray]) -> np.ndarray:
    """Mean over pairs and targets, `(λ,)`."""
    count = len(standardized)
    return ((np.sum(standardized, axis=0) ** 2).sum(1).mean(1) - count) / (count * (count - 1))


def _fit(one: Spectrum, y: np.ndarray, relative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Residuals of ridge regressions of centred `y` `(c, n)` on X, `(λ, c, n)`, and leverages `(λ, n)`."""
    u = one.vectors.astype(np.float64)
    centred = y - y.mean(1, keepdims=True)
    shrunk = one.values * one.filters(relative)
    leverages = shrunk @ (u**2).T
    fitted = ((centred @ u) * shrunk[:, None, :]) @ u.T
    return centred - fitted, leverages


def _loo(one: Spectrum, y: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Mean squared error of leave-one-out predictions, as a part of the variance of `y` (the PRESS statistic)."""
    residuals, leverages = _fit(one, y, relative)
    errors = (residuals / (1 - leverages).clip(1e-6)[:, None, :]) ** 2
    return (errors.mean(2) / y.var(1).clip(1e-30)).mean(1)


def _gcv(one: Spectrum, y: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Generalized cross-validation (Golub, Heath & Wahba 1979), as a part of the variance of `y`."""
    residuals, leverages = _fit(one, y, relative)
    errors = (residuals**2).mean(2) / (1 - leverages.mean(1)).clip(1e-6)[:, None] ** 2
    return (errors / y.var(1).clip(1e-30)).mean(1)


def _held_out(one: Spectrum, y: np.ndarray, truth: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Mean squared error of the ridge regression of `y` `(c, n)` at targets, where it is `truth` `(c, m)`, as a part
    of the variance of `truth`."""
    centred = y - y.mean(1, keepdims=True)
    coefficients = (centred @ one.vectors.astype(np.float64)) * one.filters(relative)[:, None, :]
    predicted = coefficients @ one.cross.astype(np.float64)
    errors = (predicted + y.mean(1)[:, None] - truth) ** 2
    return (errors.mean(2) / truth.var(1).clip(1e-30)).mean(1)


@dataclass(frozen=True)
class Rule:
    """A way to choose λ.

    Attributes:
        name: what it says of λ, c being its constant.
        constants: of which the best one on other tasks is taken.
        choose: relative λ for a case and a constant.
    """

    name: str
    constants: tuple[float, ...]
    choose: Callable[[Evidence, float], float]


FIXED = 0.3
FACTORS = tuple(float(c) for c in 10 ** np.linspace(-2, 2, 33))
PARTS = tuple(float(c) for c in np.linspace(0.02, 0.98, 49))


def _lowest(curve: str, default: float = FIXED) -> Callable[[Evidence, float], float]:
    """c times the λ of the least error; the fixed one where there is no such curve."""

    def choose(case: Evidence, c: float) -> float:
        if curve not in case.curves:
            return default
        return c * float(case.relative[case.curves[curve].argmin()])

    return choose


def _crossing(case: Evidence, curve: np.ndarray, level: float) -> float:
    """The least λ from which on an increasing curve is at `level` or above; interpolated in log λ."""
    rising = np.maximum.accumulate(curve)
    return float(np.exp(np.interp(level, rising, np.log(case.relative))))


def _agreement(case: Evidence, c: float) -> float:
    return _crossing(case, case.curves["agreement"], c * float(case.curves["agreement"].max()))


def _degrees_of(unit: Callable[[Evidence], int]) -> Callable[[Evidence, float], float]:
    return lambda case, c: _crossing(case, -case.curves["degrees"], -c * unit(case))


def _sketched(case: Evidence, c: float) -> float:
    """λ / (1 − d(λ) / k) = c · trace / n: a ridge on k random features acts like a larger one on all of them (LeJeune
    et al. 2022, arXiv 2211.03751), d being the effective dimension."""
    acting = case.relative / (1 - case.curves["degrees"] / case.k).clip(1e-6)
    return _crossing(case, acting, c * min(case.n, case.k) / case.n)


def _between(case: Evidence, c: float) -> float:
    """The geometric mean of the mean eigenvalue and of that weighted by eigenvalues, ‖XᵀX‖² / trace(XᵀX)."""
    return c * case.eigenvalues["participation"] ** 0.5


RULES = (
    Rule("0.3", (FIXED,), lambda case, c: c),
    Rule("1", (1.0,), lambda case, c: c),
    Rule("0.5 · √(min(n, k) / n)", (0.5,), lambda case, c: c * (min(case.n, case.k) / case.n) ** 0.5),
    Rule("c", FACTORS, lambda case, c: c),
    Rule("c · min(n, k) / n, which is c · trace / n", FACTORS, lambda case, c: c * min(case.n, case.k) / case.n),
    Rule("c · min(n, k) / k, which is c · trace / k", FACTORS, lambda case, c: c * min(case.n, case.k) / case.k),
    Rule("c · √(min(n, k) / n)", FACTORS, lambda case, c: c * (min(case.n, case.k) / case.n) ** 0.5),
    Rule("c · trace / n, less what the projection adds", FACTORS, _sketched),
    Rule("c · median eigenvalue", FACTORS, lambda case, c: c * case.eigenvalues["median"]),
    Rule("c · geometric mean of eigenvalues", FACTORS, lambda case, c: c * case.eigenvalues["geometric mean"]),
    Rule("c · Σ s² / Σ s", FACTORS, lambda case, c: c * case.eigenvalues["participation"]),
    Rule("c · √(trace / min(n, k) · Σ s² / Σ s)", FACTORS, _between),
    Rule("c · √(trace / min(n, k) · Σ s² / Σ s) / C^¼", FACTORS, lambda case, c: _between(case, c) / case.count**0.25),
    Rule(
        "c · √(min(n, k) / n) / C^¼",
        FACTORS,
        lambda case, c: c * (min(case.n, case.k) / case.n) ** 0.5 / case.count**0.25,
    ),
    Rule("c · largest eigenvalue", FACTORS, lambda case, c: c * case.eigenvalues["largest"]),
    Rule("effective dimension is c · min(n, k)", PARTS, _degrees_of(lambda case: min(case.n, case.k))),
    Rule("effective dimension is c · n", PARTS, _degrees_of(lambda case: case.n)),
    Rule("LOO of outputs is least", (1.0,), _lowest("loo outputs")),
    Rule("c · (LOO of outputs is least)", FACTORS, _lowest("loo outputs")),
    Rule("GCV of outputs is least", (1.0,), _lowest("gcv outputs")),
    Rule("c · (GCV of outputs is least)", FACTORS, _lowest("gcv outputs")),
    Rule("LOO of q is least", (1.0,), _lowest("loo q")),
    Rule("error at targets is least", (1.0,), _lowest("held-out outputs")),
    Rule("c · (error at targets is least)", FACTORS, _lowest("held-out outputs")),
    Rule("LOO of changes between checkpoints is least", (1.0,), _lowest("loo changes")),
    Rule("c · (LOO of changes is least)", FACTORS, _lowest("loo changes")),
    Rule("error of changes at targets is least", (1.0,), _lowest("held-out changes")),
    Rule("c · (error of changes at targets is least)", FACTORS, _lowest("held-out changes")),
    Rule(
        "Newton LOO margins fall as far as held-out ones, c",
        (0.0,),
        lambda case, c: _crossing(case, case.curves["optimism"], c),
    ),
    Rule("agreement is greatest", (1.0,), _agreement),
    Rule("agreement is c · its greatest", PARTS, _agreement),
    Rule("agreement is c", PARTS, lambda case, c: _crossing(case, case.curves["agreement"], c)),
)
