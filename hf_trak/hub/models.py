"""Weights in model repos: the model that an index was made with, and checkpoints that are fetched when needed."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, snapshot_download

from hf_trak.errors import HubAccessError, RefusedIndexError
from hf_trak.hub.access import access_errors
from hf_trak.hub.names import HubSource, checked_repo, checked_revision, read_foreign_object, shown
from hf_trak.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_WEIGHT_INDEX_BYTES = 64 << 20
"""Maximum size of an index of sharded weights; a model of 100,000 tensors has one of 10 MB."""

_WEIGHTS = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"]
_SUBFOLDERS = ["*/*"]


class HubCheckpoint(os.PathLike[str]):
    """A checkpoint whose weights are in a model repo, and are downloaded when they are first read.

    Args:
        repo_id (`str`):
            The model repo. Only safetensors weights are read.
        revision (`str`, *optional*, defaults to `"main"`):
            Branch, tag or commit.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`. It is held in memory only, and left out when this object is pickled.
        local_files_only (`bool`, *optional*, defaults to `False`):
            Use only what is in the Hub's cache.

    Raises:
        ValueError: `repo_id` or `revision` is not a valid name.

    ```python
    attributor.featurize(checkpoints=[HubCheckpoint("me/model", revision=f"step-{n}") for n in (100, 200)])
    ```
    """

    def __init__(
        self, repo_id: str, revision: str = "main", token: str | bool | None = None, local_files_only: bool = False
    ) -> None:
        self.source = HubSource(
            checked_repo(repo_id, "a checkpoint"), checked_revision(revision, f"the checkpoint {repo_id!r}")
        )
        self._token = token
        self._local_files_only = local_files_only

    def __fspath__(self) -> str:
        """Download the weights, and return their directory in the Hub's cache. Raises `HubAccessError` on failure."""
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
) -> "PreTrainedModel":
    """Load a `transformers` model from a directory or a model repo, without running its code or unpickling anything.

    Args:
        name: directory or repo.
        revision: branch, tag or commit of the repo; `None` is the main branch.
        class_name: its class in `transformers`, such as `BertForSequenceClassification`.
        dtype: dtype of the weights, such as `float32`; `None` keeps the saved one.
        token: as in `huggingface_hub`.
        local_files_only: use only what is in the cache.
        repo_only: never read `name` as a directory. For names that come from an index, not from the user.

    Returns:
        The model, in evaluation mode.

    Raises:
        RefusedIndexError: `class_name` is no model class of `transformers`; or, with `repo_only`, the repo asks for
            code or for files elsewhere, or is damaged.
        ValueError: without `repo_only`, the directory or repo does one of these.
        HubAccessError: the repo does not exist or cannot be reached, or has no safetensors weights.
    """
    from transformers import __version__ as transformers_version

    from hf_trak.hub import safe_loading  # takes seconds to import, and who publishes loads nothing

    kind = safe_loading.model_class(class_name)
    if kind is None:
        raise RefusedIndexError(
            f"The index was made with a model of the class {class_name!r}, which is no model class of `transformers` "
            f"{transformers_version}. Pass the model itself as `model=`, in Python."
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
                f"The index was made with the model {name!r}, which cannot be loaded: {error}"
            ) from error
        raise
    if path != name:
        model.config._name_or_path, model.config._commit_hash = name, Path(path).name
    return model.eval()


def source_of(path: str | os.PathLike[str]) -> HubSource | None:
    """Return the repo and commit of a directory in the Hub's cache, and `None` for any other path."""
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
            "level. Expected `model.safetensors`, or its shards; pickled weights are not loaded from the Hub. Load "
            "the model yourself and pass it as `model=`."
        )
    for index in path.glob("*.safetensors.index.json"):
        _check_weight_index(index, repo_id)
    return path


def _check_weight_index(path: Path, repo_id: str) -> None:
    """Refuse an index of sharded weights that names files outside of its directory. Raises `RefusedIndexError`."""
    where = f"{path.name} of the model repo {repo_id!r}"
    try:
        names = read_foreign_object(path, MAX_WEIGHT_INDEX_BYTES).get("weight_map")
    except ValueError as error:
        raise RefusedIndexError(
            f"{where} was refused: {error}. Expected the index that `save_pretrained` writes. Use another revision."
        ) from error
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise RefusedIndexError(
            f"{where} was refused: its `weight_map` is {shown(names)}. Expected an object that maps names of weights "
            "to names of files. Use another revision."
        )
    if outside := sorted({name for name in names.values() if Path(name).name != name}):
        raise RefusedIndexError(
            f"{where} names files outside of its directory: {outside[:3]!r:.200}. Expected names of files beside it. "
            "Use another revision."
        )
