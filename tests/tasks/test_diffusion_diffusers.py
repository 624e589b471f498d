"""The task `diffusion` on models and schedulers of `diffusers`, where that is installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import default_data_collator

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions import DiffusionModelOutput
from hf_trak.modelout_functions.diffusion import NOISED, TIMESTEPS, WANTED

diffusers = pytest.importorskip("diffusers")

UNET = {
    "sample_size": 8, "in_channels": 2, "out_channels": 2, "layers_per_block": 1, "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}  # fmt: skip


def unet() -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DModel(num_class_embeds=4, attention_head_dim=4, **blocks, **UNET)


def conditional() -> nn.Module:
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return diffusers.UNet2DConditionModel(cross_attention_dim=6, attention_head_dim=4, **blocks, **UNET)


def transformer() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        sample_size=8, in_channels=2, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        patch_size=2, num_embeds_ada_norm=4, norm_num_groups=4,
    )  # fmt: skip


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "UNet2DModel": (unet, "epsilon", {"class_labels": [0, 3, 1]}),
    "UNet2DConditionModel": (
        conditional,
        "v_prediction",
        {"encoder_hidden_states": torch.linspace(-1, 1, 36).view(3, 2, 6).tolist()},
    ),
    "DiTTransformer2DModel": (transformer, "epsilon", {"class_labels": [2, 0, 1]}),
}


@pytest.mark.parametrize("function", ["loss", "square"])
@pytest.mark.parametrize("case", CASES)
def test_features_of_models_of_diffusers(case: str, function: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, kind, conditions = CASES[case]
    model = make().eval()
    for parameter in model.parameters():  # some start at 0, behind which no gradient would be seen
        nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100, prediction_type=kind)
    rows = Dataset.from_dict({"latents": torch.randn(3, 2, 8, 8).tolist(), **conditions})
    task = DiffusionModelOutput(scheduler, function, timesteps=[10, 60], column="latents")
    config = TrakConfig(
        output_dir=str(tmp_path), proj_type="none", use_cpu=True, feature_dtype="float32",
        per_device_batch_size=3, num_draws=2,
    )  # fmt: skip
    made = TrakAttributor(model, config, rows, task=task).featurize()
    found = torch.cat([shard.grads for shard in made.features.store.train(0)])
    batches = made.features.featurizer().batches(rows)
    expected = torch.stack(
        [sum(by_hand(model, scheduler, batches.alone(row, draw), rows[row], function) for draw in (0, 1)) / 2
         for row in range(3)]
    )  # fmt: skip
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) <= 1e-5


def by_hand(model: nn.Module, scheduler: Any, batch: Any, row: dict[str, Any], function: str) -> Tensor:
    """Plain autograd with the scheduler's own methods, which are given the noise that the batch was made with."""
    clean = torch.tensor(row["latents"])[None]
    conditions = {name: value for name, value in batch.items() if name not in (NOISED, TIMESTEPS, WANTED)}
    total = torch.zeros(())
    for place, step in enumerate(batch[TIMESTEPS][0]):
        alpha = scheduler.alphas_cumprod[step]
        noise = (batch[NOISED][:, place] - alpha.sqrt() * clean) / (1 - alpha).sqrt()
        noised = scheduler.add_noise(clean, noise, step[None])
        v_prediction = scheduler.config.prediction_type == "v_prediction"
        wanted = scheduler.get_velocity(clean, noise, step[None]) if v_prediction else noise
        prediction = model(noised, timestep=step[None], **conditions).sample[:, :2]
        total = total + (prediction.square() if function == "square" else -(prediction - wanted).square()).mean() / 2
    taken = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(taken, model.parameters(), strict=True)]
    return torch.cat([gradient.flatten() for gradient in filled])


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_noise_is_that_of_the_scheduler(kind: str) -> None:
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=50, prediction_type=kind, beta_schedule="scaled_linear")
    collate = DiffusionModelOutput(scheduler, timesteps=5).collator(default_data_collator)
    torch.manual_seed(3)
    batch = collate([{"pixel_values": torch.ones(1, 4, 4)}])
    torch.manual_seed(3)
    noise, clean, steps = torch.randn(5, 1, 4, 4), torch.ones(5, 1, 4, 4), batch[TIMESTEPS][0]
    assert steps.tolist() == [5, 15, 25, 35, 45]
    torch.testing.assert_close(batch[NOISED][0], scheduler.add_noise(clean, noise, steps))
    wanted = {"epsilon": noise, "v_prediction": scheduler.get_velocity(clean, noise, steps), "sample": clean}
    torch.testing.assert_close(batch[WANTED][0], wanted[kind])
