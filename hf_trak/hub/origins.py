"""Finding out where the model, weights and training rows of an index are on the Hub, without asking the user."""

import logging
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import constants

from hf_trak.hub.files import LocalFiles
from hf_trak.hub.index_store import open_index
from hf_trak.hub.manifest import MANIFEST_FILE, IndexManifest, TrainSource
from hf_trak.hub.models import HubCheckpoint, source_of
from hf_trak.hub.names import HubSource
from hf_trak.hub.repo_config import is_commit
from hf_trak.store.store import FeatureStore

logger = logging.getLogger(__name__)


def train_source(dataset: Any) -> TrainSource | None:
    """Find the repo, commit and split that a `datasets.Dataset` was loaded from, by the path of its cache files.

    `load_dataset` keeps what it made of a repo in `<user>___<name>/<config>/<version>/<commit>/`.

    Returns:
        The source, or `None` if the dataset is not one whole split of a dataset repo.
    """
    split = str(getattr(dataset, "split", None) or "")
    known = getattr(getattr(dataset, "info", None), "splits", None) or {}
    if split not in known or known[split].num_examples != len(dataset):
        return None  # a selection of the rows, or other rows
    for file in dataset.cache_files:
        path = Path(file["filename"])
        if not path.is_relative_to(datasets.config.HF_DATASETS_CACHE):
            continue
        parts = path.relative_to(datasets.config.HF_DATASETS_CACHE).parts
        if len(parts) == 5 and parts[0].count("___") == 1 and is_commit(parts[3]):
            return TrainSource(parts[0].replace("___", "/"), parts[1], split, parts[3])
    return None


def recorded_model(store: FeatureStore) -> tuple[str | None, str | None]:
    """Return repo and revision of the model that a store records, if the recorded name is certainly that of a repo.

    `out/model` may be a directory on the machine that made the features, and the name of a repo to everybody else.
    So a name is used only if a commit was recorded with it, if it is in the Hub's cache, or if it came with a
    published index.
    """
    config = store.config
    name, revision = config.get("model_name"), config.get("model_revision")
    if not isinstance(name, str):
        return None, None
    if (source := source_of(name)) is not None:
        return source.repo_id, source.revision
    revision = revision if isinstance(revision, str) else None
    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}").is_dir()
    known = is_commit(revision) or cached or (store.output_dir / MANIFEST_FILE).is_file()
    if known and not Path(name).is_dir() and not name.startswith((".", "~", "/")):
        return name, revision
    logger.warning(
        "The index will not name its model: %r may be a directory of this machine. If it is a repo, pass "
        "`model_name=`.",
        name,
    )
    return None, None


def copied_manifest(store: FeatureStore) -> IndexManifest | None:
    """Return the manifest of a store that is a copy of a published index, and `None` for your own run.

    Raises:
        RefusedIndexError: the manifest is damaged, or belongs to another store.
    """
    if not (store.output_dir / MANIFEST_FILE).exists():
        return None
    files = LocalFiles(store.output_dir)
    return open_index(files, files.work_dir).manifest


def known_sources(store: FeatureStore) -> dict[int, HubSource]:
    """Return the repos of those checkpoints that were loaded from the Hub's cache or came with a pulled index."""
    found = {}
    for model_id in store.model_ids:
        given = store.checkpoint_info(model_id).get("source")
        if isinstance(given, str) and given.startswith("hf://"):
            found[model_id] = HubSource.parse(given, f"the source of checkpoint {model_id}")
        elif isinstance(given, str) and (source := source_of(given)):
            found[model_id] = source
    return found


def parse_source(given: str | HubCheckpoint | HubSource | None) -> HubSource | None:
    """Read a value of `checkpoints` as a user gives it.

    Args:
        given: `"hf://user/model@revision"`, `"user/model@revision"`, or an object that names both; or `None`.

    Raises:
        ValueError: it does not name a repo and a revision.
    """
    if given is None or isinstance(given, HubSource):
        return given
    if isinstance(given, HubCheckpoint):
        return given.source
    return HubSource.parse(given if given.startswith("hf://") else f"hf://{given}", "a value of `checkpoints`")
