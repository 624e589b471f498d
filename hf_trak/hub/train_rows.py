"""Digests of the training rows of an index, with which rows are checked that are fetched from a dataset repo.

An index whose training rows came from a dataset repo is published with one more file:

    train_rows.safetensors      `digests` (n, columns), int64: xxh3-64 of every value

See `hf_trak.identity.row_contents`. The metadata has the names of the columns, and the dataset repo. The
file is made by `hf-trak featurize`, or when the index is published, and takes 8 bytes per row and column.
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open

from hf_trak.errors import StoreError
from hf_trak.hub.index_files import MAX_COLUMNS, TRAIN_ROWS_FILE
from hf_trak.hub.manifest import TrainSource
from hf_trak.identity.row_contents import RowContents, content_digests
from hf_trak.store.shards import Identity, TensorSpec, parse_metadata, read_header, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore

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
    write_tensors(path, tensors, _identity(store), store.version, **{_COLUMNS: names, _SOURCE: vars(source)})


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
    header: dict[str, Any] = read_header(path, _identity(store), specs, store.version, **extra)
    tensors = read_tensors(path, _identity(store), specs, verify=True, version=store.version, **extra)
    return RowContents(tuple(names), tensors["digests"]), str(header["checksum"])


def _metadata(path: Path) -> dict[str, Any]:
    """Return what a file says of itself, unchecked."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return parse_metadata(path, file)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path} cannot be read ({error}). Expected the digests of the training rows.") from error


def _identity(store: FeatureStore) -> Identity:
    rows = str(store.config.get("train_fingerprint"))
    return {"kind": "train_rows", "train_fingerprint": rows, "train_size": store.train_size}
