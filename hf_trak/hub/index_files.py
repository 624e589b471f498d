"""The tensor files of an index: their names and shapes, and the checks before one is used."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.featurize.calibration import Calibration
from hf_trak.hub.files import Bounds, IndexFiles, check_file, tensor_bytes
from hf_trak.hub.manifest import INDEX_DIGITS, TrainSource
from hf_trak.identity.row_digest import RowContents, content_digests
from hf_trak.scores.gram_sample import sample_size
from hf_trak.scores.solvers import DEFAULT_RANK, PLAIN_PRIMAL, few_rows
from hf_trak.scores.subspace import ALGORITHM
from hf_trak.store.checkpoint_records import normalized
from hf_trak.store.codes import CodedRows
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.references import read_references
from hf_trak.store.shard_set import Shard
from hf_trak.store.shards import Identity, TensorSpec, metadata_of, read_header, read_tensors, write_tensors
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import CALIBRATION_FILE, GRAM_FILE, FeatureStore

if TYPE_CHECKING:
    from datasets import Dataset

INDEX_FILE = re.compile(
    r"checkpoint-\d+/(train-\d+-of-\d+\.safetensors|gram\.safetensors|low_rank-\d+\.safetensors"
    r"|row_digests\.safetensors|references\.safetensors|checkpoint\.json)|train_rows\.safetensors|calibration\.json"
    r"|curvature/\d+/(curvature\.json|block-\d+\.safetensors|diagonal\.safetensors)"
)
"""Paths of all files of an index except for the two JSON files and the card."""

SCALE_BYTES = 4
"""Bytes of the scale of a row of codes."""

ROW_DIGESTS_FILE = "row_digests.safetensors"

TRAIN_ROWS_FILE = "train_rows.safetensors"

MAX_COLUMNS = 1 << 10
"""Maximum number of columns of the training rows that have digests."""

REFERENCE_BYTES = Bounds(8, 1 << 30)
"""Bounds on the tensors that a task computes before its first batch."""

CALIBRATION_BYTES = Bounds(2, 1 << 16)
"""Bounds on the choice of a method."""

_FLOATS = (torch.float32, torch.float64)

_LOW_RANK = re.compile(r"low_rank-(?P<rank>[1-9]\d{0,6})\.safetensors")


def file_bounds(store: FeatureStore, path: str) -> Bounds:
    """Return the bounds on a tensor file of an index by its path, unless it is a shard or of a curvature."""
    name = path.rpartition("/")[2]
    if name in (CALIBRATION_FILE, REFERENCES_FILE):
        return CALIBRATION_BYTES if name == CALIBRATION_FILE else REFERENCE_BYTES
    if name == GRAM_FILE:
        spec = TensorSpec((store.proj_dim, store.proj_dim), _FLOATS)
        if sample_size(store.train_size, store.proj_dim) is None:
            return tensor_bytes({"gram": spec})
        return Bounds(tensor_bytes({"gram": spec}).least, tensor_bytes({"gram": spec, "spread": spec}).most)
    if rank := low_rank_of(name):
        return tensor_bytes(low_rank_specs(store.proj_dim, rank))
    most = tensor_bytes(_digest_specs(store.train_size, MAX_COLUMNS if name == TRAIN_ROWS_FILE else 1)).most
    return Bounds(tensor_bytes(_digest_specs(store.train_size)).least, most)


def _digest_specs(*shape: int) -> dict[str, TensorSpec]:
    return {"digests": TensorSpec(shape, (torch.int64,))}


def low_rank_specs(width: int, rank: int) -> dict[str, TensorSpec]:
    """Return the tensors of a file with the `rank` largest eigenvalues of XᵀX."""
    return {
        "eigenvalues": TensorSpec((rank,), (torch.float64,)),
        "overlaps": TensorSpec((rank, rank), (torch.float64,)),
        "vectors": TensorSpec((width, rank), (torch.float32,)),
    }


def low_rank_of(name: str | None) -> int:
    """Return the number of eigenvalues in a file by its name; 0 for another file."""
    match = _LOW_RANK.fullmatch(name or "")
    return int(match["rank"]) if match else 0


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
    with files.refused_if_damaged(FeatureStore.CONFIG_FILE):
        config = files.read_json(FeatureStore.CONFIG_FILE, bytes_per_value=4, max_digits=INDEX_DIGITS)
        try:
            check_bounds(config)
            return normalized(config)
        except (TypeError, ValueError) as error:
            raise StoreError(str(error)) from error


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


def write_row_digests(store: FeatureStore, model_id: int) -> None:
    """Hash all rows of a checkpoint, unless that is done, and write the file into its directory.

    Args:
        store: a store of codes, whose shards are all written.
        model_id: the checkpoint.

    Raises:
        StoreError: a shard or the file is damaged, or it cannot be written.
    """
    path = store.checkpoint_dir(model_id) / ROW_DIGESTS_FILE
    if not path.exists():
        digests = [digests_of(shard.coded) for shard in store.train(model_id) if shard.coded is not None]
        write_tensors(path, {"digests": torch.cat(digests)}, _identity(store, model_id))
    read_row_digests(store, model_id)


def read_row_digests(store: FeatureStore, model_id: int) -> Tensor:
    """Read the file of a checkpoint.

    Returns:
        The digests `(n,)`.

    Raises:
        StoreError: it is missing or damaged, or belongs to other features.
    """
    path = store.checkpoint_dir(model_id) / ROW_DIGESTS_FILE
    specs, identity = _digest_specs(store.train_size), _identity(store, model_id)
    return read_tensors(path, identity, specs, verify=True)["digests"]


def _identity(store: FeatureStore, model_id: int) -> Identity:
    content = store.train(model_id).content_hash
    return {**store.identity(model_id), "content": content, "kind": "row_digests"}


def solver_file(store: FeatureStore, model_id: int) -> str | None:
    """Find and check the file that the solver of a checkpoint keeps, to be published.

    Args:
        store: a store whose shards are all written.
        model_id: the checkpoint.

    Returns:
        The name of the Gram matrix, or of the eigenvalues of the highest rank; `None` for a solver that publishes
        nothing.

    Raises:
        IncompleteStoreError: no solver was prepared.
        StoreError: the file is damaged.
    """
    directory = store.checkpoint_dir(model_id)
    if store.read_gram(model_id) is not None:
        return GRAM_FILE
    ranks = [low_rank_of(path.name) for path in directory.glob("low_rank-*")]
    if rank := max(ranks, default=0):
        name = f"low_rank-{rank}.safetensors"
        check_low_rank(directory / name, store, model_id, rank)
        return name
    if SolverFiles(store, model_id).exists("kernel"):
        return None
    raise IncompleteStoreError(
        f"Model id {model_id} has neither a Gram matrix nor what another solver keeps in {store.output_dir}. Run "
        "`featurize` again, which finishes it."
    )


def solver_settings(published: Sequence[str | None], n: int, k: int) -> dict[str, Any]:
    """Return settings that make readers use the published solver, in case "auto" would choose another.

    Args:
        published: the file that the solver of each checkpoint keeps.
        n: number of training rows.
        k: number of features.

    Returns:
        `solver`, or nothing.
    """
    if set(published) == {GRAM_FILE}:
        return {"solver": "primal"} if k > PLAIN_PRIMAL or few_rows(n, k) else {}
    rank = low_rank_of(published[0])
    if rank and len(set(published)) == 1:
        return {"solver": "low_rank" if rank == min(DEFAULT_RANK, n, k) else f"low_rank-{rank}"}
    return {}


def check_low_rank(path: Path, store: FeatureStore, model_id: int, rank: int) -> None:
    """Check a file of eigenvalues as strictly as a shard.

    Args:
        path: the file.
        store: the store that it belongs to.
        model_id: the checkpoint.
        rank: number of eigenvalues.

    Raises:
        StoreError: it is not a file of these features. The message begins with "it", or with the path.
    """
    specs = low_rank_specs(store.proj_dim, rank)
    check_file(path, tensor_bytes(specs))
    features, seed = SolverFiles(store, model_id).features, int(store.config.get("seed", 0))
    identity: Identity = {**features, "algorithm": ALGORITHM, "kind": "low_rank", "rank": rank, "seed": seed}
    header = read_header(path, identity, specs)
    facts = header.get("facts")
    for key in ("trace", "residual"):
        value = facts.get(key) if isinstance(facts, dict) else None
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise StoreError(f"it says that `{key}` is {value!r}, not a finite number of at least 0")
    tensors = read_tensors(path, identity, specs, verify=True)
    check_finite(tensors)
    if bool((tensors["eigenvalues"] < 0).any()):
        raise StoreError("`eigenvalues` holds numbers below 0")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise `StoreError` if a tensor holds NaN or infinite values."""
    for name, values in tensors.items():
        if not bool(torch.isfinite(values).all()):
            raise StoreError(f"`{name}` holds NaN or infinite values")


def check_references(store: FeatureStore, model_id: int) -> None:
    """Check the tensors that a task computed before its first batch. Raises `StoreError` if they are damaged."""
    check_finite(read_references(store, model_id) or {})


def check_calibration(content: Mapping[str, Any]) -> None:
    """Check the choice of a method. Raises `StoreError` if a value is none that hf_trak writes."""
    try:
        Calibration.from_json(content)
    except ValueError as error:
        raise StoreError(str(error)) from error
    if not isinstance(content.get("identity"), dict):
        raise StoreError("it does not say what it was made for")


_COLUMNS, _SOURCE = "columns", "source"


def write_train_rows(store: FeatureStore, dataset: "Dataset", source: TrainSource) -> None:
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
    return TrainSource(**metadata_of(path)[_SOURCE])


def read_train_rows(path: Path, store: FeatureStore) -> RowContents:
    """Read the digests of the training rows.

    Raises:
        StoreError: the file is missing or damaged, or belongs to other rows.
    """
    names = metadata_of(path).get(_COLUMNS)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise StoreError(f"{path} names the columns {names!r:.100}. Expected a list of names.")
    specs, identity = _digest_specs(store.train_size, len(names)), _identity_of_rows(store)
    columns: dict[str, Any] = {_COLUMNS: list(names)}
    tensors = read_tensors(path, identity, specs, verify=True, **columns)
    return RowContents(tuple(names), tensors["digests"])


def _identity_of_rows(store: FeatureStore) -> Identity:
    rows = str(store.config.get("train_fingerprint"))
    return {"kind": "train_rows", "train_fingerprint": rows, "train_size": store.train_size}
