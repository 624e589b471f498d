"""The rows that a recipe trains on and those that it explains: built-in data, a dataset of the Hub, or one on disk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

from hf_trak.cli.stored_rows import evenly_spaced
from hf_trak.hub.safe_loading import load_dataset, load_saved_dataset
from hf_trak.runtime.checks import checked_int


@dataclass
class SplitArguments:
    """The source of the rows. Recipes add the names of their columns."""

    dataset_name: str = field(
        default="", metadata={"help": "A dataset on the Hub, or a directory written by `save_to_disk`."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the Hub."})
    train_split: str = field(default="train", metadata={"help": "Split to train on and to attribute to."})
    eval_split: str | None = field(
        default=None,
        metadata={"help": "Split of targets. `None` takes `test` or `validation`, or holds out `eval_fraction`."},
    )
    eval_fraction: float = field(
        default=0.2, metadata={"help": "Part of the train split to hold out if there is no other split."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on this many rows, evenly spaced over the split. `None` takes all."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Attribute this many targets, evenly spaced over the split. `None` takes all."}
    )

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None:
                checked_int(value, name, 1, remedy="Leave it at `None` for all rows.")
        if not 0 < self.eval_fraction < 1:
            raise ValueError(f"`eval_fraction` is {self.eval_fraction}. Expected a number between 0 and 1.")


def load_splits(
    args: SplitArguments,
    built_in: Mapping[str, Callable[[], DatasetDict]],
    from_directory: str | None = None,
) -> tuple[Dataset, Dataset]:
    """Load the training rows and the targets.

    Args:
        args: the names of dataset and splits, and limits of rows.
        built_in: functions that make the datasets that need no network, by `dataset_name`.
        from_directory: builder of `datasets` for directories not written by `save_to_disk`, such as `"imagefolder"`.

    Raises:
        ValueError: the dataset has no such split.
        FileNotFoundError: `dataset_name` is a directory of another kind, or nothing is found under that name.
    """
    path = Path(args.dataset_name)
    if args.dataset_name in built_in:
        splits = built_in[args.dataset_name]()
    elif path.is_dir():
        saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
        if saved or from_directory is None:
            splits = load_saved_dataset(args.dataset_name)
        else:
            splits = load_dataset(from_directory, data_dir=args.dataset_name)
    else:
        splits = load_dataset(args.dataset_name, args.dataset_config_name)
    if isinstance(splits, Dataset):
        splits = DatasetDict({args.train_split: splits})
    for wanted in (args.train_split, args.eval_split):
        if wanted is not None and wanted not in splits:
            raise ValueError(
                f"{args.dataset_name!r} has no split {wanted!r}. Expected one of {list(splits)}. Set "
                "`train_split` and `eval_split`."
            )
    train = splits[args.train_split]
    eval_split = args.eval_split or next(
        (name for name in ("test", "validation") if name in splits and name != args.train_split), None
    )
    if eval_split is None:
        held_out = train.train_test_split(args.eval_fraction, seed=0)
        train, targets = held_out["train"], held_out["test"]
    else:
        targets = splits[eval_split]
    return evenly_spaced(train, args.max_train_samples), evenly_spaced(targets, args.max_eval_samples)


def require_columns(datasets: tuple[Dataset, ...], wanted: Mapping[str, str], dataset_name: str) -> None:
    """Raise `ValueError` unless every dataset has the wanted columns, given as {argument: column}."""
    for dataset in datasets:
        if missing := set(wanted.values()) - set(dataset.column_names):
            raise ValueError(
                f"{dataset_name!r} has the columns {dataset.column_names}, not {sorted(missing)}. Set "
                f"{' and '.join(f'`{name}`' for name in wanted)}."
            )


def digits() -> DatasetDict:
    """Load scikit-learn's 1,797 handwritten digits of 8 × 8 pixels, with a fifth of each class held out."""
    from PIL import Image as PILImage
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    pixels = (bunch.images * 255 / 16).round().astype(np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(names=[str(name) for name in bunch.target_names])})
    rows = train_test_split(np.arange(len(pixels)), test_size=0.2, random_state=0, stratify=bunch.target)
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"image": [PILImage.fromarray(pixels[i]) for i in chosen], "label": bunch.target[chosen].tolist()},
                features=features,
            )
            for split, chosen in zip(("train", "test"), rows, strict=True)
        }
    )
