"""Images in whatever form a dataset has them, as arrays of numbers between 0 and 1."""

from typing import Any

import numpy as np
import torch


def as_array(image: Any) -> np.ndarray:
    """An array, tensor or nested list (H, W), (H, W, C) or (C, H, W) as (H, W) or (H, W, 3 or 4).

    Raises:
        ValueError: another shape.
    """
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = image.float() if image.dtype == torch.bfloat16 else image  # numpy has no bfloat16
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or array.size == 0:
        raise ValueError(
            f"An image has the shape {array.shape}. Expected (H, W), (H, W, C) or (C, H, W) with C one of 1, 3, 4."
        )
    return array


def as_pixels(image: Any) -> np.ndarray:
    """An image as (H, W) or (H, W, 3 or 4) in [0, 1], 8 bytes per number: see `images.bounded` for large ones.

    Bytes are divided by 255, and floats in [0, 1] kept; any other values are stretched from least to greatest.

    Args:
        image: a PIL image, or an array, tensor or nested list (H, W), (H, W, C) or (C, H, W) with C one of 1, 3, 4.

    Raises:
        ValueError: another shape.
    """
    array = as_array(as_plain(image) if hasattr(image, "convert") else image)
    if array.dtype == np.uint8:
        return array / 255.0
    array = array.astype(np.float64)
    array = np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(array.min()), float(array.max())
    if low >= 0.0 and high <= 1.0:
        return array
    return (array - low) / ((high - low) or 1.0)


def as_plain(image: Any) -> Any:
    """A PIL image of numbers, greys or colours: palettes and other colour spaces are converted."""
    transparent = "transparency" in image.info
    if image.mode in ("L", "I", "I;16", "F", "RGBA") or (image.mode == "RGB" and not transparent):
        return image
    return image.convert("L" if image.mode == "1" else "RGBA" if transparent else "RGB")
