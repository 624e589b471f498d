"""The files of the curvatures of an index: checked before they are published, and before a published one is used."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_trak.config import CurvatureConfig
from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.curvature.curvature import KINDS
from hf_trak.curvature.files import CURVATURE_FILE
from hf_trak.errors import StoreError
from hf_trak.featurize.definition import CURVATURE_VERSION
from hf_trak.hub.files import IndexFiles, LocalFiles
from hf_trak.hub.index_files import MAX_HEADER_BYTES, check_file, reason_of, refused_if_damaged
from hf_trak.hub.manifest import MAX_JSON_BYTES, PublishedCurvature
from hf_trak.hub.names import read_foreign_object, shown
from hf_trak.store.atomic import differing
from hf_trak.store.sealed import CHECKSUM_KEY, SEALED_VERSION, VERSION_KEY, content_digest
from hf_trak.store.shards import TensorSpec, read_header, read_tensors
from hf_trak.store.store import FeatureStore

MAX_SIDE = 1 << 15

"""Longest accepted side of a basis, which takes 4 GiB. A fit makes bases of up to 8,192."""


_MAX_PIECES = 1 << 24

"""Maximum number of contiguous pieces of all blocks: one for each row of a matrix that is cut in columns."""


_HEADER_BYTES_PER_TENSOR = 128

"""Maximum bytes of an entry in the header of a safetensors file. One with a name of five digits has about 90."""


_VALUES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class CurvatureRecord:
    """The content of `curvature.json`, checked.

    Attributes:
        identity: what the curvature was computed from.
        blocks: the division of the parameters.
        checksum: the checksum of the record.
    """

    identity: Mapping[str, str | int]
    blocks: CurvatureBlocks
    checksum: str

    @property
    def tensors(self) -> dict[str, dict[str, TensorSpec]]:
        """Return the tensors of every file by the name of the file."""
        files = {f"block-{index:05d}.safetensors": self._block(one) for index, one in enumerate(self.blocks.kronecker)}
        if self.blocks.diagonal:
            files["diagonal.safetensors"] = {
                f"{index:05d}": TensorSpec((block.numel,), _VALUES) for index, block in enumerate(self.blocks.diagonal)
            }
        return files

    def _block(self, block: KroneckerBlock) -> dict[str, TensorSpec]:
        rows, columns = block.shape
        specs = {"eigenvalues": TensorSpec((rows, columns), _VALUES)}
        if self.identity["kind"] != "diagonal":
            specs["left_basis"] = TensorSpec((rows, rows), _VALUES)
            specs["right_basis"] = TensorSpec((columns, columns), _VALUES)
        return specs


def tensor_bytes(specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Return the minimum and maximum bytes of a file of float32 or float64 tensors."""
    numbers = sum(prod(spec.shape) for spec in specs.values())
    return 4 * numbers + 8, 8 * numbers + 8 + max_header(specs)


def max_header(specs: Mapping[str, TensorSpec]) -> int:
    """Return the maximum bytes of the header of a file of tensors."""
    return MAX_HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * len(specs)


def read_content(path: Path, store: FeatureStore, model_id: int) -> dict[str, Any]:
    """Read a record, and check that it is one of a checkpoint of this store.

    Args:
        path: `curvature.json` on this machine.
        store: the store, or the index.
        model_id: the checkpoint.

    Returns:
        The content. Its checksum and its identity are checked.

    Raises:
        StoreError: it is no such record. The message begins with "it", so that the caller can name the file.
    """
    try:
        content = read_foreign_object(path, MAX_JSON_BYTES)
    except ValueError as error:
        raise StoreError(str(error)) from error
    if (version := content.get(VERSION_KEY)) != SEALED_VERSION:
        raise StoreError(f"it has format version {shown(version)}, and this version of hf_trak reads {SEALED_VERSION}")
    if content.get(CHECKSUM_KEY) != content_digest(content):
        raise StoreError("its content has another checksum than the one that it records")
    identity = content.get("identity")
    if not isinstance(identity, dict) or not all(type(value) in (str, int) for value in identity.values()):
        raise StoreError(f"its identity is {shown(identity)}, not an object of texts and integers")
    expected = store.identity(model_id)
    if changes := differing({key: identity.get(key) for key in expected}, expected):
        raise StoreError(f"it belongs to another checkpoint or index ({'; '.join(changes)})")
    return content


def is_known(identity: Mapping[str, Any]) -> bool:
    """Tell whether this version of hf_trak can use a curvature."""
    return identity.get("curvature_version") == CURVATURE_VERSION and identity.get("kind") in KINDS


def checked_record(content: Mapping[str, Any], store: FeatureStore) -> CurvatureRecord:
    """Check the rest of a record, of a curvature that this version knows.

    Args:
        content: the result of [`read_content`].
        store: the store, or the index, for the places of its parameters.

    Raises:
        StoreError: a value is one that this library does not write. The message begins with "it" or "its".
    """
    blocks = _blocks(content.get("blocks"))
    _check_places(blocks, _slots(store.config.get("parameters")))
    if content["identity"]["kind"] != "diagonal" and (side := max(_sides(blocks), default=0)) > MAX_SIDE:
        raise StoreError(f"it has a basis of {side} vectors, more than {MAX_SIDE}")
    counts, rows = content.get("counts"), content.get("rows")
    if not isinstance(counts, list) or len(counts) != len(blocks.kronecker) or not all(map(_is_count, counts)):
        raise StoreError(f"its counts are {shown(counts)}, not one for each of {len(blocks.kronecker)} blocks")
    if not _is_count(rows) or rows != content["identity"].get("rows"):
        raise StoreError(
            f"its number of rows is {shown(rows)}, and in its identity {shown(content['identity'].get('rows'))}"
        )
    return CurvatureRecord(content["identity"], blocks, content[CHECKSUM_KEY])


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _blocks(content: Any) -> CurvatureBlocks:
    """Read the blocks, and check the types of all values."""
    try:
        blocks = CurvatureBlocks.from_json(content)
    except (AttributeError, KeyError, TypeError) as error:
        raise StoreError(f"its blocks are {shown(content)}, which hf_trak does not write ({error})") from error
    names, numbers = list(blocks.without_gradient), list(blocks.repeated)
    for block in _all(blocks):
        values = dict(vars(block))
        names.append(values.pop("name"))
        part = values.pop("bias_part", "left")
        optional = [values.pop(key, None) for key in ("bias", "source")]
        numbers += [*values.values(), *(value for value in optional if value is not None)]
        if part not in ("left", "right"):
            raise StoreError(f"its block of {shown(names[-1])} has the bias part {shown(part)}")
    for name in names:
        if not isinstance(name, str):
            raise StoreError(f"its blocks name the parameter {shown(name)}, which is no text")
    for number in numbers:
        if not _is_count(number):
            raise StoreError(f"its blocks hold {shown(number)} in the place of an integer of at least 0")
    return blocks


def _slots(parameters: Any) -> dict[str, range]:
    """Map the names of the index's parameters to their positions in the gradient vector."""
    try:
        return {name: range(offset, offset + prod(shape)) for name, shape, offset in parameters}
    except (TypeError, ValueError) as error:
        raise StoreError(f"its index has parameters that hf_trak does not write ({error})") from error


def _sides(blocks: CurvatureBlocks) -> list[int]:
    return [side for block in blocks.kronecker for side in block.shape]


def _check_places(blocks: CurvatureBlocks, slots: Mapping[str, range]) -> None:
    """Check that every block lies in its parameter, and that every parameter is in exactly one block."""
    total = sum(map(len, slots.values()))
    if blocks.numel != total or not 0 < total < 1 << 62:
        raise StoreError(f"its blocks have {blocks.numel} parameters, and the index {total}")
    count = 0
    for block in _all(blocks):
        start, rows, stride, length = _runs(block)
        slot = slots.get(block.name, range(0))
        inside = slot.start <= start and start + (rows - 1) * stride + length <= slot.stop
        if not inside or min(rows, length) < 1 or stride < length:
            raise StoreError(f"its block at {start} does not lie in the parameter {shown(block.name)}")
        if isinstance(block, KroneckerBlock) and block.bias is not None and block.bias >= total:
            raise StoreError(f"its block at {start} has a bias at {block.bias} of {total} parameters")
        count += 2 if stride == length else rows + 1
    if count > _MAX_PIECES:
        raise StoreError(f"its blocks consist of up to {count} pieces, more than {_MAX_PIECES}")
    first, sizes = _pieces(blocks)
    if first[0] != 0 or not np.array_equal(first[1:], (first + sizes)[:-1]) or first[-1] + sizes[-1] != total:
        raise StoreError("its blocks leave out some parameters, or have some twice")


def _all(blocks: CurvatureBlocks) -> list[KroneckerBlock | DiagonalBlock]:
    return [*blocks.kronecker, *blocks.diagonal]


def _runs(block: KroneckerBlock | DiagonalBlock) -> tuple[int, int, int, int]:
    """Return the place of a block without its bias. It is the start, number, distance and length of runs of
    parameters."""
    if isinstance(block, DiagonalBlock):
        return block.start, 1, block.numel, block.numel
    return block.start, block.left, block.stride, block.right


def _pieces(blocks: CurvatureBlocks) -> tuple[np.ndarray, np.ndarray]:
    """List start and length of all contiguous pieces of all blocks, in the order of their starts."""
    starts, lengths = [], []
    for block in _all(blocks):
        start, rows, stride, length = _runs(block)
        if stride == length:
            rows, length = 1, rows * length
        starts.append(start + stride * np.arange(rows))
        lengths.append(np.full(rows, length))
        if isinstance(block, KroneckerBlock) and block.bias is not None:
            starts.append(np.array([block.bias]))
            lengths.append(np.array([block.left if block.bias_part == "right" else block.right]))
    first = np.concatenate(starts)
    order = np.argsort(first)
    return first[order], np.concatenate(lengths)[order]


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
        """Return the bytes of all files."""
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
        settings: fields of `CurvatureConfig`.
        record: the record of the curvature.
        n: number of training rows.

    Returns:
        Some of `kind`, `labels` and `rows`.
    """
    default = CurvatureConfig()
    by_default = {"kind": default.kind, "labels": default.labels, "rows": default.sample_size(n)}
    return {
        name: record.identity[name]
        for name, implied in by_default.items()
        if settings[name] == getattr(default, name) and record.identity[name] != implied
    }


def fetch_content(
    files: IndexFiles, store: FeatureStore, model_id: int, published: PublishedCurvature
) -> dict[str, Any]:
    """Fetch and check the record of a published curvature, as [`~hf_trak.hub.curvature_files.read_content`] does.

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
