"""Scores from shards on disk, row block by row block.

    τ = (mean_c X_c A_cᵀ) ∘ (mean_c q_c),      A_c = t_c (X_cᵀX_c + λ_c I)⁻¹   (rows: preconditioned targets)

the mean of the products times the mean of the q's (TRAK paper, Section 3.4). Memory is one shard of one checkpoint
(on a GPU two of each) plus one block of scores; neither X (n, k) nor τ (n, m) is ever held.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.scores.feature_shards import FeatureShard, uploaded_shards
from hf_trak.scores.ridge import RidgeSystem, check_finite_rows

_PLAIN_EXPONENT = 32
"""Powers of two up to which float32 holds a row as it is, with room for entries far smaller than its largest."""


@dataclass(frozen=True)
class ScaledRows:
    """A matrix `(m, k)` as float32 rows and powers of two: row j is `values[j] · 2^exponents[j]`.

    A = t (XᵀX + λI)⁻¹ is of the size 1 / ‖x‖ while t is of the size ‖x‖, so that with gradients of 10²² or 10⁻²² one
    of them leaves the range of float32. Scaling by powers of two is exact.
    """

    values: Tensor
    exponents: Tensor | None = None

    @classmethod
    def of(cls, matrix: Tensor) -> "ScaledRows":
        """Rows of a float64 matrix `(m, k)`, without exponents where float32 holds them as they are."""
        largest = matrix.abs().amax(dim=1)
        _, exponents = torch.frexp(largest)
        exponents = torch.where(largest > 0, exponents, 0)
        if int(exponents.abs().max()) <= _PLAIN_EXPONENT:
            return cls(matrix.float())
        return cls(torch.ldexp(matrix, -exponents.unsqueeze(1)).float(), exponents)

    def unscaled(self, products: Tensor) -> Tensor:
        """Products `(rows, m)` of something with `values` as products with the matrix. In place."""
        if self.exponents is None:
            return products
        wide = torch.ldexp(products.double(), self.exponents.to(products.device))
        return products.copy_(wide)


def score_blocks(
    checkpoints: Sequence[Iterable[FeatureShard]],
    preconditioned_targets: Sequence["Tensor | ScaledRows"],
) -> Iterator[tuple[int, int, Tensor]]:
    """TRAK scores of all train examples for m targets.

    Args:
        checkpoints: for each checkpoint its shards, in the same order with the same row ranges for all. Read once,
            lazily.
        preconditioned_targets: for each checkpoint A_c `(m, k)`, see [`RidgeSystem.solve`], or its float32 rows with
            powers of two that they are to be multiplied by. Products are computed on the device of A_c, in float32.

    Returns:
        an iterator of `(start, stop, block)`, one for each row range: `block[i, j]`, float32, is the score of train
        example `start + i` for target j.

    Raises:
        ValueError: there is no checkpoint, their number differs from that of the targets, or shapes do not fit.
        StoreError: checkpoints are cut into shards differently.
        NonFiniteError: a score is not finite; names the train row.
    """
    _check_counts(checkpoints, preconditioned_targets, "preconditioned target matrices")
    rows = [one if isinstance(one, ScaledRows) else ScaledRows(one.float()) for one in preconditioned_targets]
    targets = [one.values for one in rows]
    if len({matrix.shape[0] for matrix in targets}) != 1:
        raise ValueError(
            f"The checkpoints have {[matrix.shape[0] for matrix in targets]} targets. Expected one number for all."
        )

    columns = [matrix.T.contiguous() for matrix in targets]

    def product(checkpoint: int, grads: Tensor, start: int) -> Tensor:
        matrix = columns[checkpoint]
        _check_columns(grads, matrix.shape[0], checkpoint)
        return rows[checkpoint].unscaled(grads.to(device=matrix.device, dtype=torch.float32) @ matrix)

    # a shard is on its way to the device while the one before it is multiplied
    shards = [uploaded_shards(one, matrix.device) for one, matrix in zip(checkpoints, columns, strict=True)]
    return _checked(_average(shards, product))


def joined(blocks: Iterable[tuple[int, int, Tensor]], least: int) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks put together, so that whoever works on them does so in fewer, larger operations.

    Args:
        blocks: `(start, stop, block)`, see [`score_blocks`].
        least: scores that a block has to have, except the last one and those before a gap in the rows.
    """
    held: list[tuple[int, int, Tensor]] = []
    scores = 0

    def release() -> tuple[int, int, Tensor]:
        block = held[0][2] if len(held) == 1 else torch.cat([block for _, _, block in held])
        return held[0][0], held[-1][1], block

    for start, stop, block in blocks:
        if held and start != held[-1][1]:
            yield release()
            held, scores = [], 0
        held.append((start, stop, block))
        scores += block.numel()
        if scores >= least:
            yield release()
            held, scores = [], 0
    if held:
        yield release()


def self_influence_blocks(
    checkpoints: Sequence[Iterable[FeatureShard]], systems: Sequence[RidgeSystem]
) -> Iterator[tuple[int, int, Tensor]]:
    """Score of every train example for itself: mean_c(x_cᵀ (G_c + λ_c I)⁻¹ x_c) · mean_c q_c.

    High values mark examples that the model can fit only by themselves, among them mislabelled ones. The features of
    the train side stand in for both sides, also for tasks that distinguish the sides.

    Args:
        checkpoints: as in [`score_blocks`].
        systems: for each checkpoint its factorized Gram matrix.

    Returns:
        an iterator of `(start, stop, block)`, `block` of shape `(stop - start,)`, float32.

    Raises:
        As [`score_blocks`].
    """
    _check_counts(checkpoints, systems, "ridge systems")

    def product(checkpoint: int, grads: Tensor, start: int) -> Tensor:
        _check_columns(grads, systems[checkpoint].k, checkpoint)
        return systems[checkpoint].quadratic(grads, start).unsqueeze(1)

    return ((start, stop, block.squeeze(1)) for start, stop, block in _checked(_average(checkpoints, product)))


def _checked(blocks: Iterable[tuple[int, int, Tensor]]) -> Iterator[tuple[int, int, Tensor]]:
    for start, stop, block in blocks:
        check_finite_rows(block, "score", start)
        yield start, stop, block


def _average(
    checkpoints: Sequence[Iterable[FeatureShard]], product: Callable[[int, Tensor, int], Tensor]
) -> Iterator[tuple[int, int, Tensor]]:
    iterators = [iter(shards) for shards in checkpoints]
    count = len(iterators)
    for first in iterators[0]:
        start, stop = first.start, first.stop
        total = product(0, _grads(first), start)
        weight = first.out_to_loss.to(device=total.device, dtype=torch.float32)
        del first  # one shard at a time
        for checkpoint in range(1, count):
            shard = next(iterators[checkpoint], None)
            if shard is None or (shard.start, shard.stop) != (start, stop):
                found = "nothing" if shard is None else f"rows {shard.start} … {shard.stop}"
                raise StoreError(
                    f"Checkpoint number {checkpoint} has {found} where checkpoint number 0 has rows {start} … {stop}. "
                    "Expected the same shards in each: featurize them with one shard size and one train dataset."
                )
            total += product(checkpoint, _grads(shard), start).to(total.device)
            weight = weight + shard.out_to_loss.to(weight)
            del shard
        if count > 1:
            total, weight = total.div_(count), weight / count
        yield start, stop, total.mul_(weight.unsqueeze(1)).float()
    for checkpoint in range(1, count):
        if (shard := next(iterators[checkpoint], None)) is not None:
            raise StoreError(
                f"Checkpoint number {checkpoint} has rows {shard.start} … {shard.stop}, which checkpoint number 0 "
                "lacks. Featurize all checkpoints on the same train dataset."
            )


def _grads(shard: FeatureShard) -> Tensor:
    grads = shard.grads
    if grads.ndim != 2 or grads.shape[0] != shard.stop - shard.start:
        raise StoreError(
            f"The shard of rows {shard.start} … {shard.stop} holds features of shape {tuple(grads.shape)}. Expected "
            f"({shard.stop - shard.start}, k). Delete that file and featurize again."
        )
    return grads


def _check_columns(grads: Tensor, k: int, checkpoint: int) -> None:
    if grads.shape[1] != k:
        raise ValueError(
            f"The features of checkpoint number {checkpoint} have {grads.shape[1]} columns, its targets {k}. Expected "
            "the same: project both with the same projector."
        )


def _check_counts(checkpoints: Sequence[object], others: Sequence[object], what: str) -> None:
    if not checkpoints or len(checkpoints) != len(others):
        raise ValueError(
            f"Given {len(checkpoints)} checkpoint(s) and {len(others)} {what}. Expected one for each, and ≥ 1."
        )
