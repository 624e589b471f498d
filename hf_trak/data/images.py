"""Images and videos that a collator lays end to end, taken apart by row.

Processors of vision-language models put the images of all rows one after the other, whatever their number and size:
as patches along one dimension, with the sizes of the images in `image_grid_thw` (Qwen2-VL and its successors), or as
images along it (LLaVA with several images, Gemma 3). Idefics and SmolVLM fill rows of fewer images up with black ones,
which the model leaves out again. None of these tensors has a dimension of rows.

Here every row gets its own: rows whose images have the same sizes are stacked, and rows of different sizes become
batches of their own, since no rectangular tensor holds them. Right before the model, the two leading dimensions are
joined again (`modelout_functions.base.call_model`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from datasets import Dataset as HFDataset
from datasets import Image, List
from torch import Tensor

from hf_trak.modelout_functions.base import STACKED

_TOKENS = "input_ids"
_PIXELS = ("pixel_values", "pixel_values_videos", "pixel_values_images")
_OF_IMAGES = ("pixel_values", "image_sizes", "image_grid_thw", "num_patches", "image_position_ids")
_OF_VIDEOS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_position_ids")
_COLUMNS = ("images", "image")


Parts = dict[str, list[Tensor]]
"""By name of a tensor, the part of each row."""


@dataclass(frozen=True)
class ImageTokens:
    """The tokens that stand for images in the texts of a model.

    Attributes:
        image (`int`, *optional*): the token of an image's features.
        video (`int`, *optional*): the token of a video's features.
        merge (`int`): side of the square of patches that makes one token.
    """

    image: int | None = None
    video: int | None = None
    merge: int = 1

    @classmethod
    def of(cls, model: torch.nn.Module) -> "ImageTokens":
        """Read them from the configuration of a model.

        Args:
            model: a model, possibly wrapped by PEFT.
        """
        config = getattr(model, "config", None)
        vision = getattr(config, "vision_config", None)
        merge = getattr(vision, "spatial_merge_size", None)
        image, video = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
        found = [one if isinstance(one, int) else None for one in (image, video)]
        return cls(found[0], found[1], merge if isinstance(merge, int) else 1)


class SplitRows(list[tuple[list[int], Any]]):
    """Batches into which the rows of one were divided: `(positions in it, batch)`."""


def split_at_images(batch: Any, rows: Sequence[Any], tokens: ImageTokens) -> Any:
    """Give every row the images that belong to it.

    Args:
        batch: what the collator made of the rows.
        rows: the rows.
        tokens: the model's tokens of images.

    Returns:
        The batch as it is if its images have a dimension of rows already, and otherwise one in which they have; or
        [`SplitRows`], if rows have images of different sizes or numbers.

    Raises:
        ValueError: it cannot be told which images belong to which row.
    """
    ids = batch.get(_TOKENS) if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim not in (2, 3) or len(ids) != len(rows):
        return batch
    if not any(isinstance(batch.get(name), Tensor) for name in _PIXELS):
        return batch
    # of a pair, the prompt of both answers has the images
    parts, joined = _parts(batch if ids.ndim == 2 else {**batch, _TOKENS: ids[:, 0]}, rows, tokens)
    if not parts:
        return batch
    groups: dict[Any, list[int]] = {}
    for row in range(len(rows)):
        key = tuple((name, _signature(name, one[row])) for name, one in sorted(parts.items()))
        groups.setdefault(key, []).append(row)
    made = SplitRows((places, _batch_of(batch, parts, joined, places)) for places in groups.values())
    return made[0][1] if len(made) == 1 else made


def _parts(batch: Mapping[str, Any], rows: Sequence[Any], tokens: ImageTokens) -> tuple[Parts, frozenset[str]]:
    """Cut the tensors of images that differ in size between rows or have no dimension of rows.

    Returns:
        By name, the part of each row; and the names of those that the model takes without a dimension of rows.
    """
    found: Parts = {}
    for names, grid, token in (
        (_OF_IMAGES, "image_grid_thw", tokens.image),
        (_OF_VIDEOS, "video_grid_thw", tokens.video),
    ):
        if isinstance(batch.get(names[0]), Tensor):
            found |= _cut(batch, rows, names, batch.get(grid), token, tokens.merge)
    joined = frozenset(found)
    padded = batch.get("pixel_values")
    if isinstance(padded, Tensor) and padded.ndim == 5 and len(padded) == len(rows) and "pixel_values" not in found:
        found |= _without_black(batch, padded)
    return found, joined


def _cut(
    batch: Mapping[str, Any], rows: Sequence[Any], names: Sequence[str], grid: Any, token: int | None, merge: int
) -> Parts:
    """Cut the tensors of images, or those of videos."""
    pixels = batch[names[0]]
    patches = grid.long().prod(1) if isinstance(grid, Tensor) else None
    count = len(pixels) if patches is None else len(patches)
    given = {name: batch[name] for name in names if isinstance(batch.get(name), Tensor)}
    if patches is not None and int(patches.sum()) != len(pixels):
        return {}
    if patches is None and count == len(rows) and (pixels.ndim == 5 or _one_each(batch, rows, token)):
        return {}  # an entry for each row, with its image, or with its images in the second dimension
    counts = _images_per_row(batch, rows, names[0], count, patches, token, merge)
    if patches is None and all(one == 1 for one in counts):
        return {}
    found: Parts = {}
    for name, value in given.items():
        if patches is not None and name == names[0]:
            sizes = [int(part.sum()) for part in patches.split(counts)]
        elif len(value) == count:
            sizes = counts
        else:
            continue
        found[name] = list(value.split(sizes))
    return found


def _one_each(batch: Mapping[str, Any], rows: Sequence[Any], token: int | None) -> bool:
    """Tell whether as many images as rows are one for each, as far as texts and columns say."""
    columns = [_in_columns(row) for row in rows]
    if None not in columns:
        return all(one == 1 for one in columns)
    return token is None or bool((batch[_TOKENS] == token).any(1).all())


def _images_per_row(
    batch: Mapping[str, Any],
    rows: Sequence[Any],
    name: str,
    count: int,
    patches: Tensor | None,
    token: int | None,
    merge: int,
) -> list[int]:
    """Count the images of each row.

    Raises:
        ValueError: it cannot be told.
    """
    if len(rows) == 1:
        return [count]
    of_rows = None if token is None else (batch[_TOKENS] == token).sum(1).tolist()
    if of_rows is not None and patches is not None:
        counts = _walk((patches // merge**2).tolist(), of_rows)
        if counts is not None:
            return counts
    columns = [_in_columns(row) for row in rows]
    if name == _OF_IMAGES[0] and None not in columns and sum(one or 0 for one in columns) == count:
        return [one or 0 for one in columns]
    if of_rows is not None and patches is None and "image_sizes" not in batch:
        counts = _walk([sum(of_rows) / count] * count, of_rows)
        if counts is not None:
            return counts
    raise ValueError(
        f"The collator made `{name}` of {count} images from {len(rows)} rows, whose texts have "
        f"{of_rows if of_rows is not None else 'unknown'} tokens of images. Expected images that can be told apart by "
        "row. Keep a column `images` in the rows, or set `per_device_batch_size=1`."
    )


def _walk(each: Sequence[float], of_rows: Sequence[int]) -> list[int] | None:
    """Count the images of rows in their order by the tokens of each row's text; return `None` if they do not fit."""
    counts, image = [], 0
    for wanted in of_rows:
        start, seen = image, 0.0
        while image < len(each) and seen + each[image] <= wanted:
            seen += each[image]
            image += 1
        if seen != wanted:
            return None
        counts.append(image - start)
    return counts if image == len(each) else None


def _in_columns(row: Any) -> int | None:
    """Count the images in a row's own columns; `None` if it has none of these."""
    if not isinstance(row, Mapping):
        return None
    for name in _COLUMNS:
        if name in row:
            value = row[name]
            return 0 if value is None else len(value) if isinstance(value, list | tuple) else 1
    return None


def _without_black(batch: Mapping[str, Any], padded: Tensor) -> Parts:
    """Leave the images out that fill a row up: all zeros, as models recognize them."""
    black = (padded == 0).flatten(2).all(2)
    if not bool(black.any()):
        return {}
    kept = [int((~one).sum()) for one in black]
    mask = batch.get("pixel_attention_mask")
    found = {"pixel_values": [one[~dark] for one, dark in zip(padded, black, strict=True)]}
    if isinstance(mask, Tensor) and mask.shape[:2] == padded.shape[:2]:
        found["pixel_attention_mask"] = [one[:count] for one, count in zip(mask, kept, strict=True)]
    return found


def _signature(name: str, value: Tensor) -> Any:
    """Describe what has to be the same in all rows of a batch: sizes, and the grids by which models cut images."""
    if name.endswith("_thw"):
        return np.asarray(value).tobytes(), len(value)
    return tuple(value.shape)


def _batch_of(batch: Mapping[str, Any], parts: Parts, joined: frozenset[str], places: Sequence[int]) -> dict[str, Any]:
    """Make the batch of some rows, whose images have the same sizes."""
    size = len(batch[_TOKENS])
    chosen = torch.tensor(list(places))
    made: dict[str, Any] = {}
    stacked: list[str] = []
    for name, value in batch.items():
        if name in parts:
            own = torch.stack([parts[name][place] for place in places])
            if own.shape[1] > 0:
                made[name] = own
                stacked += [name] if name in joined else []
        elif isinstance(value, Tensor) and value.ndim > 0 and len(value) == size:
            made[name] = value[chosen]
        else:
            made[name] = value
    return {**made, STACKED: tuple(stacked)} if stacked else made


def image_sizes(dataset: Any, rows: Sequence[int]) -> dict[int, tuple[Any, ...]] | None:
    """Read the sizes of the images in each row, so that rows of equal ones can share a batch.

    Of encoded images, headers alone are read.

    Args:
        dataset: the rows.
        rows: row numbers.

    Returns:
        By row number, something that is equal for rows whose images have the same sizes; `None` where the rows have no
        column of images, or make them as they are read.
    """
    if isinstance(dataset, HFDataset):
        names = [name for name in _COLUMNS if name in dataset.column_names]
        if not names or dataset.format["type"] == "custom":
            return None
        kind = dataset.features[names[0]]
        if isinstance(kind, Image):
            dataset = dataset.cast_column(names[0], Image(decode=False))
        elif isinstance(getattr(kind, "feature", None), Image):
            dataset = dataset.cast_column(names[0], List(Image(decode=False)))
        values = dataset.with_format(None).select_columns(names[:1]).select(rows)[names[0]]
    else:
        first = dataset[rows[0]]
        names = [name for name in _COLUMNS if isinstance(first, Mapping) and name in first]
        if not names:
            return None
        values = (dataset[row][names[0]] for row in rows)
    return {row: _sizes(value) for row, value in zip(rows, values, strict=True)}


def _sizes(value: Any) -> tuple[Any, ...]:
    images = [] if value is None else value if isinstance(value, list | tuple) else [value]
    return tuple(_size(image) for image in images)


def _size(image: Any) -> tuple[Any, ...]:
    """Return height and width of an encoded image or of an image of PIL, or the shape of an array."""
    if isinstance(image, Mapping) and ("bytes" in image or "path" in image):
        content = image.get("bytes")
        source = BytesIO(content) if content is not None else image.get("path")
        if source is None or (isinstance(source, str) and not os.path.isfile(source)):
            return ()
        from PIL import Image as Pictures  # who has rows of encoded images has Pillow, and nobody else needs it

        with Pictures.open(source) as opened:
            return opened.size[::-1]
    if hasattr(image, "shape"):
        return tuple(image.shape)
    size = getattr(image, "size", None)
    return size[::-1] if isinstance(size, tuple) else ()
