"""Tune a language model on instructions with LoRA and `Trainer`, then show which examples taught it its answers.

    python recipes/lora_sft/run.py
    python recipes/lora_sft/run.py --config recipes/lora_sft/smallest.yaml

See README.md beside this file.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import torch
from datasets import Dataset
from instruction_data import DataArguments, as_text, load_instructions, tokenized
from kit.files import save_dataset, write_json
from kit.outcome import attributions, print_attributions, write_report
from kit.text_models import train_tokenizer
from kit.training import TrainingRecipeArguments, start, train_and_attribute
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    set_seed,
)

from hf_trak import TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.data.rows import fingerprint_dataset

TOKENS = ("input_ids", "attention_mask", "labels")


@dataclass
class RecipeArguments(TrainingRecipeArguments):
    """Arguments of the model, its training and the output; `DataArguments` and `TrakConfig` hold the others."""

    output_dir: str = field(
        default="outputs/lora_sft",
        metadata={"help": "Adapters, features, scores and summary go here. The same command again resumes."},
    )
    model_name_or_path: str | None = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        metadata={"help": "Base model. `None` takes a small one with random weights, and trains its embeddings, too."},
    )
    max_length: int = field(default=512, metadata={"help": "Tokens per example; the rest is cut off."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters, times the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters, in training."})
    target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the layers with adapters. `None` takes all linear ones but the head."},
    )
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the training rows."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Training batch size per process."})
    learning_rate: float = field(default=2e-4, metadata={"help": "Highest learning rate of AdamW, decaying to 0."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of AdamW."})
    texts_per_side: int = field(default=3, metadata={"help": "Training examples to print on either side of a target."})


def build_model(args: RecipeArguments, data: DataArguments, train: Dataset) -> tuple[PeftModel, Any]:
    """Load or make the base model, put new adapters on it, and return both with the tokenizer."""
    to_save = None
    if args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        base = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    else:
        texts = (as_text(text) for column in (data.prompt_column, data.completion_column) for text in train[column])
        tokenizer = train_tokenizer(texts, vocab_size=600, max_length=args.max_length, pairs=False)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.max_length,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        base, to_save = LlamaForCausalLM(config), ["embed_tokens", "lm_head"]
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.target_modules or "all-linear",
        modules_to_save=to_save,
    )
    return get_peft_model(base, adapters), tokenizer


def present(
    train: Dataset,
    targets: Dataset,
    scored: Dataset,
    args: RecipeArguments,
    data: DataArguments,
    facts: dict[str, Any],
) -> None:
    """Write `scored/`, `train/` and `summary.json`, and print some targets."""
    output_dir = Path(args.output_dir)

    def text(rows: Dataset, row: int) -> str:
        return f"{as_text(rows[row][data.prompt_column])} {as_text(rows[row][data.completion_column])}"

    found = attributions(
        scored,
        range(min(args.num_targets, len(targets))),
        args.texts_per_side,
        lambda row: {"text": text(targets, row)},
        lambda row: {"text": text(train, row)},
    )
    answers = [as_text(value) for value in train[data.completion_column]]
    helpers = np.asarray(scored["trak_indices"][:])
    first = [
        answers[rows[0]] == as_text(answer)
        for rows, answer in zip(helpers, targets[data.completion_column], strict=True)
    ]
    save_dataset(train, output_dir / "train")
    save_dataset(scored.remove_columns(list(TOKENS)), output_dir / "scored")
    summary = {
        "dataset": data.dataset_name,
        "train_rows": len(train),
        "targets": len(targets),
        "same_completion_first": float(np.mean(first)),
        "attributions": found,
        **facts,
    }
    write_json(output_dir / "summary.json", summary)
    print_attributions(found, lambda entry: entry["text"])
    print(
        f"\n{len(train)} training examples, {len(targets)} targets, {facts['parameters']:,} parameters in adapters. "
        f"The example that helped a target most has its completion for {np.mean(first):.1%} of the targets.\n"
        f"Scores:  {output_dir / 'scored'}\nSeconds: {facts['seconds']}"
    )


def main(argv: list[str] | None = None) -> None:
    kinds = (RecipeArguments, DataArguments, TrakConfig)
    args, data, trak = parse_yaml_and_args(kinds, argv, description=__doc__.splitlines()[0])
    training, trak = start(args, trak)
    with training.main_process_first(desc="loading the dataset"):
        train, targets = load_instructions(data)
    set_seed(args.seed)
    model, tokenizer = build_model(args, data, train)
    with training.main_process_first(desc="tokenizing"):
        train_tokens, target_tokens = (tokenized(rows, tokenizer, args.max_length, data) for rows in (train, targets))
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train_tokens,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads labels beside the inputs
    )
    settings = args.settings(
        "model_name_or_path", "max_length", "lora_r", "lora_alpha", "lora_dropout", "target_modules"
    )
    settings |= {"train_dataset": fingerprint_dataset(train)}
    outcome = train_and_attribute(trainer, args, trak, settings, target_tokens)
    write_report(outcome.attributor, Path(args.output_dir), text_columns=[data.prompt_column, data.completion_column])
    if trainer.is_world_process_zero():
        present(train, targets, outcome.scored, args, data, outcome.facts(trak, data, args))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
