"""Histograms of the scores of each target over the training set, counted block by block."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_trak.scores.scored_dataset import ScoreBlock

BINS = 40
"""Number of bins between the lowest and the highest score. One more may be needed for an edge between bins at 0."""


@dataclass(frozen=True)
class ScoreDistributions:
    """Distributions of the scores of m targets over n training rows.

    Bin b of target j counts the scores in `[first[j] + b, first[j] + b + 1) · width[j]`, so that 0 is an edge between
    two bins.

    Attributes:
        counts (`numpy.ndarray` of shape `(m, BINS + 2)`):
            Integers. Every row adds up to n.
        first (`numpy.ndarray` of shape `(m,)`):
            Integers: position of the leftmost bin, in bins from score 0.
        width (`numpy.ndarray` of shape `(m,)`):
            Width of a bin, in units of the score.
        mean (`numpy.ndarray` of shape `(m,)`):
            Mean score.
        std (`numpy.ndarray` of shape `(m,)`):
            Standard deviation of the scores.
        positive (`numpy.ndarray` of shape `(m,)`):
            Fraction of the scores that are above 0.
    """

    counts: np.ndarray
    first: np.ndarray
    width: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    positive: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def select(self, targets: Sequence[int]) -> "ScoreDistributions":
        """Take the distributions of some targets."""
        return ScoreDistributions(**{name: value[list(targets)] for name, value in vars(self).items()})

    @classmethod
    def from_blocks(cls, blocks: Iterable[ScoreBlock], low: np.ndarray, high: np.ndarray) -> "ScoreDistributions":
        """Count a stream of scores.

        Args:
            blocks (`Iterable[ScoreBlock]`):
                Scores `(start, stop, block)`, `block` of shape `(stop - start, m)`.
            low (`numpy.ndarray` of shape `(m,)`):
                Lowest score of each target. Lower scores are counted in the first bin.
            high (`numpy.ndarray` of shape `(m,)`):
                Highest score of each target. Higher scores are counted in the last bin.

        Raises:
            ValueError: there is no block.
        """
        import torch  # slow to import, and not needed for distributions that are read

        least, most = (torch.as_tensor(value, dtype=torch.float64) for value in (low, high))
        width = (most - least) / BINS
        width = torch.where(width > 0, width, 1.0)
        first = torch.floor(least / width).long()
        m, bins = len(least), BINS + 2
        counts = torch.zeros(m * bins, dtype=torch.int64)
        total, squares = (torch.zeros(m, dtype=torch.float64) for _ in range(2))
        positive, n = torch.zeros(m, dtype=torch.int64), 0
        offsets = torch.arange(m) * bins
        for _, _, block in blocks:
            scores = block.double()
            places = (torch.floor(scores / width).long() - first).clamp_(0, bins - 1) + offsets
            counts += torch.bincount(places.reshape(-1), minlength=m * bins)
            total += scores.sum(dim=0)
            squares += scores.square().sum(dim=0)
            positive += (scores > 0).sum(dim=0)
            n += len(scores)
        if n == 0:
            raise ValueError("There are no scores to count. Expected at least one block.")
        mean = total / n
        return cls(
            counts=counts.reshape(m, bins).numpy(),
            first=first.numpy(),
            width=width.numpy(),
            mean=mean.numpy(),
            std=(squares / n - mean.square()).clamp_min(0).sqrt().numpy(),
            positive=(positive / n).numpy(),
        )


@dataclass(frozen=True)
class Histogram:
    """A histogram as SVG paths in a box of 320 × 80 units, one path for the bins below 0 and one for those above.

    Heights are logarithmic: almost all scores are near 0, and the histogram is meant to show the few that are not.
    """

    negative: str
    positive: str
    zero: float
    ticks: list[float]
    low: float
    high: float
    n: int
    mean: float
    std: float
    positive_part: float

    WIDTH = 320
    HEIGHT = 80

    @classmethod
    def of(cls, found: ScoreDistributions, target: int, shown: Iterable[float]) -> "Histogram":
        """Draw the distribution of one target.

        Args:
            found: the distributions of all targets.
            target: index of the target.
            shown: scores of the training rows shown with the target, which become ticks.
        """
        counts, width, first = found.counts[target], float(found.width[target]), int(found.first[target])
        used = np.flatnonzero(counts)
        # Extend the range so that it contains 0.
        start, stop = min(int(used[0]), -first, len(counts)), max(int(used[-1]) + 1, -first)
        step = cls.WIDTH / max(1, stop - start)
        tallest = np.log1p(counts.max())
        paths = {"negative": "", "positive": ""}
        for b in used.tolist():
            x = round((b - start) * step, 1)
            height = round(float(np.log1p(counts[b]) / tallest) * (cls.HEIGHT - 4), 1)
            side = "negative" if b + first < 0 else "positive"
            paths[side] += f"M{x} {cls.HEIGHT}v{-height}h{round(step * 0.86, 1)}v{height}z"

        def place(score: float) -> float:
            return round(min(max(score / width - first - start, 0.0), stop - start) * step, 1)

        return cls(
            **paths,
            zero=place(0.0),
            ticks=sorted({place(score) for score in shown}),
            low=(first + start) * width,
            high=(first + stop) * width,
            n=int(counts.sum()),
            mean=float(found.mean[target]),
            std=float(found.std[target]),
            positive_part=float(found.positive[target]),
        )
