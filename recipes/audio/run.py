"""Train an audio classifier on sounds with some wrong labels, and find these labels.

    python recipes/audio/run.py

Some rising tones are labelled as falling. The attribution of other rising tones has to find the clips that taught the
model to mistake them. See README.md beside this file.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled
from kit.files import save_dataset, write_json
from kit.outcome import write_report
from sounds import BANDS, FRAMES, KINDS, TAKEN_FOR, draw
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_trak import TrakAttributor, TrakConfig


def train(rows: Dataset, args: argparse.Namespace) -> Trainer:
    """Train a small Audio Spectrogram Transformer from random weights."""
    config = ASTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, patch_size=8,
        frequency_stride=8, time_stride=8, max_length=FRAMES, num_mel_bins=BANDS, num_labels=len(KINDS),
        id2label=dict(enumerate(KINDS)), label2id={kind: place for place, kind in enumerate(KINDS)},
    )  # fmt: skip
    training = TrainingArguments(
        str(args.output_dir / "training"),
        num_train_epochs=args.num_train_epochs,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        warmup_steps=0.1,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
        use_cpu=args.use_cpu,
        disable_tqdm=are_progress_bars_disabled(),
    )
    trainer = Trainer(ASTForAudioClassification(config), training, default_data_collator, rows)
    trainer.train()
    return trainer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/audio"), help="Where everything goes.")
    parser.add_argument("--rows", type=int, default=800, help="Training clips.")
    parser.add_argument("--mislabelled_share", type=float, default=0.3, help="Share of rising tones labelled falling.")
    parser.add_argument("--num_train_epochs", type=float, default=12, help="Passes over the training clips.")
    parser.add_argument("--proj_dim", type=int, default=512, help="Features per row.")
    parser.add_argument("--num_targets", type=int, default=16, help="Held-out rising tones.")
    parser.add_argument("--top_k", type=int, default=20, help="Training rows per target.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of everything.")
    parser.add_argument("--use_cpu", action="store_true", help="Stay on the CPU.")
    args = parser.parse_args(argv)

    ((asked, said),) = TAKEN_FOR.items()
    rows = draw(args.rows, args.mislabelled_share, args.seed)
    others = draw(len(KINDS) * args.num_targets, 0.0, args.seed + 1)
    targets = others.filter(lambda row: row["kind"] == asked)
    set_seed(args.seed)
    trainer = train(rows, args)
    predicted = trainer.predict(others).predictions.argmax(axis=1)
    right = predicted == np.asarray(others["labels"][:])
    of_asked = np.asarray([kind == asked for kind in others["kind"]])
    config = TrakConfig(
        output_dir=str(args.output_dir / "trak"), proj_dim=args.proj_dim, lambda_relative=0.1, seed=args.seed,
        per_device_batch_size=32, use_cpu=args.use_cpu,
    )  # fmt: skip
    attributor = TrakAttributor.from_trainer(trainer, config).featurize()
    scored = attributor.attribute(targets, top_k=args.top_k, method="index")
    write_report(attributor, args.output_dir, attributor.self_influence(), label_names=KINDS)

    wrong = np.asarray(rows["mislabelled"][:])
    found = {
        "accuracy": float(right.mean()),
        f"accuracy_of_{asked}": float(right[of_asked].mean()),
        "mislabelled_share": float(wrong.mean()),
        "mislabelled_among_most_harmful": float(wrong[np.asarray(scored["trak_harmful_indices"][:])].mean()),
        "mislabelled_among_most_helpful": float(wrong[np.asarray(scored["trak_indices"][:])].mean()),
    }
    save_dataset(rows, args.output_dir / "train")
    save_dataset(scored, args.output_dir / "scored")
    write_json(args.output_dir / "summary.json", {"rows": len(rows), "targets": len(targets), **found})
    for place, target in enumerate(scored.select(range(min(4, len(scored))))):
        clips = [f"{'*' * rows[i]['mislabelled']}{rows[i]['kind']}" for i in target["trak_harmful_indices"][:6]]
        print(f"Target {place} ({target['kind']}): harmed most: {' '.join(clips)}")
    print(
        f"\n{found['accuracy']:.0%} of held-out clips are told right, {found[f'accuracy_of_{asked}']:.0%} of {asked}."
    )
    print(f"{found['mislabelled_share']:.0%} of the training clips are {asked} and labelled as {said} (*).")
    print(f"Of the {args.top_k} that harmed a target most, {found['mislabelled_among_most_harmful']:.0%} are;")
    print(f"of the {args.top_k} that helped most, {found['mislabelled_among_most_helpful']:.0%}.")


if __name__ == "__main__":
    main()
