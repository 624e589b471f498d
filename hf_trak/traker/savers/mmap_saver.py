"""The saver of the `trak` API, which keeps everything in memory-mapped NumPy files. `mmap_directory` lists them.

The `.mmap` files are in NumPy's `.npy` format; nothing is pickled. `read_grads`, `read_features`, `read_targets` and
`read_scores` compare every row with its checksum the first time that a process reads a file as it is now. That costs
one pass over the file (on one core, 0.2 µs per row and 0.2 s per GB). Arrays that are taken from `current_store` are
not compared with anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from hf_trak.errors import ConfigMismatchError, StoreError
from hf_trak.runtime.checks import checked_int
from hf_trak.store.atomic import explained, remove_stale, safe_name
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.traker.savers.base import AbstractSaver, ModelIDException
from hf_trak.traker.savers.mmap_directory import MmapDirectory, member, rows_seed
from hf_trak.traker.savers.row_files import RowFile


class MmapSaver(AbstractSaver):
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
        super().__init__(save_dir, metadata, load_from_save_dir, logging_level, use_half_precision)
        self.train_set_size = checked_int(train_set_size, "train_set_size", 1, type_error=ValueError)
        self.proj_dim = checked_int(proj_dim, "proj_dim", 1, type_error=ValueError)
        self.metadata |= {
            "feature_dtype": "float16" if use_half_precision else "float32",
            "proj_dim": self.proj_dim,
            "train_size": self.train_set_size,
        }
        self.directory = MmapDirectory.open(self.save_dir, self.metadata)
        self._files: dict[str, RowFile] = {}
        self._told_unchecked: set[Path] = set()
        remove_stale(self.save_dir)
        if load_from_save_dir:
            self.model_ids = {model_id: self.directory.read_info(model_id) for model_id in self.directory.model_ids()}
        self.experiments = self.directory.read_experiments()

    def register_model_id(self, model_id: int, _allow_featurizing_already_registered: bool = False) -> None:
        model_id = checked_model_id(model_id)
        info, created = self.directory.register(model_id, self.checkpoint_fingerprint)
        if not created and not _allow_featurizing_already_registered:
            raise ModelIDException(
                f"Model id {model_id} is registered already in {self.save_dir}. Use another model id, or continue "
                "this one with `load_from_save_dir=True` (or `_allow_featurizing_already_registered=True`)."
            )
        self.model_ids[model_id] = info
        if not created and self.checkpoint_fingerprint is not None:
            self.verify_checkpoint(model_id, self.checkpoint_fingerprint)
        self.init_store(model_id)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        model_id = self.require_model_id()
        self.directory.write_info(model_id, self.model_ids[model_id])

    def verify_checkpoint(self, model_id: int, fingerprint: str) -> None:
        untied = model_id in self.model_ids and self.model_ids[model_id].get("fingerprint") is None
        super().verify_checkpoint(model_id, fingerprint)
        if untied:
            self.directory.write_info(model_id, self.model_ids[model_id])

    def init_store(self, model_id: int) -> None:
        """Open the arrays of the train set under a model id. They are created if they do not exist."""
        self.load_current_store(model_id)

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        files = self.directory.targets(model_id, exp_name, num_targets)
        self._require_known(model_id)
        entry = {
            "num_targets": files[0].shape[0],
            "scores_finalized": 0,
            "scores_path": str(Path("scores") / f"{exp_name}.mmap"),
        }
        self.experiments = self.directory.write_experiment(exp_name, entry, replace=False)
        saved = self.experiments[exp_name]["num_targets"]
        if saved != num_targets:
            raise ConfigMismatchError(
                f"Experiment {exp_name!r} in {self.save_dir} has {saved} targets, but num_targets={num_targets} was "
                "given. Use another exp_name for other targets."
            )
        for file in files:
            file.create()
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
            files = self.directory.train_set(model_id, bool(self._info(model_id).get("grads_deleted")))
            if mode != "r":
                self._create_train_arrays(model_id, files)
        else:
            count = self.experiments[exp_name]["num_targets"] if exp_num_targets in (-1, None) else exp_num_targets
            files = self.directory.targets(model_id, exp_name, count)
        for file in files:
            if mode == "w+":
                file.create(replace=True)
            try:
                file.open("r" if mode == "r" else "r+")
            except FileNotFoundError as error:
                if exp_name is not None:
                    raise
                raise StoreError(f"{file.path} is missing. {file.remedy}") from error
        # The arrays of an experiment join those of the train set of the same model id; all others are closed.
        if exp_name is None or self.current_model_id != model_id:
            self._files, self.current_store = {}, {}
        self._files |= {file.key: file for file in files}
        self.current_store |= {file.key: file.array for file in files}
        self.current_model_id = model_id

    def save_scores(self, exp_name: str) -> None:
        scores = np.asarray(self.current_store[f"{safe_name(exp_name, 'exp_name')}_scores"])
        entry = {**self.experiments[exp_name], "scores_finalized": 1}
        # Readers take the scores for what the entry says. It says that there are none while they are exchanged.
        if entry != self.directory.read_experiments().get(exp_name):
            self.directory.write_experiment(exp_name, {**entry, "scores_finalized": 0}, replace=True)
        self.directory.scores(exp_name, scores.shape[1]).write(scores, self.directory.scores_seed(exp_name, entry))
        self.experiments = self.directory.write_experiment(exp_name, entry, replace=True)

    def del_grads(self, model_id: int, target: bool = False) -> None:
        if target:
            files = [file for name in self.experiments for file in self.directory.targets(model_id, name, 1)]
        else:
            files = self.directory.train_set(model_id)[:1]
            self.model_ids[model_id]["grads_deleted"] = True
            self.directory.write_info(model_id, self.model_ids[model_id])
        for file in reversed(files):  # marks first
            file.path.unlink(missing_ok=True)
            self.current_store.pop(file.key, None)
            self._files.pop(file.key, None)

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
        self._rows_written(np.arange(self._files[key].shape[0]) if rows is None else np.asarray(rows), key)

    def read_scores(self, exp_name: str) -> Tensor:
        """Read the scores of a finished experiment.

        Args:
            exp_name (`str`):
                Name of the experiment.

        Returns:
            `torch.Tensor` of shape `(n, m)`, float32, memory-mapped; writing into it does not change the file.

        Raises:
            IncompleteStoreError: the experiment has no scores.
            StoreError: the file is damaged, or that of another experiment, or was computed from other features than
                those that exist now.
        """
        return self.directory.read_scores(exp_name)

    # What TRAKer calls

    def featurized(self, rows: Sequence[int] | None = None) -> np.ndarray:
        """Return what [`AbstractSaver.featurized`] says. Rows whose gradients were deleted count as written."""
        if self._info(self.require_model_id()).get("grads_deleted"):
            return np.ones(self.train_set_size if rows is None else len(rows), dtype=bool)
        return super().featurized(rows)

    def read_grads(self) -> Tensor:
        if "grads" in self.current_store:
            self._compare("grads", np.flatnonzero(self.featurized()))
        return super().read_grads()

    def finalized_with(self, model_id: int) -> Mapping[str, Any] | None:
        """Return what [`AbstractSaver.finalized_with`] says.

        Raises:
            StoreError: the gradients are not those that the features were computed from.
        """
        path = self.directory.id_path(model_id)
        try:
            info = self.directory.read_info(model_id)  # another process may have finalized them anew
        except FileNotFoundError:
            return None
        self.model_ids[model_id] = info
        features = path.with_name("features.mmap")
        if not info.get("finalized") or not features.exists():
            return None
        saved = info.get("content") or {}
        if changed := [key for key, digest in self._content(model_id).items() if saved.get(key, digest) != digest]:
            raise StoreError(
                f"According to {path}, {features} was computed from other rows than those in "
                f"{features.with_stem(changed[0])}. Restore the file that was exchanged; if rows were computed anew, "
                "delete the features and call `finalize_features` again."
            )
        return info.get("finalized_with") or {}

    def read_features(self) -> tuple[Tensor, Tensor]:
        for key in ("features", "out_to_loss"):
            self._compare(key, np.arange(self.train_set_size))
        return super().read_features()

    def read_targets(self) -> Tensor:
        self._compare(f"{self.require_experiment()}_grads", np.flatnonzero(self.scored()))
        return super().read_targets()

    def write_scores(self, exp_name: str, scores: Tensor, model_ids: Sequence[int]) -> None:
        members = {str(model_id): member(self._info(model_id)) for model_id in model_ids}
        self.experiments[exp_name] |= {"model_ids": list(model_ids), "members": members}
        super().write_scores(exp_name, scores, model_ids)

    def _rows_written(self, rows: np.ndarray, *keys: str) -> None:
        for key in keys:
            if file := self._file(key):
                with explained(file.path):
                    file.seal(rows, rows_seed(self._info(self.require_model_id()), key))
            else:
                super()._rows_written(rows, key)

    def _file(self, key: str) -> RowFile | None:
        """Return the file behind an array of `current_store`, or `None` if a user put another array in its place."""
        file = self._files.get(key)
        return None if file is None or file.array is not self.current_store.get(key) else file

    def _present(self, key: str, marks: Any, rows: Sequence[int] | None) -> np.ndarray:
        """Tell which of the marked rows were written.

        Those have a checksum. A row without one was written past this saver if any of its values is not zero.
        """
        marked = super()._present(key, marks, rows)
        file = self._file(key)
        if file is None or file.sums is None:
            return marked
        index = np.arange(len(marked)) if rows is None else np.asarray(rows)
        bare = index[marked & (file.sums[index] == 0)]
        if len(empty := file.empty(bare)):
            message = "%s has no checksums of %d rows that are marked as written. They count as missing."
            self.logger.warning(message, file.path, len(empty))
        return marked & ~np.isin(index, empty)

    def _compare(self, key: str, rows: np.ndarray) -> None:
        """Compare rows with their checksums. Raises `StoreError` if any is damaged."""
        file = self._file(key)
        if file is None:
            return
        wrong, bare = file.compare(rows, rows_seed(self._info(self.require_model_id()), key))
        if key != "out_to_loss":  # whose values may be zero
            wrong = np.concatenate([wrong, file.empty(bare)])
        if len(wrong):
            raise StoreError(
                f"{file.path} is damaged: {len(wrong)} of {len(rows)} rows (first: {sorted(wrong.tolist())[:5]}) do "
                f"not match their checksums. {file.remedy} If you wrote into `current_store` yourself, call "
                f"`update_checksums({key!r})` after it."
            )
        if len(bare) and file.path not in self._told_unchecked:
            self._told_unchecked.add(file.path)
            message = (
                "%s: %d of %d rows are unchecked, because they were written past the saver and have no checksums. "
                "`update_checksums(%r)` computes them."
            )
            self.logger.warning(message, file.path, len(bare), len(rows), key)

    def _content(self, model_id: int) -> dict[str, str]:
        found = {}
        for file in self.directory.train_set(model_id, bool(self._info(model_id).get("grads_deleted"))):
            if file.checked and file.key != "features" and file.path.exists():
                sums = file.open("r").sums
                found[file.key] = xxhash.xxh3_128_hexdigest(np.asarray(sums).tobytes())
        return found

    def _info(self, model_id: int) -> dict[str, Any]:
        return self.model_ids.get(model_id) or self.directory.read_info(model_id)

    def _create_train_arrays(self, model_id: int, files: list[RowFile]) -> None:
        """Create the missing arrays of a model id if none of its rows was ever written, and missing features always,
        since they can be computed again.
        """
        info = self._info(model_id)
        self.directory.claim(model_id, info)
        if not files[-1].path.exists():  # the marks, which are created last
            for file in files:
                file.create()
        features = next(file for file in files if file.key == "features")
        if not features.path.exists():
            if info.get("finalized"):
                info["finalized"] = 0
                self.directory.write_info(model_id, info)
            features.create()
