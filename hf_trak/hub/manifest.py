"""The manifest of a published index, `trak_index.json`: its files, and facts that the feature store does not record.

    {
      "checksum": digest of all other keys, see `hf_trak.store.sealed`,
      "format_version": 1,
      "config": hash of the configuration beside it,
      "files": {path: [bytes, the checksum that the file records], …},
      "checkpoints": {"0": {"fingerprint": …, "source": "hf://user/model@revision" or null,
                            "converted_from": [dtype, …]}},
      "settings": {λ, engine, batch size, curvature, solver and other fields that scores depend on},
      "weights_dtype": "float32",
      "train_dataset": {"name", "config", "split", "revision"} or null,
      "lds": the linear datamodeling score, if it was measured, or null
    }

Tensor files and `curvature.json` record a checksum of themselves, which covers tensors and metadata. Every value of an
untrusted index is checked here, and none is imported or executed. Only paths that an index can have are accepted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from hf_trak.config import BITS, TrakConfig
from hf_trak.hub.names import HubSource, checked_repo, checked_revision, expect, shown
from hf_trak.runtime.checks import is_int
from hf_trak.store.shards import ShardPlan

MAX_JSON_BYTES = 16 << 20
"""Maximum size of a JSON file: room for 160,000 parameters, or for the checksums of 120,000 shards."""

INDEX_DIGITS = 20
"""Maximum number of digits of an integer in the JSON files of an index."""

_FEATURE_FIELDS = {
    "feature_dtype", "grad_wrt", "model_dtype", "num_draws", "proj_dim", "proj_type", "seed", "shard_size",
}  # fmt: skip
"""Fields of `TrakConfig` that define features. The index records them."""

_MACHINE_FIELDS = {"budget", "output_dir", "use_cpu"}
"""Fields that every machine chooses for itself."""

RUN_OPTIONS = tuple(sorted({one.name for one in fields(TrakConfig)} - _FEATURE_FIELDS))
"""Fields of `TrakConfig` that can be chosen for an existing index."""

SETTINGS = tuple(name for name in RUN_OPTIONS if name not in _MACHINE_FIELDS)
"""Fields of `TrakConfig` that the feature store does not record and that scores depend on."""

CURVATURE_SETTINGS = ("kind", "labels", "rows", "damping", "hybrid_lambda")
"""Fields of `CurvatureConfig` that exact scores depend on."""

_DTYPES = ("float32", "float64", "float16", "bfloat16")

_DIGEST = re.compile(r"[0-9a-f]{32}")

_ID = r"0|[1-9]\d{0,8}"

_OTHER_FILES = re.compile(
    rf"calibration\.json|train_rows\.safetensors|checkpoint-(?P<id>{_ID})/(?P<name>gram|low_rank-[1-9]\d{{0,6}}|row_digests|references)"
    rf"\.safetensors|curvature/(?P<curved>{_ID})/(curvature\.json|block-\d{{5,9}}\.safetensors|diagonal\.safetensors)"
)
"""Paths of the files that a manifest may list beside the shards of its checkpoints."""


@dataclass(frozen=True)
class PublishedFile:
    """A file of an index.

    Attributes:
        size: its bytes.
        checksum: the checksum that it records of itself.
    """

    size: int
    checksum: str


@dataclass(frozen=True)
class PublishedCheckpoint:
    """One checkpoint of an index.

    Attributes:
        fingerprint: digest of the weights.
        source: the model repo of the weights, if there is one.
        converted_from: storage dtypes that its features had before they were converted.
    """

    fingerprint: str
    source: HubSource | None = None
    converted_from: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the checkpoint as plain JSON."""
        source = None if self.source is None else str(self.source)
        return {"fingerprint": self.fingerprint, "source": source, "converted_from": list(self.converted_from)}

    @classmethod
    def from_json(cls, key: str, value: Any) -> "PublishedCheckpoint":
        """Check the entry of a checkpoint from an untrusted source.

        Args:
            key: its id, for messages.
            value: the entry.

        Raises:
            ValueError: a value is one that this library does not write. The message begins with the value.
        """
        right = isinstance(value, dict) and set(value) == {"fingerprint", "source", "converted_from"}
        expect(right, f"checkpoint {key}", value, "fingerprint, source and converted_from")
        fingerprint, source, history = value["fingerprint"], value["source"], value["converted_from"]
        if not _is_digest(fingerprint):
            raise ValueError(f"checkpoint {key} has the digest {shown(fingerprint)}, not 32 hex digits")
        known = isinstance(history, list) and len(history) <= len(BITS)
        if not known or not all(isinstance(name, str) and name in BITS for name in history):
            raise ValueError(f"checkpoint {key} was converted from {shown(history)}, not a list of storage dtypes")
        parsed = None if source is None else HubSource.parse(source, f"the source of checkpoint {key}")
        return cls(fingerprint, parsed, tuple(history))


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

    @classmethod
    def from_json(cls, value: Any) -> "TrainSource":
        """Check the entry of the training rows from an untrusted source.

        Args:
            value: the entry.

        Raises:
            ValueError: a value is one that this library does not write. The message begins with the value.
        """
        right = isinstance(value, dict) and set(value) == {"name", "config", "split", "revision"}
        expect(right, "`train_dataset`", value, "null or an object with name, config, split, revision")
        for key in ("config", "split"):
            plain = isinstance(value[key], str) and re.fullmatch(r"[\w.-]{1,100}", value[key]) is not None
            expect(value[key] is None or plain, f"the {key} of `train_dataset`", value[key], "a plain name")
        if value["revision"] is not None:
            checked_revision(value["revision"], "the revision of `train_dataset`")
        checked_repo(value["name"], "`train_dataset`")
        return cls(**value)


@dataclass(frozen=True)
class IndexManifest:
    """The content of `trak_index.json`, checked.

    Attributes:
        files: the files by path.
        checkpoints: the checkpoints by model id.
        config: hash of the configuration beside the manifest.
        settings: fields of `TrakConfig`, see [`SETTINGS`] and [`CURVATURE_SETTINGS`].
        weights_dtype: dtype in which the weights have their fingerprint.
        train_dataset: the training rows.
        lds: the linear datamodeling score, if it was measured.
    """

    files: dict[str, PublishedFile]
    checkpoints: dict[int, PublishedCheckpoint]
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    weights_dtype: str | None = None
    train_dataset: TrainSource | None = None
    lds: float | None = None

    @cached_property
    def solvers(self) -> dict[int, str]:
        """Return the file that the solver of a checkpoint keeps, by model id. Some solvers keep none."""
        found = {}
        for path in self.files:
            match = _OTHER_FILES.fullmatch(path)
            if match and match["id"] and match["name"].startswith(("gram", "low_rank")):
                found[int(match["id"])] = path.partition("/")[2]
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain JSON, without its checksum and format version."""
        return {
            "config": self.config,
            "files": {path: [one.size, one.checksum] for path, one in sorted(self.files.items())},
            "checkpoints": {str(model_id): one.to_json() for model_id, one in sorted(self.checkpoints.items())},
            "settings": self.settings,
            "weights_dtype": self.weights_dtype,
            "train_dataset": None if self.train_dataset is None else vars(self.train_dataset),
            "lds": self.lds,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], plan: ShardPlan) -> "IndexManifest":
        """Check a manifest from an untrusted source, whose version and checksum are those of one.

        Args:
            content: the parsed file.
            plan: the division into shards that the index's configuration implies.

        Raises:
            ValueError: a value is one that this library does not write. The message begins with the value, so that
                the caller can put the name of the file in front.
        """
        checkpoints: Any = content.get("checkpoints")
        right = isinstance(checkpoints, dict) and bool(checkpoints)
        expect(right, "`checkpoints`", checkpoints, "an object with at least one entry")
        for key in checkpoints:
            if not re.fullmatch(_ID, key):
                raise ValueError(f"a checkpoint has the id {shown(key)}, not a number such as '0'")
        files = _files(content.get("files"), [int(key) for key in checkpoints], plan)
        dtype, lds, config = content.get("weights_dtype"), content.get("lds"), content.get("config")
        source = content.get("train_dataset")
        expect(_is_digest(config), "`config`", config, "32 hex digits")
        expect(dtype is None or dtype in _DTYPES, "`weights_dtype`", dtype, f"null or one of {list(_DTYPES)}")
        score = isinstance(lds, int | float) and not isinstance(lds, bool) and -1 <= lds <= 1
        expect(lds is None or score, "`lds`", lds, "null or a number from -1 to 1")
        return cls(
            files,
            {int(key): PublishedCheckpoint.from_json(key, value) for key, value in checkpoints.items()},
            str(config),
            _settings(content.get("settings")),
            dtype,
            None if source is None else TrainSource.from_json(source),
            lds,
        )


def shard_paths(model_id: int, plan: ShardPlan) -> list[str]:
    """List the paths of the shards of a checkpoint."""
    return [f"checkpoint-{model_id}/{plan.file_name(index, 'train')}" for index in range(len(plan))]


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _files(found: Any, ids: list[int], plan: ShardPlan) -> dict[str, PublishedFile]:
    """Check the files of a manifest: all shards of all checkpoints, and files that belong to them."""
    expect(isinstance(found, dict), "`files`", found, "an object of files")
    others = {path: match for path in found if (match := _OTHER_FILES.fullmatch(path))}
    if len(found) - len(others) != len(ids) * len(plan):
        raise ValueError(
            f"`files` lists {len(found) - len(others)} shards, not the {len(ids) * len(plan)} that the configuration "
            "implies"
        )
    if unknown := set(found) - set(others) - {path for one in ids for path in shard_paths(one, plan)}:
        raise ValueError(f"`files` lists {shown(min(unknown))}, which no index has")
    solvers = []
    for path, match in others.items():
        owner = match["id"] or match["curved"]
        if owner is not None and int(owner) not in ids:
            raise ValueError(f"`files` lists {shown(path)}, and there is no checkpoint {owner}")
        if match["id"] and match["name"].startswith(("gram", "low_rank")):
            solvers.append(owner)
    if len(set(solvers)) < len(solvers):
        raise ValueError("`files` lists what two solvers keep for one checkpoint")
    for path, entry in found.items():
        if not isinstance(entry, list) or len(entry) != 2 or not is_int(entry[0], 0, 1 << 62):
            raise ValueError(f"`files` says {shown(entry)} of {path!r}, not its bytes and its digest")
        if not _is_digest(entry[1]):
            raise ValueError(f"`files` says of {path!r} the digest {shown(entry[1])}, not 32 hex digits")
    return {path: PublishedFile(*entry) for path, entry in found.items()}


def _settings(found: Any) -> dict[str, Any]:
    right = isinstance(found, dict) and set(found) <= set(SETTINGS)
    expect(right, "`settings`", found, f"an object with some of {list(SETTINGS)}")
    curvature = found.get("curvature", {})
    right = isinstance(curvature, dict) and set(curvature) <= set(CURVATURE_SETTINGS)
    expect(right, "`curvature`", curvature, f"an object with some of {list(CURVATURE_SETTINGS)}")
    TrakConfig(**found)
    labels, removed = found.get("label_names"), found.get("remove_unused_columns", True)
    right = labels is None or (isinstance(labels, list) and all(isinstance(name, str) for name in labels))
    expect(right, "`label_names`", labels, "null or a list of names")
    expect(isinstance(removed, bool), "`remove_unused_columns`", removed, "true or false")
    return found
