"""Which relative λ is good on which task: linear datamodeling score of four tasks, by k, number of checkpoints and λ.

    python recipes/benchmarks/lambda_sweep.py --json lambda_sweep.json

Two image tasks (an MLP and a CNN on scikit-learn's digits), a text classifier (which package of the standard library a
documentation string is from) and a causal language model (Python's language reference), both one-block transformers
over words. Everything is trained here; no file is downloaded. The last lines say what each λ loses against the best
one of its case, on average and at worst.
"""

import argparse
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from lds_digits import NETWORKS, digits
from torch import Tensor, nn

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.python_text import python_packages, python_reference
from hf_trak.evaluation import linear_datamodeling_score, model_outputs, random_subsets

PAD, UNKNOWN, IGNORED = 0, 1, -100


class Words(nn.Module):
    """Embeddings, one block of causal or full attention, and a head: on every word, or on the mean over words."""

    def __init__(self, vocabulary: int, outputs: int, length: int, causal: bool, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.attention, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)
        self.causal = causal

    def forward(self, input_ids: Tensor) -> Any:
        length = input_ids.shape[1]
        x = self.words(input_ids) + self.places(torch.arange(length))
        query, key, value = self.attention(self.first(x)).chunk(3, dim=-1)
        weights = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        hidden = (input_ids == PAD)[:, None, :]
        if self.causal:
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = x + self.back(weights.masked_fill(hidden, -1e9).softmax(-1) @ value)
        x = x + self.outer(torch.relu(self.inner(self.second(x))))
        if not self.causal:
            kept = (input_ids != PAD)[..., None]
            x = (x * kept).sum(1) / kept.sum(1)
        return SimpleNamespace(logits=self.head(x))


class Images(nn.Module):
    """A network of lds_digits.py."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = NETWORKS[name]()

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.network(pixel_values))


@dataclass
class Case:
    """A task with its data."""

    make: Callable[[], nn.Module]
    task: str
    inputs: Tensor
    labels: Tensor
    column: str
    n: int
    epochs: int

    def rows(self, start: int, stop: int) -> Dataset:
        chosen = {self.column: self.inputs[start:stop].numpy(), "labels": self.labels[start:stop].numpy()}
        return Dataset.from_dict(chosen)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """`(B,)`."""
        if logits.ndim == 2:
            return nn.functional.cross_entropy(logits, labels, reduction="none")
        each = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=IGNORED
        )
        return each.unflatten(0, (len(labels), -1)).sum(1) / 8


def images(name: str) -> Case:
    pixels, labels = digits()
    return Case(lambda: Images(name), "image_classification", pixels, labels, "pixel_values", 1000, 15)


def words(texts: list[str], length: int, vocabulary: int) -> tuple[Tensor, int]:
    """The first words of each text as numbers `(rows, length)`, and how many numbers there are."""
    split = [text.lower().split()[:length] for text in texts]
    common = [word for word, _ in Counter(word for text in split for word in text).most_common(vocabulary)]
    number = {word: index for index, word in enumerate(common, UNKNOWN + 1)}
    ids = [[number.get(word, UNKNOWN) for word in text] + [PAD] * (length - len(text)) for text in split]
    return torch.tensor(ids), len(common) + 2


def text() -> Case:
    rows = python_packages()["train"]
    ids, vocabulary = words(rows["text"][:], 24, 600)
    labels = torch.tensor(rows["label"][:])
    return Case(lambda: Words(vocabulary, 5, 24, False), "text_classification", ids, labels, "input_ids", 600, 12)


def language() -> Case:
    rows = python_reference()["train"]
    ids, vocabulary = words(rows["text"][:], 16, 300)
    labels = torch.where(ids == PAD, IGNORED, ids)
    return Case(lambda: Words(vocabulary, vocabulary, 16, True), "causal_lm", ids, labels, "input_ids", 600, 12)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: images("mlp"),
    "cnn": lambda: images("cnn"),
    "text": text,
    "language": language,
}


def train(case: Case, masks: Tensor, seed: int) -> list[nn.Module]:
    """One model for each mask `(s, n)`, trained at once, each on the rows of its mask."""
    torch.manual_seed(seed)
    models = [case.make() for _ in masks]
    weights, _ = torch.func.stack_module_state(models)
    weights = {key: value.detach().requires_grad_() for key, value in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=1e-2)

    def loss(parameters: dict[str, Tensor], keep: Tensor, x: Tensor, y: Tensor) -> Tensor:
        each = case.loss(torch.func.functional_call(models[0], parameters, (x,)).logits, y)
        return (each * keep).sum() / keep.sum().clamp_min(1)

    for _ in range(case.epochs):
        for chosen in torch.randperm(case.n).split(100):
            optimizer.zero_grad()
            per_model = torch.func.vmap(loss, in_dims=(0, 0, None, None))(
                weights, masks[:, chosen].float(), case.inputs[chosen], case.labels[chosen]
            )
            per_model.sum().backward()
            optimizer.step()
    for index, model in enumerate(models):
        model.load_state_dict({key: value[index].detach() for key, value in weights.items()})
    return models


def sweep(
    case: Case, models: list[nn.Module], counts: list[int], dim: int, lambdas: list[float], targets: Dataset
) -> dict[int, dict[float, np.ndarray]]:
    """Scores `(n, m)` of the first c checkpoints, by c and λ; features are computed once."""
    found: dict[int, dict[float, np.ndarray]] = {count: {} for count in counts}
    with tempfile.TemporaryDirectory() as directory:
        for relative in lambdas:
            options: dict[str, Any] = {"proj_dim": dim, "lambda_relative": relative, "per_device_batch_size": 100}
            config = TrakConfig(output_dir=directory, use_cpu=True, disable_tqdm=True, **options)
            attributor = TrakAttributor(models[0], config, case.rows(0, case.n), task=case.task)
            attributor.featurize(models)
            for count in counts:
                scored = attributor.attribute(
                    targets, top_k=None, name="t", model_ids=list(range(count)), checkpoints=models[:count]
                )
                found[count][relative] = np.stack(scored.with_format("numpy")["trak_scores"][:]).T.copy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 3], help="checkpoints, trained independently")
    parser.add_argument("--dims", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--lambdas", nargs="+", type=float, default=[0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2, help="trainings averaged per subset")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    disable_progress_bars()

    results: list[dict[str, Any]] = []
    for name in args.cases:
        case = CASES[name]()
        targets = case.rows(case.n, case.n + args.targets)
        masks = random_subsets(case.n, args.subsets, seed=7)
        outputs = np.zeros((args.subsets, len(targets)))
        for seed in range(args.repeats):
            for index, model in enumerate(train(case, torch.tensor(masks), seed)):
                outputs[index] += model_outputs(model, targets, case.task, batch_size=200) / args.repeats
        models = train(case, torch.ones(max(args.counts), case.n, dtype=torch.bool), 99)
        parameters = sum(parameter.numel() for parameter in models[0].parameters())
        print(f"\n{name}: n = {case.n}, P = {parameters:,}, {args.subsets} halves × {args.repeats}", flush=True)
        for dim in args.dims:
            for count, by_lambda in sweep(case, models, args.counts, dim, args.lambdas, targets).items():
                lds = {
                    relative: float(linear_datamodeling_score(scores, masks, outputs).mean())
                    for relative, scores in by_lambda.items()
                }
                line = "   ".join(f"{relative:g}: {value:.3f}" for relative, value in lds.items())
                print(f"k = {dim:5d}, {count:2d} checkpoint(s)   {line}", flush=True)
                results.append({"case": name, "k": dim, "checkpoints": count, "lds": lds})
    print("\nrelative λ: part of the best LDS of a case that is reached, mean and least over all cases")
    for relative in args.lambdas:
        parts = [entry["lds"][relative] / max(entry["lds"].values()) for entry in results]
        print(f"{relative:6g}: {np.mean(parts):.3f}   {min(parts):.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"settings": vars(args), "results": results}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
