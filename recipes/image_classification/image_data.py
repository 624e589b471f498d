"""Images and labels for the recipe: scikit-learn's digits, a dataset of the Hub, or one on disk."""

from dataclasses import dataclass, field

from datasets import ClassLabel, Dataset, Features, Image
from kit import splits
from kit.splits import SplitArguments, digits

DIGITS = "digits"


@dataclass
class DataArguments(SplitArguments):
    """The images to train on and those to explain."""

    dataset_name: str = field(
        default=DIGITS,
        metadata={
            "help": "`digits` (scikit-learn's, needs no network), a dataset on the Hub, a directory written by "
            "`save_to_disk`, or a directory of images in one folder per class."
        },
    )
    image_column: str = field(default="image", metadata={"help": "Column of images."})
    label_column: str = field(default="label", metadata={"help": "Column of labels."})


def load_splits(args: DataArguments) -> tuple[Dataset, Dataset]:
    """Load the training rows and the targets, with an `Image` and a `ClassLabel` column."""
    train, targets = splits.load_splits(args, {DIGITS: digits}, from_directory="imagefolder")
    splits.require_columns(
        (train, targets), {"image_column": args.image_column, "label_column": args.label_column}, args.dataset_name
    )
    return with_labels(train, targets, args)


def with_labels(train: Dataset, targets: Dataset, args: DataArguments) -> tuple[Dataset, Dataset]:
    """Cast the image and the label column of both datasets to the types that the rest relies on."""
    if not isinstance(train.features[args.label_column], ClassLabel):
        kind = ClassLabel(names=[str(label) for label in sorted(set(train[args.label_column]))])
        train, targets = (
            dataset.map(
                lambda row: {args.label_column: kind.str2int(str(row[args.label_column]))},
                features=Features({**dataset.features, args.label_column: kind}),
                desc="Encoding labels",
            )
            for dataset in (train, targets)
        )
    if any(min(dataset[args.label_column], default=0) < 0 for dataset in (train, targets)):
        raise ValueError(f"{args.dataset_name!r} has rows without a label (-1). Choose other splits.")
    return tuple(
        dataset
        if isinstance(dataset.features[args.image_column], Image)
        else dataset.cast_column(args.image_column, Image())
        for dataset in (train, targets)
    )
