"""Features of several checkpoints by independent jobs that share a directory; scores by whichever runs last.

    python recipes/slurm/run.py train                                   # three small networks on scikit-learn's digits
    python recipes/slurm/run.py featurize --checkpoint 1 --part 0/4     # one checkpoint, one quarter of its rows
    python recipes/slurm/run.py score

No job has to come first, jobs may run at the same time on any number of nodes, and each may itself be started with
`torchrun` or `accelerate launch` on several devices. Replace `data` and `Network` by your own. See README.md beside
this file.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hf_trak import TrakAttributor, TrakConfig


class Network(nn.Module):
    """A classifier of 8 × 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layers(pixel_values)


def data() -> tuple[Dataset, Dataset]:
    """Load training rows and targets."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    rows = {"pixel_values": (digits.images[order] / 16.0).astype(np.float32), "labels": digits.target[order]}
    dataset = Dataset.from_dict(rows).with_format("torch")
    return dataset.select(range(1500)), dataset.select(range(1500, len(dataset)))


def checkpoint_path(directory: Path, index: int) -> Path:
    return directory / "models" / f"seed-{index}.safetensors"


def train(args: argparse.Namespace) -> None:
    rows, _ = data()
    images, labels = rows["pixel_values"][:], rows["labels"][:]
    for index in range(args.checkpoints):
        torch.manual_seed(index)
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(args.epochs):
            for part in torch.randperm(len(labels)).split(100):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
                optimizer.step()
        path = checkpoint_path(args.output_dir, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)


def attributor(args: argparse.Namespace) -> TrakAttributor:
    config = TrakConfig(output_dir=str(args.output_dir / "trak"), proj_dim=args.proj_dim, shard_size=100)
    return TrakAttributor(Network(), config, train_dataset=data()[0], task="image_classification")


def featurize(args: argparse.Namespace) -> None:
    chosen = range(args.checkpoints) if args.checkpoint is None else [args.checkpoint]
    paths = [checkpoint_path(args.output_dir, index) for index in chosen]
    attributor(args).featurize(dict(zip(chosen, paths, strict=True)), part=args.part)


def score(args: argparse.Namespace) -> None:
    scored = attributor(args).attribute(data()[1], top_k=args.top_k, method="index")
    scored.save_to_disk(str(args.output_dir / "scored"))
    print(f"{len(scored)} targets with their top {args.top_k} training rows in {args.output_dir / 'scored'}")


def part(text: str) -> tuple[int, int]:
    """Read `2/8` as (2, 8)."""
    index, _, count = text.partition("/")
    return int(index), int(count)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "featurize", "score"])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/slurm"), help="a directory that jobs share")
    parser.add_argument("--checkpoints", type=int, default=3, help="number of networks")
    parser.add_argument("--checkpoint", type=int, help="the one to featurize; all by default")
    parser.add_argument("--part", type=part, default=(0, 1), help="part of the rows to featurize, such as 2/8")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--proj_dim", type=int, default=512)
    parser.add_argument("--top_k", type=int, default=10)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    {"train": train, "featurize": featurize, "score": score}[args.step](args)


if __name__ == "__main__":
    main()
