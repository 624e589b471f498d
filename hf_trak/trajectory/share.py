"""The share of the rows whose curvature a sweep uses, chosen by how well draws of different rows agree.

Two sweeps, each with another part p of the rows, give scores of a target with the correlation r. The noise of a draw
of the share f has the variance v(1/f − 1), relative to the scores of all rows, and that of two draws without common
rows has the covariance −v. So v = (1 − r)/(1 + r(1/p − 1)), and 1/√(1 + v(1/f − 1)) is the correlation of scores of a
share with those of all rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from hf_trak.config import HESSIAN_SHARE
from hf_trak.trajectory.passes import CurvatureForm

PROBED = 4
"""Targets whose scores are computed twice to choose a share."""

PROBE_SHARE = 0.1
"""The share of each of both draws."""

AGREEMENT = 0.97
"""The correlation with scores of all rows that a share is chosen for."""

BUDGET = 12.0
"""Trainings that a replay may take for it."""

LEAST = 0.05
"""The share at least."""

PRODUCTS: dict[CurvatureForm, float] = {"gauss-newton": 4 / 3, "hessian": 2.0}
"""Work of a product of a row and a direction, in forward and backward passes of the row: a forward pass with tangents
and a backward pass are four products of matrices where training has three, and differentiating twice is six."""


def trainings(targets: int, share: float, form: CurvatureForm) -> float:
    """Estimate the work of a sweep in trainings: to rebuild the states, for gradients of rows, and for products."""
    return 2 + PRODUCTS[form] * share * targets


def noise(first: Tensor, second: Tensor) -> float:
    """Estimate v from the scores of two draws of [`PROBE_SHARE`], `(n, m)` each, in the mean of targets."""
    deviations = [one.double() - one.double().mean(0) for one in (first, second)]
    norms = deviations[0].norm(dim=0) * deviations[1].norm(dim=0)
    r = float(((deviations[0] * deviations[1]).sum(0) / norms.clamp_min(1e-300)).mean().clamp(0, 1))
    return (1 - r) / (1 + r * (1 / PROBE_SHARE - 1))


def agreement(noise: float, share: float) -> float:
    """Predict the correlation of scores of a share with those of all rows."""
    return 1 / math.sqrt(1 + noise * (1 / share - 1))


@dataclass(frozen=True)
class ShareChoice:
    """A share, and why. `str()` says it in a line.

    Attributes:
        share (`float`): the share.
        wanted (`float`): the share that reaches [`AGREEMENT`].
        work (`float`): trainings that the replay takes.
        agreement (`float`, *optional*): the predicted correlation with the scores of all rows, where it was measured.
    """

    share: float
    wanted: float
    work: float
    agreement: float | None = None

    @classmethod
    def unmeasured(cls, targets: int, form: CurvatureForm) -> "ShareChoice | None":
        """Take as many rows as [`BUDGET`] pays, and `None` where these are too few for the Hessian.

        What the Gauss-Newton matrix leaves out costs more than the noise of half of the rows: no draw has to be
        compared to know that (`benchmarks/pages/replay_cost.md`).

        Args:
            targets: m.
            form: the curvature.
        """
        share = round(min(1.0, (BUDGET - 2) / (PRODUCTS[form] * targets)), 3)
        return cls(share, share, trainings(targets, share, form)) if share >= HESSIAN_SHARE else None

    @classmethod
    def measured(cls, noise: float, targets: int, form: CurvatureForm) -> "ShareChoice":
        """Choose a share by the noise of shares.

        Args:
            noise: v.
            targets: m.
            form: the curvature of a part of the rows.
        """
        wanted = 1 / (1 + (1 / AGREEMENT**2 - 1) / max(noise, 1e-12))
        affordable = (BUDGET - 2) / (PRODUCTS[form] * targets)
        share = round(min(1.0, max(LEAST, min(wanted, affordable))), 3)
        return cls(share, wanted, trainings(targets, share, form), agreement(noise, share))

    def __str__(self) -> str:
        if self.agreement is None:
            rows = "all rows" if self.share == 1 else f"{self.share:.0%} of the rows"
            return f"The replay uses the curvature of {rows}: {self.work:.3g} trainings, at most {BUDGET:g}."
        why = (
            f"The replay uses the curvature of {self.share:.0%} of the rows: scores of different rows predict a "
            f"correlation of {self.agreement:.2f} with those of all of them, for {self.work:.3g} trainings"
        )
        if self.share >= self.wanted - 1e-3:
            return f"{why}."
        return f"{why}. Expected {AGREEMENT}, within {BUDGET:g} trainings. Set `hessian_share={self.wanted:.2f}`."


_LEAST_RATE = 0.1
"""The rate of a step at least, relative to the mean: its rows count by the momentum of steps behind it, too."""


@dataclass(frozen=True)
class RowDraws:
    """Draws of rows of every step by the counter generator: how many of each step's curvature a sweep uses, and which.

    What a row of the sample adds to the noise grows with the learning rate of its step, and so does the number of rows
    that the step gets. So the noise of all steps together is least for the work (Neyman 1934, Section 5).

    Attributes:
        counts (`list[int]`): rows of each step.
        seed (`int`): seed of the draws.
    """

    counts: list[int]
    seed: int

    @classmethod
    def of(cls, totals: Sequence[int], rates: Tensor, share: float, seed: int) -> "RowDraws":
        """Divide a share of all rows among steps.

        Args:
            totals: rows of each step.
            rates: learning rate of each step, `(T,)`.
            share: the part of all of the rows.
            seed: seed of the draws.
        """
        rows, weights = np.array(totals, dtype=np.float64), rates.double().numpy()
        weights = np.maximum(weights, _LEAST_RATE * weights.mean()) if weights.any() else np.ones(len(rows))
        full = np.zeros(len(rows), dtype=bool)
        while True:  # steps that have no more to give leave the rest to the others
            left = max(0.0, share * rows.sum() - rows[full].sum())
            wanted = np.where(full, 1.0, weights * left / max(1e-300, (weights * rows)[~full].sum()))
            if not bool((wanted > 1).any()):
                break
            full |= wanted > 1
        reached = np.rint(np.cumsum(wanted * rows) - 1e-9).astype(int)
        return cls(np.clip(np.diff(reached, prepend=0), 1, totals).tolist(), seed)

    def rows(self, sizes: Sequence[int], step: int, draw: int = 0) -> tuple[list[list[int]], float]:
        """Return the rows of a step.

        Args:
            sizes: rows in each of the step's batches.
            step: number of the step.
            draw: 0, or 1 for other rows than those, as far as there are.

        Returns:
            The places of the rows in each batch, and the factor of their curvature: all rows by the chosen ones.
        """
        total, count = sum(sizes), self.counts[step]
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, step]))
        order = generator.permutation(total).tolist()
        taken = sorted((order if draw == 0 else order[::-1])[:count])
        starts = np.cumsum([0, *sizes])
        places = [[one - int(low) for one in taken if low <= one < high] for low, high in pairwise(starts)]
        return places, total / count
