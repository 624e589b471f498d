"""`CurvatureReport`: what a fitted curvature looks like, layer by layer, and what to mistrust in it.

With Λ the eigenvalues of a block (means over rows of squared gradients in its basis) and d its damping, c · mean Λ
unless the block is nothing but rounding (see `damping_of`):

* ΣΛ is the mean squared norm of the block's gradients.
* Σ Λ / (Λ + d) is its effective dimension: the number of directions that the data rather than the damping fix.
* Σ (Λ / (Λ + d))² is the mean square of the block's part gᵀ(P + d)⁻¹g' of a score, for two independent gradients whose
  covariance is P. So its share says how much of the variance of scores comes from the block, before there is a target.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hf_trak.curvature.blocks import DiagonalBlock, KroneckerBlock
from hf_trak.curvature.curvature import NOISE, Curvature, damping_of, inverse

logger = logging.getLogger(__name__)

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Points of a block's spectrum that a report shows."""

POSITIONS_PER_SIDE = 10
"""Positions that a sample should have per row of a block's longer basis."""

_DOMINANT = 0.5
_NAMED = 5
_SHOWN = 40


@dataclass(frozen=True)
class BlockReport:
    """One block of a curvature.

    Attributes:
        name (`str`): name of the parameter; with a number in brackets where it is divided into several blocks.
        parameter (`str`): name of the parameter.
        kind (`str`): `"kronecker"`, or `"diagonal"` for one number per element.
        shape (`tuple[int, ...]`): shape of the matrix with its bias, or the number of elements.
        positions (`int`, *optional*): positions behind the bases, or rows for bases of whole gradients;
            `None` for a block without bases.
        needed (`int`, *optional*): number of them below which the bases are mistrusted.
        eigenvalues (`tuple[float, ...]`): [`QUANTILES`] of Λ.
        mean (`float`): mean Λ.
        total (`float`): ΣΛ.
        damping (`float`): d, which is added to every eigenvalue.
        effective_dimension (`float`): Σ Λ / (Λ + d).
        gradient_share (`float`): part of the whole ΣΛ, from 0 to 1.
        score_share (`float`): part of the variance of scores, from 0 to 1.
    """

    name: str
    parameter: str
    kind: str
    shape: tuple[int, ...]
    positions: int | None
    needed: int | None
    eigenvalues: tuple[float, ...]
    mean: float
    total: float
    damping: float
    effective_dimension: float
    gradient_share: float
    score_share: float

    @property
    def numel(self) -> int:
        """Return the number of parameters."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CurvatureReport:
    """A report on a fitted curvature. `print(report)` shows all of it, [`~CurvatureReport.summary`] two lines.

    Attributes:
        kind (`str`): see `hf_trak.curvature.curvature.CurvatureKind`.
        rows (`int`): number of training rows that it was fitted to.
        damping (`float`): c, relative to the mean eigenvalue of each block.
        blocks (`tuple[BlockReport, ...]`): all blocks, those of the largest share of the scores' variance first.
        warnings (`tuple[str, ...]`): what to look at.
        whole (`tuple[str, ...]`): parameters with bases of whole gradients, as of `"shampoo"`, where the kind asks for
            those of factors: their layers could not be taken apart one by one, as in some mixtures of experts.
    """

    kind: str
    rows: int
    damping: float
    blocks: tuple[BlockReport, ...]
    warnings: tuple[str, ...]
    whole: tuple[str, ...]

    @classmethod
    def of(cls, curvature: Curvature, damping: float) -> "CurvatureReport":
        """Describe a curvature.

        Args:
            curvature ([`~hf_trak.curvature.curvature.Curvature`]):
                The curvature.
            damping (`float`):
                c in 1 / (Λ + c · mean Λ), as scores use it.
        """
        named = _with_names(curvature)
        floor = curvature.floor
        moments = [_moments(values, damping, floor) for _, _, values, _ in named]
        gradients, scores = (math.fsum(column) for column in list(zip(*moments, strict=True))[::2])
        blocks = []
        for (name, block, values, positions), (total, dimension, score) in zip(named, moments, strict=True):
            kronecker = isinstance(block, KroneckerBlock)
            flat = values.numpy().reshape(-1)
            mean = total / values.numel()
            blocks.append(
                BlockReport(
                    name=name,
                    parameter=block.name,
                    kind="kronecker" if kronecker and positions is not None else "diagonal",
                    shape=tuple(values.shape),
                    positions=positions,
                    needed=_needed(block, curvature.kind) if positions is not None else None,
                    eigenvalues=tuple(float(value) for value in np.quantile(flat, QUANTILES)),
                    mean=mean,
                    total=total,
                    damping=float(damping_of(values, damping, floor)) if total else 0.0,
                    effective_dimension=dimension,
                    gradient_share=total / gradients if gradients else 0.0,
                    score_share=score / scores if scores else 0.0,
                )
            )
        ordered = tuple(sorted(blocks, key=lambda one: -one.score_share))
        warnings = tuple(_warnings(ordered, curvature))
        factored = curvature.kind in ("ekfac", "kfac")
        whole = dict.fromkeys(one.name for one in curvature.blocks.kronecker if factored and one.source is None)
        return cls(curvature.kind, curvature.rows, damping, ordered, warnings, tuple(whole))

    @property
    def numel(self) -> int:
        """Return P, the number of parameters."""
        return sum(block.numel for block in self.blocks)

    @property
    def effective_dimension(self) -> float:
        """Sum Λ / (Λ + d) over all blocks."""
        return math.fsum(block.effective_dimension for block in self.blocks)

    def summary(self) -> str:
        """Describe the curvature in two lines."""
        bases = sum(block.numel for block in self.blocks if block.kind == "kronecker")
        largest = ", ".join(f"{block.name} {block.score_share:.0%}" for block in self.blocks[:3])
        whole = f" The gradients of {_listed(self.whole)} come whole, and so do their bases." if self.whole else ""
        return (
            f"{self.kind}, fitted to {self.rows:,} rows: {self.numel:,} parameters in {len(self.blocks)} blocks, "
            f"{bases / self.numel:.1%} of them with Kronecker bases; effective dimension "
            f"{self.effective_dimension:,.0f} with damping {self.damping:g} · mean Λ.{whole}\n"
            f"Largest shares of the scores' variance: {largest}."
        )

    def table(self, limit: int | None = None) -> list[str]:
        """Lay the blocks out in columns, a header first.

        Args:
            limit (`int`, *optional*):
                Number of blocks to show. By default all.
        """
        header = (
            "block", "kind", "shape", "positions", "mean Λ", "median", "largest", "dimension", "gradients", "scores",
        )  # fmt: skip
        cells = [header, *(_cells(block) for block in self.blocks[:limit])]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        lines = []
        for row in cells:
            texts = [text.ljust(width) for text, width in zip(row[:3], widths[:3], strict=True)]
            numbers = [text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True)]
            lines.append("  ".join([*texts, *numbers]))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {
            "kind": self.kind,
            "rows": self.rows,
            "parameters": self.numel,
            "damping": self.damping,
            "effective_dimension": self.effective_dimension,
            "quantiles": list(QUANTILES),
            "blocks": [
                {**asdict(block), "shape": list(block.shape), "eigenvalues": list(block.eigenvalues)}
                for block in self.blocks
            ],
            "warnings": list(self.warnings),
            "whole": list(self.whole),
        }

    def log(self, what: str) -> None:
        """Log the summary, and every warning.

        Args:
            what (`str`):
                Of which the curvature is, for the messages.
        """
        logger.info("%s: %s", what, self.summary())
        for warning in self.warnings:
            logger.warning("%s: %s", what, warning)

    def __str__(self) -> str:
        """Return summary, the blocks of the largest shares, and all warnings."""
        left = len(self.blocks) - _SHOWN
        more = [f"… and {left} blocks more, see `to_dict()`."] if left > 0 else []
        columns = (
            "median, largest: quantiles of Λ relative to its mean. dimension: Σ Λ / (Λ + d), in brackets its part of "
            "the parameters.\ngradients, scores: share of ΣΛ, and of the variance of scores."
        )
        warnings = [f"Warning: {warning}" for warning in self.warnings]
        return "\n".join([self.summary(), "", *self.table(_SHOWN), *more, "", columns, *warnings])


def _with_names(curvature: Curvature) -> list[tuple[str, KroneckerBlock | DiagonalBlock, Tensor, int | None]]:
    """List all blocks with a name of their own each, their eigenvalues, and the positions behind their bases."""
    counts = [None if values.bases is None else values.count for values in curvature.kronecker]
    counts += [None] * len(curvature.diagonal)
    items = curvature.items()
    times = Counter(block.name for block, _ in items)
    seen: Counter[str] = Counter()
    found = []
    for (block, values), count in zip(items, counts, strict=True):
        name = block.name if times[block.name] == 1 else f"{block.name}[{seen[block.name]}]"
        seen[block.name] += 1
        found.append((name, block, values, count))
    return found


def _moments(eigenvalues: Tensor, damping: float, floor: float) -> tuple[float, float, float]:
    """Compute ΣΛ, Σ Λ / (Λ + d) and Σ (Λ / (Λ + d))² of a block."""
    kept = inverse(eigenvalues, damping, floor).mul_(eigenvalues.double())
    return float(eigenvalues.double().sum()), float(kept.sum()), float(kept.square_().sum())


def _needed(block: KroneckerBlock | DiagonalBlock, kind: str) -> int:
    """Return the number of positions or of rows that the bases of a block should come from.

    A position adds one direction to either basis. A whole gradient adds as many as the shorter side has, at most.
    """
    assert isinstance(block, KroneckerBlock)
    rank = min(block.shape) if kind == "shampoo" or block.source is None else 1
    return -(-POSITIONS_PER_SIDE * max(block.shape) // rank)


def _warnings(blocks: tuple[BlockReport, ...], curvature: Curvature) -> Iterable[str]:
    silent, rows = curvature.blocks.without_gradient, curvature.rows
    if silent:
        yield (
            f"{_listed(silent)} had no gradient in any of the {rows:,} rows, and add nothing to a score. Freeze such "
            "parameters or leave them out of `grad_wrt`, or fit to more rows if only few of them reach these."
        )
    if empty := [block.name for block in blocks if block.total == 0 and block.parameter not in silent]:
        yield (
            f"All gradients of {_listed(empty)} are zero in the sample, such as those of an expert that no row is "
            "sent to, and add nothing to a score. Fit to more rows (`curvature.rows`) if some of them reach it."
        )
    if rounding := [block.name for block in blocks if 0 < block.mean < curvature.floor]:
        yield (
            f"The gradients of {_listed(rounding)} are what rounding leaves of zero (mean Λ below {NOISE:g} of the "
            "largest), and add next to nothing to a score. Freeze such parameters or leave them out of `grad_wrt`."
        )
    if scarce := [block for block in blocks if block.needed is not None and 0 < (block.positions or 0) < block.needed]:
        worst = min(scarce, key=lambda block: (block.positions or 0) / (block.needed or 1))
        yield (
            f"The sample is small for {_listed([block.name for block in scarce])}: {worst.name} has "
            f"{worst.positions:,} positions, and {worst.needed:,} are needed for a good basis. Set `curvature.rows` "
            "higher if there are more rows, or `damping`."
        )
    if len({block.parameter for block in blocks}) > 2:
        for share, what in (("gradient_share", "squared gradients"), ("score_share", "variance of scores")):
            name, part = _largest(blocks, share)
            if part > _DOMINANT:
                yield (
                    f"{name} has {part:.0%} of the {what}, more than all other parameters together. Look whether it "
                    "is what you want to attribute; `grad_wrt` leaves parameters out."
                )


def _largest(blocks: tuple[BlockReport, ...], share: str) -> tuple[str, float]:
    """Find the parameter with the largest share, all its blocks together."""
    totals: dict[str, float] = {}
    for block in blocks:
        totals[block.parameter] = totals.get(block.parameter, 0.0) + getattr(block, share)
    return max(totals.items(), key=lambda item: item[1])


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _cells(block: BlockReport) -> tuple[str, ...]:
    _, _, median, _, largest = block.eigenvalues
    mean = block.mean or 1.0
    return (
        block.name,
        block.kind,
        " × ".join(map(str, block.shape)),
        "-" if block.positions is None else f"{block.positions:,}",
        f"{block.mean:.2e}",
        f"{median / mean:.2g}",
        f"{largest / mean:,.0f}",
        f"{block.effective_dimension:,.0f} ({block.effective_dimension / block.numel:.0%})",
        f"{block.gradient_share:.1%}",
        f"{block.score_share:.1%}",
    )
