"""A published index as a feature store: its training features are read-only, and are fetched when they are read.

Features of targets and scores, which this machine computes, are kept in a directory outside of the index. An index is
opened from a repo or a copy, and [`pull_index`] makes such a copy.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_trak.curvature.files import CURVATURE_FILE
from hf_trak.errors import (
    CheckpointMismatchError,
    ConfigMismatchError,
    IncompleteStoreError,
    RefusedIndexError,
    StoreError,
)
from hf_trak.hub import index_files
from hf_trak.hub.curvature_files import curvature_folder, fetch_known, fetch_tensors, read_content
from hf_trak.hub.files import Bounds, HubFiles, IndexFiles, LocalFiles
from hf_trak.hub.index_shards import IndexShards, refuse_writing
from hf_trak.hub.manifest import INDEX_DIGITS, MAX_JSON_BYTES, IndexManifest
from hf_trak.identity.row_digest import RowContents
from hf_trak.store.atomic import atomic_path, differing, write_bytes
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.sealed import MANIFEST_FILE, sealed_bytes
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import ShardPlan
from hf_trak.store.store import CALIBRATION_FILE, GRAM_FILE, FeatureStore, Gram

logger = logging.getLogger(__name__)

JSON_FILES = (FeatureStore.CONFIG_FILE, MANIFEST_FILE)

_BYTES_PER_VALUE = 16
"""Minimum bytes per value of a manifest, which consists mostly of paths and of digests of 32 digits."""

_MANIFEST_BYTES = 64 << 10
_MANIFEST_BYTES_PER_FILE = 1 << 10
"""Bounds on a manifest: a fixed part, and a part per file, whose path and digest take 130 bytes."""

T = TypeVar("T")


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
        files.listed = manifest.files
        self._curvatures: dict[int, Mapping[str, Any]] = {}
        self._train: dict[int, IndexShards] = {}
        self._solvers: dict[int, Path] = {}

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

    def write_gram(
        self, model_id: int, gram: torch.Tensor, n: int, sample: int | None = None, spread: torch.Tensor | None = None
    ) -> None:
        """Write XᵀX of a checkpoint into the directory for results, where none is published.

        Raises:
            StoreError: the index has one, and is read-only.
        """
        if self.manifest.solvers.get(model_id) == GRAM_FILE:
            refuse_writing(self.files.name)
        super().write_gram(model_id, gram, n, sample, spread)

    def tidy(self, directory: Path) -> None:
        """Remove what dead processes left in a directory, unless it is one of the index, where no file is removed."""
        if directory.parent != self.files.root:
            super().tidy(directory)

    def train(self, model_id: int) -> IndexShards:
        """Return the training features of one checkpoint, without fetching any."""
        if model_id not in self._train:
            local, folder = super().train(model_id), self.checkpoint_dir(model_id).name
            digests = partial(self.row_digests, model_id)
            self._train[model_id] = IndexShards(local, self.files, folder, self.files.work_dir / "heads", digests)
        return self._train[model_id]

    def targets(self, experiment: str, model_id: int, *facts: Any, **more: Any) -> ShardSet:
        """Open the targets of an experiment; see [`FeatureStore.targets`]. Fetches the task's references first."""
        self.fetch_references(model_id)
        return super().targets(experiment, model_id, *facts, **more)

    def bounds(self) -> dict[str, Bounds]:
        """Return the bounds on every published file by its path, except for files of curvatures."""
        sets = [self.train(model_id) for model_id in self.model_ids]
        found = {shards.path_of(index): shards.bounds(index) for shards in sets for index in range(len(shards))}
        others = [path for path in self.files.listed if path not in found and not path.startswith("curvature/")]
        return {**found, **{path: index_files.file_bounds(self, path) for path in others}}

    def _checked(self, path: str, read: Callable[[Path], T]) -> T | None:
        """Fetch a tensor file and read it.

        Args:
            path: the file.
            read: reads the file, and raises `StoreError` to refuse it.

        Returns:
            The result of `read`; `None` if the file is not published.

        Raises:
            As [`IndexShards.read`].
        """
        if path not in self.files.listed:
            return None
        with self.files.refused_if_damaged(path):
            return read(self.files.fetch_tensors(path, index_files.file_bounds(self, path)))

    def fetch_references(self, model_id: int) -> None:
        """Fetch and check the tensors that the task computed before its first batch, if any.

        Raises:
            As [`IndexShards.read`].
        """
        self.checkpoint_info(model_id)
        folder = self.checkpoint_dir(model_id).name
        self._checked(f"{folder}/{REFERENCES_FILE}", lambda _: index_files.check_references(self, model_id))

    def curvature_dir(self, model_id: int, identity: Mapping[str, Any]) -> Path:
        """Return the directory of the published curvature, fetched and checked, if it has this identity.

        Otherwise it is the directory for results, where one can be fitted.

        Raises:
            As [`IndexShards.read`].
        """
        own = super().curvature_dir(model_id, identity)
        self.checkpoint_info(model_id)
        if not self.has_curvature(model_id):
            return own
        if model_id not in self._curvatures:
            content = read_content(self.files, self, model_id)
            if changes := differing(content["identity"], identity):
                message = (
                    "The curvature of checkpoint %d in %s was fitted with other settings; one is fitted in %s:\n  %s"
                )
                logger.warning(message, model_id, self.files.name, own, "\n  ".join(changes))
                return own
            fetch_tensors(self.files, self, model_id, content)
            self._curvatures[model_id] = content["identity"]
        return self.files.root / curvature_folder(model_id) if self._curvatures[model_id] == identity else own

    def has_curvature(self, model_id: int) -> bool:
        """Tell whether the curvature of a checkpoint is published."""
        folder = curvature_folder(model_id)
        return any(path.startswith(f"{folder}/") for path in self.files.listed)

    def fetch_curvature(self, model_id: int) -> list[str]:
        """Fetch and check the published curvature of a checkpoint, if there is one that this version can use.

        Returns:
            The paths of its files in the index, that of its record last.

        Raises:
            As [`IndexShards.read`].
        """
        return fetch_known(self.files, self, model_id) if self.has_curvature(model_id) else []

    def solver_path(self, model_id: int, name: str) -> Path:
        """Return the file that a solver keeps: the published one, fetched and checked, or that of this machine.

        Args:
            model_id: the checkpoint.
            name: name of the file.

        Raises:
            As [`IndexShards.read`].
        """
        path, rank = f"{self.checkpoint_dir(model_id).name}/{name}", index_files.low_rank_of(name)
        if not rank or self.manifest.solvers.get(model_id) != name:
            return self.output_dir / path
        if model_id not in self._solvers:
            self._checked(path, lambda local: index_files.check_low_rank(local, self, model_id, rank))
            self._solvers[model_id] = self.files.root / path
        return self._solvers[model_id]

    def fetch_solver(self, model_id: int) -> None:
        """Fetch and check what the solver of a checkpoint keeps, if published. Raises as [`IndexShards.read`]."""
        self.read_gram(model_id)
        if name := self.manifest.solvers.get(model_id):
            self.solver_path(model_id, name)

    def row_digests(self, model_id: int) -> torch.Tensor | None:
        """Return the digests of the rows of a checkpoint `(n,)`, if they are published; see `hf_trak.hub.index_files`.

        Raises:
            As [`IndexShards.read`].
        """
        path = f"{self.checkpoint_dir(model_id).name}/{index_files.ROW_DIGESTS_FILE}"
        return self._checked(path, lambda _: index_files.read_row_digests(self, model_id))

    def train_rows(self) -> RowContents | None:
        """Return the digests of the training rows, if they are published; see `hf_trak.hub.index_files`.

        Raises:
            As [`IndexShards.read`].
        """
        return self._checked(index_files.TRAIN_ROWS_FILE, lambda local: index_files.read_train_rows(local, self))

    def read_calibration(self) -> dict[str, Any] | None:
        """Return the choice of a method: that of this machine, or else the published one.

        Raises:
            As [`IndexShards.read`].
        """
        own = super().read_calibration()
        return self.published_calibration() if own is None else own

    def published_calibration(self) -> dict[str, Any] | None:
        """Fetch and check the published choice of a method; `None` if there is none.

        Raises:
            As [`IndexShards.read`].
        """
        if CALIBRATION_FILE not in self.files.listed:
            return None
        with self.files.refused_if_damaged(CALIBRATION_FILE):
            content = self.files.read_json(CALIBRATION_FILE, index_files.CALIBRATION_BYTES.most)
            index_files.check_calibration(content)
        return content

    def fetch_all(self, model_id: int) -> list[str]:
        """Fetch and check every published file of a checkpoint.

        Returns:
            Their paths. The record of a curvature comes last.

        Raises:
            As [`IndexShards.read`].
        """
        for _ in self.train(model_id):
            pass
        self.fetch_solver(model_id)
        self.row_digests(model_id)
        self.fetch_references(model_id)
        folder = self.checkpoint_dir(model_id).name
        return [
            *(path for path in self.files.listed if path.startswith(f"{folder}/")), *self.fetch_curvature(model_id)
        ]  # fmt: skip

    def _gram_path(self, model_id: int) -> Path:
        if self.manifest.solvers.get(model_id) == GRAM_FILE:
            return super()._gram_path(model_id)
        return self.output_dir / self.checkpoint_dir(model_id).name / GRAM_FILE

    def read_gram(self, model_id: int) -> Gram | None:
        """Return XᵀX of a checkpoint, downloading it if need be; `None` if there is none.

        Raises:
            As [`IndexShards.read`].
        """
        self.checkpoint_info(model_id)
        read = super().read_gram
        if self.manifest.solvers.get(model_id) != GRAM_FILE:
            return read(model_id)

        def checked(_: Path) -> Gram:
            gram = read(model_id)
            if gram is None:
                raise StoreError("it was removed while it was read")
            index_files.check_finite({"gram": gram.matrix} | ({} if gram.spread is None else {"spread": gram.spread}))
            return gram

        return self._checked(f"{self.checkpoint_dir(model_id).name}/{GRAM_FILE}", checked)


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
        if files.names() is not None:  # files in the cache are checked when they are read
            for path, bounds in store.bounds().items():
                with files.refused_if_damaged(path):
                    files.check_size(path, bounds)
    except RefusedIndexError:
        for path in JSON_FILES:
            files.discard(path)
        raise
    return store


def _checked_store(files: IndexFiles, output_dir: Path) -> IndexStore:
    """Read and check the configuration, and then the manifest that belongs to it."""
    config = index_files.checked_config(files)
    plan = ShardPlan(config["train_size"], config["shard_size"])
    most = MAX_JSON_BYTES
    # The number of files that exist bounds the size of the manifest, before it is downloaded.
    names = files.names()
    if names is not None:
        listed = sum(index_files.INDEX_FILE.fullmatch(name) is not None for name in names)
        if listed < len(plan):
            raise files.refused(
                f"The index {files.name}",
                f"its configuration implies {len(plan)} shards, and only {listed} files are there: some are missing",
            )
        most = min(most, _MANIFEST_BYTES + _MANIFEST_BYTES_PER_FILE * listed)
    with files.refused_if_damaged(MANIFEST_FILE):
        content = files.read_json(MANIFEST_FILE, most, bytes_per_value=_BYTES_PER_VALUE, max_digits=INDEX_DIGITS)
        try:
            manifest = IndexManifest.from_json(content, plan)
        except ValueError as error:
            raise StoreError(str(error)) from error
        # Both files are of the same index: the manifest records the hash of the configuration.
        store = IndexStore(output_dir, config, files, manifest)
        if manifest.config != store.config_hash:
            raise StoreError(
                f"it belongs to the configuration {manifest.config}, and {FeatureStore.CONFIG_FILE} has the hash "
                f"{store.config_hash}: files of two indexes were mixed, or one of them was edited"
            )
    return store


def open_repo(
    repo_id: str,
    output_dir: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> IndexStore:
    """Open the index of a dataset repo. Its feature shards are downloaded when they are read.

    Args:
        repo_id (`str`):
            The dataset repo.
        output_dir (`str` or `os.PathLike`, *optional*):
            Directory for features of targets and for scores. By default one beside the Hub's cache.
        revision (`str`, *optional*):
            Branch, tag or commit. By default the main branch.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`.
        local_files_only (`bool`, *optional*, defaults to `False`):
            Use only what is in the Hub's cache.

    Returns:
        `IndexStore`: a read-only feature store.

    Raises:
        HubAccessError: the repo or revision does not exist or cannot be reached.
        RefusedIndexError: the repo holds no index, or a damaged one.
    """
    files = HubFiles(repo_id, FeatureStore.CONFIG_FILE, revision, token, local_files_only)
    return open_index(files, files.work_dir if output_dir is None else Path(output_dir))


def pull_index(
    repo_id: str,
    output_dir: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> IndexStore:
    """Copy a whole published index into a directory, which then works without a connection.

    Every file is checked before it is copied. After an interruption the same call resumes where it stopped.

    Args:
        repo_id (`str`):
            The dataset repo.
        output_dir (`str` or `os.PathLike`):
            The directory, created if need be.
        revision (`str`, *optional*):
            Branch, tag or commit. By default the main branch.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`.
        local_files_only (`bool`, *optional*, defaults to `False`):
            Use only what is in the Hub's cache.

    Returns:
        `IndexStore`: the store in the directory. Features of targets are kept beside the Hub's cache, never in the
        copy.

    Raises:
        HubAccessError: a file does not exist or cannot be downloaded.
        RefusedIndexError: the index is damaged.
        ConfigMismatchError: the directory holds another index, or features that were computed in it.
    """
    directory = Path(output_dir)
    local = LocalFiles(directory)
    local.names()  # refuses links, through which files would be written elsewhere
    store = open_repo(repo_id, directory, revision, token, local_files_only)
    saved = directory / FeatureStore.CONFIG_FILE
    if saved.exists() and not (directory / MANIFEST_FILE).exists():
        raise ConfigMismatchError(
            f"{directory} holds features that were computed there, which a copy would replace. Expected an empty "
            "directory, or an earlier copy of the same index. Use another directory."
        )
    if saved.exists() and FeatureStore.load(directory).config_hash != store.config_hash:
        raise ConfigMismatchError(
            f"{directory} holds features of another configuration than {store.files.name}. Expected an empty "
            "directory, or an earlier copy of the same index. Use another directory."
        )
    for model_id in store.model_ids:
        paths = store.fetch_all(model_id)
        # The record of a curvature makes it complete. It goes first and comes last.
        (directory / curvature_folder(model_id) / CURVATURE_FILE).unlink(missing_ok=True)
        for path in paths:
            _copy(store, path, directory)
        info = directory / store.checkpoint_dir(model_id).name / "checkpoint.json"
        write_bytes(info, sealed_bytes(store.checkpoint_info(model_id)))
    if store.train_rows() is not None:
        _copy(store, index_files.TRAIN_ROWS_FILE, directory)
    if CALIBRATION_FILE in store.files.listed and store.read_calibration() is not None:
        _copy(store, CALIBRATION_FILE, directory)
    # The JSON files come last, the configuration after the manifest: a directory that has both is complete.
    for name in reversed(JSON_FILES):
        write_bytes(directory / name, store.files.fetch(name).read_bytes())
    return open_index(local, local.work_dir)


def _copy(store: IndexStore, name: str, directory: Path) -> None:
    with atomic_path(directory / name) as temporary:
        shutil.copyfile(store.files.fetch(name), temporary)
