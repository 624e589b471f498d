"""Shards: the division of rows into files, and how one file is written, checked and read.

A shard is one safetensors file. Its metadata has the single key `hf_trak`, a JSON object with sorted keys:

    {"checksum": xxh3-128 of all other keys, "format_version": 1, "identity": {…}, "start": first row, "stop": one past
     the last row, "tensors": {name: xxh3-128 of dtype, shape and bytes}}

There is one key only because safetensors serializes several keys in an order that changes from call to call, and the
same features must give the same bytes. `identity` records what the rows were computed from (hash of the configuration,
fingerprint of the weights, id of the checkpoint, …); a file of another identity is refused. Since `checksum` covers
`tensors`, it stands for the whole file. Each tensor has a checksum of its own, so
that part of the tensors can be read and checked.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.runtime.checks import checked_int
from hf_trak.store.atomic import atomic_path, differing
from hf_trak.store.sealed import SEALED_VERSION, content_digest, sealed

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
    """The part of the interface of `safetensors.safe_open` that shards need, on a file that is read at once.

    `safe_open` itself reads and checks the header.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the file.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: it cannot be read.
            SafetensorError: it is truncated, or not a safetensors file.
        """
        self._checked = checked = safe_open(path, framework="np")  # which maps no storage of torch
        self.metadata, self.keys, self.get_slice = checked.metadata, checked.keys, checked.get_slice
        with open(path, "rb", buffering=0) as file:
            data = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
            if file.readinto(data.data) != len(data):
                raise SafetensorError("it became shorter while it was read")
        begin = _LENGTH + int.from_bytes(data[:_LENGTH].tobytes(), "little")
        self._bytes = dict[str, np.ndarray]()
        try:
            header = json.loads(data[_LENGTH:begin].tobytes())
            for name in self.keys():
                entry, part = header[name], self.get_slice(name)
                if (entry["dtype"], entry["shape"]) != (part.get_dtype(), part.get_shape()):
                    raise ValueError(name)
                self._bytes[name] = data[begin:][slice(*entry["data_offsets"])]
        except (ValueError, KeyError, TypeError) as error:
            raise SafetensorError("it changed while it was read") from error

    def __enter__(self) -> "WholeFile":
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file, whose tensors stay in memory."""
        self._checked.__exit__(None, None, None)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, a view of the memory that the file was read into.

        Raises:
            SafetensorError: it has a dtype that a store does not hold.
        """
        part, content = self.get_slice(name), self._bytes[name]
        dtype = DTYPES.get(part.get_dtype())
        if dtype is None:
            raise SafetensorError(f"`{name}` has dtype {part.get_dtype()}")
        # A header of odd length leaves tensors unaligned, which `view` refuses.
        if content.ctypes.data % dtype.itemsize:
            content = content.copy()
        return torch.from_numpy(content).view(dtype).view(part.get_shape())


METADATA_KEY = "hf_trak"


Identity = Mapping[str, str | int]

"""A description, as JSON, of everything that a file was computed from."""


@dataclass(frozen=True)
class ShardPlan:
    """The division of rows `0 … n_rows − 1` into shards of `shard_size` rows. The last may be shorter.

    It depends on these two numbers alone, not on the number of processes or on batches, so that any process can
    compute any shard and the result is the same.

    Raises:
        ValueError: a number is not an integer of at least 1.
    """

    n_rows: int
    shard_size: int

    def __post_init__(self) -> None:
        for name in ("n_rows", "shard_size"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name, 1, type_error=ValueError))

    def __len__(self) -> int:
        """Return the number of shards."""
        return -(-self.n_rows // self.shard_size)

    def rows(self, index: int) -> range:
        """Return the rows of one shard.

        Raises:
            IndexError: there is no such shard.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"Shard {index} does not exist. Expected 0 ≤ index < {len(self)}.")
        start = index * self.shard_size
        return range(start, min(start + self.shard_size, self.n_rows))

    def shard_of(self, row: int) -> int:
        """Return the index of the shard that holds a row.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < self.n_rows:
            raise IndexError(f"Row {row} does not exist. Expected 0 ≤ row < {self.n_rows}.")
        return row // self.shard_size

    def file_name(self, index: int, prefix: str) -> str:
        """Return the name of a shard's file, for example `train-00000-of-00004.safetensors`."""
        return f"{prefix}-{index:05d}-of-{len(self):05d}.safetensors"


@dataclass(frozen=True)
class TensorSpec:
    """The shape that a tensor of a file must have, and the dtypes that are accepted."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash each of some CPU tensors, see [`checksum`]."""
    return {name: checksum({name: tensors[name]}) for name in sorted(tensors)}


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Hash CPU tensors in the order of their names: xxh3-128 of names, dtypes, shapes and bytes. 32 hex digits."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(f"\0{tensors[name].dtype}\0{tuple(tensors[name].shape)}\0".encode())
        flat = tensors[name].reshape(-1)
        # a one-element slice counts as contiguous whatever its stride is, and only a copy can be seen as bytes
        flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], identity: Identity, **extra: Any) -> None:
    """Write tensors to a file atomically. The same content gives the same bytes.

    Args:
        path: the file.
        tensors: the tensors by name.
        identity: what they were computed from.
        **extra: further plain JSON for the metadata.

    Raises:
        StoreError: the file cannot be written.
    """
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    header = header_of(tensors, identity, **extra)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(header, sort_keys=True, allow_nan=False)})


def header_of(tensors: Mapping[str, Tensor], identity: Identity, **extra: Any) -> dict[str, Any]:
    """Make the metadata of a file of CPU tensors; arguments as for [`write_tensors`]."""
    return sealed({**extra, "identity": dict(identity), "tensors": checksums(tensors)})


def read_header(path: Path, identity: Identity, specs: Mapping[str, TensorSpec], **extra: Any) -> dict[str, Any]:
    """Check a file except for the bytes of its tensors, which are not read.

    Args:
        path: the file.
        identity: the identity that it must have.
        specs: the tensors that it must hold.
        **extra: metadata that it must have.

    Returns:
        The metadata.

    Raises:
        StoreError: the file is missing, truncated or damaged, or differs from what is expected.
    """
    with _open(path) as file:
        return _check_header(path, file, identity, specs, extra)


def read_tensors(
    path: Path,
    identity: Identity,
    specs: Mapping[str, TensorSpec],
    verify: bool | None = None,
    mapped: bool = True,
    **extra: Any,
) -> dict[str, Tensor]:
    """Read the tensors of a file.

    Args:
        path: the file.
        identity: the identity that it must have.
        specs: the tensors that it must hold; others in the file are not returned.
        verify: whether to compare the checksum, which reads the whole file. By default the checksum is compared the
            first time that this process reads the file in its present state.
        mapped: whether to memory-map the tensors: pages are read when they are touched, and slices cost only their
            rows. Otherwise the whole file is read at once, see `hf_trak.store.shards`.
        **extra: metadata that it must have.

    Returns:
        The tensors of `specs` by name, on the CPU.

    Raises:
        StoreError: see [`read_header`], or the checksum differs.
    """
    stamp = _stamp(path)
    with _open(path, mapped) as file:
        header = _check_header(path, file, identity, specs, extra)
        tensors = {name: file.get_tensor(name) for name in specs}
        if verify or (verify is None and stamp not in _verified):
            others = {name: file.get_tensor(name) for name in file.keys() if name not in tensors}  # noqa: SIM118
            _compare_checksums(path, checksums({**tensors, **others}), header)
            _verified.add(stamp)
    return tensors


def read_part(path: Path, identity: Identity, specs: Mapping[str, TensorSpec], **extra: Any) -> dict[str, Tensor]:
    """Read some tensors of a file, and leave the others alone.

    Args:
        path: the file.
        identity: the identity that it must have.
        specs: the tensors to read.
        **extra: metadata that it must have.

    Returns:
        The tensors by name, memory-mapped, on the CPU.

    Raises:
        StoreError: see [`read_header`], or the checksum of one of them differs.
    """
    stamp = (_stamp(path), tuple(specs))
    with _open(path) as file:
        header = _check_header(path, file, identity, specs, extra)
        tensors = {name: file.get_tensor(name) for name in specs}
    if stamp not in _verified:
        said = header.get("tensors")
        known = {name: said.get(name) for name in specs} if isinstance(said, dict) else {}
        _compare_checksums(path, checksums(tensors), {"tensors": known})
        _verified.add(stamp)
    return tensors


def check_file(path: Path) -> None:
    """Check that a file is as it was written, whatever it holds: its metadata and all its tensors, by their checksums.

    Args:
        path: a file that [`write_tensors`] wrote.

    Raises:
        StoreError: the file is missing, truncated or damaged, or of another format.
    """
    with _open(path) as file:
        header = _sealed_header(path, file)
        found = checksums({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    _compare_checksums(path, found, header)


def _compare_checksums(path: Path, found: Mapping[str, str], header: Mapping[str, Any]) -> None:
    """Compare checksums of all tensors of a file with those in its metadata. Raises `StoreError`."""
    said = header.get("tensors")
    said = said if isinstance(said, dict) else {}
    for name in sorted({*found, *said}):
        if found.get(name) != said.get(name):
            raise _broken(path, f"the checksum of its tensors is not the one that its metadata says, in {name[:80]!r}")


_verified: set[object] = set()

"""Files whose checksum this process has compared: path, inode, size, time of the last modification, and time of the
last change of the inode, which a program that writes into the file cannot set back."""


def _stamp(path: Path) -> object:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    return os.path.abspath(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@contextmanager
def _open(path: Path, mapped: bool = True) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt", device="cpu") if mapped else WholeFile(path)
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing. Run the command that computes it again.") from error
    except (SafetensorError, OSError) as error:
        raise _broken(path, f"it cannot be read ({error})") from error
    with file:
        try:
            yield file
        except SafetensorError as error:
            raise _broken(path, f"it cannot be read ({error})") from error


def _check_header(
    path: Path, file: Any, identity: Identity, specs: Mapping[str, TensorSpec], extra: Mapping[str, Any]
) -> dict[str, Any]:
    header = _sealed_header(path, file)
    saved = header.get("identity")
    if not isinstance(saved, dict):
        raise _broken(path, f"its metadata has the identity {saved!r}")
    changes = differing(saved, dict(identity))
    changes += differing({key: header.get(key) for key in extra}, extra)
    if changes:
        raise _broken(path, "it belongs to another run (" + "; ".join(changes) + ")")
    names = set(file.keys())
    for name, spec in specs.items():
        if name not in names:
            raise _broken(path, f"tensor `{name}` is missing")
        found = file.get_slice(name)
        shape, dtype = tuple(found.get_shape()), DTYPES.get(found.get_dtype())
        if shape != spec.shape or dtype not in spec.dtypes:
            expected = " or ".join(map(str, spec.dtypes))
            raise _broken(path, f"`{name}` is {dtype or found.get_dtype()} {shape}, expected {expected} {spec.shape}")
    return header


def _sealed_header(path: Path, file: Any) -> dict[str, Any]:
    """Read the metadata of an open file, and compare their version and checksum. Raises `StoreError`."""
    header = parse_metadata(path, file)
    if (found := header.get("format_version")) != SEALED_VERSION:
        raise _broken(path, f"it has format version {found!r}, expected {SEALED_VERSION}")
    if header.get("checksum") != content_digest(header):
        raise _broken(path, "the checksum of its metadata is not the one that they say")
    return header


def metadata_of(path: Path) -> dict[str, Any]:
    """Return what a file says of itself, unchecked.

    Raises:
        StoreError: it is missing or damaged, or was not written by hf_trak.
    """
    with _open(path) as file:
        return parse_metadata(path, file)


def parse_metadata(path: Path, file: Any) -> dict[str, Any]:
    """Return what hf_trak wrote into the metadata of an open safetensors file, unchecked.

    Args:
        path: the file, for the error message.
        file: the open file, see `safetensors.safe_open`.

    Raises:
        StoreError: hf_trak wrote nothing there, or it is not a JSON object.
    """
    text = (file.metadata() or {}).get(METADATA_KEY)
    if not isinstance(text, str):
        raise _broken(path, f"it was not written by hf_trak (no `{METADATA_KEY}` in its metadata)")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its metadata is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, f"its metadata is a JSON {type(header).__name__}, not an object")
    return header


def _broken(path: Path, problem: str) -> StoreError:
    return StoreError(
        f"{path} cannot be used: {problem}. Delete this file and run the same command again; only its rows are "
        "computed anew."
    )
