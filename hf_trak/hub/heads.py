"""Heads of shards: the first blocks of codes of all rows of a shard, which a first pass reads.

safetensors puts tensors into a file by the size of their numbers, then by name. So a shard of codes begins with its
header, `out_to_loss`, `scale`, and the blocks of columns in order, and the first so many bytes of every row are one
range of bytes at the start of the file. Which one follows from the configuration of the index and the size of the
file, without a look at its header:

    8 bytes | header | out_to_loss | scale | codes.00 | codes.01 | …
    <- length of the header = size of the file − 8 − bytes of all tensors ->

A head is kept as a safetensors file of its own, with fewer tensors and the metadata of the shard. The metadata have a
checksum, which the manifest of the index repeats, and hold one for each tensor. So a head is checked as strictly as a
whole shard.
"""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.hub.foreign_json import parse_foreign_object
from hf_trak.hub.index_files import MAX_HEADER_BYTES
from hf_trak.store.atomic import atomic_path
from hf_trak.store.shards import METADATA_KEY, TensorSpec
from hf_trak.store.whole_file import DTYPES

_LENGTH_BYTES = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardLayout:
    """Where the tensors of a shard are in its file.

    Attributes:
        header (`int`): bytes of the header.
        stops (`dict[str, int]`): by name of each tensor, in their order in the file, the byte after its last one.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], size: int) -> None:
        """
        Args:
            specs: the tensors of the shard, each with one dtype.
            size: bytes of the file.

        Raises:
            StoreError: a file of this size cannot hold these tensors. The message begins with "it".
        """
        self._specs = dict(sorted(specs.items(), key=lambda item: (-item[1].dtypes[0].itemsize, item[0])))
        data = sum(self._bytes(name) for name in self._specs)
        self.header = size - _LENGTH_BYTES - data
        if not 2 <= self.header <= MAX_HEADER_BYTES:
            raise StoreError(f"it has {size} bytes, of which tensors take {data} and the header cannot take the rest")
        self.stops: dict[str, int] = {}
        stop = _LENGTH_BYTES + self.header
        for name in self._specs:
            stop += self._bytes(name)
            self.stops[name] = stop

    def tensors(self, data: bytes) -> tuple[dict[str, Tensor], str]:
        """Take the tensors out of the first bytes of a file.

        Args:
            data: the bytes up to the last byte of a tensor.

        Returns:
            The tensors that `data` holds as a whole, and the metadata of hf_trak in the header.

        Raises:
            StoreError: the header is not the one that such a file has. The message begins with "it".
        """
        begin = _LENGTH_BYTES + self.header
        (length,) = struct.unpack("<Q", data[:_LENGTH_BYTES])
        if length != self.header:
            raise StoreError(f"it begins with a header of {length} bytes, and its size implies {self.header}")
        try:
            header = parse_foreign_object(data[_LENGTH_BYTES:begin])
        except ValueError as error:
            raise StoreError(f"its header cannot be read: {error}") from error
        metadata = header.pop("__metadata__", None)
        text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
        if not isinstance(text, str):
            raise StoreError(f"it was not written by hf_trak (no `{METADATA_KEY}` in its metadata)")
        if header != (expected := self._entries()):
            wrong = sorted(name for name in {*header, *expected} if header.get(name) != expected.get(name))
            raise StoreError(
                f"its header has other tensors, shapes or places than its configuration implies (first: {wrong[:3]})"
            )
        return {name: self._tensor(name, data) for name, stop in self.stops.items() if stop <= len(data)}, text

    def _entries(self) -> dict[str, dict[str, Any]]:
        """The entries of the tensors in the header, with offsets from its end."""
        begin = _LENGTH_BYTES + self.header
        return {
            name: {
                "dtype": _NAMES[spec.dtypes[0]],
                "shape": list(spec.shape),
                "data_offsets": [self.stops[name] - self._bytes(name) - begin, self.stops[name] - begin],
            }
            for name, spec in self._specs.items()
        }

    def _tensor(self, name: str, data: bytes) -> Tensor:
        spec, stop = self._specs[name], self.stops[name]
        content = bytearray(data[stop - self._bytes(name) : stop])
        return torch.frombuffer(content, dtype=spec.dtypes[0]).reshape(spec.shape)

    def _bytes(self, name: str) -> int:
        spec = self._specs[name]
        return int(torch.Size(spec.shape).numel()) * spec.dtypes[0].itemsize


def keep_head(path: Path, tensors: Mapping[str, Tensor], metadata: str, check: Callable[[Path], object]) -> None:
    """Write a head to a file, unless it is refused.

    Args:
        path: the file.
        tensors: the first tensors of the shard.
        metadata: the metadata of hf_trak in the shard.
        check: reads the file that it is given, and raises to refuse it.

    Raises:
        StoreError: the file cannot be written, or whatever `check` raises.
    """
    with atomic_path(path) as temporary:
        save_file(dict(tensors), temporary, metadata={METADATA_KEY: metadata})
        check(temporary)
