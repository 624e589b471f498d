"""From rows with an image and a caption to the batches of CLIP models."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class ImageTextCollator:
    """A data collator for datasets with an image and a caption column.

    With a processor of `transformers`, batches are what it returns:
    `ImageTextCollator("image", "caption", processor=AutoProcessor.from_pretrained(…))`. With the transform and the
    tokenizer of open_clip, batches are `{"image": …, "text": …}`: `ImageTextCollator("image", "caption",
    image_transform=preprocess_val, tokenizer=open_clip.get_tokenizer(…))`. Take transforms without randomness, so that
    a row is the same each time.

    Attributes:
        columns: the dataset columns that it reads, kept whatever `remove_unused_columns` says.
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
        """
        Args:
            image_column: column of images.
            text_column: column of captions, one text per row.
            processor: of images and texts, from `transformers`.
            image_transform: maps an image to a tensor `(C, H, W)`; with `tokenizer`, instead of `processor`.
            tokenizer: maps a list of texts to token ids `(B, context length)`.
            padding: given to the processor. `None` pads to the longest text of the batch, for SigLIP to the length
                that it was trained with, since its text tower reads the last position.

        Raises:
            ValueError: neither a processor nor both a transform and a tokenizer, or all of them.
            TypeError: the processor does not take images and texts.
        """
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
        """The image and the caption column."""
        return self.image_column, self.text_column

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of some rows.

        Raises:
            ValueError: a row lacks a column, its image is no image or its caption no text.
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
                f"A row has {given}, not {column!r}. Expected the columns {list(self.columns)}. Name the ones that "
                "hold the image and the caption in `ImageTextCollator(image_column, text_column, …)`."
            )
        return row[column]


def as_image(value: Any, column: str) -> Image.Image:
    """An RGB image from a PIL image, an array of bytes `(H, W)` or `(H, W, C)`, or a tensor of them, `(C, H, W)`.

    Raises:
        ValueError: it is neither; names the column, what it holds, and the cast that makes images of it.
    """
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    if isinstance(value, Tensor):
        # As `datasets` gives images in the format "torch": channels first.
        value = (value.movedim(0, 2) if value.ndim == 3 else value).numpy(force=True)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        return Image.fromarray(value.squeeze(2) if value.ndim == 3 and value.shape[2] == 1 else value).convert("RGB")
    shown = repr(value)
    if isinstance(value, np.ndarray):
        shown = f"an array of {value.dtype} of the shape {value.shape}"
    raise ValueError(
        f"The column {column!r} holds {shown if len(shown) < 80 else f'{shown[:77]}…'} (a {type(value).__name__}), "
        "which is no image. Expected a PIL image, or an array of bytes (height, width, 3). For paths or encoded "
        f"bytes: `dataset.cast_column({column!r}, datasets.Image())`; otherwise name the right column."
    )


def _as_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    shown = repr(value)
    raise ValueError(
        f"The column {column!r} holds {shown if len(shown) < 80 else f'{shown[:77]}…'} (a {type(value).__name__}). "
        "Expected one caption, a text. For several captions per image give each a row of its own, or choose one with "
        "`dataset.map`."
    )
