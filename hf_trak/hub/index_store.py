"""A published index as a feature store: its training features are read-only, and are fetched when they are read.

Features of targets and scores, which this machine computes, are kept in a directory outside of the index.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_trak.errors import CheckpointMismatchError, IncompleteStoreError, RefusedIndexError, StoreError
from hf_trak.hub.curvature_files import curvature_folder, fetch_content, fetch_known, fetch_tensors
from hf_trak.hub.files import IndexFiles
from hf_trak.hub.index_files import (
    INDEX_FILE,
    REFERENCE_BYTES,
    ROW_DIGESTS_FILE,
    TRAIN_ROWS_FILE,
    check_file,
    check_listing,
    check_low_rank,
    checked_config,
    gram_bytes,
    low_rank_file,
    read_row_digests,
    read_train_rows,
    references_checksum,
    refused_if_damaged,
    row_digest_bytes,
    tensor_files,
    train_row_bytes,
)
from hf_trak.hub.index_shards import IndexShards, refuse_writing
from hf_trak.hub.manifest import (
    MANIFEST_BYTES_PER_VALUE,
    MANIFEST_FILE,
    MAX_JSON_BYTES,
    IndexManifest,
    check_json_size,
    read_index_json,
    refused,
)
from hf_trak.identity.row_digest import RowContents
from hf_trak.store.atomic import differing
from hf_trak.store.checkpoint_records import Comparison
from hf_trak.store.codes import CodeFormat, Rotation
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.references import read_references
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import Identity, ShardPlan
from hf_trak.store.store import GRAM_FILE, FeatureStore, Gram

logger = logging.getLogger(__name__)

JSON_FILES = (FeatureStore.CONFIG_FILE, MANIFEST_FILE)

_MANIFEST_BYTES = 64 << 10
_MANIFEST_BYTES_PER_FILE = 1 << 10
"""Bounds on a manifest: a fixed part, and a part per file. A digest takes 44 bytes of it."""


class IndexStore(FeatureStore):
    """A feature store over the files of a published index. Make one with [`open_index`]."""

    def __init__(self, output_dir: Path, config: dict[str, Any], files: IndexFiles, manifest: IndexManifest) -> None:
        """
        Args:
            output_dir: directory for features of targets and for scores.
            config: the checked configuration of the index.
            files: the files of the index.
            manifest: the checked manifest of the index.
        """
        super().__init__(output_dir, config)
        self.files = files
        self.manifest = manifest
        self._config_hash = super().config_hash
        self._curvatures: dict[int, Mapping[str, Any]] = {}
        self._train: dict[int, IndexShards] = {}
        self._solvers: dict[int, Path] = {}

    @property
    def config_hash(self) -> str:
        """Return the hex digest of all keys that define the features. Computed once, since an index does not
        change."""
        return self._config_hash

    def checkpoint_dir(self, model_id: int) -> Path:
        """Return the directory of the fetched files of a checkpoint."""
        return self.files.root / super().checkpoint_dir(model_id).name

    @property
    def model_ids(self) -> list[int]:
        """Return the ids of the checkpoints of the index, ascending."""
        return sorted(self.manifest.checkpoints)

    def checkpoint_info(self, model_id: int) -> dict[str, Any]:
        """Return `model_id`, `fingerprint`, `source` and `config_hash` of a checkpoint.

        `source` is a repo of the Hub or `None`, never a path, which would be one of another machine.

        Raises:
            IncompleteStoreError: the index has no checkpoint of this id.
        """
        published = self.manifest.checkpoints.get(model_id)
        if published is None:
            raise IncompleteStoreError(
                f"Model id {model_id} is not in the index {self.files.name}, which has {self.model_ids}. Use one of "
                "those."
            )
        return {
            "config_hash": self.config_hash,
            "fingerprint": published.fingerprint,
            "model_id": model_id,
            "source": None if published.source is None else str(published.source),
            **({"converted_from": list(published.converted_from)} if published.converted_from else {}),
        }

    def register_checkpoint(self, model_id: int, fingerprint: str, source: str | None = None) -> None:
        """Compare weights with those of a checkpoint of the index, which is read-only.

        Raises:
            CheckpointMismatchError: the checkpoint has other weights.
            StoreError: the index has no checkpoint of this id.
        """
        if model_id not in self.manifest.checkpoints:
            refuse_writing(self.files.name)
        expected = self.checkpoint_info(model_id)["fingerprint"]
        if fingerprint != expected:
            raise CheckpointMismatchError(
                f"The weights given for model_id {model_id} have the fingerprint {fingerprint}; the index "
                f"{self.files.name} was made with {expected}. Expected the same weights. Pass them in `checkpoints=`."
            )

    def write_gram(self, model_id: int, gram: torch.Tensor, n: int) -> None:
        """Write XᵀX of a checkpoint into the directory for results, where none is published.

        Raises:
            StoreError: the index has one, and is read-only.
        """
        if self.manifest.checkpoints[model_id].solver is None:
            refuse_writing(self.files.name)
        super().write_gram(model_id, gram, n)

    def shard_set(
        self,
        directory: Path,
        prefix: str,
        plan: ShardPlan,
        identity: Identity,
        rotation: Rotation | None = None,
        code_format: CodeFormat | None = None,
    ) -> ShardSet:
        if directory.parent != self.files.root:
            return super().shard_set(directory, prefix, plan, identity, rotation, code_format)
        width, dtype = self.proj_dim, self.feature_dtype
        # A shard set that never removes files.
        return ShardSet(directory, prefix, plan, width, dtype, identity, rotation, code_format)

    def train(self, model_id: int) -> IndexShards:
        """Return the training features of one checkpoint, without fetching any."""
        if model_id not in self._train:
            local = super().train(model_id)
            folder, published = self.checkpoint_dir(model_id).name, self.manifest.checkpoints[model_id]
            heads = self.files.work_dir / "heads"
            digests = partial(self.row_digests, model_id)
            self._train[model_id] = IndexShards(local, self.files, folder, published.shards, heads, digests)
        return self._train[model_id]

    def targets(
        self,
        experiment: str,
        model_id: int,
        n_targets: int,
        dataset_fingerprint: str,
        extra: Mapping[str, Any] | None = None,
        compare: Mapping[str, Comparison] | None = None,
    ) -> ShardSet:
        """Open the targets of an experiment; see [`FeatureStore.targets`]. Fetches the task's references first."""
        self.fetch_references(model_id)
        return super().targets(experiment, model_id, n_targets, dataset_fingerprint, extra, compare)

    def fetch_references(self, model_id: int) -> None:
        """Fetch and check the tensors that the task computed before its first batch, if any.

        Raises:
            As [`IndexShards.read`].
        """
        self.checkpoint_info(model_id)
        published = self.manifest.checkpoints[model_id]
        if published.references is None:
            return
        path = f"{self.checkpoint_dir(model_id).name}/{REFERENCES_FILE}"
        self.files.fetch(path)
        with refused_if_damaged(self.files, path):
            check_file(self.files.root / path, REFERENCE_BYTES)
            found = references_checksum(self, model_id)
            if found != published.references:
                raise StoreError(f"its checksum is {found}, the manifest says {published.references}")
            for name, values in (read_references(self, model_id) or {}).items():
                if not bool(torch.isfinite(values).all()):
                    raise StoreError(f"`{name}` holds NaN or infinite values")

    def curvature_dir(self, model_id: int, identity: Mapping[str, Any]) -> Path:
        """Return the directory of the published curvature, fetched and checked, if it has this identity.

        Otherwise it is the directory for results, where one can be fitted.

        Raises:
            As [`IndexShards.read`].
        """
        own = super().curvature_dir(model_id, identity)
        self.checkpoint_info(model_id)
        published = self.manifest.checkpoints[model_id].curvature
        if published is None:
            return own
        if model_id not in self._curvatures:
            content = fetch_content(self.files, self, model_id, published)
            if changes := differing(content["identity"], identity):
                message = (
                    "The curvature of checkpoint %d in %s was fitted with other settings; one is fitted in %s:\n  %s"
                )
                logger.warning(message, model_id, self.files.name, own, "\n  ".join(changes))
                return own
            fetch_tensors(self.files, self, model_id, published, content)
            self._curvatures[model_id] = content["identity"]
        return self.files.root / curvature_folder(model_id) if self._curvatures[model_id] == identity else own

    def fetch_curvature(self, model_id: int) -> list[str]:
        """Fetch and check the published curvature of a checkpoint, if there is one that this version can use.

        Returns:
            The paths of its files in the index, that of its record last.

        Raises:
            As [`IndexShards.read`].
        """
        published = self.manifest.checkpoints[model_id].curvature
        return [] if published is None else fetch_known(self.files, self, model_id, published)

    def solver_path(self, model_id: int, name: str) -> Path:
        """Return the file that a solver keeps: the published one, fetched and checked, or that of this machine.

        Args:
            model_id: the checkpoint.
            name: name of the file.

        Raises:
            As [`IndexShards.read`].
        """
        own = self.output_dir / self.checkpoint_dir(model_id).name / name
        published = self.manifest.checkpoints[model_id].solver
        if published is None or published.kind == "none" or name != low_rank_file(published.rank):
            return own
        if model_id not in self._solvers:
            path = f"{self.checkpoint_dir(model_id).name}/{name}"
            self.files.fetch(path)
            with refused_if_damaged(self.files, path):
                found = check_low_rank(self.files.root / path, self, model_id, published.rank)
                if found != published.checksum:
                    raise StoreError(f"its checksum is {found}, the manifest says {published.checksum}")
            self._solvers[model_id] = self.files.root / path
        return self._solvers[model_id]

    def fetch_solver(self, model_id: int) -> None:
        """Fetch and check what the solver of a checkpoint keeps, if published. Raises as [`IndexShards.read`]."""
        published = self.manifest.checkpoints[model_id].solver
        if published is None:
            self.read_gram(model_id)
        elif published.kind == "low_rank":
            self.solver_path(model_id, low_rank_file(published.rank))

    def row_digests(self, model_id: int) -> torch.Tensor | None:
        """Return the digests of the rows of a checkpoint `(n,)`, if they are published; see `hf_trak.hub.index_files`.

        Raises:
            As [`IndexShards.read`].
        """
        published = self.manifest.checkpoints[model_id].row_digests
        if published is None:
            return None
        path = f"{self.checkpoint_dir(model_id).name}/{ROW_DIGESTS_FILE}"
        self.files.fetch(path)
        with refused_if_damaged(self.files, path):
            check_file(self.files.root / path, row_digest_bytes(self.train_size))
            digests, found = read_row_digests(self, model_id)
            if found != published:
                raise StoreError(f"its checksum is {found}, the manifest says {published}")
            return digests

    def train_rows(self) -> RowContents | None:
        """Return the digests of the training rows, if they are published; see `hf_trak.hub.index_files`.

        Raises:
            As [`IndexShards.read`].
        """
        published = self.manifest.train_rows
        if published is None:
            return None
        path = self.files.fetch(TRAIN_ROWS_FILE)
        with refused_if_damaged(self.files, TRAIN_ROWS_FILE):
            check_file(path, train_row_bytes(self.train_size))
            contents, found = read_train_rows(path, self)
            if found != published:
                raise StoreError(f"its checksum is {found}, the manifest says {published}")
            return contents

    def _gram_path(self, model_id: int) -> Path:
        if self.manifest.checkpoints[model_id].solver is None:
            return super()._gram_path(model_id)
        return self.output_dir / self.checkpoint_dir(model_id).name / GRAM_FILE

    def read_gram(self, model_id: int) -> Gram | None:
        """Return XᵀX of a checkpoint, downloading it if need be; `None` if there is none.

        Raises:
            As [`IndexShards.read`].
        """
        self.checkpoint_info(model_id)
        if self.manifest.checkpoints[model_id].solver is not None:
            return super().read_gram(model_id)
        path = f"{self.checkpoint_dir(model_id).name}/{GRAM_FILE}"
        self.files.fetch(path)
        with refused_if_damaged(self.files, path):
            check_file(self.files.root / path, gram_bytes(self.proj_dim))
            gram = super().read_gram(model_id)
            if gram is None:
                raise StoreError("it was removed while it was read")
            if not bool(torch.isfinite(gram.matrix).all()):
                raise StoreError("the Gram matrix holds NaN or infinite values")
            return gram


def open_index(files: IndexFiles, output_dir: Path) -> IndexStore:
    """Check an index from an untrusted source, and open it. Fetches only the two JSON files.

    Args:
        files: the files of the index.
        output_dir: directory for features of targets and for scores.

    Raises:
        RefusedIndexError: the index is of another format, or its sizes, names, counts, digests or values do not fit.
        HubAccessError: a file cannot be fetched.
    """
    try:
        store = _checked_store(files, output_dir)
        for model_id in store.model_ids:
            check_listing(files, tensor_files(store, model_id, store.manifest.checkpoints[model_id]))
        if store.manifest.train_rows is not None:
            check_listing(files, {TRAIN_ROWS_FILE: train_row_bytes(store.train_size)})
    except RefusedIndexError:
        for path in JSON_FILES:
            files.discard(path)
        raise
    return store


def _checked_store(files: IndexFiles, output_dir: Path) -> IndexStore:
    """Read and check the configuration, and then the manifest that belongs to it."""
    config = checked_config(files)
    plan = ShardPlan(config["train_size"], config["shard_size"])
    where = f"{MANIFEST_FILE} of {files.name}"
    most = MAX_JSON_BYTES
    # The number of files that exist bounds the size of the manifest, before it is downloaded.
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
    try:
        manifest = IndexManifest.from_json(content, plan)
    except ValueError as error:
        raise refused(where, str(error)) from error
    # Both files are of the same index: the manifest records the hash of the configuration.
    store = IndexStore(output_dir, config, files, manifest)
    if manifest.config not in (None, store.config_hash):
        raise refused(
            where,
            f"it belongs to the configuration {manifest.config}, and {FeatureStore.CONFIG_FILE} has the hash "
            f"{store.config_hash}: files of two indexes were mixed, or one of them was edited",
        )
    return store
