"""Rows of a dataset with encoded images, so that an image is decoded only when it is shown and its size is known."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from datasets import Audio, Dataset, Features, Image, LargeList, List, Video

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
