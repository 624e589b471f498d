"""The first bytes of every row as a feature store of its own.

After the rotation every column is a sum of all features with random signs, so the first columns are a smaller index of
the same rows. [`PrefixStore`] shows them as a store with fewer columns. What a solver computes from them is kept below
the directory of the store:

    <output_dir>/prefix-<bytes>/checkpoint-<model_id>/gram.safetensors
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.codes.coded_rows import CodedRows, CodeFormat
from hf_trak.errors import StoreError
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.store import FeatureStore


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
        super().__init__(
            whole.directory, whole.prefix, whole.plan, form.k, whole.dtype, whole.identity, whole.version, None, form
        )
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
        return Shard(
            shard.start,
            shard.stop,
            CodedRows(self.code_format, shard.coded.scale, shard.coded.blocks),
            shard.out_to_loss,
        )

    def rows_of(self, wanted: Mapping[int, Sequence[int]]) -> Any:
        for index in sorted(wanted):
            shard, places = self.read(index), torch.tensor(list(wanted[index]), dtype=torch.int64)
            yield index, shard.features[places], shard.out_to_loss[places]

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
    """Number of columns in the blocks that the first `count` bytes of a row hold; 0 if they hold none."""
    whole = [end for end in form.prefixes if end <= count]
    return form.columns_of(whole[-1]) if whole else 0
