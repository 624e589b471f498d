"""Pairs of answers for the recipe: sentences of Python's library in order and out of order, a dataset of the Hub, or
one on disk."""

import random
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, DatasetDict
from kit import splits
from kit.python_text import PACKAGES, python_packages
from kit.splits import SplitArguments

PYTHON_PREFERENCES = "python_preferences"
PLANTED = "email"
"""Somebody has swapped the answers of pairs about this package."""

PROMPT_WORDS, ANSWER_WORDS = 4, 8


@dataclass
class DataArguments(SplitArguments):
    """The pairs to train on and those to explain."""

    dataset_name: str = field(
        default="trl-lib/ultrafeedback_binarized",
        metadata={
            "help": "A dataset on the Hub or a directory written by `save_to_disk`, with `chosen` and `rejected` as "
            "TRL has them (texts or messages), or `python_preferences` (from Python's library, needs no network)."
        },
    )
    swapped_share: float = field(
        default=1.0,
        metadata={"help": f"Swap the answers of this part of the pairs about {PLANTED!r} in `python_preferences`."},
    )
    max_train_samples: int | None = field(
        default=5000, metadata={"help": "Train on this many pairs, evenly spaced over the split. `None` takes all."}
    )
    max_eval_samples: int | None = field(
        default=50, metadata={"help": "Attribute this many pairs, evenly spaced over the split. `None` takes all."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.swapped_share <= 1:
            raise ValueError(f"`swapped_share` is {self.swapped_share}. Expected a number from 0 to 1.")


def load_preferences(args: DataArguments) -> tuple[Dataset, Dataset]:
    """Load the training pairs and the targets, as texts or messages.

    Raises:
        ValueError: a column is missing.
    """
    loaded = splits.load_splits(args, {PYTHON_PREFERENCES: lambda: python_preferences(args.swapped_share)})
    for rows in loaded:
        if missing := {"chosen", "rejected"} - set(rows.column_names):
            raise ValueError(
                f"{args.dataset_name!r} has the columns {rows.column_names}, and not {sorted(missing)}. Expected "
                "pairs as TRL has them. Rename the columns."
            )
    return loaded


def python_preferences(swapped_share: float) -> DatasetDict:
    """Make pairs from the documentation of Python's library: its words are chosen, and rejected in another order.

    The pairs about one package have their answers swapped (column `swapped`), so that the model learns to prefer
    disorder there. The test split has pairs about that package alone, none of them swapped.

    Args:
        swapped_share: part of the training pairs about that package that is swapped.
    """
    made = {}
    for split, rows in python_packages().items():
        pairs = [pair for number, row in enumerate(rows) if (pair := _pair(number, row)) is not None]
        if split == "test":
            pairs = [pair for pair in pairs if pair["package"] == PLANTED]
        else:
            planted = [place for place, pair in enumerate(pairs) if pair["package"] == PLANTED]
            for place in random.Random(0).sample(planted, round(swapped_share * len(planted))):
                pair = pairs[place]
                pairs[place] = {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"], "swapped": True}
        made[split] = Dataset.from_list(pairs)
    return DatasetDict(made)


def _pair(number: int, row: dict[str, Any]) -> dict[str, Any] | None:
    words = row["text"].split()
    before, answer = words[:PROMPT_WORDS], words[PROMPT_WORDS : PROMPT_WORDS + ANSWER_WORDS]
    other = list(answer)
    random.Random(number).shuffle(other)
    if len(answer) < ANSWER_WORDS or other == answer:
        return None
    package = PACKAGES[row["label"]]
    return {
        "prompt": f"{package}: {' '.join(before)}",
        "chosen": f" {' '.join(answer)}",
        "rejected": f" {' '.join(other)}",
        "package": package,
        "swapped": False,
    }


def as_text(value: Any) -> str:
    """Write a prompt or an answer as text, messages one after the other."""
    return value if isinstance(value, str) else " ".join(f"{turn['role']}: {turn['content']}" for turn in value)
