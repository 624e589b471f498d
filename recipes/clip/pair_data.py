"""Images with captions for the recipe: captioned digits, a dataset of the Hub, or one on disk."""

import random
from dataclasses import dataclass, field

from datasets import Dataset, DatasetDict, Image, Value
from kit import splits
from kit.splits import SplitArguments

DIGITS = "digits"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SWAPPED, TRUE_CAPTION = "swapped", "true_caption"


@dataclass
class DataArguments(SplitArguments):
    """The pairs to train on and those to explain."""

    dataset_name: str = field(
        default=DIGITS,
        metadata={
            "help": "`digits` (scikit-learn's with a caption in words, needs no network), a dataset on the Hub, a "
            "directory written by `save_to_disk`, or a directory of images with a `metadata.csv`."
        },
    )
    image_column: str = field(default="image", metadata={"help": "Column of images."})
    caption_column: str = field(
        default="caption", metadata={"help": "Column of captions: texts, or lists, whose first entry is taken."}
    )
    swapped_captions: int = field(
        default=0,
        metadata={"help": "Exchange the captions of this many pairs of training rows, to see whether they are found."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swapped_captions < 0:
            raise ValueError(f"`swapped_captions` is {self.swapped_captions}. Expected at least 0.")


def load_pairs(args: DataArguments, seed: int) -> tuple[Dataset, Dataset]:
    """Load the training rows and the targets, with an `Image` column and a column of one caption per row.

    With `swapped_captions`, the training rows have the columns `swapped` and `true_caption`, too.
    """
    loaded = splits.load_splits(args, {DIGITS: captioned_digits}, from_directory="imagefolder")
    wanted = {"image_column": args.image_column, "caption_column": args.caption_column}
    splits.require_columns(loaded, wanted, args.dataset_name)
    train, targets = (_one_caption(dataset, args) for dataset in loaded)
    return (with_swaps(train, args, seed) if args.swapped_captions else train), targets


def captioned_digits() -> DatasetDict:
    """Load scikit-learn's digits with captions such as "seven by hand"."""
    return splits.digits().map(
        lambda row: {"caption": f"{WORDS[row['label']]} by hand"}, remove_columns="label", desc="Captions"
    )


def _one_caption(dataset: Dataset, args: DataArguments) -> Dataset:
    if not isinstance(dataset.features[args.caption_column], Value):
        first = [captions[0] for captions in dataset[args.caption_column]]
        dataset = dataset.remove_columns(args.caption_column).add_column(args.caption_column, first)
    if isinstance(dataset.features[args.image_column], Image):
        return dataset
    return dataset.cast_column(args.image_column, Image())


def with_swaps(train: Dataset, args: DataArguments, seed: int) -> Dataset:
    """Exchange the captions of random pairs of rows that have different ones.

    Raises:
        ValueError: there are fewer such pairs than `swapped_captions`.
    """
    captions = list(train[args.caption_column])
    swapped = list(captions)
    order = list(range(len(captions)))
    random.Random(seed).shuffle(order)
    marks = [False] * len(captions)
    left = args.swapped_captions
    for first, second in zip(order[::2], order[1::2], strict=False):
        if left and captions[first] != captions[second]:
            swapped[first], swapped[second] = captions[second], captions[first]
            marks[first] = marks[second] = True
            left -= 1
    if left:
        raise ValueError(
            f"`swapped_captions` is {args.swapped_captions}, but only {args.swapped_captions - left} pairs of rows "
            "with different captions were found. Expected as many or more: ask for fewer swaps, or use more rows."
        )
    train = train.remove_columns(args.caption_column).add_column(args.caption_column, swapped)
    return train.add_column(SWAPPED, marks).add_column(TRUE_CAPTION, captions)
