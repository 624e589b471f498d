"""The files of the curvatures of an index: checked before they are published, and before a published one is used."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.config import CurvatureConfig
from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.curvature.curvature import KINDS
from hf_trak.curvature.files import CURVATURE_FILE, CURVATURE_VERSION, BlockFile
from hf_trak.errors import StoreError
from hf_trak.hub.files import IndexFiles, check_file, reason_of, sealed_object, tensor_bytes
from hf_trak.hub.index_files import check_finite
from hf_trak.hub.manifest import INDEX_DIGITS
from hf_trak.hub.names import shown
from hf_trak.store.atomic import differing
from hf_trak.store.shards import read_tensors
from hf_trak.store.store import FeatureStore

MAX_SIDE = 1 << 15

"""Longest accepted side of a basis, which takes 4 GiB. A fit makes bases of up to 8,192."""


_MAX_PIECES = 1 << 24

"""Maximum number of contiguous pieces of all blocks: one for each row of a matrix that is cut in columns."""


@dataclass(frozen=True)
class CurvatureRecord:
    """The content of `curvature.json`, checked.

    Attributes:
        identity: what the curvature was computed from.
        blocks: the division of the parameters.
    """

    identity: Mapping[str, str | int]
    blocks: CurvatureBlocks

    @property
    def files(self) -> list[BlockFile]:
        """List the files of all blocks."""
        indices = [*range(len(self.blocks.kronecker)), *([None] if self.blocks.diagonal else [])]
        return [BlockFile.of(self.identity, self.blocks, index) for index in indices]


def read_content(files: IndexFiles, store: FeatureStore, model_id: int) -> dict[str, Any]:
    """Fetch the record of a curvature, and check that it is one of a checkpoint of this store.

    Args:
        files: the files of the store, or of the index.
        store: the store, or the index.
        model_id: the checkpoint.

    Returns:
        The content, checked only in its checksum and its identity.

    Raises:
        HubAccessError: it cannot be fetched.
        IncompleteStoreError: it is missing in a copy.
        RefusedIndexError: it is missing in the repo, damaged, or not that of the manifest.
    """
    path = f"{curvature_folder(model_id)}/{CURVATURE_FILE}"
    with files.refused_if_damaged(path):
        content = files.read_json(path, max_digits=INDEX_DIGITS)
        _check_identity(content, store, model_id)
    return content


def _check_identity(content: Mapping[str, Any], store: FeatureStore, model_id: int) -> None:
    """Check that a record is that of a checkpoint."""
    identity = content.get("identity")
    if not isinstance(identity, dict) or not all(type(value) in (str, int) for value in identity.values()):
        raise StoreError(f"its identity is {shown(identity)}, not an object of texts and integers")
    expected = store.identity(model_id)
    if changes := differing({key: identity.get(key) for key in expected}, expected):
        raise StoreError(f"it belongs to another checkpoint or index ({'; '.join(changes)})")


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
    side = max((side for block in blocks.kronecker for side in block.shape), default=0)
    if content["identity"]["kind"] != "diagonal" and side > MAX_SIDE:
        raise StoreError(f"it has a basis of {side} vectors, more than {MAX_SIDE}")
    counts, rows = content.get("counts"), content.get("rows")
    if not isinstance(counts, list) or len(counts) != len(blocks.kronecker) or not all(map(_is_count, counts)):
        raise StoreError(f"its counts are {shown(counts)}, not one for each of {len(blocks.kronecker)} blocks")
    if not _is_count(rows) or rows != content["identity"].get("rows"):
        raise StoreError(
            f"its number of rows is {shown(rows)}, and in its identity {shown(content['identity'].get('rows'))}"
        )
    scale = content.get("scale")
    if type(scale) is not float or not 0 <= scale < inf:
        raise StoreError(f"its scale is {shown(scale)}, not a finite number of at least 0")
    return CurvatureRecord(content["identity"], blocks)


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
        paths: its files by their path in an index.
    """

    record: CurvatureRecord
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
    root, folder = store.checkpoint_dir(model_id).parent, curvature_folder(model_id)
    path = root / folder / CURVATURE_FILE
    if not path.exists():
        if (root / folder / "progress").exists():
            logger.warning("The curvature of checkpoint %d is not finished, and is not published.", model_id)
        return None
    try:
        content = sealed_object(path, max_digits=INDEX_DIGITS)
        _check_identity(content, store, model_id)
        if not is_known(content["identity"]):
            logger.warning("%s was fitted by another version of hf_trak, and is not published.", path)
            return None
        record = checked_record(content, store)
        for file in record.files:
            path = root / folder / file.name
            checked_tensors(path, file)
    except StoreError as error:
        raise StoreError(
            f"{path} cannot be published: {reason_of(error)}. Expected a curvature as hf_trak fits it. Delete "
            f"{root / folder} and fit it again, or publish the index without it (`curvature=False`)."
        ) from error
    names = (CURVATURE_FILE, *(file.name for file in record.files))
    return StoredCurvature(record, {f"{folder}/{name}": root / folder / name for name in names})


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


def fetch_tensors(files: IndexFiles, store: FeatureStore, model_id: int, content: Mapping[str, Any]) -> list[str]:
    """Fetch and check all other files of a published curvature.

    Args:
        files: the files of the index.
        store: the index.
        model_id: the checkpoint.
        content: the result of [`read_content`].

    Returns:
        The paths of all files in the index. The record comes last.

    Raises:
        HubAccessError: a file cannot be fetched.
        IncompleteStoreError: a file is missing in a copy.
        RefusedIndexError: a file is missing in the repo or damaged, or not that of record and manifest.
    """
    folder = curvature_folder(model_id)
    path = f"{folder}/{CURVATURE_FILE}"
    with files.refused_if_damaged(path):
        record = checked_record(content, store)
        tensors = {f"{folder}/{file.name}": file for file in record.files}
        listed = {name for name in files.listed if name.startswith(f"{folder}/")}
        if listed != {path, *tensors}:
            bases, others = len(record.blocks.kronecker), len(record.blocks.diagonal)
            raise StoreError(
                f"it has {bases} blocks with bases and {others} others, and the manifest lists other files"
            )
    for name, file in tensors.items():
        with files.refused_if_damaged(name):
            checked_tensors(files.fetch_tensors(name, tensor_bytes(file.specs)), file)
    return [*tensors, path]


def fetch_known(files: IndexFiles, store: FeatureStore, model_id: int) -> list[str]:
    """Fetch and check all files of a published curvature, unless it is of another version of hf_trak.

    Returns and raises as [`fetch_tensors`]; an empty list for one of another version.
    """
    content = read_content(files, store, model_id)
    if is_known(content["identity"]):
        return fetch_tensors(files, store, model_id, content)
    logger.warning(
        "The curvature of checkpoint %d in %s is of another version of hf_trak, and is left out.", model_id, files.name
    )
    return []


def checked_tensors(path: Path, file: BlockFile) -> None:
    """Check a file of tensors: size, header, identity, shapes, checksum and values.

    Args:
        path: the file on this machine.
        file: what it has to be.

    Raises:
        StoreError: it is not a file of this curvature. The message begins with "it", or with the path.
    """
    if not path.is_file():
        raise StoreError("it is missing")
    check_file(path, tensor_bytes(file.specs))
    tensors = read_tensors(path, file.identity, file.specs, verify=True)
    check_finite(tensors)
    for name, values in tensors.items():
        if not name.endswith("_basis") and bool((values < 0).any()):
            raise StoreError(f"`{name}` holds eigenvalues below 0")
