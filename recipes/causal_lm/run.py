"""Finetune a causal language model with `Trainer`, then show which documents made it say what it says, word by word.

    python recipes/causal_lm/run.py
    python recipes/causal_lm/run.py --config recipes/causal_lm/smallest.yaml

See README.md beside this file.
"""

import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import torch
from datasets import Dataset
from kit import splits
from kit.files import save_dataset, write_json
from kit.outcome import attributions, print_attributions, write_report
from kit.python_text import python_reference
from kit.splits import SplitArguments
from kit.text_models import train_tokenizer
from kit.training import TrainingRecipeArguments, start, train_and_attribute
from people import people
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    set_seed,
)

from hf_trak import TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.data.language import tokenize_prompt_completion
from hf_trak.data.rows import fingerprint_dataset


@dataclass
class DataArguments(SplitArguments):
    """The documents to train on and those to explain."""

    dataset_name: str = field(
        default="Salesforce/wikitext",
        metadata={
            "help": "A dataset on the Hub, a directory written by `save_to_disk`, or `people` (made-up sentences) or "
            "`python_reference` (Python's language reference), which need no network."
        },
    )
    dataset_config_name: str | None = field(default="wikitext-2-raw-v1", metadata={"help": "Configuration of it."})
    text_column: str = field(default="text", metadata={"help": "Column of documents, one per row."})
    least_words: int = field(
        default=20, metadata={"help": "Leave out rows with fewer words, such as empty lines and headings."}
    )
    max_eval_samples: int | None = field(
        default=20, metadata={"help": "Attribute this many targets, evenly spaced over the split. `None` takes all."}
    )
    prompt: str | None = field(
        default=None, metadata={"help": "Explain what the model says after this, instead of the rows of `eval_split`."}
    )
    completion: str | None = field(
        default=None, metadata={"help": "What it is to have said after `prompt`. `None` takes its own continuation."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.completion is not None and self.prompt is None:
            raise ValueError(f"`completion` is {self.completion!r} without a `prompt`. Expected both, or none.")


@dataclass
class RecipeArguments(TrainingRecipeArguments):
    """Arguments of the model, its training and the output; `DataArguments` and `TrakConfig` hold the others."""

    COUNTS: ClassVar[tuple[str, ...]] = (*TrainingRecipeArguments.COUNTS, "texts_per_side")

    output_dir: str = field(
        default="outputs/causal_lm",
        metadata={"help": "Checkpoints, features, scores and summary go here. The same command again resumes."},
    )
    model_name_or_path: str | None = field(
        default="openai-community/gpt2",
        metadata={"help": "Pretrained model to finetune. `None` trains a small GPT-2 from scratch."},
    )
    block_size: int = field(default=256, metadata={"help": "Tokens per document; the rest is cut off."})
    new_tokens: int = field(default=8, metadata={"help": "Tokens of the model's own continuation of `prompt`."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the training rows."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Training batch size per process."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Highest learning rate of AdamW, decaying to 0."})
    num_targets: int = field(default=4, metadata={"help": "Targets to print, with their scores word by word."})
    texts_per_side: int = field(default=3, metadata={"help": "Documents to print on either side of a target."})


def load_documents(args: DataArguments) -> tuple[Dataset, Dataset]:
    """Load the training documents and those to explain, without rows of few words."""
    train, targets = splits.load_splits(
        args_without_limits(args), {"people": people, "python_reference": python_reference}
    )
    splits.require_columns((train, targets), {"text_column": args.text_column}, args.dataset_name)
    train, targets = (
        rows.filter(lambda row: len(row[args.text_column].split()) >= args.least_words, desc="Leaving out short rows")
        for rows in (train, targets)
    )
    if not len(train) or not len(targets):
        raise ValueError(
            f"No row of {args.dataset_name!r} has {args.least_words} words in `{args.text_column}`. Expected some. "
            "Lower `least_words`, or set `text_column`."
        )
    return (
        splits.evenly_spaced(train, args.max_train_samples),
        splits.evenly_spaced(targets, args.max_eval_samples),
    )


def args_without_limits(args: DataArguments) -> DataArguments:
    """Copy the arguments without limits, which count the documents that are left after short rows are dropped."""
    return DataArguments(**{**asdict(args), "max_train_samples": None, "max_eval_samples": None})


def build_model(args: RecipeArguments, data: DataArguments, train: Dataset) -> tuple[PreTrainedModel, Any]:
    """Load or make the model to train, and its tokenizer."""
    if args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # labels of padding are -100, so nothing is lost
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32), tokenizer
    tokenizer = train_tokenizer(train[data.text_column], vocab_size=2000, max_length=args.block_size, pairs=False)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=96, n_layer=3, n_head=4, n_positions=args.block_size,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return GPT2LMHeadModel(config), tokenizer


def tokenized(rows: Dataset, tokenizer: Any, args: RecipeArguments, data: DataArguments) -> Dataset:
    """Make one sample per document: its first `block_size` tokens, all labels, and their places in the text."""

    def tokenize(row: dict[str, Any]) -> dict[str, list[Any]]:
        encoded = tokenizer(
            row[data.text_column],
            truncation=True,
            max_length=args.block_size,
            return_offsets_mapping=tokenizer.is_fast,
        )
        ids = [*encoded["input_ids"], tokenizer.eos_token_id][: args.block_size]
        places = {}
        if tokenizer.is_fast:  # a report marks words by them
            places = {"offset_mapping": [*encoded["offset_mapping"], (0, 0)][: args.block_size]}
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids, **places}

    return rows.map(tokenize, desc="Tokenizing")


def completed(model: PreTrainedModel, tokenizer: Any, args: RecipeArguments, data: DataArguments) -> Dataset:
    """Make a target of the prompt and its completion, whose tokens alone are labels."""
    assert data.prompt is not None
    completion = data.completion
    if completion is None:
        inputs = tokenizer(data.prompt, return_tensors="pt").to(model.device)
        with torch.no_grad():
            ids = model.eval().generate(
                **inputs, max_new_tokens=args.new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        completion = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    row = tokenize_prompt_completion(data.prompt, completion, tokenizer, max_length=args.block_size)
    ended = row["labels"][-1] == tokenizer.eos_token_id  # no part of what the model said
    return Dataset.from_list(
        [
            {
                data.text_column: data.prompt + completion,
                **{name: column[: -1 if ended else None] for name, column in row.items()},
            }
        ]
    )


def main(argv: list[str] | None = None) -> None:
    kinds = (RecipeArguments, DataArguments, TrakConfig)
    args, data, trak = parse_yaml_and_args(kinds, argv, description=__doc__.splitlines()[0])
    output_dir = Path(args.output_dir)
    # A token has as many logits as the vocabulary has entries: small batches, and only their loss is kept.
    training, trak = start(args, trak, per_device_eval_batch_size=8, prediction_loss_only=True)
    with training.main_process_first(desc="loading the dataset"):
        train, targets = load_documents(data)
    set_seed(args.seed)
    model, tokenizer = build_model(args, data, train)
    with training.main_process_first(desc="tokenizing"):
        train_tokens, target_tokens = (tokenized(rows, tokenizer, args, data) for rows in (train, targets))
    trainer = Trainer(
        model=model, args=training, train_dataset=train_tokens, processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads labels, too
    )  # fmt: skip
    settings = args.settings("model_name_or_path", "block_size")
    settings |= {"text_column": data.text_column, "train_dataset": fingerprint_dataset(train)}

    def targets_of(model: PreTrainedModel) -> Dataset:
        return target_tokens if data.prompt is None else completed(model, tokenizer, args, data)

    outcome = train_and_attribute(trainer, args, trak, settings, targets_of)
    shown = outcome.targets.select(range(min(args.num_targets, len(outcome.targets))))
    by_token = outcome.attributor.attribute(shown, top_k=args.texts_per_side, method=outcome.method, per_token=True)
    write_report(outcome.attributor, output_dir, text_columns=[data.text_column], examples=args.texts_per_side)
    loss = trainer.evaluate(target_tokens)["eval_loss"]
    if trainer.is_world_process_zero():
        facts = {**outcome.facts(trak, data, args), "perplexity": math.exp(loss)}
        present(train, outcome.scored, by_token, tokenizer, args, data, output_dir, facts)
    trainer.accelerator.wait_for_everyone()


def present(
    train: Dataset,
    scored: Dataset,
    by_token: Dataset,
    tokenizer: Any,
    args: RecipeArguments,
    data: DataArguments,
    output_dir: Path,
    facts: dict[str, Any],
) -> None:
    """Write `scored/`, `by_token/`, `train/`, `summary.json`, and print a few targets with their strongest tokens."""
    found = attributions(
        by_token,
        range(len(by_token)),
        args.texts_per_side,
        lambda row: {"text": by_token[row][data.text_column], "words": strongest_words(by_token[row], tokenizer)},
        lambda row: {"text": train[row][data.text_column]},
    )
    save_dataset(scored, output_dir / "scored")
    save_dataset(by_token, output_dir / "by_token")
    save_dataset(train, output_dir / "train")
    content = {"dataset": data.dataset_name, "train_rows": len(train), "targets": len(scored), "attributions": found}
    write_json(output_dir / "summary.json", {**content, **facts})
    print_attributions(
        found,
        lambda entry: (
            f"{entry['text']}\n  tokens with the largest part in the highest score: "
            + ", ".join(f"{word['token']!r} ({word['score']:+.3g})" for word in entry["words"])
        ),
    )
    print(
        f"\n{len(train)} training documents, {len(scored)} targets, perplexity {facts['perplexity']:.1f} on held-out "
        f"documents.\nScores:  {output_dir / 'scored'}, token by token: {output_dir / 'by_token'}\n"
        f"Seconds: {facts['seconds']}"
    )


def strongest_words(target: dict[str, Any], tokenizer: Any, count: int = 6) -> list[dict[str, Any]]:
    """Find the label tokens that the most helpful document helped most."""
    pairs = zip(target["trak_token_positions"], target["trak_token_scores"][0], strict=True)
    best = sorted(pairs, key=lambda pair: -pair[1])[:count]
    return [
        {"position": position, "token": tokenizer.decode([target["input_ids"][position]]), "score": score}
        for position, score in best
    ]


if __name__ == "__main__":
    main()
