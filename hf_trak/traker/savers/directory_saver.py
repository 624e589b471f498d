"""The common base of `MmapSaver` and `SafetensorsSaver`: a directory for a train set of a known size."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_trak.runtime.checks import checked_int
from hf_trak.store.atomic import remove_stale
from hf_trak.traker.savers.base import AbstractSaver, ModelIDException


class DirectorySaver(AbstractSaver):
    """A saver that opens its directory when it is made, and goes on with what the directory holds.

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
        sizes = self._sizes()
        in_format_1 = {**getattr(metadata, "in_format_1", self.metadata), **sizes}
        self.metadata |= sizes
        self._open_directory(in_format_1)
        remove_stale(self.save_dir)
        if load_from_save_dir:
            self.model_ids = self._saved_model_ids()
        self.experiments = self._saved_experiments()

    def init_store(self, model_id: int) -> None:
        """Open the arrays of the train set under a model id. They are created if they do not exist."""
        self.load_current_store(model_id)

    def _sizes(self) -> dict[str, Any]:
        """Return the part of the metadata that `TRAKer` leaves to its saver."""
        return {
            "feature_dtype": "float16" if self.use_half_precision else "float32",
            "proj_dim": self.proj_dim,
            "train_size": self.train_set_size,
        }

    @abstractmethod
    def _open_directory(self, in_format_1: Mapping[str, Any]) -> None:
        """Open the directory for `self.metadata`.

        Args:
            in_format_1: the same metadata as directories of format 1 describe it.
        """

    @abstractmethod
    def _saved_model_ids(self) -> dict[int, dict[str, Any]]:
        """Read what the directory says of each registered model id."""

    @abstractmethod
    def _saved_experiments(self) -> dict[str, dict[str, Any]]:
        """Read what the directory says of each experiment."""

    def _already_registered(self, model_id: int) -> ModelIDException:
        return ModelIDException(
            f"Model id {model_id} is registered already in {self.save_dir}. Use another model id, or continue this "
            "one with `load_from_save_dir=True` (or `_allow_featurizing_already_registered=True`)."
        )
