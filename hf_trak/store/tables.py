"""Features of a checkpoint as a table: Arrow batches, and Parquet files or Lance tables that other tools read.

| column | type | what it is |
|---|---|---|
| `row_id` | int64 | number of the training row |
| `features` | k × float32 or float16 | features as floating-point numbers; bfloat16 becomes float32 |
| `codes`, `scale` | fixed-size binary, float32 | or their codes, all blocks of a row one after the other |
| `q` | float32 | weight of the row in scores, `out_to_loss` |

and columns of the training rows. The type of `codes` has `bits` and `k` in its metadata. The metadata of a file have,
under `hf_trak`, a sealed JSON object: the configuration of the store, the record of the checkpoint, the hash of its
shards, which the shards that are made of a table must have again, and the ridge and the calibration that were chosen.
Lance tables have the checksum of each shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.store.atomic import atomic_directory, atomic_path
from hf_trak.store.codes import CodedRows, CodeFormat
from hf_trak.store.lance_table import LANCE, LanceTable, write_lance
from hf_trak.store.sealed import sealed_bytes, write_sealed
from hf_trak.store.shard_set import Shard, ShardSet, check_values
from hf_trak.store.shards import write_tensors
from hf_trak.store.store import CALIBRATION_FILE, FeatureStore
from hf_trak.store.table_files import (
    CODES,
    FACTS,
    FEATURES,
    OWN,
    ROW_ID,
    SCALE,
    WEIGHT,
    TableFile,
    facts_of,
    fragments_of,
    not_a_table,
    opened,
    read_fragment,
)

if TYPE_CHECKING:  # slow to import, and no worker needs it
    from datasets import Dataset

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
    lambda_relative: float | None = None,
) -> Path:
    """Write the features of a checkpoint, or a part of them, as one Parquet file or Lance table.

    Args:
        store ([`~hf_trak.store.store.FeatureStore`]):
            The features.
        model_id (`int`):
            The checkpoint.
        path (`str` or `Path`):
            The file; or a directory whose name ends in `.lance`, for a table of Lance (the extra `lance`).
        columns (`datasets.Dataset`, *optional*):
            Columns of the n training rows to put beside the features, such as `rows.select_columns(["source"])`.
        part (`tuple[int, int]`, *optional*, defaults to `(0, 1)`):
            `(i, files)`: part i of so many, for several files that together have all rows, see [`fragments_of`]. Other
            processes can write the others.
        lambda_relative (`float`, *optional*):
            The ridge that answers of the table have, unless another is asked for, where it is not the default.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: `columns` has another number of rows, or a column with the name of one of the table's own; or
            `part` is none of the parts, or has no shard.
        IncompleteStoreError: the checkpoint is not in the store, or lacks rows.
        StoreError: a shard is damaged, the file cannot be written, or the features are those of a revision, whose
            uneven shards no table divides its rows into.
        ModuleNotFoundError: Lance is asked for, and is not installed.
    """
    if "revision_of" in store.config:
        raise StoreError(
            f"{store.output_dir} is a revision, and no table can hold it. Expected a store of a `TrakAttributor`. "
            "Featurize the rows of a revision in a directory of their own."
        )
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
    chosen = {"lambda_relative": lambda_relative, "calibration": store.read_calibration()}
    facts = {
        "config": store.config,
        "checkpoint": store.checkpoint_info(model_id),
        "content": shards.content_hash,
        "chosen": {name: one for name, one in chosen.items() if one is not None},
    }
    path = Path(path)
    part_of_shards = range(index * len(shards) // files, (index + 1) * len(shards) // files)
    if path.suffix == LANCE:
        facts["shards"] = shards.checksums()
        with atomic_directory(path) as place:
            write_lance(place, _tables(shards, part_of_shards, columns, facts), shards.plan.shard_size)
        return path
    with atomic_path(path) as temporary:
        writer: pq.ParquetWriter | None = None
        for table in _tables(shards, part_of_shards, columns, facts):
            writer = writer or pq.ParquetWriter(temporary, table.schema, write_page_checksum=True)
            writer.write_table(table)
        assert writer is not None  # a part has shards
        writer.close()
    return path


def _tables(
    shards: ShardSet, indices: Sequence[int], columns: "Dataset | None", facts: Mapping[str, Any]
) -> Iterator[pa.Table]:
    """Yield the table of each of some shards."""
    metadata = {FACTS: sealed_bytes(facts)}
    for shard in shards.part(indices):
        table = pa.Table.from_batches([batch_of(shard)])
        if columns is not None:
            beside = columns.with_format("arrow")[shard.start : shard.stop]
            for field in beside.schema:
                table = table.append_column(field, beside.column(field.name))
        yield table.replace_schema_metadata(metadata)


def read_tables(paths: Sequence[str | Path], directory: str | Path) -> FeatureStore:
    """Make a feature store of tables of its checkpoints; all bits are those of the store before.

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
        with opened(path) as file:
            of_checkpoint.setdefault(facts_of(file, path).model_id, []).append(path)
    with atomic_directory(Path(directory)) as place:
        for files in of_checkpoint.values():
            with opened(files[0]) as file:
                calibration = facts_of(file, files[0]).chosen.get("calibration")
                _read_checkpoint(file, files, place)
            if calibration is not None:
                write_sealed(place / CALIBRATION_FILE, calibration)
    return FeatureStore.load(directory)


def _read_checkpoint(file: TableFile, files: list[Path], place: Path) -> None:
    path, facts = files[0], facts_of(file, files[0])
    model_id = facts.model_id
    rows = file.num_rows if isinstance(file, LanceTable) else file.metadata.num_rows
    if len(files) == 1 and facts.config.get("train_size") != rows:
        raise not_a_table(path, f"it has {rows} rows of {facts.config.get('train_size')}")
    fragments = fragments_of(files) if len(files) > 1 else []
    store = FeatureStore.open(place, facts.config)
    store.register_checkpoint(model_id, facts.checkpoint["fingerprint"], facts.checkpoint.get("source"))
    shards = store.train(model_id)
    found = _divided(map(read_fragment, fragments), shards) if fragments else _in_order(file, shards, path)
    for index, shard in enumerate(found):
        tensors = stored_as(shards, shard, path).tensors()
        write_tensors(shards.path(index), tensors, shards.identity, start=shard.start, stop=shard.stop)
    if shards.content_hash != facts.content:
        raise not_a_table(path, "its rows are not those that were written")


def stored_as(shards: ShardSet, shard: Shard, path: str | Path) -> Shard:
    """Return rows of a table as a set of shards keeps them.

    Args:
        shards: the set.
        shard: the rows.
        path: the table.

    Raises:
        StoreError: they have another number of columns, or are codes where those are numbers, or the reverse.
    """
    found = shard.features
    width = found.form.k if isinstance(found, CodedRows) else found.shape[1]
    if getattr(found, "form", None) != shards.code_format or width != shards.width:
        kind = shards.dtype if shards.code_format is None else f"{shards.code_format.bits} bits"
        raise not_a_table(path, f"its features are not {shards.width} numbers of {kind}")
    return shard if isinstance(found, CodedRows) else replace(shard, features=found.to(shards.dtype))


def _in_order(file: TableFile, shards: ShardSet, path: Path) -> Iterator[Shard]:
    """Yield the shards of a store from a file, whose rows are sorted by number first where they are not."""
    names = [name for name in OWN if name in file.schema_arrow.names]
    ids = file.read(columns=[ROW_ID]).column(ROW_ID).to_numpy()
    if np.array_equal(ids, np.arange(len(ids))):
        batches = file.iter_batches(shards.plan.shard_size, columns=names)
        yield from _divided((pa.Table.from_batches([batch]) for batch in batches), shards)
        return
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise not_a_table(path, f"`{ROW_ID}` has not every number from 0 to {len(ids) - 1} once")
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
