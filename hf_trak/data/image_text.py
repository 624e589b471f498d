"""A data collator that makes the batches of CLIP models from rows with an image and a caption."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class ImageTextCollator:
    """A data collator for datasets with a column of images and a column of captions.

    With a processor of `transformers`, batches are what the processor returns:

    ```python
    ImageTextCollator("image", "caption", processor=AutoProcessor.from_pretrained(...))
    ```

    With the transform and the tokenizer of open_clip, batches are `{"image": ..., "text": ...}`:

    ```python
    ImageTextCollator("image", "caption", image_transform=preprocess_val, tokenizer=open_clip.get_tokenizer(...))
    ```

    Transforms may draw at random: see `num_draws` in [`~hf_trak.config.TrakConfig`].

    Args:
        image_column (`str`, *optional*, defaults to `"image"`):
            Name of the column of images.
        text_column (`str`, *optional*, defaults to `"text"`):
            Name of the column of captions, one text per row.
        processor (`ProcessorMixin`, *optional*):
            A processor of images and texts, from `transformers`.
        image_transform (`Callable`, *optional*):
            Maps a PIL image to a tensor `(C, H, W)`. Given together with `tokenizer`, instead of `processor`.
        tokenizer (`Callable`, *optional*):
            Maps a list of B texts to token ids `(B, context_length)`.
        padding (`bool` or `str`, *optional*):
            Passed to the processor. By default texts are padded to the longest one of the batch or, for SigLIP, to
            the length that the model was trained with, because its text tower reads the last position.

    Attributes:
        columns (`tuple[str, str]`):
            The dataset columns that the collator reads. They are kept whatever `remove_unused_columns` says.

    Raises:
        ValueError: neither a processor nor both a transform and a tokenizer are given, or a processor together with
            one of them.
        TypeError: the processor does not take images and texts.
    """

    def __init__(
        self,
        image_column: str = "image",
        text_column: str = "text",
        *,
        processor: Any = None,
        image_transform: Callable[[Image.Image], Tensor] | None = None,
        tokenizer: Callable[[list[str]], Tensor] | None = None,
        padding: bool | str | None = None,
    ) -> None:
        pair = (image_transform, tokenizer)
        if (processor is None) == (None in pair) or (processor is not None and any(part is not None for part in pair)):
            given = [
                name
                for name, value in zip(("processor", "image_transform", "tokenizer"), (processor, *pair), strict=True)
                if value is not None
            ]
            raise ValueError(
                f"`ImageTextCollator` was given {given or 'nothing'}. Expected `processor` (transformers), or both "
                "`image_transform` and `tokenizer` (open_clip)."
            )
        if processor is not None:
            parts = [getattr(processor, name, None) is not None for name in ("image_processor", "tokenizer")]
            if not all(parts):
                raise TypeError(
                    f"`processor` is a {type(processor).__name__}, which does not process both images and texts. "
                    "Expected one with an image processor and a tokenizer, such as "
                    "`AutoProcessor.from_pretrained(…)` gives for a CLIP model."
                )
            if padding is None:
                padding = "max_length" if type(processor).__name__.startswith("Siglip") else True
        self.image_column = image_column
        self.text_column = text_column
        self.processor = processor
        self._open_clip: Any = pair
        self.padding = padding

    @property
    def columns(self) -> tuple[str, str]:
        """Name the image column and the caption column."""
        return self.image_column, self.text_column

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Make the batch of some rows.

        Raises:
            ValueError: a row lacks a column, its image is no image, or its caption is no text.
        """
        images = [as_image(self._value(row, self.image_column), self.image_column) for row in rows]
        texts = [_as_text(self._value(row, self.text_column), self.text_column) for row in rows]
        if self.processor is not None:
            batch = self.processor(
                images=images, text=texts, padding=self.padding, truncation=True, return_tensors="pt"
            )
            return dict(batch)
        transform, tokenizer = self._open_clip
        return {"image": torch.stack([transform(image) for image in images]), "text": tokenizer(texts)}

    def _value(self, row: Mapping[str, Any], column: str) -> Any:
        if not isinstance(row, Mapping) or column not in row:
            given = list(row) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            raise ValueError(
                f"A row has {given}, not {column!r}. Expected the columns {list(self.columns)}. Name the columns with "
                "the image and the caption in `ImageTextCollator(image_column, text_column, ...)`."
            )
        return row[column]


def as_image(value: Any, column: str) -> Image.Image:
    """Convert a value of an image column to an RGB image.

    Args:
        value: a PIL image, a uint8 array `(H, W)` or `(H, W, C)`, or a uint8 tensor `(H, W)` or `(C, H, W)`.
        column: name of the column, for the error message.

    Raises:
        ValueError: the value is none of these; names the column, its value, and the cast that makes images of it.
    """
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    if isinstance(value, Tensor):
        # `datasets` returns images channels first in the format "torch".
        value = (value.movedim(0, 2) if value.ndim == 3 else value).numpy(force=True)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        return Image.fromarray(value.squeeze(2) if value.ndim == 3 and value.shape[2] == 1 else value).convert("RGB")
    shown = repr(value)
    if isinstance(value, np.ndarray):
        shown = f"an array of {value.dtype} of the shape {value.shape}"
    raise ValueError(
        f"The column {column!r} holds {shown if len(shown) < 80 else f'{shown[:77]}…'} (a {type(value).__name__}), "
        "which is no image. Expected a PIL image, or an array of bytes (height, width, 3). Cast paths or encoded "
        f"bytes with `dataset.cast_column({column!r}, datasets.Image())`, or name another column."
    )


def _as_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    shown = repr(value)
    raise ValueError(
        f"The column {column!r} holds {shown if len(shown) < 80 else f'{shown[:77]}…'} (a {type(value).__name__}). "
        "Expected one caption, a text. If an image has several captions, give each a row of its own, or choose one "
        "with `dataset.map`."
    )
