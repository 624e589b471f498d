"""The record of a curvature, `curvature.json`, checked before anything that it implies is fetched or published.

What others published gets no say in how much memory or disk is used: every block has to lie in the parameters of the
index, all blocks together cover them exactly once, and the shapes of all tensors follow from the blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.curvature.curvature import KINDS
from hf_trak.errors import StoreError
from hf_trak.featurize.curvature_settings import CURVATURE_VERSION
from hf_trak.hub.foreign_json import read_foreign_object, shown
from hf_trak.hub.index_files import MAX_HEADER_BYTES
from hf_trak.hub.manifest import MAX_JSON_BYTES
from hf_trak.store.atomic import differing
from hf_trak.store.sealed import CHECKSUM_KEY, SEALED_VERSION, VERSION_KEY, content_digest
from hf_trak.store.shards import TensorSpec
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
        """The tensors of every file, by the name of the file."""
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
        The content, of which the checksum and the identity are checked.

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
    """Whether this version of hf_trak can use a curvature."""
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
    """Where a block is, without its bias: start, number, distance and length of runs of parameters."""
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
