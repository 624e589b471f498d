"""A saver that keeps everything in memory-mapped NumPy files. `mmap_directory` describes the layout.

The `.mmap` files are in NumPy's `.npy` format; nothing is pickled. `read_grads`, `read_features`, `read_targets` and
[`read_scores`] compare every row with its checksum the first time that a process reads a file as it is now. That costs
one pass over the file (on one core, 0.2 µs per row and 0.2 s per GB). Arrays that are taken from `current_store` are
not compared with anything.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from hf_trak.errors import ConfigMismatchError, StoreError
from hf_trak.runtime.checks import checked_int
from hf_trak.store.atomic import explained, safe_name
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.traker.savers.directory_saver import DirectorySaver
from hf_trak.traker.savers.mmap_arrays import ArrayPlan
from hf_trak.traker.savers.mmap_check import verify_mmap
from hf_trak.traker.savers.mmap_directory import MmapDirectory
from hf_trak.traker.savers.mmap_scores import read_scores
from hf_trak.traker.savers.mmap_upgrade import upgrade_mmap
from hf_trak.traker.savers.refusals import unknown_model_id
from hf_trak.traker.savers.row_files import RowFile, rows_without_values

__all__ = ["MmapSaver", "read_scores", "upgrade_mmap", "verify_mmap"]


class MmapSaver(DirectorySaver):
    """Keeps results in memory-mapped `.npy` files with a checksum per row.

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

    def _open_directory(self, in_format_1: Mapping[str, Any]) -> None:
        self.directory = MmapDirectory.open(self.save_dir, self.metadata, in_format_1)
        self._files: dict[str, RowFile] = {}
        self._told_unchecked: set[Path] = set()

    def _saved_model_ids(self) -> dict[int, dict[str, Any]]:
        return {model_id: self.directory.read_info(model_id) for model_id in self.directory.model_ids()}

    def _saved_experiments(self) -> dict[str, dict[str, Any]]:
        return self.directory.read_experiments()

    def register_model_id(self, model_id: int, _allow_featurizing_already_registered: bool = False) -> None:
        model_id = checked_model_id(model_id)
        info, created = self.directory.register(model_id, self.checkpoint_fingerprint)
        if not created and not _allow_featurizing_already_registered:
            raise self._already_registered(model_id)
        self.model_ids[model_id] = info
        if not created and self.checkpoint_fingerprint is not None:
            self.verify_checkpoint(model_id, self.checkpoint_fingerprint)
        self.current_model_id = model_id
        self.init_store(model_id)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        model_id = self.require_model_id()
        self.directory.write_info(model_id, self.model_ids[model_id])

    def verify_checkpoint(self, model_id: int, fingerprint: str) -> None:
        untied = model_id in self.model_ids and self.model_ids[model_id].get("fingerprint") is None
        super().verify_checkpoint(model_id, fingerprint)
        if untied:
            self.directory.write_info(model_id, self.model_ids[model_id])

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        safe_name(exp_name, "exp_name")
        num_targets = checked_int(num_targets, "num_targets", 1, type_error=ValueError)
        if model_id not in self.model_ids:
            raise unknown_model_id(self.save_dir, model_id, self.model_ids)
        with explained(self.save_dir / "experiments.json"), self.directory.lock():
            self.experiments = self.directory.read_experiments()
            saved = self.experiments.get(exp_name)
            if saved is None:
                self.experiments[exp_name] = {
                    "num_targets": num_targets,
                    "scores_finalized": 0,
                    "scores_path": str(Path("scores") / f"{exp_name}.mmap"),
                }
                self.directory.write_experiments(self.experiments)
        if saved is not None and saved["num_targets"] != num_targets:
            raise ConfigMismatchError(
                f"Experiment {exp_name!r} in {self.save_dir} has {saved['num_targets']} targets, but "
                f"num_targets={num_targets} was given. Use another exp_name for other targets."
            )
        for plan in self.directory.arrays.of_targets(model_id, exp_name, num_targets):
            plan.create()
        self.load_current_store(model_id, exp_name, num_targets)

    def load_current_store(
        self, model_id: int, exp_name: str | None = None, exp_num_targets: int | None = -1, mode: str | None = "r+"
    ) -> None:
        """Open the arrays of a model id, or those of an experiment under it.

        Args:
            model_id (`int`):
                A registered model id.
            exp_name (`str`, *optional*):
                The experiment. `None` opens the arrays of the train set, and creates those that a killed run did not
                reach.
            exp_num_targets (`int`, *optional*, defaults to -1):
                Number of its targets; -1 stands for the saved number.
            mode (`str`, *optional*, defaults to `"r+"`):
                `"r+"` to read and write, `"r"` to read, `"w+"` to start the arrays anew.

        Raises:
            FileNotFoundError: none of the experiment's targets was ever written under this model id.
            StoreError: an array of the train set is missing; an array is truncated, or has another shape or dtype.
        """
        if exp_name is None:
            deleted = bool(self._info(model_id).get("grads_deleted"))
            plans = self.directory.arrays.of_train_set(model_id, deleted)
            if mode != "r":
                self._create_train_arrays(model_id, plans)
        else:
            count = self.experiments[exp_name]["num_targets"] if exp_num_targets in (-1, None) else exp_num_targets
            count = checked_int(count, "exp_num_targets", 1, type_error=ValueError)
            plans = self.directory.arrays.of_targets(model_id, exp_name, count)
        if mode == "w+":
            for plan in plans:
                plan.create(replace=True)
        try:
            files = {plan.key: plan.open("r" if mode == "r" else "r+") for plan in plans}
        except FileNotFoundError as error:
            if exp_name is not None:
                raise
            plan = next(plan for plan in plans if not plan.path.exists())
            raise StoreError(f"{plan.path} is missing. {plan.remedy}") from error
        # The arrays of an experiment join those of the train set of the same model id; all others are closed.
        kept = exp_name is not None and self.current_model_id == model_id
        self._files = {**(self._files if kept else {}), **files}
        store = {key: file.array for key, file in files.items()}
        self.current_store = {**(self.current_store if kept else {}), **store}
        self.current_model_id = model_id

    def save_scores(self, exp_name: str) -> None:
        scores = np.asarray(self.current_store[f"{safe_name(exp_name, 'exp_name')}_scores"])
        plan = self.directory.arrays.of_scores(exp_name, scores.shape[1])
        entry = {**self.experiments[exp_name], "scores_finalized": 1}
        # Readers take the scores for what the entry says. It says that there are none while they are exchanged.
        if entry != self._saved_experiments().get(exp_name):
            self._write_experiment(exp_name, {**entry, "scores_finalized": 0})
        RowFile.write(plan.path, scores, self.directory.scores_seed(exp_name, entry) if plan.checked else None)
        self._write_experiment(exp_name, entry)

    def del_grads(self, model_id: int, target: bool = False) -> None:
        if target:
            for exp_name in self.experiments:
                for plan in reversed(self.directory.arrays.of_targets(model_id, exp_name, 1)):  # marks first
                    plan.path.unlink(missing_ok=True)
                    self.current_store.pop(plan.key, None)
                    self._files.pop(plan.key, None)
            return
        info = self.model_ids[model_id]
        info["grads_deleted"] = True
        self.directory.write_info(model_id, info)
        self.current_store.pop("grads", None)
        self._files.pop("grads", None)
        (self.directory.id_path(model_id).parent / "grads.mmap").unlink(missing_ok=True)

    def update_checksums(self, key: str, rows: Sequence[int] | None = None) -> None:
        """Compute the checksums of rows that were written into `current_store` directly.

        Args:
            key (`str`):
                Name of the array, for example `"grads"`.
            rows (`Sequence[int]`, *optional*):
                Row numbers. `None` stands for all rows.

        Raises:
            KeyError: `current_store` has no such array on disk.
        """
        file = self._files[key]
        index = np.arange(len(file.array)) if rows is None else np.asarray(rows)
        self._rows_written(index, key)

    # What TRAKer calls

    def featurized(self, rows: Sequence[int] | None = None) -> np.ndarray:
        """See [`AbstractSaver.featurized`]. Rows whose gradients were deleted count as written."""
        if self._info(self.require_model_id()).get("grads_deleted"):
            return np.ones(self.train_set_size if rows is None else len(rows), dtype=bool)
        done = super().featurized()
        done &= self._summed("grads", done)
        return done if rows is None else done[np.asarray(rows)]

    def scored(self, rows: Sequence[int] | None = None) -> np.ndarray:
        done = super().scored()
        done &= self._summed(f"{self.require_experiment()}_grads", done)
        return done if rows is None else done[np.asarray(rows)]

    def read_grads(self) -> Tensor:
        if "grads" in self.current_store:
            self._compare("grads", np.flatnonzero(self.featurized()))
        return super().read_grads()

    def finalized_with(self, model_id: int) -> Mapping[str, Any] | None:
        """See [`AbstractSaver.finalized_with`].

        Raises:
            StoreError: the gradients are not those that the features were computed from.
        """
        features = self.directory.arrays.features_path(model_id)
        try:
            info = self.directory.read_info(model_id)  # another process may have finalized them anew
        except FileNotFoundError:
            return None
        self.model_ids[model_id] = info
        if not info.get("finalized") or not features.exists():
            return None
        saved = info.get("content") or {}
        if changed := [key for key, digest in self._content(model_id).items() if saved.get(key, digest) != digest]:
            raise StoreError(
                f"According to {self.directory.id_path(model_id)}, {features} was computed from other rows than those "
                f"in {features.with_stem(changed[0])}. Restore the file that was exchanged; if rows were computed "
                "anew, delete the features and call `finalize_features` again."
            )
        return info.get("finalized_with") or {}

    def write_features(self, features: Tensor, settings: Mapping[str, Any]) -> None:
        model_id = self.require_model_id()
        info = self.model_ids[model_id]
        features = self.to_storage(range(len(features)), features, "feature")
        # The features do not count as finalized while they are exchanged.
        if info.get("finalized"):
            info["finalized"] = 0
            self.serialize_current_model_id_metadata()
        info["finalized_with"] = dict(settings)
        if content := self._content(model_id):
            info["content"] = content
        self.current_store["features"][:] = features
        self._rows_written(np.arange(len(features)), "features")
        info.update(featurized=1, finalized=1)
        self.serialize_current_model_id_metadata()

    def read_features(self) -> tuple[Tensor, Tensor]:
        rows = np.arange(self.train_set_size)
        for key in ("features", "out_to_loss"):
            self._compare(key, rows)
        return super().read_features()

    def read_targets(self) -> Tensor:
        self._compare(f"{self.require_experiment()}_grads", np.flatnonzero(self.scored()))
        return super().read_targets()

    def write_scores(self, exp_name: str, scores: Tensor, model_ids: Sequence[int]) -> None:
        members = {str(model_id): self.directory.member(self._info(model_id)) for model_id in model_ids}
        self.experiments[exp_name] |= {"model_ids": list(model_ids), "members": members}
        super().write_scores(exp_name, scores, model_ids)

    def _rows_written(self, rows: np.ndarray, *keys: str) -> None:
        for key in keys:
            file = self._file(key)
            if file is None:
                super()._rows_written(rows, key)
                continue
            with explained(file.path):
                file.seal(rows, self._seed(key))
                file.flush()

    def _file(self, key: str) -> RowFile | None:
        """Return the file behind an array of `current_store`, or `None` if a user put another array in its place."""
        file = self._files.get(key)
        return None if file is None or file.array is not self.current_store.get(key) else file

    def _seed(self, key: str) -> int:
        info = self._info(self.require_model_id())
        if key == "features":
            return self.directory.features_seed(info)
        if key in ("grads", "out_to_loss"):
            return self.directory.rows_seed(info, key)
        return self.directory.rows_seed(info, "targets", experiment=key.removesuffix("_grads"))

    def _summed(self, key: str, marked: np.ndarray) -> np.ndarray:
        """Tell which of the marked rows were written.

        Those have a checksum. A row without one was written past this saver if any of its values is not zero.
        """
        file = self._file(key)
        if file is None or file.sums is None:
            return marked
        empty = rows_without_values(file, np.flatnonzero(marked & (file.sums == 0)))
        if len(empty):
            self.logger.warning(
                "%s has no checksums of %d rows that are marked as written. They count as missing.",
                file.path,
                len(empty),
            )
        written = marked.copy()
        written[empty] = False
        return written

    def _compare(self, key: str, rows: np.ndarray) -> None:
        """Compare rows with their checksums. Raises `StoreError` if any is damaged."""
        file = self._file(key)
        if file is None:
            return
        wrong, bare = file.compare(rows, self._seed(key))
        if key != "out_to_loss":  # whose values may be zero
            wrong = np.concatenate([wrong, rows_without_values(file, bare)])
        if len(wrong):
            raise StoreError(
                f"{file.path} is damaged: {len(wrong)} of {len(rows)} rows (first: {sorted(wrong.tolist())[:5]}) do "
                f"not match their checksums. {file.remedy} If you wrote into `current_store` yourself, call "
                f"`update_checksums({key!r})` after it."
            )
        if len(bare) and file.path not in self._told_unchecked:
            self._told_unchecked.add(file.path)
            self.logger.warning(
                "%s: %d of %d rows are unchecked, because they were written past the saver and have no checksums. "
                "`update_checksums(%r)` computes them.",
                file.path,
                len(bare),
                len(rows),
                key,
            )

    def _content(self, model_id: int) -> dict[str, str]:
        """Return digests of what the features of a model id are computed from; none in format 1."""
        found = {}
        for plan in self.directory.arrays.of_train_set(model_id, bool(self._info(model_id).get("grads_deleted"))):
            if plan.checked and plan.key != "features" and plan.path.exists():
                sums = plan.open("r").sums
                found[plan.key] = "" if sums is None else xxhash.xxh3_128_hexdigest(sums.tobytes())
        return found

    def _info(self, model_id: int) -> dict[str, Any]:
        return self.model_ids.get(model_id) or self.directory.read_info(model_id)

    def _create_train_arrays(self, model_id: int, plans: list[ArrayPlan]) -> None:
        """Create the missing arrays of a model id if none of its rows was ever written, and missing features always,
        since they can be computed again.
        """
        self.directory.claim(model_id, self._info(model_id))
        if not plans[-1].path.exists():  # the marks, which are created last
            for plan in plans:
                plan.create()
        features = next(plan for plan in plans if plan.key == "features")
        if not features.path.exists():
            info = self._info(model_id)
            if info.get("finalized"):
                self.directory.write_info(model_id, info | {"finalized": 0})
                info["finalized"] = 0
            features.create()

    def _write_experiment(self, exp_name: str, entry: dict[str, Any]) -> None:
        with explained(self.save_dir / "experiments.json"), self.directory.lock():
            self.experiments = {**self.directory.read_experiments(), exp_name: entry}
            self.directory.write_experiments(self.experiments)
