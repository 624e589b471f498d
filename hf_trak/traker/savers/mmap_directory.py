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

Directories of format 1 have no checksums. They are read and finished in their own format, with a warning;
`hf_trak.traker.savers.mmap_upgrade.upgrade_mmap` adds checksums.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.runtime.checks import is_int
from hf_trak.store.atomic import create_bytes, json_bytes, write_bytes
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.store.sealed import (
    content_digest,
    read_sealed,
    sealed_bytes,
    unsealed,
)
from hf_trak.traker.savers.mmap_arrays import MARKS, MmapArrays
from hf_trak.traker.savers.row_files import seed_of
from hf_trak.traker.savers.run_metadata import changes, defining

logger = logging.getLogger(__name__)

METADATA = "metadata.json"
EXPERIMENTS = "experiments.json"
ID_METADATA = "id_metadata.json"

_RESTORE = "Restore it from a copy, or use another save_dir."
_warned: set[Path] = set()


class MmapDirectory:
    """The files of one configuration; the module's docstring lists them.

    Attributes:
        save_dir: the directory.
        metadata: the saved configuration.
        version: format version in which all files are written.
        run: digest of all that defines the features.
        arrays: the plans of all arrays.
    """

    def __init__(self, save_dir: Path, metadata: Mapping[str, Any], version: int) -> None:
        """Use [`~MmapDirectory.open`] or [`~MmapDirectory.load`]."""
        self.save_dir = save_dir
        self.metadata = dict(metadata)
        self.version = version
        self.run = content_digest(defining(metadata))
        dtype = np.float16 if metadata["feature_dtype"] == "float16" else np.float32
        n, k = int(metadata["train_size"]), int(metadata["proj_dim"])
        self.arrays = MmapArrays(save_dir, n, k, dtype, checked=version > 1)

    @classmethod
    def open(
        cls, save_dir: Path, metadata: Mapping[str, Any], in_format_1: Mapping[str, Any] | None = None
    ) -> "MmapDirectory":
        """Open a directory. A new one is given this configuration.

        Args:
            save_dir: the directory.
            metadata: all that defines the features, as plain JSON; needs `feature_dtype`, `proj_dim` and
                `train_size`.
            in_format_1: the same metadata as a directory of format 1 describes it, if that differs.

        Raises:
            ConfigMismatchError: it holds results of another configuration; it is left as it was.
            StoreError: its configuration is damaged.
        """
        path = save_dir / METADATA
        if not path.exists():
            create_bytes(path, sealed_bytes(metadata))
        directory = cls.load(save_dir)
        saved, given = defining(directory.metadata), defining(metadata)
        if lines := changes(saved, given):
            raise ConfigMismatchError(
                f"{path} was saved with another configuration than the one given:\n  "
                + "\n  ".join(lines)
                + "\nUse the saved values, or another save_dir."
            )
        return directory

    @classmethod
    def load(cls, save_dir: Path) -> "MmapDirectory":
        """Open a directory that exists.

        Raises:
            IncompleteStoreError: it holds no results of a `MmapSaver`.
            StoreError: its configuration is damaged.
        """
        path = save_dir / METADATA
        try:
            content = _read_json(path, _RESTORE)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"{save_dir} holds no results of a MmapSaver: {METADATA} is missing. Pass the save_dir of a run."
            ) from error
        metadata = unsealed(content)
        sizes = [metadata.get("train_size"), metadata.get("proj_dim")]
        numbers = all(is_int(size, 1) for size in sizes)
        if not numbers or metadata.get("feature_dtype") not in ("float16", "float32"):
            raise StoreError(
                f"{path} says train_size and proj_dim {sizes} and feature_dtype {metadata.get('feature_dtype')!r}. "
                f"Expected two positive numbers, and 'float16' or 'float32'. {_RESTORE}"
            )
        return cls(save_dir, metadata, 2)

    # model ids

    def id_path(self, model_id: int) -> Path:
        """Return the file that describes a model id. Its arrays are in the same directory."""
        return self.save_dir / str(checked_model_id(model_id)) / ID_METADATA

    def model_ids(self) -> list[int]:
        """List the registered model ids, in ascending order.

        Raises:
            StoreError: files of a model id that belongs here have vanished. An average without it would be other
                scores.
        """
        found = {int(p.parent.name) for p in self.save_dir.glob(f"*/{ID_METADATA}") if is_id(p.parent.name)}
        lost = {int(p.stem) for p in self.save_dir.glob("*.json") if is_id(p.stem)} if self.version > 1 else set()
        lost |= {int(p.parent.name) for p in self.save_dir.glob(f"*/{MARKS}.mmap") if is_id(p.parent.name)}
        if lost := lost - found:
            path = self.id_path(min(lost))
            raise StoreError(
                f"{path} is missing, although model id {min(lost)} belongs to {self.save_dir}. Restore it, or delete "
                f"{self.member_path(min(lost))} and {path.parent}, and featurize this checkpoint again if you need it."
            )
        return sorted(found)

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
        content: dict[str, Any] = {
            "featurized": 0, "finalized": 0, "fingerprint": fingerprint, "model_id": model_id,
        }  # fmt: skip
        if self.version > 1:
            content |= self.identity(model_id, fingerprint)
        created = create_bytes(self.id_path(model_id), self._encoded(content))
        info = content if created else self.read_info(model_id)
        self.claim(model_id, info)
        return info, created

    def identity(self, model_id: int, fingerprint: str | None) -> dict[str, str]:
        """Return the keys of a description that tie a model id to this run and to its weights."""
        of = {"fingerprint": fingerprint, "model_id": model_id, "run": self.run}
        return {"row_identity": content_digest(of), "run": self.run}

    def claim(self, model_id: int, info: Mapping[str, Any]) -> None:
        """Write the file that says that a model id belongs to this directory.

        Args:
            model_id: the id.
            info: the description of the model id.
        """
        path = self.member_path(model_id)
        if self.version > 1 and not path.exists():
            content = {"model_id": model_id, "row_identity": info["row_identity"], "run": self.run}
            create_bytes(path, sealed_bytes(content))

    def member_path(self, model_id: int) -> Path:
        """Return the file that says that a model id belongs to this directory."""
        return self.save_dir / f"{checked_model_id(model_id)}.json"

    def read_info(self, model_id: int) -> dict[str, Any]:
        """Read the description of a model id.

        Raises:
            FileNotFoundError: the id is not registered.
            StoreError: the file is damaged, or that of another model id or configuration.
        """
        path = self.id_path(model_id)
        remedy = (
            f"Restore it from a copy, or delete {self.member_path(model_id)} and {path.parent}, and featurize again."
        )
        info = self._read(path, remedy)
        found = (info.get("model_id"), info.get("run") if self.version > 1 else self.run)
        if found != (model_id, self.run):
            raise StoreError(
                f"{path} belongs to model id {found[0]!r} of the run {found[1]!r}; expected model id {model_id} of "
                f"the run {self.run}, which {self.save_dir / METADATA} describes: files were mixed. {remedy}"
            )
        kinds: dict[str, tuple[type, ...]] = {
            "content": (dict, type(None)),
            "finalized": (int,),
            "finalized_with": (dict, type(None)),
            "fingerprint": (str, type(None)),
            "grads_deleted": (bool, type(None)),
            "row_identity": (str,) if self.version > 1 else (str, type(None)),
        }
        if wrong := [key for key, kind in kinds.items() if not isinstance(info.get(key), kind)]:
            raise StoreError(f"{path} says {wrong[0]!r} is {info.get(wrong[0])!r}, which is impossible. {remedy}")
        if self.version > 1:
            self._compare_member(model_id, info)
        return info

    def _compare_member(self, model_id: int, info: Mapping[str, Any]) -> None:
        path = self.member_path(model_id)
        remedy = f"Restore the right one, or delete both and {self.id_path(model_id).parent}, and featurize again."
        try:
            said = self._read(path, remedy)
        except FileNotFoundError:
            return  # a run was killed before it wrote the file
        if said != {key: info.get(key) for key in ("model_id", "row_identity", "run")}:
            raise StoreError(
                f"{path} and {self.id_path(model_id)} are of different runs or weights: files were mixed. {remedy}"
            )

    def write_info(self, model_id: int, info: Mapping[str, Any]) -> None:
        """Replace the description of a model id."""
        write_bytes(self.id_path(model_id), self._encoded(info))

    # experiments

    def lock(self) -> FileLock:
        """Return the lock that is held while `experiments.json` is changed."""
        return FileLock(self.save_dir / ".experiments.lock")

    def read_experiments(self) -> dict[str, dict[str, Any]]:
        """Read what is known of all experiments, by name.

        Raises:
            StoreError: the file is damaged, or that of another configuration.
        """
        path = self.save_dir / EXPERIMENTS
        remedy = "Restore it from a copy, or delete it and call `start_scoring_checkpoint` for every experiment again."
        try:
            found = _read_json(path, remedy)
        except FileNotFoundError:
            return {}
        content = unsealed(found)
        experiments = content.get("experiments")
        run = content.get("run")
        sound = isinstance(experiments, dict) and run == self.run
        for entry in experiments.values() if isinstance(experiments, dict) else ():
            count = entry.get("num_targets") if isinstance(entry, dict) else None
            sound = sound and is_int(count, 1)
        if not sound or not isinstance(experiments, dict):
            raise StoreError(
                f"{path} is that of the run {run!r}, or has no number of targets. Expected experiments of the run "
                f"{self.run}, which {self.save_dir / METADATA} describes. {remedy}"
            )
        return experiments

    def write_experiments(self, experiments: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the file of all experiments."""
        content = dict(experiments) if self.version == 1 else {"experiments": dict(experiments), "run": self.run}
        write_bytes(self.save_dir / EXPERIMENTS, self._encoded(content))

    # checksums of arrays

    def rows_seed(self, info: Mapping[str, Any], array: str, **extra: Any) -> int:
        """Return the seed of an array's checksums under a model id; `extra` is what else the rows depend on."""
        return seed_of({"array": array, "rows": info.get("row_identity"), **extra})

    def features_seed(self, info: Mapping[str, Any]) -> int:
        """Return the seed of the checksums of features, which depend on their settings and on the gradients."""
        return self.rows_seed(info, "features", content=info.get("content"), settings=info.get("finalized_with"))

    def member(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return what scores depend on of a model id: its weights, its gradients, the settings of its features."""
        return {key: info.get(key) for key in ("content", "finalized_with", "row_identity")}

    def scores_seed(self, experiment: str, entry: Mapping[str, Any]) -> int:
        """Return the seed of the checksums of an experiment's scores."""
        of = {key: entry.get(key) for key in ("members", "model_ids", "num_targets")}
        return seed_of({"array": "scores", "experiment": experiment, "run": self.run, **of})

    def _read(self, path: Path, remedy: str) -> dict[str, Any]:
        return unsealed(_read_json(path, remedy))

    def _encoded(self, content: Mapping[str, Any]) -> bytes:
        return json_bytes(content) if self.version == 1 else sealed_bytes(content)


def is_id(name: str) -> bool:
    """Tell whether the name of a file or directory is that of a model id."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        return read_sealed(path, remedy)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error}). Expected a file of this run. {remedy}") from error
