"""Images of pairs: both answers of a pair are about the same images, of which a batch of pairs holds one copy."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IMAGE_TENSORS = frozenset(
    {
        "pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "num_patches", "image_position_ids",
        "pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_position_ids",
    }
)  # fmt: skip
"""Names of the tensors of images and videos that processors make, with or without a dimension of rows."""


def images_once(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take the images of pairs from a batch in which they stand twice, first those of all chosen answers.

    Args:
        batch: what the collator of a trainer made of pairs.

    Returns:
        The tensors of images, half as long; nothing if the batch has no images.

    Raises:
        ValueError: the images of chosen and of rejected answers differ.
    """
    found = {}
    for name, value in batch.items():
        if name not in IMAGE_TENSORS or not isinstance(value, Tensor):
            continue
        half = len(value) // 2
        if len(value) % 2 or not torch.equal(value[:half], value[half:]):
            raise ValueError(
                f"`{name}` of the batch has the shape {tuple(value.shape)}, and its halves differ. Expected the "
                "images of the chosen answers, and behind them the same for the rejected ones. Use the collator of "
                "the trainer, without random augmentation."
            )
        found[name] = value[:half]
    return found
