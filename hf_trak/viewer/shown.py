"""Rows as they are shown: texts cut and made visible, pictures as thumbnails, sounds as they are stored.

Nothing is escaped here; the template escapes everything.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_trak.errors import HfTrakError
from hf_trak.report.content import Content
from hf_trak.report.images import UnreadableImageError
from hf_trak.report.stored_rows import EncodedImage
from hf_trak.report.text import pieces, plain, visible
from hf_trak.report.thumbnails import Picture, PictureBook
from hf_trak.viewer.train_rows import TrainRows

LONGEST = 1200
"""Number of characters of a text that are shown."""

_LONGEST_LABEL = 60
_MOST_SOUND_BYTES = 4 << 20
_SOUNDS = {b"RIFF": "audio/wav", b"fLaC": "audio/flac", b"OggS": "audio/ogg", b"ID3": "audio/mpeg"}
_MP3_FRAMES = (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")


@dataclass(frozen=True)
class ShownText:
    """One text of a row, and how many characters of it are left out."""

    column: str
    text: str
    left_out: int


@dataclass(frozen=True)
class ShownRow:
    """A row. `unshown` says in words what of it cannot be shown."""

    number: int | None
    texts: tuple[ShownText, ...] = ()
    label: str | None = None
    prediction: str | None = None
    picture: Picture | None = None
    sound: str | None = None
    unshown: str | None = None
    alt: str = ""


class RowReader:
    """Prepares training rows and targets for one page, on which each picture occurs once.

    Attributes:
        book (`PictureBook`):
            The pictures of the page.
    """

    def __init__(self, rows: TrainRows, roots: Sequence[Path] = ()) -> None:
        """
        Args:
            rows: the training rows.
            roots: directories below which image files of rows may be read. Images in rows themselves need none.
        """
        self.rows = rows
        self.book = PictureBook()
        self._roots = [root.resolve() for root in roots]
        self._known: dict[int, ShownRow] = {}

    def row(self, number: int) -> ShownRow:
        """Prepare a training row. One that cannot be read is shown by its number and the reason."""
        if number not in self._known:
            try:
                content, sound = self.rows.content(number), self.rows.sound(number)
            except HfTrakError as error:
                return ShownRow(number, unshown=visible(f"row {number} cannot be read: {error}")[:300])
            self._known[number] = self.shown(content, number, "small", sound)
        return self._known[number]

    def shown(self, content: Content, number: int | None, size: str = "large", sound: Any = None) -> ShownRow:
        """Prepare the content of a row.

        Args:
            content: what is shown of it.
            number: its number; `None` for a target.
            size: of its picture, see [`~hf_trak.report.thumbnails.PictureBook`].
            sound: its sound as stored.
        """
        texts = tuple(_text(column, text) for column, text in content.texts)
        label, prediction = _label(content.label), _label(content.prediction)
        what = "Target" if number is None else f"Training row {number}"
        alt = what + (f", label {label}" if label is not None else "") + (f": {_line(texts)}" if texts else "")
        row = ShownRow(number, texts, label, prediction, alt=alt)
        if content.image is not None:
            row = self._with_picture(row, content.image, size)
        return row if sound is None else _with_sound(row, sound)

    def _with_picture(self, row: ShownRow, image: Any, size: str) -> ShownRow:
        if isinstance(image, EncodedImage) and image.data is None and not self._inside(image.path):
            return replace(row, unshown="the image is a file outside the dataset, which is not read")
        try:
            return replace(row, picture=self.book.add(image, size))
        except UnreadableImageError as error:
            return replace(row, unshown=visible(f"the image: {error}"))

    def _inside(self, path: str | None) -> bool:
        """Whether a path lies below one of the roots, all links followed."""
        if not path or "://" in path or "\0" in path:
            return False
        return any(Path(path).resolve().is_relative_to(root) for root in self._roots)


def _with_sound(row: ShownRow, sound: Any) -> ShownRow:
    """Put the sound of a row into it, if it is a file of a known kind, within the row, and not too long."""
    data = sound.get("bytes") if isinstance(sound, dict) else None
    if not isinstance(data, bytes):
        return replace(row, unshown="the sound is not in the row itself")
    kind = next((kind for start, kind in _SOUNDS.items() if data.startswith(start)), None)
    kind = kind or ("audio/mpeg" if data.startswith(_MP3_FRAMES) else None)
    if kind is None or len(data) > _MOST_SOUND_BYTES:
        return replace(row, unshown="the sound is of an unknown kind, or has more than 4 MB")
    return replace(row, sound=f"data:{kind};base64,{base64.b64encode(data).decode()}")


def _text(column: str, text: str) -> ShownText:
    cut, left_out = pieces(text, limit=LONGEST)
    return ShownText(visible(column[:_LONGEST_LABEL]), "".join(piece.text for piece in cut), left_out)


def _line(texts: Sequence[ShownText]) -> str:
    return plain(pieces(texts[0].text)[0])


def _label(label: str | None) -> str | None:
    if label is None:
        return None
    label = visible(label[: 2 * _LONGEST_LABEL])
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
