"""Two passes: the first bytes of every row for a shortlist, and the whole rows of the shortlist for the scores.

The first columns of rotated features are an index of their own, with fewer columns. It has a ridge regression of its
own: the solution of the whole index, cut off after these columns, would weigh directions that they cannot tell apart
(on the banks of the benchmark of quality, the LDS of the first 512 bytes falls by half with it).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor

from hf_trak.runtime.processes import Processes
from hf_trak.scores.preconditioned import PreconditionedTargets
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, ScoreBlock, fixed_size_list
from hf_trak.scores.streaming import joined, score_blocks
from hf_trak.store.shard_set import Shard, ShardSet

_JOINED_SCORES = 1 << 20
"""Small shards of candidates are joined to blocks of at least this many scores."""


def shortlist(blocks: Iterator[ScoreBlock], files: ScoreFiles, count: int) -> Tensor:
    """List the rows that are among the first of any target, at either end.

    Args:
        blocks: scores of the first pass, of the rows that fall to this process.
        files: merges the lists of all processes.
        count: rows for each target and end.

    Returns:
        Row numbers, ascending, int64, in every process.
    """
    listed = files.columns(blocks, min(count, files.n_train), "target").with_format("numpy")
    found = [np.stack(listed[name][:]).reshape(-1) for name in (TOP_K_COLUMNS[0], TOP_K_COLUMNS[2])]
    return torch.from_numpy(np.unique(np.concatenate(found)))


def rescored(
    checkpoints: Sequence[ShardSet], targets: PreconditionedTargets, rows: Tensor, top_k: int, files: ScoreFiles
) -> Dataset:
    """Score some rows from their whole features, and keep the best and the worst of them for every target.

    Args:
        checkpoints: the training features of each checkpoint.
        targets: preconditioned targets.
        rows: row numbers, ascending.
        top_k: number of rows to keep, from either end.
        files: merges the lists of all processes; it counts the given rows as 0, 1, ….

    Returns:
        The columns of a top-k result.
    """
    blocks = joined(score_blocks(list(_pieces(checkpoints, rows, files.processes)), targets.rows), _JOINED_SCORES)
    found = files.columns(blocks, min(top_k, len(rows)), "target").with_format("numpy")
    columns = {name: np.stack(found[name][:]) for name in TOP_K_COLUMNS}
    for name in (TOP_K_COLUMNS[0], TOP_K_COLUMNS[2]):
        columns[name] = rows.numpy()[columns[name]]
    return Dataset(pa.table({name: fixed_size_list(values) for name, values in columns.items()}))


def _pieces(checkpoints: Sequence[ShardSet], rows: Tensor, processes: Processes) -> Iterator[Iterator[Shard]]:
    """Yield for each checkpoint the shards of the candidates that fall to this process, numbered 0, 1, …."""
    plan = checkpoints[0].plan
    by_shard: dict[int, list[int]] = {}
    for row in rows.tolist():
        by_shard.setdefault(plan.shard_of(row), []).append(row)
    indices = sorted(by_shard)
    mine = [indices[place] for place in processes.share(len(indices))]
    first = {index: int(torch.searchsorted(rows, by_shard[index][0])) for index in mine}
    wanted = {index: [row - plan.rows(index).start for row in by_shard[index]] for index in mine}
    for shards in checkpoints:
        yield (
            Shard(first[index], first[index] + len(q), features, q) for index, features, q in shards.rows_of(wanted)
        )
