"""Rows of a dataset as they are stored: an image is opened when it is shown, and not before its size is known."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from datasets import Audio, Dataset, Features, Image, LargeList, List, Video

_MEDIA = (Audio, Image, Video)


@dataclass(frozen=True)
class EncodedImage:
    """An image file, not yet decoded: its content, or where it is.

    Attributes:
        data: the file; `None` if it is at `path`.
        path: a file of this machine, or an address that `datasets` reads.
        mode: of pillow, to which the dataset converts it.
    """

    data: bytes | None
    path: str | None
    mode: str | None = None


class StoredRows:
    """A `datasets.Dataset` without transforms, and with [`EncodedImage`] for every image.

    Other media stay encoded, too. Every other column is as the dataset gives it, but for a value that cannot be
    decoded, such as JSON that is nested too deeply, which stays as it is stored.
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

    def _value(self, name: str, value: Any) -> Any:
        feature = self.features[name]
        if isinstance(feature, Image):
            if isinstance(value, Mapping):
                return EncodedImage(value.get("bytes"), value.get("path"), feature.mode)
            return value
        try:
            return self._decoded.decode_example({name: value})[name]
        except (LookupError, RecursionError, TypeError, ValueError):
            return value


def stored(rows: Any) -> Any:
    """The rows of a `datasets.Dataset` as [`StoredRows`]; any other rows as they are."""
    return StoredRows(rows) if isinstance(rows, Dataset) else rows


def _media_encoded(feature: Any) -> Any:
    """A feature whose images, sounds and videos stay encoded."""
    if isinstance(feature, dict):
        return {name: _media_encoded(inner) for name, inner in feature.items()}
    if isinstance(feature, LargeList):
        return LargeList(_media_encoded(feature.feature))
    if isinstance(feature, List):
        return List(_media_encoded(feature.feature), length=feature.length)
    return replace(feature, decode=False) if isinstance(feature, _MEDIA) else feature
