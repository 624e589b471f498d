"""Thumbnails of images, embedded in the page once however often they are shown."""

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hf_trak.report.images import bounded, pillow
from hf_trak.report.pixels import as_pixels, as_plain

if TYPE_CHECKING:
    from PIL import Image

SMALL = 64
"""Images of at most this many pixels a side are kept as they are and shown pixel by pixel."""

_SIDES = {"large": 320, "small": 128}  # pixels
_QUALITY = 80  # of WebP


@dataclass(frozen=True)
class Picture:
    """A thumbnail. `uri` is a `data:` URL; `width` and `height` are in pixels."""

    key: str
    uri: str
    width: int
    height: int
    pixelated: bool


class PictureBook:
    """Collects the pictures of one page, without duplicates."""

    def __init__(self) -> None:
        self._pictures: dict[tuple[str, str], Picture] = {}

    def __len__(self) -> int:
        return len(self._pictures)

    @property
    def pictures(self) -> list[Picture]:
        """The pictures in the order in which they were added."""
        return list({picture.key: picture for picture in self._pictures.values()}.values())

    def add(self, image: Any, size: str = "small") -> Picture:
        """Add an image, unless an equal one has been added.

        Args:
            image: an [`EncodedImage`], a PIL image, or an array or tensor (H, W), (H, W, C) or (C, H, W).
            size: `"large"` for targets (at most 320 pixels a side), `"small"` for training examples (128).

        Returns:
            The picture of the image.

        Raises:
            UnreadableImageError: the image cannot be decoded, or has too many pixels.
            ValueError: the array has another shape.
            ImportError: pillow is not installed.
        """
        small = _small(image, _SIDES[size])
        content = xxhash.xxh3_128(f"{small.mode} {small.size}".encode() + small.tobytes()).hexdigest()
        found = self._pictures.get((content, size))
        if found is None:
            found = _encode(f"p{len(self._pictures)}", small)
            self._pictures[content, size] = found
            if found.pixelated:  # the same at every size
                self._pictures.update({(content, other): found for other in _SIDES})
        return found


def _small(image: Any, side: int) -> "Image.Image":
    """Convert an image to 8 bits per colour and at most `side` pixels a side, unless it is shown pixel by pixel."""
    decoded = bounded(image)
    picture = as_plain(decoded) if hasattr(decoded, "convert") else None
    if picture is None or picture.mode not in ("L", "RGB", "RGBA"):
        picture = _in_bytes(decoded)
    picture = picture.copy()  # leave the image of the dataset unchanged
    picture.info = {}  # it may contain profiles and texts of any size, which would be written to the page
    if max(picture.size) > SMALL:
        picture.thumbnail((side, side))
    return picture


def _in_bytes(image: Any) -> "Image.Image":
    """Convert an image of any numbers to a picture of bytes."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        return pillow().fromarray(np.ascontiguousarray(image))
    return pillow().fromarray(np.ascontiguousarray((as_pixels(image) * 255).round().astype(np.uint8)))


def _encode(key: str, picture: "Image.Image") -> Picture:
    pixelated = max(picture.size) <= SMALL
    buffer = io.BytesIO()
    if pixelated:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.save(buffer, "WEBP", quality=_QUALITY)
    kind = "png" if pixelated else "webp"
    uri = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return Picture(key, uri, picture.width, picture.height, pixelated)
