"""The best rows and XᵀX of a feature store by an engine: the bits of `attribute`, and of the store's Gram matrices.

    attributor = TrakAttributor.from_pretrained("s3://bucket/tables", model)
    attributor.features.scored_by = RayEngine(num_cpus=1)
    scored = attributor.attribute(eval_dataset, top_k=20)

Every process of the engine reads the shards that fall to it, of tables or of a directory that all see.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hf_trak.engines.engine import MOST_PARTS, PART, Engine, counted
from hf_trak.scores.gram import GramSum, column_squares
from hf_trak.scores.scorer import part_blocks
from hf_trak.scores.streaming import ScaledRows
from hf_trak.scores.topk import TopK
from hf_trak.store.shard_set import ShardSet

_RESULT = "result"


def best_of_shards(
    engine: Engine, shards: Sequence[ShardSet], targets: Sequence[ScaledRows], k: int
) -> tuple[TopK, TopK]:
    """Find the best rows of a store for each target, from either end, on the CPUs of an engine.

    Args:
        engine ([`~hf_trak.engines.engine.Engine`]):
            Where.
        shards (`Sequence[ShardSet]`):
            The features of every checkpoint.
        targets (`Sequence[ScaledRows]`):
            m preconditioned targets of every checkpoint.
        k (`int`):
            Rows to keep for each target.

    Returns:
        `tuple[TopK, TopK]`: the highest scores and the lowest.

    Raises:
        StoreError: a shard is damaged, or the engine has failed or has not returned each part once.
    """
    moved = [ScaledRows(one.values.cpu(), one.exponents) for one in targets]
    function = partial(_extremes, list(shards), moved, k)
    ends = TopK(k), TopK(k, largest=False)
    for keys in _results(engine, function, len(shards[0]), torch.int64):
        for end, found in zip(ends, keys.view(2, len(moved[0].values), -1), strict=True):
            end.merge(found)
    return ends


def gram_of_shards(engine: Engine, shards: ShardSet) -> Tensor:
    """Compute XᵀX of a checkpoint as [`~hf_trak.scores.scorer.Scorer.gram`] does. All rows are read twice.

    Args:
        engine: where.
        shards: the features.

    Returns:
        XᵀX `(k, k)`, float64.

    Raises:
        StoreError: as [`best_of_shards`].
    """
    count, k = len(shards), shards.width
    largest = reduce(torch.maximum, _results(engine, partial(_squares, shards), count, torch.float64))
    total = GramSum(largest, count)
    for integers in _results(engine, partial(_integers, shards, largest), count, torch.float64):
        total.integers += integers.view(k, k)
    return total.result()


def _results(
    engine: Engine, function: Callable[[Sequence[int]], Tensor], shards: int, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield what a function returns for parts of the shards, in any order, flat."""
    size = -(-shards // MOST_PARTS)
    first = np.arange(0, shards, size)
    parts = pa.table({PART: np.arange(len(first)), "first": first, "stop": np.minimum(first + size, shards)})
    for table in counted(engine, partial(_applied, function), parts, np.ones(len(first), np.int64)):
        for value in table.column(_RESULT):
            yield torch.frombuffer(bytearray(value.as_buffer()), dtype=dtype)


def _applied(function: Callable[[Sequence[int]], Tensor], parts: pa.Table) -> pa.Table:
    found = [function(range(row["first"], row["stop"])).numpy().tobytes() for row in parts.to_pylist()]
    return pa.table({PART: parts.column(PART), _RESULT: pa.array(found, pa.large_binary())})


def _extremes(shards: list[ShardSet], targets: list[ScaledRows], k: int, indices: Sequence[int]) -> Tensor:
    """Return the packed scores and rows from either end, `(2, m, min(k, rows))`."""
    ends = TopK(k), TopK(k, largest=False)
    for start, _, block in part_blocks(shards, indices, targets, mapped=False):
        for end in ends:
            end.update(start, block)
    return torch.stack([end.keys() for end in ends])


def _squares(shards: ShardSet, indices: Sequence[int]) -> Tensor:
    """Return the largest squared norms of columns within a shard, `(k,)`."""
    return reduce(torch.maximum, (column_squares(one.grads, one.start) for one in shards.part(indices, mapped=False)))


def _integers(shards: ShardSet, largest: Tensor, indices: Sequence[int]) -> Tensor:
    """Return the integers of XᵀX, `(k, k)`."""
    total = GramSum(largest, len(shards))
    for shard in shards.part(indices, mapped=False):
        total.add(shard.grads)
    return total.integers
