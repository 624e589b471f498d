"""The store of a training dataset with rows left out or added. It uses the features of the original again.

A row's features depend on the row, the weights and the projection, not on the other rows. So a revision keeps the
store of the original dataset as it is and looks at it through a list of shards, some with rows left out; added
rows have a store of their own. Only XᵀX has to be corrected, by the rows that differ:

    X'ᵀX' = XᵀX − Σ_{i left out} x_iᵀ x_i + Σ_{i added} x_iᵀ x_i

in float64, unless that leaves less than a hundredth of the trace, where the difference would cancel: then the rest is
summed afresh. Files of a revision, below the original store:

    <output_dir>/revisions/<digest>/
      trak_config.json                    the original's, with what was left out and added
      added/                              the feature store of the added rows
      checkpoint-<model_id>/gram.safetensors

Revisions can be revised in turn. They hold paths of the original store, and do not outlive it.
"""

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import CheckpointMismatchError, StoreError
from hf_trak.store.codes import CodeFormat
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.shards import ShardPlan
from hf_trak.store.store import FeatureStore, Gram

_CANCELS = 100
"""Trace of XᵀX by that of X'ᵀX above which the one is not corrected to the other."""


@dataclass(frozen=True)
class Piece:
    """A part of shard `index` of `shards`: the rows `kept`, counted within the shard, or all of them (`None`)."""

    shards: ShardSet
    index: int
    kept: Tensor | None = None

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return len(self.shards.plan.rows(self.index)) if self.kept is None else len(self.kept)


@dataclass(frozen=True)
class RevisedPlan(ShardPlan):
    """A division of rows into shards of unequal sizes: shard i has the rows `bounds[i] … bounds[i + 1] − 1`."""

    bounds: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, index: int) -> range:
        super().rows(index)  # which refuses indices of no shard
        return range(self.bounds[index], self.bounds[index + 1])

    def shard_of(self, row: int) -> int:
        super().shard_of(row)
        return bisect.bisect_right(self.bounds, row) - 1


class RevisedShards(ShardSet):
    """The feature matrix that consists of pieces of other matrices, one below the other."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """
        Args:
            pieces: none of them empty.
        """
        first = pieces[0].shards
        bounds = [0]
        for piece in pieces:
            bounds.append(bounds[-1] + piece.size)
        plan = RevisedPlan(bounds[-1], max(piece.size for piece in pieces), tuple(bounds))
        super().__init__(**{**first.arguments, "plan": plan})
        self.pieces = list(pieces)

    def path(self, index: int) -> Path:
        return self.pieces[index].shards.path(self.pieces[index].index)

    def exists(self, index: int) -> bool:
        return self.pieces[index].shards.exists(self.pieces[index].index)

    def write(self, index: int, grads: Tensor, out_to_loss: Tensor) -> Path:
        piece = self.pieces[index]
        if piece.kept is not None:
            raise StoreError(
                f"{self.path(index)} of the original store has vanished. A revision cannot compute it, since it lacks "
                "some of its rows. Featurize the original dataset again; only that shard is computed."
            )
        return piece.shards.write(piece.index, grads, out_to_loss)

    def read(self, index: int, verify: bool | None = None, mapped: bool = True) -> Shard:
        piece = self.pieces[index]
        return self._kept(index, piece.shards.read(piece.index, verify, mapped))

    def prefix_of(self, index: int, count: int) -> Shard:
        piece = self.pieces[index]
        return self._kept(index, piece.shards.prefix_of(piece.index, count))

    def _kept(self, index: int, shard: Shard) -> Shard:
        piece, rows = self.pieces[index], self.plan.rows(index)
        if piece.kept is None:
            return Shard(rows.start, rows.stop, shard.features, shard.out_to_loss)
        return Shard(rows.start, rows.stop, shard.features[piece.kept], shard.out_to_loss[piece.kept])

    def header(self, index: int) -> dict[str, Any]:
        piece = self.pieces[index]
        header = piece.shards.header(piece.index)
        if piece.kept is None:
            return header
        content = str(header["checksum"]).encode() + piece.kept.numpy().tobytes()
        return {**header, "checksum": hashlib.sha256(content).hexdigest()[:32]}


class RevisedStore(FeatureStore):
    """A store whose training features are those of another store without some rows, and those of added rows."""

    def __init__(
        self,
        output_dir: Path,
        config: dict[str, Any],
        base: FeatureStore,
        excluded: Sequence[int],
        added: FeatureStore | None,
    ) -> None:
        """
        Args:
            output_dir: the directory of the revision.
            config: its configuration.
            base: the original store, which is only read, except that targets are kept there.
            excluded: rows of the original that are left out, ascending.
            added: the store of the added rows.
        """
        super().__init__(output_dir, config)
        self.base = base
        self.added = added
        self._excluded = torch.tensor(list(excluded), dtype=torch.int64)

    # What a checkpoint is and what targets look like does not depend on the training rows: the original knows.

    @property
    def model_ids(self) -> list[int]:
        return self.base.model_ids

    @property
    def _with_experiments(self) -> Path:
        return self.base._with_experiments

    def checkpoint_info(self, model_id: int) -> dict[str, Any]:
        return self.base.checkpoint_info(model_id)

    def register_checkpoint(self, model_id: int, fingerprint: str, source: str | None = None) -> None:
        """Check that the weights are those of the original store, which has to have features of them.

        Raises:
            CheckpointMismatchError: they are others.
        """
        saved = self.base.checkpoint_info(model_id)
        if saved["fingerprint"] != fingerprint:
            raise CheckpointMismatchError(
                f"Model id {model_id} stands for the weights {saved['fingerprint']} (from {saved.get('source')}) in "
                f"the store that is revised, but was given {fingerprint} (from {source}). Expected the same weights."
            )

    def saved_targets(self, experiment: str, model_id: int) -> ShardSet:
        return self.base.saved_targets(experiment, model_id)

    def train(self, model_id: int) -> RevisedShards:
        """Return the features of the kept rows of the original, in order, and below them those of the added rows."""
        pieces = []
        shards = self.base.train(model_id)
        for index in range(len(shards)):
            rows = shards.plan.rows(index)
            gone = self._excluded_in(rows)
            if len(gone) == 0:
                pieces.append(Piece(shards, index))
            elif len(gone) < len(rows):
                kept = torch.ones(len(rows), dtype=torch.bool)
                kept[gone] = False
                pieces.append(Piece(shards, index, kept.nonzero().flatten()))
        if self.added is not None:
            info = self.base.checkpoint_info(model_id)
            self.added.register_checkpoint(model_id, info["fingerprint"], info.get("source"))
            more = self.added.train(model_id)
            pieces += [Piece(more, index) for index in range(len(more))]
        return RevisedShards(pieces)

    def read_gram(self, model_id: int) -> Gram | None:
        """Read X'ᵀX', or correct that of the original; `None` if there is none but of a sample, or summing is less
        work or exacter."""
        found = super().read_gram(model_id)
        if found is not None:
            return found
        original = self.base.read_gram(model_id)
        if original is None or original.sample is not None or 2 * len(self._excluded) > original.n:
            return None
        self.train(model_id).require_complete("Featurize the added rows first.")
        matrix = original.matrix.to(torch.float64).clone()
        whole = float(matrix.trace())
        shards = self.base.train(model_id)
        for index in range(len(shards)):
            gone = self._excluded_in(shards.plan.rows(index))
            if len(gone):
                rows = shards.read(index).grads[gone].to(torch.float64)
                matrix.addmm_(rows.T, rows, alpha=-1)
        if _CANCELS * float(matrix.trace()) < whole:
            return None
        for shard in self.added.train(model_id) if self.added is not None else ():
            rows = shard.grads.to(torch.float64)
            matrix.addmm_(rows.T, rows)
        self.write_gram(model_id, matrix, self.train_size)
        return super().read_gram(model_id)

    def _excluded_in(self, rows: range) -> Tensor:
        """List the excluded rows among some rows of the original, counted from the first of these."""
        first, last = torch.searchsorted(self._excluded, torch.tensor([rows.start, rows.stop])).tolist()
        return self._excluded[first:last] - rows.start


class PrefixShards(ShardSet):
    """The first columns of a matrix of codes."""

    def __init__(self, whole: ShardSet, count: int) -> None:
        """
        Args:
            whole: the matrix.
            count: bytes of a row, rounded down to whole blocks.

        Raises:
            ValueError: the matrix has no codes, or not even the first block fits.
        """
        whole.names_within(count)
        assert whole.code_format is not None  # `names_within` has looked
        form = CodeFormat(whole.code_format.bits, columns_within(whole.code_format, count))
        super().__init__(**{**whole.arguments, "width": form.k, "rotation": None, "code_format": form})
        self._whole = whole
        self._count = count

    def path(self, index: int) -> Path:
        return self._whole.path(index)

    def exists(self, index: int) -> bool:
        return self._whole.exists(index)

    def header(self, index: int) -> dict[str, Any]:
        return self._whole.header(index)

    def is_written(self, index: int) -> bool:
        return self._whole.is_written(index)

    @property
    def content_hash(self) -> str:
        return self._whole.content_hash

    def read(self, index: int, verify: bool | None = None, mapped: bool = True) -> Shard:
        """Read the first columns of one shard. What is read is always compared with its checksums once."""
        shard = self._whole.prefix_of(index, self._count)
        assert shard.coded is not None and self.code_format is not None  # a prefix is one of codes
        return replace(shard, features=replace(shard.coded, form=self.code_format))

    def write(self, index: int, grads: Tensor, out_to_loss: Tensor) -> Path:
        """Raise `StoreError`: only whole rows are written."""
        raise StoreError(f"{self.path(index)} cannot be written in part. Write whole rows.")


class PrefixStore(FeatureStore):
    """A store whose rows are the first bytes of those of another store."""

    def __init__(self, base: FeatureStore, count: int) -> None:
        """
        Args:
            base: a store with codes.
            count: bytes of a row, rounded down to whole blocks.

        Raises:
            ValueError: the store has no codes, or not even the first block fits.
        """
        # Without codes, `train` raises the error that says what the features are.
        columns = base.proj_dim if base.code_format is None else columns_within(base.code_format, count)
        config = {**base.config, "proj_dim": columns, "prefix_of": base.config_hash}
        super().__init__(base.output_dir / f"prefix-{count}", config)
        self.base = base
        self._count = count

    @property
    def model_ids(self) -> list[int]:
        return self.base.model_ids

    def checkpoint_info(self, model_id: int) -> dict[str, Any]:
        return self.base.checkpoint_info(model_id)

    def train(self, model_id: int) -> PrefixShards:
        """Return the first columns of the training features."""
        return PrefixShards(self.base.train(model_id), self._count)


def columns_within(form: CodeFormat, count: int) -> int:
    """Return the number of columns in the blocks that the first `count` bytes of a row hold, or 0 if they hold
    none."""
    whole = [end for end in form.prefixes if end <= count]
    return form.columns_of(whole[-1]) if whole else 0
