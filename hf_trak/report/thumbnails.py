"""Images of a dataset as small pictures inside the page, each kept once however often it is shown."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hf_trak.report.pixels import as_pixels

SMALL = 64
"""Up to this side in pixels an image is kept as it is and shown pixel by pixel."""

_SIDES = {"large": 320, "small": 128}
_QUALITY = 80


@dataclass(frozen=True)
class Picture:
    """An image of the page: `uri` is a `data:` URL."""

    key: str
    uri: str
    width: int
    height: int
    pixelated: bool


class PictureBook:
    """All pictures of one page, by content."""

    def __init__(self) -> None:
        self._pictures: dict[tuple[str, str], Picture] = {}

    def __len__(self) -> int:
        return len(self._pictures)

    @property
    def pictures(self) -> list[Picture]:
        """In the order in which they were added."""
        return list({picture.key: picture for picture in self._pictures.values()}.values())

    def add(self, image: Any, size: str = "small") -> Picture:
        """Keep an image, unless an equal one is there.

        Args:
            image: a PIL image, or an array or tensor (H, W), (H, W, C) or (C, H, W).
            size: `"large"` for targets, `"small"` for training examples: at most 320 or 128 pixels a side.

        Raises:
            ValueError: the array has another shape.
            ImportError: pillow is not installed.
        """
        pixels = np.ascontiguousarray((as_pixels(image) * 255).round().astype(np.uint8))
        content = xxhash.xxh3_128(pixels.tobytes() + str(pixels.shape).encode()).hexdigest()
        found = self._pictures.get((content, size))
        if found is None:
            found = _encode(f"p{len(self._pictures)}", pixels, _SIDES[size])
            self._pictures[content, size] = found
            if found.pixelated:  # the same at every size
                self._pictures.update({(content, other): found for other in _SIDES})
        return found


def _encode(key: str, pixels: np.ndarray, side: int) -> Picture:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Images in a report need pillow. Install it with `pip install 'hf_trak[report]'`."
        ) from error
    picture = Image.fromarray(pixels)
    pixelated = max(picture.size) <= SMALL
    buffer = io.BytesIO()
    if pixelated:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.thumbnail((side, side))
        picture.save(buffer, "WEBP", quality=_QUALITY)
    kind = "png" if pixelated else "webp"
    uri = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return Picture(key, uri, picture.width, picture.height, pixelated)
