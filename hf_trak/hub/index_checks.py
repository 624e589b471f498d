"""Checks of an index before any of its tensors is fetched: its configuration, and the sizes of its files."""

from collections.abc import Mapping
from typing import Any

from hf_trak.errors import StoreError
from hf_trak.hub.files import IndexFiles
from hf_trak.hub.foreign_json import shown
from hf_trak.hub.manifest import MAX_JSON_BYTES, check_json_size, read_index_json, refused
from hf_trak.store.configuration import normalized
from hf_trak.store.sealed import check_seal
from hf_trak.store.shards import READABLE_VERSIONS
from hf_trak.store.store import FeatureStore
from hf_trak.version import __version__

_CONFIG_BYTES_PER_VALUE = 4
_MAX_FEATURES = 1 << 24
_MAX_PARAMETERS = 1 << 17
"""Maximum number of parameter tensors. A model of 10¹² weights in 23,000 separate experts has 70,000."""


def checked_config(files: IndexFiles) -> dict[str, Any]:
    """Read the configuration of an index, and check its size, version, checksum and values.

    Args:
        files: the files of the index.

    Raises:
        RefusedIndexError: it is not one that this version of hf_trak reads.
        HubAccessError: it cannot be fetched.
    """
    where = f"{FeatureStore.CONFIG_FILE} of {files.name}"
    check_json_size(where, files.size(FeatureStore.CONFIG_FILE))
    config = read_index_json(files.fetch(FeatureStore.CONFIG_FILE), where, MAX_JSON_BYTES, _CONFIG_BYTES_PER_VALUE)
    version = config.get("format_version")
    if version not in READABLE_VERSIONS or isinstance(version, bool):
        raise refused(
            where,
            f"it has format version {shown(version)}, and hf_trak {__version__} reads "
            f"{', '.join(map(str, READABLE_VERSIONS[:-1]))} and {READABLE_VERSIONS[-1]}",
        )
    try:
        check_seal(config, where)
    except StoreError as error:
        raise refused(where, "its content has another checksum than the one that it records") from error
    try:
        check_bounds(config)
        return normalized(config)
    except (TypeError, ValueError) as error:
        raise refused(where, str(error)) from error


def check_bounds(config: Mapping[str, Any]) -> None:
    """Refuse a configuration with more features or parameters than readers accept.

    Raises:
        ValueError: a number is larger.
    """
    features, parameters = config.get("proj_dim"), config.get("parameters")
    if isinstance(features, int) and features > _MAX_FEATURES:
        raise ValueError(f"`proj_dim` is {features}, more than {_MAX_FEATURES}")
    if isinstance(parameters, list) and len(parameters) > _MAX_PARAMETERS:
        raise ValueError(f"`parameters` has {len(parameters)} entries, more than {_MAX_PARAMETERS}")


def check_listing(files: IndexFiles, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse an index with missing files, or files of impossible sizes, before any of them is fetched.

    Args:
        files: the files of the index.
        sizes: by path of each file that the manifest implies, the minimum and maximum of its bytes.

    Raises:
        RefusedIndexError: a file is missing, or has another size.
    """
    names = files.names()
    if names is None:
        return  # opened from the cache, whose files are checked when they are read
    for path, (least, most) in sizes.items():
        if path not in names:
            raise refused(f"The index {files.name}", f"the file {path!r}, which its manifest implies, is missing")
        size = files.size(path)
        if size is None or not least <= size <= most:
            raise refused(f"{path!r} of {files.name}", f"it has {size} bytes, not {least} to {most}")
