"""The tensor files of an index: their names and sizes, and the checks before one is used."""

import contextlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_trak.errors import HfTrakError, IncompleteStoreError, RefusedIndexError, StoreError
from hf_trak.hub.files import IndexFiles
from hf_trak.hub.manifest import refused
from hf_trak.hub.published import PublishedCheckpoint
from hf_trak.store.gram_file import FILE_NAME as GRAM_FILE
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.references import read_references
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.shards import checksum
from hf_trak.store.store import FeatureStore

MAX_HEADER_BYTES = 64 << 10
"""Maximum length of the header of a safetensors file. Headers that the store writes have about 500 bytes."""

INDEX_FILE = re.compile(
    r"checkpoint-\d+/(train-\d+-of-\d+\.safetensors|gram\.safetensors|low_rank-\d+\.safetensors"
    r"|row_digests\.safetensors|references\.safetensors|checkpoint\.json)|train_rows\.safetensors"
    r"|curvature/\d+/(curvature\.json|block-\d+\.safetensors|diagonal\.safetensors)"
)
"""Paths of all files of an index except for the two JSON files and the card."""

SCALE_BYTES = 4
"""Bytes of the scale of a row of codes."""

ROW_DIGESTS_FILE = "row_digests.safetensors"
TRAIN_ROWS_FILE = "train_rows.safetensors"

MAX_COLUMNS = 1 << 10
"""Maximum number of columns of the training rows, of which there are digests."""

REFERENCE_BYTES = (8, 1 << 30)
"""Minimum and maximum bytes of the tensors that a task computes before its first batch."""


def tensor_files(store: FeatureStore, model_id: int, published: PublishedCheckpoint) -> dict[str, tuple[int, int]]:
    """Map the path of every tensor file of one checkpoint to the minimum and maximum of its bytes."""
    shards, folder = store.train(model_id), store.checkpoint_dir(model_id).name
    sizes = {}
    if published.solver is None:
        sizes[f"{folder}/{GRAM_FILE}"] = gram_bytes(store.proj_dim)
    elif published.solver.kind == "low_rank":
        rank = published.solver.rank
        sizes[f"{folder}/{low_rank_file(rank)}"] = low_rank_bytes(store.proj_dim, rank)
    if published.row_digests is not None:
        sizes[f"{folder}/{ROW_DIGESTS_FILE}"] = row_digest_bytes(store.train_size)
    if published.references is not None:
        sizes[f"{folder}/{REFERENCES_FILE}"] = REFERENCE_BYTES
    for index in range(len(shards)):
        name = f"{folder}/{shards.plan.file_name(index, shards.prefix)}"
        sizes[name] = shard_bytes(shards.plan.rows(index), shards)
    return sizes


def references_checksum(store: FeatureStore, model_id: int) -> str | None:
    """Return the checksum of a checkpoint's references, or `None` if it has none.

    Raises:
        StoreError: they are damaged.
    """
    tensors = read_references(store, model_id)
    return None if tensors is None else checksum(tensors, store.version)


def checksums_of(shards: ShardSet) -> tuple[str, ...]:
    """Read the checksum of every shard from its header. Raises `StoreError` if one is missing or invalid."""
    return tuple(shards.checksums())


def shard_bytes(rows: range, shards: ShardSet) -> tuple[int, int]:
    """Return the minimum and maximum bytes of a shard, from its rows and the form of the features."""
    form = shards.code_format
    features = shards.width * shards.dtype.itemsize if form is None else form.row_bytes + SCALE_BYTES
    data = len(rows) * (features + 4)
    return data + 8, data + 8 + MAX_HEADER_BYTES


def gram_bytes(width: int) -> tuple[int, int]:
    """Return the minimum and maximum bytes of the file of a Gram matrix (width, width), in float32 or float64."""
    return 4 * width * width + 8, 8 * width * width + 8 + MAX_HEADER_BYTES


def low_rank_file(rank: int) -> str:
    """Name of the file with the `rank` largest eigenvalues of XᵀX."""
    return f"low_rank-{rank}.safetensors"


def low_rank_bytes(width: int, rank: int) -> tuple[int, int]:
    """Return the minimum and maximum bytes of that file: vectors (width, rank), eigenvalues, overlaps (rank, rank)."""
    data = 4 * width * rank + 8 * rank + 8 * rank * rank
    return data + 8, data + 8 + MAX_HEADER_BYTES


def row_digest_bytes(n: int) -> tuple[int, int]:
    """Return the minimum and maximum bytes of the digests of n rows."""
    return 8 * n + 8, 8 * n + 8 + MAX_HEADER_BYTES


def train_row_bytes(n: int) -> tuple[int, int]:
    """Return the minimum and maximum bytes of the digests of the values of n rows."""
    return 8 * n + 8, 8 * n * MAX_COLUMNS + 8 + MAX_HEADER_BYTES


def check_file(path: Path, sizes: tuple[int, int], max_header: int = MAX_HEADER_BYTES) -> None:
    """Check the size of a file and the length of its header before the file is parsed.

    Args:
        path: the file on this machine.
        sizes: minimum and maximum bytes.
        max_header: maximum bytes of the header.

    Raises:
        StoreError: the file is refused. The message begins with "it", so that the caller can name the file.
    """
    size = path.stat().st_size
    if not sizes[0] <= size <= sizes[1]:
        raise StoreError(f"it has {size} bytes, not {sizes[0]} to {sizes[1]}")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        start = file.read(1)
    if length > max_header or start != b"{":
        raise StoreError(
            f"it is not a safetensors file of an index: it begins with a header of {length} bytes that starts with "
            f"{start!r} (at most {max_header} bytes, starting with b'{{', were expected)"
        )


def check_published_values(shard: Shard) -> None:
    """Check that a shard holds values that hf_trak writes.

    Raises:
        StoreError: a number is NaN or infinite, or codes are none that an encoder writes. The message names the row or
            the tensor, so that the caller can name the file.
    """
    numbers = {"out_to_loss": shard.out_to_loss}
    if shard.coded is None:
        numbers["grads"] = shard.grads
    elif problem := shard.coded.problem():
        raise StoreError(f"it holds no codes that hf_trak writes: {problem}")
    for name, values in numbers.items():
        finite = torch.isfinite(values).reshape(shard.stop - shard.start, -1).all(dim=1)
        if not bool(finite.all()):
            row = shard.start + int((~finite).nonzero()[0])
            raise StoreError(f"`{name}` of training row {row} holds NaN or infinite values")


@contextlib.contextmanager
def refused_if_damaged(files: IndexFiles, path: str) -> Iterator[None]:
    """Turn a `StoreError` into a refusal of the file, and discard the file, so that it is downloaded again.

    Args:
        files: the files of the index.
        path: the file, by its path in the index.

    Raises:
        RefusedIndexError: the file is damaged, or of another format.
    """
    try:
        yield
    except (RefusedIndexError, IncompleteStoreError):
        raise
    except StoreError as error:
        files.discard(path)
        raise refused(f"{path!r} of {files.name}", reason_of(error)) from error


def reason_of(error: HfTrakError) -> str:
    """Cut a message of the store down to its reason, without the advice on the user's own files."""
    text = str(error)
    return (text.partition(" cannot be used: ")[2] or text).partition(". Delete this file")[0]
