"""The manifest of a published index, `trak_index.json`: facts that the feature store's own files do not record.

    {
      "checksum": digest of all other keys, see `hf_trak.store.sealed`,
      "format_version": 2,
      "config": hash of the configuration beside it,
      "checkpoints": {"0": {"fingerprint": …, "source": "hf://user/model@revision" or null, "shards": [checksum, …],
                            "references": checksum or null,
                            "solver": {"kind": "low_rank", "rank": 2048, "checksum": checksum} or {"kind": "none"},
                            "row_digests": checksum,
                            "converted_from": [dtype, …],
                            "curvature": {"record": checksum, "blocks": [checksum, …], "diagonal": checksum or null}}},
      "settings": {λ, engine, batch size and other fields that change scores or their rounding},
      "exact_settings": {curvature, damping and other fields that exact scores depend on},
      "solver_settings": {how the ridge regression is solved},
      "weights_dtype": "float32",
      "train_dataset": {"name", "config", "split", "revision"} or null,
      "lds": the linear datamodeling score, if it was measured, or null,
      "train_rows": checksum of the digests of the training rows
    }

Every value of an untrusted index is checked here, and none is used as a path, imported or executed. Manifests of
version 1 have no checksum; they are accepted beside configurations of version 1.

`curvature`, `exact_settings` and `solver_settings` are optional, and came without another version: readers that do not
know them pass over them and compute the same scores from features. These readers refuse unknown keys in `settings`. So
are `solver`, which is left out where there is a Gram matrix, `row_digests`, `converted_from` and `train_rows`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_trak.config import TrakConfig
from hf_trak.errors import RefusedIndexError, StoreError
from hf_trak.hub.foreign_json import read_foreign_object, shown, too_large
from hf_trak.hub.names import checked_repo, checked_revision
from hf_trak.hub.published import PublishedCheckpoint, checkpoint_from_json, is_digest
from hf_trak.store.sealed import check_seal
from hf_trak.store.shards import ShardPlan

MANIFEST_FILE = "trak_index.json"
MANIFEST_VERSION = 2
READABLE_MANIFESTS = (1, MANIFEST_VERSION)
MAX_JSON_BYTES = 16 << 20
"""Maximum size of a JSON file: room for 160,000 parameters, or for the checksums of 350,000 shards."""
MANIFEST_BYTES_PER_VALUE = 16
"""Minimum bytes per value. A manifest consists mostly of digests of 32 digits."""

_MAX_DIGITS = 20

SETTINGS = (
    "engine",
    "label_names",
    "lambda_reg",
    "lambda_relative",
    "per_device_batch_size",
    "remove_unused_columns",
)
"""Fields of `TrakConfig` that the feature store does not record and that scores depend on."""

EXACT_SETTINGS = ("curvature", "curvature_labels", "curvature_rows", "damping", "hybrid_lambda")
"""Likewise for exact scores."""

SOLVER_SETTINGS = ("solver", "solver_rank")
"""Likewise for the solver of the ridge regression."""

_GROUPS = {"settings": SETTINGS, "exact_settings": EXACT_SETTINGS, "solver_settings": SOLVER_SETTINGS}
_DTYPES = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class TrainSource:
    """The dataset repo of the training rows.

    Attributes:
        name: the repo.
        config: configuration of the dataset, as in `datasets.load_dataset`.
        split: name of the split.
        revision: branch, tag or commit.
    """

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class IndexManifest:
    """The content of `trak_index.json`, checked.

    Attributes:
        checkpoints: the checkpoints by model id.
        settings: fields of `TrakConfig`, see [`SETTINGS`], [`EXACT_SETTINGS`] and [`SOLVER_SETTINGS`].
        weights_dtype: dtype in which the weights have their fingerprint.
        train_dataset: the training rows.
        lds: the linear datamodeling score, if it was measured.
        config: hash of the configuration beside the manifest; `None` in manifests of version 1.
        train_rows: checksum of the digests of the training rows, if there are some.
    """

    checkpoints: dict[int, PublishedCheckpoint]
    settings: dict[str, Any] = field(default_factory=dict)
    weights_dtype: str | None = None
    train_dataset: TrainSource | None = None
    lds: float | None = None
    config: str | None = None
    train_rows: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain JSON, without its checksum."""
        return {
            "format_version": MANIFEST_VERSION,
            "config": self.config,
            "checkpoints": {
                str(model_id): checkpoint.to_json() for model_id, checkpoint in sorted(self.checkpoints.items())
            },
            **{
                group: {name: value for name, value in self.settings.items() if name in names}
                for group, names in _GROUPS.items()
            },
            "weights_dtype": self.weights_dtype,
            "train_dataset": None if self.train_dataset is None else vars(self.train_dataset),
            "lds": self.lds,
            **({} if self.train_rows is None else {"train_rows": self.train_rows}),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], plan: ShardPlan) -> "IndexManifest":
        """Check a manifest from an untrusted source.

        Args:
            content: the parsed file.
            plan: the division into shards that the index's configuration implies.

        Raises:
            ValueError: a value is one that this library does not write. The message begins with the value, so that
                the caller can put the name of the file in front.
        """
        version = content.get("format_version")
        if version not in READABLE_MANIFESTS or isinstance(version, bool):
            raise ValueError(
                f"it has format version {shown(version)}, and this version of hf_trak reads {MANIFEST_VERSION}"
            )
        try:
            check_seal(content, MANIFEST_FILE)
        except StoreError as error:
            raise ValueError("its content has another checksum than the one that it records") from error
        checkpoints = content.get("checkpoints")
        if not isinstance(checkpoints, dict) or not checkpoints:
            raise ValueError(f"`checkpoints` is {shown(checkpoints)}, not an object with at least one entry")
        settings = _settings(content)
        dtype, lds, config = content.get("weights_dtype"), content.get("lds"), content.get("config")
        if (config is None) != (version == 1) or not (config is None or is_digest(config)):
            raise ValueError(f"`config` is {shown(config)}, not 32 hex digits")
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"`weights_dtype` is {shown(dtype)}, not null or one of {list(_DTYPES)}")
        if (rows := content.get("train_rows")) is not None and not is_digest(rows):
            raise ValueError(f"`train_rows` is {shown(rows)}, not 32 hex digits")
        if lds is not None and (isinstance(lds, bool) or not isinstance(lds, int | float) or not -1 <= lds <= 1):
            raise ValueError(f"`lds` is {shown(lds)}, not null or a number from -1 to 1")
        return cls(
            {_model_id(key): checkpoint_from_json(key, value, plan) for key, value in checkpoints.items()},
            settings,
            dtype,
            _train_source(content.get("train_dataset")),
            lds,
            config,
            rows,
        )


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for group, names in _GROUPS.items():
        found = content.get(group, None if group == "settings" else {})
        if not isinstance(found, dict) or set(found) - set(names):
            raise ValueError(f"`{group}` is {shown(found)}, not an object with some of {list(names)}")
        settings |= found
    TrakConfig(**settings)
    labels = settings.get("label_names")
    if labels is not None and not (isinstance(labels, list) and all(isinstance(name, str) for name in labels)):
        raise ValueError(f"`label_names` is {shown(labels)}, not null or a list of names")
    if not isinstance(settings.get("remove_unused_columns", True), bool):
        raise ValueError(f"`remove_unused_columns` is {shown(settings['remove_unused_columns'])}, not true or false")
    return settings


def _model_id(key: str) -> int:
    if not re.fullmatch(r"0|[1-9]\d{0,8}", key):
        raise ValueError(f"a checkpoint has the id {shown(key)}, not a number such as '0'")
    return int(key)


def _train_source(value: Any) -> TrainSource | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"name", "config", "split", "revision"}:
        raise ValueError(
            f"`train_dataset` is {shown(value)}, not null or an object with name, config, split, revision"
        )
    for key in ("config", "split"):
        if value[key] is not None and not (isinstance(value[key], str) and re.fullmatch(r"[\w.-]{1,100}", value[key])):
            raise ValueError(f"the {key} of `train_dataset` is {shown(value[key])}, not a plain name")
    if value["revision"] is not None:
        checked_revision(value["revision"], "the revision of `train_dataset`")
    return TrainSource(
        checked_repo(value["name"], "`train_dataset`"), value["config"], value["split"], value["revision"]
    )


def read_index_json(path: Path, where: str, max_bytes: int, bytes_per_value: int) -> dict[str, Any]:
    """Read a JSON file of an untrusted index.

    Args:
        path: the file on this machine.
        where: name of the file in messages.
        max_bytes, bytes_per_value: see [`read_foreign_object`].

    Raises:
        RefusedIndexError: the file is too large for an index, or is not a JSON object.
    """
    try:
        return read_foreign_object(path, max_bytes, bytes_per_value, _MAX_DIGITS)
    except ValueError as error:
        raise refused(where, str(error)) from error


def check_json_size(where: str, size: int | None, most: int | None = None) -> None:
    """Refuse a JSON file that is too large, before it is fetched.

    Args:
        where: name of the file in messages.
        size: bytes of the file; `None` if they are unknown.
        most: maximum bytes; `None` is [`MAX_JSON_BYTES`].

    Raises:
        RefusedIndexError: the file is larger.
    """
    most = MAX_JSON_BYTES if most is None else most
    if size is not None and size > most:
        raise refused(where, too_large(size, most))


def refused(where: str, reason: str) -> RefusedIndexError:
    """Make the error for an index that is refused."""
    return RefusedIndexError(
        f"{where} was refused: {reason}. Nothing of it was executed or kept. Expected an index that hf_trak has "
        "published: use another revision, or ask its publisher for a new one."
    )
