"""How well scores of a diffusion model predict what retraining does: digits of 8 × 8 pixels.

    OMP_NUM_THREADS=1 python benchmarks/diffusion.py --output_dir outputs/diffusion_bank

A small denoising network is trained on digits of scikit-learn without labels; targets are held-out digits, and the
output of a target is minus its loss over all of a fixed set of timesteps and noise. The linear datamodeling score
comes from random halves of the rows, tail removal from the rows that each method scores highest for each target.
Outputs are means over the seeds of the attributed models, whose start, order, timesteps and noise they share.
All trainings are kept in a `Bank`, so that the same command resumes.
"""

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import silu

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.evaluation import Bank, evaluate_lds, evaluate_removal, random_subsets, removal_plan
from hf_trak.modelout_functions import DiffusionModelOutput

TOTAL = 100
STEPS = list(range(5, TOTAL, 10))
ALPHAS = torch.cumprod(1 - torch.linspace(1e-3, 0.08, TOTAL), 0)


class Denoiser(nn.Module):
    """Three convolutions, shifted by an embedding of the timestep."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Embedding(TOTAL, width)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.wide = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Any:
        hidden = silu(self.first(sample) + self.time(timestep)[:, :, None, None])
        hidden = hidden + silu(self.middle(hidden))
        return SimpleNamespace(sample=self.last(hidden + silu(self.wide(hidden))))


def noised(clean: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
    """Add noise to images at their timesteps."""
    alphas = ALPHAS[steps].view(-1, 1, 1, 1)
    return alphas.sqrt() * clean + (1 - alphas).sqrt() * noise


def trained(clean: Tensor, seed: int, steps: int, kept: Tensor | None = None) -> Denoiser:
    """Train a network on images; those that are not `kept` come in the same batches, with a loss of 0.

    So trainings of one seed differ by the images alone, and not by start, order, timesteps and noise.
    """
    torch.manual_seed(seed)
    weights = torch.ones(len(clean)) if kept is None else kept.float()
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(0, len(clean), (64,))
        batch, times, noise = clean[rows], torch.randint(0, TOTAL, (64,)), torch.randn(64, *clean.shape[1:])
        errors = (model(noised(batch, times, noise), times).sample - noise).square().flatten(1).mean(dim=1)
        ((errors * weights[rows]).sum() / weights[rows].sum().clamp(min=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def outputs(model: Denoiser, clean: Tensor, draws: int = 16) -> np.ndarray:
    """Compute minus the loss of every target, over the same timesteps and noise each time."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(len(clean))
    for step in STEPS:
        for _ in range(draws):
            noise, times = torch.randn(clean.shape, generator=generator), torch.full((len(clean),), step)
            error = model(noised(clean, times, noise), times).sample - noise
            total -= error.square().flatten(1).mean(dim=1)
    return (total / (draws * len(STEPS))).double().numpy()


class Retraining:
    """What the bank calls for each subset: a mean over trainings with the same seeds each time."""

    def __init__(self, train: Tensor, targets: Tensor, steps: int, seeds: range) -> None:
        self.train, self.targets, self.steps, self.seeds = train, targets, steps, seeds

    def __call__(self, rows: np.ndarray, seed: int) -> np.ndarray:
        kept = torch.zeros(len(self.train), dtype=torch.bool)
        kept[torch.as_tensor(np.asarray(rows))] = True
        models = [trained(self.train, each, self.steps, kept) for each in self.seeds]
        return np.mean([outputs(model, self.targets) for model in models], axis=0)


def scores_of(
    directory: Path, models: list[Denoiser], train: Dataset, targets: Dataset, function: Any, options: Any
) -> dict[str, np.ndarray]:
    """Compute scores `(n, m)` of a function: by TRAK's formula, and cosines of the same features."""
    scheduler = {"alphas_cumprod": ALPHAS.tolist(), "prediction_type": "epsilon"}
    total: dict[str, Any] = {"TRAK": 0.0, "cosine": 0.0}
    for place, model in enumerate(models):
        config = TrakConfig(
            output_dir=str(directory / f"{function}-{place}"), proj_dim=options.proj_dim, num_draws=options.draws,
            use_cpu=True, per_device_batch_size=32, lambda_relative=options.lambda_relative,
            feature_dtype="float32",
        )  # fmt: skip
        task = DiffusionModelOutput(scheduler, function, timesteps=STEPS)
        made = TrakAttributor(model, config, train, task=task).featurize()
        found = made.attribute(targets, top_k=None, method="index").with_format("numpy")["trak_scores"][:]
        total["TRAK"] = total["TRAK"] + np.asarray(found).T
        features = torch.cat([shard.grads for shard in made.features.store.train(0)]).double()
        wanted = TrakAttributor(
            model, TrakConfig(**{**config.to_dict(), "output_dir": f"{config.output_dir}-targets", "seed": 1}),
            targets, task=task,
        ).featurize()  # fmt: skip
        of_targets = torch.cat([shard.grads for shard in wanted.features.store.train(0)]).double()
        normalized = [nn.functional.normalize(each, dim=1) for each in (features, of_targets)]
        total["cosine"] = total["cosine"] + (normalized[0] @ normalized[1].T).numpy()
    return {f"{name}, {function}": value / len(models) for name, value in total.items()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/diffusion_bank")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--subsets", type=int, default=40)
    parser.add_argument("--models", type=int, default=2, help="seeds of trainings, for scores and for outputs")
    parser.add_argument("--training_steps", type=int, default=500)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--proj_dim", type=int, default=1024)
    parser.add_argument("--lambda_relative", type=float, default=0.3)
    options = parser.parse_args()
    disable_progress_bars()
    directory, began = Path(options.output_dir), time.perf_counter()
    pixels = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    pixels = pixels[torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))]
    clean, held_out = pixels[: options.rows], pixels[options.rows : options.rows + options.targets]
    train, targets = (Dataset.from_dict({"pixel_values": part.tolist()}) for part in (clean, held_out))
    seeds = range(options.models)
    retrain = Retraining(clean, held_out, options.training_steps, seeds)
    protocol = {"training_steps": options.training_steps, "seeds": len(seeds), "drop": "mask"}
    bank = Bank.create(directory / "bank", train, targets, recipe=protocol)

    models = [trained(clean, seed, options.training_steps) for seed in seeds]
    scores: dict[str, np.ndarray] = {}
    for function in ("loss", "square"):
        scores |= scores_of(directory / "features", models, train, targets, function, options)
    flat = [nn.functional.normalize(part.flatten(1), dim=1).double() for part in (clean, held_out)]
    similar = (flat[0] @ flat[1].T).numpy()
    print(f"scores: {time.perf_counter() - began:.0f} s", flush=True)

    masks = random_subsets(options.rows, options.subsets, 0.5, seed=0)
    bank.add_part("halves", masks, protocol=protocol)
    bank.build("halves", retrain)
    halves = bank.part("halves")
    print(f"halves: {time.perf_counter() - began:.0f} s", flush=True)
    chance = np.random.default_rng(0).standard_normal(similar.shape)
    print("\n| scores | LDS | 95 % |\n|---|---|---|")
    for name, matrix in {**scores, "cosine of pixels": similar, "random": chance}.items():
        mean = evaluate_lds(matrix, halves.masks, halves.truth).mean
        print(f"| {name} | {mean.value:.3f} | {mean.low:.3f} … {mean.high:.3f} |", flush=True)

    plan = removal_plan(scores, (0.1,), controls={"cosine of pixels": similar}, random_draws=8)
    bank.add_part("removals", plan.masks, protocol=protocol)
    bank.build("removals", retrain)
    removals = bank.part("removals")
    print(f"\n{evaluate_removal(plan, removals.masks, removals.truth)}\n\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
