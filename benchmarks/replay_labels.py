"""Wrong labels and copies among the training rows: who finds them, and what training without them gives.

    python benchmarks/replay_labels.py --work labels
    python benchmarks/replay_labels.py --work labels --table

*images*: 800 of scikit-learn's digits, an MLP of 2,410 parameters. *texts*: 800 pieces of 40 words from docstrings of
installed packages, which say the package; a classifier of averaged embeddings with 9,982 parameters. Both are trained
by `Trainer` from scratch, with AdamW, a linear schedule, and no warmup. 5 % of the rows get another label, and another
5 % are replaced by copies of others: with noise in every pixel, or an eighth of the words changed.

Every part (a case, a seed, a method) is a file in `--work`, so that an interrupted run goes on.
"""

import argparse
import ast
import importlib.util
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_trak import Exact, Replay, TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.evaluation import mislabel_detection, with_wrong_labels

SHARE, SEEDS, RETRAININGS, NEAREST = 0.05, 3, 4, 10
WORDS, VOCABULARY, PACKAGES = 40, 600, ("numpy", "sklearn", "torch", "transformers")


class Digits(nn.Module):
    """64 → 32 → 10."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return with_loss(self.layers(x), labels)


class Texts(nn.Module):
    """The mean of the embeddings of words, → 16 → 4."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(nn.Linear(16, 18), nn.GELU(), nn.Linear(18, len(PACKAGES)))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return with_loss(self.layers(self.words(x).mean(1)), labels)


def with_loss(logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    found = {"logits": logits}
    return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


def digits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    return (data.data[order] / 16).astype(np.float32), data.target[order]


def noisy(rows: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    return np.clip(rows + draws.normal(0, 0.05, rows.shape), 0, 1).astype(np.float32)


def docstrings(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Words of docstrings, as numbers by a hash, and the number of the package."""
    rows, labels, draws = [], [], np.random.default_rng(seed)
    for label, name in enumerate(PACKAGES):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        pieces: list[list[str]] = []
        for path in sorted(Path(spec.origin).parent.rglob("*.py"))[::3]:
            for node in ast.walk(ast.parse(path.read_text(errors="ignore"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    words = [word.lower() for word in text.split() if word.isalpha()]
                    pieces += [words[:WORDS]] if len(words) >= WORDS else []
            if len(pieces) > 900:
                break
        for place in draws.permutation(len(pieces))[:300]:
            rows.append([zlib.crc32(word.encode()) % VOCABULARY for word in pieces[place]])
            labels.append(label)
    order = draws.permutation(len(rows))
    return np.array(rows)[order], np.array(labels)[order]


def reworded(rows: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    others = draws.integers(VOCABULARY, size=rows.shape)
    return np.where(draws.random(rows.shape) < 0.125, others, rows)


@dataclass(frozen=True)
class Case:
    """A model, where its rows come from, and how it is trained."""

    read: Callable[[int], tuple[np.ndarray, np.ndarray]]
    copy: Callable[[np.ndarray, np.random.Generator], np.ndarray]
    model: Callable[[], nn.Module]
    task: str
    rows: int
    held_out: int
    options: dict[str, Any]


CASES = {
    "images": Case(
        digits, noisy, Digits, "image_classification", 800, 300,
        {"learning_rate": 5e-3, "num_train_epochs": 6, "per_device_train_batch_size": 40},
    ),
    "texts": Case(
        docstrings, reworded, Texts, "text_classification", 800, 200,
        {"learning_rate": 1e-2, "num_train_epochs": 8, "per_device_train_batch_size": 40},
    ),
}  # fmt: skip

METHODS = {
    "index": "index",
    "exact (EK-FAC)": Exact(),
    "replay of the recipe": Replay(),
    "replay of the run": Replay(of="run", hessian_share=0.5),
}


@dataclass(frozen=True)
class Planted:
    """Training rows with wrong labels and copies, and clean rows for choosing and for judging."""

    train: Dataset
    wrong: np.ndarray
    copies: np.ndarray
    originals: np.ndarray
    validation: Dataset
    test: Dataset


def dataset(rows: np.ndarray, labels: np.ndarray) -> Dataset:
    return Dataset.from_dict({"x": rows.tolist(), "labels": labels.tolist()}).with_format("torch")


def planted(case: Case, seed: int) -> Planted:
    rows, labels = case.read(seed)
    n, draws, count = case.rows, np.random.default_rng(100 + seed), round(SHARE * case.rows)
    train, given = rows[:n].copy(), labels[:n].copy()
    places = draws.permutation(n)[: 2 * count]
    copies, originals = places[:count], places[count:]
    train[copies], given[copies] = case.copy(train[originals], draws), given[originals]
    mixed, wrong = with_wrong_labels(dataset(train, given), SHARE, seed=seed)
    later = n + case.held_out
    return Planted(
        mixed.with_format("torch"), wrong, copies, originals, dataset(rows[n:later], labels[n:later]),
        dataset(rows[later:], labels[later:]),
    )  # fmt: skip


def trainer_of(case: Case, rows: Dataset, place: Path, seed: int, callbacks: Any = ()) -> Trainer:
    torch.manual_seed(seed)
    arguments = TrainingArguments(
        str(place / "out"), seed=seed, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", **case.options,
    )  # fmt: skip
    return Trainer(case.model(), arguments, train_dataset=rows, callbacks=list(callbacks))


def losses(model: nn.Module, rows: Dataset) -> np.ndarray:
    with torch.no_grad():
        logits = model(rows[:]["x"])["logits"]
    return nn.functional.cross_entropy(logits, rows[:]["labels"], reduction="none").numpy()


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return what a file holds, or make and keep it."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


def found_by(attributor: TrakAttributor, rows: Planted, method: Any) -> dict[str, Any]:
    """Score all rows: on themselves, on the validation set, and the copies' nearest."""
    attributor.featurize()  # kept by the store, and no part of the seconds
    begun = time.process_time()
    own = attributor.self_influence(method).tolist()
    seconds = [time.process_time() - begun]
    begun = time.process_time()
    mean = attributor.attribute(rows.validation, top_k=None, method=method, group_by="all")["trak_scores"][0]
    seconds.append(time.process_time() - begun)
    targets = rows.train.select(rows.copies)
    nearest = attributor.attribute(targets, top_k=NEAREST, method=method)["trak_indices"][:]
    return {
        "own": own,
        "validation": np.asarray(mean).tolist(),
        "copies": float(np.mean([one in found for one, found in zip(rows.originals, nearest, strict=True)])),
        "seconds": seconds,
    }


def without(case: Case, rows: Planted, left_out: Any, place: Path) -> list[float]:
    """Train again without some rows, from several starts, and return the loss and accuracy of the test set."""
    left = np.setdiff1d(np.arange(case.rows), np.asarray(left_out, dtype=int))
    found = []
    for start in range(RETRAININGS):
        run = trainer_of(case, rows.train.select(left), place, 50 + start)
        run.train()
        with torch.no_grad():
            right = run.model(rows.test[:]["x"])["logits"].argmax(1) == rows.test[:]["labels"]
        found.append([float(losses(run.model, rows.test).mean()), float(right.float().mean())])
    return np.array(found).mean(0).tolist()


def measure(name: str, seed: int, work: Path) -> None:
    case, place = CASES[name], work / f"{name}-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    rows, count = planted(case, seed), round(SHARE * case.rows)
    args = TrakConfig(str(place / "trak"), proj_dim=1024, use_cpu=True, per_device_batch_size=50)
    callback = TrakCallback(args, record=True, overwrite=True)
    run = trainer_of(case, rows.train, place, seed, [callback])
    run.train()
    attributor = TrakAttributor.from_trainer(run, args, case.task)
    suspects = {"loss of the row": losses(run.model, rows.train)}
    for method, options in METHODS.items():
        path = place / f"{method}.json".replace(" ", "-")
        found = kept(path, partial(found_by, attributor, rows, options))
        suspects[f"{method}: own"] = np.array(found["own"])
        suspects[f"{method}: validation"] = -np.array(found["validation"])
        print(name, seed, method, found["copies"], found["seconds"], flush=True)
    draws = np.random.default_rng(7 + seed)
    suspects["random rows"] = draws.random(case.rows)
    suspects["the wrong labels"] = rows.wrong.astype(float)
    suspects["none"] = np.zeros(0)
    results = {}
    for who, values in suspects.items():
        judged = None if who == "none" else mislabel_detection(values, rows.wrong, [count // 2, count, 2 * count])
        chosen = np.argsort(-values, kind="stable")[:count]
        again = kept(place / f"without-{who}.json".replace(" ", "-"), partial(without, case, rows, chosen, place))
        precisions = {} if judged is None else judged.precision_at
        results[who] = {"precision": precisions, "loss": again[0], "accuracy": again[1]}
        print(name, seed, who, results[who], flush=True)
    (place / "results.json").write_text(json.dumps(results, indent=1))


def table(work: Path) -> None:
    """Print means over seeds."""
    for name in CASES:
        places = [place for seed in range(SEEDS) if (place := work / f"{name}-{seed}" / "results.json").exists()]
        read = [json.loads(place.read_text()) for place in places]
        print(f"\n{name}, {len(read)} seeds\n")
        for who in read[0] if read else ():
            many = [one[who] for one in read]
            precisions = [np.mean([one["precision"][key] for one in many]) for key in many[0]["precision"]]
            figures = [f"{one:.2f}" for one in precisions] or ["", "", ""]
            loss, right = (np.mean([one[key] for one in many]) for key in ("loss", "accuracy"))
            spread = np.std([one["loss"] for one in many])
            print(f"| {who} | {' | '.join(figures)} | {loss:.3f} ± {spread:.3f} | {right:.3f} |")
        for method in METHODS:
            paths = [place.parent / f"{method}.json".replace(" ", "-") for place in places]
            found = [json.loads(path.read_text()) for path in paths]
            if found:
                seconds = np.mean([one["seconds"] for one in found], axis=0)
                copies = np.mean([one["copies"] for one in found])
                print(f"| {method} | {copies:.2f} | {seconds[0]:.1f} | {seconds[1]:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(SEEDS)))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    disable_progress_bars()
    if not given.table:
        for seed in given.seeds:
            for name in given.cases:
                measure(name, seed, given.work)
    table(given.work)


if __name__ == "__main__":
    main()
