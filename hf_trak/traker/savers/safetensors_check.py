"""Checking the files that a `SafetensorsSaver` adds to its feature store."""

from collections.abc import Iterator
from pathlib import Path

import torch

from hf_trak.errors import HfTrakError, StoreError
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import Finding
from hf_trak.store.store import FeatureStore
from hf_trak.traker.savers.finalized_files import FinalizedFiles
from hf_trak.traker.savers.partial import PartialShard

_FINALIZE = "`finalize_features` computes it."
_SCORE = "`finalize_scores` computes it."
_AGAIN = "The same script, run again, computes its rows."


def verify_traker(save_dir: Path) -> Iterator[Finding]:
    """Check finalized features, unfinished shards and scores of a `TRAKer`, file by file.

    `hf_trak.store.verification.verify_store` checks the files of the feature store, and its configuration.

    Args:
        save_dir (`Path`):
            The directory.

    Yields:
        `Finding`: one per file; none for a store that no `TRAKer` has made.
    """
    try:
        store = FeatureStore.load(save_dir)
    except StoreError:
        return  # `verify_store` reports it
    if store.config.get("api") != "TRAKer":
        return
    files = FinalizedFiles(store)
    ids = [int(path.parent.name.removeprefix("checkpoint-")) for path in save_dir.glob("checkpoint-*/checkpoint.json")]
    for model_id in sorted(ids):
        yield from _features(files, model_id)
        yield from _checked_partials(store, model_id, None)
    for name in store.experiments:
        for model_id in sorted(ids):
            yield from _checked_partials(store, model_id, name)
        yield from _scores(files, name)


def _features(files: FinalizedFiles, model_id: int) -> Iterator[Finding]:
    path = files.settings_path(model_id)
    shards = [files.features_path(model_id, index) for index in range(len(files.plan))]
    try:
        settings = files.read_settings(model_id)
    except HfTrakError as error:
        yield Finding(path, "damaged", str(error), f"Delete it; then: {_FINALIZE}")
        return
    if settings is None:
        if any(shard.exists() for shard in shards):
            yield Finding(path, "missing", "the features beside it do not count without it", _FINALIZE)
        return
    yield Finding(path, "intact")
    for index, shard in enumerate(shards):
        if not shard.exists():
            yield Finding(shard, "missing", "the features do not exist", f"Delete {path}; then: {_FINALIZE}")
            continue
        try:
            files.read_part(model_id, index, verify=True)
        except HfTrakError as error:
            yield Finding(shard, "damaged", str(error), f"Delete {path}; then: {_FINALIZE}")
        else:
            yield Finding(shard, "intact")


def _checked_partials(store: FeatureStore, model_id: int, experiment: str | None) -> Iterator[Finding]:
    """Check unfinished shards of the train set, or of an experiment's targets."""
    try:
        shards = store.train(model_id) if experiment is None else store.saved_targets(experiment, model_id)
    except HfTrakError:
        return  # `verify_store` reports it
    yield from _partials(shards)


def _partials(shards: ShardSet) -> Iterator[Finding]:
    for index in range(len(shards)):
        path = shards.path(index).with_suffix(".partial")
        if not path.exists():
            continue
        try:
            partial = PartialShard(shards, index, mode="r")
        except HfTrakError as error:
            yield Finding(path, "damaged", str(error), f"Delete it. {_AGAIN}")
            continue
        absent, damaged = int((~partial.done).sum()), partial.damaged()
        if damaged:
            yield Finding(path, "damaged", f"rows {damaged[:5]} do not match their checksums", _AGAIN)
        elif shards.exists(index):
            yield Finding(path, "leftover", "its shard is complete", "Delete it.")
        else:
            yield Finding(path, "missing", f"{absent} of {len(partial.done)} rows have not been computed", _AGAIN)


def _scores(files: FinalizedFiles, name: str) -> Iterator[Finding]:
    path = files.scores_path(name)
    if not path.exists():
        yield Finding(path, "missing", "the scores of this experiment have not been computed", _SCORE)
        return
    try:
        scores = files.read_scores(name, verify=True)
    except HfTrakError as error:
        yield Finding(path, "damaged", str(error), f"Delete it; then: {_SCORE}")
        return
    if not bool(torch.isfinite(scores).all()):
        yield Finding(path, "damaged", "a score is not finite", f"Delete it; then: {_SCORE}")
        return
    yield Finding(path, "intact")
