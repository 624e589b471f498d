"""The feature store: projected gradients of train examples and targets, on disk, shared by any number of processes.

    <output_dir>/
      trak_config.json                                         everything that defines the features
      checkpoint-<model_id>/
        checkpoint.json                                        fingerprint and source of the weights
        train-<shard>-of-<shards>.safetensors                  `grads` (rows, k), `out_to_loss` (rows,)
        gram.safetensors                                       XᵀX (k, k), its trace
      experiments/<name>/
        experiment.json                                        number of targets, fingerprint of the target dataset
        checkpoint-<model_id>/targets-<shard>-of-<shards>.safetensors

A shard that exists is complete and valid, so a killed run is finished by computing the shards that are missing.
Several processes may write the same shard: they write the same bytes, and renaming is atomic.
"""

import hashlib
import json
import logging
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trak.errors import (
    CheckpointMismatchError,
    ConfigMismatchError,
    IncompleteStoreError,
    NonFiniteError,
    StoreError,
)
from hf_trak.savers.atomic import create_bytes, differing, json_bytes, read_json, remove_stale_temporaries, safe_name
from hf_trak.savers.shard_set import ShardSet
from hf_trak.savers.shards import (
    FORMAT_VERSION,
    Identity,
    ShardPlan,
    TensorSpec,
    read_header,
    read_tensors,
    write_tensors,
)

logger = logging.getLogger(__name__)

FEATURE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""Storage dtypes, by the name that `feature_dtype` gives them in the configuration."""


@dataclass(frozen=True)
class Gram:
    """XᵀX over all `n` train rows of one checkpoint, `matrix` (k, k), and its trace."""

    matrix: Tensor
    trace: float
    n: int


class FeatureStore:
    """The store of one configuration: see the module's docstring for the files."""

    CONFIG_FILE: ClassVar[str] = "trak_config.json"
    INFORMATIONAL: ClassVar[tuple[str, ...]] = ("hf_trak_version", "model_name", "model_revision")
    """Keys of the configuration that are saved for the reader, but neither compared nor hashed."""
    REQUIRED: ClassVar[tuple[str, ...]] = ("train_size", "proj_dim", "feature_dtype", "shard_size")

    def __init__(self, output_dir: Path, config: dict[str, Any]) -> None:
        """Use [`~FeatureStore.open`] or [`~FeatureStore.load`]."""
        self.output_dir = output_dir
        self._config = config

    @classmethod
    def open(cls, output_dir: str | Path, config: Mapping[str, Any]) -> "FeatureStore":
        """Open a store, creating it if there is none.

        Args:
            output_dir: its directory.
            config: plain JSON, everything that defines the features. Needs `train_size`, `proj_dim`, `feature_dtype`
                (a key of `FEATURE_DTYPES`) and `shard_size`; `format_version` is added.

        Raises:
            ValueError: the configuration lacks a key, or holds a value that is not plain JSON.
            ConfigMismatchError: the store was made with another configuration; it is left as it was.
            StoreError: the saved configuration cannot be read.
        """
        output_dir = Path(output_dir)
        given = cls._normalize(config)
        path = output_dir / cls.CONFIG_FILE
        if not path.exists():
            create_bytes(path, json_bytes(given))
        store = cls.load(output_dir)
        changes = differing(cls._defining(store._config), cls._defining(given))
        if changes:
            raise ConfigMismatchError(
                f"{path} was saved with another configuration than the one given:\n  "
                + "\n  ".join(changes)
                + "\nUse the saved values, or another output directory."
            )
        return store

    @classmethod
    def load(cls, output_dir: str | Path) -> "FeatureStore":
        """Open a store that exists.

        Raises:
            IncompleteStoreError: there is none in this directory.
            StoreError: its configuration cannot be read, or is of another format version.
        """
        output_dir = Path(output_dir)
        path = output_dir / cls.CONFIG_FILE
        try:
            config = read_json(path)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"{output_dir} holds no feature store: {path.name} is missing. Expected the output directory of a "
                "run. Featurize first."
            ) from error
        if config.get("format_version") != FORMAT_VERSION:
            raise StoreError(
                f"{path} has format version {config.get('format_version')!r}; this version of hf_trak reads "
                f"{FORMAT_VERSION}. Use the version of hf_trak that wrote it, or another output directory."
            )
        try:
            cls._normalize(config)
        except ValueError as error:
            raise StoreError(f"{path} is not a valid configuration: {error}") from error
        return cls(output_dir, config)

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the saved configuration."""
        return dict(self._config)

    @property
    def config_hash(self) -> str:
        """Hex digest of all keys that define the features."""
        return hashlib.sha256(json_bytes(self._defining(self._config))).hexdigest()[:32]

    @property
    def feature_dtype(self) -> torch.dtype:
        """Storage dtype of the features."""
        return FEATURE_DTYPES[self._config["feature_dtype"]]

    # checkpoints

    def checkpoint_dir(self, model_id: int) -> Path:
        """Directory of one checkpoint's train features."""
        return self.output_dir / f"checkpoint-{checked_model_id(model_id)}"

    def register_checkpoint(self, model_id: int, fingerprint: str, source: str | None = None) -> None:
        """Tie a `model_id` to the weights that its features are computed with.

        Args:
            model_id: an integer ≥ 0.
            fingerprint: of the weights, see `hf_trak.checkpoints.fingerprint_state_dict`.
            source: where they came from; saved for the reader, not compared.

        Raises:
            CheckpointMismatchError: the id is tied to other weights; the store is left as it was.
        """
        model_id = checked_model_id(model_id)
        path = self.checkpoint_dir(model_id) / "checkpoint.json"
        content = {
            "config_hash": self.config_hash,
            "fingerprint": fingerprint,
            "model_id": model_id,
            "source": source,
        }
        if path.exists() or not create_bytes(path, json_bytes(content)):
            saved = self.checkpoint_info(model_id)
            if saved.get("fingerprint") != fingerprint:
                raise CheckpointMismatchError(
                    f"Model id {model_id} is tied to the weights {saved.get('fingerprint')} (from "
                    f"{saved.get('source')}) in {path}, but was given the weights {fingerprint} (from {source}). Give "
                    "each checkpoint a model id of its own, or use another output directory."
                )
        remove_stale_temporaries(path.parent)

    @property
    def model_ids(self) -> list[int]:
        """Ids of all registered checkpoints, ascending."""
        found = []
        for path in self.output_dir.glob("checkpoint-*/checkpoint.json"):
            match = re.fullmatch(r"checkpoint-(0|[1-9]\d*)", path.parent.name)
            if match:
                found.append(int(match[1]))
        return sorted(found)

    def checkpoint_info(self, model_id: int) -> dict[str, Any]:
        """What is known of a checkpoint: `model_id`, `fingerprint`, `source`, `config_hash`.

        Raises:
            IncompleteStoreError: no checkpoint of this id is registered.
            StoreError: it was registered under another configuration.
        """
        path = self.checkpoint_dir(model_id) / "checkpoint.json"
        try:
            info = read_json(path)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"Model id {model_id} is not in {self.output_dir}, which has {self.model_ids or 'none'}. Featurize "
                "the train set with this checkpoint first."
            ) from error
        if info.get("config_hash") != self.config_hash:
            raise StoreError(
                f"{path} belongs to the configuration {info.get('config_hash')}, but {self.CONFIG_FILE} next to it "
                f"has the hash {self.config_hash}: files of two runs were mixed, or the configuration was edited. "
                "Restore it, or use another output directory."
            )
        return info

    # features

    def train(self, model_id: int) -> ShardSet:
        """The features of the train set under one checkpoint.

        Raises:
            IncompleteStoreError: the checkpoint is not registered.
        """
        plan = ShardPlan(self._config["train_size"], self._config["shard_size"])
        identity = {**self._identity(model_id), "kind": "train"}
        return self._shard_set(self.checkpoint_dir(model_id), "train", plan, identity)

    def experiment_dir(self, experiment: str) -> Path:
        """Directory of one experiment."""
        return self.output_dir / "experiments" / safe_name(experiment, "experiment")

    def targets(
        self,
        experiment: str,
        model_id: int,
        n_targets: int,
        dataset_fingerprint: str,
        extra: Mapping[str, Any] | None = None,
    ) -> ShardSet:
        """The features of an experiment's targets under one checkpoint; the first call creates the experiment.

        Args:
            experiment: its name, see `hf_trak.savers.atomic.safe_name`.
            model_id: a registered checkpoint.
            n_targets: number of targets.
            dataset_fingerprint: of the target dataset.
            extra: further plain JSON that has to be the same whenever the experiment is used.

        Raises:
            ValueError: the name is not a plain name, or `n_targets` is less than 1.
            ConfigMismatchError: the experiment exists with other values; it is left as it was.
            IncompleteStoreError: the checkpoint is not registered.
        """
        directory = self.experiment_dir(experiment)
        plan = ShardPlan(n_targets, self._config["shard_size"])
        identity = {
            **self._identity(model_id),
            "dataset_fingerprint": dataset_fingerprint,
            "kind": "targets",
            "num_targets": n_targets,
        }
        given = {**(extra or {}), "dataset_fingerprint": dataset_fingerprint, "num_targets": n_targets}
        path = directory / "experiment.json"
        if path.exists() or not create_bytes(path, json_bytes(given)):
            changes = differing(read_json(path), given)
            if changes:
                raise ConfigMismatchError(
                    f"Experiment {experiment!r} exists in {path} with other values than those given:\n  "
                    + "\n  ".join(changes)
                    + "\nUse another experiment name for other targets."
                )
        return self._shard_set(directory / f"checkpoint-{model_id}", "targets", plan, identity)

    @property
    def experiments(self) -> list[str]:
        """Names of all experiments."""
        return sorted(path.parent.name for path in self.output_dir.glob("experiments/*/experiment.json"))

    def experiment_info(self, experiment: str) -> dict[str, Any]:
        """What is saved of an experiment: `num_targets`, `dataset_fingerprint`, and what was given as `extra`.

        Raises:
            IncompleteStoreError: there is no such experiment.
        """
        path = self.experiment_dir(experiment) / "experiment.json"
        try:
            return read_json(path)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"Experiment {experiment!r} is not in {self.output_dir}, which has {self.experiments or 'none'}. "
                "Featurize its targets first."
            ) from error

    # Gram matrix

    def write_gram(self, model_id: int, gram: Tensor, n: int) -> None:
        """Save XᵀX of a checkpoint whose train shards are all there.

        Args:
            model_id: a registered checkpoint.
            gram: `(k, k)`, float32 or float64.
            n: number of rows it sums over.

        Raises:
            ValueError: shape, dtype or `n` do not fit the store.
            NonFiniteError: an entry is NaN or infinite.
            IncompleteStoreError: train shards are missing.
        """
        k, size = self._config["proj_dim"], self._config["train_size"]
        if tuple(gram.shape) != (k, k) or gram.dtype not in (torch.float32, torch.float64) or n != size:
            raise ValueError(
                f"The Gram matrix is {gram.dtype} {tuple(gram.shape)} over {n} rows; expected float32 or float64 "
                f"{(k, k)} over {size} rows. Half precision overflows, and part of the rows is not XᵀX."
            )
        if not bool(torch.isfinite(gram).all()):
            raise NonFiniteError(
                f"The Gram matrix of model id {model_id} has NaN or infinite entries; expected finite ones."
            )
        self.train(model_id).require_complete("Featurize the remaining rows first.")
        trace = float(gram.diagonal().sum(dtype=torch.float64))
        write_tensors(self._gram_path(model_id), {"gram": gram}, self._gram_identity(model_id), n=n, trace=trace)

    def read_gram(self, model_id: int) -> Gram | None:
        """The saved XᵀX, or `None` if there is none.

        Raises:
            StoreError: the file is invalid, or was computed from other rows than those that are there now.
        """
        path = self._gram_path(model_id)
        if not path.exists():
            return None
        self.train(model_id).require_complete("Featurize the remaining rows first.")
        k, size = self._config["proj_dim"], self._config["train_size"]
        identity = self._gram_identity(model_id)
        specs = {"gram": TensorSpec((k, k), (torch.float32, torch.float64))}
        matrix = read_tensors(path, identity, specs, n=size)["gram"]
        trace = read_header(path, identity, specs, n=size).get("trace")
        if not isinstance(trace, float) or not math.isfinite(trace):
            raise StoreError(
                f"{path} has the trace {trace!r}; expected a finite number. Delete this file and run again."
            )
        return Gram(matrix, trace, size)

    def _gram_path(self, model_id: int) -> Path:
        return self.checkpoint_dir(model_id) / "gram.safetensors"

    def _gram_identity(self, model_id: int) -> dict[str, str | int]:
        return {**self._identity(model_id), "content": self.train(model_id).content_hash, "kind": "gram"}

    def _identity(self, model_id: int) -> dict[str, str | int]:
        return {"checkpoint": self.checkpoint_info(model_id)["fingerprint"], "config": self.config_hash}

    def _shard_set(self, directory: Path, prefix: str, plan: ShardPlan, identity: Identity) -> ShardSet:
        if directory.is_dir():
            remove_stale_temporaries(directory)
        return ShardSet(directory, prefix, plan, self._config["proj_dim"], self.feature_dtype, identity)

    @classmethod
    def _defining(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key not in cls.INFORMATIONAL}

    @classmethod
    def _normalize(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration as JSON would give it back, checked."""
        try:
            content = json.loads(json_bytes({"format_version": FORMAT_VERSION, **config}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"The configuration is not plain JSON: {error}.") from error
        absent = [key for key in cls.REQUIRED if key not in content]
        if absent:
            raise ValueError(f"The configuration lacks {absent}; expected at least {list(cls.REQUIRED)}.")
        for key in ("train_size", "proj_dim", "shard_size"):
            checked_count(content[key], key)
        if content["feature_dtype"] not in FEATURE_DTYPES:
            raise ValueError(
                f"`feature_dtype` is {content['feature_dtype']!r}; expected one of {sorted(FEATURE_DTYPES)}."
            )
        return content


def checked_model_id(model_id: Any) -> int:
    """`model_id` as an `int` ≥ 0. Raises `ValueError` if it is not one."""
    if isinstance(model_id, bool) or not hasattr(model_id, "__index__") or operator.index(model_id) < 0:
        raise ValueError(f"`model_id` is {model_id!r}; expected an integer ≥ 0, a different one for every checkpoint.")
    return operator.index(model_id)


def checked_count(value: Any, name: str) -> int:
    """`value` as an `int` ≥ 1. Raises `ValueError` if it is not one."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise ValueError(f"`{name}` is {value!r}; expected an integer of at least 1.")
    return operator.index(value)
