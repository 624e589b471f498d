"""Train a vision-language model on chats about pictures (TRL), and find the chats with wrong answers.

    python recipes/vlm_sft/run.py

Some pictures of a three are said to be an eight. The attribution of the right answer to other threes has to find the
chats that speak against it. See README.md beside this file.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import torch
from chat_data import ASKED, DIGITS, SAID, load, processor
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled
from kit.files import save_dataset, write_json
from kit.outcome import write_report
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, set_seed
from trl import SFTConfig, SFTTrainer

from hf_trak import TrakAttributor, TrakConfig

FACTS = ("digit", "wrong")
"""Columns that say what a row is; the trainer is given the others."""


def build_model(words: Any) -> Qwen2VLForConditionalGeneration:
    """Make a small Qwen2-VL with random weights for a processor."""
    tokenizer = words.tokenizer
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
    }
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0},
        },
        vision_config={
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2, "embed_dim": 32,
            "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2,
        },
        tie_word_embeddings=False,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config)


def train(rows: Dataset, args: argparse.Namespace) -> SFTTrainer:
    """Train on the answers."""
    words = processor()
    config = SFTConfig(
        str(args.output_dir / "training"),
        num_train_epochs=args.num_train_epochs,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        warmup_steps=0.1,
        max_length=None,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        seed=args.seed,
        use_cpu=args.use_cpu,
        disable_tqdm=are_progress_bars_disabled(),
    )
    trainer = SFTTrainer(
        build_model(words), args=config, train_dataset=rows.remove_columns(FACTS), processing_class=words
    )
    trainer.train()
    return trainer


@torch.no_grad()
def answers(trainer: SFTTrainer, targets: Dataset) -> list[str]:
    """Say which digit the model sees in every picture: the likeliest one at the last word of the answer."""
    tokenizer, model = trainer.processing_class.tokenizer, trainer.model.eval()
    ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(DIGITS)))
    batch = trainer.data_collator(list(targets.remove_columns(FACTS)))
    labels = batch.pop("labels")
    logits = model(**{name: value.to(model.device) for name, value in batch.items()}).logits.cpu()
    rows, places = torch.isin(labels, ids).nonzero(as_tuple=True)
    return [DIGITS[place] for place in logits[rows, places - 1][:, ids].argmax(dim=1).tolist()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/vlm_sft"), help="Where everything goes.")
    parser.add_argument("--rows", type=int, default=600, help="Training chats.")
    parser.add_argument("--wrong_share", type=float, default=0.3, help="Share of wrong answers about threes.")
    parser.add_argument("--num_train_epochs", type=float, default=8, help="Passes over the training chats.")
    parser.add_argument("--proj_dim", type=int, default=512, help="Features per row.")
    parser.add_argument("--num_targets", type=int, default=16, help="Held-out chats about threes.")
    parser.add_argument("--top_k", type=int, default=20, help="Training rows per target.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of everything.")
    parser.add_argument("--use_cpu", action="store_true", help="Stay on the CPU.")
    args = parser.parse_args(argv)

    rows, targets = load(args.rows, args.num_targets, args.wrong_share, args.seed)
    set_seed(args.seed)
    trainer = train(rows, args)
    said = answers(trainer, targets)
    config = TrakConfig(
        output_dir=str(args.output_dir / "trak"), proj_dim=args.proj_dim, lambda_relative=0.1, seed=args.seed,
        per_device_batch_size=32, use_cpu=args.use_cpu,
    )  # fmt: skip
    attributor = TrakAttributor.from_trainer(trainer, config).featurize()
    scored = attributor.attribute(targets, top_k=args.top_k, method="index")
    write_report(attributor, args.output_dir)

    wrong = np.asarray(rows["wrong"][:])
    found = {
        "answers": said,
        "wrong_share": float(wrong.mean()),
        "wrong_among_most_harmful": float(wrong[np.asarray(scored["trak_harmful_indices"][:])].mean()),
        "wrong_among_most_helpful": float(wrong[np.asarray(scored["trak_indices"][:])].mean()),
    }
    save_dataset(rows, args.output_dir / "train")
    save_dataset(scored, args.output_dir / "scored")
    write_json(args.output_dir / "summary.json", {"rows": len(rows), "targets": len(targets), **found})
    digits, marks = rows["digit"][:], rows["wrong"][:]
    for place, target in enumerate(scored.select(range(min(4, len(scored))))):
        chats = [f"{'*' * marks[row]}{digits[row]}" for row in target["trak_harmful_indices"][:8]]
        print(f"Target {place} (a {DIGITS[ASKED]}, seen as {said[place]}): harmed most: {' '.join(chats)}")
    print(f"\n{found['wrong_share']:.0%} of the training chats call a {DIGITS[ASKED]} {DIGITS[SAID]} (*).")
    print(f"Of the {args.top_k} that harmed a target most, {found['wrong_among_most_harmful']:.0%} do;")
    print(f"of the {args.top_k} that helped most, {found['wrong_among_most_helpful']:.0%}.")


if __name__ == "__main__":
    main()
