"""XᵀX of a sample of the rows: which rows it has, how they are weighted, and what is known of its error.

From [`SAMPLED_FROM`] rows on, XᵀX is summed over about m = [`ROWS_PER_FEATURE`] · k rows, if these are at most half of
all. Row i is drawn with the probability p_i = min(1, c w_i) and counts 1 / p_i times, where w_i is ‖x_i‖², or the
square of the scale of its code, which is nearly proportional to it, rounded up to a power of √2, and Σ p_i = m. So no
row outweighs the others, however uneven lengths are, and

    Ĝ = Σ_i (I_i / p_i) x_iᵀx_i  has the mean G = XᵀX, whatever w is.

I_i is 1 where the first word of the counter generator at position i (`hf_trak/kernels/philox.py`) is below p_i · 2³².
Since c follows from how many rows have which w, the sample is the same for any shards and processes.

*The error.* A bit h_i = ±1 of the second word puts each drawn row into one of two halves; a row with p_i = 1 goes into
both, with half its weight. The difference of the halves, D = Σ h_i (I_i / p_i) x_iᵀx_i over the rows with p_i < 1, has
the mean 0, and is a sum of independent terms, as Ĝ − G is. The covariance of a term is 1 / p_i times that of x_iᵀx_i
with itself for D, and (1 − p_i) / p_i times for Ĝ − G: nearly the same, and D errs on the safe side. So D shows the
error that nobody can see. With Ŝ = Ĝ + λI,

    ε = ‖Ŝ^(−1/2) (Ĝ − G) Ŝ^(−1/2)‖₂ ≈ ‖Ŝ^(−1/2) D Ŝ^(−1/2)‖₂.

From (G + λI)⁻¹ = Ŝ^(−1/2) (I − E)⁻¹ Ŝ^(−1/2) with ‖E‖₂ = ε it follows that the score of a row x for a target t is off
by at most ε / (1 − ε) · √(x Ŝ⁻¹ xᵀ · t Ŝ⁻¹ tᵀ). The matrix Bernstein inequality (Tropp 2015, An Introduction to Matrix
Concentration Inequalities, theorem 6.1.1) bounds ε by about √(2 log(k) tr(G) / (λ m)), several times what is seen.

λ follows from the trace as ever; that of Ĝ is right to about 1 / √m.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_trak.kernels.philox import Stream, philox_words
from hf_trak.runtime.checks import check_finite_rows
from hf_trak.scores.gram import GramSum, column_squares
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.store import FeatureStore, Gram

SAMPLED_FROM = 1_000_000
"""Least number of rows for a sample. Below, XᵀX is that of all rows."""

ROWS_PER_FEATURE = 256
"""Rows of a sample for each feature, on average."""

SAMPLE = "rows-by-length-1"
"""Raised whenever the samples of the same features change. It is part of the identity of scores."""

_WORDS = 2.0**32

_CLASSES = 2048

Reduction = Callable[[Tensor, Tensor], Tensor]
Over = Callable[[Callable[[Sequence[int]], Tensor], Reduction], Tensor]
"""Calls a function of some shards, by their indices, for all of them, and reduces the results, on the CPU."""


def sample_size(n: int, k: int) -> int | None:
    """Return the number of rows that XᵀX is summed over, on average; `None` for all.

    Args:
        n: number of training rows.
        k: number of features.
    """
    wanted = ROWS_PER_FEATURE * k
    return wanted if n >= SAMPLED_FROM and 2 * wanted <= n else None


@dataclass(frozen=True)
class RowSample:
    """A sample of the rows of a feature matrix.

    Attributes:
        shards: the features.
        seed: the seed of the store.
        model_id: the checkpoint.
        bounds: p · 2³² by the class of a row, see [`classes`].
    """

    shards: ShardSet
    seed: int
    model_id: int
    bounds: Tensor

    def halves(self, index: int) -> tuple[list[Tensor], int]:
        """Return the drawn rows of a shard that are in either half, times the roots of their weights.

        Returns:
            Two tensors `(rows, k)`, float64, and the number of drawn rows.

        Raises:
            StoreError: the shard is missing or damaged.
        """
        shard, rows = self.shards.read(index), self.shards.plan.rows(index)
        words = philox_words(rows.start, len(rows), self.seed, self.model_id, Stream.GRAM_ROWS_1)
        bound = self.bounds[classes(shard)]
        sure, drawn, second = bound == _WORDS, words[0] < bound, words[1] % 2 == 1
        found = []
        for side in (~second, second):
            places = (sure | (drawn & side)).nonzero().flatten()
            part = Shard(rows.start, rows.stop, shard.features[places], shard.out_to_loss[places])
            weights = torch.where(sure[places], 0.5, _WORDS / bound[places])
            found.append(part.grads.double() * weights.sqrt().unsqueeze(1))
        return found, int(drawn.sum())

    def squares(self, indices: Sequence[int]) -> Tensor:
        """Compute the largest squared norms of the columns of either half within a shard, `(2, k)`."""
        largest = torch.zeros(2, self.shards.width, dtype=torch.float64)
        for index in indices:
            found = torch.stack([column_squares(rows) for rows in self.halves(index)[0]])
            torch.maximum(largest, found, out=largest)
        return largest

    def integers(self, largest: Tensor, indices: Sequence[int]) -> Tensor:
        """Sum both halves in integers, see [`GramSum`].

        Args:
            largest: the maximum of `squares` over all shards, on the device that multiplies.
            indices: the shards.

        Returns:
            Two matrices of integers and the number of drawn rows, flat, `(2 k² + 1,)`, on the CPU.
        """
        sums, drawn = [GramSum(one, len(self.shards)) for one in largest], torch.zeros(1, dtype=torch.float64)
        for index in indices:
            halves, count = self.halves(index)
            drawn += count
            for one, rows in zip(sums, halves, strict=True):
                one.add(rows)
        return torch.cat([*(one.integers.flatten().cpu() for one in sums), drawn])


def classes(shard: Shard) -> Tensor:
    """Return the classes of the rows of a shard, `(rows,)`, int64: those of class e > 0 have w = 2^((e − 1024) / 2).

    Rows of zeros have class 0.

    Raises:
        NonFiniteError: a row is not finite; names it.
    """
    coded = shard.coded
    squares = shard.grads.double().square().sum(dim=1) if coded is None else coded.scale.double().square()
    check_finite_rows(squares, "feature vector", shard.start)
    _, exponents = torch.frexp(squares.square())
    return torch.where(squares > 0, exponents.long() + _CLASSES // 2, 0)


def bounds(counts: Tensor, size: int) -> Tensor:
    """Return p · 2³² for every class, `(2048,)`, float64.

    Args:
        counts: number of rows in every class.
        size: m. If fewer rows have features other than 0, each of them is certain.
    """
    roots = (1.0, math.sqrt(2.0))
    kinds = [e for e in range(1, _CLASSES) if counts[e]]
    there = [(math.ldexp(roots[e % 2], e // 2 - _CLASSES // 4), e, int(counts[e])) for e in kinds]
    found, left = torch.zeros(_CLASSES, dtype=torch.float64), float(size)
    mass = math.fsum(weight * count for weight, _, count in there)
    for weight, e, count in reversed(there):
        share = min(1.0, weight * left / mass) if mass > 0 and left > 0 else 1.0
        if share == 1.0:  # longer rows that are certain leave the rest to the others
            left, mass = left - count, math.fsum(one * many for one, other, many in there if other < e)
        found[e] = math.floor(share * _WORDS)
    return found


def sampled_gram(store: FeatureStore, model_id: int, size: int, over: Over, device: torch.device) -> Gram:
    """Estimate XᵀX of a checkpoint from a sample of its rows.

    Args:
        store: the features.
        model_id: the checkpoint.
        size: m, the rows that are drawn on average.
        over: divides the shards among processes.
        device: where products are computed.

    Returns:
        [`~hf_trak.store.store.Gram`]: Ĝ, with the number of drawn rows, and D.

    Raises:
        StoreError: a shard is missing or damaged.
        NonFiniteError: a row is not finite; names it.
    """
    shards, seed = store.train(model_id), int(store.config.get("seed", 0))
    k = shards.width
    sample = RowSample(shards, seed, model_id, bounds(over(partial(_counts, shards), torch.add), size))
    largest = over(sample.squares, torch.maximum).view(2, k).to(device)
    found = over(partial(sample.integers, largest), torch.add)
    sums = []
    for half, integers in enumerate(found[:-1].view(2, k, k)):
        one = GramSum(largest[half].cpu(), len(shards))
        one.integers = integers.clone()
        sums.append(one.result())
    matrix = sums[0] + sums[1]
    return Gram(matrix, float(matrix.diagonal().sum()), shards.plan.n_rows, int(found[-1]), sums[0] - sums[1])


def _counts(shards: ShardSet, indices: Sequence[int]) -> Tensor:
    """Count the rows of every class in some shards, `(2048,)`, float64."""
    counts = torch.zeros(_CLASSES, dtype=torch.float64)
    for index in indices:
        counts += torch.bincount(classes(shards.read(index)), minlength=_CLASSES)
    return counts
