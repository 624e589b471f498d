"""A safetensors file that is read at once, instead of memory-mapped.

The kernel makes page faults of one mapping wait while another mapping is removed, so that threads which map files slow
each other down. Where every byte is needed once, reading also costs less than page faults.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""The dtypes that a store holds, by their names in safetensors files."""

_LENGTH = 8
"""Number of bytes at the start of the file that give the length of the header, little-endian. The header follows, and
then the tensors."""


class WholeFile:
    """The part of the interface of `safetensors.safe_open` that shards need."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the file.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: it cannot be read.
            SafetensorError: it is truncated, or not a safetensors file.
        """
        with open(path, "rb", buffering=0) as file:
            data = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
            if file.readinto(data.data) != len(data):
                raise SafetensorError("it became shorter while it was read")
        begin = _LENGTH + int.from_bytes(data[:_LENGTH].tobytes(), "little")
        if not _LENGTH < begin <= len(data):
            raise SafetensorError(f"its header would end at byte {begin}, the file ends at {len(data)}")
        try:
            header = json.loads(data[_LENGTH:begin].tobytes())
            self._metadata = header.pop("__metadata__", None)
            self._tensors = {name: _Entry(**entry) for name, entry in header.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise SafetensorError(f"its header is not one of safetensors ({error})") from error
        self._bytes = data[begin:]

    def __enter__(self) -> "WholeFile":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "_Entry":
        return self._tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, a view of the memory that the file was read into.

        Raises:
            SafetensorError: the header gives it bytes that the file does not have, or a dtype that a store does not
                hold.
        """
        entry = self._tensors[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise SafetensorError(f"`{name}` has dtype {entry.dtype}")
        first, last = entry.data_offsets
        if not first <= last <= len(self._bytes) or last - first != math.prod(entry.shape) * dtype.itemsize:
            raise SafetensorError(
                f"`{name}` of shape {entry.shape} would be bytes {first} … {last} of {len(self._bytes)}"
            )
        content = self._bytes[first:last]
        # A header of odd length leaves tensors unaligned, which `view` refuses.
        if content.ctypes.data % dtype.itemsize:
            content = content.copy()
        return torch.from_numpy(content).view(dtype).view(entry.shape)


class _Entry:
    """The entry of a tensor in the header."""

    def __init__(self, dtype: str, shape: list[int], data_offsets: list[int], **_: Any) -> None:
        numbers = [*shape, *data_offsets]
        right = isinstance(dtype, str) and isinstance(shape, list) and len(data_offsets) == 2
        right = right and all(type(number) is int and number >= 0 for number in numbers)
        if not right or math.prod(max(size, 1) for size in shape) >= 1 << 60:  # torch multiplies in 64 bits
            raise ValueError(f"there is a tensor {dtype!r} {shape!r} at {data_offsets!r}")
        self.dtype = dtype
        self.shape = shape
        self.data_offsets = data_offsets

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype
