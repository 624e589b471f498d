"""Decoding of images from any dataset within bounds, since a small file may expand to gigabytes or be no image."""

import errno
import io
import math
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_trak.report.pixels import as_array
from hf_trak.report.stored_rows import EncodedImage
from hf_trak.report.text import visible

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MOST_PIXELS = 64 << 20
"""Largest number of pixels that are decoded. Most formats take 4 bytes per pixel, progressive JPEG takes 7."""

_COSTLY = ("WEBP", "AVIF", "JPEG2000")
_MOST_COSTLY_PIXELS = 32 << 20  # their decoders take 9 to 19 bytes per pixel
_LONGEST_SIDE = 1 << 17  # each row of pixels takes memory and time of its own

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Formats of pillow that are read. Others start programs, or contain files of other formats and sizes."""

_KEPT_PIXELS = 16 << 20
_KEPT_NUMBERS = 2 << 20
_DRAFTED_SIDE = 2560
_MOST_BYTES = 1 << 30
_NUMERIC = ("I", "F")
_DAMAGED = (
    OSError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""Errors that decoders raise for damaged files."""


class UnreadableImageError(ValueError):
    """An image cannot be shown. The message is the reason, in a few words."""


def bounded(image: Any, most: int = _KEPT_PIXELS) -> Any:
    """Decode an image, and reduce it to at most `most` pixels by keeping pixels at equal distances.

    Args:
        image: an [`EncodedImage`], a PIL image, or an array, tensor or nested list (H, W), (H, W, C) or (C, H, W).
        most: number of pixels to keep; at most 2²¹ if pixels are no bytes.

    Returns:
        A PIL image, or an array (H, W), (H, W, 3) or (H, W, 4).

    Raises:
        UnreadableImageError: the file has more than `MOST_PIXELS` pixels, is damaged, or has an unsupported format.
        ValueError: an array has another shape.
        ImportError: pillow is not installed.
    """
    if isinstance(image, EncodedImage):
        with _reasons():
            return _of_file(image, most)
    if hasattr(image, "convert"):
        with _reasons():
            _check_size(image)
            image.load()
            return _fewer(image, most)
    array = as_array(image)
    most = most if array.dtype == np.uint8 else min(most, _KEPT_NUMBERS)
    step = _step(array.shape[0] * array.shape[1], most)
    return array[::step, ::step]


def pillow() -> Any:
    """Import `PIL.Image`.

    Raises:
        ImportError: pillow is not installed (extra `report`).
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Images in a report need pillow, which is not installed. Install it with `pip install 'hf_trak[report]'`."
        ) from error
    return Image


def _of_file(encoded: EncodedImage, most: int) -> "Picture":
    from PIL import ExifTags, Image, ImageOps

    source = io.BytesIO(encoded.data) if encoded.data is not None else _source(encoded.path)
    image: Picture = Image.open(source, formats=_formats())
    try:
        _check_size(image)
        image.draft(None, (_DRAFTED_SIDE, _DRAFTED_SIDE))  # lets JPEG decode fewer pixels of large images
        image.load()
        exif = image.getexif()
        picture = _fewer(image, most)
        if ExifTags.Base.Orientation in exif:  # as `datasets` does, turn the image as the camera was held
            picture.info["exif"] = exif.tobytes()
            picture = ImageOps.exif_transpose(picture)
    finally:
        if file := getattr(image, "fp", None):
            file.close()
    if encoded.mode is not None and encoded.mode != picture.mode:
        picture = picture.convert(encoded.mode)
    return picture


def _source(path: str | None) -> Any:
    if path is None:
        raise UnreadableImageError("the row has neither its content nor its path")
    if "://" not in path and "::" not in path:
        if not Path(path).is_file():  # a pipe would block
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return Path(path)
    from datasets.utils.file_utils import xopen

    with xopen(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UnreadableImageError(f"the file has more than {_MOST_BYTES >> 20} MiB")
    return io.BytesIO(data)


def _check_size(image: "Picture") -> None:
    """Refuse an image whose decoding would take too much memory. Images that are decoded already are no exception.

    Raises:
        UnreadableImageError: the image has too many pixels.
    """
    most = _MOST_COSTLY_PIXELS if getattr(image, "format", None) in _COSTLY else MOST_PIXELS
    if image.width * image.height > most or max(image.size) > _LONGEST_SIDE:
        raise UnreadableImageError(
            f"it has {image.width:,} × {image.height:,} pixels; up to {most / 1e6:.0f} million are decoded, and up to "
            f"{_LONGEST_SIDE:,} on a side"
        )


def _fewer(image: "Picture", most: int) -> "Picture":
    from PIL import Image

    most = min(most, _KEPT_NUMBERS) if image.mode.startswith(_NUMERIC) else most
    step = _step(image.width * image.height, most)
    if step == 1:
        return image
    size = (math.ceil(image.width / step), math.ceil(image.height / step))
    return image.resize(size, Image.Resampling.NEAREST)


def _step(pixels: int, most: int) -> int:
    return max(1, math.ceil(math.sqrt(pixels / most)))


@cache
def _formats() -> tuple[str, ...]:
    """List the `FORMATS` that the installed pillow supports."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def _reasons() -> Iterator[None]:
    """Turn the errors of decoders into the reason why an image is not shown."""
    pillow()
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images, for which the bound here is lower, and damaged files
            yield
    except UnreadableImageError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImageError(f"it is no file of the formats {', '.join(_formats())}") from error
    except FileNotFoundError as error:
        raise UnreadableImageError(f"its file {visible(str(error.filename))[-80:]} does not exist") from error
    except Image.DecompressionBombError as error:
        raise UnreadableImageError(f"its file would grow too large: {visible(str(error))[:120]}") from error
    except _DAMAGED as error:
        reason = visible(f"{type(error).__name__}: {str(error)[:120]}")
        raise UnreadableImageError(f"its file cannot be decoded ({reason})") from error
