"""Opening the index of a repo, and copying a whole index to this machine."""

import os
import shutil
from pathlib import Path

from hf_trak.curvature.files import CURVATURE_FILE
from hf_trak.errors import ConfigMismatchError
from hf_trak.hub.curvature_files import curvature_folder
from hf_trak.hub.files import HubFiles, LocalFiles
from hf_trak.hub.index_files import TRAIN_ROWS_FILE
from hf_trak.hub.index_store import JSON_FILES, IndexStore, open_index
from hf_trak.store.atomic import atomic_path, write_bytes
from hf_trak.store.sealed import sealed_bytes
from hf_trak.store.store import CALIBRATION_FILE, FeatureStore


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
        paths = store.fetch_all(model_id)
        # The record of a curvature makes it complete. It goes first and comes last.
        (directory / curvature_folder(model_id) / CURVATURE_FILE).unlink(missing_ok=True)
        for path in paths:
            _copy(store, path, directory)
        info = directory / store.checkpoint_dir(model_id).name / "checkpoint.json"
        write_bytes(info, sealed_bytes(store.checkpoint_info(model_id)))
    if store.train_rows() is not None:
        _copy(store, TRAIN_ROWS_FILE, directory)
    if CALIBRATION_FILE in store.files.listed and store.read_calibration() is not None:
        _copy(store, CALIBRATION_FILE, directory)
    # The JSON files come last: a directory that has them is complete.
    for name in JSON_FILES:
        write_bytes(directory / name, store.files.fetch(name).read_bytes())
    return open_index(local, local.work_dir)


def _copy(store: IndexStore, name: str, directory: Path) -> None:
    with atomic_path(directory / name) as temporary:
        shutil.copyfile(store.files.fetch(name), temporary)
