"""Scores and Gram matrices of Arrow batches, for engines that have the rows of an index somewhere else.

Three pure functions: no files, no processes, no engine. `score_batch` is what each worker does, `merge_top` what comes
together at the end, and `gram_batch` gives the parts of XᵀX. Batches have the columns of `hf_trak.store.tables`:

    targets = attributor.features.precondition(attributor.features.question(eval_dataset)).rows[0]
    best = merge_top((score_batch(batch, targets, 20) for batch in batches), 20)

`targets` are A = t (XᵀX + λI)⁻¹ of the first checkpoint, a few kilobytes each, which can be pickled. Scores are those
of `hf_trak.scores.streaming`. They have the same bits as `attribute(..., top_k=20)` if each batch is a shard; codes do
for any division into batches, where the products of the CPU are exact integers.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import torch

from hf_trak.errors import StoreError
from hf_trak.runtime.checks import checked_int
from hf_trak.scores.streaming import ScaledRows, score_blocks
from hf_trak.scores.topk import TopK
from hf_trak.store.store import Gram
from hf_trak.store.tables import rows_of

TOP = pa.schema([("target", pa.int64()), ("row_id", pa.int64()), ("score", pa.float32())])
"""Columns of the best rows: number of the target, number of the training row, score."""

_HELD = 1 << 20
"""Rows of tables that are merged together."""


def score_batch(batch: pa.RecordBatch | pa.Table, targets: ScaledRows, k: int, largest: bool = True) -> pa.Table:
    """Find the best rows of a batch for each target.

    Args:
        batch (`pyarrow.RecordBatch` or `pyarrow.Table`):
            Rows of an index of one checkpoint, any of them in any order.
        targets (`ScaledRows`):
            m preconditioned targets, see the module.
        k (`int`):
            Rows to return for each target.
        largest (`bool`, *optional*, defaults to `True`):
            The highest scores, or the lowest.

    Returns:
        `pyarrow.Table` with the columns of `TOP`: m · min(k, rows) rows, by target, the best first. Of equal scores,
        that of the lower row is first.

    Raises:
        ValueError: `k` is below 1, or targets and rows have different numbers of columns.
        StoreError: the batch has not the columns of an index.
        NonFiniteError: a score is not finite.
    """
    k = checked_int(k, "k", 1, type_error=ValueError)
    ids, shard = rows_of(batch)
    if not len(ids):
        return TOP.empty_table()
    best = TopK(k, largest)
    for start, _, block in score_blocks([[shard]], [targets]):
        best.update(start - shard.start, block)  # places in the batch, in the order of the numbers of its rows
    scores, places = best.result()
    m, found = scores.shape
    columns = [np.repeat(np.arange(m), found), ids[places.numpy().reshape(-1)], scores.numpy().reshape(-1)]
    return pa.table(columns, schema=TOP)


def merge_top(tables: Iterable[pa.Table], k: int, largest: bool = True) -> pa.Table:
    """Merge the best rows of batches into the best rows of all.

    Args:
        tables (`Iterable[pyarrow.Table]`):
            Results of [`score_batch`] with the same `largest`, in any order, or of this function. They are read one
            at a time: memory holds about a million of their rows.
        k (`int`):
            Rows to return for each target.
        largest (`bool`, *optional*, defaults to `True`):
            The highest scores, or the lowest.

    Returns:
        `pyarrow.Table`: as [`score_batch`] returns it.

    Raises:
        ValueError: `k` is below 1.
        StoreError: a table has other columns, or a row is there twice for one target.
    """
    k = checked_int(k, "k", 1, type_error=ValueError)
    held, count, kept = [TOP.empty_table()], 0, 0
    for table in tables:
        if not table.schema.equals(TOP):
            raise StoreError(f"A table has the columns {table.schema.names}. Expected {TOP.names}, of `score_batch`.")
        held.append(table)
        count += table.num_rows
        if count > _HELD + kept:
            held = [_best(held, k, largest)]
            kept = count = held[0].num_rows
    return _best(held, k, largest)


def _best(tables: list[pa.Table], k: int, largest: bool) -> pa.Table:
    target, row, score = (column.to_numpy() for column in pa.concat_tables(tables).columns)
    order = np.lexsort((row, -score if largest else score, target))
    target, row, score = target[order], row[order], score[order]
    place = np.arange(len(target)) - np.searchsorted(target, target)  # within its target
    target, row, score = (column[place < k] for column in (target, row, score))
    pairs = np.lexsort((row, target))
    same = (np.diff(target[pairs]) == 0) & (np.diff(row[pairs]) == 0)
    if same.any():
        at = pairs[int(np.flatnonzero(same)[0])]
        raise StoreError(
            f"Row {row[at]} is there twice for target {target[at]}. Expected each row in one table. Leave out what a "
            "repeated task has returned once more."
        )
    return pa.table([target, row, score], schema=TOP)


def gram_batch(batch: pa.RecordBatch | pa.Table) -> Gram:
    """Compute XᵀX of the rows of a batch.

    Matrices, traces and numbers of rows of batches add up to those of all rows, up to the rounding of the sums.
    `RidgeSystem(matrix, ridge_lambda(trace, n, k, λ))` then solves for targets.

    Args:
        batch (`pyarrow.RecordBatch` or `pyarrow.Table`):
            As in [`score_batch`].

    Returns:
        [`~hf_trak.store.store.Gram`]: XᵀX `(k, k)` in float64, its trace, and the number of rows.

    Raises:
        StoreError: the batch has not the columns of an index.
    """
    ids, shard = rows_of(batch)
    wide = shard.grads.to(torch.float64)
    matrix = wide.T @ wide
    return Gram(matrix, float(matrix.diagonal().sum()), len(ids))
