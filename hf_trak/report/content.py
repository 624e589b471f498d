"""Contents of a row that a report shows: image, sound, texts, label and prediction, found in columns of any name."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from datasets import Audio, ClassLabel, Dataset, Features, Image, LargeList, List, Value, Video

from hf_trak.data.columns import PREDICTED
from hf_trak.scores.scored_dataset import RERANK_COLUMNS, TOKEN_POSITIONS, TOKEN_SCORES, TOP_K_COLUMNS

_MEDIA = (Audio, Image, Video)


@dataclass(frozen=True)
class EncodedImage:
    """An image file that has not been decoded.

    Attributes:
        data: the content of the file, or `None` if it has to be read from `path`.
        path: a local file, or an address that `datasets` reads.
        mode: the mode of pillow that the dataset converts the image to.
    """

    data: bytes | None
    path: str | None
    mode: str | None = None


class StoredRows:
    """Rows of a `datasets.Dataset` without its transform, and with an [`EncodedImage`] for every image.

    Other media stay encoded, too. Other columns are decoded as usual, except for values that cannot be decoded, such
    as JSON that is nested too deeply, which are returned as stored.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.features = dataset.features
        self._rows = dataset.with_format("arrow")
        self._decoded = Features({name: _media_encoded(feature) for name, feature in self.features.items()})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        stored = {name: values[0] for name, values in self._rows[index].to_pydict().items()}
        return {name: self._value(name, value) for name, value in stored.items()}

    def column(self, name: str) -> list[Any]:
        """Return the values of a column as they are stored."""
        return self._rows.select_columns([name])[:][name].to_pylist()

    def _value(self, name: str, value: Any) -> Any:
        feature = self.features[name]
        kind = feature.feature if isinstance(feature, List | LargeList) else feature
        if isinstance(kind, Image):
            images = [
                EncodedImage(one.get("bytes"), one.get("path"), kind.mode) if isinstance(one, Mapping) else one
                for one in (value if isinstance(value, list) else [value])
            ]
            return images if isinstance(value, list) else images[0]
        try:
            return self._decoded.decode_example({name: value})[name]
        except (LookupError, RecursionError, TypeError, ValueError):
            return value


def stored(rows: Any) -> Any:
    """Wrap a `datasets.Dataset` as [`StoredRows`]. Any other rows are returned unchanged."""
    return StoredRows(rows) if isinstance(rows, Dataset) else rows


def _media_encoded(feature: Any) -> Any:
    """Change a feature so that its images, sounds and videos stay encoded."""
    if isinstance(feature, dict):
        return {name: _media_encoded(inner) for name, inner in feature.items()}
    if isinstance(feature, LargeList):
        return LargeList(_media_encoded(feature.feature))
    if isinstance(feature, List):
        return List(_media_encoded(feature.feature), length=feature.length)
    return replace(feature, decode=False) if isinstance(feature, _MEDIA) else feature


LONGEST_TEXT = 1200

"""Number of characters of a text that are shown."""


_CONTEXT = 400  # characters shown before the marked span of a long text

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class Span:
    """Characters `start … stop - 1` of a text, and the part of the score that they account for."""

    start: int
    stop: int
    score: float


@dataclass(frozen=True)
class Piece:
    """A part of a text, marked or not."""

    text: str
    marked: bool = False


def visible(text: str) -> str:
    """Write out control characters, lone surrogates and noncharacters of a text, for example U+0000 as `\\x00`.

    Newlines and tabs stay. Escaping is left to the template.
    """
    return _CONTROL.sub(_written_out, text.replace("\r\n", "\n").replace("\r", "\n"))


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def pieces(text: str, spans: Iterable[Span] = (), limit: int = LONGEST_TEXT) -> tuple[list[Piece], int]:
    """Cut a text to `limit` characters, and mark the span of the highest score.

    Args:
        text: the text, as stored in the dataset.
        spans: a breakdown of its score. A long text is cut around the marked span.
        limit: number of characters to keep.

    Returns:
        The parts in order, and the number of characters that were left out.
    """
    if not (inside := [span for span in spans if 0 <= span.start < span.stop <= len(text)]):
        return [Piece(visible(text[:limit]))], max(0, len(text) - limit)
    best = max(inside, key=lambda span: span.score)
    start, stop = best.start, best.stop
    first = 0 if stop <= limit else max(0, start - _CONTEXT)
    last = min(len(text), first + limit)
    stop = min(stop, last)
    cut = [Piece(visible(text[first:start])), Piece(visible(text[start:stop]), True), Piece(visible(text[stop:last]))]
    if first:
        cut.insert(0, Piece("…"))
    return [piece for piece in cut if piece.text], len(text) - (last - first)


def plain(parts: Sequence[Piece], limit: int = 80) -> str:
    """Shorten a text to one line of at most `limit` characters, for the description of a picture."""
    line = " ".join("".join(part.text for part in parts).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


SPANS_COLUMN = "trak_spans"

"""Optional column of targets that breaks the score down over the text: a list of `{"start", "stop", "score"}` with
character positions in the first text shown. Without it, the columns of `attribute_tokens` are used if the rows have
the column `offset_mapping`; the scores of a token are then summed over the training rows in `trak_indices`."""


_OFFSETS = "offset_mapping"


_IMAGE_NAMES = ("image", "img", "pixel_values", "images")

_LABEL_NAMES = ("label", "labels", "fine_label", "target", "class")

_NOT_CONTENT = ("id", "idx", "index", "uuid", "guid", "url", "path", "file", "file_name", "filename", "split")

_PREDICTION_NAMES = ("prediction", "predicted", "predicted_label")

_MOST_TEXTS = 6


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are shown, by what they are shown as."""

    image: str | None = None
    texts: tuple[str, ...] = ()
    label: str | None = None
    prediction: str | None = None
    label_names: tuple[str, ...] | None = None
    sound: str | None = None

    @classmethod
    def find(
        cls,
        dataset: Any,
        *,
        image_column: str | None = None,
        text_columns: Sequence[str] | None = None,
        label_column: str | None = None,
        label_names: Sequence[str] | None = None,
    ) -> "Columns":
        """Choose columns by the features and the first row of a dataset.

        Args:
            dataset: a map-style dataset.
            image_column: name of the image column. Here and below, `None` means that it is chosen.
            text_columns: names of the text columns.
            label_column: name of the label column.
            label_names: names of integer labels.

        Raises:
            ValueError: a given column does not exist.
        """
        if len(dataset) == 0:
            return cls()
        first = as_row(dataset[0])
        features = dict(dataset.features) if isinstance(dataset, Dataset | StoredRows) else {}
        given = [*(text_columns or ()), *(name for name in (image_column, label_column) if name)]
        if missing := [name for name in given if name not in first]:
            raise ValueError(
                f"There is no column {missing} among {list(first)}. Expected columns that exist. Correct "
                "`image_column`, `text_columns` and `label_column`, or leave them out."
            )
        image = image_column or next((name for name in features if _holds_images(features[name])), None)
        if image is None:
            image = next((name for name in _IMAGE_NAMES if _is_picture(first.get(name))), None)
        label = label_column or _label(first, features)
        prediction = next(
            (name for name in (f"{label}_predicted", *_PREDICTION_NAMES) if _is_scalar(first.get(name))), None
        )
        if label_names is None and isinstance(features.get(label), ClassLabel):
            label_names = features[label].names
        if prediction == PREDICTED and label is not None and _says_the_same(dataset, label, label_names):
            prediction = None  # the labels are those that `predict` found, and none of them is right or wrong
        texts = tuple(text_columns) if text_columns is not None else _texts(first, features, {label, prediction})
        sound = next(
            (name for name in first if is_samples(first[name]) or isinstance(features.get(name), Audio)), None
        )
        return cls(image, texts, label, prediction, None if label_names is None else tuple(label_names), sound)


def _says_the_same(dataset: Any, label: str, names: Sequence[str] | None) -> bool:
    """Tell whether the predictions of all rows name their labels, or labels without names, which nothing compares."""
    rows = stored(dataset)
    if not isinstance(rows, StoredRows):
        return False

    def same(value: Any, said: str) -> bool:
        own = [str(value), f"LABEL_{value}"]
        if names is not None and isinstance(value, int) and 0 <= value < len(names):
            own.append(names[value])
        return said in own or (names is None and isinstance(value, int) and not said.isdigit())

    return all(map(same, rows.column(label), map(str, rows.column(PREDICTED))))


@dataclass(frozen=True)
class Content:
    """The contents of one row. Missing parts are `None` or empty."""

    image: Any = None
    """The first one of several."""
    texts: tuple[tuple[str, str], ...] = ()
    """Pairs of column and text."""
    label: str | None = None
    prediction: str | None = None
    spans: tuple[Span, ...] = field(default=())
    sound: Any = None
    """As [`~hf_trak.report.sounds.as_uri`] takes it."""


def content_of(row: Any, columns: Columns) -> Content:
    """Read the contents of a row.

    Raises:
        ValueError: the columns with spans cannot be read.
    """
    row = as_row(row)
    image = row.get(columns.image) if columns.image else None
    if isinstance(image, list) and (not image or _is_image(image[0])):
        image = image[0] if image else None
    texts = tuple((name, _as_text(row[name])) for name in columns.texts if row.get(name) is not None)
    return Content(
        image=image,
        texts=texts,
        label=_name(row.get(columns.label), columns) if columns.label else None,
        prediction=_name(row.get(columns.prediction), columns) if columns.prediction else None,
        spans=_spans(row),
        sound=row.get(columns.sound) if columns.sound else None,
    )


def _spans(row: Mapping[str, Any]) -> tuple[Span, ...]:
    """Read the breakdown of the score from `trak_spans`, or else from the columns of `attribute_tokens`."""
    given = row.get(SPANS_COLUMN) is not None
    if not given and any(row.get(name) is None for name in (_OFFSETS, TOKEN_POSITIONS, TOKEN_SCORES)):
        return ()
    try:
        if given:
            return tuple(Span(int(s["start"]), int(s["stop"]), float(s["score"])) for s in row[SPANS_COLUMN])
        totals = np.asarray(row[TOKEN_SCORES], dtype=np.float64).sum(axis=0)
        places = [row[_OFFSETS][position] for position in row[TOKEN_POSITIONS]]
        return tuple(Span(int(a), int(b), float(total)) for (a, b), total in zip(places, totals, strict=True))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        names = [SPANS_COLUMN] if given else [_OFFSETS, TOKEN_POSITIONS, TOKEN_SCORES]
        raise ValueError(
            f"The columns {names} of a row cannot be read: {error}. Expected spans with `start`, `stop` and `score`, "
            "or one offset and one score per token position. Correct these columns, or remove them."
        ) from error


def as_row(row: Any) -> Mapping[str, Any]:
    """Convert a row to a mapping. In a tuple, as datasets of `torch.utils.data` return, the first picture becomes
    `image` and the first scalar `label`.
    """
    if isinstance(row, Mapping):
        return row
    named: dict[str, Any] = {}
    for value in row if isinstance(row, tuple | list) else (row,):
        if _is_picture(value):
            named.setdefault("image", value)
        elif _is_scalar(value):
            named.setdefault("label", value)
    return named


def raw(dataset: Any) -> Any:
    """Remove the format or transform of a dataset: one set for training may turn images and texts into tensors."""
    return dataset.with_format(None) if isinstance(dataset, Dataset) else dataset


def _holds_images(feature: Any) -> bool:
    return isinstance(feature.feature if isinstance(feature, List | LargeList) else feature, Image)


def _is_image(value: Any) -> bool:
    return isinstance(value, EncodedImage) or hasattr(value, "convert")


def _is_picture(value: Any) -> bool:
    if _is_image(value):
        return True
    if isinstance(value, list):
        if value and _is_image(value[0]):
            return True
        if not (value and isinstance(value[0], list)):
            return False
        try:
            value = np.asarray(value)
        except ValueError:  # rows of different lengths
            return False
    if not (is_tensor(value) or isinstance(value, np.ndarray)) or min(value.shape, default=0) == 0:
        return False
    if value.ndim == 2:
        return min(value.shape) > 1
    return value.ndim == 3 and (value.shape[0] in (1, 3, 4) or value.shape[2] in (1, 3, 4))


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor. Whoever has one has imported torch, which takes seconds."""
    return (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor)


def is_samples(value: Any) -> bool:
    """Tell whether a value is a sound as numbers: a mapping with `array` and `sampling_rate`."""
    return isinstance(value, Mapping) and value.get("array") is not None and value.get("sampling_rate") is not None


def _is_scalar(value: Any) -> bool:
    if is_tensor(value) or isinstance(value, np.ndarray):
        return value.ndim == 0
    return isinstance(value, str | int | float | np.generic)


def _label(first: Mapping[str, Any], features: Mapping[str, Any]) -> str | None:
    named = [name for name in _LABEL_NAMES if _is_scalar(first.get(name))]
    classes = [name for name in features if isinstance(features[name], ClassLabel) and not name.endswith("_predicted")]
    return next(iter([*named, *classes]), None)


def _texts(first: Mapping[str, Any], features: Mapping[str, Any], others: set[str | None]) -> tuple[str, ...]:
    taken = {*others, *_NOT_CONTENT, *TOP_K_COLUMNS, *RERANK_COLUMNS, SPANS_COLUMN}
    found = []
    for name, value in first.items():
        kind = features.get(name)
        if name in taken or isinstance(kind, Audio | Image):
            continue
        is_text = isinstance(value, str) or (isinstance(kind, Value) and kind.dtype in ("string", "large_string"))
        if is_text or _is_chat(value):
            found.append(name)
    return tuple(found[:_MOST_TEXTS])


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "content" in m for m in value)


def _as_text(value: Any) -> str:
    try:
        if _is_chat(value):
            return "\n".join(f"{turn.get('role', '')}: {_said(turn['content'])}" for turn in value)
        return value if isinstance(value, str) else str(value)
    except RecursionError:
        return "(values nested too deeply to be shown)"


def _said(content: Any) -> Any:
    """Join the texts of a turn that consists of parts, such as images and texts."""
    if not (isinstance(content, list) and all(isinstance(part, Mapping) for part in content)):
        return content
    return " ".join(part["text"] for part in content if isinstance(part.get("text"), str))


def _name(label: Any, columns: Columns) -> str | None:
    if label is None:
        return None
    if is_tensor(label) or isinstance(label, np.ndarray | np.generic):
        label = label.item()
    names = columns.label_names
    if names is not None and isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    return f"{label:.4g}" if isinstance(label, float) else str(label)
