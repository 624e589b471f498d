"""The rows whose curvature a sweep uses, a share of all of them, and what a share costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from hf_trak.trajectory.passes import CurvatureForm

PRODUCTS: dict[CurvatureForm, float] = {"gauss-newton": 4 / 3, "hessian": 2.0}
"""Work of a product of a row and a direction, in forward and backward passes of the row: a forward pass with tangents
and a backward pass are four products of matrices where training has three, and differentiating twice is six."""


def trainings(gradients: float, targets: int, share: float, form: CurvatureForm) -> float:
    """Estimate the work of a sweep in trainings: for so many times the gradients of all rows, and for products."""
    return gradients + PRODUCTS[form] * share * targets


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

    def rows(self, sizes: Sequence[int], step: int) -> tuple[list[list[int]], float]:
        """Return the rows of a step.

        Args:
            sizes: rows in each of the step's batches.
            step: number of the step.

        Returns:
            The places of the rows in each batch, and the factor of their curvature: all rows by the chosen ones.
        """
        total, count = sum(sizes), self.counts[step]
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, step]))
        taken = sorted(generator.permutation(total).tolist()[:count])
        starts = np.cumsum([0, *sizes])
        places = [[one - int(low) for one in taken if low <= one < high] for low, high in pairwise(starts)]
        return places, total / count
