"""Decoding of images from any dataset within bounds, since a small file may expand to gigabytes or be no image."""

import base64
import errno
import io
import math
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hf_trak.report.content import EncodedImage, is_tensor, visible
from hf_trak.runtime.checks import required

if TYPE_CHECKING:
    from PIL import Image
    from PIL.Image import Image as Picture


def as_array(image: Any) -> np.ndarray:
    """Convert an array, tensor or nested list to an array with channels last.

    Args:
        image: numbers of shape (H, W), (H, W, C) or (C, H, W) with C one of 1, 3, 4.

    Returns:
        An array (H, W), (H, W, 3) or (H, W, 4).

    Raises:
        ValueError: the image has another shape.
    """
    if is_tensor(image):
        image = image.detach().cpu()
        image = image.float() if image.dtype.itemsize == 2 else image  # NumPy has no bfloat16
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
    array = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(array.min()), float(array.max())
    return array if low >= 0.0 and high <= 1.0 else (array - low) / ((high - low) or 1.0)


def as_plain(image: Any) -> Any:
    """Convert a PIL image with a palette or another colour space to grey, RGB or RGBA. Others pass as they are."""
    transparent = "transparency" in image.info
    if image.mode in ("L", "I", "I;16", "F", "RGBA") or (image.mode == "RGB" and not transparent):
        return image
    return image.convert("L" if image.mode == "1" else "RGBA" if transparent else "RGB")


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
    OSError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, SyntaxError, TypeError,
    ValueError, struct.error, zlib.error,
)  # fmt: skip

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
        ImportError: pillow is not installed.
    """
    message = "Images in a report need pillow, which is not installed. Install it with `pip install pillow`."
    return required("PIL.Image", message)


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


SMALL = 64

"""Images of at most this many pixels a side are kept as they are and shown pixel by pixel."""


_SIDES = {"large": 320, "small": 128}  # pixels

_QUALITY = 80  # of WebP


@dataclass(frozen=True)
class Thumbnail:
    """A thumbnail. `uri` is a `data:` URL; `width` and `height` are in pixels."""

    key: str
    uri: str
    width: int
    height: int
    pixelated: bool


class PictureBook:
    """Collects the pictures of one page, without duplicates."""

    def __init__(self) -> None:
        self._pictures: dict[tuple[str, str], Thumbnail] = {}

    def __len__(self) -> int:
        return len(self._pictures)

    @property
    def pictures(self) -> list[Thumbnail]:
        """Return the pictures in the order in which they were added."""
        return list({picture.key: picture for picture in self._pictures.values()}.values())

    def add(self, image: Any, size: str = "small") -> Thumbnail:
        """Add an image, unless an equal one has been added.

        Args:
            image: an [`EncodedImage`], a PIL image, or an array or tensor (H, W), (H, W, C) or (C, H, W).
            size: `"large"` for targets (at most 320 pixels a side), `"small"` for training rows (128).

        Returns:
            The picture of the image.

        Raises:
            UnreadableImageError: the image cannot be decoded, or has too many pixels.
            ValueError: the array has another shape.
            ImportError: pillow is not installed.
        """
        small = _small(image, _SIDES[size])
        content = xxhash.xxh3_128(f"{small.mode} {small.size}".encode() + small.tobytes()).hexdigest()
        if (found := self._pictures.get((content, size))) is None:
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


def _encode(key: str, picture: "Image.Image") -> Thumbnail:
    pixelated = max(picture.size) <= SMALL
    buffer = io.BytesIO()
    kind, options = ("png", {"optimize": True}) if pixelated else ("webp", {"quality": _QUALITY})
    picture.save(buffer, kind, **options)
    uri = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return Thumbnail(key, uri, picture.width, picture.height, pixelated)
