"""Preconditioned targets and exact scores, read from their files."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_trak.config import TrakConfig
from hf_trak.curvature.maps import HybridSystem
from hf_trak.curvature.target_forms import LowRankForm, TargetForm
from hf_trak.scores.scored_dataset import ScoreBlock
from hf_trak.store.shard_set import Shard, ShardSet

logger = logging.getLogger(__name__)

TARGET_SHARD_BYTES = 2**28
"""Bytes of a file of preconditioned targets, or of as much of it as is turned into whole gradients at a time."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def target_dtype(args: TrakConfig) -> torch.dtype:
    """Return the dtype in which preconditioned targets are kept."""
    return _DTYPES[args.curvature.dtype]


def target_rank(args: TrakConfig) -> int | None:
    """Return the rank of the matrices in which preconditioned targets are kept; `None` for whole ones."""
    return args.curvature.rank


def target_rows(targets: ShardSet, columns: range, form: TargetForm) -> Tensor:
    """Read preconditioned targets in the form and the dtype that they are kept in.

    Args:
        targets: the targets.
        columns: numbers of those to read.
        form: their form.

    Returns:
        `(len(columns), width)`.

    Raises:
        ValueError: a target is zero.
        StoreError: a file is missing or damaged.
    """
    first, last = targets.plan.shard_of(columns.start), targets.plan.shard_of(columns.stop - 1)
    rows = torch.empty(len(columns), targets.width, dtype=targets.dtype)
    for shard in _nonzero(targets, form, range(first, last + 1)):
        low, high = max(columns.start, shard.start), min(columns.stop, shard.stop)
        rows[low - columns.start : high - columns.start] = shard.grads[low - shard.start : high - shard.start]
    if isinstance(form, LowRankForm):
        errors = form.errors(rows)
        logger.info(
            "Matrices of rank %d keep targets %d to %d with a relative error of %.2g in the mean, %.2g at most.",
            form.rank, columns.start, columns.stop - 1, float(errors.mean()), float(errors.max()),
        )  # fmt: skip
    return rows


def whole_targets(targets: ShardSet, form: TargetForm) -> Iterator[tuple[int, Tensor]]:
    """Read preconditioned targets, and turn them into V: yield `(number of the first, (n, P))`, float32.

    Raises as [`target_rows`].
    """
    step = max(1, TARGET_SHARD_BYTES // (4 * form.curvature.numel))
    for shard in _nonzero(targets, form, range(len(targets))):
        for low in range(0, len(shard.grads), step):
            yield shard.start + low, form.whole(shard.grads[low : low + step])


def _nonzero(targets: ShardSet, form: TargetForm, indices: Sequence[int]) -> Iterator[Shard]:
    """Read shards of preconditioned targets. None may be zero. Raises as [`target_rows`]."""
    for shard in targets.part(indices):
        if bool((zero := form.zero(shard.grads)).any()):
            raise zero_target(shard.start + int(zero.nonzero()[0]))
        yield shard


def zero_target(target: int) -> ValueError:
    """Return the error that says that a target is zero."""
    return ValueError(
        f"Target {target} has the gradient zero under the curvature, so that every score of it would be 0: its own is "
        "zero, or those of the training rows are, wherever it is not. Expected an output that depends on parameters "
        "that the training rows reach. Leave that target out, or look at labels and at `grad_wrt`."
    )


class CheckpointScores:
    """The scores of one checkpoint, read shard by shard."""

    def __init__(self, chunks: list[ShardSet], whitened: ShardSet | None, ridge: float) -> None:
        self.chunks = chunks
        self.whitened = whitened
        self._ridge = ridge
        self._system: HybridSystem | None = None

    def products(self, index: int) -> tuple[int, Tensor]:
        """Read the products with the targets of one shard of training rows: `(start, (rows, m))`."""
        parts = [chunk.read(index) for chunk in self.chunks]
        return parts[0].start, torch.cat([part.grads for part in parts], 1)

    def block(self, index: int) -> tuple[int, Tensor]:
        """Compute the scores of one shard of training rows: `(start, (rows, m))`."""
        start, products = self.products(index)
        weights = self.chunks[0].read(index).out_to_loss.unsqueeze(1)
        if self.whitened is None:
            return start, products * weights
        if self._system is None:
            whitened, shards = self.whitened, range(len(self.whitened))
            self._system = HybridSystem(
                whitened.plan.n_rows,
                lambda: ((shard.start, shard.grads) for shard in whitened),
                lambda: map(self.products, shards),
                self._ridge,
            )
        return start, self._system.apply(start, self.whitened.read(index).grads, products) * weights


def mean_blocks(parts: Sequence[CheckpointScores], shards: Sequence[int]) -> Iterator[ScoreBlock]:
    """Average the scores of all checkpoints, shard by shard."""
    for index in shards:
        start, total = parts[0].block(index)
        for one in parts[1:]:
            total = total + one.block(index)[1]
        yield start, start + len(total), total / len(parts)
