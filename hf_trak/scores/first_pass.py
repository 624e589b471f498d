"""Two passes: the first bytes of every row for a shortlist, and the whole rows of the shortlist for the scores.

The first columns of rotated features are an index of their own, with fewer columns. It has a ridge regression of its
own: the solution of the whole index, cut off after these columns, would weigh directions that they cannot tell apart
(on the banks of the benchmark of quality, the LDS of the first 512 bytes falls by half with it).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor

from hf_trak.codes.coded_rows import CodedRows
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.shard_threads import map_shards
from hf_trak.scores.preconditioned import PreconditionedTargets
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, ScoreBlock, fixed_size_list
from hf_trak.scores.streaming import joined, score_blocks
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.shards import ShardPlan

_JOINED_SCORES = 1 << 20
"""Small parts are joined to blocks of at least this many scores."""

_ROWS = 1024
"""Candidates are read and multiplied so many at a time, and more by less than a shard. There may be few in a shard."""


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
    parts = list(_parts(checkpoints[0].plan, rows, files.processes))

    def scores_of(part: "_Part") -> list[ScoreBlock]:
        return list(score_blocks([[part.read(shards)] for shards in checkpoints], targets.rows))

    on_cpu = targets.rows[0].values.device.type == "cpu"
    blocks = chain.from_iterable(map_shards(scores_of, parts) if on_cpu else map(scores_of, parts))
    found = files.columns(joined(blocks, _JOINED_SCORES), min(top_k, len(rows)), "target").with_format("numpy")
    columns = {name: np.stack(found[name][:]) for name in TOP_K_COLUMNS}
    for name in (TOP_K_COLUMNS[0], TOP_K_COLUMNS[2]):
        columns[name] = rows.numpy()[columns[name]]
    return Dataset(pa.table({name: fixed_size_list(values) for name, values in columns.items()}))


@dataclass(frozen=True)
class _Part:
    """Candidates that are read and scored together.

    Attributes:
        start: number of the first of them among all candidates.
        wanted: by index of a shard, their rows, counted from its first one.
    """

    start: int
    wanted: Mapping[int, Sequence[int]]

    def read(self, shards: ShardSet) -> Shard:
        """Read their features of a checkpoint, as a shard whose rows are numbered as candidates are."""
        codes, q = [], []
        for _, features, weights in shards.rows_of(self.wanted):
            assert isinstance(features, CodedRows)  # a first pass is one over codes
            codes.append(features)
            q.append(weights)
        blocks = zip(*(one.blocks for one in codes), strict=True)
        scale = torch.cat([one.scale for one in codes])
        joint = CodedRows(codes[0].form, scale, tuple(torch.cat(block) for block in blocks))
        return Shard(self.start, self.start + len(joint), joint, torch.cat(q))


def _parts(plan: ShardPlan, rows: Tensor, processes: Processes) -> Iterator[_Part]:
    """Divide the candidates in the shards that fall to this process into parts of about [`_ROWS`] rows."""
    bounds = torch.tensor([*(plan.rows(index).start for index in range(len(plan))), plan.n_rows])
    places = torch.searchsorted(rows, bounds).tolist()
    start, count = 0, 0
    wanted: dict[int, list[int]] = {}
    for index in processes.share(len(plan)):
        first, last = places[index], places[index + 1]
        if first < last:
            start = start if wanted else first
            wanted[index] = (rows[first:last] - bounds[index]).tolist()
            count += last - first
        if count >= _ROWS:
            yield _Part(start, wanted)
            wanted, count = {}, 0
    if wanted:
        yield _Part(start, wanted)
