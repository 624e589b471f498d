"""`hf-trak export`: write the features of a store as tables that other tools read, and make a store of such tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hf_trak.cli.parser import DataArguments, OutputArguments, answer, option, parse_yaml_and_args
from hf_trak.cli.record import is_copy, remembered
from hf_trak.store.store import FeatureStore


@dataclass
class ExportArguments:
    """The store or the tables, and where the other form of it goes."""

    output_dir: str = option("Directory of the store, or of tables (or one of them); may stand first.")
    to: str = option("Directory of the result, which does not exist yet.")
    format: Literal["parquet", "lance", "faiss"] = option(
        "Of the tables, or `faiss` for what `build_search` reads; they need the extras `lance` and `search`.",
        "parquet",
    )
    factory: str = option("Kind of an index of FAISS, such as `IVF1024,SQ8`.", "SQ8")
    columns: list[str] | None = option("Columns of the training rows to write beside the features.", None)


def run(argv: Sequence[str]) -> None:
    """Write tables of a store, one for each checkpoint, or a store of tables.

    Raises:
        ValueError: the result exists, or columns are asked of tables, without training rows, or are not theirs, or
            FAISS knows no such kind of index.
        ImportError: FAISS is not installed.
        StoreError: a shard or a table is damaged.
    """
    kinds = (ExportArguments, DataArguments, OutputArguments)
    description = (
        "Write the features of a store as tables, one for each checkpoint, or the store that tables came "
        "from, to the bit. Training rows are by default those that `hf-trak featurize` has recorded in output_dir."
    )
    args, data, output = parse_yaml_and_args(kinds, argv, prog="hf-trak export", description=description)
    source, to = Path(args.output_dir), Path(args.to)
    if to.exists():
        raise ValueError(f"`to` is {args.to!r}, which exists. Expected a directory that does not. Name another one.")
    tables = _tables(source)
    if (source / FeatureStore.CONFIG_FILE).exists() or not tables:
        if args.columns is not None and not is_copy(args.output_dir):
            data = parse_yaml_and_args(kinds, argv, defaults=remembered(args.output_dir))[1]
        found = _write(FeatureStore.load(source), to, args, data)
    else:
        found = _read(tables, to, args.columns)
    content = {"output_dir": args.to, "checkpoints": found.model_ids, "train_rows": found.train_size}
    answer(content, [f"Exported: {args.to}, {found.train_size} rows, checkpoints {found.model_ids}"], output.json)


def _write(store: FeatureStore, to: Path, args: ExportArguments, data: DataArguments) -> FeatureStore:
    from hf_trak.store.atomic import atomic_directory
    from hf_trak.store.tables import write_table

    columns, names = None, args.columns
    if args.format == "faiss":
        return _write_search(store, to, args)
    if names is not None:
        if data.dataset_name is None:
            raise ValueError(f"`columns` is {names}, and no training rows are known. Expected `--train_dataset`.")
        from hf_trak.cli.stored_rows import training_rows  # slow to import

        rows = training_rows(data, data.max_train_samples)
        if missing := [name for name in names if name not in rows.column_names]:
            raise ValueError(f"`columns` names {missing}. Expected columns of the rows: {rows.column_names}.")
        columns = rows.select_columns(names)
    ridge = None if is_copy(args.output_dir) else remembered(args.output_dir).get("lambda_relative")
    with atomic_directory(to) as place:
        for model_id in store.model_ids:
            path = place / f"checkpoint-{model_id}.{args.format}"
            write_table(store, model_id, path, columns, lambda_relative=ridge)
    return store


def _write_search(store: FeatureStore, to: Path, args: ExportArguments) -> FeatureStore:
    from hf_trak.scores.search import GradientSearch, search_identity
    from hf_trak.store.atomic import atomic_directory

    if args.columns is not None:
        raise ValueError(f"`columns` is {args.columns}, and an index has no columns of rows. Leave `--columns` out.")
    train = [store.train(model_id) for model_id in store.model_ids]
    vectors = GradientSearch.build(train, store.model_ids, search_identity(args.factory, train), args.factory)
    with atomic_directory(to) as place:
        vectors.save(place)
    return store


def _tables(source: Path) -> list[Path]:
    """List tables in a directory, or the one that it is."""
    from hf_trak.store.table_files import SUFFIXES, tables_in

    return tables_in(source) if source.is_dir() and source.suffix not in SUFFIXES else [source]


def _read(tables: list[Path], to: Path, names: list[str] | None) -> FeatureStore:
    from hf_trak.store.tables import read_tables

    if names is not None:
        raise ValueError(f"`columns` is {names}, and a store has no columns of rows. Leave `--columns` out.")
    return read_tables(tables, to)
