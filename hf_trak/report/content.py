"""Contents of a row that a report shows: image, texts, label and prediction, found in columns of any name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Audio, ClassLabel, Dataset, Image, Value

from hf_trak.report.stored_rows import StoredRows
from hf_trak.report.text import Span
from hf_trak.scores.scored_dataset import RERANK_COLUMNS, TOP_K_COLUMNS
from hf_trak.scores.spans import TOKEN_POSITIONS, TOKEN_SCORES

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
        image = image_column or next((name for name in features if isinstance(features[name], Image)), None)
        if image is None:
            image = next((name for name in _IMAGE_NAMES if _is_picture(first.get(name))), None)
        label = label_column or _label(first, features)
        prediction = next(
            (name for name in (f"{label}_predicted", *_PREDICTION_NAMES) if _is_scalar(first.get(name))), None
        )
        texts = tuple(text_columns) if text_columns is not None else _texts(first, features, {label, prediction})
        if label_names is None and isinstance(features.get(label), ClassLabel):
            label_names = features[label].names
        return cls(image, texts, label, prediction, None if label_names is None else tuple(label_names))


@dataclass(frozen=True)
class Content:
    """The contents of one row. Missing parts are `None` or empty."""

    image: Any = None
    texts: tuple[tuple[str, str], ...] = ()
    """Pairs of column and text."""
    label: str | None = None
    prediction: str | None = None
    spans: tuple[Span, ...] = field(default=())


def content_of(row: Any, columns: Columns) -> Content:
    """Read the contents of a row.

    Raises:
        ValueError: the columns with spans cannot be read.
    """
    row = as_row(row)
    image = row.get(columns.image) if columns.image else None
    texts = tuple((name, _as_text(row[name])) for name in columns.texts if row.get(name) is not None)
    return Content(
        image=image,
        texts=texts,
        label=_name(row.get(columns.label), columns) if columns.label else None,
        prediction=_name(row.get(columns.prediction), columns) if columns.prediction else None,
        spans=_spans(row),
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
        elif isinstance(value, str):
            named.setdefault("text", value)
    return named


def raw(dataset: Any) -> Any:
    """Remove the format or transform of a dataset: one set for training may turn images and texts into tensors."""
    return dataset.with_format(None) if isinstance(dataset, Dataset) else dataset


def _is_picture(value: Any) -> bool:
    if hasattr(value, "convert"):
        return True
    if isinstance(value, list):
        if not (value and isinstance(value[0], list)):
            return False
        try:
            value = np.asarray(value)
        except ValueError:  # rows of different lengths
            return False
    if not isinstance(value, np.ndarray | torch.Tensor) or min(value.shape, default=0) == 0:
        return False
    if value.ndim == 2:
        return min(value.shape) > 1
    return value.ndim == 3 and (value.shape[0] in (1, 3, 4) or value.shape[2] in (1, 3, 4))


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
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
            return "\n".join(f"{turn.get('role', '')}: {turn['content']}" for turn in value)
        return value if isinstance(value, str) else str(value)
    except RecursionError:
        return "(values nested too deeply to be shown)"


def _name(label: Any, columns: Columns) -> str | None:
    if label is None:
        return None
    if isinstance(label, torch.Tensor | np.ndarray | np.generic):
        label = label.item()
    names = columns.label_names
    if names is not None and isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    return f"{label:.4g}" if isinstance(label, float) else str(label)
