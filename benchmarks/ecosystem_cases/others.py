"""Speech, segmentation and diffusion."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch.utils.data import Dataset

from ecosystem_cases.case import EcosystemCase
from ecosystem_cases.truth import of_plain_trainer
from hf_trak import TrakAttributor, TrakConfig


class Rows(Dataset[dict[str, Any]]):
    """Rows of tensors."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def speech(directory: Path, args: TrakConfig) -> TrakAttributor:
    torch.manual_seed(0)
    config = hf.Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, pad_token_id=0, feat_extract_norm="layer",
    )  # fmt: skip
    sounds, model = numbers(6, 400), hf.Wav2Vec2ForCTC(config).eval()
    rows = [{"input_values": one, "labels": torch.tensor([3, 4 + place, 5])} for place, one in enumerate(sounds)]
    return of_plain_trainer(model, args, Rows(rows), hf.default_data_collator, task="row_loss")


def segments(directory: Path, args: TrakConfig) -> TrakAttributor:
    torch.manual_seed(0)
    config = hf.SegformerConfig(
        num_labels=3, depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    )  # fmt: skip
    pixels, model = numbers(6, 3, 32, 32), hf.SegformerForSemanticSegmentation(config).eval()
    rows = [{"pixel_values": one, "labels": (one[0] * 2.99).long()} for one in pixels]
    return of_plain_trainer(model, args, Rows(rows), hf.default_data_collator, task="row_loss")


def denoised(directory: Path, args: TrakConfig) -> TrakAttributor:
    import diffusers

    from hf_trak.modelout_functions import DiffusionModelOutput

    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    ).eval()  # fmt: skip
    rows = [{"pixel_values": 2 * one - 1} for one in numbers(6, 1, 8, 8)]
    task = DiffusionModelOutput(diffusers.DDPMScheduler(), timesteps=4)
    return TrakAttributor(model, args, Rows(rows), hf.default_data_collator, task=task)


OTHERS = (
    EcosystemCase("Wav2Vec2: speech recognition (CTC)", speech, '`task="row_loss"`'),
    EcosystemCase("SegFormer: a class for each pixel", segments, '`task="row_loss"`'),
    EcosystemCase("diffusers: `UNet2DModel`", denoised, "`task=DiffusionModelOutput(scheduler)`"),
)
