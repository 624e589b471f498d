"""Opening the index of a repo, and copying a whole index to this machine."""

import os
import shutil
from pathlib import Path

from hf_trak.errors import ConfigMismatchError
from hf_trak.hub.files import HubFiles, LocalFiles
from hf_trak.hub.index_files import TRAIN_ROWS_FILE, tensor_files
from hf_trak.hub.index_store import JSON_FILES, IndexStore, open_index
from hf_trak.hub.manifest import check_json_size
from hf_trak.store.atomic import atomic_path, write_bytes
from hf_trak.store.sealed import sealed_bytes
from hf_trak.store.store import FeatureStore


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

    def check(name: str, size: int) -> None:
        check_json_size(f"{name} of {repo_id}", size)

    files = HubFiles(repo_id, FeatureStore.CONFIG_FILE, revision, token, local_files_only, check)
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
        ConfigMismatchError: the directory holds another index, or features of another run.
    """
    directory = Path(output_dir)
    local = LocalFiles(directory)
    local.names()  # refuses links, through which files would be written elsewhere
    store = open_repo(repo_id, directory, revision, token, local_files_only)
    saved = directory / FeatureStore.CONFIG_FILE
    if saved.exists() and FeatureStore.load(directory).config_hash != store.config_hash:
        raise ConfigMismatchError(
            f"{directory} holds features of another configuration than {store.files.name}. Expected an empty "
            "directory, or an earlier copy of the same index. Use another directory."
        )
    for model_id in store.model_ids:
        # Reading a file fetches and checks it.
        for _ in store.train(model_id):
            pass
        store.fetch_solver(model_id)
        store.row_digests(model_id)
        store.fetch_references(model_id)
        for name in tensor_files(store, model_id, store.manifest.checkpoints[model_id]):
            _copy(store, name, directory)
        _copy_curvature(store, model_id, directory)
        folder = store.checkpoint_dir(model_id).name
        write_bytes(directory / folder / "checkpoint.json", sealed_bytes(store.checkpoint_info(model_id)))
    if store.train_rows() is not None:
        _copy(store, TRAIN_ROWS_FILE, directory)
    # The JSON files come last: a directory that has them is complete.
    for name in JSON_FILES:
        write_bytes(directory / name, store.files.fetch(name).read_bytes())
    return open_index(local, local.work_dir)


def _copy_curvature(store: IndexStore, model_id: int, directory: Path) -> None:
    """Copy the curvature of a checkpoint. Its record, which makes it complete, goes first and comes last."""
    names = store.fetch_curvature(model_id)
    for name in names[-1:]:
        (directory / name).unlink(missing_ok=True)
    for name in names:
        _copy(store, name, directory)


def _copy(store: IndexStore, name: str, directory: Path) -> None:
    with atomic_path(directory / name) as temporary:
        shutil.copyfile(store.files.fetch(name), temporary)
