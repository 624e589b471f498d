"""Digests of the rows of an index of codes, with which single rows are checked that were downloaded by themselves.

The checksums of a shard are those of whole tensors. Where few rows of many shards are wanted, their bytes are few, and
whole tensors are many: 100 rows of 16 KiB are 1.6 MB, and the shards around them 1.6 GB. So an index whose rows have
more than one block of codes is published with one more file for each checkpoint:

    checkpoint-<model_id>/row_digests.safetensors      `digests` (n,), int64: xxh3-64 of the packed codes of each row

It is made when the index is published, and takes 8 bytes per row.
"""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from hf_trak.codes.coded_rows import CodedRows
from hf_trak.errors import StoreError
from hf_trak.hub.index_files import ROW_DIGESTS_FILE
from hf_trak.store.shards import Identity, TensorSpec, read_header, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore


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
        write_tensors(path, {"digests": torch.cat(parts)}, _identity(store, model_id), store.version)
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
    header: dict[str, Any] = read_header(path, identity, specs, store.version)
    tensors = read_tensors(path, identity, specs, verify=True, version=store.version)
    return tensors["digests"], str(header["checksum"])


def _identity(store: FeatureStore, model_id: int) -> Identity:
    content = store.train(model_id).content_hash
    return {**store.identity(model_id), "content": content, "kind": "row_digests"}
