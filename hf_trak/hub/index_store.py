"""A feature store whose training side is a published index: read-only, and fetched file by file as it is needed.

What this machine computes itself (features of targets, scores) goes into a directory of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from hf_trak.errors import IncompleteStoreError, RefusedIndexError, StoreError
from hf_trak.hub.files import IndexFiles
from hf_trak.hub.foreign_json import shown
from hf_trak.hub.index_files import (
    INDEX_FILE,
    REFERENCE_BYTES,
    check_file,
    check_finite,
    gram_bytes,
    references_checksum,
    refusing,
    shard_bytes,
    tensor_files,
)
from hf_trak.hub.manifest import (
    MANIFEST_BYTES_PER_VALUE,
    MANIFEST_FILE,
    MAX_JSON_BYTES,
    IndexManifest,
    check_json_size,
    read_index_json,
    refused,
)
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.references import read_references
from hf_trak.store.sealed import check_seal
from hf_trak.store.shard_set import Shard, ShardSet, content_hash
from hf_trak.store.shards import FORMAT_VERSION, READABLE_VERSIONS, Identity, ShardPlan
from hf_trak.store.store import Comparison, FeatureStore, Gram

JSON_FILES = (FeatureStore.CONFIG_FILE, MANIFEST_FILE)

_CONFIG_BYTES_PER_VALUE = 4
_MANIFEST_BYTES = 64 << 10
_MANIFEST_BYTES_PER_FILE = 1 << 10
"""What a manifest says besides the digests, and per file; a digest takes 44 bytes."""
_MAX_FEATURES = 1 << 24
_MAX_PARAMETERS = 1 << 17
"""Parameters of a model; one of a million million weights in 23,000 separate experts has 70,000."""


class IndexShards(ShardSet):
    """The training features of one checkpoint of an index."""

    def __init__(self, local: ShardSet, files: IndexFiles, folder: str, checksums: tuple[str, ...]) -> None:
        """
        Args:
            local: the same shards as the store sees them.
            files: where they come from.
            folder: their directory in the index.
            checksums: of every shard, from the manifest.
        """
        super().__init__(
            local.directory, local.prefix, local.plan, local.width, local.dtype, local.identity, local.version
        )
        self._files = files
        self._folder = folder
        self._checksums = checksums
        self._checked: set[int] = set()

    def is_written(self, index: int) -> bool:
        """Whether the index has the shard: it has all of them."""
        return 0 <= index < len(self.plan)

    exists = is_written

    @property
    def content_hash(self) -> str:
        """Digest of the checksums of all shards, from the manifest. No shard is read."""
        return content_hash(self._checksums)

    def write(self, index: int, grads: torch.Tensor, out_to_loss: torch.Tensor) -> NoReturn:
        """Nothing is written into an index."""
        _refuse_writing(self._files.name)

    def read(self, index: int, verify: bool | None = None, mapped: bool = True) -> Shard:
        """Read one shard, fetching it first where it is not on this machine.

        Raises:
            HubAccessError: it cannot be fetched.
            RefusedIndexError: it is not what the index promises: another shape, dtype, checkpoint or checksum, no
                safetensors file, or with values that are not finite.
        """
        path = self._fetch(index)
        with refusing(self._files, path):
            if index in self._checked:
                return super().read(index, verify, mapped)
            rows = self.plan.rows(index)
            check_file(self._files.root / path, shard_bytes(rows, self.width, self.dtype))
            if (found := self.header(index).get("checksum")) != self._checksums[index]:
                raise StoreError(f"its checksum is {found}, the manifest says {self._checksums[index]}")
            shard = super().read(index, True, mapped)
            check_finite(shard)
            self._checked.add(index)
            return shard

    def _fetch(self, index: int) -> str:
        path = f"{self._folder}/{self.plan.file_name(index, self.prefix)}"
        self._files.fetch(path)
        return path


class IndexStore(FeatureStore):
    """See the module's docstring."""

    def __init__(self, output_dir: Path, config: dict[str, Any], files: IndexFiles, manifest: IndexManifest) -> None:
        """Use [`open_index`]."""
        super().__init__(output_dir, config)
        self.files = files
        self.manifest = manifest
        self._config_hash = super().config_hash

    @property
    def config_hash(self) -> str:
        """Hex digest of all keys that define the features; taken once, since nothing of an index changes."""
        return self._config_hash

    def checkpoint_dir(self, model_id: int) -> Path:
        """Directory of the files of a checkpoint, as far as they are fetched."""
        return self.files.root / super().checkpoint_dir(model_id).name

    @property
    def model_ids(self) -> list[int]:
        """Ids of the checkpoints of the index, ascending."""
        return sorted(self.manifest.checkpoints)

    def checkpoint_info(self, model_id: int) -> dict[str, Any]:
        """As for any store. `source` is a repo of the Hub or `None`, never a path, which could only mislead here.

        Raises:
            IncompleteStoreError: the index has no such checkpoint.
        """
        published = self.manifest.checkpoints.get(model_id)
        if published is None:
            raise IncompleteStoreError(
                f"Model id {model_id} is not in the index {self.files.name}, which has {self.model_ids}. Choose among "
                "those."
            )
        return {
            "config_hash": self.config_hash,
            "fingerprint": published.fingerprint,
            "model_id": model_id,
            "source": None if published.source is None else str(published.source),
        }

    def register_checkpoint(self, model_id: int, fingerprint: str, source: str | None = None) -> None:
        """Nothing is added to an index."""
        _refuse_writing(self.files.name)

    def write_gram(self, model_id: int, gram: torch.Tensor, n: int) -> None:
        """Nothing is written into an index."""
        _refuse_writing(self.files.name)

    def _shard_set(self, directory: Path, prefix: str, plan: ShardPlan, identity: Identity) -> ShardSet:
        if directory.parent == self.files.root:  # where nothing is ever removed
            width = self._config["proj_dim"]
            return ShardSet(directory, prefix, plan, width, self.feature_dtype, identity, self.version)
        return super()._shard_set(directory, prefix, plan, identity)

    def train(self, model_id: int) -> IndexShards:
        """The training features under one checkpoint; none is fetched yet."""
        local = super().train(model_id)
        folder = self.checkpoint_dir(model_id).name
        return IndexShards(local, self.files, folder, self.manifest.checkpoints[model_id].shards)

    def targets(
        self,
        experiment: str,
        model_id: int,
        n_targets: int,
        dataset_fingerprint: str,
        extra: Mapping[str, Any] | None = None,
        compare: Mapping[str, Comparison] | None = None,
    ) -> ShardSet:
        """As for any store; what the task needs to compute them is fetched first."""
        self.fetch_references(model_id)
        return super().targets(experiment, model_id, n_targets, dataset_fingerprint, extra, compare)

    def fetch_references(self, model_id: int) -> None:
        """Fetch and check what the task computed before its first batch, if it did. Raises as [`IndexShards.read`]."""
        self.checkpoint_info(model_id)
        published = self.manifest.checkpoints[model_id]
        if published.references is None:
            return
        path = f"{self.checkpoint_dir(model_id).name}/{REFERENCES_FILE}"
        self.files.fetch(path)
        with refusing(self.files, path):
            check_file(self.files.root / path, REFERENCE_BYTES)
            found = references_checksum(self, model_id)
            if found != published.references:
                raise StoreError(f"its checksum is {found}, the manifest says {published.references}")
            for name, values in (read_references(self, model_id) or {}).items():
                if not bool(torch.isfinite(values).all()):
                    raise StoreError(f"`{name}` holds NaN or infinite values")

    def read_gram(self, model_id: int) -> Gram:
        """XᵀX of a checkpoint, fetched if need be. Raises as [`IndexShards.read`]."""
        self.checkpoint_info(model_id)
        path = f"{self.checkpoint_dir(model_id).name}/gram.safetensors"
        self.files.fetch(path)
        with refusing(self.files, path):
            check_file(self.files.root / path, gram_bytes(self._config["proj_dim"]))
            gram = super().read_gram(model_id)
            if gram is None:
                raise StoreError("it vanished while it was read")
            if not bool(torch.isfinite(gram.matrix).all()):
                raise StoreError("the Gram matrix holds NaN or infinite values")
            return gram


def open_index(files: IndexFiles, output_dir: Path) -> IndexStore:
    """Check an index that may come from anybody, and open it. Only the two JSON files are fetched.

    Args:
        files: where it is.
        output_dir: where features of targets and scores are kept.

    Raises:
        RefusedIndexError: it is of another format, or anything does not fit: sizes, names, counts, digests, values.
        HubAccessError: a file cannot be fetched.
    """
    try:
        store = _checked_store(files, output_dir)
        _check_listing(store)
    except RefusedIndexError:
        for path in JSON_FILES:
            files.discard(path)
        raise
    return store


def _checked_store(files: IndexFiles, output_dir: Path) -> IndexStore:
    config = _checked_config(files)
    plan = ShardPlan(config["train_size"], config["shard_size"])
    where = f"{MANIFEST_FILE} of {files.name}"
    most = MAX_JSON_BYTES
    names = files.names()
    if names is not None:
        listed = sum(INDEX_FILE.fullmatch(name) is not None for name in names)
        if listed < len(plan):
            raise refused(
                f"The index {files.name}",
                f"its configuration implies {len(plan)} shards, and only {listed} files are there: some are missing",
            )
        most = min(most, _MANIFEST_BYTES + _MANIFEST_BYTES_PER_FILE * listed)
    check_json_size(where, files.size(MANIFEST_FILE), most)
    content = read_index_json(files.fetch(MANIFEST_FILE), where, most, MANIFEST_BYTES_PER_VALUE)
    if config["format_version"] > 1 and content.get("format_version") == 1:
        raise refused(where, "it has format version 1, and the configuration beside it a later one")
    try:
        manifest = IndexManifest.from_json(content, plan)
    except ValueError as error:
        raise refused(where, str(error)) from error
    store = IndexStore(output_dir, config, files, manifest)
    if manifest.config not in (None, store.config_hash):
        raise refused(
            where,
            f"it belongs to the configuration {manifest.config}, and {FeatureStore.CONFIG_FILE} has the hash "
            f"{store.config_hash}: files of two indexes were mixed, or one of them was edited",
        )
    return store


def _checked_config(files: IndexFiles) -> dict[str, Any]:
    """The configuration of an index, of a size, a version and with values that there can be."""
    where = f"{FeatureStore.CONFIG_FILE} of {files.name}"
    check_json_size(where, files.size(FeatureStore.CONFIG_FILE))
    config = read_index_json(files.fetch(FeatureStore.CONFIG_FILE), where, MAX_JSON_BYTES, _CONFIG_BYTES_PER_VALUE)
    version = config.get("format_version")
    if version not in READABLE_VERSIONS or isinstance(version, bool):
        raise refused(
            where, f"it has format version {shown(version)}, and this version of hf_trak reads {FORMAT_VERSION}"
        )
    try:
        check_seal(config, where)
    except StoreError as error:
        raise refused(where, "its content has another checksum than it says") from error
    try:
        check_bounds(config)
        return FeatureStore._normalize(config)
    except (TypeError, ValueError) as error:
        raise refused(where, str(error)) from error


def check_bounds(config: Mapping[str, Any]) -> None:
    """Refuse a configuration with more features or parameters than an index is read with.

    Raises:
        ValueError: it is.
    """
    features, parameters = config.get("proj_dim"), config.get("parameters")
    if isinstance(features, int) and features > _MAX_FEATURES:
        raise ValueError(f"`proj_dim` is {features}, more than {_MAX_FEATURES}")
    if isinstance(parameters, list) and len(parameters) > _MAX_PARAMETERS:
        raise ValueError(f"`parameters` has {len(parameters)} entries, more than {_MAX_PARAMETERS}")


def _check_listing(store: IndexStore) -> None:
    """Refuse an index whose files are absent or of a size that they cannot have, before any of them is fetched."""
    files = store.files
    names = files.names()
    if names is None:
        return  # opened from the cache: what is there is checked when it is read
    for model_id in store.model_ids:
        for path, (least, most) in tensor_files(store, model_id, store.manifest.checkpoints[model_id]).items():
            if path not in names:
                raise refused(f"The index {files.name}", f"the file {path!r}, which its manifest implies, is missing")
            size = files.size(path)
            if size is None or not least <= size <= most:
                raise refused(f"{path!r} of {files.name}", f"it has {size} bytes, not {least} to {most}")


def _refuse_writing(name: str) -> NoReturn:
    raise StoreError(
        f"The index {name} was published and is only read here. To add checkpoints or rows, featurize into an output "
        "directory of your own with `TrakAttributor(...)`, and publish that."
    )
