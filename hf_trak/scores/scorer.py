"""Scores of a feature store, computed by all processes together.

Each process reads its own contiguous part of the shards. Processes exchange only one Gram matrix per checkpoint, the
preconditioned targets `(m, k)`, and top-k lists. All results have the same bits for any number of processes, provided
that the type of device and the number of threads are the same.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_trak.config import SolverName
from hf_trak.errors import IncompleteStoreError
from hf_trak.runtime.checks import check_finite_rows
from hf_trak.runtime.processes import Processes, map_shards
from hf_trak.runtime.progress import say
from hf_trak.scores.gram import GramSum, column_squares
from hf_trak.scores.gram_sample import SAMPLE, Reduction, sample_size, sampled_gram
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from hf_trak.scores.scored_dataset import ScoreBlock
from hf_trak.scores.solvers import SolverReport, Solvers
from hf_trak.scores.streaming import ScaledRows, joined, score_blocks, self_influence_blocks
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.store import FeatureStore, Gram

logger = logging.getLogger(__name__)

_BLOCK_SCORES = 1 << 24
"""Number of scores computed at a time, unless a single training row has more."""

_SHARD_SCORES = 1 << 22
"""Shards with at most this many scores are multiplied in parallel. A larger product uses all cores by itself."""

SCORES_VERSION = 2
"""Raised whenever the scores of the same features change. It is part of the identity of a result."""

_JOINED_SCORES = 1 << 20
"""Small shards are joined to blocks of at least this many scores."""


@dataclass(frozen=True)
class PlannedScores:
    """Scores that are computed when their blocks are iterated over.

    Attributes:
        identity (`dict`):
            Everything that the numbers depend on, as plain JSON. Results of equal identities have equal bits.
        blocks (`Iterator[ScoreBlock]`):
            The scores, see [`score_blocks`].
        warnings (`tuple[str, ...]`, *optional*):
            What to know before the numbers are trusted, with the remedy. The log has it, too.
    """

    identity: dict[str, Any]
    blocks: Iterator[ScoreBlock]
    warnings: tuple[str, ...] = ()


class Scorer:
    """Computes Gram matrices, ridge systems and scores of one feature store.

    All processes have to call its methods in the same order, except for [`~Scorer.blocks`].
    """

    def __init__(
        self,
        store: FeatureStore,
        processes: Processes,
        device: torch.device,
        lambda_relative: float,
        solver: SolverName = "auto",
        solver_rank: int | None = None,
    ) -> None:
        """
        Args:
            store: the features.
            processes: the processes that share the shards.
            device: products are computed on this device if it is a CUDA device, and on the CPU otherwise.
            lambda_relative: relative ridge, see [`ridge_lambda`].
            solver: how the ridge regression is solved, see `hf_trak.scores.solvers`.
            solver_rank: rank of `"low_rank"`; `None` for the default.
        """
        self.store = store
        self.processes = processes
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self.lambda_relative = lambda_relative
        self.n, self.k = store.config["train_size"], store.config["proj_dim"]
        self.solvers = Solvers(store, processes, self.device, lambda_relative, solver, solver_rank)

    def ensemble(self, model_ids: Sequence[int] | None) -> list[int]:
        """Check the checkpoints to average over.

        Args:
            model_ids: ids of checkpoints. `None` takes all in the store.

        Returns:
            The ids. Each has all its shards.

        Raises:
            IncompleteStoreError: a checkpoint is not in the store or lacks shards, or there is none.
        """
        return self.processes.broadcast_from_main(lambda: self._checked_ensemble(model_ids))

    def _checked_ensemble(self, model_ids: Sequence[int] | None) -> list[int]:
        known = self.store.model_ids
        ids = known if model_ids is None else list(model_ids)
        directory = str(self.store.output_dir)
        if not known:
            raise IncompleteStoreError(
                f"Nothing is featurized in {directory!r}. Expected the features of at least one checkpoint. Call "
                "`featurize()` first, or set `output_dir` to the directory where it was called."
            )
        if not ids or set(ids) - set(known) or len(set(ids)) < len(ids):
            raise IncompleteStoreError(
                f"`checkpoints` has the ids {ids}; featurized in {directory!r} are {known}. Expected one or more of "
                "the latter, each once. Call `featurize()` for checkpoints that are missing."
            )
        for model_id in ids:
            shards = self.store.train(model_id)
            if left := [index for index in range(len(shards)) if not shards.exists(index)]:
                raise IncompleteStoreError(
                    f"{len(left)} shards of model_id {model_id} are missing in {directory!r} (first: "
                    f"{shards.path(left[0])}). Expected all shards of every checkpoint. Call `featurize()` with the "
                    "same checkpoints to finish them, or leave this id out of `checkpoints`."
                )
        return ids

    def prepare(self, model_id: int) -> None:
        """Compute and save what the solver of a checkpoint keeps in the store, unless it is there: XᵀX, or XXᵀ, …

        Raises:
            ValueError: `solver_rank` is larger than min(n, k).
            IncompleteStoreError: shards are missing.
            StoreError: a shard or a saved file is damaged.
            NonFiniteError: a feature is not finite; names its row.
        """
        if self.solvers.choice(model_id).kind == "primal":
            self.gram(model_id)
        else:
            self.solvers.prepare(model_id)

    def report(self, model_id: int) -> SolverReport:
        """Say which solver a checkpoint has, its λ, its condition number, and what is known of its error.

        Raises:
            As [`~Scorer.prepare`], and SingularGramError: the ridge is too small for these features.
        """
        choice = self.solvers.choice(model_id)
        if choice.kind != "primal":
            return SolverReport.of(choice, self.solvers.make(model_id))
        gram = self.gram(model_id)

        def describe() -> dict[str, Any]:
            assert gram is not None  # this runs in the main process only
            return SolverReport.of(choice, self.system(model_id, gram)).to_dict()

        return SolverReport(**self.processes.broadcast_from_main(describe))

    def gram(self, model_id: int) -> Gram | None:
        """Read XᵀX of a checkpoint from the store. If it is not there, compute it from the shards and write it.

        Returns:
            The matrix `(k, k)` with its trace in the main process, `None` in the others.

        Raises:
            IncompleteStoreError: shards are missing.
            StoreError: a shard or the matrix is damaged.
            NonFiniteError: a feature is not finite; names its row.
        """
        found: Gram | None = None

        def look() -> bool:
            nonlocal found
            found = self.store.read_gram(model_id)
            return found is not None

        if not self.processes.broadcast_from_main(look):
            size = sample_size(self.n, self.k)
            if size is None:
                matrix = self._sum_gram(model_id)
                summed = Gram(matrix, float(matrix.diagonal().sum()), self.n)
            else:
                summed = sampled_gram(self.store, model_id, size, self._over, self.device)

            def keep() -> None:
                nonlocal found
                self.store.write_gram(model_id, summed.matrix, self.n, summed.sample, summed.spread)
                found = self.store.read_gram(model_id)

            self.processes.broadcast_from_main(keep)
        return found

    def _over(self, function: Callable[[Sequence[int]], Tensor], reduction: Reduction) -> Tensor:
        """Call a function with the shards of this process, and add up the results of all, or take the largest."""
        with self.processes.all_or_none():
            found = function(self.processes.share(len(self.store.train(self.store.model_ids[0]))))
        return self.processes.add(found) if reduction is torch.add else self.processes.maximum(found)

    def _sum_gram(self, model_id: int) -> Tensor:
        """Sum XᵀX over the shards of all processes, in two passes: the first finds the scale, see [`GramSum`]."""
        shards = self.store.train(model_id)
        mine = self.processes.share(len(shards))
        largest = torch.zeros(self.k, dtype=torch.float64)
        with self.processes.all_or_none():
            for shard in shards.part(mine):
                torch.maximum(largest, column_squares(shard.grads, shard.start), out=largest)
        total = GramSum(self.processes.maximum(largest).to(self.device), len(shards))
        with self.processes.all_or_none():
            for shard in shards.part(mine):
                total.add(shard.grads)
        total.integers = self.processes.add(total.integers.cpu()).to(self.device)
        return total.result().cpu()

    def precondition(self, model_id: int, targets: Callable[[], Tensor], m: int) -> ScaledRows:
        """Compute the preconditioned targets A = t (XᵀX + λI)⁻¹ of one checkpoint.

        With XᵀX the main process does so alone. Other solvers read the features again, in all processes.

        Args:
            model_id: the checkpoint.
            targets: returns t `(m, k)`. Called in the main process.
            m: number of targets.

        Returns:
            A `(m, k)` with scaled float32 rows, in every process.

        Raises:
            SingularGramError: the ridge is too small for these features.
        """
        if self.solvers.choice(model_id).kind == "primal":
            solved = self._solve_primal(model_id, targets, m)
        else:
            solver = self.solvers.make(model_id)
            given = self.processes.broadcast_tensor_from_main(targets, (m, self.k))
            solved = self.solvers.solve(solver, given)
        rows = ScaledRows.of(solved)
        return ScaledRows(rows.values.to(self.device), rows.exponents)

    def _solve_primal(self, model_id: int, targets: Callable[[], Tensor], m: int) -> Tensor:
        gram = self.gram(model_id)

        def solve() -> Tensor:
            assert gram is not None  # this runs in the main process only
            return self.system(model_id, gram).solve(targets())

        return self.processes.broadcast_tensor_from_main(solve, (m, self.k))

    def system(self, model_id: int, gram: Gram) -> RidgeSystem:
        """Factorize XᵀX + λI of a checkpoint, and log λ, the condition number, and the error of a sample.

        Raises:
            SingularGramError: the ridge is too small for these features.
        """
        lam = ridge_lambda(gram.trace, self.n, self.k, self.lambda_relative)
        system = RidgeSystem(gram.matrix, lam, gram.spread)
        logger.info(
            "Checkpoint %d: λ = %.6g, condition number of XᵀX + λI about %.2e.", model_id, lam, system.condition
        )
        if gram.sample is not None:
            say(
                logger,
                f"Checkpoint {model_id}: XᵀX is estimated from {gram.sample:,} of {self.n:,} rows, which changes the "
                f"score of a row for a target by at most about {system.error:.2g} times the geometric mean of their "
                "self-influences.",
            )
        return system

    def blocks(
        self, model_ids: Sequence[int], targets: Sequence[Tensor | ScaledRows], everywhere: bool = False
    ) -> Iterator[ScoreBlock]:
        """Compute the scores of training rows, in order, block by block.

        Args:
            model_ids: the checkpoints.
            targets: preconditioned targets `(m, k)` of every checkpoint.
            everywhere: compute all rows in every process, instead of this process's share.

        Returns:
            An iterator of blocks `(start, stop, block)`, see [`score_blocks`].
        """
        shards = [self.store.train(model_id) for model_id in model_ids]
        count, m, rows = len(shards[0]), _values(targets[0]).shape[0], shards[0].plan.shard_size
        mine = range(count) if everywhere else self.processes.share(count)
        # On a GPU, or with many targets, products run one after the other.
        if self.device.type != "cpu" or m * rows > _SHARD_SCORES:
            return part_blocks(shards, mine, targets)

        # With few targets on the CPU, a thread per core multiplies small groups of shards.
        def scores_of(indices: Sequence[int]) -> list[ScoreBlock]:
            return list(part_blocks(shards, indices, targets, mapped=False))

        together = max(1, min(_JOINED_SCORES // (m * rows), len(mine) // (4 * torch.get_num_threads())))
        groups = (mine[first : first + together] for first in range(0, len(mine), together))
        return chain.from_iterable(map_shards(scores_of, groups))

    def identity(self, model_ids: Sequence[int], targets: Sequence[ShardSet]) -> dict[str, Any]:
        """Describe everything that scores depend on.

        That is: the features of training rows and targets (by their checksums), λ, and what decides on rounding.

        Args:
            model_ids: the checkpoints.
            targets: the target features of every checkpoint.

        Returns:
            Plain JSON. Scores with equal identities have equal bits.
        """

        solvers = self.solvers.identity(model_ids)  # all processes choose them together

        def describe() -> list[dict[str, Any]]:
            return [
                {
                    "fingerprint": self.store.checkpoint_info(model_id)["fingerprint"],
                    "model_id": model_id,
                    "targets": shards.content_hash,
                    "train": self.store.train(model_id).content_hash,
                    **({"gram": SAMPLE} if self._is_sampled(model_id) else {}),
                }
                for model_id, shards in zip(model_ids, targets, strict=True)
            ]

        return {
            "checkpoints": self.processes.broadcast_from_main(describe),
            "config": self.store.config_hash,
            "device": self.device.type,
            "lambda_relative": self.lambda_relative,
            "scores_version": SCORES_VERSION,
            "threads": torch.get_num_threads(),
            **solvers,
        }

    def _is_sampled(self, model_id: int) -> bool:
        """Tell whether XᵀX of a checkpoint is estimated from a sample, or will be."""
        if sample_size(self.n, self.k) is None or self.solvers.choice(model_id).kind != "primal":
            return False
        found = self.store.read_gram(model_id)
        return found is None or found.sample is not None

    def self_influence(self, model_ids: Sequence[int]) -> Tensor:
        """Compute τ(z_i, z_i) of every training row, see [`self_influence_blocks`].

        Returns:
            `(n,)`, float32, in every process.

        Raises:
            SingularGramError: the ridge is too small for these features.
        """
        if any(self.solvers.choice(model_id).kind != "primal" for model_id in model_ids):
            return self._streamed_self_influence(model_ids)
        systems = [self._own_system(model_id) for model_id in model_ids]
        shards = [self.store.train(model_id) for model_id in model_ids]
        mine = self.processes.share(len(shards[0]))
        result = torch.zeros(self.n)
        with self.processes.all_or_none():
            for start, stop, block in self_influence_blocks([one.part(mine) for one in shards], systems):
                result[start:stop] = block
        return self.processes.add(result)  # every row comes from one process, the others add zeros

    def _own_system(self, model_id: int) -> RidgeSystem:
        """Factorize XᵀX + λI of a checkpoint in every process."""
        self.gram(model_id)
        with self.processes.all_or_none():
            gram = self.store.read_gram(model_id)
            assert gram is not None  # `self.gram` has written it
            return self.system(model_id, gram)

    def _streamed_self_influence(self, model_ids: Sequence[int]) -> Tensor:
        """Compute self-influence where a checkpoint has another solver than the primal one."""
        shards = [self.store.train(model_id) for model_id in model_ids]
        mine = self.processes.share(len(shards[0]))
        products = [self._training_quadratic(model_id, mine) for model_id in model_ids]
        result = torch.zeros(self.n)
        with self.processes.all_or_none():
            if mine:
                first, last = (shards[0].plan.rows(index) for index in (mine[0], mine[-1]))
                weights = [torch.cat([shard.out_to_loss for shard in one.part(mine)]) for one in shards]
                scores = torch.stack(products).mean(dim=0) * torch.stack(weights).mean(dim=0)
                check_finite_rows(scores, "score", first.start)
                result[first.start : last.stop] = scores.float()
        return self.processes.add(result)  # every row comes from one process, the others add zeros

    def _training_quadratic(self, model_id: int, mine: Sequence[int]) -> Tensor:
        """Compute x (XᵀX + λI)⁻¹ xᵀ for the training rows of some shards, in float64."""
        if self.solvers.choice(model_id).kind != "primal":
            return self.solvers.training_quadratic(model_id, self.solvers.make(model_id), mine)
        system = self._own_system(model_id)
        with self.processes.all_or_none():
            parts = [system.quadratic(shard.grads, shard.start) for shard in self.store.train(model_id).part(mine)]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def part_blocks(
    shards: Sequence[ShardSet],
    indices: Sequence[int],
    targets: Sequence[Tensor | ScaledRows],
    mapped: bool = True,
) -> Iterator[ScoreBlock]:
    """Compute the scores of the rows of some shards, one product after the other, in slices that bound the memory.

    Args:
        shards: the features of every checkpoint.
        indices: the shards.
        targets: preconditioned targets `(m, k)` of every checkpoint. Products are computed on their device.
        mapped: as in [`~hf_trak.store.shard_set.ShardSet.read`].

    Returns:
        An iterator of blocks `(start, stop, block)`, see [`score_blocks`].
    """
    first = _values(targets[0])
    parts = [one.part(indices, mapped=mapped) for one in shards]
    if first.device.type != "cpu" or first.shape[0] * shards[0].plan.shard_size > _SHARD_SCORES:
        parts = [_sliced(part, max(1, _BLOCK_SCORES // max(1, first.shape[0]))) for part in parts]
    return joined(score_blocks(parts, targets), _JOINED_SCORES)


def _values(targets: Tensor | ScaledRows) -> Tensor:
    return targets.values if isinstance(targets, ScaledRows) else targets


def _sliced(shards: Iterator[Shard], rows: int) -> Iterator[Shard]:
    """Cut shards into pieces of at most `rows` rows. The cuts depend on the shards and `rows` alone."""
    for shard in shards:
        for start in range(shard.start, shard.stop, rows):
            yield shard.rows(start - shard.start, min(start + rows, shard.stop) - shard.start)
