"""Tables of features, here or on object storage: what they say of their rows, and their row groups.

Tables are Parquet files, or directories of Lance, see `lance_table.py`. A name is a path, or an address of any file
system that `fsspec` knows (`s3://…`, `hf://…`, `https://…`). Of a file elsewhere, its footer is read, and the row
groups and columns that are asked for; Lance reaches its own by itself. See `tables.py` for the columns.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.errors import HTTPError

from hf_trak._compat import class_if_imported
from hf_trak.errors import ConfigMismatchError, HfTrakError, IncompleteStoreError, StoreError
from hf_trak.store.lance_table import ERRORS, LANCE, LanceTable, panics_raised
from hf_trak.store.sealed import check_seal, unsealed

ROW_ID, FEATURES, CODES, SCALE, WEIGHT = "row_id", "features", "codes", "scale", "q"
OWN = (ROW_ID, FEATURES, CODES, SCALE, WEIGHT)
"""Columns that no column of the training rows may be named like."""

FACTS = b"hf_trak"
SUFFIXES = (".parquet", LANCE)

_MOST_BYTES = 4 << 30
"""Bytes of a row group in memory. Files that ask for more are refused before it is read."""


@dataclass(frozen=True)
class Fragment:
    """A row group of a table: rows `start` to `stop` of the index."""

    path: str
    row_group: int
    start: int
    stop: int


@dataclass(frozen=True)
class TableFacts:
    """What the metadata of a table say of its rows.

    Attributes:
        config: the configuration of the store.
        checkpoint: the record of the checkpoint: `model_id`, `fingerprint`, …
        content: hash of the shards of the checkpoint.
        shards: checksums of the shards, in tables of Lance.
        chosen: what was chosen for answers, where it was: the ridge `lambda_relative`, and a `calibration`.
    """

    config: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    content: str
    shards: Sequence[str] | None
    chosen: Mapping[str, Any] = field(compare=False)

    @property
    def model_id(self) -> int:
        """Return the id of the checkpoint."""
        return int(self.checkpoint["model_id"])


def is_address(path: str | Path) -> bool:
    """Tell whether a name is an address of `fsspec`, rather than a path of this machine."""
    return "://" in str(path)


def shown(path: str | Path) -> str:
    """Return a path for messages; of an address, without user, password and query, which may be secrets."""
    return re.sub(r"(?<=://)[^/@]*@|[?#].*$", "", str(path)) if is_address(path) else str(path)


def table_paths(paths: Sequence[str | Path]) -> list[str]:
    """List the tables in directories, by name.

    Args:
        paths (`Sequence[str]` or `Sequence[Path]`):
            Parquet files, Lance tables, and directories of such, by paths or addresses.

    Returns:
        `list[str]`: absolute paths and addresses of files.

    Raises:
        ValueError: there is no file.
        StoreError: a directory elsewhere cannot be listed.
    """
    found = list[str]()
    for path in paths:
        if not is_address(path):
            place = Path(path).absolute()
            inside = place.is_dir() and place.suffix != LANCE
            found += map(str, tables_in(place) if inside else [place])
        elif str(path).endswith(SUFFIXES):
            found.append(str(path))
        else:
            system, name = _system(path)
            with _reached(path):
                names = sorted(one for one in system.ls(name, detail=False) if one.endswith(SUFFIXES))
                found += [system.unstrip_protocol(one) for one in names]
    if not found:
        raise ValueError(
            f"Given the paths {[shown(path) for path in paths]}. Expected tables of a checkpoint. Name them."
        )
    return found


def tables_in(directory: Path) -> list[Path]:
    """List the tables in a directory of this machine, by name."""
    return sorted(path for suffix in SUFFIXES for path in directory.glob(f"*{suffix}"))


TableFile: TypeAlias = pq.ParquetFile | LanceTable
Footers = dict[str, Any]
"""Footers of tables that were read, by path: a file of many row groups has a footer of megabytes."""


@contextmanager
def opened(path: str | Path, footers: Footers | None = None) -> Iterator[TableFile]:
    """Open a table.

    Args:
        path: the file.
        footers: those that are known; that of the file is read and put there if it is not. `None` reads it.

    Raises:
        StoreError: it cannot be reached, or is no table, or damaged in what is read.
        ModuleNotFoundError: it is a table of Lance, which is not installed.
    """
    known = {} if footers is None else footers
    with ExitStack() as stack:
        stack.enter_context(_reached(path))
        if str(path).endswith(LANCE):
            stack.enter_context(panics_raised())
            table = LanceTable(path, known.get(str(path)))
            known[str(path)] = table.metadata
            yield table
            return
        source, elsewhere = path, is_address(path)
        if elsewhere:
            system, name = _system(path)
            source = stack.enter_context(system.open(name, "rb", cache_type="none"))
        file = stack.enter_context(
            pq.ParquetFile(
                source, metadata=known.get(str(path)), page_checksum_verification=True, pre_buffer=elsewhere
            )
        )
        known[str(path)] = file.metadata
        yield file


def _system(path: str | Path) -> tuple[Any, str]:
    """Return the file system of an address, and the name of the file there."""
    try:
        system, name = fsspec.core.url_to_fs(str(path))
    except (ImportError, ValueError) as error:
        raise not_a_table(path, str(error)) from error
    return system, name


@contextmanager
def _reached(path: str | Path) -> Iterator[None]:
    """Turn errors of files, of connections, of Parquet and of Lance into a `StoreError` that names the table."""
    errors = (OSError, pa.ArrowException, *_connection_errors(), *(ERRORS if str(path).endswith(LANCE) else ()))
    try:
        yield
    except HfTrakError:
        raise
    except errors as error:
        raise not_a_table(path, str(error) or type(error).__name__) from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return the errors of clients that file systems of `fsspec` use, where they are no `OSError`."""
    clients = (class_if_imported("aiohttp", "ClientError"), class_if_imported("botocore.exceptions", "BotoCoreError"))
    return (HTTPError, *(one for one in clients if isinstance(one, type)))


def fragments_of(paths: Sequence[str | Path]) -> list[Fragment]:
    """List the row groups of tables that together have each row of a checkpoint once; only their footers are read.

    Args:
        paths (`Sequence[str]` or `Sequence[Path]`):
            As in [`table_paths`]. Rows may be divided among them as one likes, in their order.

    Returns:
        `list[Fragment]`: by row.

    Raises:
        ValueError: there is no file.
        ConfigMismatchError: the files come from different stores or checkpoints.
        IncompleteStoreError: rows are missing, or there twice.
        StoreError: a file cannot be read, or the rows of a row group do not follow each other.
    """
    found = checkpoints_of(paths)
    if len(found) > 1:
        raise ConfigMismatchError(
            f"The tables at {[shown(path) for path in paths][:5]} come from {len(found)} checkpoints: "
            f"{[facts.model_id for facts, _ in found]}. Expected tables of one checkpoint. Name its files."
        )
    return found[0][1]


def checkpoints_of(paths: Sequence[str | Path]) -> list[tuple[TableFacts, list[Fragment]]]:
    """List the row groups of tables of some checkpoints of one store, each with all rows; only footers are read.

    Args:
        paths: as in [`fragments_of`].

    Returns:
        `list`: what the tables of each checkpoint say, and its row groups by row; by id of the checkpoint.

    Raises:
        As [`fragments_of`].
    """
    files = table_paths(paths)
    found: dict[int, tuple[TableFacts, list[Fragment]]] = {}
    for path in files:
        with opened(path) as file:
            facts = facts_of(file, path)
            first, fragments = found.setdefault(facts.model_id, (facts, []))
            if facts != first or facts.config != next(iter(found.values()))[0].config:
                raise ConfigMismatchError(
                    f"{shown(path)} and {shown(files[0])} come from different stores or checkpoints. Expected tables "
                    "of one store. Name its files."
                )
            fragments += _fragments(file, path)
    for facts, fragments in found.values():
        fragments.sort(key=lambda one: one.start)
        _check_whole(fragments, facts, files)
    return [found[model_id] for model_id in sorted(found)]


def _check_whole(fragments: list[Fragment], facts: TableFacts, files: list[str]) -> None:
    rows = facts.config.get("train_size")
    ends = [0, *(one.stop for one in fragments)]
    for end, start in zip(ends, [*(one.start for one in fragments), rows], strict=True):
        if end != start:
            raise IncompleteStoreError(
                f"After row {end - 1} of {rows}, the {len(files)} tables at {[shown(path) for path in files][:5]} "
                f"have row {start}. Expected each row once. Name all files of the checkpoint, none of them twice."
            )


def _fragments(file: TableFile, path: str) -> list[Fragment]:
    if isinstance(file, pq.ParquetFile):
        return [_fragment(file, path, group) for group in range(file.num_row_groups)]
    counts, width = file.counts(), 0
    for name in (one for one in OWN if one in file.schema_arrow.names):
        if not (size := _bytes_of(file.schema_arrow.field(name).type)):
            raise not_a_table(path, f"`{name}` has the type {file.schema_arrow.field(name).type}")
        width += size
    if max(counts, default=0) * width > _MOST_BYTES:
        raise not_a_table(path, f"it has {max(counts)} rows of {width} bytes in a fragment. Write smaller ones")
    numbers = file.row(np.cumsum([0, *counts[:-1]]).tolist(), ROW_ID) if counts else []
    return [Fragment(path, group, number, number + counts[group]) for group, number in enumerate(numbers)]


def _fragment(file: pq.ParquetFile, path: str, group: int) -> Fragment:
    part = file.metadata.row_group(group)
    columns = [part.column(index) for index in range(part.num_columns)]
    facts = next((column.statistics for column in columns if column.path_in_schema == ROW_ID), None)
    if facts is None or not facts.has_min_max or facts.max - facts.min + 1 != part.num_rows:
        raise not_a_table(path, f"`{ROW_ID}` of its row group {group} does not count up. Sort the table by it")
    own = [column for column in columns if column.path_in_schema.partition(".")[0] in OWN]
    size = max(sum(column.total_uncompressed_size for column in own), part.num_rows * _row_bytes(file.schema_arrow))
    if size > _MOST_BYTES:
        raise not_a_table(
            path, f"its row group {group} has {size:,} bytes, more than {_MOST_BYTES:,}. Write smaller row groups"
        )
    return Fragment(path, group, facts.min, facts.max + 1)


def _row_bytes(schema: pa.Schema) -> int:
    """Return the bytes of the features of a row in memory, as the types of their columns say."""
    return sum(_bytes_of(schema.field(name).type) for name in (FEATURES, CODES) if name in schema.names)


def _bytes_of(kind: pa.DataType) -> int:
    """Return the bytes of a value of a type, 0 if its values have not the same."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _bytes_of(kind.value_type)
    fixed = pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind)
    return -(-kind.bit_width // 8) if fixed else 0


def read_fragment(fragment: Fragment, footers: Footers | None = None) -> pa.Table:
    """Read a row group, without the columns of the training rows; pages of Parquet are compared with their checksums.

    Args:
        fragment: the row group.
        footers: as in [`opened`].

    Raises:
        StoreError: the file cannot be read, is damaged, or has other rows there.
    """
    with opened(fragment.path, footers) as file:
        names = [name for name in OWN if name in file.schema_arrow.names]
        table = file.read_row_group(fragment.row_group, columns=names)
    if not np.array_equal(table.column(ROW_ID).to_numpy(), np.arange(fragment.start, fragment.stop)):
        raise not_a_table(
            fragment.path, f"its row group {fragment.row_group} has not rows {fragment.start} to {fragment.stop - 1}"
        )
    return table


def facts_of(file: TableFile, path: str | Path) -> TableFacts:
    """Return what the metadata of a file say of its rows, after their checksum was compared.

    Raises:
        StoreError: they say nothing, or are damaged.
    """
    try:
        content = json.loads((file.schema_arrow.metadata or {})[FACTS])
        check_seal(content, shown(path), "Write the table again.")
        facts = unsealed(content)
        checkpoint = {"model_id": facts["checkpoint"]["model_id"], "fingerprint": facts["checkpoint"]["fingerprint"]}
        if type(checkpoint["model_id"]) is not int or type(checkpoint["fingerprint"]) is not str:
            raise TypeError
        shards = None if isinstance(file, pq.ParquetFile) else [str(one) for one in facts["shards"]]
        chosen = dict(facts.get("chosen", {}))
        if "calibration" in chosen and type(chosen["calibration"]["identity"]) is not dict:
            raise TypeError
        return TableFacts(dict(facts["config"]), dict(facts["checkpoint"]), str(facts["content"]), shards, chosen)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise not_a_table(path, "its metadata do not say what the rows were computed from") from error


def not_a_table(path: str | Path, problem: str) -> StoreError:
    """Make the error for a table that cannot be used; `problem` is a clause that says why."""
    remedy = "Ask again if it was not reached, or write it again." if is_address(path) else "Write the table again."
    return StoreError(
        f"{shown(path)} cannot be used: {problem}. Expected a table as `hf_trak.store.tables.write_table` writes "
        f"it. {remedy}"
    )
