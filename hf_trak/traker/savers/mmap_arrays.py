"""The arrays of a `MmapSaver`: which there are, in which files, of which shapes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_trak.runtime.checks import checked_int
from hf_trak.store.atomic import safe_name
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.traker.savers.row_files import RowFile

MARKS = "_is_featurized"


@dataclass(frozen=True)
class ArrayPlan:
    """One array of the directory.

    Attributes:
        key: name of the array in `current_store`.
        path: its file.
        shape: `(rows, width)`.
        dtype: NumPy dtype.
        checked: whether its rows have checksums.
        remedy: what to do about a damaged file.
    """

    key: str
    path: Path
    shape: tuple[int, int]
    dtype: Any
    checked: bool
    remedy: str

    def open(self, mode: Literal["r", "r+"]) -> RowFile:
        """Open the file. Errors are those of [`RowFile`]."""
        return RowFile(self.path, self.shape, self.dtype, self.checked, mode, self.remedy)

    def create(self, replace: bool = False) -> None:
        """Make the file, filled with zeros. A file that exists stays unless it is to be replaced."""
        if replace or not self.path.exists():
            RowFile.create(self.path, self.shape, self.dtype, self.checked, replace)


class MmapArrays:
    """All arrays of one directory."""

    def __init__(self, save_dir: Path, train_size: int, proj_dim: int, dtype: Any, checked: bool) -> None:
        """
        Args:
            save_dir: the directory.
            train_size: number of train examples, n.
            proj_dim: number of columns of gradients and features, k.
            dtype: NumPy dtype of gradients and features.
            checked: whether rows have checksums.
        """
        self.save_dir = save_dir
        self.train_size = train_size
        self.proj_dim = proj_dim
        self.dtype = dtype
        self.checked = checked

    def of_train_set(self, model_id: int, grads_deleted: bool = False) -> list[ArrayPlan]:
        """Plan the arrays of the train set under a model id. The marks come last, and are created last."""
        directory = self._directory(model_id)
        n, k = self.train_size, self.proj_dim
        again = (
            f"Restore it from a copy, or delete {directory / f'{MARKS}.mmap'} and featurize again, which computes all "
            "rows of this model id anew."
        )
        if grads_deleted:
            again = f"Restore it from a copy, or delete {directory} and featurize again."
        features = "Restore it from a copy, or delete it and call `finalize_features` again."
        plans = [
            self._plan("grads", directory / "grads.mmap", (n, k), self.dtype, again),
            self._plan("out_to_loss", directory / "out_to_loss.mmap", (n, 1), np.float32, again),
            self._plan("features", self.features_path(model_id), (n, k), self.dtype, features),
            ArrayPlan("is_featurized", directory / f"{MARKS}.mmap", (n, 1), np.int32, False, again),
        ]
        return plans[1:] if grads_deleted else plans

    def of_targets(self, model_id: int, experiment: str, num_targets: int) -> list[ArrayPlan]:
        """Plan the arrays of an experiment's targets under a model id. The marks come last."""
        directory = self._directory(model_id)
        m = checked_int(num_targets, "num_targets", 1, type_error=ValueError)
        grads, marks = (f"{safe_name(experiment, 'exp_name')}_{kind}" for kind in ("grads", "is_scored"))
        again = f"Restore it from a copy, or delete {directory / f'{marks}.mmap'} and score the targets again."
        return [
            self._plan(grads, directory / f"{grads}.mmap", (m, self.proj_dim), self.dtype, again),
            ArrayPlan(marks, directory / f"{marks}.mmap", (m, 1), np.int32, False, again),
        ]

    def of_scores(self, experiment: str, num_targets: int) -> ArrayPlan:
        """Plan the array of an experiment's scores."""
        path = self.save_dir / "scores" / f"{safe_name(experiment, 'exp_name')}.mmap"
        remedy = "Restore it from a copy, or call `finalize_scores` again."
        return self._plan("scores", path, (self.train_size, num_targets), np.float32, remedy)

    def features_path(self, model_id: int) -> Path:
        """Return the file of the features of a model id."""
        return self._directory(model_id) / "features.mmap"

    def _directory(self, model_id: int) -> Path:
        return self.save_dir / str(checked_model_id(model_id))

    def _plan(self, key: str, path: Path, shape: tuple[int, int], dtype: Any, remedy: str) -> ArrayPlan:
        return ArrayPlan(key, path, shape, dtype, self.checked, remedy)
