"""Records of a feature store: its configuration, the weights behind each id, and the targets of each experiment.

`checkpoint-<model_id>/checkpoint.json` travels with the features of a checkpoint. It names their weights, the id under
which they were projected, and the configuration. `checkpoint-<model_id>.json` stays in the store, so that the loss of
a checkpoint is noticed: an average without it would be another result.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_trak.errors import CheckpointMismatchError, ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.kernels.philox import SEED_LIMIT
from hf_trak.runtime.checks import checked_int, is_int
from hf_trak.store.atomic import differing, json_bytes, plain_json, remove_stale_temporaries, safe_name
from hf_trak.store.codes import LEVELS, ROTATION
from hf_trak.store.sealed import CHECKSUM_KEY, SEALED_VERSION, VERSION_KEY, create_sealed, read_sealed, unsealed
from hf_trak.store.shards import ShardPlan

RESTORE = "Restore it from a copy, or featurize in another output directory."


_CHECKPOINT = re.compile(r"checkpoint-(?P<id>0|[1-9]\d{0,17})(?P<file>\.json)?")


class StoreRecords:
    """The records of one store, without its features. The module's docstring describes the files."""

    def __init__(self, output_dir: Path, config: dict[str, Any]) -> None:
        """
        Args:
            output_dir (`Path`):
                Directory of the store.
            config (`dict[str, Any]`):
                Its configuration, as [`~hf_trak.store.checkpoint_records.normalized`] returns it.
        """
        self.output_dir = output_dir
        self._config = config

    @property
    def config(self) -> dict[str, Any]:
        """Return a copy of the saved configuration."""
        return dict(self._config)

    @cached_property
    def config_hash(self) -> str:
        """Return the hex digest of all keys that define the features."""
        return config_hash(self._config)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint_dir(self, model_id: int) -> Path:
        """Return the directory of one checkpoint's train features."""
        return self.output_dir / f"checkpoint-{checked_model_id(model_id)}"

    def register_checkpoint(self, model_id: int, fingerprint: str, source: str | None = None) -> None:
        """Tie a `model_id` to the weights that its features are computed with.

        Args:
            model_id (`int`):
                Id of the checkpoint, at least 0.
            fingerprint (`str`):
                Identity of the weights, see `hf_trak.weights.checkpoints.fingerprint_state_dict`.
            source (`str`, *optional*):
                Where the weights came from; saved for the reader, not compared.

        Raises:
            ValueError: `model_id` is not an integer of at least 0.
            CheckpointMismatchError: the id is tied to other weights; the store is left as it was.
            StoreError: the record is damaged, or belongs elsewhere.
        """
        model_id = checked_model_id(model_id)
        path = self.checkpoint_dir(model_id) / "checkpoint.json"
        content = {"config_hash": self.config_hash, "fingerprint": fingerprint, "model_id": model_id, "source": source}
        if path.exists() or not create_sealed(path, content):
            saved = self._read_checkpoint(model_id)
            if saved.get("fingerprint") != fingerprint:
                raise CheckpointMismatchError(
                    f"Model id {model_id} is tied to the weights {saved.get('fingerprint')} (from "
                    f"{saved.get('source')}) in {path}, but was given the weights {fingerprint} (from {source}). "
                    "Expected the same weights. Give each checkpoint a model id of its own, such as "
                    "`checkpoints={1: weights}`, or use another output directory."
                )
        del content["source"]
        if not create_sealed(self._member_path(model_id), content):
            self._check_member(self._read_checkpoint(model_id))
        remove_stale_temporaries(path.parent)
        remove_stale_temporaries(self.output_dir)

    @property
    def model_ids(self) -> list[int]:
        """Return the ids of all registered checkpoints, ascending.

        Raises:
            StoreError: a checkpoint that belongs to the store has vanished in part or as a whole: leaving it out of
                an average would change every score.
        """
        paths = self.output_dir.glob("checkpoint-*")
        matches = [(match, path) for path in paths if (match := _CHECKPOINT.fullmatch(path.name))]
        registered = {int(match["id"]) for match, _ in matches if match["file"]}
        directories = {int(match["id"]): path for match, path in matches if not match["file"]}
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
                f"{self.checkpoint_dir(model_id)} is missing, although {self._member_path(model_id).name} says that "
                "it belongs here. Expected the features of every checkpoint that was featurized. Restore it, "
                "featurize the checkpoint again, or delete that file, too, if you removed the directory on purpose."
            )
        return sorted(found)

    def checkpoint_info(self, model_id: int) -> dict[str, Any]:
        """Return what is recorded of a checkpoint: `model_id`, `fingerprint`, `source`, `config_hash`.

        Raises:
            IncompleteStoreError: no checkpoint of this id is registered.
            StoreError: its record is damaged, belongs elsewhere, or is that of another configuration.
        """
        info = self._read_checkpoint(model_id)
        if self._member_path(model_id).exists():
            self._check_member(info)
        return info

    def _read_checkpoint(self, model_id: int) -> dict[str, Any]:
        path = self.checkpoint_dir(model_id) / "checkpoint.json"
        try:
            info = read_record(path)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"Model id {model_id} is not in {self.output_dir}, which has {self.model_ids or 'none'}. Featurize "
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

    def _check_member(self, info: Mapping[str, Any]) -> None:
        """Compare the record in the store with the one in the checkpoint's directory."""
        path = self._member_path(info["model_id"])
        said = read_record(path)
        keys = ("config_hash", "fingerprint", "model_id")
        if changes := differing({key: said.get(key) for key in keys}, {key: info[key] for key in keys}):
            raise StoreError(
                f"{path} and {path.with_suffix('') / 'checkpoint.json'} are of different checkpoints ("
                + "; ".join(changes)
                + "). Expected files of one run. Restore the directory that belongs here, or delete both and "
                "featurize this checkpoint again."
            )

    # -- experiments -------------------------------------------------------------------------------------------------

    @property
    def _with_experiments(self) -> Path:
        """Return the directory of the store that keeps the experiments."""
        return self.output_dir

    @property
    def experiments(self) -> list[str]:
        """Return the names of all experiments."""
        return sorted(path.parent.name for path in self._with_experiments.glob("experiments/*/experiment.json"))

    def experiment_dir(self, experiment: str) -> Path:
        """Return the directory of one experiment. Raises as `hf_trak.store.atomic.safe_name`."""
        return self._with_experiments / "experiments" / safe_name(experiment, "experiment")

    def _experiment_path(self, name: str) -> Path:
        return self.experiment_dir(name) / "experiment.json"

    def _register_experiment(
        self, name: str, content: Mapping[str, Any], compare: Mapping[str, "Comparison"] | None
    ) -> None:
        """Create the record of an experiment, or compare it with the one that exists.

        Args:
            name: the experiment.
            content: plain JSON.
            compare: see `hf_trak.store.checkpoint_records.compared`.

        Raises:
            ConfigMismatchError: the experiment exists with other values; it is left as it was.
            StoreError: its record is damaged.
        """
        path = self._experiment_path(name)
        given = {**content, "name": name}
        if not path.exists() and create_sealed(path, given):
            return
        saved = read_record(path)
        if changes := compared(saved, given, compare):
            raise ConfigMismatchError(
                f"Experiment {name!r} exists in {path} with other values than those given:\n  "
                + "\n  ".join(changes)
                + "\nUse another experiment name for other targets."
            )

    def experiment_info(self, experiment: str) -> dict[str, Any]:
        """Return what is recorded of an experiment: `num_targets`, `dataset_fingerprint`, and the `extra` values.

        Raises:
            IncompleteStoreError: there is no such experiment.
            StoreError: the file is damaged, or that of another experiment.
        """
        path = self._experiment_path(experiment)
        try:
            info = read_record(path)
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"Experiment {experiment!r} is not in {self._with_experiments}, which has "
                f"{self.experiments or 'none'}. Featurize its targets first."
            ) from error
        if (found := info.pop("name", None)) != experiment:
            raise StoreError(
                f"{path} is that of experiment {found!r}. Expected {experiment!r}, as its directory is called. Give "
                "the directory its old name, or delete it and attribute again."
            )
        return info

    def _target_count(self, name: str, info: Mapping[str, Any]) -> int:
        """Return the number of targets that a record gives.

        Raises:
            StoreError: it is no number.
        """
        try:
            return checked_count(info.get("num_targets"), "num_targets")
        except ValueError as error:
            raise StoreError(
                f"{self._experiment_path(name)} is damaged: {error} Delete the directory of this experiment and "
                "attribute again."
            ) from error


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON file of a store, without checksum and version. Raises as `read_sealed`."""
    return unsealed(read_sealed(path, RESTORE))


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


FEATURE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

"""Storage dtypes, by the name that `feature_dtype` gives them in the configuration."""


CODE_BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}

"""Bits per number of codes, by the same name."""


MAX_SHARDS = 1 << 20

"""Largest number of shards of a store, which bounds the time to look at all of them."""


INFORMATIONAL = ("hf_trak_version", "model_name", "model_revision", "versions")

"""Keys that are saved for the reader, but neither compared nor hashed."""


REQUIRED = ("train_size", "proj_dim", "feature_dtype", "shard_size")

"""Keys that every configuration has."""


Comparison = Callable[[Any, Any], list[str]]

"""`(saved, given) -> lines`, one line for each difference that matters."""


_RESTORE = (
    "It is the configuration of the whole store: restore it from a copy, or featurize in another output directory."
)


def normalized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check a configuration, and return it as it is read back from its file, without the checksum.

    Args:
        config: plain JSON with the keys of [`REQUIRED`]. `format_version` is added.

    Raises:
        ValueError: a key is missing, or a value is out of range or not plain JSON.
    """
    try:
        content = plain_json({**config, VERSION_KEY: SEALED_VERSION})
        content.pop(CHECKSUM_KEY, None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The configuration is not plain JSON: {error}.") from error
    missing = [key for key in REQUIRED if key not in content]
    if missing:
        raise ValueError(f"The configuration lacks {missing}. Expected at least {list(REQUIRED)}.")
    for key in ("train_size", "proj_dim", "shard_size"):
        checked_count(content[key], key)
    if content["feature_dtype"] not in (*FEATURE_DTYPES, *CODE_BITS):
        names = sorted([*FEATURE_DTYPES, *CODE_BITS])
        raise ValueError(f"`feature_dtype` is {content['feature_dtype']!r}. Expected one of {names}.")
    check_codes(content)
    shards = len(ShardPlan(content["train_size"], content["shard_size"]))
    if shards > MAX_SHARDS:
        raise ValueError(
            f"`train_size` {content['train_size']} in shards of {content['shard_size']} rows makes {shards} files. "
            f"Expected at most {MAX_SHARDS}. Choose a larger `shard_size`."
        )
    return content


def check_codes(content: Mapping[str, Any]) -> None:
    """Check what a configuration says about codes.

    Raises:
        ValueError: codes of a rotation or levels that this version of hf_trak does not know, or without the seed of
            the rotation.
    """
    if content["feature_dtype"] not in CODE_BITS:
        return
    for key, known in (("rotation", ROTATION), ("levels", LEVELS)):
        if content.get(key) != known:
            raise ValueError(f"`{key}` is {content.get(key)!r}. Expected {known!r}.")
    seed = content.get("seed")
    if not is_int(seed, 0, SEED_LIMIT - 1):
        raise ValueError(f"`seed` is {seed!r}. Expected an integer in 0 … 2⁶³ − 1.")


def code_settings(feature_dtype: str) -> dict[str, str]:
    """Return the entries of a configuration that describe the codes of a storage dtype. Floating-point numbers have
    none."""
    return {"rotation": ROTATION, "levels": LEVELS} if feature_dtype in CODE_BITS else {}


def read_config(path: Path) -> dict[str, Any]:
    """Read and check the configuration of a store.

    Args:
        path: its file, `trak_config.json`.

    Returns:
        See [`normalized`].

    Raises:
        IncompleteStoreError: there is no such file.
        StoreError: the file is damaged, or of another format version.
    """
    try:
        config = read_sealed(path, _RESTORE)
    except FileNotFoundError as error:
        raise IncompleteStoreError(
            f"{path.parent} holds no feature store: {path.name} is missing. Expected the output directory of a run. "
            "Featurize first."
        ) from error
    try:
        return normalized(config)
    except ValueError as error:
        raise StoreError(f"{path} is not a valid configuration: {error}") from error


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash the keys that define the features. 32 hex digits."""
    return hashlib.sha256(json_bytes(_defining(config))).hexdigest()[:32]


def config_changes(
    saved: Mapping[str, Any], given: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None
) -> list[str]:
    """List what differs between two configurations in the keys that define the features.

    Args:
        saved: the configuration of a store, see [`normalized`].
        given: another one.
        compare: see [`compared`].

    Returns:
        One line for each difference; empty if there is none.

    Raises:
        ValueError: see [`normalized`].
    """
    return compared(_defining(saved), _defining(normalized(given)), compare)


def compared(
    saved: Mapping[str, Any], given: Mapping[str, Any], compare: Mapping[str, Comparison] | None = None
) -> list[str]:
    """List what differs between two JSON objects.

    Args:
        saved, given: the objects.
        compare: functions that compare the values of some keys, which need not be equal. They are called only where
            the values are not.

    Returns:
        One line for each key whose values differ, followed by the lines of `compare`.
    """
    rest = dict(given)
    lines: list[str] = []
    for key, comparison in (compare or {}).items():
        if key in saved and key in rest and saved[key] != rest[key]:
            lines += comparison(saved[key], rest[key])
            rest[key] = saved[key]
    return [*differing(saved, rest), *lines]


def _defining(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in INFORMATIONAL}
