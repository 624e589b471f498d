"""The files that a `SafetensorsSaver` adds to its feature store: finalized features, their settings, and scores.

    checkpoint-<model_id>/features.json                                         settings, digest of the gradients
    checkpoint-<model_id>/features-<shard>-of-<shards>.safetensors              `features` (rows, k), `out_to_loss`
    scores/<experiment>/scores.safetensors                                      `scores` (n, m)

All files are written in the format of the store. Their metadata says what they were computed from.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.runtime.checks import is_int
from hf_trak.store.atomic import differing, safe_name, write_bytes
from hf_trak.store.sealed import content_digest, read_sealed, sealed_bytes, unsealed
from hf_trak.store.shards import Identity, ShardPlan, TensorSpec, read_header, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore


class FinalizedFiles:
    """Reads and writes these files in the directory of a feature store."""

    def __init__(self, store: FeatureStore) -> None:
        self.store = store
        self.plan = ShardPlan(store.config["train_size"], store.config["shard_size"])
        self.width = int(store.config["proj_dim"])

    # features

    def settings_path(self, model_id: int) -> Path:
        """Return the file that says how the features of a model id were computed, and that they are complete."""
        return self.store.checkpoint_dir(model_id) / "features.json"

    def features_path(self, model_id: int, index: int) -> Path:
        """Return the file of a shard of features."""
        return self.store.checkpoint_dir(model_id) / self.plan.file_name(index, "features")

    def read_settings(self, model_id: int) -> dict[str, Any] | None:
        """Read how the features of a model id were computed.

        Returns:
            `dict` with the keys `content`, `settings` and `grads_deleted` of [`~FinalizedFiles.write_settings`], or
            `None` if there are no complete features.

        Raises:
            StoreError: the file is damaged, or that of another model id or run.
        """
        path = self.settings_path(model_id)
        remedy = "Delete it and call `finalize_features` again."
        try:
            saved = unsealed(read_sealed(path, remedy))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error}). {remedy}") from error
        kinds = {"content": str, "grads_deleted": bool, "settings": dict}
        lines = [f"{key} is {saved.get(key)!r}" for key, kind in kinds.items() if not isinstance(saved.get(key), kind)]
        identity = saved.pop("identity", None)
        lines += differing(identity if isinstance(identity, dict) else {}, self.store.identity(model_id))
        if lines:
            raise StoreError(
                f"{path} is damaged or belongs to another run ({'; '.join(lines)}). Expected the description of the "
                f"features of model id {model_id}. {remedy}"
            )
        return saved

    def write_settings(self, model_id: int, content: str, settings: Mapping[str, Any], grads_deleted: bool) -> None:
        """Write the file that says that the features of a model id are complete.

        Args:
            model_id: the id.
            content: digest of the gradients that the features were computed from.
            settings: settings that they were computed with, as plain JSON.
            grads_deleted: whether the gradients have been deleted.
        """
        saved: dict[str, Any] = {"content": content, "grads_deleted": grads_deleted, "settings": dict(settings)}
        saved["identity"] = self.store.identity(model_id)
        write_bytes(self.settings_path(model_id), sealed_bytes(saved))

    def write_features(
        self, model_id: int, features: Tensor, out_to_loss: Tensor, content: str, settings: Mapping[str, Any]
    ) -> None:
        """Save features.

        Args:
            model_id: the id.
            features: `(n, k)`, in the storage dtype.
            out_to_loss: `(n,)`, float32.
            content, settings: as in [`~FinalizedFiles.write_settings`].
        """
        # This file is deleted first and written last, so that half-written features never count as finished ones.
        self.settings_path(model_id).unlink(missing_ok=True)
        identity = self._features_identity(model_id, content, settings)
        for index in range(len(self.plan)):
            part = self.plan.rows(index)
            write_tensors(
                self.features_path(model_id, index),
                {"features": features[part.start : part.stop], "out_to_loss": out_to_loss[part.start : part.stop]},
                identity,
                start=part.start,
                stop=part.stop,
            )
        self.write_settings(model_id, content, settings, grads_deleted=False)

    def read_features(self, model_id: int) -> tuple[Tensor, Tensor]:
        """Read the features `(n, k)` and the output-to-loss gradients `(n,)` of a model id.

        Raises:
            IncompleteStoreError: the model id has no features.
            StoreError: a file is damaged, or does not belong here.
        """
        parts = [self.read_part(model_id, index) for index in range(len(self.plan))]
        # A copy even of a single part: the last bit of matrix products depends on how a file's values are aligned.
        return torch.cat([p["features"] for p in parts]), torch.cat([p["out_to_loss"] for p in parts])

    def read_part(self, model_id: int, index: int, verify: bool | None = None) -> dict[str, Tensor]:
        """Read one shard of finalized features.

        Args:
            model_id: the checkpoint.
            index: the shard.
            verify: compare the checksum, see [`~hf_trak.store.shards.read_tensors`].

        Returns:
            `features` `(rows, k)` and `out_to_loss` `(rows,)`.

        Raises:
            IncompleteStoreError: the model id has no features.
            StoreError: the file is damaged, or does not belong here.
        """
        saved = self.read_settings(model_id)
        if saved is None:
            raise IncompleteStoreError(
                f"Model id {model_id} in {self.store.output_dir} has no finalized features. Call `finalize_features`."
            )
        part = self.plan.rows(index)
        specs = {
            "features": TensorSpec((len(part), self.width), (self.store.feature_dtype,)),
            "out_to_loss": TensorSpec((len(part),), (torch.float32,)),
        }
        try:
            return read_tensors(
                self.features_path(model_id, index),
                self._features_identity(model_id, saved["content"], saved["settings"]),
                specs,
                verify,
                start=part.start,
                stop=part.stop,
            )
        except StoreError as error:
            raise StoreError(
                f"{error} Delete {self.settings_path(model_id)}, too, so that `finalize_features` computes these "
                "features again."
            ) from error

    def _features_identity(self, model_id: int, content: str, settings: Mapping[str, Any]) -> Identity:
        identity = {**self.store.identity(model_id), "content": content, "kind": "features"}
        return {**identity, "settings": content_digest(settings)}

    # experiments and scores

    def experiment(self, name: str) -> dict[str, Any]:
        """Read what is saved of an experiment; at least `num_targets`.

        Raises:
            IncompleteStoreError: the experiment does not exist.
            StoreError: its description is damaged, or that of another experiment.
        """
        info = self.store.experiment_info(name)
        count = info.get("num_targets")
        if not is_int(count, 1):
            raise StoreError(
                f"{self.store.experiment_dir(name) / 'experiment.json'} gives {count!r} as the number of targets. "
                "Expected an integer of at least 1. Restore the file, or delete its directory and score again."
            )
        return info

    def scores_path(self, experiment: str) -> Path:
        """Return the file of an experiment's scores."""
        return self.store.output_dir / "scores" / safe_name(experiment, "exp_name") / "scores.safetensors"

    def write_scores(self, experiment: str, scores: Tensor, model_ids: Sequence[int]) -> None:
        """Save scores.

        Args:
            experiment: name of the experiment.
            scores: `(n, m)`, float32.
            model_ids: the model ids that the scores are averaged over. Their present features are recorded.
        """
        path = self.scores_path(experiment)
        extra: dict[str, Any] = {"model_ids": [int(model_id) for model_id in model_ids]}
        extra["members"] = {str(model_id): self._member(model_id) for model_id in extra["model_ids"]}
        write_tensors(path, {"scores": scores}, self._scores_identity(experiment), **extra)

    def read_scores(self, experiment: str, verify: bool | None = None) -> Tensor:
        """Read the saved scores `(n, m)` of an experiment, memory-mapped.

        Raises:
            StoreError: there are no scores, or the file is damaged, or that of another experiment.
        """
        specs = self._scores_specs(experiment)
        path, identity = self.scores_path(experiment), self._scores_identity(experiment)
        scores = read_tensors(path, identity, specs, verify)["scores"]
        said = read_header(path, identity, specs).get("members") or {}
        # Scores stay valid when features are deleted, but are refused when the features have been replaced.
        now = {model_id: {**said[model_id], **self._member(int(model_id))} for model_id in said}
        if lines := differing(said, now):
            raise StoreError(
                f"{path} was computed from other features than those that now exist, according to "
                + ", ".join(str(self.settings_path(int(i))) for i in said if said[i] != now[i])
                + ":\n  "
                + "\n  ".join(lines)
                + "\nCall `finalize_scores` again."
            )
        return scores

    def scores_members(self, experiment: str) -> list[int]:
        """Read which model ids the saved scores of an experiment are averaged over. Raises as `read_scores`."""
        specs = self._scores_specs(experiment)
        path, identity = self.scores_path(experiment), self._scores_identity(experiment)
        found = read_header(path, identity, specs).get("model_ids")
        if not isinstance(found, list) or not all(is_int(model_id) for model_id in found):
            raise StoreError(
                f"{path} names the model ids {found!r}. Expected a list of integers. Call `finalize_scores` again."
            )
        return found

    def _member(self, model_id: int) -> dict[str, Any]:
        """Return what scores depend on of a model id: its weights, its gradients, the settings of its features."""
        saved = self.read_settings(model_id) or {}
        return {
            **self.store.identity(model_id),
            **{key: saved[key] for key in ("content", "settings") if key in saved},
        }

    def _scores_specs(self, experiment: str) -> dict[str, TensorSpec]:
        shape = (self.plan.n_rows, self.experiment(experiment)["num_targets"])
        return {"scores": TensorSpec(shape, (torch.float32,))}

    def _scores_identity(self, experiment: str) -> Identity:
        identity = {"config": self.store.config_hash, "kind": "scores"}
        return {**identity, "experiment": experiment}
