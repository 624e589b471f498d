"""A saver that keeps everything in memory-mapped NumPy files, in the directory layout of the seeds.

    <save_dir>/
      metadata.json                   all that defines the features
      experiments.json                number of targets, by experiment
      scores/<experiment>.mmap        (n, m), float32
      <model_id>/
        id_metadata.json              fingerprint of the weights, whether the features are finalized, and how
        grads.mmap, features.mmap     (n, k), float16 or float32
        out_to_loss.mmap              (n, 1), float32
        _is_featurized.mmap           (n, 1), int32: 1 where a row is complete
        <experiment>_grads.mmap       (m, k)
        <experiment>_is_scored.mmap   (m, 1)

The `.mmap` files are in NumPy's `.npy` format; nothing is pickled.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.savers.atomic import (
    allocate,
    atomic_path,
    create_bytes,
    create_file,
    differing,
    json_bytes,
    read_json,
    remove_stale_temporaries,
    safe_name,
    write_bytes,
)
from hf_trak.savers.base import AbstractSaver, ModelIDException
from hf_trak.savers.store import FeatureStore, checked_count, checked_model_id


class MmapSaver(AbstractSaver):
    """Memory-mapped `.npy` files, see the module's docstring for the layout."""

    def __init__(
        self,
        save_dir: Path | str,
        metadata: Iterable[Any],
        train_set_size: int,
        proj_dim: int,
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        """
        Args:
            save_dir, metadata, load_from_save_dir, logging_level, use_half_precision: see [`AbstractSaver`].
            train_set_size: n.
            proj_dim: k.

        Raises:
            ConfigMismatchError: the directory holds results of another configuration; it is left as it was.
        """
        super().__init__(save_dir, metadata, load_from_save_dir, logging_level, use_half_precision)
        self.train_set_size = checked_count(train_set_size, "train_set_size")
        self.proj_dim = checked_count(proj_dim, "proj_dim")
        self.metadata |= {
            "feature_dtype": "float16" if use_half_precision else "float32",
            "proj_dim": self.proj_dim,
            "train_size": self.train_set_size,
        }
        path = self.save_dir / "metadata.json"
        given = json_bytes(self.metadata)
        if path.exists() or not create_bytes(path, given):
            _compare_metadata(path, self.metadata)
        if load_from_save_dir:
            for id_path in self.save_dir.glob("*/id_metadata.json"):
                if id_path.parent.name.isdecimal():
                    self.model_ids[int(id_path.parent.name)] = read_json(id_path)
        self.experiments = self._read_experiments()

    def register_model_id(self, model_id: int, _allow_featurizing_already_registered: bool = False) -> None:
        model_id = checked_model_id(model_id)
        path = self._id_path(model_id)
        content = {
            "featurized": 0,
            "finalized": 0,
            "fingerprint": self.checkpoint_fingerprint,
            "model_id": model_id,
        }
        created = not path.exists() and create_bytes(path, json_bytes(content))
        if not created and not _allow_featurizing_already_registered:
            raise ModelIDException(
                f"Model id {model_id} is registered already in {self.save_dir}. Expected a new one. Use another model "
                "id, or continue this one with `load_from_save_dir=True` (or "
                "`_allow_featurizing_already_registered=True`)."
            )
        self.model_ids[model_id] = content if created else read_json(path)
        if not created and self.checkpoint_fingerprint is not None:
            self.verify_checkpoint(model_id, self.checkpoint_fingerprint)
        self.current_model_id = model_id
        self.init_store(model_id)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        model_id = self.require_model_id()
        write_bytes(self._id_path(model_id), json_bytes(self.model_ids[model_id]))

    def verify_checkpoint(self, model_id: int, fingerprint: str) -> None:
        untied = model_id in self.model_ids and self.model_ids[model_id].get("fingerprint") is None
        super().verify_checkpoint(model_id, fingerprint)
        if untied:
            write_bytes(self._id_path(model_id), json_bytes(self.model_ids[model_id]))

    def init_store(self, model_id: int) -> None:
        directory = self._id_path(model_id).parent
        deleted = self.model_ids.get(model_id, {}).get("grads_deleted", False)
        for name, shape, dtype in self._train_arrays():
            if not (directory / f"{name}.mmap").exists() and not (deleted and name == "grads"):
                _create_array(directory / f"{name}.mmap", shape, dtype)
        remove_stale_temporaries(directory)
        self.load_current_store(model_id)

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        safe_name(exp_name, "exp_name")
        num_targets = checked_count(num_targets, "num_targets")
        if model_id not in self.model_ids:
            raise IncompleteStoreError(
                f"Model id {model_id!r} is not in {self.save_dir}, which has {sorted(self.model_ids) or 'none'}. "
                "Register it first."
            )
        scores = Path("scores") / f"{exp_name}.mmap"
        with FileLock(self.save_dir / ".experiments.lock"):
            self.experiments = self._read_experiments()
            saved = self.experiments.get(exp_name)
            if saved is None:
                self.experiments[exp_name] = {
                    "num_targets": num_targets,
                    "scores_finalized": 0,
                    "scores_path": str(scores),
                }
                write_bytes(self.save_dir / "experiments.json", json_bytes(self.experiments))
        if saved is not None and saved["num_targets"] != num_targets:
            raise ConfigMismatchError(
                f"Experiment {exp_name!r} in {self.save_dir} has {saved['num_targets']} targets, but "
                f"num_targets={num_targets} was given. Expected the same number. Use another exp_name for other "
                "targets."
            )
        for path, shape, dtype in self._target_arrays(model_id, exp_name, num_targets):
            if not path.exists():
                _create_array(path, shape, dtype)
        self.load_current_store(model_id, exp_name, num_targets)

    def load_current_store(
        self, model_id: int, exp_name: str | None = None, exp_num_targets: int | None = -1, mode: str | None = "r+"
    ) -> None:
        """Open the arrays of a model id, or those of an experiment under it.

        Args:
            model_id: the id.
            exp_name: the experiment. `None` opens the arrays of the train set.
            exp_num_targets: number of its targets; -1 takes the saved one.
            mode: `r+` or `r`. `w+` starts the arrays anew.

        Raises:
            FileNotFoundError: none of the experiment's targets was ever written under this model id.
            StoreError: an array of the train set is missing; an array is truncated, or has another shape or dtype.
        """
        arrays: dict[str, tuple[Path, tuple[int, int], Any]] = {}
        if exp_name is None:
            directory = self._id_path(model_id).parent
            deleted = self.model_ids.get(model_id, {}).get("grads_deleted", False)
            for name, shape, dtype in self._train_arrays():
                if not (deleted and name == "grads"):
                    arrays[name.removeprefix("_")] = (directory / f"{name}.mmap", shape, dtype)
        else:
            count = self.experiments[exp_name]["num_targets"] if exp_num_targets in (-1, None) else exp_num_targets
            for path, shape, dtype in self._target_arrays(model_id, exp_name, count):
                arrays[path.stem] = (path, shape, dtype)
        store = {}
        for key, (path, shape, dtype) in arrays.items():
            if mode == "w+":
                _create_array(path, shape, dtype, replace=True)
            if exp_name is None and not path.exists():
                raise StoreError(
                    f"{path} is missing. Restore it from a copy, or delete {path.parent} and featurize again."
                )
            store[key] = _open_array(path, shape, dtype, "r" if mode == "r" else "r+")
        kept = self.current_store if exp_name is not None and self.current_model_id == model_id else {}
        self.current_store = {**kept, **store}
        self.current_model_id = model_id

    def write_scores(self, exp_name: str, scores: Tensor, model_ids: Sequence[int]) -> None:
        self.experiments[exp_name]["model_ids"] = list(model_ids)
        super().write_scores(exp_name, scores, model_ids)

    def save_scores(self, exp_name: str) -> None:
        scores = np.asarray(self.current_store[f"{safe_name(exp_name, 'exp_name')}_scores"])
        path = self.save_dir / "scores" / f"{exp_name}.mmap"
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.lib.format.write_array(file, scores, allow_pickle=False)
        with FileLock(self.save_dir / ".experiments.lock"):
            entry = {**self.experiments[exp_name], "scores_finalized": 1}
            self.experiments = {**self._read_experiments(), exp_name: entry}
            write_bytes(self.save_dir / "experiments.json", json_bytes(self.experiments))

    def del_grads(self, model_id: int, target: bool = False) -> None:
        directory = self._id_path(model_id).parent
        if target:
            for exp_name in self.experiments:
                for path, _, _ in self._target_arrays(model_id, exp_name, 1):
                    path.unlink(missing_ok=True)
                    self.current_store.pop(path.stem, None)
            return
        info = self.model_ids[model_id]
        info["grads_deleted"] = True
        write_bytes(self._id_path(model_id), json_bytes(info))
        self.current_store.pop("grads", None)
        (directory / "grads.mmap").unlink(missing_ok=True)

    def _id_path(self, model_id: int) -> Path:
        return self.save_dir / str(checked_model_id(model_id)) / "id_metadata.json"

    def _train_arrays(self) -> list[tuple[str, tuple[int, int], Any]]:
        n, k = self.train_set_size, self.proj_dim
        dtype = np.float16 if self.use_half_precision else np.float32
        return [
            ("grads", (n, k), dtype),
            ("out_to_loss", (n, 1), np.float32),
            ("features", (n, k), dtype),
            ("_is_featurized", (n, 1), np.int32),
        ]

    def _target_arrays(
        self, model_id: int, exp_name: str, count: int | None
    ) -> list[tuple[Path, tuple[int, int], Any]]:
        directory = self._id_path(model_id).parent
        m = checked_count(count, "num_targets")
        name = safe_name(exp_name, "exp_name")
        dtype = np.float16 if self.use_half_precision else np.float32
        return [
            (directory / f"{name}_grads.mmap", (m, self.proj_dim), dtype),
            (directory / f"{name}_is_scored.mmap", (m, 1), np.int32),
        ]

    def _read_experiments(self) -> dict[str, dict[str, Any]]:
        path = self.save_dir / "experiments.json"
        return read_json(path) if path.exists() else {}


def read_scores(save_dir: Path | str, exp_name: str) -> Tensor:
    """The scores `(n, m)` of a finished experiment of a `MmapSaver`, memory-mapped."""
    path = Path(save_dir) / "scores" / f"{safe_name(exp_name, 'exp_name')}.mmap"
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


def _compare_metadata(path: Path, given: dict[str, Any]) -> None:
    informational = set(FeatureStore.INFORMATIONAL)
    saved = {key: value for key, value in read_json(path).items() if key not in informational}
    changes = differing(saved, {key: value for key, value in given.items() if key not in informational})
    if changes:
        raise ConfigMismatchError(
            f"{path} was saved with another configuration than the one given:\n  "
            + "\n  ".join(changes)
            + "\nUse the saved values, or another save_dir."
        )


def _create_array(path: Path, shape: tuple[int, int], dtype: Any, replace: bool = False) -> None:
    """A file of zeros; one that another process has created meanwhile stays, unless it is to be replaced."""

    def fill(temporary: Path) -> None:
        np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        with open(temporary, "r+b") as file:
            allocate(file, temporary.stat().st_size)

    if replace:
        with atomic_path(path) as temporary:
            fill(temporary)
    else:
        create_file(path, fill)


def _open_array(path: Path, shape: tuple[int, int], dtype: Any, mode: str) -> np.memmap:
    """Open an existing array. NumPy would silently extend a truncated file with zeros, so its size is compared
    first.
    """
    size = path.stat().st_size
    remedy = "Restore it from a copy, or delete the directory of this model id and featurize again."
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise StoreError(f"{path} is not a complete .npy file ({error}). {remedy}") from error
    if array.shape != shape or array.dtype != dtype or size != array.offset + array.nbytes:
        raise StoreError(
            f"{path} holds {array.dtype} {array.shape} in {size} bytes; expected {np.dtype(dtype)} {shape}. {remedy}"
        )
    return np.load(path, mmap_mode=mode, allow_pickle=False)  # type: ignore[arg-type]
