"""Exact scores of a model that is divided over processes: every block of its curvature has one owner among them.

The owner of a block alone loads its curvature, preconditions that block of the targets, and multiplies the gradients
of all processes' rows with it. Beside the scores, this is on disk, under the same names for any number of processes:

    preconditioned-by-block-<shard>              (m, 3): what is known of every target; written last
    preconditioned-by-block-matrix-<i>-<shard>   Kronecker block i of the targets, `(m, numbers)`
    preconditioned-by-block-numbers-<i>-<shard>  diagonal block i
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trak.curvature.blocks import CurvatureBlocks
from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.maps import GradientMap
from hf_trak.curvature.owner_maps import BlockOwners, OwnerMap
from hf_trak.curvature.target_forms import LowRankForm, low_rank_numel
from hf_trak.featurize.exact_blocks import zero_target
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.scores.groups import RowGroups
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import ShardPlan

logger = logging.getLogger(__name__)


class OwnedPasses:
    """Passes in which every process computes with its own blocks. All processes call the methods together."""

    def __init__(self, model: FeaturizedModel) -> None:
        """
        Args:
            model: the model, which is divided over processes.
        """
        self._model = model
        self._group: Any = None

    def owners(self, blocks: CurvatureBlocks) -> BlockOwners:
        """Divide the blocks over the processes."""
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        processes = self._model.processes
        return BlockOwners(blocks, processes.process_index, processes.num_processes, self._group, True)

    def chosen(self, blocks: CurvatureBlocks) -> tuple[frozenset[int], frozenset[int]]:
        """Choose the Kronecker and the diagonal blocks of this process. It exchanges nothing."""
        processes = self._model.processes
        owners = BlockOwners(blocks, processes.process_index, processes.num_processes, None, True)
        return owners.mine, owners.my_numbers

    def map(self, own: GradientMap, curvature: Curvature) -> OwnerMap:
        """Make the map whose part of this process' blocks is `own`."""
        lockstep = self._model.featurizer(projector=own).lockstep
        return OwnerMap(own, curvature, self.owners(curvature.blocks), lockstep, self._model.device)

    def width(self, blocks: CurvatureBlocks, rank: int | None) -> int:
        """Return how many numbers of a target the process keeps that keeps most, in matrices of a rank or whole."""
        owners, widths = self.owners(blocks), [1] * self._model.processes.num_processes
        for index, one in enumerate(blocks.kronecker):
            widths[owners.of(index)] += one.numel if rank is None else low_rank_numel(*one.shape, rank)
        for index, lone in enumerate(blocks.diagonal):
            widths[owners.of_numbers(index)] += lone.numel
        return max(widths)


def own_form(curvature: Curvature, damping: float, rank: int | None) -> LowRankForm:
    """Return the form of the targets' blocks that this process has: matrices of a rank, or whole."""
    largest = max((max(one.shape) for one in curvature.blocks.kronecker), default=1)
    return LowRankForm(curvature, damping, largest if rank is None else rank)


def whole_width(blocks: CurvatureBlocks, rank: int | None) -> int:
    """Return how many numbers all processes together keep of a target."""
    if rank is None:
        return blocks.numel
    return sum(low_rank_numel(*one.shape, rank) for one in blocks.kronecker) + sum(
        one.numel for one in blocks.diagonal
    )


class TargetBlocks:
    """The files of preconditioned targets, block by block. What comes of an unfinished shard is in memory."""

    def __init__(self, plan: ShardPlan, dtype: torch.dtype, shards: Callable[[str, int], ShardSet]) -> None:
        """
        Args:
            plan: the division of the targets into shards.
            dtype: the dtype in which they are kept.
            shards: returns the shards of a block by its name and the numbers that are kept of it.
        """
        self._plan = plan
        self._dtype = dtype
        self._shards = shards
        self._unfinished: dict[int, dict[str, Tensor]] = {}
        self._counts: dict[int, int] = {}

    def forget_incomplete(self, summary: ShardSet, blocks: CurvatureBlocks) -> None:
        """Remove what is known of the targets of a shard where a file of theirs is missing, so that they are computed.

        Args:
            summary: what is known of every target.
            blocks: all blocks of the curvature.
        """
        names = [f"matrix-{index:05d}" for index in range(len(blocks.kronecker))]
        names += [f"numbers-{index:05d}" for index in range(len(blocks.diagonal))]
        for index in range(len(summary)):
            if summary.exists(index) and not all(self._shards(name, 1).exists(index) for name in names):
                summary.path(index).unlink()

    def keep(self, name: str, rows: Sequence[int], values: Tensor) -> Tensor:
        """Keep a block of some targets, all of one shard, `(B, numel)`, and return it as it is kept."""
        index = self._plan.shard_of(rows[0])
        shard, kept = self._plan.rows(index), values.to("cpu", self._dtype)
        places = torch.tensor(rows) - shard.start
        if len(rows) == len(shard):
            ordered = torch.empty_like(kept)
            ordered[places] = kept
            self._write(name, index, ordered)
        else:
            blocks = self._unfinished.setdefault(index, {})
            if name not in blocks:
                blocks[name] = torch.zeros(len(shard), kept.shape[1], dtype=self._dtype)
            blocks[name][places] = kept
        return kept

    def finish(self, rows: Sequence[int]) -> None:
        """Write a shard when all of its targets have come."""
        index = self._plan.shard_of(rows[0])
        count = self._counts.pop(index, 0) + len(rows)
        if count < len(self._plan.rows(index)):
            self._counts[index] = count
            return
        for name, values in self._unfinished.pop(index, {}).items():
            self._write(name, index, values)

    def _write(self, name: str, index: int, values: Tensor) -> None:
        self._shards(name, values.shape[1]).write(index, values, torch.zeros(len(values)))

    def read(self, form: LowRankForm, columns: range) -> Tensor:
        """Read the blocks of some targets that this process has.

        Args:
            form: their form.
            columns: numbers of the targets.

        Returns:
            `(len(columns), form.width)`.

        Raises:
            StoreError: a file is missing or damaged.
        """
        first, last = self._plan.shard_of(columns.start), self._plan.shard_of(columns.stop - 1)
        rows = torch.zeros(len(columns), form.width, dtype=self._dtype)
        for name, place in form.places().items():
            for shard in self._shards(name, place.numel).part(range(first, last + 1)):
                low, high = max(columns.start, shard.start), min(columns.stop, shard.stop)
                part = shard.grads[low - shard.start : high - shard.start]
                rows[low - columns.start : high - columns.start, place.start : place.start + place.numel] = part
        return rows

    def means(self, form: LowRankForm, groups: RowGroups) -> Tensor:
        """Average the blocks that this process has over groups of targets: `(G, width of the whole form)`, float64."""

        def parts() -> Iterator[tuple[int, Tensor]]:
            for index in range(len(self._plan)):
                rows = self._plan.rows(index)
                yield rows.start, form.whole_rows(self.read(form, rows))

        return groups.means(parts())


def check_targets(summary: ShardSet, rank: int | None) -> None:
    """Check what is known of preconditioned targets, and log how well matrices of a rank keep them.

    Raises:
        ValueError: a target is zero.
        StoreError: a file is missing or damaged.
    """
    errors = []
    for shard in summary:
        counts, squares, lost = shard.grads.double().unbind(1)
        if bool((counts == 0).any()):
            raise zero_target(shard.start + int((counts == 0).nonzero()[0]))
        errors.append((lost / squares.clamp_min(torch.finfo(torch.float32).tiny)).sqrt())
    if rank is not None:
        found = torch.cat(errors)
        logger.info(
            "Matrices of rank %d keep targets with a relative error of %.2g in the mean, %.2g at most.",
            rank, float(found.mean()), float(found.max()),
        )  # fmt: skip


def begun_with(targets: ShardSet, prefix: str) -> int | None:
    """Return how many targets at a time an earlier run has scored, with any number of processes; `None` without one.

    Args:
        targets: the targets, in whose directory scores are.
        prefix: the beginning of the names of these scores.
    """
    pattern = re.compile(re.escape(prefix) + r"-000000-(\d+)-\d+-of-\d+\.safetensors")
    found = [pattern.fullmatch(path.name) for path in targets.directory.glob(f"{prefix}-000000-*")]
    return max((int(one[1]) for one in found if one), default=None)
