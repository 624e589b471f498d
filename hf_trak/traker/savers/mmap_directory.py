"""The directory of a `MmapSaver`: its files, what each says, and what the checksums of its arrays are bound to.

    <save_dir>/
      metadata.json                   all that defines the features
      experiments.json                number of targets, and what the scores were computed with, by experiment
      scores/<experiment>.mmap        (n, m), float32
      <model_id>.json                 says that the directory of this name belongs here
      <model_id>/
        id_metadata.json              fingerprint of the weights, whether the features are finalized, and how
        grads.mmap, features.mmap     (n, k), float16 or float32
        out_to_loss.mmap              (n, 1), float32
        _is_featurized.mmap           (n, 1), int32: 1 where a row is complete
        <experiment>_grads.mmap       (m, k)
        <experiment>_is_scored.mmap   (m, 1), int32: 1 where a row is complete

JSON files carry a checksum of their content, arrays one checksum per row (`row_files`). The marks need none, because a
row counts only if it is marked and has a checksum. Checksums of rows are bound to the configuration, the weights, the
model id and the array; those of features also to their settings and to the gradients.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.identity.function_identity import same_function
from hf_trak.runtime.checks import checked_int
from hf_trak.store.atomic import differing, explained, safe_name
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.store.sealed import content_digest, create_sealed, read_sealed, unsealed, write_sealed
from hf_trak.traker.savers.row_files import RowFile, seed_of

logger = logging.getLogger(__name__)

METADATA = "metadata.json"
EXPERIMENTS = "experiments.json"
_ID_METADATA = "id_metadata.json"
_MARKS = "_is_featurized"
_FLOAT, _MARK = np.dtype(np.float32), np.dtype(np.int32)
_VERSION = "hf_trak_version"  # the one key of the metadata that does not define features


class MmapDirectory:
    """The files of one configuration; the module's docstring lists them.

    Attributes:
        save_dir: the directory.
        metadata: the saved configuration.
        run: digest of all that defines the features.
    """

    def __init__(self, save_dir: Path) -> None:
        """Open a directory that exists.

        Raises:
            IncompleteStoreError: it holds no results of a `MmapSaver`.
            StoreError: its configuration is damaged.
        """
        self.save_dir = save_dir
        try:
            self.metadata = _read(save_dir / METADATA, "Restore it from a copy, or use another save_dir.")
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"{save_dir} holds no results of a MmapSaver: {METADATA} is missing. Pass the save_dir of a run."
            ) from error
        self.run = content_digest(_defining(self.metadata))
        self._dtype = np.dtype(self.metadata["feature_dtype"])
        self._train_size, self._proj_dim = self.metadata["train_size"], self.metadata["proj_dim"]

    @classmethod
    def open(cls, save_dir: Path, metadata: Mapping[str, Any]) -> "MmapDirectory":
        """Open a directory. A new one is given this configuration.

        Args:
            save_dir: the directory.
            metadata: all that defines the features, as plain JSON; needs `feature_dtype`, `proj_dim` and
                `train_size`.

        Raises:
            ConfigMismatchError: it holds results of another configuration; it is left as it was.
            StoreError: its configuration is damaged.
        """
        path = save_dir / METADATA
        if not path.exists():
            create_sealed(path, metadata)
        directory = cls(save_dir)
        saved, given = _defining(directory.metadata), _defining(metadata)
        for key in saved.keys() & given.keys():  # functions with the same code are equal, whatever their names
            same = same_function(saved[key], given[key])
            if same is None:
                message = (
                    "It is unknown whether `%s` has changed, because its code was compiled by another version of "
                    "Python: saved %s, given %s."
                )
                logger.warning(message, key, saved[key], given[key])
            if same is not False:
                given[key] = saved[key]
        if lines := differing(saved, given):
            raise ConfigMismatchError(
                f"{path} was saved with another configuration than the one given:\n  "
                + "\n  ".join(lines)
                + "\nUse the saved values, or another save_dir."
            )
        return directory

    # model ids

    def id_path(self, model_id: int) -> Path:
        """Return the file that describes a model id. Its arrays are in the same directory."""
        return self.save_dir / str(checked_model_id(model_id)) / _ID_METADATA

    def member_path(self, model_id: int) -> Path:
        """Return the file that says that a model id belongs to this directory."""
        return self.save_dir / f"{checked_model_id(model_id)}.json"

    def model_ids(self) -> list[int]:
        """List the registered model ids, in ascending order.

        Raises:
            StoreError: files of a model id that belongs here have vanished. An average without it would be other
                scores.
        """
        found = {int(path.parent.name) for path in self.save_dir.glob(f"*/{_ID_METADATA}") if _is_id(path.parent.name)}
        if lost := set(self.mentioned_ids(f"*/{_MARKS}.mmap")) - found:
            path = self.id_path(min(lost))
            raise StoreError(
                f"{path} is missing, although model id {min(lost)} belongs to {self.save_dir}. Restore it, or delete "
                f"{self.member_path(min(lost))} and {path.parent}, and featurize this checkpoint again if you need it."
            )
        return sorted(found)

    def mentioned_ids(self, files: str) -> list[int]:
        """List the model ids that belong here, or whose directory has a file of this pattern."""
        names = {path.parent.name for path in self.save_dir.glob(files)}
        names |= {path.stem for path in self.save_dir.glob("*.json")}
        return sorted(int(name) for name in names if _is_id(name))

    def register(self, model_id: int, fingerprint: str | None) -> tuple[dict[str, Any], bool]:
        """Write the description of a model id unless there is one.

        Args:
            model_id: the id.
            fingerprint: fingerprint of its weights, if they are known.

        Returns:
            `tuple`: the description, and whether this call wrote it.

        Raises:
            StoreError: the model id exists, and its description is damaged.
        """
        identity = {"fingerprint": fingerprint, "model_id": model_id, "run": self.run}
        content = {**identity, "featurized": 0, "finalized": 0, "row_identity": content_digest(identity)}
        created = create_sealed(self.id_path(model_id), content)
        info = content if created else self.read_info(model_id)
        self.claim(model_id, info)
        return info, created

    def claim(self, model_id: int, info: Mapping[str, Any]) -> None:
        """Write the file that says that a model id, which has this description, belongs to this directory."""
        path = self.member_path(model_id)
        if not path.exists():
            create_sealed(path, _membership(info))

    def read_info(self, model_id: int) -> dict[str, Any]:
        """Read the description of a model id.

        Raises:
            FileNotFoundError: the id is not registered.
            StoreError: the file is damaged, or that of another model id or configuration.
        """
        path, member = self.id_path(model_id), self.member_path(model_id)
        remedy = f"Restore it from a copy, or delete {member} and {path.parent}, and featurize again."
        info = _read(path, remedy)
        if (info.get("model_id"), info.get("run")) != (model_id, self.run):
            raise StoreError(
                f"{path} belongs to model id {info.get('model_id')!r} of the run {info.get('run')!r}; expected model "
                f"id {model_id} of the run {self.run}, which {self.save_dir / METADATA} describes: files were mixed. "
                f"{remedy}"
            )
        try:
            said = _read(member, remedy)
        except FileNotFoundError:
            return info  # a run was killed before it wrote the file
        if said != _membership(info):
            raise StoreError(
                f"{member} and {path} are of different runs or weights: files were mixed. Restore the right one, or "
                f"delete both and {path.parent}, and featurize again."
            )
        return info

    def write_info(self, model_id: int, info: Mapping[str, Any]) -> None:
        """Replace the description of a model id."""
        write_sealed(self.id_path(model_id), info)

    # experiments

    def read_experiments(self) -> dict[str, dict[str, Any]]:
        """Read what is known of all experiments, by name.

        Raises:
            StoreError: the file is damaged, or that of another configuration.
        """
        path = self.save_dir / EXPERIMENTS
        remedy = "Restore it from a copy, or delete it and call `start_scoring_checkpoint` for every experiment again."
        try:
            content = _read(path, remedy)
        except FileNotFoundError:
            return {}
        if content.get("run") != self.run:
            raise StoreError(
                f"{path} is that of the run {content.get('run')!r}. Expected experiments of the run {self.run}, which "
                f"{self.save_dir / METADATA} describes. {remedy}"
            )
        return content["experiments"]

    def write_experiment(self, name: str, entry: Mapping[str, Any], replace: bool) -> dict[str, dict[str, Any]]:
        """Write what is known of an experiment. What is known of it already stays, unless `replace` is set.

        Returns:
            `dict`: what is now known of all experiments.
        """
        path = self.save_dir / EXPERIMENTS
        with explained(path), FileLock(self.save_dir / ".experiments.lock"):
            found = self.read_experiments()
            if replace or name not in found:
                found[name] = dict(entry)
                write_sealed(path, {"experiments": found, "run": self.run})
        return found

    def read_scores(self, exp_name: str) -> Tensor:
        """Read the scores of an experiment. Raises and returns as [`MmapSaver.read_scores`]."""
        entry = self.read_experiments().get(safe_name(exp_name, "exp_name"), {})
        if not entry.get("scores_finalized"):
            raise IncompleteStoreError(
                f"Experiment {exp_name!r} in {self.save_dir} has no scores. Call `finalize_scores` for it first."
            )
        file = self.scores(exp_name, entry["num_targets"])
        try:
            file.open("r")
        except FileNotFoundError as error:
            raise StoreError(f"{file.path} is missing. {file.remedy}") from error
        wrong, bare = file.compare(np.arange(file.shape[0]), self.scores_seed(exp_name, entry))
        if len(wrong) or len(bare):
            raise StoreError(
                f"{file.path} is damaged, or holds other scores than {self.save_dir / EXPERIMENTS} says: "
                f"{len(wrong) + len(bare)} of {file.shape[0]} rows do not match their checksums. {file.remedy}"
            )
        # Scores stay valid when features are deleted, but not when other features have taken their place.
        for model_id, said in (entry.get("members") or {}).items():
            path = self.id_path(int(model_id))
            if path.exists() and (info := self.read_info(int(model_id))).get("finalized") and member(info) != said:
                raise StoreError(
                    f"{file.path} was computed from other features than those that now exist, according to {path}. "
                    "Call `finalize_scores` again."
                )
        return torch.from_numpy(np.lib.format.open_memmap(file.path, mode="c"))

    # arrays

    def train_set(self, model_id: int, grads_deleted: bool = False) -> list[RowFile]:
        """Describe the arrays of the train set under a model id. The marks come last, and are created last."""
        directory = self.id_path(model_id).parent
        n, k = self._train_size, self._proj_dim
        marks = directory / f"{_MARKS}.mmap"
        again = (
            f"Restore it from a copy, or delete {marks} and featurize again, which computes all rows of this model id "
            "anew."
        )
        if grads_deleted:
            again = f"Restore it from a copy, or delete {directory} and featurize again."
        features = "Restore it from a copy, or delete it and call `finalize_features` again."
        files = [
            RowFile("grads", directory / "grads.mmap", (n, k), self._dtype, again),
            RowFile("out_to_loss", directory / "out_to_loss.mmap", (n, 1), _FLOAT, again),
            RowFile("features", directory / "features.mmap", (n, k), self._dtype, features),
            RowFile("is_featurized", marks, (n, 1), _MARK, again, checked=False),
        ]
        return files[1:] if grads_deleted else files

    def targets(self, model_id: int, experiment: str, num_targets: int) -> list[RowFile]:
        """Describe the arrays of an experiment's targets under a model id. The marks come last."""
        directory = self.id_path(model_id).parent
        m = checked_int(num_targets, "num_targets", 1, type_error=ValueError)
        grads, marks = (f"{safe_name(experiment, 'exp_name')}_{kind}" for kind in ("grads", "is_scored"))
        again = f"Restore it from a copy, or delete {directory / f'{marks}.mmap'} and score the targets again."
        return [
            RowFile(grads, directory / f"{grads}.mmap", (m, self._proj_dim), self._dtype, again),
            RowFile(marks, directory / f"{marks}.mmap", (m, 1), _MARK, again, checked=False),
        ]

    def scores(self, experiment: str, num_targets: int) -> RowFile:
        """Describe the array of an experiment's scores."""
        path = self.save_dir / "scores" / f"{safe_name(experiment, 'exp_name')}.mmap"
        remedy = "Restore it from a copy, or call `finalize_scores` again."
        return RowFile("scores", path, (self._train_size, num_targets), _FLOAT, remedy)

    def scores_seed(self, experiment: str, entry: Mapping[str, Any]) -> int:
        """Return the seed of the checksums of an experiment's scores."""
        of = {key: entry.get(key) for key in ("members", "model_ids", "num_targets")}
        return seed_of({"array": "scores", "experiment": experiment, "run": self.run, **of})


def rows_seed(info: Mapping[str, Any], key: str) -> int:
    """Return the seed of the checksums of an array under a model id.

    Args:
        info: the description of the model id.
        key: name of the array in `current_store`.
    """
    identity = {"array": key, "rows": info.get("row_identity")}
    if key == "features":
        identity |= {"content": info.get("content"), "settings": info.get("finalized_with")}
    elif key not in ("grads", "out_to_loss"):
        identity |= {"array": "targets", "experiment": key.removesuffix("_grads")}
    return seed_of(identity)


def member(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what scores depend on of a model id: its weights, its gradients, the settings of its features."""
    return {key: info.get(key) for key in ("content", "finalized_with", "row_identity")}


def _membership(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: info.get(key) for key in ("model_id", "row_identity", "run")}


def _defining(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != _VERSION}


def _is_id(name: str) -> bool:
    """Tell whether the name of a file or directory is that of a model id."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _read(path: Path, remedy: str) -> dict[str, Any]:
    try:
        return unsealed(read_sealed(path, remedy))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error}). Expected a file of this run. {remedy}") from error
