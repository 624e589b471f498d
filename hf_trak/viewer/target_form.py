"""The form of a target: what a user types or uploads, and the row that becomes of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, Value

from hf_trak.data.columns import SOURCES, is_text
from hf_trak.report.content import EncodedImage
from hf_trak.report.images import bounded

MOST_BYTES = 10 << 20
"""Largest upload."""

MOST_CHARACTERS = 100_000
"""Longest typed text."""

TYPED_COLUMNS = (
    "text", "label", "messages", "prompt", "completion", "chosen", "rejected", "input_ids", "attention_mask",
    "token_type_ids", "labels",
)  # fmt: skip
"""Columns that a row typed as JSON may have where those of the training rows are not known."""

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")

Upload = Literal["image"]

_IMAGE_TASKS = ("image_classification", "iterative_image_classification")
_CLASSES = (*_IMAGE_TASKS, "text_classification")
_TEXT_TASKS = ("causal_lm", "masked_lm", "text_classification", "regression")
_LABELS = ("labels", "label")
_EXAMPLE = "a few words that stand for a target"
_MODEL_PIXELS = 4 << 20


@dataclass(frozen=True)
class TargetForm:
    """The fields of a target. A form without texts and upload takes one row as JSON.

    Attributes:
        texts (`tuple[str, ...]`):
            Columns of text, one field each.
        upload (`"image"`, *optional*):
            The kind of the file that is uploaded into `upload_column`.
        label (`str`, *optional*):
            Column of the label; a class if there are `label_names`, otherwise a number.
        label_names (`tuple[str, ...]`):
            Names of the classes, by their numbers.
        generates (`bool`):
            Whether the model can continue the text, so that its answer is attributed.
        columns (`tuple[str, ...]`):
            Columns that a row typed as JSON may have: those of the training rows.
    """

    texts: tuple[str, ...] = ()
    upload: Upload | None = None
    upload_column: str = ""
    label: str | None = None
    label_names: tuple[str, ...] = ()
    generates: bool = False
    columns: tuple[str, ...] = TYPED_COLUMNS

    @classmethod
    def find(
        cls, task: str, features: Features | None = None, class_names: Mapping[int, str] | None = None, **columns: Any
    ) -> "TargetForm":
        """Choose the fields for a task.

        Args:
            task (`str`):
                Name of the model output function.
            features (`datasets.Features`, *optional*):
                Columns of the training rows as stored. By default those that rows usually have.
            class_names (`Mapping[int, str]`, *optional*):
                Names of the classes in the configuration of the model.
            columns:
                `text_columns`, `image_column` and `label_column`, where they are not to be found by their types.
        """
        known = features or _usual(task)
        typed = cls(columns=tuple(features or TYPED_COLUMNS))
        label = columns.get("label_column") or next((name for name in _LABELS if name in known), None)
        named = tuple(columns.get("text_columns") or ())
        texts = named or _texts(known, label)
        names = _class_names(known.get(label or ""), class_names)
        if task in _IMAGE_TASKS:
            found = next((name for name in known if isinstance(known[name], Image)), "")
            column = columns.get("image_column") or found
            usable = column and label is not None and names and "pixel_values" not in known
            return cls((), "image", column, label, names) if usable else typed
        chats = "messages" in (named or known) or not all(is_text(known.get(name, Value("string"))) for name in named)
        chats = chats and task == "causal_lm"
        if task not in _TEXT_TASKS or not texts or chats:
            return replace(typed, generates=chats)
        if task in ("causal_lm", "masked_lm"):
            pair = ("prompt", "completion")
            kept = named or (pair if task == "causal_lm" and set(pair) <= set(known) else texts[:1])
            return cls(kept, generates=task == "causal_lm")
        return cls(texts[:2], label=label, label_names=names if task in _CLASSES else ())

    @property
    def as_json(self) -> bool:
        """Tell whether a row is typed as JSON."""
        return not self.texts and self.upload is None

    @property
    def predicts(self) -> bool:
        """Tell whether the label may be left to the model."""
        return bool(self.label_names)

    def example(self) -> Dataset:
        """Make a row with the columns and types of a target, from which the preparation of rows is chosen."""
        blank = _blank_image() if self.upload == "image" else None
        label = "0" if self.label_names else "0.0"
        return self._row({**dict.fromkeys(self.texts, _EXAMPLE), self.upload_column: blank}, label)

    def row(self, texts: Mapping[str, str], upload: bytes | None = None, label: str | None = None) -> Dataset:
        """Make the row of a target.

        Args:
            texts (`Mapping[str, str]`):
                The typed text of each field; `{"json": ...}` where the form takes JSON.
            upload (`bytes`, *optional*):
                Content of the uploaded file.
            label (`str`, *optional*):
                Name of the class, or a number. By default the first class, which a prediction then replaces.

        Returns:
            `datasets.Dataset`: one row.

        Raises:
            ValueError: nothing is typed or uploaded, something is too long, or it cannot be read.
        """
        fields = ("json",) if self.as_json else self.texts
        if unknown := [name for name in texts if name not in fields][:5]:
            raise ValueError(f"The target has the fields {unknown!r:.200}. Expected some of {list(fields)}.")
        for name, text in texts.items():
            if len(text) > MOST_CHARACTERS:
                raise ValueError(
                    f"The text in {name!r} has {len(text):,} characters. Expected at most {MOST_CHARACTERS:,}. "
                    "Shorten it."
                )
        if self.as_json:
            return _json_row(texts.get("json", ""), self.columns)
        if empty := [name for name in self.texts if not texts.get(name, "").strip()]:
            raise ValueError(f"Nothing is typed in {empty}. Expected a text to ask about. Type one.")
        values: dict[str, Any] = {name: texts[name] for name in self.texts}
        if self.upload is not None:
            values[self.upload_column] = _image(upload)
        if self.label_names:
            name = self.label_names[0] if label is None else label
            if name not in self.label_names:
                raise ValueError(
                    f"The label is {name!r:.80}. Expected one of {list(self.label_names)[:20]}. Choose one."
                )
            label = str(self.label_names.index(name))
        return self._row(values, label)

    def _row(self, values: Mapping[str, Any], label: str | None) -> Dataset:
        kinds: dict[str, Any] = {name: Value("string") for name in self.texts}
        row = dict(values)
        if self.upload is not None:
            kinds[self.upload_column] = Image()
        if self.label is not None:
            kinds[self.label] = ClassLabel(names=list(self.label_names)) if self.label_names else Value("float32")
            row[self.label] = int(label or 0) if self.label_names else _number(label)
        return Dataset.from_dict({name: [row[name]] for name in kinds}, features=Features(kinds))


def _blank_image() -> Any:
    """Make an image without content."""
    from PIL import Image as PILImage

    return PILImage.new("RGB", (8, 8))


def _usual(task: str) -> Features:
    """Return the columns that rows for a task usually have, for an index whose own are not known."""
    if task in _IMAGE_TASKS:
        return Features({"image": Image(), "label": Value("int64")})
    kind = "float32" if task == "regression" else "int64"
    labelled = {} if task in ("causal_lm", "masked_lm") else {"label": Value(kind)}
    return Features({"text": Value("string"), **labelled})


def _texts(features: Features, label: str | None) -> tuple[str, ...]:
    skipped = {*SOURCES, label, *_LABELS}
    return tuple(name for name, kind in features.items() if is_text(kind) and name not in skipped)


def _class_names(kind: Any, names: Mapping[int, str] | None) -> tuple[str, ...]:
    """Return the names of classes: those of the rows if they have some, and those of the model's configuration
    otherwise."""
    if isinstance(kind, ClassLabel):
        return tuple(kind.names)
    return tuple(str(name) for _, name in sorted((names or {}).items()))


def _number(label: str | None) -> float:
    try:
        return float(label or "")
    except ValueError as error:
        raise ValueError(f"The label is {label!r:.80}. Expected a number. Type one.") from error


def _json_row(text: str, columns: Sequence[str]) -> Dataset:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"The row cannot be read as JSON: {str(error)[:200]}. Expected an object with the columns of the training "
            'rows, such as {"prompt": "…", "completion": "…"}. Correct it.'
        ) from error
    if not isinstance(row, dict) or not row:
        raise ValueError(
            f"The row is a JSON {type(row).__name__}. Expected an object with the columns of the training rows. "
            "Correct it."
        )
    if unknown := [name for name in row if name not in columns]:
        raise ValueError(
            f"The row has {len(unknown):,} columns that the training rows lack, such as {unknown[0]!r:.80}. Expected "
            f"some of {list(columns)!r:.400}. Correct it."
        )
    try:
        return Dataset.from_list([row])
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"The values of the row do not form columns: {str(error)[:200]}. Expected values like those of the "
            "training rows. Correct it."
        ) from error


def check_numbers(row: Mapping[str, Any], model: Any) -> None:
    """Refuse numbers that no tokenizer gives, and that a model would look up outside of its tables.

    Args:
        row: a prepared row.
        model: the model.

    Raises:
        ValueError: tokens, labels, positions, types or masks are out of range.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(config, "vocab_size", None)
    limits = {
        "input_ids": words, "labels": words or getattr(config, "num_labels", None), "mask": 2,
        "position_ids": getattr(config, "max_position_embeddings", None),
        "token_type_ids": getattr(config, "type_vocab_size", None),
    }  # fmt: skip
    for name, value in row.items():
        kind = next((kind for kind in limits if name.endswith(kind)), None)
        numbers = np.asarray(value) if kind is not None else np.empty(0)
        if kind is None or numbers.dtype.kind not in "biu":
            continue
        wrong = (numbers < 0) & ~((numbers == -100) & (kind == "labels")) | (numbers >= (limits[kind] or np.inf))
        if wrong.any():
            raise ValueError(
                f"The row has {int(numbers[wrong][0])} in {name!r}. Expected numbers from 0 to "
                f"{(limits[kind] or 0) - 1}. Correct it."
            )


def _image(data: bytes | None) -> Any:
    """Decode an uploaded image within bounds; see [`~hf_trak.report.images.bounded`]."""
    if not data:
        raise ValueError("No image is uploaded. Expected a file to ask about. Choose one.")
    if len(data) > MOST_BYTES:
        raise ValueError(f"The file has {len(data):,} bytes. Expected at most {MOST_BYTES:,}. Choose a smaller one.")
    try:
        return bounded(EncodedImage(data, None, "RGB"), _MODEL_PIXELS)
    except ValueError as error:
        raise ValueError(
            f"The file cannot be read as an image: {error}. Expected {', '.join(IMAGES)}. Choose another one."
        ) from error
