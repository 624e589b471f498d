"""A small diffusion model of 8 × 8 images: the network, its noise, its training, and images drawn from it.

Replace it by a model, scheduler and training script of `diffusers`: `Denoiser` is called as `UNet2DModel`, and
`SCHEDULE` is what is read of a `DDPMScheduler`.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, silu

SIDE, TIMESTEPS = 8, 100
BETAS = torch.linspace(1e-3, 0.08, TIMESTEPS)
ALPHAS = torch.cumprod(1 - BETAS, 0)
SCHEDULE = {"alphas_cumprod": ALPHAS.tolist(), "prediction_type": "epsilon"}


class Denoiser(nn.Module):
    """Three convolutions over pixels with an embedding of their place, shifted by one of the timestep."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, width)
        self.place = nn.Parameter(0.1 * torch.randn(width, SIDE, SIDE))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.wide = nn.Conv2d(width, width, 3, padding=3, dilation=3)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Any:
        hidden = silu(self.first(sample) + self.place + self.time(timestep)[:, :, None, None])
        hidden = hidden + silu(self.middle(hidden))
        hidden = hidden + silu(self.wide(hidden))
        return SimpleNamespace(sample=self.last(hidden))


def train(images: Tensor, steps: int, seed: int) -> Denoiser:
    """Train a network to predict the noise in images `(n, 1, 8, 8)`, scaled to [-1, 1]."""
    torch.manual_seed(seed)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        clean = images[torch.randint(0, len(images), (64,))]
        times, noise = torch.randint(0, TIMESTEPS, (64,)), torch.randn_like(clean)
        alphas = ALPHAS[times].view(-1, 1, 1, 1)
        noised = alphas.sqrt() * clean + (1 - alphas).sqrt() * noise
        optimizer.zero_grad()
        mse_loss(model(noised, times).sample, noise).backward()
        optimizer.step()
        rate.step()
    return model.eval()


@torch.no_grad()
def generate(model: Denoiser, count: int, seed: int) -> Tensor:
    """Draw images from the model, step by step (Ho et al. 2020, arXiv 2006.11239, Algorithm 2)."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    for step in reversed(range(TIMESTEPS)):
        noise = model(images, torch.full((count,), step)).sample
        images = (images - BETAS[step] / (1 - ALPHAS[step]).sqrt() * noise) / (1 - BETAS[step]).sqrt()
        if step:
            images = images + BETAS[step].sqrt() * torch.randn(images.shape, generator=generator)
    return images.clamp(-1, 1)
