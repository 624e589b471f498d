"""Where model, weights and training rows of an index are on the Hub, as far as this machine can tell."""

import logging
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import constants

from hf_trak.hub.files import LocalFiles
from hf_trak.hub.index_store import open_index
from hf_trak.hub.manifest import MANIFEST_FILE, HubSource, IndexManifest, TrainSource
from hf_trak.hub.models import HubCheckpoint, source_of
from hf_trak.hub.repo_config import is_commit
from hf_trak.store.store import FeatureStore

logger = logging.getLogger(__name__)


def train_source(dataset: Any) -> TrainSource | None:
    """The repo, commit and split that a `datasets.Dataset` is all of, as far as the path of its cache tells.

    `load_dataset` keeps what it made of a repo in `<user>___<name>/<config>/<version>/<commit>/`.
    """
    split = str(getattr(dataset, "split", None) or "")
    known = getattr(getattr(dataset, "info", None), "splits", None) or {}
    if split not in known or known[split].num_examples != len(dataset):
        return None  # some of the rows, or others
    for file in dataset.cache_files:
        path = Path(file["filename"])
        if not path.is_relative_to(datasets.config.HF_DATASETS_CACHE):
            continue
        parts = path.relative_to(datasets.config.HF_DATASETS_CACHE).parts
        if len(parts) == 5 and parts[0].count("___") == 1 and is_commit(parts[3]):
            return TrainSource(parts[0].replace("___", "/"), parts[1], split, parts[3])
    return None


def recorded_model(store: FeatureStore) -> tuple[str | None, str | None]:
    """Repo and revision of the model that a store records, where that is certainly one.

    `out/model` may be a directory, seen from where the features were made, and to everybody else the name of a repo.
    So a name counts if it has a commit, if it is in the Hub's cache, or if it came with a published index.
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
        "The model is not named in the index: %r may be a directory of this machine. If it is a repo, pass "
        "`model_name=`.",
        name,
    )
    return None, None


def copied_manifest(store: FeatureStore) -> IndexManifest | None:
    """The manifest beside a store that is a copy of a published index; `None` for a run of one's own.

    Raises:
        RefusedIndexError: it is bad, or not that of this store.
    """
    if not (store.output_dir / MANIFEST_FILE).exists():
        return None
    files = LocalFiles(store.output_dir)
    return open_index(files, files.work_dir).manifest


def known_sources(store: FeatureStore) -> dict[int, HubSource]:
    """Checkpoints that came from the Hub, as far as the store can tell: out of its cache, or with a pulled index."""
    found = {}
    for model_id in store.model_ids:
        given = store.checkpoint_info(model_id).get("source")
        if isinstance(given, str) and given.startswith("hf://"):
            found[model_id] = HubSource.parse(given, f"the source of checkpoint {model_id}")
        elif isinstance(given, str) and (source := source_of(given)):
            found[model_id] = source
    return found


def given_source(given: str | HubCheckpoint | HubSource | None) -> HubSource | None:
    """Where weights are, as a user says it. Raises `ValueError` if it is no repo with a revision."""
    if given is None or isinstance(given, HubSource):
        return given
    if isinstance(given, HubCheckpoint):
        return given.source
    return HubSource.parse(given if given.startswith("hf://") else f"hf://{given}", "a value of `checkpoints`")
