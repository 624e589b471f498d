"""Records of the experiments of a feature store: the targets that each name stands for.

`experiments/<name>/experiment.json` holds the number of targets, the fingerprint of their dataset, and whatever else
has to be the same whenever the experiment is used again. The first use writes it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.store.atomic import create_bytes, safe_name
from hf_trak.store.checkpoint_records import checked_count, encoded, read_record
from hf_trak.store.configuration import Comparison, compared


class ExperimentRecords:
    """The records of the experiments of one store."""

    def __init__(self, output_dir: Path, version: int) -> None:
        """
        Args:
            output_dir: directory of the store.
            version: its format version.
        """
        self.output_dir = output_dir
        self.version = version

    def directory(self, name: str) -> Path:
        """Directory of one experiment. Raises as `hf_trak.store.atomic.safe_name`."""
        return self.output_dir / "experiments" / safe_name(name, "experiment")

    def path(self, name: str) -> Path:
        """File of one record."""
        return self.directory(name) / "experiment.json"

    def names(self) -> list[str]:
        """Names of all experiments, sorted."""
        return sorted(path.parent.name for path in self.output_dir.glob("experiments/*/experiment.json"))

    def register(self, name: str, content: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None) -> None:
        """Create the record of an experiment, or compare it with the one that exists.

        Args:
            name: the experiment.
            content: plain JSON.
            compare: see `hf_trak.store.configuration.compared`.

        Raises:
            ConfigMismatchError: the experiment exists with other values; it is left as it was.
            StoreError: its record is damaged.
        """
        path = self.path(name)
        given = dict(content) if self.version == 1 else {**content, "name": name}
        if not path.exists() and create_bytes(path, encoded(given, self.version)):
            return
        saved = read_record(path, self.version)
        if self.version == 1:
            given = {key: value for key, value in given.items() if key in saved}
        if changes := compared(saved, given, compare):
            raise ConfigMismatchError(
                f"Experiment {name!r} exists in {path} with other values than those given:\n  "
                + "\n  ".join(changes)
                + "\nUse another experiment name for other targets."
            )

    def info(self, name: str) -> dict[str, Any]:
        """Read the record of an experiment: what was given to [`~ExperimentRecords.register`].

        Raises:
            IncompleteStoreError: there is no such experiment.
            StoreError: the record is damaged, or that of another experiment.
        """
        path = self.path(name)
        try:
            info = read_record(path, self.version)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"Experiment {name!r} is not in {self.output_dir}, which has {self.names() or 'none'}. Featurize its "
                "targets first."
            ) from error
        if self.version > 1 and (found := info.pop("name", None)) != name:
            raise StoreError(
                f"{path} is that of experiment {found!r}. Expected {name!r}, as its directory is called. Give the "
                "directory its old name, or delete it and attribute again."
            )
        return info

    def target_count(self, name: str, info: Mapping[str, Any]) -> int:
        """Number of targets that a record gives.

        Raises:
            StoreError: it is no number.
        """
        try:
            return checked_count(info.get("num_targets"), "num_targets")
        except ValueError as error:
            raise StoreError(
                f"{self.path(name)} is damaged: {error} Delete the directory of this experiment and attribute again."
            ) from error
