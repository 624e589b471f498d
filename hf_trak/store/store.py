"""The feature store: projected gradients of train examples and targets, on disk, shared by any number of processes.

    <output_dir>/
      trak_config.json                                         everything that defines the features
      checkpoint-<model_id>.json                               that this checkpoint belongs to the store
      checkpoint-<model_id>/
        checkpoint.json                                        fingerprint and source of the weights
        train-<shard>-of-<shards>.safetensors                  `grads` (rows, k), `out_to_loss` (rows,)
        gram.safetensors                                       XᵀX (k, k), its trace
      experiments/<name>/
        experiment.json                                        number of targets, fingerprint of the target dataset
        checkpoint-<model_id>/targets-<shard>-of-<shards>.safetensors

A shard that exists is complete and valid, so a killed run is finished by computing the shards that are missing.
Several processes may write the same shard: they write the same bytes, and renaming is atomic.

Every file says what it was computed from (the configuration, the weights, the id of the checkpoint, which the random
matrix depends on) and carries a checksum of all that it says. So a file that is damaged, or that belongs elsewhere, is
refused by its name. The files `checkpoint-<model_id>.json` are there to miss a checkpoint that has vanished.

Stores of format 1 have neither checksums of their JSON files nor ids in the identities of their shards. They are read
and finished in their own format, with a warning; see [`FeatureStore.unknown`].
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trak.errors import (
    ConfigMismatchError,
    IncompleteStoreError,
    NonFiniteError,
    StoreError,
)
from hf_trak.store.atomic import create_bytes, differing, json_bytes, remove_stale_temporaries, safe_name
from hf_trak.store.checkpoint_records import (
    CheckpointRecords,
    checked_count,
    checked_model_id,
    encoded,
    read_record,
)
from hf_trak.store.sealed import content_digest, read_sealed, sealed_bytes
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import (
    FORMAT_VERSION,
    READABLE_VERSIONS,
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

MAX_SHARDS = 1 << 20
"""Shards that a store may have, which bounds the time to look at all of them."""

Comparison = Callable[[Any, Any], list[str]]
"""`(saved, given) -> lines`, one line per difference that matters."""

_RESTORE_CONFIG = (
    "It is the configuration of the whole store: restore it from a copy, or featurize in another output directory."
)
_warned_directories: set[Path] = set()


@dataclass(frozen=True)
class Gram:
    """XᵀX over all `n` train rows of one checkpoint, `matrix` (k, k), and its trace."""

    matrix: Tensor
    trace: float
    n: int


class FeatureStore:
    """The store of one configuration: see the module's docstring for the files."""

    CONFIG_FILE: ClassVar[str] = "trak_config.json"
    INFORMATIONAL: ClassVar[tuple[str, ...]] = ("hf_trak_version", "model_name", "model_revision", "versions")
    """Keys of the configuration that are saved for the reader, but neither compared nor hashed."""
    REQUIRED: ClassVar[tuple[str, ...]] = ("train_size", "proj_dim", "feature_dtype", "shard_size")

    def __init__(self, output_dir: Path, config: dict[str, Any]) -> None:
        """Use [`~FeatureStore.open`] or [`~FeatureStore.load`]."""
        self.output_dir = output_dir
        self._config = config

    @classmethod
    def open(
        cls,
        output_dir: str | Path,
        config: Mapping[str, Any],
        first_format: Callable[[], Mapping[str, Any]] | None = None,
        compare: Mapping[str, Comparison] | None = None,
    ) -> "FeatureStore":
        """Open a store, creating it if there is none.

        Args:
            output_dir: its directory.
            config: plain JSON, everything that defines the features. Needs `train_size`, `proj_dim`, `feature_dtype`
                (a key of `FEATURE_DTYPES`) and `shard_size`; `format_version` is added.
            first_format: gives the configuration as a store of format 1 describes the same features; called for such
                a store only. By default `config` without the keys that the store lacks.
            compare: how to compare the values of keys that need not be equal. It is asked only where they are not.

        Raises:
            ValueError: the configuration lacks a key, or holds a value that is not plain JSON.
            ConfigMismatchError: the store was made with another configuration; it is left as it was.
            StoreError: the saved configuration cannot be read.
        """
        output_dir = Path(output_dir)
        given = cls._normalize(config)
        path = output_dir / cls.CONFIG_FILE
        if not path.exists():
            create_bytes(path, sealed_bytes(given))
        store = cls.load(output_dir)
        store.require_same(given if store.version > 1 or first_format is None else first_format(), compare)
        return store

    def require_same(self, config: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None) -> None:
        """Compare what defines features with the saved configuration.

        Args:
            config, compare: see [`~FeatureStore.open`].

        Raises:
            ConfigMismatchError: they differ; shows both.
        """
        if changes := self.changes(config, compare):
            raise ConfigMismatchError(
                f"{self.output_dir / self.CONFIG_FILE} was saved with another configuration than the one given:\n  "
                + "\n  ".join(changes)
                + "\nUse the saved values, or another output directory."
            )

    def changes(self, config: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None) -> list[str]:
        """What differs from the saved configuration, one line for each key; see [`~FeatureStore.require_same`]."""
        saved, given = self._defining(self._config), self._defining(self._normalize(config))
        if self.version == 1:
            given = {key: value for key, value in given.items() if key in saved}
        given["format_version"] = saved["format_version"]
        lines: list[str] = []
        for key, comparison in (compare or {}).items():
            if key in saved and key in given and saved[key] != given[key]:
                lines += comparison(saved[key], given[key])
                given[key] = saved[key]
        return [*differing(saved, given), *lines]

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
            config = read_sealed(path, _RESTORE_CONFIG)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"{output_dir} holds no feature store: {path.name} is missing. Expected the output directory of a "
                "run. Featurize first."
            ) from error
        if config.get("format_version") not in READABLE_VERSIONS:
            raise StoreError(
                f"{path} has format version {config.get('format_version')!r}; this version of hf_trak reads "
                f"{FORMAT_VERSION}. Use the version of hf_trak that wrote it, or another output directory."
            )
        try:
            config = cls._normalize(config)
        except ValueError as error:
            raise StoreError(f"{path} is not a valid configuration: {error}") from error
        store = cls(output_dir, config)
        store._warn_if_old()
        return store

    def _warn_if_old(self) -> None:
        """Say once per directory what a store of format 1 cannot notice."""
        if self.version > 1 or self.output_dir.absolute() in _warned_directories:
            return
        _warned_directories.add(self.output_dir.absolute())
        logger.warning(
            "%s is of format 1. Its files are not protected against every kind of damage, and it does not record %s, "
            "so that a change of those is not noticed. `hf-trak upgrade --output_dir %s` (or "
            "`TrakAttributor.upgrade_store()`) checks it against model and rows, and brings it up to date.",
            self.output_dir,
            ", ".join(self.unknown),
            self.output_dir,
        )

    @property
    def version(self) -> int:
        """Format version of the store, in which its files are written."""
        return int(self._config["format_version"])

    @property
    def unknown(self) -> tuple[str, ...]:
        """What the identities of this store do not say, because it is of an older format."""
        return _UNKNOWN_IN_FORMAT_1 if self.version == 1 else ()

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the saved configuration."""
        return dict(self._config)

    @cached_property
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
            fingerprint: of the weights, see `hf_trak.weights.checkpoints.fingerprint_state_dict`.
            source: where they came from; saved for the reader, not compared.

        Raises:
            CheckpointMismatchError: the id is tied to other weights; the store is left as it was.
        """
        self._records.register(model_id, fingerprint, source)

    @property
    def model_ids(self) -> list[int]:
        """Ids of all registered checkpoints, ascending.

        Raises:
            StoreError: a checkpoint that belongs to the store has vanished in part or as a whole: leaving it out of
                an average would change every score.
        """
        return self._records.ids()

    def checkpoint_info(self, model_id: int) -> dict[str, Any]:
        """What is known of a checkpoint: `model_id`, `fingerprint`, `source`, `config_hash`.

        Raises:
            IncompleteStoreError: no checkpoint of this id is registered.
            StoreError: it was registered under another configuration.
        """
        return self._records.info(model_id)

    @property
    def _records(self) -> CheckpointRecords:
        return CheckpointRecords(self.output_dir, self.config_hash, self.version)

    def encoded(self, content: Mapping[str, Any]) -> bytes:
        """A JSON file of this store, in its format."""
        return encoded(content, self.version)

    # features

    def train(self, model_id: int) -> ShardSet:
        """The features of the train set under one checkpoint.

        Raises:
            IncompleteStoreError: the checkpoint is not registered.
        """
        plan = ShardPlan(self._config["train_size"], self._config["shard_size"])
        identity = {**self.identity(model_id), "kind": "train"}
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
        compare: Mapping[str, Comparison] | None = None,
    ) -> ShardSet:
        """The features of an experiment's targets under one checkpoint; the first call creates the experiment.

        Args:
            experiment: its name, see `hf_trak.store.atomic.safe_name`.
            model_id: a registered checkpoint.
            n_targets: number of targets.
            dataset_fingerprint: of the target dataset.
            extra: further plain JSON that has to be the same whenever the experiment is used.
            compare: as in [`~FeatureStore.open`].

        Raises:
            ValueError: the name is not a plain name, or `n_targets` is less than 1.
            ConfigMismatchError: the experiment exists with other values; it is left as it was.
            IncompleteStoreError: the checkpoint is not registered.
        """
        directory = self.experiment_dir(experiment)
        checked_count(n_targets, "n_targets")
        self.identity(model_id)  # registered, or an error before anything is created
        given = {**(extra or {}), "dataset_fingerprint": dataset_fingerprint, "num_targets": n_targets}
        given = given if self.version == 1 else {**given, "name": experiment}
        path = directory / "experiment.json"
        if path.exists() or not create_bytes(path, self.encoded(given)):
            saved = read_record(path, self.version)
            if self.version == 1:
                given = {key: value for key, value in given.items() if key in saved}
            lines: list[str] = []
            for key, comparison in (compare or {}).items():
                if key in saved and key in given and saved[key] != given[key]:
                    lines += comparison(saved[key], given[key])
                    given[key] = saved[key]
            changes = [*differing(saved, given), *lines]
            if changes:
                raise ConfigMismatchError(
                    f"Experiment {experiment!r} exists in {path} with other values than those given:\n  "
                    + "\n  ".join(changes)
                    + "\nUse another experiment name for other targets."
                )
        return self.saved_targets(experiment, model_id)

    def saved_targets(self, experiment: str, model_id: int) -> ShardSet:
        """The features of the targets of an experiment that exists.

        Raises:
            IncompleteStoreError: there is no such experiment, or the checkpoint is not registered.
            StoreError: what is saved of either is damaged.
        """
        info = self.experiment_info(experiment)
        try:
            plan = ShardPlan(checked_count(info.get("num_targets"), "num_targets"), self._config["shard_size"])
        except ValueError as error:
            raise StoreError(
                f"{self.experiment_dir(experiment) / 'experiment.json'} is damaged: {error} Delete the directory of "
                "this experiment and attribute again."
            ) from error
        identity = {
            **self.identity(model_id),
            "dataset_fingerprint": str(info.get("dataset_fingerprint")),
            "kind": "targets",
            "num_targets": plan.n_rows,
        }
        if self.version > 1:
            identity["experiment"] = content_digest({**info, "name": experiment})
        directory = self.experiment_dir(experiment) / f"checkpoint-{model_id}"
        return self._shard_set(directory, "targets", plan, identity)

    @property
    def experiments(self) -> list[str]:
        """Names of all experiments."""
        return sorted(path.parent.name for path in self.output_dir.glob("experiments/*/experiment.json"))

    def experiment_info(self, experiment: str) -> dict[str, Any]:
        """What is saved of an experiment: `num_targets`, `dataset_fingerprint`, and what was given as `extra`.

        Raises:
            IncompleteStoreError: there is no such experiment.
            StoreError: the file is damaged, or that of another experiment.
        """
        path = self.experiment_dir(experiment) / "experiment.json"
        try:
            info = read_record(path, self.version)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"Experiment {experiment!r} is not in {self.output_dir}, which has {self.experiments or 'none'}. "
                "Featurize its targets first."
            ) from error
        if self.version > 1 and (name := info.pop("name", None)) != experiment:
            raise StoreError(
                f"{path} is that of experiment {name!r}; expected {experiment!r}, as its directory is "
                "called. Give the directory its old name, or delete it and attribute again."
            )
        return info

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
        identity = self._gram_identity(model_id)
        write_tensors(self._gram_path(model_id), {"gram": gram}, identity, self.version, n=n, trace=trace)

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
        matrix = read_tensors(path, identity, specs, version=self.version, n=size)["gram"]
        trace = read_header(path, identity, specs, self.version, n=size).get("trace")
        found = float(matrix.diagonal().sum(dtype=torch.float64))
        # In format 1 nothing but this comparison protects the number, from which λ is derived. The bound is that of
        # a sum of k terms in another order; both sums are taken in float64.
        if not isinstance(trace, float) or not math.isclose(trace, found, rel_tol=k * 2.0**-52, abs_tol=0.0):
            raise StoreError(
                f"{path} says that the trace is {trace!r}; its matrix has {found!r}. Delete this file and run the "
                "same command again."
            )
        return Gram(matrix, trace, size)

    def _gram_path(self, model_id: int) -> Path:
        return self.checkpoint_dir(model_id) / "gram.safetensors"

    def _gram_identity(self, model_id: int) -> dict[str, str | int]:
        return {**self.identity(model_id), "content": self.train(model_id).content_hash, "kind": "gram"}

    def identity(self, model_id: int) -> dict[str, str | int]:
        """What every file of a checkpoint is computed from: the weights, the configuration, and the id."""
        identity = {"checkpoint": self.checkpoint_info(model_id)["fingerprint"], "config": self.config_hash}
        return identity if self.version == 1 else {**identity, "model_id": checked_model_id(model_id)}

    def _shard_set(self, directory: Path, prefix: str, plan: ShardPlan, identity: Identity) -> ShardSet:
        if directory.is_dir():
            remove_stale_temporaries(directory)
        return ShardSet(directory, prefix, plan, self._config["proj_dim"], self.feature_dtype, identity, self.version)

    @classmethod
    def _defining(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key not in cls.INFORMATIONAL}

    @classmethod
    def _normalize(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration as JSON would give it back, checked, without its checksum."""
        try:
            content = json.loads(json_bytes({"format_version": FORMAT_VERSION, **config}))
            content.pop("checksum", None)
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
        shards = len(ShardPlan(content["train_size"], content["shard_size"]))
        if shards > MAX_SHARDS:
            raise ValueError(
                f"`train_size` {content['train_size']} in shards of {content['shard_size']} rows makes {shards} "
                f"files; expected at most {MAX_SHARDS}. Choose a larger `shard_size`."
            )
        return content


_UNKNOWN_IN_FORMAT_1 = (
    "the id of a checkpoint in its shards",
    "settings of the model besides its weights",
    "the code of functions",
    "how rows are collated",
)
