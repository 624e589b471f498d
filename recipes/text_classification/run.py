"""Train a text classifier with `Trainer`, then show which training texts taught it what it does.

    python recipes/text_classification/run.py
    python recipes/text_classification/run.py --config recipes/text_classification/smallest.yaml

See README.md beside this file.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import torch
from datasets import ClassLabel, Dataset
from kit import splits
from kit.files import save_dataset, write_json
from kit.outcome import attributions, print_attributions, write_report
from kit.python_text import python_packages
from kit.splits import SplitArguments
from kit.text_models import train_tokenizer
from kit.training import TrainingRecipeArguments, start, train_and_attribute
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Trainer,
    set_seed,
)

from hf_trak import TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.data.rows import fingerprint_dataset
from hf_trak.modelout_functions.margins import margin
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS


@dataclass
class DataArguments(SplitArguments):
    """The texts to train on and those to explain."""

    dataset_name: str = field(
        default="nyu-mll/glue",
        metadata={
            "help": "A dataset on the Hub, a directory written by `save_to_disk`, or `python_packages` (documentation "
            "of Python's library by package, needs no network)."
        },
    )
    dataset_config_name: str | None = field(default="qnli", metadata={"help": "Configuration of it."})
    eval_split: str | None = field(
        default="validation",
        metadata={"help": "Split of targets. `None` takes `test` or `validation`, or holds out `eval_fraction`."},
    )
    text_columns: list[str] = field(
        default_factory=lambda: ["question", "sentence"],
        metadata={"help": "Column of texts, or two of pairs of texts."},
    )
    label_column: str = field(default="label", metadata={"help": "Column of labels."})
    max_train_samples: int | None = field(
        default=50_000, metadata={"help": "Train on this many rows, evenly spaced over the split. `None` takes all."}
    )
    max_eval_samples: int | None = field(
        default=500, metadata={"help": "Attribute this many targets, evenly spaced over the split. `None` takes all."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.text_columns) not in (1, 2):
            raise ValueError(f"`text_columns` is {self.text_columns}. Expected one column, or two for pairs of texts.")


@dataclass
class RecipeArguments(TrainingRecipeArguments):
    """Arguments of the model, its training and the output; `DataArguments` and `TrakConfig` hold the others."""

    output_dir: str = field(
        default="outputs/text_classification",
        metadata={"help": "Checkpoints, features, scores and summary go here. The same command again resumes."},
    )
    model_name_or_path: str | None = field(
        default="google-bert/bert-base-uncased",
        metadata={"help": "Pretrained model to finetune. `None` trains a small BERT from scratch."},
    )
    max_length: int = field(default=128, metadata={"help": "Tokens per text or pair of texts; the rest is cut off."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the training rows."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Highest learning rate of AdamW, decaying to 0."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of AdamW."})
    texts_per_side: int = field(default=3, metadata={"help": "Training texts to print on either side of a target."})


def load_texts(args: DataArguments) -> tuple[Dataset, Dataset]:
    """Load the training rows and the targets, with text columns and a `ClassLabel` column."""
    train, targets = splits.load_splits(args, {"python_packages": python_packages})
    columns = {"text_columns": args.text_columns[0], "label_column": args.label_column}
    splits.require_columns((train, targets), columns, args.dataset_name)
    splits.require_columns((train, targets), {"text_columns": args.text_columns[-1]}, args.dataset_name)
    if not isinstance(train.features[args.label_column], ClassLabel):
        train = train.class_encode_column(args.label_column)
        targets = targets.cast_column(args.label_column, train.features[args.label_column])
    if any(min(dataset[args.label_column], default=0) < 0 for dataset in (train, targets)):
        raise ValueError(f"{args.dataset_name!r} has rows without a label (-1). Set `eval_split` to a labelled split.")
    return train, targets


def build_model(args: RecipeArguments, data: DataArguments, train: Dataset) -> tuple[PreTrainedModel, Any]:
    """Load or make the model to train, and its tokenizer."""
    names = train.features[data.label_column].names
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    if args.model_name_or_path is not None:
        model = AutoModelForSequenceClassification.from_pretrained(
            args.model_name_or_path, **labels, dtype=torch.float32
        )
        return model, AutoTokenizer.from_pretrained(args.model_name_or_path)
    texts = (text for column in data.text_columns for text in train[column])
    tokenizer = train_tokenizer(texts, vocab_size=2000, max_length=args.max_length, pairs=True)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=args.max_length, pad_token_id=tokenizer.pad_token_id, **labels,
    )  # fmt: skip
    return BertForSequenceClassification(config), tokenizer


def tokenized(rows: Dataset, tokenizer: Any, args: RecipeArguments, data: DataArguments) -> Dataset:
    """Add the columns that the model takes to the rows."""

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [batch[column] for column in data.text_columns]
        return {**tokenizer(*texts, truncation=True, max_length=args.max_length), "labels": batch[data.label_column]}

    return rows.map(tokenize, batched=True, desc="Tokenizing")


def main(argv: list[str] | None = None) -> None:
    kinds = (RecipeArguments, DataArguments, TrakConfig)
    args, data, trak = parse_yaml_and_args(kinds, argv, description=__doc__.splitlines()[0])
    output_dir = Path(args.output_dir)
    training, trak = start(args, trak)
    with training.main_process_first(desc="loading the dataset"):
        train, targets = load_texts(data)
    set_seed(args.seed)
    model, tokenizer = build_model(args, data, train)
    with training.main_process_first(desc="tokenizing"):
        train_tokens, target_tokens = (tokenized(rows, tokenizer, args, data) for rows in (train, targets))
    trainer = Trainer(model=model, args=training, train_dataset=train_tokens, processing_class=tokenizer)
    settings = args.settings("model_name_or_path", "max_length")
    settings |= {"text_columns": data.text_columns, "train_dataset": fingerprint_dataset(train)}

    def with_guesses(_: PreTrainedModel) -> Dataset:
        guesses = trainer.predict(target_tokens).predictions.argmax(axis=-1)
        return target_tokens.add_column("predicted", guesses, feature=train.features[data.label_column])

    outcome = train_and_attribute(trainer, args, trak, settings, with_guesses)
    logits = trainer.predict(outcome.targets).predictions
    self_influence = outcome.attributor.self_influence(method=outcome.method)
    columns = {"text_columns": data.text_columns, "label_column": data.label_column}
    write_report(outcome.attributor, output_dir, self_influence, **columns)
    if trainer.is_world_process_zero():
        facts = outcome.facts(trak, data, args)
        present(train, targets, outcome.scored, logits, self_influence, args, data, output_dir, facts)
    trainer.accelerator.wait_for_everyone()


def present(
    train: Dataset,
    targets: Dataset,
    scored: Dataset,
    logits: np.ndarray,
    self_influence: torch.Tensor,
    args: RecipeArguments,
    data: DataArguments,
    output_dir: Path,
    facts: dict[str, Any],
) -> None:
    """Write `scored/`, `train/` and `summary.json`, and print the targets with the lowest margins."""
    names = train.features[data.label_column].names
    labels, train_labels = (np.asarray(rows[data.label_column][:]) for rows in (targets, train))
    guesses = logits.argmax(axis=-1)
    margins = margin(torch.from_numpy(logits).double(), torch.from_numpy(labels)).numpy()

    def text(rows: Dataset, row: int) -> str:
        return " / ".join(rows[row][column] for column in data.text_columns)

    found = attributions(
        scored,
        np.argsort(margins)[: args.num_targets].tolist(),
        args.texts_per_side,
        lambda row: {"text": text(targets, row), "label": names[labels[row]], "predicted": names[guesses[row]]},
        lambda row: {"label": names[train_labels[row]], "text": text(train, row)},
    )
    helpers = np.asarray(scored["trak_indices"][:])[:, :5]
    strange = self_influence.argsort(descending=True)[:20].tolist()
    accuracy = float((guesses == labels).mean())
    same = float((train_labels[helpers] == labels[:, None]).mean())
    shown = {*targets.column_names, "predicted", *TOP_K_COLUMNS}
    kept = scored.select_columns([name for name in scored.column_names if name in shown])
    save_dataset(kept, output_dir / "scored")
    save_dataset(train, output_dir / "train")
    write_json(
        output_dir / "summary.json",
        {
            "dataset": data.dataset_name,
            "train_rows": len(train),
            "targets": len(targets),
            "accuracy": accuracy,
            "same_label_among_top_5": same,
            "attributions": found,
            "highest_self_influence": [
                {"row": row, "label": names[train_labels[row]], "score": float(self_influence[row])} for row in strange
            ],
            **facts,
        },
    )
    print_attributions(
        found,
        lambda entry: (
            f"label {entry['label']}, predicted {entry['predicted']} "
            f"({'right' if entry['label'] == entry['predicted'] else 'WRONG'})\n  {entry['text']}"
        ),
    )
    print(f"\nHighest self-influence, worth a look for wrong labels: training rows {strange[:10]}")
    print(
        f"\n{len(train)} training texts, {len(targets)} targets, accuracy {accuracy:.1%}. Of the five training texts "
        f"that helped a target most, {same:.1%} share its label.\nScores:  {output_dir / 'scored'}\n"
        f"Seconds: {facts['seconds']}"
    )


if __name__ == "__main__":
    main()
