"""Prompts and completions for the recipe: questions about Python's library, a dataset of the Hub, or one on disk."""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, DatasetDict
from kit import splits
from kit.splits import SplitArguments

from hf_trak.data.language import tokenize_prompt_completion
from hf_trak.modelout_functions.tokens import IGNORED

PYTHON_QUESTIONS = "python_questions"
MODULES = ("math", "statistics", "os.path", "shutil", "textwrap", "random", "itertools", "functools", "operator")
TRAIN_PROMPT, TEST_PROMPT = "Question: What does {} do?\nAnswer:", "Question: Explain {}.\nAnswer:"


@dataclass
class DataArguments(SplitArguments):
    """The instructions to train on and those to explain."""

    dataset_name: str = field(
        default="trl-lib/tldr",
        metadata={
            "help": "A dataset on the Hub or a directory written by `save_to_disk`, with prompts and completions as "
            "TRL has them (texts or messages), or `python_questions` (about Python's library, needs no network)."
        },
    )
    prompt_column: str = field(default="prompt", metadata={"help": "Column of prompts."})
    completion_column: str = field(default="completion", metadata={"help": "Column of completions."})
    max_train_samples: int | None = field(
        default=5000, metadata={"help": "Train on this many rows, evenly spaced over the split. `None` takes all."}
    )
    max_eval_samples: int | None = field(
        default=50, metadata={"help": "Attribute this many targets, evenly spaced over the split. `None` takes all."}
    )


def load_instructions(args: DataArguments) -> tuple[Dataset, Dataset]:
    """Load the training rows and the targets, with columns of prompts and completions."""
    loaded = splits.load_splits(args, {PYTHON_QUESTIONS: python_questions})
    wanted = {"prompt_column": args.prompt_column, "completion_column": args.completion_column}
    splits.require_columns(loaded, wanted, args.dataset_name)
    return loaded


def python_questions() -> DatasetDict:
    """Make questions about functions of Python's library, answered by the first sentence of their documentation.

    The test split asks for the same facts in other words, so each target has one training row with its answer.
    """
    facts: dict[str, str] = {}
    for module in MODULES:
        library = importlib.import_module(module)
        for name in sorted(getattr(library, "__all__", vars(library))):
            value = getattr(library, name)
            text = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
            sentence = " ".join((text or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")
            if 20 <= len(sentence) <= 120:
                facts.setdefault(sentence, f"{module}.{name}")
    splits_of_facts = {}
    for split, prompt in (("train", TRAIN_PROMPT), ("test", TEST_PROMPT)):
        columns = {
            "prompt": [prompt.format(name) for name in facts.values()],
            "completion": [f" {sentence}." for sentence in facts],
        }
        splits_of_facts[split] = Dataset.from_dict(columns)
    return DatasetDict(splits_of_facts)


def tokenized(rows: Dataset, tokenizer: Any, max_length: int, args: DataArguments) -> Dataset:
    """Add `input_ids`, `attention_mask` and `labels` to the rows; only tokens of the completion are labels.

    Raises:
        ValueError: a row has no token of its completion within `max_length`.
    """

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        columns = tokenize_prompt_completion(
            row[args.prompt_column], row[args.completion_column], tokenizer, max_length
        )
        return {name: columns[name] for name in ("input_ids", "attention_mask", "labels")}

    result = rows.map(tokenize, desc="Tokenizing")
    empty = [i for i, labels in enumerate(result["labels"]) if all(label == IGNORED for label in labels)]
    if empty:
        raise ValueError(
            f"{len(empty)} of {len(result)} rows have no token of their completion within the first {max_length} "
            f"tokens (first: row {empty[0]}). Expected at least one. Raise `max_length`, or filter these rows out."
        )
    return result


def as_text(value: Any) -> str:
    """Write a prompt or completion as text, messages one after the other."""
    return value if isinstance(value, str) else " ".join(f"{turn['role']}: {turn['content']}" for turn in value)
