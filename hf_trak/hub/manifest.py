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
      "settings": {λ, engine, solver, curvature and other fields that change scores or their rounding},
      "weights_dtype": "float32",
      "train_dataset": {"name", "config", "split", "revision"} or null,
      "lds": the linear datamodeling score, if it was measured, or null,
      "train_rows": checksum of the digests of the training rows
    }

Every value of an untrusted index is checked here, and none is used as a path, imported or executed. Manifests of
version 1 have no checksum; they are accepted beside configurations of version 1.

`curvature` is optional. So are `solver`, which is left out beside a Gram matrix, `row_digests`, `converted_from`
and `train_rows`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hf_trak.config import BITS, TrakConfig
from hf_trak.errors import RefusedIndexError, StoreError
from hf_trak.hub.names import HubSource, checked_repo, checked_revision, read_foreign_object, shown, too_large
from hf_trak.runtime.checks import is_int
from hf_trak.store.sealed import check_seal
from hf_trak.store.shards import ShardPlan

_DIGEST = re.compile(r"[0-9a-f]{32}")

_MAX_RANK = 1 << 20


@dataclass(frozen=True)
class PublishedCurvature:
    """The checksums of the files of a curvature, see `hf_trak.curvature.files`.

    Attributes:
        record: that of `curvature.json`.
        blocks: those of `block-00000.safetensors`, ….
        diagonal: that of `diagonal.safetensors`; `None` without one.
    """

    record: str
    blocks: tuple[str, ...]
    diagonal: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the checksums as plain JSON."""
        return {"record": self.record, "blocks": list(self.blocks), "diagonal": self.diagonal}


@dataclass(frozen=True)
class PublishedSolver:
    """The files that the solver of a checkpoint without a Gram matrix keeps, see `hf_trak.hub.index_files`.

    Attributes:
        kind: `"low_rank"`, or `"none"` where nothing is published.
        rank: number of eigenvalues.
        checksum: that of the file.
    """

    kind: Literal["low_rank", "none"]
    rank: int = 0
    checksum: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON."""
        return {"kind": "none"} if self.kind == "none" else vars(self).copy()


@dataclass(frozen=True)
class PublishedCheckpoint:
    """One checkpoint of an index.

    Attributes:
        fingerprint: digest of the weights.
        source: the model repo of the weights, if there is one.
        shards: the checksum of every feature shard.
        references: the checksum of the tensors that the task computed before its first batch; `None` for tasks that
            compute none.
        curvature: the files of its curvature, if one is published.
        solver: what its solver keeps; `None` for a Gram matrix.
        row_digests: the checksum of the digests of its rows, if there are some.
        converted_from: storage dtypes that its features had before they were converted.
    """

    fingerprint: str
    source: HubSource | None
    shards: tuple[str, ...]
    references: str | None = None
    curvature: PublishedCurvature | None = None
    solver: PublishedSolver | None = None
    row_digests: str | None = None
    converted_from: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the checkpoint as plain JSON."""
        content: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "source": None if self.source is None else str(self.source),
            "shards": list(self.shards),
            "references": self.references,
        }
        optional = {
            "solver": None if self.solver is None else self.solver.to_json(),
            "row_digests": self.row_digests,
            "converted_from": list(self.converted_from) or None,
            "curvature": None if self.curvature is None else self.curvature.to_json(),
        }
        return {**content, **{key: value for key, value in optional.items() if value is not None}}


def is_digest(value: Any) -> bool:
    """Tell whether a value is a digest as hf_trak writes it."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def checkpoint_from_json(key: str, value: Any, plan: ShardPlan) -> PublishedCheckpoint:
    """Check the entry of a checkpoint in a manifest from an untrusted source.

    Args:
        key: its id, for messages.
        value: the entry.
        plan: the division into shards that the index's configuration implies.

    Raises:
        ValueError: a value is one that this library does not write. The message begins with the value.
    """
    if not isinstance(value, dict):
        raise ValueError(f"checkpoint {key} is {shown(value)}, not an object")
    shards = value.get("shards")
    if not isinstance(shards, list) or len(shards) != len(plan):
        count = len(shards) if isinstance(shards, list) else shown(shards)
        raise ValueError(f"checkpoint {key} has {count} shards, not the {len(plan)} that the configuration implies")
    references, rows = value.get("references"), value.get("row_digests")
    for digest in (value.get("fingerprint"), *shards, *(one for one in (references, rows) if one is not None)):
        if not is_digest(digest):
            raise ValueError(f"checkpoint {key} has the digest {shown(digest)}, not 32 hex digits")
    source = value.get("source")
    return PublishedCheckpoint(
        value["fingerprint"],
        None if source is None else HubSource.parse(source, f"the source of checkpoint {key}"),
        tuple(shards),
        references,
        _curvature(key, value["curvature"]) if "curvature" in value else None,
        _solver(key, value["solver"]) if "solver" in value else None,
        rows,
        _history(key, value.get("converted_from", [])),
    )


def _solver(key: str, value: Any) -> PublishedSolver:
    if value == {"kind": "none"}:
        return PublishedSolver("none")
    known = isinstance(value, dict) and set(value) == {"kind", "rank", "checksum"} and value["kind"] == "low_rank"
    if not known or not is_int(value["rank"], 1, _MAX_RANK) or not is_digest(value["checksum"]):
        raise ValueError(f"the solver of checkpoint {key} is {shown(value)}, not one that hf_trak publishes")
    return PublishedSolver("low_rank", value["rank"], value["checksum"])


def _history(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > len(BITS) or not all(name in BITS for name in map(str, value)):
        raise ValueError(f"checkpoint {key} was converted from {shown(value)}, not a list of storage dtypes")
    return tuple(map(str, value))


def _curvature(key: str, value: Any) -> PublishedCurvature:
    if not isinstance(value, dict) or set(value) != {"record", "blocks", "diagonal"}:
        raise ValueError(f"the curvature of checkpoint {key} is {shown(value)}, not an object of checksums")
    blocks, diagonal = value["blocks"], value["diagonal"]
    if not isinstance(blocks, list):
        raise ValueError(f"the curvature of checkpoint {key} has the blocks {shown(blocks)}, not a list of checksums")
    for digest in (value["record"], *blocks, *([] if diagonal is None else [diagonal])):
        if not is_digest(digest):
            raise ValueError(f"the curvature of checkpoint {key} has the digest {shown(digest)}, not 32 hex digits")
    return PublishedCurvature(value["record"], tuple(blocks), diagonal)


MANIFEST_FILE = "trak_index.json"

MANIFEST_VERSION = 1

READABLE_MANIFESTS = (MANIFEST_VERSION,)

MAX_JSON_BYTES = 16 << 20

"""Maximum size of a JSON file: room for 160,000 parameters, or for the checksums of 350,000 shards."""

MANIFEST_BYTES_PER_VALUE = 16

"""Minimum bytes per value. A manifest consists mostly of digests of 32 digits."""


_MAX_DIGITS = 20


SETTINGS = (
    "engine",
    "label_names",
    "lambda_relative",
    "per_device_batch_size",
    "remove_unused_columns",
    "solver",
    "curvature",
)

"""Fields of `TrakConfig` that the feature store does not record and that scores depend on."""


CURVATURE_SETTINGS = ("kind", "labels", "rows", "damping", "hybrid_lambda")

"""Fields of `CurvatureConfig` that exact scores depend on."""


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
        settings: fields of `TrakConfig`, see [`SETTINGS`] and [`CURVATURE_SETTINGS`].
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
            "settings": self.settings,
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
        if not is_digest(config):
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
    settings = content.get("settings")
    if not isinstance(settings, dict) or set(settings) - set(SETTINGS):
        raise ValueError(f"`settings` is {shown(settings)}, not an object with some of {list(SETTINGS)}")
    curvature = settings.get("curvature", {})
    if not isinstance(curvature, dict) or set(curvature) - set(CURVATURE_SETTINGS):
        raise ValueError(f"`curvature` is {shown(curvature)}, not an object with some of {list(CURVATURE_SETTINGS)}")
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
