"""Train a language model on preferences with DPO (TRL), then show which pairs made it prefer what it prefers.

    python recipes/dpo/run.py
    python recipes/dpo/run.py --config recipes/dpo/smallest.yaml

See README.md beside this file.
"""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import torch
from datasets import Dataset
from kit.files import save_dataset, write_json
from kit.outcome import attributions, print_attributions, shortened, write_report
from kit.text_models import train_tokenizer
from kit.training import TrainingRecipeArguments, start, train_and_attribute
from preference_data import DataArguments, as_text, load_preferences
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer

from hf_trak import TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.data.rows import fingerprint_dataset


@dataclass
class RecipeArguments(TrainingRecipeArguments):
    """Arguments of the model, its training and the output; `DataArguments` and `TrakConfig` hold the others."""

    output_dir: str = field(
        default="outputs/dpo",
        metadata={"help": "Model, features, scores and summary go here. The same command again resumes."},
    )
    model_name_or_path: str | None = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        metadata={"help": "Model to train, and its own reference. `None` takes a small one with random weights."},
    )
    max_length: int = field(default=512, metadata={"help": "Tokens per answer with its prompt; the rest is cut off."})
    beta: float = field(default=0.1, metadata={"help": "β of DPO: how closely the model is held to its reference."})
    loss_type: str = field(
        default="sigmoid", metadata={"help": "The loss: sigmoid, ipo, hinge, robust, sigmoid_norm."}
    )
    lora_r: int | None = field(
        default=None, metadata={"help": "Rank of adapters on all linear layers. `None` trains the whole model."}
    )
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the training pairs."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Training batch size per process."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Highest learning rate of AdamW, decaying to 0."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of AdamW."})
    pairs_per_side: int = field(default=3, metadata={"help": "Training pairs to print on either side of a target."})


def build_model(args: RecipeArguments, train: Dataset) -> tuple[Any, Any, Any]:
    """Load or make the model, its reference (`None` for adapters, which are switched off) and the tokenizer."""
    if args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        copies = [
            AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
            for _ in range(1 if args.lora_r else 2)
        ]
    else:
        texts = (as_text(row.get("prompt", "")) + as_text(row["chosen"]) for row in train)
        tokenizer = train_tokenizer(texts, vocab_size=600, max_length=args.max_length, pairs=False)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.max_length,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        made = LlamaForCausalLM(config)
        copies = [made] if args.lora_r else [made, LlamaForCausalLM(config)]
        for copy in copies[1:]:
            copy.load_state_dict(made.state_dict())
    return copies[0], copies[1] if len(copies) > 1 else None, tokenizer


def build_trainer(args: RecipeArguments, training: Any, train: Dataset) -> DPOTrainer:
    """Make TRL's trainer, which also makes tokens of the pairs."""
    model, reference, tokenizer = build_model(args, train)
    adapters = None
    if args.lora_r:
        from peft import LoraConfig

        adapters = LoraConfig(task_type="CAUSAL_LM", r=args.lora_r, target_modules="all-linear")
    common = {each.name: getattr(training, each.name) for each in fields(training) if each.init}
    config = DPOConfig(
        **{**common, "bf16": training.bf16, "report_to": "none"},
        beta=args.beta,
        loss_type=[args.loss_type],
        max_length=args.max_length,
    )
    return DPOTrainer(model, reference, config, train_dataset=train, processing_class=tokenizer, peft_config=adapters)


def present(
    train: Dataset,
    targets: Dataset,
    scored: Dataset,
    together: Dataset,
    args: RecipeArguments,
    data: DataArguments,
    facts: dict[str, Any],
) -> None:
    """Write `scored/`, `train/` and `summary.json`, and print some targets."""
    output_dir = Path(args.output_dir)

    def text(rows: Dataset, row: int) -> dict[str, Any]:
        pair = rows[row]
        chosen, rejected = (shortened(as_text(pair[side]), 60) for side in ("chosen", "rejected"))
        swapped = " (swapped)" if pair.get("swapped") else ""
        return {"text": f"{shortened(as_text(pair.get('prompt', '')), 50)} [{chosen}] over [{rejected}]{swapped}"}

    found = attributions(
        scored,
        range(min(args.num_targets, len(targets))),
        args.pairs_per_side,
        lambda row: text(targets, row),
        lambda row: text(train, row),
    )
    of_all = attributions(together, [0], args.pairs_per_side, lambda _: {}, lambda row: text(train, row))
    planted: dict[str, float] = {}
    if "swapped" in train.column_names:
        swapped = np.asarray(train["swapped"][:])
        planted = {
            "swapped_share": float(swapped.mean()),
            "swapped_among_most_harmful": float(swapped[together[0]["trak_harmful_indices"]].mean()),
            "swapped_among_most_helpful": float(swapped[together[0]["trak_indices"]].mean()),
        }
    save_dataset(train, output_dir / "train")
    save_dataset(scored, output_dir / "scored")
    summary = {
        "dataset": data.dataset_name,
        "train_rows": len(train),
        "targets": len(targets),
        **planted,
        "attributions": found,
        "all_targets_together": of_all[0],
        **facts,
    }
    write_json(output_dir / "summary.json", summary)
    print_attributions(found, lambda entry: entry["text"])
    print_attributions([{**of_all[0], "row": "mean"}], lambda entry: "all of them together")
    print(f"\n{len(train)} training pairs, {len(targets)} targets, {facts['parameters']:,} parameters.")
    if planted:
        print(
            f"Of the {args.top_k} pairs that harmed the targets most, all together, "
            f"{planted['swapped_among_most_harmful']:.0%} have swapped answers; of those that helped most "
            f"{planted['swapped_among_most_helpful']:.0%}, of all pairs {planted['swapped_share']:.0%}."
        )
    print(f"Scores:  {output_dir / 'scored'}\nSeconds: {facts['seconds']}")


def main(argv: list[str] | None = None) -> None:
    kinds = (RecipeArguments, DataArguments, TrakConfig)
    args, data, trak = parse_yaml_and_args(kinds, argv, description=__doc__.splitlines()[0])
    training, trak = start(args, trak)
    with training.main_process_first(desc="loading the dataset"):
        train, targets = load_preferences(data)
    set_seed(args.seed)
    trainer = build_trainer(args, training, train)
    settings = args.settings("model_name_or_path", "max_length", "beta", "loss_type", "lora_r")
    settings |= {"train_dataset": fingerprint_dataset(train)}
    outcome = train_and_attribute(trainer, args, trak, settings, targets)
    write_report(outcome.attributor, Path(args.output_dir))
    together = outcome.attributor.attribute(targets, top_k=args.top_k, method=outcome.method, group_by="all")
    if trainer.is_world_process_zero():
        rows = outcome.attributor.train_dataset
        present(rows, targets, outcome.scored, together, args, data, outcome.facts(trak, data, args))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
