"""Scores from the shards of a store, computed where the shards are, by all processes together.

Each process reads its own contiguous part of the shards, whatever their number; what travels is one Gram matrix per
checkpoint, the preconditioned targets (m, k), and top-k lists. All results have the same bits for any number of
processes with the same device type and number of threads.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import IncompleteStoreError
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.shard_threads import map_shards
from hf_trak.scores.gram import GramSum, column_squares
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from hf_trak.scores.scored_dataset import ScoreBlock
from hf_trak.scores.streaming import ScaledRows, joined, score_blocks, self_influence_blocks
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.store import FeatureStore, Gram

logger = logging.getLogger(__name__)

_BLOCK_SCORES = 1 << 24
"""Scores that are held at a time, unless one training row alone has more."""

_SHARD_SCORES = 1 << 22
"""Scores of one shard up to which shards are worked on side by side; larger products use all cores themselves."""

SCORES_VERSION = 2
"""Rises when scores of the same features change, and with them the names of result files."""

_JOINED_SCORES = 1 << 20
"""Scores of small shards that are worked on together."""


@dataclass(frozen=True)
class PlannedScores:
    """Scores that are about to be computed.

    Attributes:
        name: of the experiment.
        identity: all that the numbers depend on, as plain JSON: results of equal identities have equal bits.
        blocks: see [`score_blocks`].
    """

    name: str
    identity: dict[str, Any]
    blocks: Iterator[ScoreBlock]


class Scorer:
    """Gram matrices, ridge systems and score blocks of one store.

    Methods have to be called by all processes in the same order, except [`~Scorer.blocks`].
    """

    def __init__(
        self,
        store: FeatureStore,
        processes: Processes,
        device: torch.device,
        lambda_reg: float | None,
        lambda_relative: float,
    ) -> None:
        """
        Args:
            store: the features.
            processes: among which shards are divided.
            device: where products are computed, if it is a CUDA device; the CPU otherwise.
            lambda_reg, lambda_relative: see [`ridge_lambda`].
        """
        self.store = store
        self.processes = processes
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self.lambda_reg = lambda_reg
        self.lambda_relative = lambda_relative
        self.n, self.k = store.config["train_size"], store.config["proj_dim"]

    def ensemble(self, model_ids: Sequence[int] | None) -> list[int]:
        """The checkpoints to average over; `None` takes all in the store.

        Raises:
            IncompleteStoreError: one is not in the store, or only in part, or there is none.
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
                f"Asked to score with the model_ids {ids}; featurized in {directory!r} are {known}. Expected one or "
                "more of those, each once. Call `featurize()` first."
            )
        for model_id in ids:
            shards = self.store.train(model_id)
            if left := shards.without_file():
                raise IncompleteStoreError(
                    f"{len(left)} shards of model_id {model_id} are missing in {directory!r} (first: "
                    f"{shards.path(left[0])}). Call `featurize()` with the same checkpoints to finish "
                    "them, or leave this id out of `model_ids`."
                )
        return ids

    def gram(self, model_id: int) -> Gram | None:
        """XᵀX of a checkpoint, from the store, or computed from its shards and kept there.

        Returns:
            The matrix in the main process, `None` in the others.

        Raises:
            IncompleteStoreError: shards are missing.
            StoreError: a shard, or the matrix, is damaged.
            NonFiniteError: a feature is not finite; names its row.
        """
        found: Gram | None = None

        def look() -> bool:
            nonlocal found
            found = self.store.read_gram(model_id)
            return found is not None

        if not self.processes.broadcast_from_main(look):
            matrix = self._sum_gram(model_id)

            def keep() -> None:
                nonlocal found
                self.store.write_gram(model_id, matrix, self.n)
                found = self.store.read_gram(model_id)

            self.processes.broadcast_from_main(keep)
        return found

    def _sum_gram(self, model_id: int) -> Tensor:
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
        """A = t (XᵀX + λI)⁻¹ of one checkpoint, solved in the main process alone.

        Args:
            model_id: the checkpoint.
            targets: gives t `(m, k)`.
            m: number of targets.

        Returns:
            `(m, k)`, float32 up to powers of two, in every process.

        Raises:
            SingularGramError: the ridge is too small for these features.
        """
        gram = self.gram(model_id)

        def solve() -> Tensor:
            assert gram is not None  # only the main process comes here
            return self.system(model_id, gram).solve(targets())

        rows = ScaledRows.of(self.processes.broadcast_tensor_from_main(solve, (m, self.k), torch.float64))
        return ScaledRows(rows.values.to(self.device), rows.exponents)

    def system(self, model_id: int, gram: Gram) -> RidgeSystem:
        """The factorized ridge system; logs λ and the condition number."""
        lam = ridge_lambda(gram.trace, self.n, self.k, self.lambda_reg, self.lambda_relative)
        system = RidgeSystem(gram.matrix, lam)
        logger.info(
            "Checkpoint %d: λ = %.6g, condition number of XᵀX + λI about %.2e.", model_id, lam, system.condition
        )
        return system

    def blocks(
        self, model_ids: Sequence[int], targets: Sequence[Tensor | ScaledRows], everywhere: bool = False
    ) -> Iterator[ScoreBlock]:
        """Scores of training rows, in order, block by block.

        Args:
            model_ids: the checkpoints.
            targets: for each of them its preconditioned targets `(m, k)`.
            everywhere: all rows in every process, rather than those that fall to this one.
        """
        shards = [self.store.train(model_id) for model_id in model_ids]
        first = targets[0].values if isinstance(targets[0], ScaledRows) else targets[0]
        count, m = len(shards[0]), first.shape[0]
        mine = range(count) if everywhere else self.processes.share(count)
        rows = shards[0].plan.shard_size
        if self.device.type != "cpu" or m * rows > _SHARD_SCORES:
            rows = max(1, _BLOCK_SCORES // max(1, m))
            return joined(score_blocks([_sliced(one.part(mine), rows) for one in shards], targets), _JOINED_SCORES)

        def scores_of(indices: Sequence[int]) -> list[ScoreBlock]:
            return list(
                joined(score_blocks([one.part(indices, mapped=False) for one in shards], targets), _JOINED_SCORES)
            )

        together = max(1, min(_JOINED_SCORES // (m * rows), len(mine) // (4 * torch.get_num_threads())))
        groups = (mine[first : first + together] for first in range(0, len(mine), together))
        return chain.from_iterable(map_shards(scores_of, groups))

    def identity(self, model_ids: Sequence[int], targets: Sequence[ShardSet]) -> dict[str, Any]:
        """What scores depend on: the features of both sides, by their checksums, λ, and what decides on rounding.

        Args:
            model_ids: the checkpoints.
            targets: for each of them the features of the targets.
        """

        def describe() -> list[dict[str, Any]]:
            return [
                {
                    "fingerprint": self.store.checkpoint_info(model_id)["fingerprint"],
                    "model_id": model_id,
                    "targets": shards.content_hash,
                    "train": self.store.train(model_id).content_hash,
                }
                for model_id, shards in zip(model_ids, targets, strict=True)
            ]

        return {
            "checkpoints": self.processes.broadcast_from_main(describe),
            "config": self.store.config_hash,
            "device": self.device.type,
            "lambda_reg": self.lambda_reg,
            "lambda_relative": self.lambda_relative,
            "scores_version": SCORES_VERSION,
            "threads": torch.get_num_threads(),
        }

    def self_influence(self, model_ids: Sequence[int]) -> Tensor:
        """τ(z_i, z_i) of every training row, `(n,)` float32, in every process."""
        systems = []
        for model_id in model_ids:
            self.gram(model_id)
            with self.processes.all_or_none():
                gram = self.store.read_gram(model_id)
                assert gram is not None  # it has just been made sure of
                systems.append(self.system(model_id, gram))
        shards = [self.store.train(model_id) for model_id in model_ids]
        mine = self.processes.share(len(shards[0]))
        result = torch.zeros(self.n)
        with self.processes.all_or_none():
            for start, stop, block in self_influence_blocks([one.part(mine) for one in shards], systems):
                result[start:stop] = block
        return self.processes.add(result)  # every row comes from one process, the others add zeros


def _sliced(shards: Iterator[Shard], rows: int) -> Iterator[Shard]:
    """The same rows in pieces of at most `rows`, cut at places that depend on the shards alone."""
    for shard in shards:
        for start in range(shard.start, shard.stop, rows):
            stop = min(start + rows, shard.stop)
            part = slice(start - shard.start, stop - shard.start)
            yield Shard(start, stop, shard.grads[part], shard.out_to_loss[part])
