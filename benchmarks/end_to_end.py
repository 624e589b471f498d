"""Featurizing end to end beside traker 0.3.2 on a CPU: the same network, data, checkpoints and k.

    pip install --no-deps --target peers traker==0.3.2
    python benchmarks/end_to_end.py --traker peers

Each system featurizes every training row under every checkpoint and finishes what comes before scoring targets, in
a process of its own, so that peak memory and disk are its own; importing is not timed. On a CPU traker has one
projection, dense Rademacher; this library has two, `rademacher` and `sjlt`. Without `--traker` the peer is left out.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import disable_progress_bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PEER = "traker 0.3.2"
OURS = {"hf_trak, sjlt": "sjlt", "hf_trak, rademacher": "rademacher"}


class Cnn(nn.Module):
    """Two convolutions and two linear layers over 3 × 32 × 32 images: 545,098 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4096, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def data(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(args.rows, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (args.rows,), generator=generator)


def checkpoints(args: argparse.Namespace) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [Cnn().state_dict() for _ in range(args.checkpoints)]


def with_traker(directory: str, args: argparse.Namespace) -> None:
    from trak import TRAKer

    images, labels = data(args)
    traker = TRAKer(
        model=Cnn().eval(), task="image_classification", train_set_size=args.rows, save_dir=directory, device="cpu",
        proj_dim=args.proj_dim, proj_max_batch_size=args.batch_size, use_half_precision=False,
    )  # fmt: skip
    for model_id, checkpoint in enumerate(checkpoints(args)):
        traker.load_checkpoint(checkpoint, model_id=model_id)
        for start in range(0, args.rows, args.batch_size):
            part = slice(start, start + args.batch_size)
            traker.featurize(batch=[images[part], labels[part]], num_samples=len(labels[part]))
    traker.finalize_features()


def with_hf_trak(directory: str, projection: str, args: argparse.Namespace) -> None:
    from hf_trak import TrakAttributor, TrakConfig

    images, labels = data(args)
    rows = TensorDataset(images, labels)
    config = TrakConfig(
        output_dir=directory, proj_type=projection, proj_dim=args.proj_dim, per_device_batch_size=args.batch_size,
        use_cpu=True,
    )  # fmt: skip
    TrakAttributor(Cnn(), config, train_dataset=rows, task="image_classification").featurize(checkpoints(args))


def one_system(name: str, directory: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds, peak resident MiB above those before, and MiB on disk. Meant for a fresh process."""
    torch.set_num_threads(args.threads)
    disable_progress_bars()
    if name == PEER:
        sys.path.append(str(args.traker))
        import trak  # noqa: F401
    else:
        import hf_trak.attributor  # noqa: F401
    Cnn()(torch.zeros(1, 3, 32, 32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    if name == PEER:
        with_traker(directory, args)
    else:
        with_hf_trak(directory, OURS[name], args)
    return {
        "seconds": time.perf_counter() - begun,
        "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "disk": sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file()) / 2**20,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96, help="training rows")
    parser.add_argument("--checkpoints", type=int, default=2)
    parser.add_argument("--proj-dim", type=int, default=2048, help="k")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--traker", type=Path, help="directory that holds the `trak` package")
    parser.add_argument("--system", nargs=2, metavar=("SYSTEM", "DIRECTORY"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.system:
        print(json.dumps(one_system(*args.system, args)))
        return
    given = sys.argv[1:] if arguments is None else arguments
    results = {}
    for name in [*OURS, *([PEER] if args.traker else [])]:
        with tempfile.TemporaryDirectory(prefix="hf_trak-end-to-end-") as directory:
            command = [sys.executable, __file__, *given, "--system", name, directory]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{name} failed:\n{done.stderr}")
            results[name] = json.loads(done.stdout.splitlines()[-1])
    parameters = sum(parameter.numel() for parameter in Cnn().parameters())
    print(
        f"{args.rows} rows, {args.checkpoints} checkpoints, P = {parameters:,}, k = {args.proj_dim}, batches of "
        f"{args.batch_size}, {args.threads} threads"
    )
    print(f"{'':22}{'seconds':>10}{'peak MiB':>10}{'disk MiB':>10}{'times faster':>14}")
    for name, result in results.items():
        faster = f"{results[PEER]['seconds'] / result['seconds']:.1f}" if PEER in results else "-"
        print(f"{name:22}{result['seconds']:10.2f}{result['peak']:10.0f}{result['disk']:10.1f}{faster:>14}")


if __name__ == "__main__":
    main()
