"""LDS of replayed runs: one fine-tune with `Trainer` at its defaults, and trainings of it again without some rows.

    python benchmarks/replay_run.py build --work replay --subsets 40
    python benchmarks/replay_run.py scores --work replay

A GPT-2 of 103,000 parameters for characters is trained for 400 steps on texts of Python's documentation, which its
standard library has, and then on 600 rows of 64 characters: AdamW 5e-4, linear schedule, no warmup, batches of 30,
three epochs, gradients clipped at 1. `build` trains the second part again, in the same order, with rows masked;
`scores` compares what methods predict.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

from hf_trak import Exact, TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.evaluation import TrainerRetraining, evaluate_lds, masks_and_outputs, random_subsets, retrain_on_subsets
from hf_trak.methods import Replay

LENGTH, ROWS, TARGETS, SHARES = 64, 600, 40, (0.01, 0.05, 0.5)


def texts() -> tuple[Dataset, Dataset, Dataset, int]:
    """Cut the documentation into rows of characters: for the first training, the second, and targets."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    codes = np.array([letters[letter] for letter in text])
    rows = codes[: len(codes) // LENGTH * LENGTH].reshape(-1, LENGTH)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]

    def dataset(part: np.ndarray) -> Dataset:
        return Dataset.from_dict({"input_ids": part.tolist(), "labels": part.tolist()})

    first, second, last = rows[ROWS + TARGETS :], rows[:ROWS], rows[ROWS : ROWS + TARGETS]
    return dataset(first), dataset(second), dataset(last), len(letters)


def arguments(work: Path, **options: Any) -> TrainingArguments:
    defaults = {"per_device_train_batch_size": 30, "learning_rate": 5e-4, "seed": 0, "use_cpu": True}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    return TrainingArguments(str(work / "out"), **{**defaults, **quiet, **options})


def model_of(work: Path) -> GPT2LMHeadModel:
    """Return the model after the first training, which is made once."""
    if not (work / "first").is_dir():
        first, _, _, words = texts()
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=2, n_head=4, n_embd=60, vocab_size=words, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        run = Trainer(model, arguments(work, max_steps=400, learning_rate=3e-3, warmup_steps=0.1), train_dataset=first)
        run.train()
        model.save_pretrained(work / "first")
    return GPT2LMHeadModel.from_pretrained(work / "first")


def masks() -> np.ndarray:
    return np.concatenate([random_subsets(ROWS, 200, fraction=1 - share, seed=int(1000 * share)) for share in SHARES])


def build(work: Path, subsets: int) -> None:
    """Train again without the rows of so many subsets of each share."""
    _, train, targets, _ = texts()
    model_of(work)

    def make(rows: Any, seed: int) -> Trainer:
        return Trainer(model_of(work), arguments(work, seed=seed), train_dataset=rows)

    retrain = TrainerRetraining(make, train, targets, "causal_lm", drop="mask", seed=0)
    for share, part in zip(SHARES, masks().reshape(len(SHARES), -1, ROWS), strict=True):
        begun = time.perf_counter()
        retrained = retrain_on_subsets(part[:subsets], retrain, work / f"without-{share:g}")
        kept, outputs = masks_and_outputs(retrained)
        np.savez(work / f"without-{share:g}.npz", kept=kept, outputs=outputs)
        print(f"without {share:.0%}: {time.perf_counter() - begun:.0f} s", flush=True)


def recorded(work: Path, every: int) -> TrakAttributor:
    """Train with a record, and return the attributor of the run."""
    _, train, _, _ = texts()
    place = work / f"every-{every}"
    args = TrakConfig(str(place), per_device_batch_size=30, use_cpu=True)
    callback = TrakCallback(args, record=True, every=every, overwrite=True)
    run = Trainer(model_of(work), arguments(work), train_dataset=train, callbacks=[callback])
    run.train()
    return TrakAttributor.from_trainer(run, args, "causal_lm")


METHODS = {
    "plain": (1, Replay(of="run", smoothing=0.0)),
    "smoothed": (1, Replay(of="run")),
    "smoothed, half": (1, Replay(of="run", hessian_share=0.5)),
    "smoothed, a fifth": (1, Replay(of="run", hessian_share=0.2)),
    "smoothed, a fifth, Hessian": (1, Replay(of="run", hessian_share=0.2, form="hessian")),
    "smoothed, every 10": (10, Replay(of="run")),
    "smoothed, every 20": (20, Replay(of="run")),
    "first and last": (1000, Replay(of="run")),
    "first and last, a fifth": (1000, Replay(of="run", hessian_share=0.2)),
    "recipe": (1000, Replay()),
    "recipe, 30 rows": (1000, Replay(rows=30)),
    "recipe, 30 rows, Hessian": (1000, Replay(rows=30, form="hessian")),
    "recipe, 15 steps": (1000, Replay(steps=15)),
    "exact": (1, Exact()),
    "index": (1, "index"),
}


def scores(work: Path, names: list[str], count: int) -> None:
    """Judge methods by the trainings that are there, for the first targets, and keep the figures."""
    targets = texts()[2].select(range(count))
    path = work / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    attributors: dict[int, TrakAttributor] = {}
    for name in names:
        every, method = METHODS[name]
        if every not in attributors:
            attributors[every] = recorded(work, every)
        attributor = attributors[every]
        begun = time.perf_counter()
        if method == "index":
            attributor.featurize()
        found = attributor.attribute(targets, top_k=None, method=method)
        table = np.array(found["trak_scores"]).T
        seconds = time.perf_counter() - begun
        figures: dict[str, Any] = {"seconds": round(seconds, 1)}
        for share in SHARES:
            if (bank := work / f"without-{share:g}.npz").exists():
                mean = evaluate_lds(table, *_arrays(bank, count)).mean
                figures[f"{share:g}"] = [round(one, 4) for one in (mean.value, mean.low, mean.high)]
        results[f"{name} ({count} targets)"] = figures
        path.write_text(json.dumps(results, indent=2))
        print(name, figures, flush=True)


def _arrays(bank: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    found = np.load(bank)
    return found["kept"], found["outputs"][:, :count]


def main() -> None:
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "scores"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--subsets", type=int, default=40, help="trainings for each share of dropped rows")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--targets", type=int, default=TARGETS, help="how many of the 40 targets are scored")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.command == "build":
        build(given.work, given.subsets)
    else:
        scores(given.work, given.methods, given.targets)


if __name__ == "__main__":
    main()
