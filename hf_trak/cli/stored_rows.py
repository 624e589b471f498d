"""Load the rows that a command names: a data file, a directory, or a dataset on the Hub."""

from pathlib import Path

from datasets import Dataset, DatasetDict

from hf_trak.cli.parser import DataArguments
from hf_trak.hub.safe_loading import load_dataset, load_saved_dataset

_BUILDERS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow",
}  # fmt: skip


def check_exists(path: Path, name: str, what: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse the name of a file or directory that does not exist, rather than ask the Hub for it.

    Args:
        path: the path that the name stands for.
        name: the name as given. Names of repos have none of the suffixes, and do not start with a dot, a slash or `~`.
        what: what is expected, for the error message.
        suffixes: suffixes of files.

    Raises:
        FileNotFoundError: nothing exists at the path.
    """
    local = name.startswith((".", "/", "~")) or path.suffix in suffixes
    if local and not path.exists():
        raise FileNotFoundError(
            f"There is no such file or directory: {name!r} (looked in {str(Path.cwd())!r}). Expected a {what} on this "
            "machine, or the name of one on the Hub, 'user/name'. Correct the path."
        )


def evenly_spaced(dataset: Dataset, limit: int | None) -> Dataset:
    """Select rows ⌊i · rows / limit⌋, so that a dataset sorted by class keeps all of its classes."""
    if limit is None or limit >= len(dataset):
        return dataset
    return dataset.select([i * len(dataset) // limit for i in range(limit)])


def training_rows(data: DataArguments, limit: int | None) -> Dataset:
    """Load the rows that the model was trained on, which are named. Raises as [`load_rows`], whose `limit` this is."""
    assert data.dataset_name is not None  # commands refuse arguments without it
    return load_rows(data.dataset_name, data.dataset_config_name, data.train_split, ("train",), limit)


def load_rows(
    name: str,
    config_name: str | None,
    split: str | None,
    preferred: tuple[str, ...],
    limit: int | None,
    held_out: bool = False,
) -> Dataset:
    """Load one split.

    Args:
        name: a dataset on the Hub, a directory of `save_to_disk`, a data file, or a directory of data files.
        config_name: configuration of a dataset on the Hub.
        split: name of the split. By default the only one, or the first of `preferred` that exists.
        preferred: names of splits.
        limit: number of rows to take, evenly spaced. By default all.
        held_out: refuse rows that are the training rows, unless their split is named.

    Raises:
        FileNotFoundError: the name is a path that does not exist.
        ValueError: there are no other rows than the training rows; the split does not exist, or is not given and
            cannot be chosen; a file is damaged or of an unknown kind; or there are no rows.
    """
    path = Path(name)
    if path.is_dir() and any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
        splits = load_saved_dataset(name)
    elif path.is_file():
        if path.suffix not in _BUILDERS:
            raise ValueError(f"The data file {name!r} ends in {path.suffix!r}. Expected one of {list(_BUILDERS)}.")
        splits = load_dataset(_BUILDERS[path.suffix], data_files=name)
    else:
        check_exists(path, name, "dataset", tuple(_BUILDERS))
        splits = load_dataset(name, config_name)
    if held_out and split is None and (isinstance(splits, Dataset) or not set(preferred) & set(splits)):
        there = "no splits" if isinstance(splits, Dataset) else f"the splits {list(splits)}"
        raise ValueError(
            f"No targets are given, and {name!r} has {there}: the training rows would be scored against themselves. "
            "Expected rows to explain. Name them with `--eval_dataset`, or their split with `--eval_split`."
        )
    if isinstance(splits, Dataset):
        if split is not None:
            raise ValueError(f"`split` is {split!r}, but {name!r} has no splits. Leave the split out.")
        rows = splits
    else:
        rows = splits[_split(name, splits, split, preferred)]
    if len(rows) == 0:
        raise ValueError(f"{name!r} has no rows. Expected at least one. Name another dataset or split.")
    return evenly_spaced(rows, limit)


def _split(name: str, splits: DatasetDict, split: str | None, preferred: tuple[str, ...]) -> str:
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else next((s for s in preferred if s in splits), None)
    if split is None or split not in splits:
        raise ValueError(
            f"{name!r} has the splits {list(splits)}"
            + (f", not {split!r}. Choose one of them." if split else f", none of {list(preferred)}. Choose one.")
        )
    return split
