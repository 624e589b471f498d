"""A safetensors file read at once, instead of memory-mapped.

Page faults of one mapping wait for the removal of another, so that threads which map files hold each other up; and
where every byte is needed once, reading costs less than faults.
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

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""safetensors' names of the dtypes that the store holds."""

_LENGTH = 8
"""Bytes that say how long the header is: little-endian, at the start of the file. After it come header and tensors."""


class WholeFile:
    """What `safetensors.safe_open` offers, as far as shards need it."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            FileNotFoundError: there is no such file.
            OSError: it cannot be read.
            SafetensorError: it is cut off, or no safetensors file.
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
        """A view of the file's memory.

        Raises:
            SafetensorError: the tensor is not where the header says, or of a dtype that the store does not hold.
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
    """What the header says of a tensor."""

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
