"""Records of the checkpoints of a feature store: the weights behind each id, and the checkpoints that belong to it.

`checkpoint-<model_id>/checkpoint.json` travels with the features of a checkpoint. It names their weights, the id under
which they were projected, and the configuration. `checkpoint-<model_id>.json` stays in the store, so that the loss of
a checkpoint is noticed: an average without it would be another result.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_trak.errors import CheckpointMismatchError, IncompleteStoreError, StoreError
from hf_trak.runtime.checks import checked_int
from hf_trak.store.atomic import create_bytes, differing, json_bytes, remove_stale_temporaries
from hf_trak.store.sealed import read_sealed, sealed_bytes, unsealed

RESTORE = "Restore it from a copy, or featurize in another output directory."

_CHECKPOINT = re.compile(r"checkpoint-(?P<id>0|[1-9]\d{0,17})(?P<file>\.json)?")


class CheckpointRecords:
    """The records of the checkpoints of one store. The module's docstring describes the files."""

    def __init__(self, output_dir: Path, config_hash: str, version: int) -> None:
        """
        Args:
            output_dir: directory of the store.
            config_hash: hash of its configuration, which all records repeat.
            version: its format version.
        """
        self.output_dir = output_dir
        self.config_hash = config_hash
        self.version = version

    def directory(self, model_id: int) -> Path:
        """Directory of one checkpoint's features."""
        return self.output_dir / f"checkpoint-{checked_model_id(model_id)}"

    def register(self, model_id: int, fingerprint: str, source: str | None) -> None:
        """Record a checkpoint, or compare it with its record.

        Args:
            model_id: id of the checkpoint, at least 0.
            fingerprint: identity of its weights.
            source: where they came from, for the reader.

        Raises:
            ValueError: `model_id` is not an integer of at least 0.
            CheckpointMismatchError: the id is tied to other weights.
            StoreError: the record is damaged, or belongs elsewhere.
        """
        model_id = checked_model_id(model_id)
        path = self.directory(model_id) / "checkpoint.json"
        content = {
            "config_hash": self.config_hash,
            "fingerprint": fingerprint,
            "model_id": model_id,
            "source": source,
        }
        if path.exists() or not create_bytes(path, encoded(content, self.version)):
            saved = self._read_checkpoint(model_id)
            if saved.get("fingerprint") != fingerprint:
                raise CheckpointMismatchError(
                    f"Model id {model_id} is tied to the weights {saved.get('fingerprint')} (from "
                    f"{saved.get('source')}) in {path}, but was given the weights {fingerprint} (from {source}). Give "
                    "each checkpoint a model id of its own, or use another output directory."
                )
        if self.version > 1:
            del content["source"]
            if not create_bytes(self._member_path(model_id), encoded(content, self.version)):
                self._check_member(model_id)
        remove_stale_temporaries(path.parent)
        remove_stale_temporaries(self.output_dir)

    def ids(self) -> list[int]:
        """List the ids of all registered checkpoints, ascending.

        Raises:
            StoreError: a checkpoint that belongs to the store is missing in part or as a whole.
        """
        registered, directories = set(), {}
        for path in self.output_dir.glob("checkpoint-*"):
            if (match := _CHECKPOINT.fullmatch(path.name)) is not None:
                if match["file"]:
                    registered.add(int(match["id"]))
                else:
                    directories[int(match["id"])] = path
        found = {model_id for model_id, path in directories.items() if (path / "checkpoint.json").exists()}
        for model_id, path in sorted(directories.items()):
            if model_id not in found and any(path.glob("*.safetensors")):
                raise StoreError(
                    f"{path / 'checkpoint.json'} is missing, although there are features of model id {model_id}. "
                    "Expected the file that names their weights. Restore it, featurize the same checkpoint under this "
                    "id again (finished shards stay), or delete the directory."
                )
        for model_id in sorted(registered - found):
            raise StoreError(
                f"{self.directory(model_id)} is missing, although {self._member_path(model_id).name} says that it "
                "belongs here. Expected the features of every checkpoint that was featurized. Restore it, featurize "
                "the checkpoint again, or delete that file, too, if you removed the directory on purpose."
            )
        return sorted(found)

    def info(self, model_id: int) -> dict[str, Any]:
        """Read the record of a checkpoint.

        Raises:
            IncompleteStoreError: the checkpoint is not registered.
            StoreError: its record is damaged, or belongs elsewhere.
        """
        info = self._read_checkpoint(model_id)
        if self.version > 1 and self._member_path(model_id).exists():
            self._check_member(model_id)
        return info

    def _read_checkpoint(self, model_id: int) -> dict[str, Any]:
        path = self.directory(model_id) / "checkpoint.json"
        try:
            info = read_record(path, self.version)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"Model id {model_id} is not in {self.output_dir}, which has {self.ids() or 'none'}. Featurize "
                "the train set with this checkpoint first."
            ) from error
        if info.get("config_hash") != self.config_hash:
            raise StoreError(
                f"{path} belongs to the configuration {info.get('config_hash')}, but trak_config.json next to it "
                f"has the hash {self.config_hash}. Expected files of one run with an unedited configuration. Restore "
                "the file, or use another output directory."
            )
        found = info.get("model_id")
        if found != checked_model_id(model_id) or isinstance(found, bool):
            raise StoreError(
                f"{path} is that of model id {found!r}, but lies in the directory of model id {model_id}. Expected "
                "features that were computed under the id of their directory, since the random projection depends on "
                "it. Give the directory its old name, or featurize this checkpoint under another id."
            )
        if not isinstance(info.get("fingerprint"), str):
            raise StoreError(f"{path} has the fingerprint {info.get('fingerprint')!r}. Expected a text. {RESTORE}")
        return info

    def _member_path(self, model_id: int) -> Path:
        return self.output_dir / f"checkpoint-{checked_model_id(model_id)}.json"

    def _check_member(self, model_id: int) -> None:
        """Compare the record in the store with the one in the checkpoint's directory."""
        path, info = self._member_path(model_id), self._read_checkpoint(model_id)
        said = read_record(path, self.version)
        keys = ("config_hash", "fingerprint", "model_id")
        if changes := differing({key: said.get(key) for key in keys}, {key: info[key] for key in keys}):
            raise StoreError(
                f"{path} and {path.with_suffix('') / 'checkpoint.json'} are of different checkpoints ("
                + "; ".join(changes)
                + "). Expected files of one run. Restore the directory that belongs here, or delete both and "
                "featurize this checkpoint again."
            )


def read_record(path: Path, version: int) -> dict[str, Any]:
    """Read a JSON file of a store of this format version, without checksum and version. Raises as `read_sealed`."""
    return unsealed(read_sealed(path, RESTORE, allow_unsealed=version == 1))


def encoded(content: Mapping[str, Any], version: int) -> bytes:
    """Encode a JSON file of a store of this format version."""
    return json_bytes(content) if version == 1 else sealed_bytes(content)


def checked_model_id(model_id: Any) -> int:
    """Return `model_id` as an `int`.

    Raises:
        ValueError: it is not an integer of at least 0.
    """
    remedy = "Give every checkpoint an id of its own."
    return checked_int(model_id, "model_id", 0, remedy=remedy, type_error=ValueError)


def checked_count(value: Any, name: str) -> int:
    """Return `value`, the argument `name`, as an `int`.

    Raises:
        ValueError: it is not an integer of at least 1.
    """
    return checked_int(value, name, 1, type_error=ValueError)
