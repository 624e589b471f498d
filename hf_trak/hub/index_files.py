"""The tensor files of an index: their names and sizes, and the checks before one is used."""

import contextlib
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_trak.errors import HfTrakError, IncompleteStoreError, RefusedIndexError, StoreError
from hf_trak.hub.files import IndexFiles
from hf_trak.hub.manifest import (
    MAX_JSON_BYTES,
    PublishedCheckpoint,
    PublishedSolver,
    TrainSource,
    check_json_size,
    read_index_json,
    refused,
)
from hf_trak.hub.names import shown
from hf_trak.identity.row_digest import RowContents, content_digests
from hf_trak.scores.solvers import DEFAULT_RANK, PLAIN_PRIMAL, few_rows
from hf_trak.scores.subspace import ALGORITHM
from hf_trak.store.checkpoint_records import normalized
from hf_trak.store.codes import CodedRows
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.references import read_references
from hf_trak.store.sealed import check_seal
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.shards import (
    FORMAT_VERSION,
    Identity,
    TensorSpec,
    checksum,
    parse_metadata,
    read_header,
    read_tensors,
    write_tensors,
)
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import GRAM_FILE, FeatureStore
from hf_trak.version import __version__

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

"""Maximum number of columns of the training rows that have digests."""


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
    return None if tensors is None else checksum(tensors)


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
    """Return the name of the file with the `rank` largest eigenvalues of XᵀX."""
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


_CONFIG_BYTES_PER_VALUE = 4

_MAX_FEATURES = 1 << 24

_MAX_PARAMETERS = 1 << 17

"""Maximum number of parameter tensors. A model of 10¹² weights in 23,000 separate experts has 70,000."""


def checked_config(files: IndexFiles) -> dict[str, Any]:
    """Read the configuration of an index, and check its size, version, checksum and values.

    Args:
        files: the files of the index.

    Raises:
        RefusedIndexError: it is not one that this version of hf_trak reads.
        HubAccessError: it cannot be fetched.
    """
    where = f"{FeatureStore.CONFIG_FILE} of {files.name}"
    check_json_size(where, files.size(FeatureStore.CONFIG_FILE))
    config = read_index_json(files.fetch(FeatureStore.CONFIG_FILE), where, MAX_JSON_BYTES, _CONFIG_BYTES_PER_VALUE)
    version = config.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise refused(
            where, f"it has format version {shown(version)}, and hf_trak {__version__} reads {FORMAT_VERSION}"
        )
    try:
        check_seal(config, where)
    except StoreError as error:
        raise refused(where, "its content has another checksum than the one that it records") from error
    try:
        check_bounds(config)
        return normalized(config)
    except (TypeError, ValueError) as error:
        raise refused(where, str(error)) from error


def check_bounds(config: Mapping[str, Any]) -> None:
    """Refuse a configuration with more features or parameters than readers accept.

    Raises:
        ValueError: a number is larger.
    """
    features, parameters = config.get("proj_dim"), config.get("parameters")
    if isinstance(features, int) and features > _MAX_FEATURES:
        raise ValueError(f"`proj_dim` is {features}, more than {_MAX_FEATURES}")
    if isinstance(parameters, list) and len(parameters) > _MAX_PARAMETERS:
        raise ValueError(f"`parameters` has {len(parameters)} entries, more than {_MAX_PARAMETERS}")


def check_listing(files: IndexFiles, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse an index with missing files, or files of impossible sizes, before any of them is fetched.

    Args:
        files: the files of the index.
        sizes: by path of each file that the manifest implies, the minimum and maximum of its bytes.

    Raises:
        RefusedIndexError: a file is missing, or has another size.
    """
    names = files.names()
    if names is None:
        return  # opened from the cache, whose files are checked when they are read
    for path, (least, most) in sizes.items():
        if path not in names:
            raise refused(f"The index {files.name}", f"the file {path!r}, which its manifest implies, is missing")
        size = files.size(path)
        if size is None or not least <= size <= most:
            raise refused(f"{path!r} of {files.name}", f"it has {size} bytes, not {least} to {most}")


def has_row_digests(store: FeatureStore) -> bool:
    """Tell whether an index of these features has digests: those of codes with more than one block of columns do."""
    return store.code_format is not None and len(store.code_format.names) > 1


def digests_of(rows: CodedRows) -> Tensor:
    """Hash the packed codes of whole rows.

    Args:
        rows: rows with all their blocks, on the CPU.

    Returns:
        `(rows,)`, int64: xxh3-64 of the bytes of each row, as a signed number.
    """
    packed = torch.cat(rows.blocks, dim=1).contiguous().numpy()
    digests = [xxhash.xxh3_64_intdigest(row.data) for row in packed]
    return torch.tensor([one - (one >> 63 << 64) for one in digests], dtype=torch.int64)


def check_rows(rows: CodedRows, digests: Tensor, numbers: Sequence[int]) -> None:
    """Compare rows with their digests.

    Args:
        rows: rows with all their blocks.
        digests: the digests of all rows of the index.
        numbers: which of them these are.

    Raises:
        StoreError: a row is not that of the index. The message names it, so that the caller can name the file.
    """
    wrong = (digests_of(rows) != digests[torch.tensor(numbers, dtype=torch.int64)]).nonzero()
    if len(wrong):
        raise StoreError(f"the codes of training row {numbers[int(wrong[0])]} have another digest than the index says")


def write_row_digests(store: FeatureStore, model_id: int) -> str:
    """Hash all rows of a checkpoint, unless that is done, and write the file into its directory.

    Args:
        store: a store of codes, whose shards are all written.
        model_id: the checkpoint.

    Returns:
        The checksum of the file.

    Raises:
        StoreError: a shard or the file is damaged, or it cannot be written.
    """
    path = store.checkpoint_dir(model_id) / ROW_DIGESTS_FILE
    if not path.exists():
        parts = []
        for shard in store.train(model_id):
            assert shard.coded is not None  # `has_row_digests` has looked
            parts.append(digests_of(shard.coded))
        write_tensors(path, {"digests": torch.cat(parts)}, _identity(store, model_id))
    return read_row_digests(store, model_id)[1]


def read_row_digests(store: FeatureStore, model_id: int) -> tuple[Tensor, str]:
    """Read the file of a checkpoint.

    Returns:
        The digests `(n,)`, and the checksum of the file.

    Raises:
        StoreError: it is missing or damaged, or belongs to other features.
    """
    path = store.checkpoint_dir(model_id) / ROW_DIGESTS_FILE
    specs = {"digests": TensorSpec((store.train_size,), (torch.int64,))}
    identity = _identity(store, model_id)
    header: dict[str, Any] = read_header(path, identity, specs)
    tensors = read_tensors(path, identity, specs, verify=True)
    return tensors["digests"], str(header["checksum"])


def _identity(store: FeatureStore, model_id: int) -> Identity:
    content = store.train(model_id).content_hash
    return {**store.identity(model_id), "content": content, "kind": "row_digests"}


_LOW_RANK = re.compile(r"low_rank-(?P<rank>[1-9]\d{0,8})\.safetensors")


def stored_solver(store: FeatureStore, model_id: int) -> PublishedSolver | None:
    """Find what the solver of a checkpoint keeps, to be published.

    Args:
        store: a store whose shards are all written.
        model_id: the checkpoint.

    Returns:
        The eigenvalues, of the highest rank that there is, or the kind `"none"` of a solver that publishes nothing;
        `None` for the Gram matrix.

    Raises:
        IncompleteStoreError: no solver was prepared.
        StoreError: what it keeps is damaged.
    """
    directory = store.checkpoint_dir(model_id)
    if (directory / GRAM_FILE).exists() and store.read_gram(model_id) is not None:
        return None
    ranks = [int(found["rank"]) for path in directory.glob("low_rank-*") if (found := _LOW_RANK.fullmatch(path.name))]
    if ranks:
        path = directory / low_rank_file(max(ranks))
        return PublishedSolver("low_rank", max(ranks), check_low_rank(path, store, model_id, max(ranks)))
    files = SolverFiles(store, model_id)
    if files.exists("kernel"):
        return PublishedSolver("none")
    raise IncompleteStoreError(
        f"Model id {model_id} has neither a Gram matrix nor what another solver keeps in {store.output_dir}. Run "
        "`featurize` again, which finishes it."
    )


def solver_settings(published: Sequence[PublishedSolver | None], n: int, k: int) -> dict[str, Any]:
    """Return the settings that make readers use the published solver, in case `"auto"` would choose another.

    Args:
        published: what the solver of each checkpoint keeps.
        n: number of training rows.
        k: number of features.

    Returns:
        `solver`, or nothing.
    """
    if all(one is None for one in published):
        return {"solver": "primal"} if k > PLAIN_PRIMAL or few_rows(n, k) else {}
    ranks = {one.rank for one in published if one is not None and one.kind == "low_rank"}
    if len(ranks) == 1 and all(one is not None and one.kind == "low_rank" for one in published):
        rank = ranks.pop()
        return {"solver": "low_rank" if rank == min(DEFAULT_RANK, n, k) else f"low_rank-{rank}"}
    return {}


def check_low_rank(path: Path, store: FeatureStore, model_id: int, rank: int) -> str:
    """Check a file of eigenvalues as strictly as a shard.

    Args:
        path: the file.
        store: the store that it belongs to.
        model_id: the checkpoint.
        rank: number of eigenvalues.

    Returns:
        Its checksum.

    Raises:
        StoreError: it is not a file of these features. The message begins with "it", or with the path.
    """
    k = store.proj_dim
    check_file(path, low_rank_bytes(k, rank))
    specs = {
        "eigenvalues": TensorSpec((rank,), (torch.float64,)),
        "overlaps": TensorSpec((rank, rank), (torch.float64,)),
        "vectors": TensorSpec((k, rank), (torch.float32,)),
    }
    files = SolverFiles(store, model_id)
    identity: Identity = {
        **files.features,
        "algorithm": ALGORITHM,
        "kind": "low_rank",
        "rank": rank,
        "seed": int(store.config.get("seed", 0)),
    }
    header = read_header(path, identity, specs)
    facts = header.get("facts")
    for key in ("trace", "residual"):
        value = facts.get(key) if isinstance(facts, dict) else None
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise StoreError(f"it says that `{key}` is {value!r}, not a finite number of at least 0")
    tensors = read_tensors(path, identity, specs, verify=True)
    for name, values in tensors.items():
        if not bool(torch.isfinite(values).all()):
            raise StoreError(f"`{name}` holds NaN or infinite values")
    if bool((tensors["eigenvalues"] < 0).any()):
        raise StoreError("`eigenvalues` holds numbers below 0")
    return str(header["checksum"])


_COLUMNS, _SOURCE = "columns", "source"


def write_train_rows(store: FeatureStore, dataset: Dataset, source: TrainSource) -> None:
    """Hash the training rows of a store, unless that is done, and write the file into its directory.

    Args:
        store: the store.
        dataset: its training rows.
        source: the dataset repo that they came from.

    Raises:
        StoreError: the file that is there is damaged, or it cannot be written.
        TypeError: a value cannot be hashed.
    """
    path = store.output_dir / TRAIN_ROWS_FILE
    if path.exists():
        read_train_rows(path, store)
        return
    names = dataset.column_names[:MAX_COLUMNS]
    tensors = {"digests": content_digests(dataset, names)}
    write_tensors(path, tensors, _identity_of_rows(store), **{_COLUMNS: names, _SOURCE: vars(source)})


def recorded_source(store: FeatureStore) -> TrainSource | None:
    """Return the dataset repo that the training rows of a store of one's own came from, if it is known.

    Raises:
        StoreError: the file is damaged.
    """
    path = store.output_dir / TRAIN_ROWS_FILE
    if not path.exists():
        return None
    read_train_rows(path, store)
    return TrainSource(**_metadata(path)[_SOURCE])


def read_train_rows(path: Path, store: FeatureStore) -> tuple[RowContents, str]:
    """Read the file.

    Returns:
        The digests, and the checksum of the file.

    Raises:
        StoreError: it is missing or damaged, or belongs to other rows.
    """
    names = _metadata(path).get(_COLUMNS)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise StoreError(f"{path} names the columns {names!r:.100}. Expected a list of names.")
    specs = {"digests": TensorSpec((store.train_size, len(names)), (torch.int64,))}
    extra: dict[str, Any] = {_COLUMNS: list(names)}
    header: dict[str, Any] = read_header(path, _identity_of_rows(store), specs, **extra)
    tensors = read_tensors(path, _identity_of_rows(store), specs, verify=True, **extra)
    return RowContents(tuple(names), tensors["digests"]), str(header["checksum"])


def _metadata(path: Path) -> dict[str, Any]:
    """Return what a file says of itself, unchecked."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return parse_metadata(path, file)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path} cannot be read ({error}). Expected the digests of the training rows.") from error


def _identity_of_rows(store: FeatureStore) -> Identity:
    rows = str(store.config.get("train_fingerprint"))
    return {"kind": "train_rows", "train_fingerprint": rows, "train_size": store.train_size}
