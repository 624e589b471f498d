"""A run that is too hot to be followed back: what its replay is worth, what `auto` and the report do instead.

    python benchmarks/replay_hot.py --work hot

A small BERT learns from 400 sentences whether they praise, 20 of them with the other label, by `Trainer` at two
learning rates. It is trained again without random rows, in the same order, and LDS is that of 12 targets.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars
from replay import SHARES
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from hf_trak import Exact, Replay, TrakAttributor, TrakCallback, TrakConfig
from hf_trak.evaluation import (
    TrainerRetraining,
    evaluate_lds,
    masks_and_outputs,
    random_subsets,
    retrain_on_subsets,
)
from hf_trak.report import training_report

ROWS, WRONG, RETRAININGS = 400, 20, 16
RUNS = {"hot": (1e-2, 8), "cool": (3e-3, 8)}
METHODS: dict[str, Any] = {
    "index": "index",
    "EK-FAC": Exact("ekfac"),
    "hybrid": Exact("hybrid"),
    "recipe": Replay(),
    "run": Replay(of="run"),
    "run, Gauss-Newton": Replay(of="run", form="gauss-newton"),
}
PRAISE = ["wonderful", "lovely", "brilliant", "great", "charming", "superb", "moving", "funny", "clever", "fresh"]
BLAME = ["terrible", "awful", "dull", "boring", "weak", "messy", "slow", "lazy", "stale", "clumsy"]
NOUNS = [
    "film",
    "plot",
    "cast",
    "ending",
    "script",
    "music",
    "camera",
    "director",
    "scene",
    "story",
    "dialogue",
    "pace",
]
ADVERBS = ["really", "quite", "very", "rather", "truly", "somewhat"]
WORDS = ["[PAD]", "[CLS]", "and", "the", "was", *NOUNS, *ADVERBS, *PRAISE, *BLAME]
LENGTH = 16


def sentences() -> tuple[Dataset, Dataset, set[int]]:
    """Write training rows, validation rows, and the numbers of those with the other label."""
    draw = random.Random(1)
    found = []
    for _ in range(ROWS + 80):
        label = draw.randint(0, 1)
        parts = [
            f"the {draw.choice(NOUNS)} was {draw.choice(ADVERBS)} {draw.choice(PRAISE if label else BLAME)}"
            for _ in range(draw.randint(1, 3))
        ]
        ids = [1, *(WORDS.index(word) for word in " and ".join(parts).split())]
        padding = LENGTH + 2 - len(ids)
        mask = [1] * len(ids) + [0] * padding
        found.append({"input_ids": ids + [0] * padding, "attention_mask": mask, "labels": label})
    wrong = set(draw.sample(range(ROWS), WRONG))
    for row in wrong:
        found[row]["labels"] = 1 - found[row]["labels"]
    return Dataset.from_list(found[:ROWS]), Dataset.from_list(found[ROWS:]), wrong


def trainer(place: Path, rows: Any, rate: float, epochs: int) -> Trainer:
    set_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    args = TrainingArguments(
        str(place / "out"), num_train_epochs=epochs, learning_rate=rate, per_device_train_batch_size=16, seed=0,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    made = Trainer(BertForSequenceClassification(config), args, train_dataset=rows)
    made.remove_callback(PrinterCallback)
    return made


def measured(place: Path, rate: float, epochs: int) -> None:
    """Train, train again without rows, and print the table of one run."""
    rows, validation, wrong = sentences()
    config, targets = TrakConfig(str(place / "trak"), use_cpu=True, budget="best"), validation.select(range(12))
    run = trainer(place, rows, rate, epochs)
    run.add_callback(TrakCallback(config, record=True, overwrite=True))
    run.train()
    attributor = TrakAttributor.from_trainer(run, config).featurize()
    retraining = TrainerRetraining(
        lambda given, seed: trainer(place, given, rate, epochs),
        rows,
        targets,
        "text_classification",
        drop="mask",
        seed=0,
    )
    banks = []
    for share in SHARES.values():
        masks = random_subsets(ROWS, RETRAININGS, 1 - share, seed=round(1000 * share))
        banks.append(masks_and_outputs(retrain_on_subsets(masks, retraining, place / f"without-{share:g}")))
    for name, method in METHODS.items():
        scores = np.array(attributor.attribute(targets, top_k=None, method=method)["trak_scores"][:]).T
        figures = [evaluate_lds(scores, kept, outputs).mean.value for kept, outputs in banks]
        print(f"| {name} | " + " | ".join(f"{one:.2f}" for one in figures) + " |", flush=True)
    attributor.attribute(targets, top_k=3)
    for method in (Replay(of="run"), "auto"):
        report = training_report(attributor.features, validation, place / "report.html", method=method)
        first = set(np.argsort(-report.effects)[:WRONG].tolist())
        print(f"report by {report.method}: {len(first & wrong)} of {WRONG} wrong labels among its first {WRONG}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    given = parser.parse_args()
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    for name in given.runs:
        print(f"\n{name}: {RUNS[name][0]:g}, {RUNS[name][1]} epochs", flush=True)
        measured(given.work / name, *RUNS[name])


if __name__ == "__main__":
    main()
