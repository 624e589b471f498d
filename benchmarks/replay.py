"""Replay beside the index and exact scores, on a fine-tune by `Trainer` that is repeated without some of its rows.

    python benchmarks/replay.py build --work replay --subsets 40
    python benchmarks/replay.py lds --work replay

A GPT-2 of about 100,000 parameters reads characters. It is trained on the topics of Python's own help, and then
fine-tuned as `Trainer` does by default (AdamW, linear decay, no warmup, gradients clipped at 1) on scikit-learn's
descriptions of data sets. The fine-tune is repeated without random 1, 5 and 50 % of the rows, which weigh zero in the
loss: from the same weights with the same seed (the run's own order of the rows), and for 5 % with another seed
(another order). `lds` prints the linear datamodeling score of each method, with 95 % intervals from resampled
subsets and targets.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from hf_trak import Exact, Replay, TrakAttributor, TrakConfig
from hf_trak.evaluation import TrainerRetraining, evaluate_lds, random_subsets, retrain_on_subsets
from hf_trak.evaluation.retraining import masks_and_outputs

LENGTH, ROWS, TARGETS = 64, 600, 40
DROPPED = {"1 %": 0.99, "5 %": 0.95, "50 %": 0.5}
RUN_SEED, OTHER_SEED = 1, 2


def chunks(text: str) -> Dataset:
    """Cut text into rows of characters, which are bytes of ASCII."""
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8) % 128
    rows = codes[: len(codes) // LENGTH * LENGTH].reshape(-1, LENGTH).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def descriptions() -> Dataset:
    """Read the descriptions of scikit-learn's data sets, in an order of their own."""
    folder = files("sklearn.datasets") / "descr"
    names = sorted(one.name for one in folder.iterdir() if one.name.endswith(".rst"))
    texts = [(folder / name).read_text("utf-8") for name in names]
    return chunks("\n".join(texts)).shuffle(seed=0)


def arguments(directory: str, seed: int, rate: float = 5e-4, **options: Any) -> TrainingArguments:
    """Return `Trainer`'s defaults, but for what the run is."""
    return TrainingArguments(
        directory, per_device_train_batch_size=30, learning_rate=rate, seed=seed, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", **options,
    )  # fmt: skip


def pretrained(path: Path, scratch: str, rate: float) -> dict[str, torch.Tensor]:
    """Train on the help texts, or read what was trained."""
    if not path.exists():
        set_seed(0)
        trainer = Trainer(
            model_of(None),
            arguments(scratch, 0, max_steps=400, rate=rate),
            train_dataset=chunks("".join(topics.values())),
        )
        trainer.train()
        torch.save(trainer.model.state_dict(), path)
    return torch.load(path, weights_only=True)


def model_of(weights: dict[str, torch.Tensor] | None) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if weights is not None:
        model.load_state_dict(weights)
    return model


class Case:
    """The fine-tune, its rows and targets."""

    def __init__(self, work: Path, scratch: str, rate: float) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work, self.scratch = work, scratch
        self.weights = pretrained(work / "pretrained.pt", scratch, rate)
        rows = descriptions()
        self.train, self.targets = rows.select(range(ROWS)), rows.select(range(ROWS, ROWS + TARGETS))

    def trainer(self, rows: Any, seed: int) -> Trainer:
        return Trainer(model_of(self.weights), arguments(self.scratch, seed), train_dataset=rows)

    def bank(self, share: str, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Train on subsets, or read what was trained: masks and outputs."""
        masks = random_subsets(ROWS, count, DROPPED[share], seed=0)
        retrain = TrainerRetraining(self.trainer, self.train, self.targets, drop="mask", seed=seed)
        name = f"drop-{share.split()[0]}-seed-{seed}"
        found = retrain_on_subsets(masks, retrain, self.work / name, settings=retrain.protocol)
        return masks_and_outputs(found)


def banks(case: Case, count: int) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    for share in DROPPED:
        yield share, case.bank(share, RUN_SEED, count)
    yield "5 %, another order", case.bank("5 %", OTHER_SEED, count)


def methods(all_of_them: bool) -> dict[str, Any]:
    found = {
        "index (default)": "index",
        "EK-FAC": Exact("ekfac"),
        "hybrid": Exact("hybrid"),
        "replay (default)": Replay(),
        "replay, 30 rows": Replay(rows=30),
        "replay, Hessian, 30 rows": Replay(form="hessian", rows=30),
    }
    more = {
        "replay, 2 rows": Replay(rows=2),
        "replay, Hessian, 8 rows": Replay(form="hessian", rows=8),
        **{f"replay, {steps} steps": Replay(steps=steps) for steps in (30, 15, 8, 4)},
    }
    return {**found, **more} if all_of_them else found


def lds(case: Case, count: int, m: int, all_of_them: bool) -> None:
    """Print a row for each method."""
    set_seed(RUN_SEED)
    trainer = case.trainer(case.train, RUN_SEED)
    trainer.train()
    truths = list(banks(case, count))
    print(f"| | {' | '.join(name for name, _ in truths)} | seconds |\n|{'---|' * (len(truths) + 2)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        attributor = TrakAttributor.from_trainer(trainer, TrakConfig(directory, per_device_batch_size=32))
        attributor.featurize()
        for name, method in methods(all_of_them).items():
            started = time.perf_counter()
            scored = attributor.attribute(case.targets.select(range(m)), top_k=None, method=method).with_format(
                "numpy"
            )
            seconds = time.perf_counter() - started
            scores = np.stack(scored["trak_scores"][:]).T.astype(np.float64)
            cells = [str(evaluate_lds(scores, masks, outputs[:, :m]).mean) for _, (masks, outputs) in truths]
            print(f"| {name} | {' | '.join(cells)} | {seconds:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "lds"))
    parser.add_argument("--work", type=Path, default=Path("replay"), help="directory of retrainings")
    parser.add_argument("--rate", type=float, default=3e-3, help="of the first training; 5e-4 leaves it unfinished")
    parser.add_argument("--targets", type=int, default=TARGETS, help="of the 40 targets so many")
    parser.add_argument("--subsets", type=int, default=40, help="of each share of dropped rows")
    parser.add_argument("--all", action="store_true", help="more settings of replay")
    args = parser.parse_args()
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as scratch:
        case = Case(args.work, scratch, args.rate)
        if args.what == "build":
            for name, _ in banks(case, args.subsets):
                print(f"{name}: done", flush=True)
        else:
            lds(case, args.subsets, args.targets, args.all)


if __name__ == "__main__":
    main()
