"""Conversion of images of any form to arrays of numbers between 0 and 1."""

from typing import Any

import numpy as np
import torch


def as_array(image: Any) -> np.ndarray:
    """Convert an array, tensor or nested list to an array with channels last.

    Args:
        image: numbers of shape (H, W), (H, W, C) or (C, H, W) with C one of 1, 3, 4.

    Returns:
        An array (H, W), (H, W, 3) or (H, W, 4).

    Raises:
        ValueError: the image has another shape.
    """
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = image.float() if image.dtype == torch.bfloat16 else image  # NumPy has no bfloat16
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or array.size == 0:
        raise ValueError(
            f"An image has the shape {array.shape}. Expected (H, W), (H, W, C) or (C, H, W) with C one of 1, 3, 4. "
            "Name another column as `image_column`, or convert the images."
        )
    return array


def as_pixels(image: Any) -> np.ndarray:
    """Convert an image to float64 numbers in [0, 1].

    Bytes are divided by 255. Floats in [0, 1] are kept. Any other values are mapped linearly, the least to 0 and the
    greatest to 1. Reduce large images with `images.bounded` first, since the result takes 8 bytes per number.

    Args:
        image: a PIL image, or an array, tensor or nested list (H, W), (H, W, C) or (C, H, W) with C one of 1, 3, 4.

    Returns:
        An array (H, W), (H, W, 3) or (H, W, 4).

    Raises:
        ValueError: the image has another shape.
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
    """Convert a PIL image with a palette or another colour space to grey, RGB or RGBA. Others pass as they are."""
    transparent = "transparency" in image.info
    if image.mode in ("L", "I", "I;16", "F", "RGBA") or (image.mode == "RGB" and not transparent):
        return image
    return image.convert("L" if image.mode == "1" else "RGBA" if transparent else "RGB")
