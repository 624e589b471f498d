"""The metadata that defines the features of a `TRAKer`, and how it is compared with that of a directory."""

import logging
from collections.abc import Mapping
from typing import Any

from hf_trak.identity.function_identity import same_function
from hf_trak.store.atomic import differing
from hf_trak.store.store import Comparison, FeatureStore

logger = logging.getLogger(__name__)


class RunMetadata(dict[str, Any]):
    """The metadata that `TRAKer` gives to a saver.

    Attributes:
        in_format_1: the same metadata as directories of format 1 describe it.
    """

    def __init__(self, metadata: Mapping[str, Any], in_format_1: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        self.in_format_1 = dict(in_format_1)


IDENTITY_FORMAT = "identity_format"
"""Key in the metadata of an upgraded directory: the format in which the metadata describes the features."""


def defining(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata without the keys that do not define features."""
    others = (*FeatureStore.INFORMATIONAL, IDENTITY_FORMAT)
    return {key: value for key, value in metadata.items() if key not in others}


def changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Write a line for each key whose values differ. Functions with the same code are equal, whatever their names."""
    keys = [key for key in sorted(set(saved) & set(given)) if not comparison(key)(saved[key], given[key])]
    same = dict.fromkeys(keys)
    return differing({**saved, **same}, {**given, **same})


def comparison(key: str) -> Comparison:
    """Make the function that compares two values of a key."""

    def compare(saved: Any, given: Any) -> list[str]:
        same = same_function(saved, given)
        if same is None:
            logger.warning(
                "It is unknown whether `%s` has changed, because its code was compiled by another version of Python: "
                "saved %s, given %s.",
                key,
                saved,
                given,
            )
        return differing({key: saved}, {key: given}) if same is False else []

    return compare
