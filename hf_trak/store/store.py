"""The feature store: projected gradients of train examples and targets, on disk, shared by any number of processes.

    <output_dir>/
      trak_config.json                                         everything that defines the features
      checkpoint-<model_id>.json                               says that this checkpoint belongs to the store
      checkpoint-<model_id>/
        checkpoint.json                                        fingerprint and source of the weights
        train-<shard>-of-<shards>.safetensors                  `grads` (rows, k), `out_to_loss` (rows,)
        gram.safetensors                                       XᵀX (k, k), its trace
      calibration.json                                         the method to take, see `hf_trak.featurize.calibrating`
      experiments/<name>/
        experiment.json                                        number of targets, fingerprint of the target dataset
        checkpoint-<model_id>/targets-<shard>-of-<shards>.safetensors

A shard that exists is complete and valid, so a killed run is finished by computing the missing shards. Several
processes may write the same shard: they write the same bytes, and renaming is atomic.

Every file records what it was computed from (the configuration, the weights, and the id of the checkpoint, which the
random matrix depends on) and carries a checksum of its content. A file that is damaged, or belongs elsewhere, is
refused with an error that names it. The files `checkpoint-<model_id>.json` reveal a checkpoint that has vanished.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trak.errors import ConfigMismatchError, NonFiniteError, StoreError
from hf_trak.store.atomic import remove_stale_temporaries
from hf_trak.store.checkpoint_records import (
    CODE_BITS,
    FEATURE_DTYPES,
    Comparison,
    StoreRecords,
    checked_count,
    checked_model_id,
    config_changes,
    normalized,
    read_config,
)
from hf_trak.store.codes import CodeFormat, Rotation
from hf_trak.store.sealed import content_digest, create_sealed, read_sealed, unsealed
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import Identity, ShardPlan, TensorSpec, read_header, read_tensors, write_tensors

GRAM_FILE = "gram.safetensors"
CALIBRATION_FILE = "calibration.json"

_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Gram:
    """XᵀX over all `n` train rows of one checkpoint, `matrix` (k, k), and its trace.

    If it is estimated from a sample, `sample` is the number of its rows, and `spread` (k, k) shows the error, see
    `hf_trak.scores.gram_sample`.
    """

    matrix: Tensor
    trace: float
    n: int
    sample: int | None = None
    spread: Tensor | None = None


def check_gram(gram: Tensor, n: int, width: int, n_rows: int, model_id: int) -> None:
    """Check that a matrix may be the XᵀX of all rows of a store.

    Args:
        gram: the matrix.
        n: number of rows that it sums over.
        width: k.
        n_rows: number of rows of the store.
        model_id: the checkpoint, for the error message.

    Raises:
        ValueError: shape, dtype or `n` do not fit the store.
        NonFiniteError: an entry is NaN or infinite.
    """
    if tuple(gram.shape) != (width, width) or gram.dtype not in _DTYPES or n != n_rows:
        raise ValueError(
            f"The Gram matrix is {gram.dtype} {tuple(gram.shape)} over {n} rows. Expected float32 or float64 "
            f"{(width, width)} over {n_rows} rows: half precision overflows, and a part of the rows does not give XᵀX."
        )
    if not bool(torch.isfinite(gram).all()):
        raise NonFiniteError(
            f"The Gram matrix of model id {model_id} has NaN or infinite entries. Expected finite ones. Inspect the "
            "weights of this checkpoint, or compute features in float32."
        )


def read_gram_file(path: Path, width: int, n: int, identity: Identity) -> Gram:
    """Read a matrix.

    Args:
        path: the file.
        width: k.
        n: number of rows that it has to sum over.
        identity: what it has to be computed from.

    Raises:
        StoreError: the file is missing or damaged, or was computed from something else.
    """
    specs = {"gram": TensorSpec((width, width), _DTYPES)}
    header = read_header(path, identity, specs, n=n)
    saved, sample = header.get("trace"), header.get("sample")
    if sample is not None:
        specs |= {"spread": TensorSpec((width, width), _DTYPES)}
        if type(sample) is not int or not 0 < sample <= n:
            raise StoreError(
                f"{path} says that it was estimated from {sample!r} rows. Expected a number up to {n}. Delete this "
                "file and run the same command again."
            )
    tensors = read_tensors(path, identity, specs, n=n)
    matrix = tensors["gram"]
    found = _trace(matrix)
    # The bound is that of a sum of k terms in another order; both sums are taken in float64.
    if not isinstance(saved, float) or not math.isclose(saved, found, rel_tol=width * 2.0**-52, abs_tol=0.0):
        raise StoreError(
            f"{path} says that the trace is {saved!r}; its matrix has {found!r}. Delete this file and run the same "
            "command again."
        )
    return Gram(matrix, saved, n, sample, tensors.get("spread"))


def _trace(matrix: Tensor) -> float:
    return float(matrix.diagonal().sum(dtype=torch.float64))


_FEATURIZE_REST = "Featurize the remaining rows first."


class FeatureStore(StoreRecords):
    """The features of one configuration on disk. The module's docstring lists the files.

    Use [`FeatureStore.open`] or [`FeatureStore.load`] rather than the constructor.
    """

    CONFIG_FILE: ClassVar[str] = "trak_config.json"

    @classmethod
    def open(
        cls, output_dir: str | Path, config: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None
    ) -> "FeatureStore":
        """Open a store, and create it unless it exists.

        Args:
            output_dir (`str` or `Path`):
                Directory of the store.
            config (`Mapping[str, Any]`):
                Everything that defines the features, as plain JSON. `train_size`, `proj_dim`, `feature_dtype` (a key
                of `FEATURE_DTYPES`) and `shard_size` are required; `format_version` is added.
            compare (`Mapping[str, Comparison]`, *optional*):
                By key, functions that compare values which need not be equal. They are called only where the values
                are not.

        Raises:
            ValueError: the configuration lacks a key, or holds a value that is not plain JSON.
            ConfigMismatchError: the store was made with another configuration; it is left as it was.
            StoreError: the saved configuration cannot be read, or `output_dir` is a file.
        """
        output_dir = Path(output_dir)
        if output_dir.is_file():
            raise StoreError(
                f"`output_dir` is {str(output_dir)!r}, which is a file. Expected a directory, which need not exist. "
                "Name another one."
            )
        given = normalized(config)
        path = output_dir / cls.CONFIG_FILE
        if not path.exists():
            create_sealed(path, given)
        store = cls.load(output_dir)
        store.require_same(given, compare)
        return store

    @classmethod
    def load(cls, output_dir: str | Path) -> "FeatureStore":
        """Open a store that exists.

        Args:
            output_dir (`str` or `Path`):
                Directory of the store.

        Raises:
            IncompleteStoreError: there is none in this directory.
            StoreError: its configuration cannot be read, or is of another format version.
        """
        output_dir = Path(output_dir)
        return cls(output_dir, read_config(output_dir / cls.CONFIG_FILE))

    # -- the configuration -------------------------------------------------------------------------------------------

    def require_same(self, config: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None) -> None:
        """Compare another configuration with the saved one, in the keys that define the features.

        Args:
            config, compare: see [`~FeatureStore.open`].

        Raises:
            ConfigMismatchError: they differ; the message shows both.
        """
        if changes := self.changes(config, compare):
            raise ConfigMismatchError(
                f"{self.output_dir / self.CONFIG_FILE} was saved with another configuration than the one given:\n  "
                + "\n  ".join(changes)
                + "\nExpected the saved values. Use them, or another output directory."
            )

    def changes(self, config: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None) -> list[str]:
        """List what [`~FeatureStore.require_same`] would report, one line for each difference."""
        return config_changes(self._config, config, compare)

    @property
    def train_size(self) -> int:
        """Return the number of training rows."""
        return int(self._config["train_size"])

    @property
    def proj_dim(self) -> int:
        """Return the number of columns of the features, k."""
        return int(self._config["proj_dim"])

    @property
    def feature_dtype(self) -> torch.dtype:
        """Return the storage dtype of floating-point features. In a store with codes it is that of the targets'
        features, too."""
        return FEATURE_DTYPES.get(self._config["feature_dtype"], torch.float32)

    @property
    def code_format(self) -> CodeFormat | None:
        """Return the form of the codes of training features, or `None` for floating-point features."""
        bits = CODE_BITS.get(self._config["feature_dtype"])
        return None if bits is None else CodeFormat(bits, self.proj_dim)

    def rotation(self, model_id: int) -> Rotation | None:
        """Return the rotation of all features of a checkpoint in a store with codes, or `None` for floating-point
        features."""
        if self.code_format is None:
            return None
        return Rotation(self.proj_dim, self._config["seed"], checked_model_id(model_id))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def identity(self, model_id: int) -> dict[str, str | int]:
        """Return what every file of a registered checkpoint is computed from: weights, configuration, and id."""
        fingerprint = self.checkpoint_info(model_id)["fingerprint"]
        return {"checkpoint": fingerprint, "config": self.config_hash, "model_id": checked_model_id(model_id)}

    def train(self, model_id: int) -> ShardSet:
        """Return the features of the train set under one checkpoint.

        Args:
            model_id (`int`):
                Id of a registered checkpoint.

        Returns:
            [`~hf_trak.store.shard_set.ShardSet`]: shards of the feature matrix `(train_size, proj_dim)`. Some
            may not be written yet.

        Raises:
            IncompleteStoreError: the checkpoint is not registered.
        """
        plan = ShardPlan(self.train_size, self._config["shard_size"])
        identity = {**self.identity(model_id), "kind": "train"}
        rotation = self.rotation(model_id)
        return self.shard_set(self.checkpoint_dir(model_id), "train", plan, identity, rotation, self.code_format)

    def shard_set(
        self,
        directory: Path,
        prefix: str,
        plan: ShardPlan,
        identity: Identity,
        rotation: Rotation | None = None,
        code_format: CodeFormat | None = None,
    ) -> ShardSet:
        """Return the shards of one feature matrix of this store; see [`ShardSet`] for the arguments.

        Temporary files that dead processes have left in the directory are removed.
        """
        self.tidy(directory)
        return ShardSet(directory, prefix, plan, self.proj_dim, self.feature_dtype, identity, rotation, code_format)

    def tidy(self, directory: Path) -> None:
        """Remove temporary files that dead processes have left in a directory, which need not exist."""
        remove_stale_temporaries(directory)

    def curvature_dir(self, model_id: int, identity: Mapping[str, Any]) -> Path:
        """Return the directory of the curvature of one checkpoint that has this identity, or is to be fitted with
        it."""
        return self.output_dir / "curvature" / str(checked_model_id(model_id))

    def solver_path(self, model_id: int, name: str) -> Path:
        """Return the path of a file that a solver keeps for one checkpoint, see `hf_trak.store.solver_files`."""
        return self.output_dir / f"checkpoint-{checked_model_id(model_id)}" / name

    def read_calibration(self) -> dict[str, Any] | None:
        """Read the choice of a method for this store, see `hf_trak.featurize.calibrating`; `None` if there is none.

        Raises:
            StoreError: the file is damaged.
        """
        path = self.output_dir / CALIBRATION_FILE
        return unsealed(read_sealed(path, "Delete it, and call `calibrate` again.")) if path.exists() else None

    # -- experiments -------------------------------------------------------------------------------------------------

    def targets(
        self,
        experiment: str,
        model_id: int,
        n_targets: int,
        dataset_fingerprint: str,
        extra: Mapping[str, Any] | None = None,
        compare: Mapping[str, Comparison] | None = None,
    ) -> ShardSet:
        """Return the features `(n_targets, proj_dim)` of an experiment's targets under one checkpoint.

        The first call creates the experiment.

        Args:
            experiment (`str`):
                Name of the experiment, see `hf_trak.store.atomic.safe_name`.
            model_id (`int`):
                Id of a registered checkpoint.
            n_targets (`int`):
                Number of targets.
            dataset_fingerprint (`str`):
                Identity of the target dataset.
            extra (`Mapping[str, Any]`, *optional*):
                Further plain JSON that has to be the same whenever the experiment is used.
            compare (`Mapping[str, Comparison]`, *optional*):
                See [`~FeatureStore.open`].

        Raises:
            ValueError: the name is not a plain name, or `n_targets` is less than 1.
            ConfigMismatchError: the experiment exists with other values; it is left as it was.
            IncompleteStoreError: the checkpoint is not registered.
        """
        self.experiment_dir(experiment)  # a plain name, or an error
        checked_count(n_targets, "n_targets")
        self.identity(model_id)  # registered, or an error before anything is created
        content = {**(extra or {}), "dataset_fingerprint": dataset_fingerprint, "num_targets": n_targets}
        self._register_experiment(experiment, content, compare)
        return self.saved_targets(experiment, model_id)

    def saved_targets(self, experiment: str, model_id: int) -> ShardSet:
        """Return the features of the targets of an experiment that exists.

        Raises:
            IncompleteStoreError: there is no such experiment, or the checkpoint is not registered.
            StoreError: what is recorded of either is damaged.
        """
        info = self.experiment_info(experiment)
        plan = ShardPlan(self._target_count(experiment, info), self._config["shard_size"])
        identity = {
            **self.identity(model_id),
            "dataset_fingerprint": str(info.get("dataset_fingerprint")),
            "experiment": content_digest({**info, "name": experiment}),
            "kind": "targets",
            "num_targets": plan.n_rows,
        }
        directory = self.experiment_dir(experiment) / f"checkpoint-{model_id}"
        return self.shard_set(directory, "targets", plan, identity, self.rotation(model_id))

    # -- the Gram matrix ---------------------------------------------------------------------------------------------

    def write_gram(
        self, model_id: int, gram: Tensor, n: int, sample: int | None = None, spread: Tensor | None = None
    ) -> None:
        """Save XᵀX of a checkpoint whose train shards are all written.

        Args:
            model_id (`int`):
                Id of a registered checkpoint.
            gram (`torch.Tensor` of shape `(proj_dim, proj_dim)`):
                The matrix, float32 or float64.
            n (`int`):
                Number of rows that it sums over.
            sample, spread (*optional*):
                As in [`Gram`], if it is estimated from a sample.

        Raises:
            ValueError: shape, dtype or `n` do not fit the store.
            NonFiniteError: an entry is NaN or infinite.
            IncompleteStoreError: train shards are missing.
        """
        check_gram(gram, n, self.proj_dim, self.train_size, model_id)
        self.train(model_id).require_complete(_FEATURIZE_REST)
        identity = self._gram_identity(model_id)
        tensors, facts = {"gram": gram}, {"n": n, "trace": _trace(gram)}
        if sample is not None and spread is not None:
            check_gram(spread, n, self.proj_dim, self.train_size, model_id)
            tensors, facts = {**tensors, "spread": spread}, {**facts, "sample": sample}
        write_tensors(self._gram_path(model_id), tensors, identity, **facts)

    def read_gram(self, model_id: int) -> Gram | None:
        """Read the saved XᵀX.

        Returns:
            [`~hf_trak.store.store.Gram`] or `None`: the matrix, its trace and its number of rows; `None` if none
            is saved.

        Raises:
            StoreError: the file is invalid, or was computed from other rows than those that are there now.
        """
        path = self._gram_path(model_id)
        if not path.exists():
            return None
        self.train(model_id).require_complete(_FEATURIZE_REST)
        return read_gram_file(path, self.proj_dim, self.train_size, self._gram_identity(model_id))

    def _gram_path(self, model_id: int) -> Path:
        return self.checkpoint_dir(model_id) / GRAM_FILE

    def _gram_identity(self, model_id: int) -> dict[str, str | int]:
        return {**self.identity(model_id), "content": self.train(model_id).content_hash, "kind": "gram"}
