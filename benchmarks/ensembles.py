"""Linear datamodeling score by the number of checkpoints and λ: independent models, and checkpoints of one training.

    python benchmarks/ensembles.py --json ensembles.json

The retrainings (random halves of 1,000 digits) and the checkpoints are those of lds_digits.py. Checkpoints of one
training are taken at evenly spaced epochs. Intervals come from resampled subsets and targets.
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars
from lds_digits import N_TEST, N_TRAIN, NETWORKS, WithNames, margins, rows, train
from torch import nn

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.evaluation import evaluate_lds, linear_datamodeling_score, random_subsets


def retrained(name: str, subsets: int, repeats: int, epochs: int, cache: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Masks `(s, n)`, and margins `(s, m)` averaged over repeats."""
    masks = random_subsets(N_TRAIN, subsets, seed=7)
    path = None if cache is None else cache / f"{name}-{subsets}-{repeats}-{epochs}.npy"
    if path is not None and path.is_file():
        return masks, np.load(path, allow_pickle=False)
    runs = [
        torch.stack([margins(network) for network in train(name, torch.tensor(masks), seed, epochs)])
        for seed in range(repeats)
    ]
    outputs = torch.stack(runs).mean(0).numpy()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, outputs)
    return masks, outputs


def sweep(
    checkpoints: list[nn.Module], counts: list[int], dim: int, lambdas: list[float]
) -> dict[int, dict[float, np.ndarray]]:
    """Scores `(n, m)` of the first c checkpoints, by c and λ; features are computed once."""
    found: dict[int, dict[float, np.ndarray]] = {}
    targets = rows(N_TRAIN, N_TRAIN + N_TEST)
    with tempfile.TemporaryDirectory() as directory:
        for relative in lambdas:
            options: dict[str, Any] = {"proj_dim": dim, "lambda_relative": relative, "per_device_batch_size": 100}
            config = TrakConfig(output_dir=directory, use_cpu=True, disable_tqdm=True, **options)
            models = [WithNames(network) for network in checkpoints]
            attributor = TrakAttributor(models[0], config, rows(0, N_TRAIN), task="image_classification")
            attributor.featurize(models)
            for count in counts:
                scored = attributor.attribute(
                    targets,
                    top_k=None,
                    name="targets",
                    checkpoints=dict(enumerate(models[:count])),
                )
                scores = np.stack(scored.with_format("numpy")["trak_scores"][:]).T.copy()
                found.setdefault(count, {})[relative] = scores
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["cnn"])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 3, 10])
    parser.add_argument("--dims", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--lambdas", nargs="+", type=float, default=[0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2, help="trainings averaged per subset")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", choices=["independent", "one run"], default=["independent", "one run"])
    parser.add_argument("--cache", type=Path, help="directory that keeps the retrainings")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    disable_progress_bars()

    results = []
    most = max(args.counts)
    for name in args.networks:
        masks, outputs = retrained(name, args.subsets, args.repeats, args.epochs, args.cache)
        whole = torch.ones(most, N_TRAIN, dtype=torch.bool)
        for kind in args.kinds:
            if kind == "independent":
                checkpoints = train(name, whole, 99, args.epochs)
            else:  # the last epoch first, so that one checkpoint is the trained model
                ends = np.linspace(args.epochs, 1, most).round().astype(int)
                checkpoints = [train(name, whole[:1], 99, int(end))[0] for end in ends]
            for dim in args.dims:
                table = sweep(checkpoints, args.counts, dim, args.lambdas)
                print(f"\n{name}, {kind}, k = {dim}, {len(masks)} halves × {args.repeats}: LDS by relative λ")
                for count, by_lambda in table.items():
                    per_lambda = {
                        relative: float(linear_datamodeling_score(scores, masks, outputs).mean())
                        for relative, scores in by_lambda.items()
                    }
                    best = max(per_lambda, key=lambda relative: per_lambda[relative])
                    interval = evaluate_lds(by_lambda[best], masks, outputs, resamples=200).mean
                    line = "   ".join(f"{relative:g}: {value:.3f}" for relative, value in per_lambda.items())
                    print(f"{count:3d} checkpoints  {line}   best {interval}", flush=True)
                    results.append(
                        {
                            "network": name,
                            "kind": kind,
                            "k": dim,
                            "checkpoints": count,
                            "lds": per_lambda,
                            "best": best,
                            "best_interval": interval.to_dict(),
                        }
                    )
    if args.json is not None:
        args.json.write_text(json.dumps({"settings": vars(args), "results": results}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
