"""Tables of an index as a feature store: rows are read when they are needed, here or on object storage.

Targets, Gram matrices and scores, which this machine computes, are kept in a directory of its own. The Gram matrices
and scores have the bits of the store that the tables were written from.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice, takewhile
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

import pyarrow as pa

from hf_trak.errors import HfTrakError
from hf_trak.store.sealed import content_digest
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.shards import header_of
from hf_trak.store.store import FeatureStore
from hf_trak.store.table_files import Footers, Fragment, TableFacts, checkpoints_of, not_a_table, read_fragment, shown
from hf_trak.store.tables import rows_of, stored_as

_READING = Lock()
"""Held while a row group of several shards is read, so that threads which need it read it once."""


@lru_cache(maxsize=32)
def _footers_of(token: str) -> Footers:
    """Return the footers that all copies of some shards in this process share: engines send one for each part."""
    return {}


@dataclass(frozen=True)
class Tables:
    """The tables of some checkpoints of one store, as their footers describe them.

    Attributes:
        paths: what was named.
        checkpoints: what the tables of each checkpoint say, and their row groups, by id.
    """

    paths: tuple[str, ...]
    checkpoints: Mapping[int, tuple[TableFacts, list[Fragment]]]

    @classmethod
    def find(cls, paths: Sequence[str | Path]) -> "Tables":
        """Read the footers of tables.

        Args:
            paths (`Sequence[str]` or `Sequence[Path]`):
                Parquet files, Lance tables, and directories of such, by paths or addresses.

        Raises:
            ValueError: there is no file.
            ConfigMismatchError: the files come from different stores.
            IncompleteStoreError: rows are missing, or there twice.
            StoreError: a file cannot be read, or the rows of a row group do not follow each other.
        """
        found = checkpoints_of(paths)
        return cls(tuple(map(str, paths)), {facts.model_id: (facts, fragments) for facts, fragments in found})

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the configuration of the store that they were written from."""
        return next(iter(self.checkpoints.values()))[0].config

    @property
    def chosen(self) -> Mapping[str, Any]:
        """Return what was chosen for answers, see [`~hf_trak.store.table_files.TableFacts`]."""
        return {name: one for facts, _ in self.checkpoints.values() for name, one in facts.chosen.items()}

    @property
    def name(self) -> str:
        """Return the tables' names for messages."""
        return ", ".join(map(shown, self.paths))

    @property
    def digest(self) -> str:
        """Return a digest of the configuration, the checkpoints and their features."""
        contents = {str(one): facts.content for one, (facts, _) in self.checkpoints.items()}
        return content_digest({"config": self.config, "contents": contents})


class TableStore(FeatureStore):
    """A feature store over tables, which are only read. Make one with [`TableStore.over`]."""

    def __init__(self, output_dir: Path, config: dict[str, Any], tables: Tables) -> None:
        """
        Args:
            output_dir: directory for features of targets, Gram matrices and scores.
            config: the configuration, as the directory has it.
            tables: the tables.
        """
        super().__init__(output_dir, config)
        self.tables = tables

    @classmethod
    def over(cls, tables: Tables, output_dir: str | Path) -> "TableStore":
        """Open tables as a store.

        Args:
            tables: the tables.
            output_dir: directory for features of targets, Gram matrices and scores. It may be that of the store that
                the tables were written from.

        Raises:
            ConfigMismatchError: the directory has a store of another configuration.
            CheckpointMismatchError: the directory has other weights for a checkpoint.
            StoreError: the tables' configuration, or that of the directory, is none.
        """
        try:
            store = FeatureStore.open(output_dir, tables.config)
        except ValueError as error:
            if isinstance(error, HfTrakError):
                raise
            raise not_a_table(tables.paths[0], str(error)) from error
        for model_id, (facts, _) in tables.checkpoints.items():
            store.register_checkpoint(model_id, str(facts.checkpoint["fingerprint"]))
        return cls(store.output_dir, store.config, tables)

    @property
    def model_ids(self) -> list[int]:
        """Return the ids of the checkpoints that have tables, ascending."""
        return sorted(self.tables.checkpoints)

    def read_calibration(self) -> dict[str, Any] | None:
        """Return the choice of a method: that of this machine, or else that of the tables."""
        own = super().read_calibration()
        return self.tables.chosen.get("calibration") if own is None else own

    def train(self, model_id: int) -> "TableShards":
        """Return the training features of a checkpoint, without reading any. Raises as [`FeatureStore.train`]."""
        if model_id not in self.tables.checkpoints:
            self.checkpoint_info(model_id)  # which may not know it
            raise not_a_table(self.tables.paths[0], f"the tables have no checkpoint {model_id}")
        facts, fragments = self.tables.checkpoints[model_id]
        return TableShards(**super().train(model_id).arguments, facts=facts, fragments=fragments)


@dataclass(eq=False)
class TableShards(ShardSet):
    """The shards of a feature matrix that tables have, divided into row groups in any way.

    Attributes:
        facts: what the tables say.
        fragments: row groups, by row.
    """

    facts: TableFacts = field(kw_only=True)
    fragments: list[Fragment] = field(default_factory=list)
    _held: tuple[Fragment, pa.Table] | None = field(default=None, init=False, repr=False)
    _token: str = field(default_factory=lambda: uuid4().hex, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies in other processes have: not what was read."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_held", "_footers")}

    @cached_property
    def _footers(self) -> Footers:
        return _footers_of(self._token)

    def exists(self, index: int) -> bool:
        return True

    def is_written(self, index: int) -> bool:
        return True

    @property
    def content_hash(self) -> str:
        return self.facts.content

    def read(self, index: int, verify: bool | None = None, mapped: bool = True) -> Shard:
        """Read the rows of one shard; checksums are compared, of pages or of the shard.

        Raises:
            StoreError: a table cannot be read, is damaged, or has other rows or features.
            NonFiniteError: a feature or weight is not finite; names the row.
        """
        rows = self.plan.rows(index)
        of_row = bisect_right(self.fragments, rows.start, key=lambda one: one.start) - 1
        parts = takewhile(lambda one: one.start < rows.stop, islice(self.fragments, of_row, None))
        tables = []
        for part in parts:
            first = max(rows.start, part.start) - part.start
            tables.append(self._table(part).slice(first, min(rows.stop, part.stop) - part.start - first))
        _, shard = rows_of(pa.concat_tables(tables))
        path = self.fragments[of_row].path
        shard = replace(stored_as(self, shard, path), start=rows.start, stop=rows.stop)
        if self.facts.shards is not None:
            header = header_of(shard.tensors(), self.identity, start=rows.start, stop=rows.stop)
            if list(self.facts.shards[index : index + 1]) != [header["checksum"]]:
                raise not_a_table(path, f"its rows {rows.start} to {rows.stop - 1} are not those that were written")
        return shard

    def prefix_of(self, index: int, count: int) -> Shard:
        names = self.names_within(count)
        shard = self.read(index)
        return replace(shard, features=self._features({name: shard.tensors()[name] for name in names}))

    def _table(self, fragment: Fragment) -> pa.Table:
        """Read a row group. One that goes on in another shard is kept until the next is read."""
        if fragment.stop - fragment.start <= self.plan.shard_size:
            return read_fragment(fragment, self._footers)
        with _READING:
            if self._held is None or self._held[0] != fragment:
                self._held = None
                self._held = fragment, read_fragment(fragment, self._footers)
            return self._held[1]
