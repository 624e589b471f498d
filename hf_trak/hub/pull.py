"""A whole index on this machine."""

import os
import shutil
from pathlib import Path

from hf_trak.errors import ConfigMismatchError
from hf_trak.hub.files import HubFiles, LocalFiles
from hf_trak.hub.index_files import tensor_files
from hf_trak.hub.index_store import JSON_FILES, IndexStore, open_index
from hf_trak.hub.manifest import check_json_size
from hf_trak.store.atomic import atomic_path, write_bytes
from hf_trak.store.store import FeatureStore


def open_repo(
    repo_id: str,
    output_dir: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> IndexStore:
    """Open the index of a dataset repo; its feature shards are fetched when they are read.

    Args:
        repo_id: the dataset repo.
        output_dir: where features of targets and scores are kept; `None` is a directory of the Hub's home.
        revision: branch, tag or commit; `None` is the main branch.
        token: as in `huggingface_hub`.
        local_files_only: use the cache alone.

    Raises:
        HubAccessError: repo or revision cannot be had.
        RefusedIndexError: it is no index, or a bad one.
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

    Every file is checked before it is copied. After an interruption the same call goes on where it stopped.

    Args:
        repo_id: the dataset repo.
        output_dir: the directory, created if need be.
        revision: branch, tag or commit; `None` is the main branch.
        token: as in `huggingface_hub`.
        local_files_only: use the cache alone.

    Returns:
        The store in the directory. Features of targets are kept beside the Hub's cache, never in the copy.

    Raises:
        HubAccessError: a file cannot be had.
        RefusedIndexError: the index is bad.
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
        shards = store.train(model_id)
        for _ in shards:  # reading checks
            pass
        store.read_gram(model_id)
        store.fetch_references(model_id)
        for name in tensor_files(store, model_id, store.manifest.checkpoints[model_id]):
            with atomic_path(directory / name) as temporary:
                shutil.copyfile(store.files.fetch(name), temporary)
        folder = store.checkpoint_dir(model_id).name
        write_bytes(directory / folder / "checkpoint.json", store.encoded(store.checkpoint_info(model_id)))
    for name in JSON_FILES:
        write_bytes(directory / name, store.files.fetch(name).read_bytes())
    return open_index(local, local.work_dir)
