"""The configuration of a feature store: plain JSON, of which all but a few keys define the features.

A store is used again only with the configuration that it was made with. The hash of the defining keys is in the
identity of every file, so neither the set of those keys nor the form in which they are hashed can change.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_trak.codes.coded_rows import ALGORITHM as LEVELS
from hf_trak.codes.rotation import ALGORITHM as ROTATION
from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.kernels.philox import SEED_LIMIT
from hf_trak.store.atomic import differing, json_bytes
from hf_trak.store.checkpoint_records import checked_count
from hf_trak.store.sealed import read_sealed
from hf_trak.store.shards import CODES_VERSION, FORMAT_VERSION, READABLE_VERSIONS, ShardPlan

FEATURE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""Storage dtypes, by the name that `feature_dtype` gives them in the configuration."""

CODE_BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
"""Bits per number of codes, by the same name."""

MAX_SHARDS = 1 << 20
"""Largest number of shards of a store, which bounds the time to look at all of them."""

INFORMATIONAL = ("hf_trak_version", "model_name", "model_revision", "versions")
"""Keys that are saved for the reader, but neither compared nor hashed."""

REQUIRED = ("train_size", "proj_dim", "feature_dtype", "shard_size")
"""Keys that every configuration has."""

Comparison = Callable[[Any, Any], list[str]]
"""`(saved, given) -> lines`, one line for each difference that matters."""

_RESTORE = (
    "It is the configuration of the whole store: restore it from a copy, or featurize in another output directory."
)


def normalized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check a configuration, and return it as it is read back from its file, without the checksum.

    Args:
        config: plain JSON with the keys of [`REQUIRED`]. `format_version` is added unless it is there.

    Raises:
        ValueError: a key is missing, or a value is out of range or not plain JSON.
    """
    try:
        coded = config.get("feature_dtype") in CODE_BITS
        content = json.loads(json_bytes({"format_version": CODES_VERSION if coded else FORMAT_VERSION, **config}))
        content.pop("checksum", None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The configuration is not plain JSON: {error}.") from error
    missing = [key for key in REQUIRED if key not in content]
    if missing:
        raise ValueError(f"The configuration lacks {missing}. Expected at least {list(REQUIRED)}.")
    for key in ("train_size", "proj_dim", "shard_size"):
        checked_count(content[key], key)
    if content["feature_dtype"] not in (*FEATURE_DTYPES, *CODE_BITS):
        names = sorted([*FEATURE_DTYPES, *CODE_BITS])
        raise ValueError(f"`feature_dtype` is {content['feature_dtype']!r}. Expected one of {names}.")
    check_codes(content)
    shards = len(ShardPlan(content["train_size"], content["shard_size"]))
    if shards > MAX_SHARDS:
        raise ValueError(
            f"`train_size` {content['train_size']} in shards of {content['shard_size']} rows makes {shards} files. "
            f"Expected at most {MAX_SHARDS}. Choose a larger `shard_size`."
        )
    return content


def check_codes(content: Mapping[str, Any]) -> None:
    """Check what a configuration says about codes.

    Raises:
        ValueError: codes in a store of another format version, or of a rotation or levels that this version of
            hf_trak does not know, or without the seed of the rotation.
    """
    coded = content["feature_dtype"] in CODE_BITS
    if coded != (content["format_version"] == CODES_VERSION):
        raise ValueError(
            f"`feature_dtype` is {content['feature_dtype']!r} and `format_version` {content['format_version']!r}. "
            f"Expected format version {CODES_VERSION} for codes, and for nothing else."
        )
    if not coded:
        return
    for key, known in (("rotation", ROTATION), ("levels", LEVELS)):
        if content.get(key) != known:
            raise ValueError(f"`{key}` is {content.get(key)!r}. Expected {known!r}.")
    seed = content.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"`seed` is {seed!r}. Expected an integer in 0 … 2⁶³ − 1.")


def code_settings(feature_dtype: str) -> dict[str, str]:
    """Entries of a configuration that describe the codes of a storage dtype; none for floating-point numbers."""
    return {"rotation": ROTATION, "levels": LEVELS} if feature_dtype in CODE_BITS else {}


def read_config(path: Path) -> dict[str, Any]:
    """Read and check the configuration of a store.

    Args:
        path: its file, `trak_config.json`.

    Returns:
        See [`normalized`].

    Raises:
        IncompleteStoreError: there is no such file.
        StoreError: the file is damaged, or of another format version.
    """
    try:
        config = read_sealed(path, _RESTORE)
    except FileNotFoundError as error:
        raise IncompleteStoreError(
            f"{path.parent} holds no feature store: {path.name} is missing. Expected the output directory of a run. "
            "Featurize first."
        ) from error
    if config.get("format_version") not in READABLE_VERSIONS:
        raise StoreError(
            f"{path} has format version {config.get('format_version')!r}. Expected at most {READABLE_VERSIONS[-1]}, "
            "which is the newest that this version of hf_trak reads. Use the version of hf_trak that wrote it, or "
            "another output directory."
        )
    try:
        return normalized(config)
    except ValueError as error:
        raise StoreError(f"{path} is not a valid configuration: {error}") from error


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash the keys that define the features. 32 hex digits."""
    return hashlib.sha256(json_bytes(_defining(config))).hexdigest()[:32]


def config_changes(
    saved: Mapping[str, Any], given: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None
) -> list[str]:
    """List what differs between two configurations in the keys that define the features.

    Args:
        saved: the configuration of a store, see [`normalized`]. In format 1 keys that it lacks are not compared.
        given: another one, of which the format version is not compared.
        compare: see [`compared`].

    Returns:
        One line for each difference; empty if there is none.

    Raises:
        ValueError: see [`normalized`].
    """
    before, after = _defining(saved), _defining(normalized(given))
    if saved["format_version"] == 1:
        after = {key: value for key, value in after.items() if key in before}
    return compared(before, {**after, "format_version": before["format_version"]}, compare)


def compared(
    saved: Mapping[str, Any], given: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None
) -> list[str]:
    """List what differs between two JSON objects.

    Args:
        saved, given: the objects.
        compare: functions that compare the values of some keys, which need not be equal. They are called only where
            the values are not.

    Returns:
        One line for each key whose values differ, followed by the lines of `compare`.
    """
    rest = dict(given)
    lines: list[str] = []
    for key, comparison in (compare or {}).items():
        if key in saved and key in rest and saved[key] != rest[key]:
            lines += comparison(saved[key], rest[key])
            rest[key] = saved[key]
    return [*differing(saved, rest), *lines]


def _defining(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in INFORMATIONAL}
