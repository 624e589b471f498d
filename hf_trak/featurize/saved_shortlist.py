"""Shortlists on disk, so that a call that was interrupted does not read the features again."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset

from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, fixed_size_list
from hf_trak.store.sealed import content_digest
from hf_trak.store.shards import TensorSpec, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore

_DTYPES = (torch.int64, torch.float32, torch.int64, torch.float32)


class SavedShortlist:
    """The file of one shortlist: rows and scores of `count` rows from either end, for each of m targets."""

    def __init__(self, store: FeatureStore, name: str, identity: dict[str, Any], m: int, count: int) -> None:
        """
        Args:
            store: the feature store.
            name: name of the experiment.
            identity: everything that the scores depend on, as plain JSON.
            m: number of targets.
            count: rows from either end.
        """
        digest = content_digest({**identity, "count": count})
        self._identity = {"kind": "shortlist", "scores": digest}
        self._version = store.version
        self._specs = {
            column: TensorSpec((m, count), (dtype,)) for column, dtype in zip(TOP_K_COLUMNS, _DTYPES, strict=True)
        }
        self.path: Path = store.experiment_dir(name) / f"shortlist-{digest[:12]}.safetensors"

    def read(self) -> Dataset:
        """Read the columns of a top-k result.

        Raises:
            StoreError: the file is missing or damaged.
        """
        found = read_tensors(self.path, self._identity, self._specs, verify=True, version=self._version)
        return Dataset(pa.table({name: fixed_size_list(found[name].numpy()) for name in TOP_K_COLUMNS}))

    def write(self, columns: Dataset) -> None:
        """Write the columns of a top-k result.

        Raises:
            StoreError: the file cannot be written.
        """
        listed = columns.with_format("numpy")
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(np.stack(listed[name][:]))).to(dtype)
            for name, dtype in zip(TOP_K_COLUMNS, _DTYPES, strict=True)
        }
        write_tensors(self.path, tensors, self._identity, self._version)
