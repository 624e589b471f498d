"""The files of the curvatures of an index: checked before they are published, and before a published one is used."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_trak.config import TrakConfig
from hf_trak.curvature.files import CURVATURE_FILE
from hf_trak.errors import StoreError
from hf_trak.featurize.curvature_settings import DEFAULT_ROWS
from hf_trak.hub.curvature_record import (
    CurvatureRecord,
    checked_record,
    is_known,
    max_header,
    read_content,
    tensor_bytes,
)
from hf_trak.hub.files import IndexFiles, LocalFiles
from hf_trak.hub.index_files import check_file, reason_of, refused_if_damaged
from hf_trak.hub.manifest import MAX_JSON_BYTES
from hf_trak.hub.published import PublishedCurvature
from hf_trak.store.sealed import content_digest
from hf_trak.store.shards import TensorSpec, read_header, read_tensors
from hf_trak.store.store import FeatureStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredCurvature:
    """A complete curvature of a store, to be published.

    Attributes:
        record: its record.
        checksums: the checksums of its files.
        paths: its files by name.
    """

    record: CurvatureRecord
    checksums: PublishedCurvature
    paths: Mapping[str, Path]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.paths.values())


def curvature_folder(model_id: int) -> str:
    """Return the directory of a checkpoint's curvature in an index."""
    return f"curvature/{model_id}"


def stored_curvature(store: FeatureStore, model_id: int) -> StoredCurvature | None:
    """Read and check the curvature of a checkpoint before it is published.

    Args:
        store: the store.
        model_id: the checkpoint.

    Returns:
        The curvature; `None` if there is none, or only one that is not finished or of another version of hf_trak.

    Raises:
        StoreError: it is damaged, or larger than readers accept.
    """
    directory = store.checkpoint_dir(model_id).parent / curvature_folder(model_id)
    path = directory / CURVATURE_FILE
    if not path.exists():
        if (directory / "progress").exists():
            logger.warning("The curvature of checkpoint %d is not finished, and is not published.", model_id)
        return None
    try:
        content = read_content(path, store, model_id)
        if not is_known(content["identity"]):
            logger.warning("%s was fitted by another version of hf_trak, and is not published.", path)
            return None
        record = checked_record(content, store)
        checksums = {}
        for name, specs in record.tensors.items():
            path = directory / name
            checksums[name] = checked_tensors(path, record, specs)
    except StoreError as error:
        raise StoreError(
            f"{path} cannot be published: {reason_of(error)}. Expected a curvature as hf_trak fits it. Delete "
            f"{directory} and fit it again, or publish the index without it (`curvature=False`)."
        ) from error
    diagonal = checksums.pop("diagonal.safetensors", None)
    published = PublishedCurvature(record.checksum, tuple(checksums.values()), diagonal)
    return StoredCurvature(record, published, {name: directory / name for name in (CURVATURE_FILE, *record.tensors)})


def settings_left_open(settings: Mapping[str, Any], record: CurvatureRecord, n: int) -> dict[str, Any]:
    """Fill in settings that were left at their defaults, where a curvature was fitted with others.

    Whoever loads the index with these settings can then use the curvature.

    Args:
        settings: fields of `TrakConfig`.
        record: the record of the curvature.
        n: number of training rows.

    Returns:
        Some of `curvature`, `curvature_labels` and `curvature_rows`.
    """
    identity, defaults = record.identity, TrakConfig().to_dict()
    fitted = {
        "curvature": identity["kind"],
        "curvature_labels": identity["labels"],
        "curvature_rows": identity["rows"],
    }
    by_default = {"curvature": "ekfac", "curvature_labels": "sampled", "curvature_rows": min(n, DEFAULT_ROWS)}
    return {
        name: value for name, value in fitted.items() if settings[name] == defaults[name] and value != by_default[name]
    }


def fetch_content(
    files: IndexFiles, store: FeatureStore, model_id: int, published: PublishedCurvature
) -> dict[str, Any]:
    """Fetch and check the record of a published curvature, as [`~hf_trak.hub.curvature_record.read_content`] does.

    Raises:
        HubAccessError: it cannot be fetched.
        IncompleteStoreError: it is missing in a copy.
        RefusedIndexError: it is missing in the repo, damaged, or not that of the manifest.
    """
    path = f"{curvature_folder(model_id)}/{CURVATURE_FILE}"
    with refused_if_damaged(files, path):
        content = read_content(_fetched(files, path, (2, MAX_JSON_BYTES)), store, model_id)
        if content["checksum"] != published.record:
            raise StoreError(f"its checksum is {content['checksum']}, the manifest says {published.record}")
    return content


def fetch_tensors(
    files: IndexFiles, store: FeatureStore, model_id: int, published: PublishedCurvature, content: Mapping[str, Any]
) -> list[str]:
    """Fetch and check all other files of a published curvature.

    Args:
        files: the files of the index.
        store: the index.
        model_id: the checkpoint.
        published: the checksums in the manifest.
        content: the result of [`fetch_content`].

    Returns:
        The paths of all files in the index, that of the record last.

    Raises:
        HubAccessError: a file cannot be fetched.
        IncompleteStoreError: a file is missing in a copy.
        RefusedIndexError: a file is missing in the repo or damaged, or not that of record and manifest.
    """
    folder = curvature_folder(model_id)
    with refused_if_damaged(files, f"{folder}/{CURVATURE_FILE}"):
        record = checked_record(content, store)
        expected = dict(zip(record.tensors, _listed(record, published), strict=True))
    for name, specs in record.tensors.items():
        path = f"{folder}/{name}"
        with refused_if_damaged(files, path):
            found = checked_tensors(_fetched(files, path, tensor_bytes(specs)), record, specs)
            if found != expected[name]:
                raise StoreError(f"its checksum is {found}, the manifest says {expected[name]}")
    return [*(f"{folder}/{name}" for name in record.tensors), f"{folder}/{CURVATURE_FILE}"]


def fetch_known(files: IndexFiles, store: FeatureStore, model_id: int, published: PublishedCurvature) -> list[str]:
    """Fetch and check all files of a published curvature, unless it is of another version of hf_trak.

    Returns and raises as [`fetch_tensors`]; an empty list for one of another version.
    """
    content = fetch_content(files, store, model_id, published)
    if is_known(content["identity"]):
        return fetch_tensors(files, store, model_id, published, content)
    logger.warning(
        "The curvature of checkpoint %d in %s is of another version of hf_trak, and is left out.", model_id, files.name
    )
    return []


def _listed(record: CurvatureRecord, published: PublishedCurvature) -> list[str]:
    """Return the checksums in the manifest, in the order of the record's files."""
    blocks = record.blocks
    if len(published.blocks) != len(blocks.kronecker) or (published.diagonal is None) != (not blocks.diagonal):
        raise StoreError(
            f"it has {len(blocks.kronecker)} blocks with bases and {len(blocks.diagonal)} others, and the manifest "
            "lists other files"
        )
    return [*published.blocks, *([] if published.diagonal is None else [published.diagonal])]


def _fetched(files: IndexFiles, path: str, sizes: tuple[int, int]) -> Path:
    """Fetch a file whose size is right. Raises `StoreError` if it is not, or if the repo lacks the file."""
    size = files.size(path)
    if size is None and files.names() is not None and not isinstance(files, LocalFiles):
        raise StoreError("it is missing, although the manifest lists it")
    if size is not None and not sizes[0] <= size <= sizes[1]:
        raise StoreError(f"it has {size} bytes, not {sizes[0]} to {sizes[1]}")
    return files.fetch(path)


def checked_tensors(path: Path, record: CurvatureRecord, specs: Mapping[str, TensorSpec]) -> str:
    """Check a file of tensors: size, header, identity, shapes, checksum and values.

    Args:
        path: the file on this machine.
        record: the record of the curvature.
        specs: its tensors.

    Returns:
        Its checksum.

    Raises:
        StoreError: it is not a file of this curvature. The message begins with "it", or with the path.
    """
    if not path.is_file():
        raise StoreError("it is missing")
    check_file(path, tensor_bytes(specs), max_header(specs))
    identity = {"curvature": content_digest(record.identity)}
    header = read_header(path, identity, specs)
    for name, values in read_tensors(path, identity, specs, verify=True).items():
        if not bool(torch.isfinite(values).all()):
            raise StoreError(f"`{name}` holds NaN or infinite values")
        if not name.endswith("_basis") and bool((values < 0).any()):
            raise StoreError(f"`{name}` holds eigenvalues below 0")
    return str(header["checksum"])
