"""Weights of model repos: the model that an index was made with, and checkpoints that are fetched when needed."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, snapshot_download
from transformers import PreTrainedModel

from hf_trak.errors import HubAccessError, RefusedIndexError
from hf_trak.hub import safe_loading
from hf_trak.hub.files import access_errors
from hf_trak.hub.foreign_json import read_foreign_object, shown
from hf_trak.hub.manifest import HubSource, checked_repo, checked_revision
from hf_trak.version import __version__

MAX_WEIGHT_INDEX_BYTES = 64 << 20
"""Largest index of sharded weights; a model of 100,000 tensors has one of 10 MB."""

_WEIGHTS = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"]
_SUBFOLDERS = ["*/*"]


class HubCheckpoint(os.PathLike[str]):
    """The weights of a model repo at one revision, as a checkpoint: fetched when they are first looked at.

    ```python
    attributor.featurize(checkpoints=[HubCheckpoint("me/model", revision=f"step-{n}") for n in (100, 200)])
    ```
    """

    def __init__(
        self,
        repo_id: str,
        revision: str = "main",
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> None:
        """
        Args:
            repo_id: the model repo; only safetensors weights are read.
            revision: branch, tag or commit.
            token: as in `huggingface_hub`. Held in memory, passed on, and left out when this object is pickled.
            local_files_only: use the cache alone.

        Raises:
            ValueError: no repo or revision can be called so.
        """
        self.source = HubSource(
            checked_repo(repo_id, "a checkpoint"), checked_revision(revision, f"the checkpoint {repo_id!r}")
        )
        self._token = token
        self._local_files_only = local_files_only

    def __fspath__(self) -> str:
        """Directory of the weights in the Hub's cache. Raises `HubAccessError` if they cannot be had."""
        return str(_fetch_weights(self.source.repo_id, self.source.revision, self._token, self._local_files_only))

    def __repr__(self) -> str:
        return f"HubCheckpoint({self.source.repo_id!r}, revision={self.source.revision!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_token": None}


def load_model(
    name: str,
    revision: str | None,
    class_name: str,
    dtype: str | None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    repo_only: bool = False,
) -> PreTrainedModel:
    """A model of `transformers` from a directory or a model repo. Runs no code of the repo and unpickles nothing.

    Args:
        name: directory or repo.
        revision: branch, tag or commit of the repo; `None` is the main branch.
        class_name: its class in `transformers`, such as `BertForSequenceClassification`.
        dtype: of the weights, such as `float32`; `None` keeps the saved one.
        token: as in `huggingface_hub`.
        local_files_only: use the cache alone.
        repo_only: never take `name` for a directory, since it comes from somebody else.

    Raises:
        RefusedIndexError: `class_name` is no model class of `transformers`; or the repo, which the index names, asks
            for code or files elsewhere, or is damaged.
        ValueError: the same of a directory or repo that the user has named.
        HubAccessError: the repo cannot be had, or has no safetensors weights.
    """
    kind = safe_loading.model_class(class_name)
    if kind is None:
        raise RefusedIndexError(
            f"The index was made with a model of the class {class_name!r}, which is no model class of `transformers` "
            f"{transformers.__version__}, so it is not built from its name. Pass the model itself as `model=`."
        )
    path = (
        name if not repo_only and Path(name).is_dir() else str(_fetch_weights(name, revision, token, local_files_only))
    )
    options = {"dtype": "auto" if dtype is None else getattr(torch, dtype), "local_files_only": True}
    try:
        model: PreTrainedModel = safe_loading.load_model(path, None, kind, use_safetensors=True, **options)
    except ValueError as error:
        if repo_only:
            raise RefusedIndexError(
                f"The index was made with the model {name!r}, which is not loaded: {error}"
            ) from error
        raise
    if path != name:
        model.config._name_or_path, model.config._commit_hash = name, Path(path).name
    return model.eval()


def source_of(path: str | os.PathLike[str]) -> HubSource | None:
    """The repo and commit of a directory in the Hub's cache; `None` for any other path."""
    try:
        parts = Path(path).relative_to(constants.HF_HUB_CACHE).parts
    except ValueError:
        return None
    if len(parts) < 3 or not parts[0].startswith("models--") or parts[1] != "snapshots":
        return None
    return HubSource(parts[0].removeprefix("models--").replace("--", "/"), parts[2])


def _fetch_weights(repo_id: str, revision: str | None, token: str | bool | None, local_files_only: bool) -> Path:
    with access_errors(repo_id, revision, "model"):
        path = Path(
            snapshot_download(
                repo_id,
                revision=revision,
                token=token,
                local_files_only=local_files_only or constants.HF_HUB_OFFLINE,
                allow_patterns=_WEIGHTS,
                ignore_patterns=_SUBFOLDERS,
                library_name="hf_trak",
                library_version=__version__,
            )
        )
    if not any(path.glob("*.safetensors")):
        raise HubAccessError(
            f"The model repo {repo_id!r} at revision {revision or 'main'!r} has no safetensors weights at its top "
            "level. Expected `model.safetensors`, alone or sharded; pickled weights are not loaded from the Hub. Load "
            "the model yourself and pass it as `model=`."
        )
    for index in path.glob("*.safetensors.index.json"):
        _check_weight_index(index, repo_id)
    return path


def _check_weight_index(path: Path, repo_id: str) -> None:
    """Refuse an index of sharded weights that names files elsewhere."""
    where = f"{path.name} of the model repo {repo_id!r}"
    try:
        names = read_foreign_object(path, MAX_WEIGHT_INDEX_BYTES).get("weight_map")
    except ValueError as error:
        raise RefusedIndexError(
            f"{where} was refused: {error}. Expected the index that `save_pretrained` writes. Use another revision."
        ) from error
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise RefusedIndexError(
            f"{where} was refused: its `weight_map` is {shown(names)}. Expected an object from the names of weights "
            "to those of their files. Use another revision."
        )
    if outside := sorted({name for name in names.values() if Path(name).name != name}):
        raise RefusedIndexError(
            f"{where} names files elsewhere: {outside[:3]!r:.200}. Expected names of files beside it. Use another "
            "revision."
        )
