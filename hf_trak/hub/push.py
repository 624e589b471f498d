"""Publishing an index: one commit, which the same call finishes after an interruption.

The same code serves a store on disk ([`push_index`]) and an attributor that may run in several processes
([`push_attributor`]). Both describe the index as [`IndexFacts`] and end in [`publish`]. [`save_index`] writes the same
files into a directory.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, DatasetInfo, HfApi, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_trak.config import TrakConfig
from hf_trak.errors import HfTrakError, IncompleteStoreError
from hf_trak.featurize.calibration import Calibration
from hf_trak.featurize.converting import history_of
from hf_trak.hub import index_files
from hf_trak.hub.access import REPO_TYPE, access_errors, hub_api
from hf_trak.hub.cards import README, card_operations
from hf_trak.hub.curvature_files import StoredCurvature, settings_left_open, stored_curvature
from hf_trak.hub.files import LocalFiles, recorded_checksum
from hf_trak.hub.index_card import PreparedIndex, index_card
from hf_trak.hub.index_store import JSON_FILES, IndexStore, open_index
from hf_trak.hub.manifest import (
    CURVATURE_SETTINGS,
    MAX_JSON_BYTES,
    SETTINGS,
    IndexManifest,
    PublishedCheckpoint,
    PublishedFile,
    TrainSource,
    shard_paths,
)
from hf_trak.hub.models import HubCheckpoint, source_of
from hf_trak.hub.names import HubSource, checked_repo, checked_revision, is_commit
from hf_trak.runtime.arguments import named_arguments
from hf_trak.runtime.processes import Processes
from hf_trak.store.atomic import atomic_directory
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.revised import RevisedStore
from hf_trak.store.sealed import MANIFEST_FILE, sealed, sealed_bytes
from hf_trak.store.store import CALIBRATION_FILE, FeatureStore

if TYPE_CHECKING:  # who publishes a store imports no model, nor what makes features of one
    from hf_trak.featurize.featurized import FeaturizedModel
    from hf_trak.featurize.fidelity import Fidelity

CommitOperation = CommitOperationAdd | CommitOperationDelete

_COMMIT_FIELDS = ("commit_url", "commit_message", "commit_description", "oid", "pr_url")


@dataclass(frozen=True)
class Destination:
    """A dataset repo, and how to commit to it.

    Attributes:
        repo_id: name of the repo, created if need be.
        private: whether the repo is to be private. `False` creates a public one, or leaves the repo as it is.
        token: as in `huggingface_hub`; needs the right to write.
        revision: the branch; `None` is the main branch.
        create_pr: open a pull request instead of committing.
        commit_message: message of the commit; `None` is a default of the library.
    """

    repo_id: str
    private: bool = True
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: the name cannot be that of a repo, or is that of a directory here.
        """
        try:
            validate_repo_id(self.repo_id)  # which accepts `None`
        except HFValidationError as error:
            raise ValueError(f"`repo_id` is {self.repo_id!r}: {error}. {_NO_DIRECTORY}") from error
        if not isinstance(self.repo_id, str):
            raise ValueError(f"`repo_id` is {self.repo_id!r}. {_NO_DIRECTORY}")
        if "/" not in self.repo_id and Path(self.repo_id).is_dir():
            raise ValueError(f"`repo_id` is {self.repo_id!r}, which is a directory here. {_NO_DIRECTORY}")


_NO_DIRECTORY = (
    "Expected the name of a repo of the Hub, `user/name`. Into a directory, `save_pretrained` writes an index, and "
    "`save_to_disk` scores."
)


def create_repo(api: HfApi, destination: Destination) -> str:
    """Create the repo unless it exists, and return its full name, `user/name`.

    Raises:
        ValueError: the repo exists and is public, but is to be private.
    """
    private = destination.private
    repo_id = api.create_repo(destination.repo_id, repo_type=REPO_TYPE, private=private, exist_ok=True).repo_id
    if private and not api.dataset_info(repo_id).private:
        raise ValueError(
            f"The dataset repo {repo_id!r} exists and is public, and `private` is True. Nothing was uploaded. Pass "
            "`private=False` to publish for everyone, or make the repo private in its settings."
        )
    return repo_id


def commit(
    destination: Destination, message: str, changes: Callable[[HfApi, str, DatasetInfo], list[CommitOperation]]
) -> CommitInfo:
    """Change a repo in one commit. The repo and the branch are created unless they exist.

    Args:
        destination: the repo.
        message: message of the commit, where the destination has none.
        changes: returns the changes to the last commit; takes the client, the full name of the repo and that commit.

    Raises:
        ValueError: the repo exists and is public, but is to be private.
        HubAccessError: the repo cannot be written to, or the connection failed.
    """
    api, revision = hub_api(destination.token), destination.revision
    with access_errors(destination.repo_id, revision):
        repo_id = create_repo(api, destination)
        if revision is not None and not revision.startswith("refs/pr/"):
            api.create_branch(repo_id, branch=revision, repo_type=REPO_TYPE, exist_ok=True)
        info = api.dataset_info(repo_id, revision=revision)
        return api.create_commit(
            repo_id,
            changes(api, repo_id, info),
            commit_message=destination.commit_message or message,
            repo_type=REPO_TYPE,
            revision=revision,
            create_pr=destination.create_pr,
            parent_commit=info.sha,
        )


def in_main_process(push: Callable[[], CommitInfo], processes: Processes | None = None) -> CommitInfo:
    """Push in the main process of a distributed run, and return the commit in every process.

    Args:
        push: pushes.
        processes: the processes of the run, if they are known.

    Raises:
        PeerProcessError: the main process failed.
    """

    def fields() -> dict[str, Any]:  # plain JSON, which the main process sends to the others
        made = push()
        return {name: getattr(made, name) for name in _COMMIT_FIELDS}

    if processes is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = Processes()
    return CommitInfo(**(fields() if processes is None else processes.broadcast_from_main(fields)))


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
    from datasets.config import HF_DATASETS_CACHE

    for file in dataset.cache_files:
        path = Path(file["filename"])
        if not path.is_relative_to(HF_DATASETS_CACHE):
            continue
        parts = path.relative_to(HF_DATASETS_CACHE).parts
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


CheckpointSource = str | HubCheckpoint | HubSource

"""Weights on the Hub: `"hf://user/model@revision"`, `"user/model@revision"`, or an object that names both."""


@named_arguments
@dataclass(frozen=True)
class IndexFacts:
    """Facts that are published about an index and that its feature store does not record.

    Args:
        settings (`TrakConfig`, *optional*):
            The configuration of the run, for λ and the batch size. Defaults to the settings of the index that the
            store is a copy of, and otherwise to `TrakConfig()`.
        model_name (`str`, *optional*):
            The model repo that [`TrakAttributor.from_pretrained`] is to load. Defaults to the name in the model's
            configuration (for a fine-tuned model that of its base), if it is certainly the name of a repo.
        model_revision (`str`, *optional*):
            Branch, tag or commit of `model_name`.
        weights_dtype (`str`, *optional*):
            Dtype in which the weights are to be loaded, such as `"float32"`. Defaults to that of a copied index.
        checkpoints (`Mapping[int, str | HubCheckpoint | HubSource]`, *optional*):
            Where the weights of each model id are on the Hub: `"hf://user/model@revision"`, `"user/model@revision"`
            or a [`HubCheckpoint`]. Needed for ids whose weights are not those of the model and did not come from the
            Hub.
        train_dataset (`TrainSource`, *optional*):
            The dataset repo of the training rows. Defaults to that of a copied index.
        lds (`float`, *optional*):
            The linear datamodeling score, from -1 to 1, if it was measured. Defaults to that of a copied index.
        fidelity (`Fidelity`, *optional*):
            What [`TrakAttributor.fidelity`] returned, for the card.
    """

    settings: TrakConfig | None = None
    model_name: str | None = None
    model_revision: str | None = None
    weights_dtype: str | None = None
    checkpoints: Mapping[int, CheckpointSource] | None = None
    train_dataset: TrainSource | None = None
    lds: float | None = None
    fidelity: "Fidelity | None" = None


def attributor_facts(
    attributor: "FeaturizedModel", checkpoints: Mapping[int, CheckpointSource] | None = None, **given: Any
) -> IndexFacts:
    """Collect the facts that an attributor knows about its own index.

    Args:
        attributor: any `FeaturizedModel`; its configuration, weights and training dataset are described.
        checkpoints: takes precedence over the [`HubCheckpoint`] objects that the attributor was featurized with.
        given: `model_name`, `model_revision`, `lds` and `fidelity` of [`IndexFacts`].

    Raises:
        TypeError: `given` has another name.
    """
    args = attributor.args
    if args.per_device_batch_size == "auto":
        from hf_trak.featurize.featurizer import BatchSizeFinder

        found = BatchSizeFinder(args.batch_size, attributor.store.output_dir).batch_size
        args = replace(args, per_device_batch_size=found)
    floating = [value.dtype for value in attributor.model.parameters() if value.is_floating_point()]
    sources = {key: source for key, source in attributor.sources.items() if isinstance(source, HubCheckpoint)}
    return IndexFacts(
        settings=args,
        weights_dtype=str(floating[0]).removeprefix("torch.") if floating else None,
        checkpoints={**sources, **(checkpoints or {})},
        train_dataset=train_source(attributor.train_dataset),
        **given,
    )


def completed(facts: IndexFacts, store: FeatureStore) -> IndexFacts:
    """Fill in what was not given and what the store, or the index that it is a copy of, knows.

    Raises:
        ValueError: the name or revision of the model cannot be that of a repo.
        RefusedIndexError: the store is a copy of an index, and its manifest is damaged.
    """
    if (copied := copied_manifest(store)) is not None:
        facts = replace(
            facts,
            settings=facts.settings or TrakConfig(**copied.settings),
            weights_dtype=facts.weights_dtype or copied.weights_dtype,
            train_dataset=facts.train_dataset or copied.train_dataset,
            lds=copied.lds if facts.lds is None else facts.lds,
        )
    if facts.model_name is None:
        name, revision = recorded_model(store)
        facts = replace(facts, model_name=name, model_revision=facts.model_revision or revision)
    if facts.model_name is not None:
        checked_repo(facts.model_name, "`model_name`")
    if facts.model_revision is not None:
        checked_revision(facts.model_revision, "`model_revision`")
    return replace(facts, checkpoints={**known_sources(store), **(facts.checkpoints or {})})


_UPLOAD_FILES = 64

"""Files per group of uploads."""


def push_attributor(
    attributor: "FeaturizedModel", destination: Destination, curvature: bool = True, **facts: Any
) -> CommitInfo:
    """Publish the index of an attributor.

    Every process calls this function. The main process pushes, and all processes return its result.

    Args:
        attributor: any `FeaturizedModel`.
        destination: the repo.
        curvature: whether to publish complete curvatures.
        facts: `model_name`, `model_revision`, `checkpoints` and `lds`. The attributor knows the rest.

    Raises:
        ValueError: the index is published already, an argument is not a valid name of a repo or revision, or the repo
            is public and `private` is True.
        TypeError: `facts` has another name.
        HfTrakError: the attributor came from `exclude` or `extend`, whose features lie in several stores.
        IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
        StoreError: a curvature is damaged.
        HubAccessError: the repo cannot be written to, or the connection failed; the same call resumes.
        PeerProcessError: the main process failed.
    """
    index = _described(attributor, curvature, facts)
    return in_main_process(lambda: publish(index(), destination), attributor.processes)


def _described(
    attributor: "FeaturizedModel", curvature: bool, facts: Mapping[str, Any]
) -> Callable[[], PreparedIndex]:
    """Prepare the solvers of an attributor in all processes.

    Returns:
        A function that checks and describes the index, for the main process.
    """
    if isinstance(attributor.store, IndexStore):
        raise ValueError(
            f"The index {attributor.store.files.name} is published already. Expected features of your own. To publish "
            "it elsewhere, copy it with `pull_index` and pass the directory to `push_index` as a `FeatureStore`."
        )
    if isinstance(attributor.store, RevisedStore):
        raise HfTrakError(
            "A revised index refers to the store that it revises, and cannot be published by itself. Featurize "
            "`attributor.train_dataset` in an output directory of its own, and push that."
        )
    described = attributor_facts(attributor, **facts)
    for model_id in attributor.scorer.ensemble(None):
        attributor.scorer.prepare(model_id)  # computed by all processes together if it is missing
    store, rows = attributor.store, attributor.train_dataset

    def index() -> PreparedIndex:
        if described.train_dataset is not None:
            index_files.write_train_rows(store, rows, described.train_dataset)
        return prepared(store, described, curvature)

    return index


def save_index(attributor: "FeaturizedModel", directory: str | os.PathLike[str], **facts: Any) -> None:
    """Write the files that [`push_attributor`] would upload into a new directory, from which they can be loaded.

    Every process calls this function, and the main process writes. The directory appears as a whole or not at all.

    Args:
        attributor: any `FeaturizedModel`.
        directory: the directory, which must not exist yet, or be empty.
        facts: `model_name`, `model_revision`, `checkpoints`, `lds` and `fidelity` of [`IndexFacts`], and `curvature`
            as in [`push_index`].

    Raises:
        ValueError: the directory exists and is not empty, the index is published already, or an argument is not a
            valid name of a repo or revision.
        TypeError: `directory` is no path, or `facts` has another name.
        HfTrakError: the attributor came from `exclude` or `extend`, whose features lie in several stores.
        IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
        StoreError: a file is damaged, or the directory cannot be written.
        PeerProcessError: the main process failed.
    """
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise TypeError(f"`directory` is {directory!r}. Expected the path of a new or empty directory. Name one.")
    path = Path(directory)
    index = _described(attributor, facts.pop("curvature", True), facts)

    def save() -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(
                f"{path} exists and is not an empty directory. Expected a new directory for the index. Name another "
                "one, or delete it."
            )
        found = index()
        with atomic_directory(path) as temporary:
            for name, content in {**found.files, README: index_card(path.resolve().name, found).encode()}.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    (temporary / name).write_bytes(content)
                else:
                    shutil.copyfile(content, temporary / name)

    attributor.processes.broadcast_from_main(save)


def push_index(
    store: FeatureStore,
    repo_id: str,
    *,
    private: bool = True,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    curvature: bool = True,
    **facts: Any,
) -> CommitInfo:
    """Publish a finished feature store as a dataset repo.

    The repo gets the configuration, Gram matrices, feature shards and a card.

    All files become visible together, in one commit. After an interruption the same call uploads only the files that
    have not arrived, and where nothing has changed there is no commit. The commit deletes files of an earlier index
    that do not belong to this one, and leaves all other files of the repo as they are. An existing card is updated
    (see `hf_trak.hub.cards`). Paths of this machine are not published.

    Args:
        store (`FeatureStore`):
            A complete store, with the Gram matrix of every checkpoint.
        repo_id (`str`):
            The dataset repo, created if need be.
        private (`bool`, *optional*, defaults to `True`):
            Create a private repo, and refuse a public one. `False` creates a public repo.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`; needs the right to write.
        revision (`str`, *optional*):
            The branch, created if need be. By default the main branch.
        create_pr (`bool`, *optional*, defaults to `False`):
            Open a pull request instead of committing.
        commit_message (`str`, *optional*):
            Message of the commit.
        curvature (`bool`, *optional*, defaults to `True`):
            Publish the complete curvatures of the store, too. Others compute exact scores with them.
        facts:
            Fields of [`~hf_trak.hub.push.IndexFacts`], which the store does not record: `settings` (the
            `TrakConfig` of the run, for λ and the batch size), `model_name` and `model_revision` (the model repo),
            `weights_dtype` (such as `"float32"`), `checkpoints` (model ids to `"hf://user/model@revision"` or
            [`HubCheckpoint`]), `train_dataset` (a `TrainSource`), `lds` and `fidelity`.

    Returns:
        `huggingface_hub.CommitInfo`: the commit.

    Raises:
        IncompleteStoreError: shards, or Gram matrices or what another solver keeps, are missing.
        StoreError: a curvature is damaged.
        HubAccessError: the repo cannot be written to, or the connection failed.
        ValueError: an argument is not a valid name of a repo or revision, the repo is public and `private` is True,
            or the index is larger than readers accept.
        TypeError: `facts` has a name that is not a field of `IndexFacts`.
        RefusedIndexError: the store is a copy of an index, and its manifest is damaged.
    """
    destination = Destination(repo_id, private, token, revision, create_pr, commit_message)
    return publish(prepared(store, IndexFacts(**facts), curvature), destination)


def prepared(store: FeatureStore, facts: IndexFacts, curvature: bool) -> PreparedIndex:
    """Check a store, and describe it as it is published.

    Args:
        store: the store.
        facts: what it does not record.
        curvature: whether to publish its curvatures.

    Raises:
        As [`push_index`], but for errors of the Hub.
    """
    facts = completed(facts, store)
    if facts.train_dataset is None and not isinstance(store, IndexStore):
        facts = replace(facts, train_dataset=index_files.recorded_source(store))
    config = {**store.config, "model_name": facts.model_name, "model_revision": facts.model_revision}
    curvatures = _curvatures(store) if curvature else {}
    if "whitening" in config and (lacking := sorted(set(store.model_ids) - set(curvatures))):
        raise ValueError(
            f"The index has whitened features, and no curvature of the checkpoints {lacking} would be published with "
            "it. Expected all, since targets are whitened with them. Leave out `curvature=False`."
        )
    paths = _tensor_files(store)
    for one in curvatures.values():
        paths |= one.paths
    manifest = _manifest(store, facts, curvatures, paths)
    json_files = {FeatureStore.CONFIG_FILE: sealed_bytes(config), MANIFEST_FILE: sealed_bytes(manifest.to_json())}
    _check_readable(config, json_files)
    # Sources on the Hub take the place of paths of this machine.
    for model_id, published in manifest.checkpoints.items():
        source = None if published.source is None else str(published.source)
        content = sealed_bytes({**store.checkpoint_info(model_id), "source": source})
        json_files[f"{store.checkpoint_dir(model_id).name}/checkpoint.json"] = content
    choice = Calibration.from_json(store.read_calibration() or {}) if CALIBRATION_FILE in paths else None
    return PreparedIndex(config, manifest, curvatures, {**json_files, **paths}, facts.fidelity, choice)


def publish(index: PreparedIndex, destination: Destination) -> CommitInfo:
    """Upload an index to a repo. Raises as [`push_index`]."""

    def changes(api: HfApi, repo_id: str, info: DatasetInfo) -> list[CommitOperation]:
        additions = [
            *(CommitOperationAdd(name, content) for name, content in index.files.items()),
            *card_operations(api, repo_id, info, index_card(repo_id, index), "index"),
        ]
        present = {file.rfilename for file in info.siblings or []}
        stale = _stale(present, {addition.path_in_repo for addition in additions})
        # Files are uploaded in groups, so that after an interruption most of what was begun has arrived.
        for first in range(0, len(additions), _UPLOAD_FILES):
            api.preupload_lfs_files(
                repo_id,
                additions[first : first + _UPLOAD_FILES],
                repo_type=REPO_TYPE,
                revision=destination.revision,
                create_pr=destination.create_pr,
                free_memory=False,
            )
        return [*additions, *(CommitOperationDelete(path) for path in stale)]

    return commit(destination, "Upload an attribution index with hf_trak", changes)


def _curvatures(store: FeatureStore) -> dict[int, StoredCurvature]:
    """Read the complete curvatures of a store."""
    if isinstance(store, IndexStore):
        for model_id in store.model_ids:
            store.fetch_curvature(model_id)
    found = {model_id: stored_curvature(store, model_id) for model_id in store.model_ids}
    return {model_id: one for model_id, one in found.items() if one is not None}


def _tensor_files(store: FeatureStore) -> dict[str, Path]:
    """Check the tensor files of a complete store, and map their paths in an index to where they are."""
    if not store.model_ids:
        raise IncompleteStoreError(f"{store.output_dir} holds no checkpoint to publish. Featurize first.")
    root = store.checkpoint_dir(store.model_ids[0]).parent
    if isinstance(store, IndexStore):
        for model_id in store.model_ids:
            store.fetch_all(model_id)
        store.train_rows()
        store.published_calibration()
        return {path: root / path for path in store.files.listed if not path.startswith("curvature/")}
    paths = [index_files.TRAIN_ROWS_FILE] if (root / index_files.TRAIN_ROWS_FILE).exists() else []
    if (choice := store.read_calibration()) is not None:
        index_files.check_calibration(choice)
        paths.append(CALIBRATION_FILE)
    for model_id in store.model_ids:
        shards, folder = store.train(model_id), store.checkpoint_dir(model_id).name
        shards.require_complete("Featurize the remaining rows first.")
        shards.checksums()
        paths += shard_paths(model_id, shards.plan)
        if (name := index_files.solver_file(store, model_id)) is not None:
            paths.append(f"{folder}/{name}")
        if (root / folder / REFERENCES_FILE).exists():
            index_files.check_references(store, model_id)
            paths.append(f"{folder}/{REFERENCES_FILE}")
        if index_files.has_row_digests(store):
            index_files.write_row_digests(store, model_id)
            paths.append(f"{folder}/{index_files.ROW_DIGESTS_FILE}")
    return {path: root / path for path in paths}


def _manifest(
    store: FeatureStore, facts: IndexFacts, curvatures: Mapping[int, StoredCurvature], paths: Mapping[str, Path]
) -> IndexManifest:
    """Describe the checkpoints of a store and the files of an index."""
    ids, given = store.model_ids, facts.checkpoints or {}
    if unknown := sorted(set(given) - set(ids)):
        raise ValueError(f"`checkpoints` names the model ids {unknown}; the index has {ids}. Expected some of those.")
    manifest = IndexManifest(
        {path: PublishedFile(local.stat().st_size, recorded_checksum(local)) for path, local in paths.items()},
        {
            model_id: PublishedCheckpoint(
                store.checkpoint_info(model_id)["fingerprint"],
                parse_source(given.get(model_id)),
                history_of(store, model_id),
            )
            for model_id in ids
        },
        store.config_hash,
        weights_dtype=facts.weights_dtype,
        train_dataset=facts.train_dataset,
        lds=facts.lds,
    )
    values = (facts.settings or TrakConfig()).to_dict()
    for one in list(curvatures.values())[:1]:
        values["curvature"] |= settings_left_open(values["curvature"], one.record, store.train_size)
    if values["solver"] == "auto":
        values |= index_files.solver_settings(
            [manifest.solvers.get(one) for one in ids], store.train_size, store.proj_dim
        )
    settings = {name: values[name] for name in SETTINGS}
    settings["curvature"] = {name: values["curvature"][name] for name in CURVATURE_SETTINGS}
    manifest = replace(manifest, settings=settings)
    # Reading it back checks it as every reader will.
    return IndexManifest.from_json(sealed(manifest.to_json()), store.train(ids[0]).plan)


def _check_readable(config: Mapping[str, Any], json_files: Mapping[str, bytes]) -> None:
    """Refuse to publish an index that is larger than readers accept. Raises `ValueError`."""
    try:
        index_files.check_bounds(config)
    except ValueError as error:
        raise ValueError(
            f"The index cannot be published: {error}. Expected an index of a size that readers accept. Featurize with "
            "a smaller `proj_dim`, or name fewer parameters in `grad_wrt`."
        ) from error
    for name, data in json_files.items():
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(
                f"{name} has {len(data)} bytes, and readers take at most {MAX_JSON_BYTES}. Expected fewer shards or "
                "parameters. Featurize with a larger `shard_size`, or name fewer parameters in `grad_wrt`."
            )


def _stale(present: set[str], new: set[str]) -> list[str]:
    """Return the files of an earlier index in the repo that do not belong to the new one."""
    if not present.issuperset(JSON_FILES):
        return []  # the repo holds no index, so files of such names have another purpose
    return sorted(path for path in present - new if index_files.INDEX_FILE.fullmatch(path))
