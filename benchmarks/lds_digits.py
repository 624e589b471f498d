"""Linear datamodeling score on scikit-learn's digits, by projection, k and λ.

Networks are retrained on random halves of 1,000 digits; the scores of one checkpoint, or several, predict the margins
of 200 test digits. Everything runs on a CPU.

    python benchmarks/lds_digits.py                       # projections against each other
    python benchmarks/lds_digits.py --sweep lambda        # the relative λ
"""

import argparse
import itertools
import logging
import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.evaluation import linear_datamodeling_score

N_TRAIN, N_TEST = 1000, 200


class Mlp(nn.Sequential):
    """64 → 64 → 10: 4,810 parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Cnn(nn.Sequential):
    """Two convolutions and a linear layer: 10,186 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


NETWORKS = {"mlp": Mlp, "cnn": Cnn}


class WithNames(nn.Module):
    """The calling convention of transformers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.network(pixel_values)


def digits() -> tuple[Tensor, Tensor]:
    """All digits, shuffled: `(1797, 1, 8, 8)` in [0, 1], and labels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16.0, dtype=torch.float32)
    return images[:, None], torch.tensor(data.target[order])


def train(name: str, masks: Tensor, seed: int, epochs: int) -> list[nn.Module]:
    """One network for each mask `(s, n)`, trained at once with `torch.func`, each on the rows of its mask."""
    torch.manual_seed(seed)
    networks = [NETWORKS[name]() for _ in masks]
    weights, _ = torch.func.stack_module_state(networks)
    weights = {key: value.detach().requires_grad_() for key, value in weights.items()}
    images, labels = (tensor[:N_TRAIN] for tensor in digits())
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=1e-2)

    def loss(parameters: dict[str, Tensor], keep: Tensor, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(networks[0], parameters, (x,))
        each = nn.functional.cross_entropy(logits, y, reduction="none")
        return (each * keep).sum() / keep.sum().clamp_min(1)

    for _ in range(epochs):
        for rows in torch.randperm(N_TRAIN).split(100):
            optimizer.zero_grad()
            per_model = torch.func.vmap(loss, in_dims=(0, 0, None, None))(
                weights, masks[:, rows].float(), images[rows], labels[rows]
            )
            per_model.sum().backward()
            optimizer.step()
    for index, network in enumerate(networks):
        network.load_state_dict({key: value[index].detach() for key, value in weights.items()})
    return networks


def margins(network: nn.Module) -> Tensor:
    """logit of the label − logsumexp of the others, on the test digits."""
    images, labels = (tensor[N_TRAIN : N_TRAIN + N_TEST] for tensor in digits())
    with torch.no_grad():
        logits = network(images)
    own = logits.gather(1, labels[:, None])[:, 0]
    return own - logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)


def rows(start: int, stop: int) -> Dataset:
    images, labels = digits()
    return Dataset.from_dict({"pixel_values": images[start:stop].numpy(), "labels": labels[start:stop].numpy()})


def attribute(checkpoints: list[nn.Module], **options: Any) -> np.ndarray:
    """All TRAK scores `(1000, 200)`."""
    with tempfile.TemporaryDirectory() as directory:
        config = TrakConfig(output_dir=directory, per_device_batch_size=100, use_cpu=True, **options)
        models = [WithNames(network) for network in checkpoints]
        attributor = TrakAttributor(models[0], config, train_dataset=rows(0, N_TRAIN), task="image_classification")
        attributor.featurize(models)
        scored = attributor.attribute(rows(N_TRAIN, N_TRAIN + N_TEST), top_k=None, method="index")
        return np.stack(scored.with_format("numpy")["trak_scores"][:]).T


def mean_and_interval(per_target: np.ndarray) -> str:
    """Mean over targets with a 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    means = per_target[rng.integers(0, len(per_target), (2000, len(per_target)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{per_target.mean():.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=["projection", "lambda"], default="projection")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3, help="trainings averaged per subset")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--checkpoints", type=int, default=1)
    parser.add_argument("--dims", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lambdas", nargs="+", type=float, default=[0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 1.0, 3.0])
    args = parser.parse_args()
    logging.disable(logging.WARNING)

    for name in args.networks:
        generator = torch.Generator().manual_seed(7)
        masks = torch.rand(args.subsets, N_TRAIN, generator=generator).argsort(1) < N_TRAIN // 2
        runs = [torch.stack([margins(n) for n in train(name, masks, s, args.epochs)]) for s in range(args.repeats)]
        outputs = torch.stack(runs).mean(0).numpy()
        checkpoints = train(name, torch.ones(args.checkpoints, N_TRAIN, dtype=torch.bool), 99, args.epochs)
        accuracy = np.mean([(margins(network) > 0).float().mean().item() for network in checkpoints])
        print(
            f"\n{name}: {len(masks)} halves × {args.repeats}, {len(checkpoints)} checkpoints, accuracy {accuracy:.2f}"
        )
        if args.sweep == "projection":
            for dim, projection in itertools.product(args.dims, ("sjlt", "rademacher", "normal")):
                per_seed = [
                    linear_datamodeling_score(
                        attribute(checkpoints, proj_type=projection, proj_dim=dim, seed=seed), masks, outputs
                    )
                    for seed in args.seeds
                ]
                spread = np.std([values.mean() for values in per_seed])
                result = mean_and_interval(np.mean(per_seed, 0))
                print(f"k = {dim:5d}  {projection:10s}  {result}  ± {spread:.3f} over seeds")
            continue
        for dim in args.dims:
            values = []
            for relative in args.lambdas:
                scores = attribute(checkpoints, proj_dim=dim, lambda_relative=relative, seed=args.seeds[0])
                values.append(f"{relative:g}: {linear_datamodeling_score(scores, masks, outputs).mean():.3f}")
            print(f"k = {dim:5d}  sjlt  LDS by relative λ:  " + "   ".join(values))


if __name__ == "__main__":
    main()
