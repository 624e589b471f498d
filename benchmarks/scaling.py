"""Two processes against one, one thread each: rows featurized per second.

    python benchmarks/scaling.py

Processes are started with `torchrun`, as on any machine; what is timed lies between two points that all of them pass:
`TrakAttributor.featurize` after a first run that warms everything up. The store of every run is compared with that of
the first, byte by byte.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor, nn

from hf_trak import TrakAttributor, TrakConfig


class Cnn(nn.Module):
    """Three convolutions and a linear layer over 16 × 16 images: 58,314 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layers(pixel_values)


def featurize(directory: str, rows: int, args: argparse.Namespace) -> float:
    """Seconds that all processes together take for `rows` rows."""
    generator = torch.Generator().manual_seed(0)
    data = Dataset.from_dict(
        {
            "pixel_values": torch.randn(rows, 1, 16, 16, generator=generator).numpy(),
            "labels": torch.randint(0, 10, (rows,), generator=generator).numpy(),
        }
    ).with_format("torch")
    torch.manual_seed(0)
    config = TrakConfig(
        output_dir=directory, proj_dim=args.proj_dim, shard_size=args.shard_size, use_cpu=True,
        per_device_batch_size=args.batch_size,
    )  # fmt: skip
    attributor = TrakAttributor(Cnn(), config, train_dataset=data, task="image_classification")
    store = attributor.features.store
    attributor.features.processes.wait_for_everyone()
    begun = time.perf_counter()
    attributor.featurize()
    attributor.features.processes.wait_for_everyone()
    assert store.train(0).complete
    return time.perf_counter() - begun


def worker(directory: Path, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    disable_progress_bars()
    featurize(str(directory / "warm-up"), 2 * args.shard_size, args)
    seconds = featurize(str(directory / "timed"), args.rows, args)
    if int(os.environ["RANK"]) == 0:
        (directory / "seconds.json").write_text(json.dumps(seconds))
    torch.distributed.destroy_process_group()


def launch(world: int, given: list[str]) -> tuple[float, str]:
    """Seconds, and a digest of the features."""
    with tempfile.TemporaryDirectory(prefix="hf_trak-scaling-") as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, __file__, *given, "--worker", directory], env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"The run with {world} processes failed:\n{done.stderr}")
        digest = hashlib.sha256()
        for path in sorted(Path(directory, "timed").rglob("*.safetensors")):
            digest.update(path.read_bytes())
        return json.loads(Path(directory, "seconds.json").read_text()), digest.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--shard-size", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--proj-dim", type=int, default=1024, help="k")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        worker(args.worker, args)
        return
    given = sys.argv[1:] if arguments is None else arguments
    seconds: dict[int, list[float]] = {1: [], 2: []}
    digests: set[Any] = set()
    for _ in range(args.rounds):
        for world, times in seconds.items():
            taken, digest = launch(world, given)
            times.append(taken)
            digests.add(digest)
    one, two = (statistics.median(times) for times in seconds.values())
    print(
        f"{args.rows} rows, k = {args.proj_dim}, one thread per process; medians of {args.rounds} rounds\n"
        f"1 process: {args.rows / one:.0f} rows/s, 2 processes: {args.rows / two:.0f} rows/s, {one / two:.2f} ×; "
        f"the same bytes: {'yes' if len(digests) == 1 else 'NO'}"
    )


if __name__ == "__main__":
    main()
