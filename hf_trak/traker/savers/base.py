"""The contract of a saver of the seed API: where `TRAKer` keeps gradients, features and scores."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trak.errors import CheckpointMismatchError, HfTrakError, IncompleteStoreError
from hf_trak.store.atomic import explained
from hf_trak.store.shard_set import UNDERFLOW_TOLERANCE, cast_rows, check_finite


class ModelIDException(HfTrakError, ValueError):  # noqa: N818  # the seeds' name
    """A `model_id` is registered already."""


class AbstractSaver(ABC):
    """Keeps the results of a `TRAKer`.

    The abstract methods are those of the seeds. `TRAKer` itself calls the methods below them, which work on
    `current_store`, a dictionary of arrays (NumPy or torch) that a subclass fills:

    | key | shape | |
    |---|---|---|
    | `grads` | (n, k) | projected gradients of the train set under the current model id |
    | `out_to_loss` | (n,) or (n, 1) | its output-to-loss gradients |
    | `features` | (n, k) | X (XᵀX + λI)⁻¹ |
    | `is_featurized` | (n,) or (n, 1) | 1 where a row has been written |
    | `<experiment>_grads` | (m, k) | projected gradients of the targets |
    | `<experiment>_scores` | (n, m) | scores |

    Attributes:
        model_ids: what is known of each registered model id, by id.
        experiments: what is known of each experiment, by name; at least `num_targets`.
        current_model_id: the model id that `current_store` belongs to.
        checkpoint_fingerprint: fingerprint of the weights that the next model id is registered with.
    """

    def __init__(
        self,
        save_dir: Path | str,
        metadata: Iterable[Any],
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        """
        Args:
            save_dir: directory of everything that is saved; created if it is not there.
            metadata: mapping of all that defines the features, plain JSON.
            load_from_save_dir: whether model ids that the directory already holds are continued. The metadata is
                compared with what the directory holds in either case.
            logging_level: of this saver's logger.
            use_half_precision: store features as float16 rather than float32.
        """
        self.save_dir = Path(save_dir)
        with explained(self.save_dir):
            self.save_dir.mkdir(parents=True, exist_ok=True)
        self.metadata: dict[str, Any] = dict(metadata)
        self.load_from_save_dir = load_from_save_dir
        self.use_half_precision = use_half_precision
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self.logger.setLevel(logging_level)
        self.model_ids: dict[int, dict[str, Any]] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.current_model_id: int | None = None
        self.current_experiment: str | None = None
        self.current_store: dict[str, Any] = {}
        self.checkpoint_fingerprint: str | None = None
        self._warned = False
        self._target_masks: dict[tuple[int | None, str], np.ndarray] = {}

    @abstractmethod
    def register_model_id(self, model_id: int, _allow_featurizing_already_registered: bool = False) -> None:
        """Create the metadata and the store of a new model id, and make it the current one.

        Raises:
            ModelIDException: it is registered already, and continuing it is not allowed.
        """

    @abstractmethod
    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Write what is known of the current model id to disk."""

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Create the arrays of the train set under a model id."""

    @abstractmethod
    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Create the arrays of an experiment's targets under a model id, or open them if they exist.

        Raises:
            ConfigMismatchError: the experiment exists with another number of targets.
        """

    @abstractmethod
    def load_current_store(self, model_id: int, exp_name: str | None = None, exp_num_targets: int | None = -1) -> None:
        """Fill `current_store` with the arrays of a model id, and of an experiment if one is named."""

    @abstractmethod
    def save_scores(self, exp_name: str) -> None:
        """Write the scores of an experiment, `current_store["<exp_name>_scores"]`, to disk."""

    @abstractmethod
    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the gradients of the train set under a model id, or those of all its targets."""

    # What TRAKer calls, over the arrays in `current_store`

    def open_checkpoint(self, model_id: int, fingerprint: str, allow_registered: bool = False) -> None:
        """Make a model id the current one, registering it if it is new.

        Args:
            model_id: the id.
            fingerprint: of the weights that will be used under this id.
            allow_registered: continue an id that the directory holds although `load_from_save_dir` is off.

        Raises:
            CheckpointMismatchError: the id is tied to other weights.
            ModelIDException: the directory holds the id, and it may not be continued.
        """
        self.checkpoint_fingerprint = fingerprint
        if model_id in self.model_ids:
            self.verify_checkpoint(model_id, fingerprint)
            self.load_current_store(model_id)
        else:
            self.register_model_id(model_id, allow_registered or self.load_from_save_dir)
            self.model_ids.setdefault(model_id, {}).setdefault("fingerprint", fingerprint)
        self.current_model_id = model_id
        self.current_experiment = None

    def verify_checkpoint(self, model_id: int, fingerprint: str) -> None:
        """Compare weights with those that a registered model id is tied to; ties an id that is not yet tied to any.

        Raises:
            IncompleteStoreError: the id is not registered.
            CheckpointMismatchError: the weights differ.
        """
        if model_id not in self.model_ids:
            raise IncompleteStoreError(
                f"Model id {model_id!r} is not in {self.save_dir}, which has {sorted(self.model_ids) or 'none'}. "
                "Expected one that has been featurized. Call `load_checkpoint`, `featurize` and `finalize_features` "
                "first."
            )
        saved = self.model_ids[model_id].get("fingerprint")
        if saved is None:
            self.model_ids[model_id]["fingerprint"] = fingerprint
        elif saved != fingerprint:
            raise mismatched_weights(self.save_dir, model_id, saved, fingerprint)

    def open_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Make an experiment under a registered model id the current one, see `init_experiment`."""
        self.init_experiment(exp_name, num_targets, model_id)
        self.current_model_id = model_id
        self.current_experiment = exp_name

    def featurized(self, rows: Sequence[int] | None = None) -> np.ndarray:
        """Which train rows of the current model id have been written, one bool per row; `None` means all rows."""
        mask = np.asarray(self.current_store["is_featurized"]).reshape(-1)
        return (mask if rows is None else mask[np.asarray(rows)]) == 1

    def write_rows(self, rows: Sequence[int], grads: Tensor, out_to_loss: Tensor) -> None:
        """Save train rows of the current model id. A row counts as featurized only after its values are written.

        Args:
            rows: their indices.
            grads: `(len(rows), k)` in float32; see `to_storage` for what may be wrong with it.
            out_to_loss: `(len(rows),)`.
        """
        store, index = self.current_store, np.asarray(rows)
        grads = self.to_storage(rows, grads)
        check_finite(out_to_loss, rows, "output-to-loss gradient")
        out_to_loss = out_to_loss.detach().to("cpu", torch.float32)
        store["grads"][index] = grads
        store["out_to_loss"][index] = out_to_loss.reshape(-1, *store["out_to_loss"].shape[1:])
        self._rows_written(index, "grads", "out_to_loss")
        store["is_featurized"][index] = 1
        self._rows_written(index, "is_featurized")

    def read_grads(self) -> Tensor:
        """Projected gradients of the train set under the current model id, `(n, k)`.

        Raises:
            IncompleteStoreError: they have been deleted.
        """
        if self.current_store.get("grads") is None:
            raise deleted_grads(self.save_dir, self.current_model_id)
        return torch.as_tensor(self.current_store["grads"])

    def finalized_with(self, model_id: int) -> Mapping[str, Any] | None:
        """The settings with which the features of a model id were finalized, or `None` if they were not."""
        info = self.model_ids.get(model_id, {})
        return info.get("finalized_with", {}) if info.get("finalized") else None

    def write_features(self, features: Tensor, settings: Mapping[str, Any]) -> None:
        """Save X (XᵀX + λI)⁻¹ `(n, k)` of the current model id, and the settings that it was computed with."""
        info = self.model_ids[self.require_model_id()]
        features = self.to_storage(range(len(features)), features, "feature")
        if info.get("finalized"):
            info["finalized"] = 0
            self.serialize_current_model_id_metadata()
        self.current_store["features"][:] = features
        self._rows_written(np.arange(len(features)), "features")
        info.update(featurized=1, finalized=1, finalized_with=dict(settings))
        self.serialize_current_model_id_metadata()

    def read_features(self) -> tuple[Tensor, Tensor]:
        """Features `(n, k)` and output-to-loss gradients `(n,)` of the current model id."""
        store = self.current_store
        return torch.as_tensor(store["features"]), torch.as_tensor(store["out_to_loss"]).reshape(-1)

    def scored(self, rows: Sequence[int] | None = None) -> np.ndarray:
        """Which targets of the current experiment have been written under the current model id, one bool per
        target.
        """
        mask = np.asarray(self._target_mask()).reshape(-1)
        return (mask if rows is None else mask[np.asarray(rows)]) == 1

    def _target_mask(self) -> Any:
        """The marks of the current experiment: in the store if it has them, in memory otherwise."""
        name = self._require_experiment()
        if f"{name}_is_scored" in self.current_store:
            return self.current_store[f"{name}_is_scored"]
        count = self.experiments[name]["num_targets"]
        return self._target_masks.setdefault((self.current_model_id, name), np.zeros(count, dtype=np.int32))

    def write_target_rows(self, rows: Sequence[int], grads: Tensor) -> None:
        """Save projected gradients `(len(rows), k)` of targets of the current experiment."""
        name, index = self._require_experiment(), np.asarray(rows)
        grads = self.to_storage(rows, grads)
        self.current_store[f"{name}_grads"][index] = grads
        self._rows_written(index, f"{name}_grads")
        self._target_mask()[index] = 1
        self._rows_written(index, f"{name}_is_scored")

    def load_experiment(self, exp_name: str, model_id: int) -> bool:
        """Make an experiment and a model id the current ones for reading; whether any of its targets was ever
        written.
        """
        try:
            self.load_current_store(model_id, exp_name, self.experiments[exp_name]["num_targets"])
        except FileNotFoundError:
            return False
        self.current_model_id, self.current_experiment = model_id, exp_name
        return bool(self.scored().any())

    def read_targets(self) -> Tensor:
        """Projected gradients `(m, k)` of the current experiment's targets under the current model id."""
        return torch.as_tensor(self.current_store[f"{self._require_experiment()}_grads"])

    def write_scores(self, exp_name: str, scores: Tensor, model_ids: Sequence[int]) -> None:
        """Save the scores `(n, m)` of an experiment, averaged over `model_ids`."""
        key = f"{exp_name}_scores"
        if self.current_store.get(key) is None:
            self.current_store[key] = scores
        else:
            self.current_store[key][:] = scores
        self.save_scores(exp_name)

    def _rows_written(self, rows: np.ndarray, *keys: str) -> None:
        """Called after rows of arrays of `current_store` have been written, and before they are marked as complete.

        Args:
            rows: their indices.
            keys: the arrays. Those that are not in `current_store` are of no concern.

        Memory maps are written to disk, so that the order of rows before marks also holds when the machine goes down.
        """
        for key in keys:
            if isinstance(array := self.current_store.get(key), np.memmap):
                array.flush()

    def to_storage(self, rows: Sequence[int], values: Tensor, what: str = "projected gradient") -> Tensor:
        """Check rows `(len(rows), k)` and cast them to the storage dtype, on the CPU.

        Args:
            rows: indices of the samples, for the error message.
            values: what to store.
            what: what it is, for the error message.

        Raises:
            NonFiniteError: a value is NaN or infinite, or too large for the storage dtype; names the sample.
        """
        values = values.detach().cpu()
        check_finite(values, rows, what)
        stored, worst = cast_rows(values, self.dtype, rows, what)
        if worst > UNDERFLOW_TOLERANCE and not self._warned:
            self._warned = True
            warnings.warn(
                f"Storing features as {self.dtype} changes a row by {100 * worst:.1f} % of its norm, because its "
                "values fall below the smallest that the dtype can hold. Use `use_half_precision=False`.",
                stacklevel=4,
            )
        return stored

    def require_model_id(self) -> int:
        """The current model id. Raises `IncompleteStoreError` if none is open."""
        if self.current_model_id is None:
            raise IncompleteStoreError("No model id is open. Expected one. Call `load_checkpoint` first.")
        return self.current_model_id

    def _require_experiment(self) -> str:
        if self.current_experiment is None:
            raise IncompleteStoreError("No experiment is open. Expected one. Call `start_scoring_checkpoint` first.")
        return self.current_experiment


def mismatched_weights(save_dir: Path, model_id: int, saved: str, given: str) -> CheckpointMismatchError:
    """The error for a model id that is used with other weights than before."""
    return CheckpointMismatchError(
        f"Model id {model_id} is tied to the weights {saved} in {save_dir}, but was given a checkpoint with the "
        f"weights {given}. Expected the same weights. Load the checkpoint that belongs to this id, or use another "
        "model id."
    )


def deleted_grads(save_dir: Path, model_id: int | None) -> IncompleteStoreError:
    """The error for a call that needs gradients which were deleted."""
    return IncompleteStoreError(
        f"The train gradients of model id {model_id} in {save_dir} were deleted (`del_grads`). Expected them to be "
        "there, because the features have to be computed anew. Featurize this checkpoint again under another model id."
    )
