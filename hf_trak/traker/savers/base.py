"""The contract of a saver of the `trak` API: where `TRAKer` keeps gradients, features and scores."""

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
from hf_trak.runtime.checks import check_finite_rows
from hf_trak.store.atomic import explained
from hf_trak.store.shard_set import UNDERFLOW_TOLERANCE, cast_rows


class ModelIDException(HfTrakError, ValueError):  # noqa: N818  # the name that the `trak` API documents
    """A `model_id` is registered already."""


class AbstractSaver(ABC):
    """Keeps the results of a `TRAKer`.

    The abstract methods are those that the `trak` API documents. `TRAKer` itself calls the methods below them, which
    work on `current_store`, a dictionary of arrays (NumPy or torch) that a subclass fills:

    | key | shape | |
    |---|---|---|
    | `grads` | (n, k) | projected gradients of the train set under the current model id |
    | `out_to_loss` | (n,) or (n, 1) | its output-to-loss gradients |
    | `features` | (n, k) | X (XᵀX + λI)⁻¹ |
    | `is_featurized` | (n,) or (n, 1) | 1 where a row has been written |
    | `<experiment>_grads` | (m, k) | projected gradients of the targets |
    | `<experiment>_scores` | (n, m) | scores |

    Args:
        save_dir (`str` or `Path`):
            Directory of everything that is saved. It is created if it does not exist.
        metadata (`Mapping` or iterable of pairs):
            All that defines the features, as plain JSON.
        load_from_save_dir (`bool`):
            Continue the model ids that the directory already holds. The metadata is compared with that of the
            directory in either case.
        logging_level (`int`):
            Level of this saver's logger.
        use_half_precision (`bool`):
            Store gradients and features as float16 instead of float32.

    Attributes:
        model_ids (`dict[int, dict]`): what is known of each registered model id, by id.
        experiments (`dict[str, dict]`): what is known of each experiment, by name; at least `num_targets`.
        current_model_id (`int` or `None`): the model id that `current_store` belongs to.
        current_experiment (`str` or `None`): the experiment that targets are written to.
        checkpoint_fingerprint (`str` or `None`): fingerprint of the weights that the next model id is registered with.
    """

    def __init__(
        self,
        save_dir: Path | str,
        metadata: Iterable[Any],
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
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
        """Create the metadata and the arrays of a new model id, and make it the current one.

        Args:
            model_id (`int`):
                The id, at least 0.
            _allow_featurizing_already_registered (`bool`, *optional*, defaults to `False`):
                Continue an id that exists.

        Raises:
            ModelIDException: the id is registered already, and continuing it is not allowed.
        """

    @abstractmethod
    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Write what is known of the current model id to disk."""

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Create the arrays of the train set under a model id, and fill `current_store` with them."""

    @abstractmethod
    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Create the arrays of an experiment's targets under a model id, or open them if they exist.

        Args:
            exp_name (`str`):
                Name of the experiment, which is one set of targets.
            num_targets (`int`):
                Number of targets, m.
            model_id (`int`):
                A registered model id.

        Raises:
            ConfigMismatchError: the experiment exists with another number of targets.
        """

    @abstractmethod
    def load_current_store(self, model_id: int, exp_name: str | None = None, exp_num_targets: int | None = -1) -> None:
        """Fill `current_store` with the arrays of a model id, or with those of an experiment under it.

        Args:
            model_id (`int`):
                A registered model id.
            exp_name (`str`, *optional*):
                The experiment. `None` opens the arrays of the train set.
            exp_num_targets (`int`, *optional*, defaults to -1):
                Number of its targets; -1 stands for the saved number.
        """

    @abstractmethod
    def save_scores(self, exp_name: str) -> None:
        """Write the scores of an experiment, `current_store["<exp_name>_scores"]`, to disk."""

    @abstractmethod
    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the gradients of the train set under a model id, or those of all its targets."""

    # What TRAKer calls, over the arrays in `current_store`

    def open_checkpoint(self, model_id: int, fingerprint: str, allow_registered: bool = False) -> None:
        """Make a model id the current one. Register it if it is new.

        Args:
            model_id (`int`):
                The id.
            fingerprint (`str`):
                Fingerprint of the weights that will be used under this id.
            allow_registered (`bool`, *optional*, defaults to `False`):
                Continue an id that the directory holds although `load_from_save_dir` is off.

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
        """Compare weights with those that a registered model id is tied to. An id without weights is tied to these.

        Args:
            model_id (`int`):
                The id.
            fingerprint (`str`):
                Fingerprint of the weights.

        Raises:
            IncompleteStoreError: the id is not registered.
            CheckpointMismatchError: the weights differ.
        """
        self._require_known(model_id)
        saved = self.model_ids[model_id].get("fingerprint")
        if saved is None:
            self.model_ids[model_id]["fingerprint"] = fingerprint
        elif saved != fingerprint:
            raise CheckpointMismatchError(
                f"Model id {model_id} is tied to the weights {saved} in {self.save_dir}, but was given a checkpoint "
                f"with the weights {fingerprint}. Load the checkpoint that belongs to this id, or use another model "
                "id."
            )

    def _require_known(self, model_id: int) -> None:
        if model_id not in self.model_ids:
            raise IncompleteStoreError(
                f"Model id {model_id!r} is not in {self.save_dir}, which has {sorted(self.model_ids) or 'none'}. "
                "Expected one that has been featurized. Call `load_checkpoint`, `featurize` and `finalize_features` "
                "for it first."
            )

    def open_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Make an experiment under a registered model id the current one, see `init_experiment`."""
        self.init_experiment(exp_name, num_targets, model_id)
        self.current_model_id = model_id
        self.current_experiment = exp_name

    def featurized(self, rows: Sequence[int] | None = None) -> np.ndarray:
        """Tell which train rows of the current model id have been written: one bool for each row number in `rows`, or
        for all n rows.
        """
        return self._present("grads", self.current_store["is_featurized"], rows)

    def write_rows(self, rows: Sequence[int], grads: Tensor, out_to_loss: Tensor) -> None:
        """Save train rows of the current model id. A row counts as featurized only after its values are written.

        Args:
            rows (`Sequence[int]`):
                Row numbers.
            grads (`torch.Tensor` of shape `(len(rows), k)`):
                Projected gradients in float32.
            out_to_loss (`torch.Tensor` of shape `(len(rows),)`):
                Output-to-loss gradients.

        Raises:
            NonFiniteError: a value is NaN or infinite, or a gradient is too large for the storage dtype. Nothing is
                written.
        """
        store, index = self.current_store, np.asarray(rows)
        grads = self.to_storage(rows, grads)
        check_finite_rows(out_to_loss, "output-to-loss gradient", rows, unit="sample")
        out_to_loss = out_to_loss.detach().to("cpu", torch.float32)
        store["grads"][index] = grads
        store["out_to_loss"][index] = out_to_loss.reshape(-1, *store["out_to_loss"].shape[1:])
        self._rows_written(index, "grads", "out_to_loss")
        store["is_featurized"][index] = 1
        self._rows_written(index, "is_featurized")

    def read_grads(self) -> Tensor:
        """Read the projected gradients of the train set under the current model id.

        Returns:
            `torch.Tensor` of shape `(n, k)`, in the storage dtype.

        Raises:
            IncompleteStoreError: they have been deleted.
        """
        if self.current_store.get("grads") is None:
            raise IncompleteStoreError(
                f"The train gradients of model id {self.current_model_id} in {self.save_dir} were deleted "
                "(`del_grads`), and the features have to be computed from them anew. Featurize this checkpoint again "
                "under another model id."
            )
        return torch.as_tensor(self.current_store["grads"])

    def finalized_with(self, model_id: int) -> Mapping[str, Any] | None:
        """Return the settings with which the features of a model id were finalized, or `None` if they were not."""
        info = self.model_ids.get(model_id, {})
        return info.get("finalized_with", {}) if info.get("finalized") else None

    def write_features(self, features: Tensor, settings: Mapping[str, Any]) -> None:
        """Save the features of the current model id.

        Args:
            features (`torch.Tensor` of shape `(n, k)`):
                X (XᵀX + λI)⁻¹.
            settings (`Mapping[str, Any]`):
                The settings that they were computed with, as plain JSON.

        Raises:
            NonFiniteError: a feature is NaN or infinite, or too large for the storage dtype. Nothing is written.
        """
        info = self.model_ids[self.require_model_id()]
        features = self.to_storage(range(len(features)), features, "feature")
        # The features do not count as finalized while they are exchanged.
        if info.get("finalized"):
            info["finalized"] = 0
            self.serialize_current_model_id_metadata()
        info |= {"finalized_with": dict(settings), "content": self._content(self.require_model_id())}
        self.current_store["features"][:] = features
        self._rows_written(np.arange(len(features)), "features")
        info.update(featurized=1, finalized=1)
        self.serialize_current_model_id_metadata()

    def _content(self, model_id: int) -> dict[str, str]:
        """Return digests of what the features of a model id are computed from, where the saver has them."""
        return {}

    def read_features(self) -> tuple[Tensor, Tensor]:
        """Read the features `(n, k)` and the output-to-loss gradients `(n,)` of the current model id."""
        store = self.current_store
        return torch.as_tensor(store["features"]), torch.as_tensor(store["out_to_loss"]).reshape(-1)

    def scored(self, rows: Sequence[int] | None = None) -> np.ndarray:
        """Tell which targets of the current experiment have been written under the current model id: one bool for each
        number in `rows`, or for all m targets.
        """
        return self._present(f"{self.require_experiment()}_grads", self._target_mask(), rows)

    def _present(self, key: str, marks: Any, rows: Sequence[int] | None) -> np.ndarray:
        """Tell which rows of an array have been written, according to their marks."""
        marks = np.asarray(marks).reshape(-1)
        return (marks if rows is None else marks[np.asarray(rows)]) == 1

    def _target_mask(self) -> Any:
        """Return the marks of the current experiment's targets. They are kept in memory if the store has none."""
        name = self.require_experiment()
        if f"{name}_is_scored" in self.current_store:
            return self.current_store[f"{name}_is_scored"]
        count = self.experiments[name]["num_targets"]
        return self._target_masks.setdefault((self.current_model_id, name), np.zeros(count, dtype=np.int32))

    def write_target_rows(self, rows: Sequence[int], grads: Tensor) -> None:
        """Save targets of the current experiment.

        Args:
            rows (`Sequence[int]`):
                Numbers of the targets.
            grads (`torch.Tensor` of shape `(len(rows), k)`):
                Projected gradients in float32.

        Raises:
            NonFiniteError: a gradient is NaN or infinite, or too large for the storage dtype. Nothing is written.
        """
        name, index = self.require_experiment(), np.asarray(rows)
        grads = self.to_storage(rows, grads)
        self.current_store[f"{name}_grads"][index] = grads
        self._rows_written(index, f"{name}_grads")
        self._target_mask()[index] = 1
        self._rows_written(index, f"{name}_is_scored")

    def load_experiment(self, exp_name: str, model_id: int) -> bool:
        """Make an experiment and a model id the current ones for reading.

        Returns:
            `bool`: whether any target of the experiment has been written under this model id.
        """
        try:
            self.load_current_store(model_id, exp_name, self.experiments[exp_name]["num_targets"])
        except FileNotFoundError:
            return False
        self.current_model_id, self.current_experiment = model_id, exp_name
        return bool(self.scored().any())

    def read_targets(self) -> Tensor:
        """Read the projected gradients `(m, k)` of the current experiment's targets under the current model id."""
        return torch.as_tensor(self.current_store[f"{self.require_experiment()}_grads"])

    def write_scores(self, exp_name: str, scores: Tensor, model_ids: Sequence[int]) -> None:
        """Save the scores of an experiment.

        Args:
            exp_name (`str`):
                Name of the experiment.
            scores (`torch.Tensor` of shape `(n, m)`):
                The scores, float32.
            model_ids (`Sequence[int]`):
                The model ids that they are averaged over.
        """
        key = f"{exp_name}_scores"
        if self.current_store.get(key) is None:
            self.current_store[key] = scores
        else:
            self.current_store[key][:] = scores
        self.save_scores(exp_name)

    def _rows_written(self, rows: np.ndarray, *keys: str) -> None:
        """Write memory maps to disk after rows in them have changed.

        Rows are written before they are marked as complete. Flushing in between keeps that order even if the machine
        goes down. Keys that `current_store` lacks are skipped.
        """
        for key in keys:
            if isinstance(array := self.current_store.get(key), np.memmap):
                array.flush()

    def to_storage(self, rows: Sequence[int], values: Tensor, what: str = "projected gradient") -> Tensor:
        """Check rows, and cast them to the storage dtype on the CPU.

        Args:
            rows (`Sequence[int]`):
                Numbers of the samples, for the error message.
            values (`torch.Tensor` of shape `(len(rows), k)`):
                The values to store.
            what (`str`, *optional*, defaults to `"projected gradient"`):
                What a row is, for the error message.

        Returns:
            `torch.Tensor` of shape `(len(rows), k)`.

        Raises:
            NonFiniteError: a value is NaN or infinite, or too large for the storage dtype; names the sample.
        """
        values = values.detach().cpu()
        check_finite_rows(values, what, rows, unit="sample")
        stored, worst = cast_rows(values, self.dtype, rows, what)
        if worst > UNDERFLOW_TOLERANCE and not self._warned:
            self._warned = True
            warnings.warn(
                f"Storing a {what} as {self.dtype} changes it by {100 * worst:.1f} % of its norm, because its values "
                "are smaller than the dtype can hold. Pass `use_half_precision=False` and another `save_dir`.",
                stacklevel=4,
            )
        return stored

    def require_model_id(self) -> int:
        """Return the current model id. Raise `IncompleteStoreError` if there is none."""
        if self.current_model_id is None:
            raise IncompleteStoreError("No model id is open. Call `load_checkpoint` before this step.")
        return self.current_model_id

    def require_experiment(self) -> str:
        """Return the name of the current experiment. Raise `IncompleteStoreError` if there is none."""
        if self.current_experiment is None:
            raise IncompleteStoreError("No experiment is open. Call `start_scoring_checkpoint` before this step.")
        return self.current_experiment
