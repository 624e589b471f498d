"""Train an embedding model on questions and answers, and show which pairs taught it to find the wrong answer.

    python recipes/embeddings/run.py

Somebody has paired some questions about the garden with answers about the kitchen. For other questions about the
garden the model then finds the kitchen, too, and the attribution has to find out why. See README.md beside this file.
Needs the package `sentence-transformers`.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import torch
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled
from kit.files import save_dataset, write_json
from kit.outcome import shortened, write_report
from kit.text_models import train_tokenizer
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, set_seed

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions import EmbeddingPairsModelOutput

TOPICS = {
    "garden": "rake hose seed tulip hedge lawn spade compost rose greenhouse soil shears",
    "kitchen": "oven pan kettle spoon flour whisk plate stove butter fridge bowl recipe",
    "harbour": "anchor sail rope buoy pier captain tide mast deck lighthouse net crane",
    "office": "printer desk stapler folder invoice monitor keyboard meeting lamp chair envelope calendar",
    "school": "pupil chalk lesson pencil homework bell globe textbook teacher exam ruler notebook",
    "stable": "horse saddle hay bridle hoof fence pony bucket straw stall groom blanket",
    "theatre": "curtain stage actor script costume ticket balcony spotlight orchestra mask scene prompter",
    "workshop": "hammer nail drill bench saw screw plank glue vice sandpaper chisel wrench",
}
"""Words of each topic, from which the texts are drawn."""
ASKED, WRONG = "garden", "kitchen"
MAX_TOKENS, BATCH_SIZE = 48, 32
FACTS = ("topic", "planted")
"""Columns that say where a row is from; the model is trained on the others."""


def load(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Draw questions with answers of the same topic, and take answers of another topic for some."""
    numbers = random.Random(args.seed)
    train = [_pair(topic, numbers) for topic in TOPICS for _ in range(args.rows_per_topic)]
    held_out = [_pair(topic, numbers) for topic in (ASKED, WRONG) for _ in range(args.num_targets)]
    asked = [row for row in train if row["topic"] == ASKED]
    for row in numbers.sample(asked, round(args.planted_share * len(asked))):
        row.update(positive=_pair(WRONG, numbers)["positive"], planted=True)
    return Dataset.from_list(train), Dataset.from_list(held_out)


def _pair(topic: str, numbers: random.Random) -> dict[str, Any]:
    words = TOPICS[topic].split()
    asked, said = numbers.sample(words, 3), numbers.sample(words, 4)
    return {
        "anchor": "what do I do with the {} and the {} near the {}".format(*asked),
        "positive": "put the {} behind the {}, then bring the {} to the {}".format(*said),
        "topic": topic,
        "planted": False,
    }


def build_model(rows: Dataset, directory: Path) -> SentenceTransformer:
    """Make a small BERT with random weights and a tokenizer, which are kept in a directory."""
    tokenizer = train_tokenizer(
        [*rows["anchor"], *rows["positive"]], vocab_size=600, max_length=MAX_TOKENS, pairs=True
    )
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=MAX_TOKENS, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    words = Transformer(str(directory))
    return SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension()), Normalize()])


def train(model: SentenceTransformer, rows: Dataset, args: argparse.Namespace) -> SentenceTransformerTrainer:
    """Train with in-batch negatives."""
    training = SentenceTransformerTrainingArguments(
        str(args.output_dir / "training"),
        num_train_epochs=args.num_train_epochs,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=2e-3,
        warmup_steps=0.1,
        batch_sampler="no_duplicates",
        save_strategy="no",
        report_to="none",
        seed=args.seed,
        use_cpu=args.use_cpu,
        disable_tqdm=are_progress_bars_disabled(),
    )
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, training, train_dataset=rows.remove_columns(FACTS), loss=loss)
    trainer.train()
    return trainer


def choose_targets(model: SentenceTransformer, held_out: Dataset, count: int) -> tuple[Dataset, float]:
    """Take the questions about the garden to which an answer about the kitchen is nearest beside their own answer.

    Returns:
        Rows with that answer as `negative`, and the share of all questions to which it is nearer than their own.
    """
    asked = held_out.filter(lambda row: row["topic"] == ASKED)
    wrong = held_out.filter(lambda row: row["topic"] == WRONG)
    questions, own, others = (
        torch.tensor(model.encode(texts, show_progress_bar=False))
        for texts in (asked["anchor"][:], asked["positive"][:], wrong["positive"][:])
    )
    nearest, places = (questions @ others.T).max(dim=1)
    ahead = nearest - (questions * own).sum(dim=1)
    chosen = ahead.argsort(descending=True, stable=True)[:count].tolist()
    negatives = [wrong[places[row].item()]["positive"] for row in chosen]
    return asked.select(chosen).add_column("negative", negatives), float((ahead > 0).float().mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/embeddings"), help="Where everything goes.")
    parser.add_argument(
        "--planted_share", type=float, default=0.5, help="Share of wrong pairs among those about the garden."
    )
    parser.add_argument("--rows_per_topic", type=int, default=80, help="Training pairs of each topic.")
    parser.add_argument("--num_train_epochs", type=float, default=3, help="Passes over the training pairs.")
    parser.add_argument("--proj_dim", type=int, default=512, help="Features per row.")
    parser.add_argument("--num_targets", type=int, default=24, help="Held-out questions about the garden.")
    parser.add_argument("--top_k", type=int, default=20, help="Training rows per target.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of everything.")
    parser.add_argument("--use_cpu", action="store_true", help="Stay on the CPU.")
    args = parser.parse_args(argv)

    rows, held_out = load(args)
    set_seed(args.seed)
    trainer = train(build_model(rows, args.output_dir / "model"), rows, args)
    targets, mistaken = choose_targets(trainer.model, held_out, args.num_targets)
    config = TrakConfig(
        output_dir=str(args.output_dir / "trak"), proj_dim=args.proj_dim, lambda_relative=0.3, seed=args.seed,
        per_device_batch_size=32, use_cpu=args.use_cpu,
    )  # fmt: skip
    # Targets ask why their negative is found instead of their positive.
    task = EmbeddingPairsModelOutput(trainer.loss.scale, batch_size=BATCH_SIZE, target="negatives")
    attributor = TrakAttributor.from_trainer(trainer, config, task).featurize()
    scored = attributor.attribute(targets, top_k=args.top_k, method="index")
    write_report(attributor, args.output_dir)
    together = attributor.attribute(targets, top_k=args.top_k, method="index", group_by="all")

    planted = np.asarray(rows["planted"][:])
    found = {
        "mistaken_questions": mistaken,
        "planted_share": float(planted.mean()),
        "planted_among_most_harmful": float(planted[together[0]["trak_harmful_indices"]].mean()),
        "planted_among_most_helpful": float(planted[together[0]["trak_indices"]].mean()),
        "of_single_targets_most_harmful": float(planted[np.asarray(scored["trak_harmful_indices"][:])].mean()),
        "of_single_targets_most_helpful": float(planted[np.asarray(scored["trak_indices"][:])].mean()),
    }
    save_dataset(rows, args.output_dir / "train")
    save_dataset(scored, args.output_dir / "scored")
    write_json(args.output_dir / "summary.json", {"rows": len(rows), "targets": len(targets), **found})
    for side, column in (("helped", "trak_indices"), ("harmed", "trak_harmful_indices")):
        print(f"What {side} the targets most, all together:")
        for place in together[0][column][:4]:
            row, mark = rows[place], " (wrong pair)" * rows[place]["planted"]
            print(f"  row {place:6} {shortened(row['anchor'], 60)} -> {shortened(row['positive'], 60)}{mark}")
    print(f"\nTo {mistaken:.0%} of held-out questions about the {ASKED}, an answer about the {WRONG} is nearer.")
    print(f"{found['planted_share']:.0%} of the {len(rows)} training pairs are wrong.")
    print(f"Of the {args.top_k} that harmed the targets most, {found['planted_among_most_harmful']:.0%} are;")
    print(f"of the {args.top_k} that helped most, {found['planted_among_most_helpful']:.0%}.")


if __name__ == "__main__":
    main()
