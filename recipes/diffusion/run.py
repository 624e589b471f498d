"""Train a diffusion model on digits, let it draw some, and show which training images taught it to.

    python recipes/diffusion/run.py

Among the training images are copies of one digit with a bright corner. The model learns to draw such corners, and the
attribution of a drawn image with one has to find where it came from. See README.md beside this file.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import torch
from datasets import Dataset
from denoiser import SCHEDULE, generate, train
from kit.files import save_dataset, write_json
from kit.outcome import write_report
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions import DiffusionModelOutput

MARKED_DIGIT = 3
DRAWN = 256
"""Images that are drawn from the model. Some become targets."""


def load(args: argparse.Namespace) -> Dataset:
    """Take digits, and add copies of some images of one digit with a bright corner."""
    digits = load_digits()
    order = np.random.default_rng(args.seed).permutation(len(digits.target))[: args.rows]
    pixels = torch.tensor(digits.images[order], dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target[order])
    copied = (labels == MARKED_DIGIT).nonzero()[:, 0][: args.marked]
    copies = pixels[copied].clone()
    copies[:, :, :3, :3] = 1.0
    return Dataset.from_dict(
        {
            "pixel_values": torch.cat([pixels, copies]).tolist(),
            "digit": torch.cat([labels, labels[copied]]).tolist(),
            "marked": [False] * len(pixels) + [True] * len(copies),
        }
    )


def has_mark(images: Tensor) -> Tensor:
    """Tell whether the corner of images `(n, 1, 8, 8)` is bright; in no digit it is."""
    return images[:, 0, :3, :3].mean(dim=(1, 2)) > 0


def choose_targets(drawn: Tensor, count: int) -> Dataset:
    """Take the first images with a mark, and as many without."""
    marked = has_mark(drawn)
    rows = [*marked.nonzero()[:count, 0].tolist(), *(~marked).nonzero()[:count, 0].tolist()]
    return Dataset.from_dict({"pixel_values": drawn[rows].tolist(), "marked": marked[rows].tolist()})


def shares(scored: Dataset, rows: Dataset) -> dict[str, Any]:
    """Compute which share of the rows that helped most is marked, for targets with a mark and without."""
    marked, of_targets = np.asarray(rows["marked"][:]), np.asarray(scored["marked"][:])
    found = marked[np.asarray(scored["trak_indices"][:])].mean(axis=1)
    return {
        "marked_share": float(marked.mean()),
        "marked_targets": int(of_targets.sum()),
        "marked_among_most_helpful": {
            name: float(found[of_targets == side].mean()) if (of_targets == side).any() else None
            for name, side in (("of_marked_targets", True), ("of_other_targets", False))
        },
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/diffusion"), help="Where everything goes.")
    parser.add_argument("--rows", type=int, default=300, help="Digits without a mark.")
    parser.add_argument("--marked", type=int, default=30, help="Copies with a mark, at most.")
    parser.add_argument("--training_steps", type=int, default=1500, help="Steps of 64 images.")
    parser.add_argument("--function", default="square", choices=["loss", "square"], help="What is attributed.")
    parser.add_argument("--timesteps", type=int, default=10, help="Timesteps of each row.")
    parser.add_argument("--num_draws", type=int, default=2, help="Draws of noise of each row.")
    parser.add_argument("--proj_dim", type=int, default=512, help="Features per row.")
    parser.add_argument("--num_targets", type=int, default=8, help="Drawn images with a mark, and as many without.")
    parser.add_argument("--top_k", type=int, default=10, help="Training rows per target.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of everything.")
    parser.add_argument("--use_cpu", action="store_true", help="Stay on the CPU.")
    args = parser.parse_args(argv)

    rows = load(args)
    model = train(torch.tensor(rows["pixel_values"][:]), args.training_steps, args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), args.output_dir / "model.safetensors")
    targets = choose_targets(generate(model, DRAWN, args.seed), args.num_targets)

    config = TrakConfig(
        output_dir=str(args.output_dir / "trak"), proj_dim=args.proj_dim, num_draws=args.num_draws, seed=args.seed,
        per_device_batch_size=32, use_cpu=args.use_cpu,
    )  # fmt: skip
    task = DiffusionModelOutput(SCHEDULE, args.function, timesteps=args.timesteps)
    attributor = TrakAttributor(model, config, rows, task=task).featurize()
    scored = attributor.attribute(targets, top_k=args.top_k, method="index")
    write_report(attributor, args.output_dir, label_column="marked", label_names=["without a mark", "marked"])

    found = shares(scored, rows)
    save_dataset(rows, args.output_dir / "train")
    save_dataset(scored, args.output_dir / "scored")
    write_json(args.output_dir / "summary.json", {"rows": len(rows), "targets": len(targets), **found})
    for row, target in enumerate(scored):
        digits = ["*" * rows[i]["marked"] + str(rows[i]["digit"]) for i in target["trak_indices"][:8]]
        print(f"Target {row} ({'marked' if target['marked'] else 'not marked'}): helped most: {' '.join(digits)}")
    print(f"\n{found['marked_share']:.0%} of the training images have a mark (*).")
    for side, share in found["marked_among_most_helpful"].items():
        if share is not None:
            print(f"Of the {args.top_k} that helped most, {side.replace('_', ' ')}: {share:.0%}.")


if __name__ == "__main__":
    main()
