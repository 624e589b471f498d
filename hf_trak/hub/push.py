"""Publishing an index: one commit, which the same call finishes after an interruption.

The same code serves a store on disk ([`push_index`]) and an attributor that may run in several processes
([`push_attributor`]). Both describe the index as [`IndexFacts`] and end in [`publish`].
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete

from hf_trak.config import TrakConfig
from hf_trak.errors import HfTrakError, IncompleteStoreError
from hf_trak.featurize.converting import history_of
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.hub.access import REPO_TYPE, access_errors, hub_api
from hf_trak.hub.cards import card_operations
from hf_trak.hub.curvature_files import StoredCurvature, curvature_folder, settings_left_open, stored_curvature
from hf_trak.hub.destination import Destination, commit_fields, create_repo
from hf_trak.hub.index_card import index_card
from hf_trak.hub.index_checks import check_bounds
from hf_trak.hub.index_facts import IndexFacts, attributor_facts, completed
from hf_trak.hub.index_files import INDEX_FILE, TRAIN_ROWS_FILE, checksums_of, references_checksum, tensor_files
from hf_trak.hub.index_store import JSON_FILES, IndexStore
from hf_trak.hub.manifest import (
    EXACT_SETTINGS,
    MANIFEST_FILE,
    MAX_JSON_BYTES,
    SETTINGS,
    SOLVER_SETTINGS,
    IndexManifest,
)
from hf_trak.hub.origins import parse_source
from hf_trak.hub.published import PublishedCheckpoint
from hf_trak.hub.row_digests import has_row_digests, write_row_digests
from hf_trak.hub.solver_state import solver_settings, stored_solver
from hf_trak.hub.train_rows import read_train_rows, recorded_source, write_train_rows
from hf_trak.store.revised import RevisedStore
from hf_trak.store.sealed import sealed, sealed_bytes
from hf_trak.store.store import FeatureStore

_UPLOAD_FILES = 64
"""Files per group of uploads."""


def push_attributor(
    attributor: FeaturizedModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    curvature: bool = True,
    **facts: Any,
) -> CommitInfo:
    """Publish the index of an attributor; see [`push_index`] for the arguments.

    Every process calls this function. The main process pushes, and all processes return its result.

    Args:
        facts: `model_name`, `model_revision`, `checkpoints` and `lds`. The attributor knows the rest.

    Raises:
        ValueError: the index is published already, an argument is not a valid name of a repo or revision, or the repo
            is public and `private=True` was given.
        TypeError: `facts` has another name.
        HfTrakError: the attributor came from `exclude` or `extend`, whose features lie in several stores.
        IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
        StoreError: a curvature is damaged.
        HubAccessError: the repo cannot be written to, or the connection failed; the same call resumes.
        PeerProcessError: the main process failed.
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
    destination = Destination(repo_id, private, token, revision, create_pr, commit_message)
    described = attributor_facts(attributor, **facts)
    for model_id in attributor.scorer.ensemble(None):
        attributor.scorer.prepare(model_id)  # computed by all processes together if it is missing
    store, rows = attributor.store, attributor.train_dataset

    def push() -> dict[str, Any]:
        if described.train_dataset is not None:
            write_train_rows(store, rows, described.train_dataset)
        return commit_fields(publish(store, destination, described, curvature))

    return CommitInfo(**attributor.processes.broadcast_from_main(push))


def push_index(
    store: FeatureStore,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    curvature: bool = True,
    **facts: Any,
) -> CommitInfo:
    """Publish a finished feature store as a dataset repo: configuration, Gram matrices, feature shards, and a card.

    All files become visible together, in one commit. After an interruption the same call uploads only the files that
    have not arrived, and where nothing has changed there is no commit. The commit deletes files of an earlier index
    that do not belong to this one, and leaves all other files of the repo as they are. An existing card is updated
    (see `hf_trak.hub.cards`). Paths of this machine are not published.

    Args:
        store (`FeatureStore`):
            A complete store, with the Gram matrix of every checkpoint.
        repo_id (`str`):
            The dataset repo, created if need be.
        private (`bool`, *optional*):
            Visibility of a repo that is created. By default the Hub decides. `True` with a public repo is refused.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`; needs the right to write.
        revision (`str`, *optional*):
            The branch, created if need be. By default the main branch.
        create_pr (`bool`, *optional*, defaults to `False`):
            Open a pull request instead of committing.
        commit_message (`str`, *optional*):
            Message of the commit.
        curvature (`bool`, *optional*, defaults to `True`):
            Publish the complete curvatures of the store, too, with which others compute exact scores.
        facts:
            Fields of [`~hf_trak.hub.index_facts.IndexFacts`], which the store does not record: `settings` (the
            `TrakConfig` of the run, for λ and the batch size), `model_name` and `model_revision` (the model repo),
            `weights_dtype` (such as `"float32"`), `checkpoints` (model ids to `"hf://user/model@revision"` or
            [`HubCheckpoint`]), `train_dataset` (a `TrainSource`), `lds` and `fidelity`.

    Returns:
        `huggingface_hub.CommitInfo`: the commit.

    Raises:
        IncompleteStoreError: shards, or Gram matrices or what another solver keeps, are missing.
        StoreError: a curvature is damaged.
        HubAccessError: the repo cannot be written to, or the connection failed.
        ValueError: an argument is not a valid name of a repo or revision, the repo is public and `private=True` was
            given, or the index is larger than readers accept.
        TypeError: `facts` has a name that is not a field of `IndexFacts`.
        RefusedIndexError: the store is a copy of an index, and its manifest is damaged.
    """
    destination = Destination(repo_id, private, token, revision, create_pr, commit_message)
    return publish(store, destination, IndexFacts(**facts), curvature)


def publish(store: FeatureStore, destination: Destination, facts: IndexFacts, curvature: bool = True) -> CommitInfo:
    """Publish a store in a repo. Raises as [`push_index`]."""
    facts = completed(facts, store)
    if facts.train_dataset is None and not isinstance(store, IndexStore):
        facts = replace(facts, train_dataset=recorded_source(store))
    config = {**store.config, "model_name": facts.model_name, "model_revision": facts.model_revision}
    curvatures = _curvatures(store) if curvature else {}
    if "whitening" in config and (lacking := sorted(set(store.model_ids) - set(curvatures))):
        raise ValueError(
            f"The index has whitened features, and no curvature of the checkpoints {lacking} would be published with "
            "it. Expected all, since targets are whitened with them. Leave out `curvature=False`."
        )
    manifest = _manifest(store, facts, curvatures)
    json_files = {
        FeatureStore.CONFIG_FILE: store.encoded(config),
        MANIFEST_FILE: sealed_bytes(manifest.to_json()),
    }
    _check_readable(config, json_files)

    api, revision = hub_api(destination.token), destination.revision
    with access_errors(destination.repo_id, revision):
        repo_id = create_repo(api, destination)
        if revision is not None and not revision.startswith("refs/pr/"):
            api.create_branch(repo_id, branch=revision, repo_type=REPO_TYPE, exist_ok=True)
        info = api.dataset_info(repo_id, revision=revision)
        card = index_card(repo_id, config, manifest, curvatures, facts.fidelity)
        additions = [
            *(CommitOperationAdd(name, data) for name, data in json_files.items()),
            *card_operations(api, repo_id, info, card, "index"),
            *_checkpoint_operations(store, manifest),
            *_train_row_operations(store, manifest),
            *_curvature_operations(curvatures),
        ]
        present = {file.rfilename for file in info.siblings or []}
        stale = _stale(present, {addition.path_in_repo for addition in additions})
        # Files are uploaded in groups, so that after an interruption most of what was begun has arrived.
        for first in range(0, len(additions), _UPLOAD_FILES):
            api.preupload_lfs_files(
                repo_id,
                additions[first : first + _UPLOAD_FILES],
                repo_type=REPO_TYPE,
                revision=revision,
                create_pr=destination.create_pr,
                free_memory=False,
            )
        return api.create_commit(
            repo_id,
            [*additions, *(CommitOperationDelete(path) for path in stale)],
            commit_message=destination.commit_message or "Upload an attribution index with hf_trak",
            repo_type=REPO_TYPE,
            revision=revision,
            create_pr=destination.create_pr,
            parent_commit=info.sha,
        )


def _curvatures(store: FeatureStore) -> dict[int, StoredCurvature]:
    """Read the complete curvatures of a store."""
    if isinstance(store, IndexStore):
        for model_id in store.model_ids:
            store.fetch_curvature(model_id)
    found = {model_id: stored_curvature(store, model_id) for model_id in store.model_ids}
    return {model_id: one for model_id, one in found.items() if one is not None}


def _manifest(store: FeatureStore, facts: IndexFacts, curvatures: Mapping[int, StoredCurvature]) -> IndexManifest:
    """Describe the checkpoints of a store, each of which has to be complete."""
    ids, given = store.model_ids, facts.checkpoints or {}
    if not ids:
        raise IncompleteStoreError(f"{store.output_dir} holds no checkpoint to publish. Featurize first.")
    if unknown := sorted(set(given) - set(ids)):
        raise ValueError(f"`checkpoints` names the model ids {unknown}; the index has {ids}. Expected some of those.")
    published = {}
    for model_id in ids:
        shards = store.train(model_id)
        shards.require_complete("Featurize the remaining rows first.")
        if isinstance(store, IndexStore):
            store.fetch_solver(model_id)
        published[model_id] = PublishedCheckpoint(
            store.checkpoint_info(model_id)["fingerprint"],
            parse_source(given.get(model_id)),
            checksums_of(shards),
            references_checksum(store, model_id),
            curvatures[model_id].checksums if model_id in curvatures else None,
            stored_solver(store, model_id),
            _row_digests(store, model_id),
            history_of(store, model_id),
        )
    values = (facts.settings or TrakConfig()).to_dict()
    for one in list(curvatures.values())[:1]:
        values |= settings_left_open(values, one.record, store.train_size)
    if values["solver"] == "auto":
        values |= solver_settings([one.solver for one in published.values()], store.train_size, store.proj_dim)
    settings = {name: values[name] for name in (*SETTINGS, *EXACT_SETTINGS, *SOLVER_SETTINGS)}
    manifest = IndexManifest(
        published, settings, facts.weights_dtype, facts.train_dataset, facts.lds, store.config_hash, _train_rows(store)
    )
    # Reading it back checks it as every reader will.
    return IndexManifest.from_json(sealed(manifest.to_json()), store.train(ids[0]).plan)


def _row_digests(store: FeatureStore, model_id: int) -> str | None:
    """Return the checksum of the digests of the rows, which are computed unless they are there."""
    if isinstance(store, IndexStore):
        store.row_digests(model_id)
        return store.manifest.checkpoints[model_id].row_digests
    return write_row_digests(store, model_id) if has_row_digests(store) else None


def _train_rows(store: FeatureStore) -> str | None:
    """Return the checksum of the digests of the training rows, if there are some."""
    if isinstance(store, IndexStore):
        store.train_rows()
        return store.manifest.train_rows
    path = store.output_dir / TRAIN_ROWS_FILE
    return read_train_rows(path, store)[1] if path.exists() else None


def _train_row_operations(store: FeatureStore, manifest: IndexManifest) -> list[CommitOperationAdd]:
    if manifest.train_rows is None:
        return []
    root = store.files.root if isinstance(store, IndexStore) else store.output_dir
    return [CommitOperationAdd(TRAIN_ROWS_FILE, root / TRAIN_ROWS_FILE)]


def _check_readable(config: Mapping[str, Any], json_files: Mapping[str, bytes]) -> None:
    """Refuse to publish an index that is larger than readers accept. Raises `ValueError`."""
    try:
        check_bounds(config)
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


def _checkpoint_operations(store: FeatureStore, manifest: IndexManifest) -> list[CommitOperationAdd]:
    """Add the files of every checkpoint, with sources on the Hub in place of paths of this machine."""
    operations = []
    for model_id, published in manifest.checkpoints.items():
        folder = store.checkpoint_dir(model_id)
        public = {
            **store.checkpoint_info(model_id),
            "source": str(published.source) if published.source else None,
        }
        operations.append(CommitOperationAdd(f"{folder.name}/checkpoint.json", store.encoded(public)))
        for path in tensor_files(store, model_id, published):
            operations.append(CommitOperationAdd(path, folder.parent / path))
    return operations


def _curvature_operations(curvatures: Mapping[int, StoredCurvature]) -> list[CommitOperationAdd]:
    return [
        CommitOperationAdd(f"{curvature_folder(model_id)}/{name}", path)
        for model_id, one in curvatures.items()
        for name, path in one.paths.items()
    ]


def _stale(present: set[str], new: set[str]) -> list[str]:
    """Return the files of an earlier index in the repo that do not belong to the new one."""
    if not present.issuperset(JSON_FILES):
        return []  # the repo holds no index, so files of such names have another purpose
    return sorted(path for path in present - new if INDEX_FILE.fullmatch(path))
