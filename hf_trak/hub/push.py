"""Publishing an index: one atomic commit, resumable, by one process."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete

from hf_trak.config import TrakConfig
from hf_trak.errors import HfTrakError, IncompleteStoreError
from hf_trak.featurize.batch_size import BatchSizeFinder
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.hub.cards import card_operations, render_card
from hf_trak.hub.files import REPO_TYPE, access_errors, hub_api
from hf_trak.hub.index_files import INDEX_FILE, checksums_of, references_checksum, tensor_files
from hf_trak.hub.index_store import JSON_FILES, IndexStore, check_bounds
from hf_trak.hub.manifest import (
    MANIFEST_FILE,
    MAX_JSON_BYTES,
    SETTINGS,
    HubSource,
    IndexManifest,
    PublishedCheckpoint,
    TrainSource,
    checked_repo,
    checked_revision,
)
from hf_trak.hub.models import HubCheckpoint
from hf_trak.hub.origins import copied_manifest, given_source, known_sources, recorded_model, train_source
from hf_trak.store.revised import RevisedStore
from hf_trak.store.sealed import sealed, sealed_bytes
from hf_trak.store.store import FeatureStore

logger = logging.getLogger(__name__)

_UPLOAD_FILES = 64
COMMIT_FIELDS = ("commit_url", "commit_message", "commit_description", "oid", "pr_url")
"""What the main process tells the others of a commit."""


def push_attributor(
    attributor: FeaturizedModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    model_name: str | None = None,
    model_revision: str | None = None,
    checkpoints: Mapping[int, str | HubCheckpoint | HubSource] | None = None,
    lds: float | None = None,
) -> CommitInfo:
    """Publish the index of an attributor; see [`push_index`] for the arguments.

    Every process calls this; the main process pushes, and all get its result.

    Raises:
        ValueError: the index is a published one, or an argument is no name of a repo or revision, or the repo is
            public against `private=True`.
        HfTrakError: the attributor came from `exclude` or `extend`, whose features lie in several stores.
        IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
        HubAccessError: the repo cannot be written to, or the connection broke; the same call goes on.
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
    for model_id in attributor.scorer.ensemble(None):
        attributor.scorer.gram(model_id)

    def push() -> dict[str, Any]:
        sources: dict[int, str | HubCheckpoint | HubSource] = {
            model_id: source for model_id, source in attributor.sources.items() if isinstance(source, HubCheckpoint)
        }
        args = attributor.args
        if args.auto_find_batch_size:
            found = BatchSizeFinder(args.per_device_batch_size, attributor.store.output_dir).batch_size
            args = replace(args, per_device_batch_size=found)
        floating = [value.dtype for value in attributor.model.parameters() if value.is_floating_point()]
        commit = push_index(
            attributor.store,
            repo_id,
            settings=args,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            model_name=model_name,
            model_revision=model_revision,
            weights_dtype=str(floating[0]).removeprefix("torch.") if floating else None,
            checkpoints={**sources, **(checkpoints or {})},
            train_dataset=train_source(attributor.train_dataset),
            lds=lds,
        )
        return {name: getattr(commit, name) for name in COMMIT_FIELDS}

    return CommitInfo(**attributor.processes.broadcast_from_main(push))


def push_index(
    store: FeatureStore,
    repo_id: str,
    *,
    settings: TrakConfig | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    model_name: str | None = None,
    model_revision: str | None = None,
    weights_dtype: str | None = None,
    checkpoints: Mapping[int, str | HubCheckpoint | HubSource] | None = None,
    train_dataset: TrainSource | None = None,
    lds: float | None = None,
) -> CommitInfo:
    """Publish a finished feature store as a dataset repo: configuration, Gram matrices, feature shards, and a card.

    Files are uploaded first and become visible together, in one commit. After an interruption the same call uploads
    what is missing; where nothing has changed there is no commit. Files of an earlier index in the repo that do not
    belong to this one are deleted in that commit; everything else in the repo stays. An existing card is updated (see
    `hf_trak.hub.cards`). Paths of this machine are not published.

    Args:
        store: complete, with the Gram matrix of every checkpoint.
        repo_id: the dataset repo, created if need be.
        settings: the configuration of the run, for λ and batch size; `None` publishes the defaults, and for a copy of
            an index those that it came with (as for `weights_dtype`, `train_dataset` and `lds`).
        private: visibility of a repo that is created; `None` leaves it to the Hub's default. `True` with a repo that
            is public is refused.
        token: as in `huggingface_hub`; needs the right to write.
        revision: the branch, created if need be. `None` is the main branch.
        create_pr: open a pull request instead of committing.
        commit_message: of the commit.
        model_name: the model repo that [`TrakAttributor.from_pretrained`] is to load. `None` takes the name that the
            model's configuration has (which for a fine-tuned model is its base) where that is certainly a repo.
        model_revision: its revision.
        weights_dtype: dtype of the weights, such as `float32`.
        checkpoints: where the weights of each model id are on the Hub: `"hf://user/model@revision"`,
            `"user/model@revision"` or a [`HubCheckpoint`]. Needed for the ids whose weights are not the model's and
            did not come from the Hub.
        train_dataset: the training rows as a dataset of the Hub.
        lds: the linear datamodeling score, if it was measured.

    Returns:
        The commit.

    Raises:
        IncompleteStoreError: shards or Gram matrices are missing.
        HubAccessError: the repo cannot be written to, or the connection broke.
        ValueError: an argument is no name of a repo or revision, the repo is public against `private=True`, or the
            index is larger than readers take.
        RefusedIndexError: the store is a copy of an index, and its manifest is bad.
    """
    config = store.config
    if (copied := copied_manifest(store)) is not None:
        settings = settings or TrakConfig(**copied.settings)
        weights_dtype, lds = weights_dtype or copied.weights_dtype, copied.lds if lds is None else lds
        train_dataset = train_dataset or copied.train_dataset
    if model_name is None:
        model_name, recorded_revision = recorded_model(store)
        model_revision = model_revision or recorded_revision
    if model_name is not None:
        checked_repo(model_name, "`model_name`")
    if model_revision is not None:
        checked_revision(model_revision, "`model_revision`")
    config = {**config, "model_name": model_name, "model_revision": model_revision}
    sources = {**known_sources(store), **(checkpoints or {})}
    manifest = _manifest(store, settings or TrakConfig(), weights_dtype, sources, train_dataset, lds)
    encoded = {
        FeatureStore.CONFIG_FILE: store.encoded(config),
        MANIFEST_FILE: sealed_bytes(manifest.to_json()),
    }
    _check_readable(config, encoded)

    api = hub_api(token)
    with access_errors(repo_id, revision):
        repo_id = api.create_repo(repo_id, repo_type=REPO_TYPE, private=private, exist_ok=True).repo_id
        if private and not api.dataset_info(repo_id).private:
            raise ValueError(
                f"The dataset repo {repo_id!r} exists and is public, but `private=True` was given. Nothing was "
                "uploaded. Expected a private repo: change its visibility in its settings, or push to another one."
            )
        if revision is not None and not revision.startswith("refs/pr/"):
            api.create_branch(repo_id, branch=revision, repo_type=REPO_TYPE, exist_ok=True)
        info = api.dataset_info(repo_id, revision=revision)
        present = {file.rfilename for file in info.siblings or []}
        card = index_card(repo_id, config, manifest)
        additions = [
            *(CommitOperationAdd(name, data) for name, data in encoded.items()),
            *card_operations(api, repo_id, info, card, "index"),
        ]
        for model_id in store.model_ids:
            folder = store.checkpoint_dir(model_id)
            saved = manifest.checkpoints[model_id]
            public = {**store.checkpoint_info(model_id), "source": str(saved.source) if saved.source else None}
            additions.append(CommitOperationAdd(f"{folder.name}/checkpoint.json", store.encoded(public)))
            for path in tensor_files(store, model_id, saved):
                additions.append(CommitOperationAdd(path, folder.parent / path))
        stale = _stale(present, {addition.path_in_repo for addition in additions})
        # In groups, so that a broken push has finished most of what it began, whatever the size of the index.
        for first in range(0, len(additions), _UPLOAD_FILES):
            group = additions[first : first + _UPLOAD_FILES]
            api.preupload_lfs_files(
                repo_id, group, repo_type=REPO_TYPE, revision=revision, create_pr=create_pr, free_memory=False
            )
        return api.create_commit(
            repo_id,
            [*additions, *(CommitOperationDelete(path) for path in stale)],
            commit_message=commit_message or "Upload an attribution index with hf_trak",
            repo_type=REPO_TYPE,
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,
        )


def _check_readable(config: Mapping[str, Any], encoded: Mapping[str, bytes]) -> None:
    """Refuse to publish what every reader would refuse. Raises `ValueError`."""
    check_bounds(config)
    for name, data in encoded.items():
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(
                f"{name} has {len(data)} bytes, and readers take at most {MAX_JSON_BYTES}. Expected fewer shards or "
                "parameters. Featurize with a larger `shard_size`, or name fewer parameters in `grad_wrt`."
            )


def index_card(repo_id: str, config: Mapping[str, Any], manifest: IndexManifest) -> str:
    """The card of an index."""
    settings, task = manifest.settings, config.get("task") or {}
    ridge = (
        f"{settings['lambda_reg']:g}, absolute"
        if settings.get("lambda_reg") is not None
        else f"{settings.get('lambda_relative', TrakConfig().lambda_relative):g} · trace(XᵀX) / min(n, k)"
    )
    name, revision = config.get("model_name"), config.get("model_revision")
    trained = manifest.train_dataset
    single = len(manifest.checkpoints) == 1
    rows = [
        {
            "model_id": model_id,
            "fingerprint": checkpoint.fingerprint,
            "source": str(
                checkpoint.source or ("the model" if single else "not named: the model itself, or yours to pass")
            ),
        }
        for model_id, checkpoint in sorted(manifest.checkpoints.items())
    ]
    facts = {
        "train_size": f"{config['train_size']:,}",
        "train_fingerprint": config.get("train_fingerprint"),
        "train_dataset": _link(trained.name, "datasets/", trained.revision, trained.split) if trained else "not named",
        "model": _link(name, "", revision) if name else "not named; pass it as `model=`",
        "model_class": config.get("model_class"),
        "model_dtype": config.get("model_dtype"),
        "parameters": f"{_count(config.get('parameters')):,}",
        "task": str(task.get("class", "")).rpartition(".")[2],
        "task_settings": ", ".join(f"{key} = {value}" for key, value in (task.get("settings") or {}).items()),
        "proj_dim": f"{config['proj_dim']:,}",
        "feature_dtype": config["feature_dtype"],
        "projection": config.get("projection"),
        "proj_nonzeros": config.get("proj_nonzeros"),
        "seed": config.get("seed"),
        "ridge": ridge,
        "lds": manifest.lds,
        "checkpoints": rows,
    }
    usage = "\n".join(
        [
            "from hf_trak import TrakAttributor",
            "",
            f'attributor = TrakAttributor.from_pretrained("{repo_id}"{"" if name else ", model=model"})',
            "scored = attributor.attribute(my_examples, top_k=10)  # a datasets.Dataset with the columns of the model",
            'print(scored[0]["trak_indices"], scored[0]["trak_scores"])  # rows of the training set that helped most',
        ]
    )
    title = f"Attribution index of {name}" if name else "Attribution index"
    # The files are tensors, not rows to browse.
    return render_card("index", title, usage, facts, {"pretty_name": title, "viewer": False})


def _manifest(
    store: FeatureStore,
    settings: TrakConfig,
    weights_dtype: str | None,
    checkpoints: Mapping[int, str | HubCheckpoint | HubSource],
    train_dataset: TrainSource | None,
    lds: float | None,
) -> IndexManifest:
    ids = store.model_ids
    if not ids:
        raise IncompleteStoreError(f"{store.output_dir} holds no checkpoint to publish. Featurize first.")
    if unknown := sorted(set(checkpoints) - set(ids)):
        raise ValueError(f"`checkpoints` names the model ids {unknown}; the index has {ids}. Expected some of those.")
    published = {}
    for model_id in ids:
        shards = store.train(model_id)
        shards.require_complete("Featurize the remaining rows first.")
        if store.read_gram(model_id) is None:
            raise IncompleteStoreError(
                f"The Gram matrix of model_id {model_id} is missing in {store.output_dir}. Run `featurize` again, "
                "which finishes it."
            )
        source = given_source(checkpoints.get(model_id))
        published[model_id] = PublishedCheckpoint(
            store.checkpoint_info(model_id)["fingerprint"],
            source,
            checksums_of(shards),
            references_checksum(store, model_id),
        )
    values = settings.to_dict()
    kept = {name: values[name] for name in SETTINGS}
    manifest = IndexManifest(published, kept, weights_dtype, train_dataset, lds, store.config_hash)
    # What the reader would refuse is not published.
    return IndexManifest.from_json(sealed(manifest.to_json()), store.train(ids[0]).plan)


def _stale(present: set[str], new: set[str]) -> list[str]:
    """Files of an earlier index in the repo that do not belong to the new one."""
    if not present.issuperset(JSON_FILES):
        return []  # there is no index, so files of such names are somebody else's
    return sorted(path for path in present - new if INDEX_FILE.fullmatch(path))


def _link(name: str, prefix: str, revision: str | None, split: str | None = None) -> str:
    parts = [f"[{name}](https://huggingface.co/{prefix}{name})"]
    if revision:
        parts.append(f"revision {revision}")
    if split:
        parts.append(f"split {split}")
    return ", ".join(parts)


def _count(parameters: Any) -> int:
    total = 0
    for _, shape, _ in parameters or ():
        size = 1
        for length in shape:
            size *= length
        total += size
    return total
