"""The recipe of a run, walked backwards: what rows do to a model that is trained like this one, in any order.

In the expectation over orders every step sees every row with the weight 1/n. All states are taken at one point, the
last weights. With ḡ and σ² the mean and the variance of the rows' gradients there, and N rows to a step, the moments
after t steps are

    m = (1 − β₁ᵗ)ḡ        v = (1 − β₂ᵗ)(ḡ² + σ²/N)

and steps back as in `optimizer_steps`, with ḡ(1 − 1/N) in place of g, add up to Γ = Σ γ. A weight w_i of row i has the
effect ⟨∇ℓ_i, Γ⟩/n on the target. Γ stands where H⁻¹∇f stands in other methods: with the metric of the optimizer, and
with the schedule of learning rates where they have a damping.

Long runs are walked in fewer, larger steps, each with the sum of the learning rates of those that it stands for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hf_trak.trajectory.hyperparameters import Hyperparameters
from hf_trak.trajectory.optimizer_steps import Cotangents

MOST_STEPS = 1000
"""Steps back at most. More of them are taken together."""


@dataclass(frozen=True)
class GradientMoments:
    """Mean and variance of the gradients of the rows' loss, in the scale of the trained loss.

    Attributes:
        mean (`torch.Tensor`): ḡ, `(P,)`.
        variance (`torch.Tensor`): σ², `(P,)`.
    """

    mean: Tensor
    variance: Tensor

    def scaled(self, factor: float) -> "GradientMoments":
        """Return the moments of gradients times a factor."""
        return GradientMoments(self.mean * factor, self.variance * factor**2)

    def clipping(self, hyperparameters: Hyperparameters) -> float:
        """Return the factor of a batch's gradient by clipping, from the expectation of its squared norm."""
        if hyperparameters.max_norm is None:
            return 1.0
        square = self.mean.double().square().sum() + self.variance.double().sum() / hyperparameters.rows
        return min(1.0, hyperparameters.max_norm / max(float(square.sqrt()), torch.finfo(torch.float64).tiny))


def spans(steps: int, most: int = MOST_STEPS) -> list[range]:
    """Divide the steps of a run into those that are taken back together, as evenly as they go."""
    count = min(steps, most)
    edges = [steps * index // count for index in range(count + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


def rows_of_products(n: int, rows: int, count: int, seed: int) -> Iterator[list[int]]:
    """Draw the rows of `count` products, without repetition until all have come, as epochs do.

    Args:
        n: number of training rows.
        rows: rows of each product.
        count: number of products.
        seed: seed of the draws.

    Yields:
        The numbers of `rows` rows, or of all if that is fewer.
    """
    generator, left = np.random.Generator(np.random.Philox(seed)), list[int]()
    for _ in range(count):
        while len(left) < min(rows, n):
            left += generator.permutation(n).tolist()
        drawn, left = left[: min(rows, n)], left[min(rows, n) :]
        yield sorted(drawn)


def walked_back(
    gradients: Tensor,
    weights: Tensor,
    moments: GradientMoments,
    hyperparameters: Hyperparameters,
    products: Callable[[Tensor], Tensor],
    most: int = MOST_STEPS,
) -> tuple[Tensor, Tensor]:
    """Compute Γ of some targets.

    Args:
        gradients: ∇f of the targets by the last weights, `(m, P)`.
        weights: the last weights, `(P,)`.
        moments: ḡ and σ², clipped.
        hyperparameters: the numbers of the run's steps.
        products: multiplies `(m, P)` by the Hessian of the loss of some rows. Called once for each step back.
        most: steps back at most.

    Returns:
        Γ `(m, P)`, and by how much each target's derivatives by the weights grew at most, `(m,)`, float64.
    """
    cotangents, total = Cotangents.of(gradients), torch.zeros_like(gradients)
    norms = gradients.double().norm(dim=1)
    largest = norms.clone()
    spread = moments.variance / hyperparameters.rows
    inner = moments.mean * (1 - 1 / hyperparameters.rows)
    for span in reversed(spans(hyperparameters.steps, most)):
        step = replace(hyperparameters.step(span.start, span.stop - 1), max_norm=None)
        gamma = step.backward(cotangents, step.settled(weights, moments.mean, spread, span.stop), inner, weights)
        total += gamma
        cotangents.weights += products(gamma)
        largest = torch.maximum(largest, cotangents.weights.double().norm(dim=1))
    return total, largest / norms.clamp_min(torch.finfo(torch.float64).tiny)
