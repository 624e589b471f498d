"""Features of a checkpoint as a table: Arrow batches, and Parquet files that other tools read.

| column | type | what it is |
|---|---|---|
| `row_id` | int64 | number of the training row |
| `features` | k × float32 or float16 | features as floating-point numbers; bfloat16 becomes float32 |
| `codes`, `scale` | fixed-size binary, float32 | or their codes, all blocks of a row one after the other |
| `q` | float32 | weight of the row in scores, `out_to_loss` |

and columns of the training rows. The type of `codes` has `bits` and `k` in its metadata. The metadata of a file have,
under `hf_trak`, a sealed JSON object: the configuration of the store, the record of the checkpoint, and the hash of
its shards, which the shards that are made of a table must have again.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.store.atomic import atomic_directory, atomic_path
from hf_trak.store.codes import CodedRows, CodeFormat
from hf_trak.store.sealed import check_seal, sealed_bytes, unsealed
from hf_trak.store.shard_set import Shard, ShardSet, check_values
from hf_trak.store.shards import write_tensors
from hf_trak.store.store import FeatureStore

if TYPE_CHECKING:  # slow to import, and no worker needs it
    from datasets import Dataset

ROW_ID, FEATURES, CODES, SCALE, WEIGHT = "row_id", "features", "codes", "scale", "q"
OWN = (ROW_ID, FEATURES, CODES, SCALE, WEIGHT)
"""Columns that no column of the training rows may be named like."""

_FACTS = b"hf_trak"
_NUMBERS = {pa.float32(): torch.float32, pa.float16(): torch.float16}


def batch_of(shard: Shard) -> pa.RecordBatch:
    """Return the rows of a shard as an Arrow batch, see the module."""
    columns: dict[str, tuple[pa.Array, dict[str, str] | None]] = {
        ROW_ID: (pa.array(np.arange(shard.start, shard.stop)), None)
    }
    coded = shard.coded
    if coded is None:
        numbers = shard.grads.float() if shard.grads.dtype == torch.bfloat16 else shard.grads
        flat = pa.array(numbers.contiguous().numpy().reshape(-1))
        columns[FEATURES] = pa.FixedSizeListArray.from_arrays(flat, numbers.shape[1]), None
    else:
        packed, kind = torch.cat(coded.blocks, dim=1).numpy(), pa.binary(coded.form.row_bytes)
        codes = pa.Array.from_buffers(kind, len(packed), [None, pa.py_buffer(packed)])
        columns[CODES] = codes, {"bits": str(coded.form.bits), "k": str(coded.form.k)}
        columns[SCALE] = pa.array(coded.scale.numpy()), None
    columns[WEIGHT] = pa.array(shard.out_to_loss.numpy()), None
    types = [pa.field(name, one.type, nullable=False, metadata=facts) for name, (one, facts) in columns.items()]
    return pa.record_batch([one for one, _ in columns.values()], schema=pa.schema(types))


def rows_of(batch: pa.RecordBatch | pa.Table) -> tuple[np.ndarray, Shard]:
    """Return the numbers of the rows of an Arrow batch, ascending, and their features and weights in that order.

    Args:
        batch: columns as [`batch_of`] makes them, and any others; rows in any order.

    Returns:
        The numbers `(rows,)`, int64, and the rows as a shard that starts at the first of them.

    Raises:
        StoreError: a column is missing or of another type, has nulls, or has values that no store has; or a row is
            there twice.
    """
    ids = _numbers(batch, ROW_ID, pa.int64())
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    if len(ids) and (ids[0] < 0 or (ids[1:] == ids[:-1]).any()):
        raise _broken(batch, f"`{ROW_ID}` has numbers below zero, or the same number twice")
    weights = torch.from_numpy(_numbers(batch, WEIGHT, pa.float32())[order])
    features = _coded(batch, order) if CODES in batch.schema.names else _floating(batch, order)
    start = int(ids[0]) if len(ids) else 0
    shard = Shard(start, start + len(ids), features, weights)
    check_values(shard, Path("The table"))
    return ids, shard


def _column(batch: pa.RecordBatch | pa.Table, name: str) -> pa.Array:
    if batch.schema.names.count(name) != 1:
        raise _broken(batch, f"it has no column `{name}`, or several")
    found = batch.column(name)
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    if found.null_count:
        raise _broken(batch, f"`{name}` has {found.null_count} nulls")
    return found


def _numbers(batch: pa.RecordBatch | pa.Table, name: str, kind: pa.DataType) -> np.ndarray:
    found = _column(batch, name)
    if found.type != kind:
        raise _broken(batch, f"`{name}` has the type {found.type}, not {kind}")
    return found.to_numpy(zero_copy_only=False)


def _floating(batch: pa.RecordBatch | pa.Table, order: np.ndarray) -> Tensor:
    found = _column(batch, FEATURES)
    if not pa.types.is_fixed_size_list(found.type) or found.type.value_type not in _NUMBERS:
        raise _broken(batch, f"`{FEATURES}` has the type {found.type}, not a list of fixed size of float32 or float16")
    flat = found.flatten()
    if flat.null_count:
        raise _broken(batch, f"`{FEATURES}` has nulls")
    return torch.from_numpy(flat.to_numpy().reshape(len(found), found.type.list_size)[order])


def _coded(batch: pa.RecordBatch | pa.Table, order: np.ndarray) -> CodedRows:
    found, facts = _column(batch, CODES), batch.schema.field(CODES).metadata or {}
    try:
        form = CodeFormat(int(facts[b"bits"]), int(facts[b"k"]))
    except (KeyError, ValueError) as error:
        raise _broken(batch, f"the metadata of `{CODES}` do not say `bits` and `k`") from error
    if form.bits not in (8, 4, 2, 1) or form.k < 1 or found.type != pa.binary(form.row_bytes):
        raise _broken(batch, f"`{CODES}` has the type {found.type}, and {form.k} features of {form.bits} bits")
    start, size = found.offset * form.row_bytes, len(found) * form.row_bytes
    buffer = found.buffers()[1]
    flat = np.frombuffer(buffer, np.uint8, size, start) if size else np.empty(0, np.uint8)
    packed = torch.from_numpy(flat.reshape(len(found), form.row_bytes)[order])
    scale = torch.from_numpy(_numbers(batch, SCALE, pa.float32())[order])
    return CodedRows(form, scale, tuple(packed.split(form.block_bytes, dim=1)))


def _broken(batch: pa.RecordBatch | pa.Table, problem: str) -> StoreError:
    return StoreError(
        f"A table of {batch.num_rows} rows with the columns {batch.schema.names} cannot be used: {problem}. Expected "
        "features as `hf_trak.store.tables.write_table` writes them. Write the table again."
    )


def write_table(
    store: FeatureStore,
    model_id: int,
    path: str | Path,
    columns: "Dataset | None" = None,
    part: tuple[int, int] = (0, 1),
) -> Path:
    """Write the features of a checkpoint, or a part of them, as one Parquet file.

    Args:
        store ([`~hf_trak.store.store.FeatureStore`]):
            The features.
        model_id (`int`):
            The checkpoint.
        path (`str` or `Path`):
            The file.
        columns (`datasets.Dataset`, *optional*):
            Columns of the n training rows to put beside the features, such as `rows.select_columns(["source"])`.
        part (`tuple[int, int]`, *optional*, defaults to `(0, 1)`):
            `(i, files)`: part i of so many, for several files that together have all rows, see [`fragments_of`]. Other
            processes can write the others.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: `columns` has another number of rows, or a column with the name of one of the table's own; or
            `part` is none of the parts, or has no shard.
        IncompleteStoreError: the checkpoint is not in the store, or lacks rows.
        StoreError: a shard is damaged, or the file cannot be written.
    """
    shards = store.train(model_id)
    shards.require_complete("Call `featurize()` with the same checkpoints to finish them.")
    if columns is not None and (len(columns) != store.train_size or set(columns.column_names) & set(OWN)):
        raise ValueError(
            f"`columns` has {len(columns)} rows and the columns {columns.column_names}. Expected the "
            f"{store.train_size} training rows, and none of {list(OWN)}. Select or rename columns of the dataset."
        )
    index, files = part
    if not 0 <= index < files <= len(shards):
        raise ValueError(
            f"`part` is {part}. Expected a part from 0 to one less than the number of files, which are at most "
            f"{len(shards)}, one for each shard."
        )
    facts = {"config": store.config, "checkpoint": store.checkpoint_info(model_id), "content": shards.content_hash}
    path = Path(path)
    with atomic_path(path) as temporary:
        writer: pq.ParquetWriter | None = None
        for shard in shards.part(range(index * len(shards) // files, (index + 1) * len(shards) // files)):
            table = pa.Table.from_batches([batch_of(shard)])
            if columns is not None:
                beside = columns.with_format("arrow")[shard.start : shard.stop]
                for field in beside.schema:
                    table = table.append_column(field, beside.column(field.name))
            table = table.replace_schema_metadata({_FACTS: sealed_bytes(facts)})
            writer = writer or pq.ParquetWriter(temporary, table.schema, write_page_checksum=True)
            writer.write_table(table)
        assert writer is not None  # a part has shards
        writer.close()
    return path


def read_tables(paths: Sequence[str | Path], directory: str | Path) -> FeatureStore:
    """Make a feature store of Parquet files of its checkpoints; all bits are those of the store before.

    Args:
        paths (`Sequence[str]` or `Sequence[Path]`):
            What [`write_table`] has written of one store. Where a checkpoint has one file, its rows may have come into
            another order since.
        directory (`str` or `Path`):
            Where; nothing may be there yet. It appears when all is written.

    Returns:
        [`~hf_trak.store.store.FeatureStore`]: the store.

    Raises:
        ValueError: no file is named, or something is in `directory`.
        ConfigMismatchError: the files come from stores of different configurations.
        StoreError: a file cannot be read or is damaged, or those of a checkpoint do not hold every row once.
    """
    if not paths or Path(directory).exists():
        raise ValueError(
            f"Given the tables {[str(path) for path in paths]} and `directory={str(directory)!r}`. Expected at least "
            "one table, and a directory that does not exist. Name another one."
        )
    of_checkpoint: dict[int, list[Path]] = {}
    for path in map(Path, paths):
        with _opened(path) as file:
            of_checkpoint.setdefault(_facts(file, path)["checkpoint"]["model_id"], []).append(path)
    with atomic_directory(Path(directory)) as place:
        for files in of_checkpoint.values():
            with _opened(files[0]) as file:
                _read_checkpoint(file, files, place)
    return FeatureStore.load(directory)


@contextmanager
def _opened(path: str | Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, StoreError):
            raise
        raise _not_a_table(path, str(error)) from error


@dataclass(frozen=True)
class Fragment:
    """A row group of a table: rows `start` to `stop` of the index."""

    path: str
    row_group: int
    start: int
    stop: int


def fragments_of(paths: Sequence[str | Path]) -> list[Fragment]:
    """List the row groups of tables that together have each row of a checkpoint once; only their footers are read.

    Args:
        paths (`Sequence[str]` or `Sequence[Path]`):
            Files, and directories of `.parquet` files. Rows may be divided among them as one likes, in their order.

    Returns:
        `list[Fragment]`: by row.

    Raises:
        ValueError: there is no file.
        ConfigMismatchError: the files come from different stores or checkpoints.
        IncompleteStoreError: rows are missing, or there twice.
        StoreError: a file cannot be read, or the rows of a row group do not follow each other.
    """
    places = [Path(path).absolute() for path in paths]
    files = [file for place in places for file in (sorted(place.glob("*.parquet")) if place.is_dir() else [place])]
    if not files:
        raise ValueError(
            f"Given the paths {[str(path) for path in paths]}. Expected tables of a checkpoint. Name them."
        )
    found, facts = list[Fragment](), dict[str, Any]()
    for path in files:
        with _opened(path) as file:
            of_file = _facts(file, path)
            if of_file != (facts or of_file):
                raise ConfigMismatchError(
                    f"{path} and {files[0]} come from different stores or checkpoints. Expected tables of one "
                    "checkpoint. Name its files."
                )
            facts = of_file
            found += [_fragment(file, path, group) for group in range(file.num_row_groups)]
    found.sort(key=lambda one: one.start)
    rows = facts["config"].get("train_size")
    ends = [0, *(one.stop for one in found)]
    for end, start in zip(ends, [*(one.start for one in found), rows], strict=True):
        if end != start:
            raise IncompleteStoreError(
                f"After row {end - 1} of {rows}, the {len(files)} tables at {[str(path) for path in paths][:5]} have "
                f"row {start}. Expected each row once. Name all files of the checkpoint, none of them twice."
            )
    return found


def _fragment(file: pq.ParquetFile, path: Path, group: int) -> Fragment:
    part = file.metadata.row_group(group)
    columns = (part.column(index) for index in range(part.num_columns))
    facts = next((column.statistics for column in columns if column.path_in_schema == ROW_ID), None)
    if facts is None or not facts.has_min_max or facts.max - facts.min + 1 != part.num_rows:
        raise _not_a_table(path, f"`{ROW_ID}` of its row group {group} does not count up. Sort the table by it")
    return Fragment(str(path), group, facts.min, facts.max + 1)


def read_fragment(fragment: Fragment) -> pa.Table:
    """Read a row group, without the columns of the training rows, after the checksums of its pages were compared.

    Raises:
        StoreError: the file cannot be read, is damaged, or has other rows there.
    """
    with _opened(fragment.path) as file:
        names = [name for name in OWN if name in file.schema_arrow.names]
        table = file.read_row_group(fragment.row_group, columns=names)
    if not np.array_equal(table.column(ROW_ID).to_numpy(), np.arange(fragment.start, fragment.stop)):
        raise _not_a_table(
            fragment.path, f"its row group {fragment.row_group} has not rows {fragment.start} to {fragment.stop - 1}"
        )
    return table


def _read_checkpoint(file: pq.ParquetFile, files: list[Path], place: Path) -> None:
    path, facts = files[0], _facts(file, files[0])
    config, info = facts["config"], facts["checkpoint"]
    rows = file.metadata.num_rows
    if len(files) == 1 and config.get("train_size") != rows:
        raise _not_a_table(path, f"it has {rows} rows of {config.get('train_size')}")
    fragments = fragments_of(files) if len(files) > 1 else []
    store = FeatureStore.open(place, config)
    store.register_checkpoint(info["model_id"], info["fingerprint"], info["source"])
    shards = store.train(info["model_id"])
    found = _divided(map(read_fragment, fragments), shards) if fragments else _in_order(file, shards, path)
    for index, shard in enumerate(found):
        features = shard.features
        tensors = features.tensors() if isinstance(features, CodedRows) else {"grads": features.to(shards.dtype)}
        form, expected = getattr(features, "form", None), (len(shards.plan.rows(index)), shards.width)
        if form != shards.code_format or (form is None and tuple(tensors["grads"].shape) != expected):
            raise _not_a_table(path, f"its features are not {shards.width} numbers of {config['feature_dtype']}")
        write_tensors(
            shards.path(index),
            {**tensors, "out_to_loss": shard.out_to_loss},
            shards.identity,
            start=shard.start,
            stop=shard.stop,
        )
    if shards.content_hash != facts["content"]:
        raise _not_a_table(path, "its rows are not those that were written")


def _in_order(file: pq.ParquetFile, shards: ShardSet, path: Path) -> Iterator[Shard]:
    """Yield the shards of a store from a file, whose rows are sorted by number first where they are not."""
    names = [name for name in OWN if name in file.schema_arrow.names]
    ids = file.read(columns=[ROW_ID]).column(ROW_ID).to_numpy()
    if np.array_equal(ids, np.arange(len(ids))):
        batches = file.iter_batches(shards.plan.shard_size, columns=names)
        yield from _divided((pa.Table.from_batches([batch]) for batch in batches), shards)
        return
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise _not_a_table(path, f"`{ROW_ID}` has not every number from 0 to {len(ids) - 1} once")
    whole = file.read(columns=names).sort_by(ROW_ID)
    for index in range(len(shards)):
        part = shards.plan.rows(index)
        yield rows_of(whole.slice(part.start, len(part)))[1]


def _divided(tables: Iterator[pa.Table], shards: ShardSet) -> Iterator[Shard]:
    """Yield the shards of a store from tables that have its rows in order."""
    held = pa.table({})
    for index in range(len(shards)):
        size = len(shards.plan.rows(index))
        parts = [held] if held.num_rows else []
        while sum(part.num_rows for part in parts) < size:
            parts.append(next(tables))
        together = pa.concat_tables(parts)
        held = together.slice(size)
        yield rows_of(together.slice(0, size))[1]


def _facts(file: pq.ParquetFile, path: Path) -> dict[str, Any]:
    """Return what the metadata of a file say of its rows, after their checksum was compared."""
    try:
        content = json.loads((file.schema_arrow.metadata or {})[_FACTS])
        check_seal(content, path, "Write the table again.")
        facts = unsealed(content)
        return {"config": dict(facts["config"]), "checkpoint": dict(facts["checkpoint"]), "content": facts["content"]}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _not_a_table(path, "its metadata do not say what the rows were computed from") from error


def _not_a_table(path: str | Path, problem: str) -> StoreError:
    return StoreError(
        f"{path} cannot be used: {problem}. Expected a Parquet file as `hf_trak.store.tables.write_table` writes it. "
        "Write the table again."
    )
