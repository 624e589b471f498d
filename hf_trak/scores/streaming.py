"""TRAK scores from feature shards, one block of training rows at a time.

With features X_c `(n, k)`, preconditioned targets A_c `(m, k)` and weights q_c `(n,)` of checkpoint c,

    τ = (mean_c X_c A_cᵀ) ∘ (mean_c q_c),      A_c = t_c (X_cᵀX_c + λ_c I)⁻¹        (n, m)

which is the mean of the products times the mean of the weights, not the mean of their products (TRAK paper, arXiv
2303.14186, Section 3.4). ∘ multiplies every row of the left matrix by its entry of the right vector.

At any time, memory holds one shard of one checkpoint (two on a GPU) and one block of scores, never all of X or τ.
Shards with codes are multiplied as they are, see `coded_products.py`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.runtime.checks import check_finite_rows
from hf_trak.runtime.transfers import CopyEngine, copy_engine, uploaded
from hf_trak.scores.coded_products import CodedTargets, coded_targets
from hf_trak.scores.ridge import RidgeSystem
from hf_trak.store.codes import CodedRows, CodeFormat
from hf_trak.store.shard_set import Shard

_PLAIN_EXPONENT = 32
"""Rows whose largest entry is between 2⁻³² and 2³² are kept unscaled: far smaller entries still fit into float32."""

_PREPARING = Lock()
"""Held while targets are prepared for codes, so that threads which need them at the same time do so once."""


@dataclass(frozen=True)
class ScaledRows:
    """A float32 matrix with a power of two per row: row j is `values[j] · 2^exponents[j]`.

    t is of the size of the features ‖x‖, and A = t (XᵀX + λI)⁻¹ of the size 1 / ‖x‖. With gradients of size 10²² or
    10⁻²², products of features with A would therefore leave the range of float32. Scaling by powers of two is exact.

    Attributes:
        values (`torch.Tensor` of shape `(m, k)`):
            float32.
        exponents (`torch.Tensor` of shape `(m,)`, *optional*):
            Integers. `None` stands for zeros.
    """

    values: Tensor
    exponents: Tensor | None = None

    @classmethod
    def of(cls, matrix: Tensor) -> "ScaledRows":
        """Convert a float64 matrix `(m, k)`. It gets exponents only if a row is too large or small for float32."""
        largest = matrix.abs().amax(dim=1)
        _, exponents = torch.frexp(largest)
        exponents = torch.where(largest > 0, exponents, 0)
        if int(exponents.abs().max()) <= _PLAIN_EXPONENT:
            return cls(matrix.float())
        return cls(torch.ldexp(matrix, -exponents.unsqueeze(1)).float(), exponents)

    @cached_property
    def columns(self) -> Tensor:
        """Return `valuesᵀ` `(k, m)`, as products with floating-point rows need it."""
        return self.values.T.contiguous()

    @cached_property
    def _prepared(self) -> dict[CodeFormat, CodedTargets]:
        return {}

    def for_codes(self, form: CodeFormat) -> CodedTargets:
        """Return `values` as products with codes need it, see [`coded_targets`]. It is prepared once."""
        with _PREPARING:
            if form not in self._prepared:
                self._prepared[form] = coded_targets(self.values, form)
            return self._prepared[form]

    def unscaled(self, products: Tensor) -> Tensor:
        """Multiply products with `values` by the powers of two, in place.

        Args:
            products: X · valuesᵀ, `(rows, m)`.

        Returns:
            `products`, which now holds the products with the matrix itself.
        """
        if self.exponents is None:
            return products
        wide = torch.ldexp(products.double(), self.exponents.to(products.device))
        return products.copy_(wide)


def score_blocks(
    checkpoints: Sequence[Iterable[Shard]],
    preconditioned_targets: Sequence["Tensor | ScaledRows"],
) -> Iterator[tuple[int, int, Tensor]]:
    """Compute τ = (mean_c X_c A_cᵀ) ∘ (mean_c q_c) for m targets, one shard at a time.

    Args:
        checkpoints: the shards of every checkpoint, with the same row ranges in the same order for all. They are read
            once, and lazily.
        preconditioned_targets: A_c `(m, k)` of every checkpoint, see [`RidgeSystem.solve`], plain or scaled. Products
            are computed on the device of A_c, in float32.

    Returns:
        An iterator of `(start, stop, block)`, one per shard. `block[i, j]`, float32, is the score of training row
        `start + i` for target j.

    Raises:
        ValueError: features and targets have different numbers of columns.
        StoreError: the checkpoints are cut into shards differently.
        NonFiniteError: a score is not finite; names the training row.
    """
    rows = [one if isinstance(one, ScaledRows) else ScaledRows(one.float()) for one in preconditioned_targets]

    def product(checkpoint: int, shard: Shard) -> Tensor:
        coded, matrix = shard.coded, rows[checkpoint]
        if coded is not None:
            _check_columns(coded.columns, matrix.values.shape[1], checkpoint)
            return matrix.unscaled(matrix.for_codes(coded.form).product(coded))
        _check_columns(shard.grads.shape[1], matrix.values.shape[1], checkpoint)
        return matrix.unscaled(shard.grads.to(device=matrix.values.device, dtype=torch.float32) @ matrix.columns)

    return _checked(_average(_uploaded(checkpoints, rows), product))


def joined(blocks: Iterable[tuple[int, int, Tensor]], least: int) -> Iterator[tuple[int, int, Tensor]]:
    """Concatenate adjacent blocks of scores, so that whatever consumes them runs fewer and larger operations.

    Args:
        blocks: blocks `(start, stop, block)`, see [`score_blocks`].
        least: minimum number of scores in a block. The last block, and a block before a gap in the rows, may have
            fewer.

    Yields:
        The same scores, in the same order.
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
    checkpoints: Sequence[Iterable[Shard]], systems: Sequence[RidgeSystem]
) -> Iterator[tuple[int, int, Tensor]]:
    """Compute the score of every training row for itself.

        τ(z_i, z_i) = mean_c(x_ci (X_cᵀX_c + λ_c I)⁻¹ x_ciᵀ) · mean_c q_ci

    High values mark rows that the model fits only because of themselves, among them mislabelled ones. Training
    features are used on both sides, also for tasks whose target features are other gradients.

    Args:
        checkpoints: as in [`score_blocks`].
        systems: the factorized Gram matrix of every checkpoint.

    Returns:
        An iterator of `(start, stop, block)`, `block` of shape `(stop - start,)`, float32.

    Raises:
        StoreError, NonFiniteError: as in [`score_blocks`].
    """

    def product(checkpoint: int, shard: Shard) -> Tensor:
        return systems[checkpoint].quadratic(shard.grads, shard.start).unsqueeze(1)

    return ((start, stop, block.squeeze(1)) for start, stop, block in _checked(_average(checkpoints, product)))


def _uploaded(checkpoints: Sequence[Iterable[Shard]], rows: Sequence[ScaledRows]) -> list[Iterator[Shard]]:
    """Copy the shards of every checkpoint to the device of its targets, the next while one is multiplied."""
    return [uploaded_shards(one, matrix.values.device) for one, matrix in zip(checkpoints, rows, strict=True)]


def _checked(blocks: Iterable[tuple[int, int, Tensor]]) -> Iterator[tuple[int, int, Tensor]]:
    """Pass blocks on, and raise `NonFiniteError` at the first score that is not finite."""
    for start, stop, block in blocks:
        check_finite_rows(block, "score", start)
        yield start, stop, block


def _average(
    checkpoints: Sequence[Iterable[Shard]], product: Callable[[int, Shard], Tensor]
) -> Iterator[tuple[int, int, Tensor]]:
    """Average products and weights over the checkpoints, and multiply the two means, shard by shard.

    Args:
        checkpoints: as in [`score_blocks`].
        product: `product(checkpoint, shard)` gives the products of a shard, `(stop - start, m)`.
    """
    iterators = [iter(shards) for shards in checkpoints]
    count = len(iterators)
    for first in iterators[0]:
        start, stop = first.start, first.stop
        total = product(0, first)
        weight = first.out_to_loss.to(device=total.device, dtype=torch.float32)
        del first  # hold one shard at a time
        for checkpoint in range(1, count):
            shard = next(iterators[checkpoint], None)
            if shard is None or (shard.start, shard.stop) != (start, stop):
                found = "nothing" if shard is None else f"rows {shard.start} … {shard.stop}"
                raise StoreError(
                    f"Checkpoint number {checkpoint} has {found} where checkpoint number 0 has rows {start} … {stop}. "
                    "Expected the same shards in each. Featurize them with one shard size on one training dataset."
                )
            total += product(checkpoint, shard).to(total.device)
            weight = weight + shard.out_to_loss.to(weight)
            del shard
        if count > 1:
            total, weight = total.div_(count), weight / count
        yield start, stop, total.mul_(weight.unsqueeze(1)).float()
    for checkpoint in range(1, count):
        if (shard := next(iterators[checkpoint], None)) is not None:
            raise StoreError(
                f"Checkpoint number {checkpoint} has rows {shard.start} … {shard.stop}, which checkpoint number 0 "
                "lacks. Expected the same shards in each. Featurize all checkpoints on the same training dataset."
            )


def _check_columns(columns: int, k: int, checkpoint: int) -> None:
    if columns != k:
        raise ValueError(
            f"The features of checkpoint number {checkpoint} have {columns} columns, its targets {k}. Expected "
            "the same number. Project both with the same projector."
        )


def uploaded_shards(
    shards: Iterable[Shard], device: torch.device, engine: CopyEngine | None = None
) -> Iterator[Shard]:
    """Copy the features of shards to a device, each shard while the one before it is being processed.

    Codes are copied as they are, and decoded on the device.

    Args:
        shards: shards in order. One shard is read ahead of the one that was asked for.
        device: the device that the features are copied to. For a device without asynchronous copies (the CPU), shards
            pass through as they are, without reading ahead.
        engine: performs the copies, see [`hf_trak.runtime.transfers.uploaded`]. By default the engine of the device.

    Yields:
        The shards in the same order, `out_to_loss` where it was.
    """
    engine = engine or copy_engine(device)
    if engine is None:
        yield from shards
        return
    read: deque[Shard] = deque()

    def features() -> Iterator[Tensor]:
        for shard in shards:
            read.append(shard)
            yield shard.grads if shard.coded is None else _bytes_of(shard.coded)

    for tensor in uploaded(features(), device, engine):
        shard = read.popleft()
        features_there = tensor if shard.coded is None else _of_bytes(tensor, shard.coded)
        yield Shard(shard.start, shard.stop, features_there, shard.out_to_loss)
        del tensor, shard, features_there  # free this shard before waiting for the next one


def _bytes_of(coded: CodedRows) -> Tensor:
    """Join the scales and codes of rows to one tensor, uint8."""
    return torch.cat([coded.scale.contiguous().view(torch.uint8), *(block.flatten() for block in coded.blocks)])


def _of_bytes(tensor: Tensor, like: CodedRows) -> CodedRows:
    """Invert [`_bytes_of`] on a device, for rows of the same shapes."""
    sizes = [4 * len(like), *(block.numel() for block in like.blocks)]
    scale, *blocks = tensor.split(sizes)
    shaped = (part.view(block.shape) for part, block in zip(blocks, like.blocks, strict=True))
    return CodedRows(like.form, scale.view(torch.float32), tuple(shaped))
