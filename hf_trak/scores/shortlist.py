"""Shortlists: which rows of an index are worth exact scores.

A shortlist has another task than the scores of an index: it has to hold the best rows under the exact scores that
come after it. The ridge regression finds some of these, and plain inner products of the same features find others,
since the ridge takes out of gradients what many rows share, and exact curvature keeps a part of it. Merged by their
ranks, the two lists hold more of the best rows than that of the ridge regression
alone (benchmarks/pages/shortlist.md).

Lists are merged by reciprocal rank fusion (Cormack et al. 2009, Reciprocal rank fusion outperforms Condorcet and
individual rank learning methods, SIGIR), which takes lists of any origin, such as that of a text search.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from numpy.typing import ArrayLike
from torch import Tensor

from hf_trak.runtime.processes import Processes, map_shards
from hf_trak.scores.groups import RowGroups, target_features
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, ScoreBlock, fixed_size_list
from hf_trak.scores.streaming import ScaledRows, joined, score_blocks
from hf_trak.store.codes import CodedRows
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.shards import ShardPlan


@dataclass(frozen=True)
class PreconditionedTargets:
    """The rows A_c = t_c (X_cᵀX_c + λ_c I)⁻¹ of m targets, or of the means of m groups, for every checkpoint c.

    Attributes:
        features (`Sequence[ShardSet]`):
            The features t_c of the targets, `(targets, k)` for each checkpoint.
        rows (`Sequence[ScaledRows]`):
            A_c, `(m, k)` for each checkpoint.
    """

    features: Sequence[ShardSet]
    rows: Sequence[ScaledRows]


RANK_OFFSET = 60

"""The c in Σ 1 / (c + rank), ranks from 1; that of the paper."""


def with_plain_targets(
    targets: PreconditionedTargets, device: torch.device, groups: RowGroups | None = None
) -> list[ScaledRows]:
    """Put the features of targets, without the ridge regression, below their preconditioned ones.

    Both are then scored in one pass over the rows of an index.

    Args:
        targets (`PreconditionedTargets`):
            m targets.
        device (`torch.device`):
            The device of the result, that of the scorer.
        groups (`RowGroups`, *optional*):
            Groups of targets, which are scored by their mean.

    Returns:
        `list[ScaledRows]`: A_c, then t_c, of every checkpoint c: `(2m, k)`, for `Scorer.blocks`.
    """
    found = []
    for shards, preconditioned in zip(targets.features, targets.rows, strict=True):
        plain = ScaledRows.of(target_features(shards, groups).double())
        values = torch.cat([one.values.to(device) for one in (preconditioned, plain)])
        found.append(ScaledRows(values, torch.cat([_exponents(one) for one in (preconditioned, plain)])))
    return found


def _exponents(rows: ScaledRows) -> Tensor:
    zeros = torch.zeros(len(rows.values), dtype=torch.int32)
    return zeros if rows.exponents is None else rows.exponents.to(zeros)


def fused_shortlist(listed: Sequence[Dataset], count: int) -> np.ndarray:
    """Merge several results of the same targets into one shortlist.

    Args:
        listed (`Sequence[Dataset]`):
            The columns of top-k results, of at least `count` rows together for each target and end.
        count (`int`):
            Number of rows for each target and end.

    Returns:
        `numpy.ndarray`: numbers of the rows that are among the first of any target at either end, ascending, int64.
    """
    ends = []
    for name in (TOP_K_COLUMNS[0], TOP_K_COLUMNS[2]):
        tables = [np.stack(one.with_format("numpy")[name][:]) for one in listed]
        ends.append(fused_ranks(tables, count).reshape(-1))
    return np.unique(np.concatenate(ends))


def fused_ranks(lists: Sequence[ArrayLike], count: int) -> np.ndarray:
    """Merge lists of rows by their ranks, for every target: Σ over lists of 1 / (60 + rank), highest first.

    A row that a list lacks gets nothing from it. Of equal sums the lower row number comes first.

    Args:
        lists (`Sequence[ArrayLike]`):
            Row numbers `(m, length)`, best first, each row at most once; lengths may differ.
        count (`int`):
            Number of rows to return for each target.

    Returns:
        `numpy.ndarray` of shape `(m, count)`: row numbers, int64.
    """
    return np.stack([_fused(ranked, count) for ranked in zip(*map(np.asarray, lists), strict=True)])


def _fused(ranked: Sequence[np.ndarray], count: int) -> np.ndarray:
    known, places = np.unique(np.concatenate(ranked), return_inverse=True)
    weights = np.concatenate([1 / (RANK_OFFSET + 1 + np.arange(len(one))) for one in ranked])
    sums = np.bincount(places, weights, len(known))
    found: np.ndarray = known[np.lexsort((known, -sums))[:count]]
    return found


_JOINED_SCORES = 1 << 20

"""Small parts are joined to blocks of at least this many scores."""


_ROWS = 1024

"""Number of candidates that are read and multiplied at a time. It may be exceeded by less than a shard, since a shard
may have few of them."""


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
