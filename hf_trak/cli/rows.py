"""Load rows from the Hub, a saved dataset, or data files."""

from pathlib import Path

from datasets import Dataset, DatasetDict

from hf_trak.hub.safe_loading import load_dataset, load_saved_dataset
from hf_trak.recipe_kit.files import check_exists
from hf_trak.recipe_kit.splits import evenly_spaced

_BUILDERS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow",
}  # fmt: skip


def load_rows(
    name: str, config_name: str | None, split: str | None, preferred: tuple[str, ...], limit: int | None
) -> Dataset:
    """Load one split.

    Args:
        name: a dataset on the Hub, a directory of `save_to_disk`, a data file, or a directory of data files.
        config_name: configuration of a dataset on the Hub.
        split: name of the split. By default the only one, or the first of `preferred` that exists.
        preferred: names of splits.
        limit: number of rows to take, evenly spaced. By default all.

    Raises:
        FileNotFoundError: the name is a path that does not exist.
        ValueError: the split does not exist, or is not given and cannot be chosen; a file is damaged or of an unknown
            kind; or there are no rows.
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
