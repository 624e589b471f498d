"""The default saver of the `trak` API, which keeps its rows in a feature store.

<save_dir>/
  trak_config.json                                          all that defines the features
  checkpoint-<model_id>/
    checkpoint.json                                         fingerprint of the weights
    train-<shard>-of-<shards>.safetensors (.partial)        gradients
    features-<shard>-of-<shards>.safetensors                X (XᵀX + λI)⁻¹ and output-to-loss gradients
    features.json                                           the settings that these were computed with
  experiments/<experiment>/
    experiment.json                                         number of targets
    checkpoint-<model_id>/targets-<shard>-of-<shards>.safetensors (.partial)
  scores/<experiment>/scores.safetensors                    (n, m), float32
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.runtime.checks import check_finite_rows, checked_int
from hf_trak.store.atomic import safe_name
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.store import FeatureStore
from hf_trak.traker.savers.directory_saver import DirectorySaver
from hf_trak.traker.savers.finalized_files import FinalizedFiles
from hf_trak.traker.savers.partial import RowWriter
from hf_trak.traker.savers.refusals import deleted_grads
from hf_trak.traker.savers.run_metadata import comparison
from hf_trak.traker.savers.safetensors_check import verify_traker
from hf_trak.traker.savers.safetensors_upgrade import require_upgraded, upgrade_traker

__all__ = ["SHARD_BYTES", "UNRECORDED", "SafetensorsSaver", "upgrade_traker", "verify_traker"]

SHARD_BYTES = 64 * 2**20
"""Size of a shard's gradients. Small enough that finishing one does not hold up a run, large enough to keep the number
of files small.
"""

UNRECORDED = "unrecorded"
"""Stands for the fingerprint of a dataset, since `TRAKer` sees no dataset."""


class SafetensorsSaver(DirectorySaver):
    """Keeps results in safetensors files with checksums. The module's docstring lists the files.

    Args:
        save_dir (`str` or `Path`):
            Directory of everything that is saved. It is created if it does not exist.
        metadata (`Mapping` or iterable of pairs):
            All that defines the features, as plain JSON. It is compared with the metadata of the directory.
        train_set_size (`int`):
            Number of train examples, n.
        proj_dim (`int`):
            Number of columns of gradients and features, k.
        load_from_save_dir (`bool`):
            Continue the model ids that the directory already holds.
        logging_level (`int`):
            Level of this saver's logger.
        use_half_precision (`bool`):
            Store gradients and features as float16 instead of float32.

    Raises:
        ValueError: `train_set_size` or `proj_dim` is not an integer of at least 1.
        ConfigMismatchError: the directory holds results of another configuration; it is left as it was.
        StoreError: a file that describes results is damaged, missing, or that of another run.
    """

    def _sizes(self) -> dict[str, Any]:
        row_bytes = self.proj_dim * self.dtype.itemsize
        shard_size = max(1, min(self.train_set_size, SHARD_BYTES // row_bytes))
        return {**super()._sizes(), "shard_size": shard_size}

    def _open_directory(self, in_format_1: Mapping[str, Any]) -> None:
        require_upgraded(self.save_dir)
        self.store = FeatureStore.open(self.save_dir, self.metadata, {key: comparison(key) for key in self.metadata})
        self.files = FinalizedFiles(self.store)

    def _saved_model_ids(self) -> dict[int, dict[str, Any]]:
        return {model_id: self._describe(model_id) for model_id in self.store.model_ids}

    def _saved_experiments(self) -> dict[str, dict[str, Any]]:
        return {name: self.files.experiment(name) for name in self.store.experiments}

    def register_model_id(self, model_id: int, _allow_featurizing_already_registered: bool = False) -> None:
        model_id = checked_model_id(model_id)
        if model_id in self.store.model_ids and not _allow_featurizing_already_registered:
            raise self._already_registered(model_id)
        self.store.register_checkpoint(model_id, self.checkpoint_fingerprint or UNRECORDED)
        self.model_ids[model_id] = self._describe(model_id)
        self.current_model_id = model_id
        self.init_store(model_id)

    def verify_checkpoint(self, model_id: int, fingerprint: str) -> None:
        super().verify_checkpoint(model_id, fingerprint)
        self.store.register_checkpoint(model_id, fingerprint)  # completes what a killed run may have left undone

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Do nothing: all metadata is on disk as soon as it is known."""

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        num_targets = checked_int(num_targets, "num_targets", 1, type_error=ValueError)
        shards = self._targets(exp_name, checked_model_id(model_id), num_targets)
        self.experiments[exp_name] = self.files.experiment(exp_name)
        kept = self.current_store if self.current_model_id == model_id else {}
        self.current_store = {**kept, f"{exp_name}_grads": RowWriter(shards)}
        self.current_model_id, self.current_experiment = model_id, exp_name

    def load_current_store(self, model_id: int, exp_name: str | None = None, exp_num_targets: int | None = -1) -> None:
        """Open the rows of a model id, or those of an experiment under it.

        Args:
            model_id (`int`):
                A registered model id.
            exp_name (`str`, *optional*):
                The experiment. `None` opens the rows of the train set.
            exp_num_targets (`int`, *optional*, defaults to -1):
                Number of its targets; -1 stands for the saved number.

        Raises:
            FileNotFoundError: none of the experiment's targets was ever written under this model id.
        """
        if exp_name is None:
            self.current_store = {"grads": RowWriter(self.store.train(model_id))}
            self.current_model_id = model_id
            return
        directory = self.store.experiment_dir(exp_name) / f"checkpoint-{model_id}"
        if not directory.is_dir():
            raise FileNotFoundError(f"{directory} does not exist: no target of {exp_name!r} was scored.")
        count = self.experiments[exp_name]["num_targets"] if exp_num_targets in (-1, None) else exp_num_targets
        count = checked_int(count, "exp_num_targets", 1, type_error=ValueError)
        self.init_experiment(exp_name, count, model_id)

    def save_scores(self, exp_name: str) -> None:
        info = self.experiments[safe_name(exp_name, "exp_name")]
        scores = torch.as_tensor(self.current_store[f"{exp_name}_scores"])
        self.files.write_scores(exp_name, scores, info["model_ids"])

    def del_grads(self, model_id: int, target: bool = False) -> None:
        if target:
            for exp_name, info in self.experiments.items():
                RowWriter(self._targets(exp_name, model_id, info["num_targets"])).delete()
            return
        saved = self.files.read_settings(model_id)
        if saved is not None:
            self.files.write_settings(model_id, saved["content"], saved["settings"], grads_deleted=True)
        RowWriter(self.store.train(model_id)).delete()
        self.model_ids[model_id] = self._describe(model_id)

    # What TRAKer calls

    def featurized(self, rows: Sequence[int] | None = None) -> np.ndarray:
        done = self.current_store["grads"].done(rows)
        if not done.all() and self._grads_deleted(self.require_model_id()):
            return np.ones_like(done)
        return done

    def write_rows(self, rows: Sequence[int], grads: Tensor, out_to_loss: Tensor) -> None:
        grads = self.to_storage(rows, grads)
        check_finite_rows(out_to_loss, "output-to-loss gradient", rows, unit="sample")
        self.current_store["grads"].write(rows, grads, out_to_loss.detach().to("cpu", torch.float32))

    def read_grads(self) -> Tensor:
        model_id = self.require_model_id()
        if self._grads_deleted(model_id):
            raise deleted_grads(self.save_dir, model_id)
        return self.current_store["grads"].read_all()[0]

    def finalized_with(self, model_id: int) -> Mapping[str, Any] | None:
        """See [`AbstractSaver.finalized_with`].

        Raises:
            StoreError: the gradients are not those that the features were computed from.
        """
        saved = self.files.read_settings(model_id)
        if saved is None:
            return None
        if not saved["grads_deleted"]:
            shards = self.store.train(model_id)
            if not shards.unwritten() and shards.content_hash != saved["content"]:
                raise StoreError(
                    f"{self.files.settings_path(model_id)} describes features of other rows than those in "
                    f"{shards.path(0)}. Restore the file that was exchanged; if rows were computed anew, delete the "
                    "former file and call `finalize_features` again."
                )
        return saved["settings"]

    def write_features(self, features: Tensor, settings: Mapping[str, Any]) -> None:
        model_id = self.require_model_id()
        features = self.to_storage(range(len(features)), features, "feature")
        rows = self.current_store["grads"]
        out_to_loss = rows.read_all()[1]
        self.files.write_features(model_id, features, out_to_loss, rows.shards.content_hash, settings)
        self.model_ids[model_id] = self._describe(model_id)

    def read_features(self) -> tuple[Tensor, Tensor]:
        return self.files.read_features(self.require_model_id())

    def scored(self, rows: Sequence[int] | None = None) -> np.ndarray:
        return self.current_store[f"{self.require_experiment()}_grads"].done(rows)

    def write_target_rows(self, rows: Sequence[int], grads: Tensor) -> None:
        """See [`AbstractSaver.write_target_rows`]. Zeros stand for the output-to-loss gradients of targets, on which
        scores do not depend.
        """
        grads = self.to_storage(rows, grads)
        self.current_store[f"{self.require_experiment()}_grads"].write(rows, grads, torch.zeros(len(rows)))

    def read_targets(self) -> Tensor:
        return self.current_store[f"{self.require_experiment()}_grads"].read_all()[0]

    def write_scores(self, exp_name: str, scores: Tensor, model_ids: Sequence[int]) -> None:
        self.experiments[exp_name]["model_ids"] = [int(model_id) for model_id in model_ids]
        self.current_store[f"{exp_name}_scores"] = scores
        self.save_scores(exp_name)

    def read_scores(self, exp_name: str) -> Tensor:
        """Read the saved scores of an experiment.

        Args:
            exp_name (`str`):
                Name of the experiment.

        Returns:
            `torch.Tensor` of shape `(n, m)`, float32, memory-mapped.

        Raises:
            StoreError: there are no scores, or the file is damaged, or that of another experiment.
        """
        return self.files.read_scores(exp_name)

    def _targets(self, exp_name: str, model_id: int, num_targets: int) -> ShardSet:
        return self.store.targets(exp_name, model_id, num_targets, UNRECORDED)

    def _describe(self, model_id: int) -> dict[str, Any]:
        return {
            "finalized": int(self.files.read_settings(model_id) is not None),
            "fingerprint": self.store.checkpoint_info(model_id)["fingerprint"],
        }

    def _grads_deleted(self, model_id: int) -> bool:
        return bool((self.files.read_settings(model_id) or {}).get("grads_deleted"))
