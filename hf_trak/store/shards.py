"""Row shards: which rows go into which file, and how one file is written, checked and read.

A shard is one safetensors file. Its metadata has the single key `hf_trak`, a JSON object with sorted keys:

    {"checksum": xxh3-128 of all other keys, "format_version": 2, "identity": {…}, "start": first row, "stop": one past
     the last row, "tensors": xxh3-128 of names, dtypes, shapes and bytes of the tensors}

One key, because safetensors serializes several in an order that changes from call to call, and the same features have
to give the same bytes. `identity` says what the rows were computed from (hash of the configuration, fingerprint of the
weights, id of the checkpoint, …); a file of another identity is refused. Since `checksum` covers `tensors`, it stands
for the whole file. In format 1 `checksum` was that of the tensors' names and bytes, and nothing covered the metadata.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.runtime.checks import checked_int
from hf_trak.store.atomic import atomic_path, differing
from hf_trak.store.sealed import content_digest, sealed
from hf_trak.store.whole_file import DTYPES, WholeFile

FORMAT_VERSION = 2
"""The version that new files have."""
READABLE_VERSIONS = (1, FORMAT_VERSION)
METADATA_KEY = "hf_trak"

Identity = Mapping[str, str | int]
"""What a file was computed from, as JSON."""


@dataclass(frozen=True)
class ShardPlan:
    """The division of rows `0 … n_rows` into shards of `shard_size` rows, the last one shorter.

    It depends on these two numbers alone, never on the number of processes or on batches, so that any process can
    compute any shard and the result is the same.
    """

    n_rows: int
    shard_size: int

    def __post_init__(self) -> None:
        for name in ("n_rows", "shard_size"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name, 1, type_error=ValueError))

    def __len__(self) -> int:
        """Number of shards."""
        return -(-self.n_rows // self.shard_size)

    def rows(self, index: int) -> range:
        """The rows of one shard.

        Raises:
            IndexError: there is no such shard.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"Shard {index} does not exist; expected 0 ≤ index < {len(self)}.")
        start = index * self.shard_size
        return range(start, min(start + self.shard_size, self.n_rows))

    def shard_of(self, row: int) -> int:
        """Index of the shard that holds a row.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < self.n_rows:
            raise IndexError(f"Row {row} does not exist; expected 0 ≤ row < {self.n_rows}.")
        return row // self.shard_size

    def file_name(self, index: int, prefix: str) -> str:
        """For example `train-00000-of-00004.safetensors`."""
        return f"{prefix}-{index:05d}-of-{len(self):05d}.safetensors"


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of a file has to look like: its shape, and the dtypes that are accepted."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def checksum(tensors: Mapping[str, Tensor], version: int = 1) -> str:
    """xxh3-128 (hex) of the names and bytes of CPU tensors, in the order of their names; from format version 2 on of
    their dtypes and shapes, too."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        if version > 1:
            digest.update(f"\0{tensors[name].dtype}\0{tuple(tensors[name].shape)}\0".encode())
        flat = tensors[name].reshape(-1)
        # a one-element slice counts as contiguous whatever its stride is, and only a copy can be seen as bytes
        flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], identity: Identity, version: int = FORMAT_VERSION, **extra: Any
) -> None:
    """Write tensors to a file, atomically; the same content gives the same bytes.

    Args:
        path: the file.
        tensors: what to write, by name.
        identity: what it was computed from.
        version: the format version of the store that the file belongs to.
        **extra: further plain JSON for the metadata.
    """
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    header = {**extra, "format_version": version, "identity": dict(identity)}
    digest = checksum(tensors, version)
    header = {**header, "checksum": digest} if version == 1 else sealed({**header, "tensors": digest})
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(header, sort_keys=True, allow_nan=False)})


def read_header(
    path: Path, identity: Identity, specs: Mapping[str, TensorSpec], version: int = FORMAT_VERSION, **extra: Any
) -> dict[str, Any]:
    """Check everything about a file but the bytes of its tensors, which are not read.

    Args:
        path: the file.
        identity: the identity it has to have.
        specs: the tensors it has to hold.
        version: the format version of the store that it belongs to.
        **extra: metadata that it has to have.

    Returns:
        The metadata.

    Raises:
        StoreError: the file is truncated or foreign, or anything differs.
    """
    with _open(path) as file:
        return _check_header(path, file, identity, specs, version, extra)


def read_tensors(
    path: Path,
    identity: Identity,
    specs: Mapping[str, TensorSpec],
    verify: bool | None = None,
    mapped: bool = True,
    version: int = FORMAT_VERSION,
    **extra: Any,
) -> dict[str, Tensor]:
    """The tensors of a file.

    Args:
        path: the file.
        identity: the identity it has to have.
        specs: the tensors it has to hold; others in the file are not returned.
        verify: whether to compare the checksum, which reads the file once. By default this is done the first time that
            this process reads the file as it is now.
        mapped: memory-map them: pages are read when they are touched, and slices cost only their rows. Otherwise the
            whole file is read at once, see `hf_trak.store.whole_file`.
        version: the format version of the store that it belongs to.
        **extra: metadata that it has to have.

    Raises:
        StoreError: as in `read_header`, or the checksum differs.
    """
    stamp = _stamp(path)
    with _open(path, mapped) as file:
        header = _check_header(path, file, identity, specs, version, extra)
        tensors = {name: file.get_tensor(name) for name in specs}
        if verify or (verify is None and stamp not in _verified):
            others = {name: file.get_tensor(name) for name in file.keys() if name not in tensors}  # noqa: SIM118
            found, said = (
                checksum({**tensors, **others}, version),
                header.get("checksum" if version == 1 else "tensors"),
            )
            if found != said:
                raise _broken(path, f"the checksum of its tensors is {found}, its metadata says {said}")
            _verified.add(stamp)
    return tensors


_verified: set[object] = set()
"""Files whose checksum this process has compared, by path, inode, size, and the times of the last modification and the
last change of the inode: the latter cannot be set back by a program that writes into the file."""


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
    path: Path, file: Any, identity: Identity, specs: Mapping[str, TensorSpec], version: int, extra: Mapping[str, Any]
) -> dict[str, Any]:
    header = parse_metadata(path, file)
    found = header.get("format_version")
    if isinstance(found, int) and found > FORMAT_VERSION:
        raise StoreError(
            f"{path} has format version {found}; this version of hf_trak reads up to {FORMAT_VERSION}. Use the "
            "version of hf_trak that wrote it, or another output directory."
        )
    if found != version:
        raise _broken(path, f"it has format version {found!r}, and the directory that it lies in has {version}")
    if version > 1 and header.get("checksum") != content_digest(header):
        raise _broken(
            path, f"the checksum of its metadata is {content_digest(header)}, it says {header.get('checksum')}"
        )
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


def parse_metadata(path: Path, file: Any) -> dict[str, Any]:
    """What hf_trak wrote into the metadata of an open safetensors file, unchecked.

    Raises:
        StoreError: nothing, or no JSON object.
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
