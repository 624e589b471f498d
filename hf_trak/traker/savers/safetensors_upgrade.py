"""Bringing a directory of a `SafetensorsSaver` from format 1 to the current format.

All rows that match their checksums are written anew in the current format, into a directory beside the old files. Then
the new files replace the old ones. An interruption at any moment loses nothing: the same call goes on.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.store.atomic import create_bytes, explained
from hf_trak.store.sealed import sealed_bytes
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.store import FeatureStore
from hf_trak.traker.savers.finalized_files import FinalizedFiles
from hf_trak.traker.savers.partial import PartialShard
from hf_trak.traker.savers.run_metadata import IDENTITY_FORMAT

_STAGING = "upgrading"
_READY = "ready.json"


def upgrade_traker(save_dir: Path) -> None:
    """Bring a directory to the current format.

    After an interruption, the same call goes on where it stopped; on an upgraded directory it does nothing. Nothing
    else may write to the directory meanwhile. Two facts that format 1 does not record are taken for granted: that a
    shard was projected under the model id of its directory, and that the code of a user's own functions is unchanged.

    Args:
        save_dir (`Path`):
            The directory.

    Raises:
        IncompleteStoreError: the directory holds no results, or not those of a `TRAKer`.
        StoreError: a file is damaged, or cannot be written. No result is lost.
    """
    save_dir = Path(save_dir)
    old, staging = FeatureStore.load(save_dir), save_dir / _STAGING
    if old.config.get("api") != "TRAKer":
        raise IncompleteStoreError(
            f"{save_dir} holds no results of TRAKer. Pass the save_dir of a TRAKer; `TrakAttributor.upgrade_store()` "
            "upgrades other stores."
        )
    if old.version == 1:
        if not (staging / _READY).exists():
            shutil.rmtree(staging, ignore_errors=True)
            _stage(old, staging)
        with explained(save_dir):
            _switch(save_dir, staging)
    shutil.rmtree(staging, ignore_errors=True)


def require_upgraded(save_dir: Path) -> None:
    """Raise `StoreError` if an upgrade was interrupted while it exchanged files."""
    if (save_dir / _STAGING / _READY).exists():
        raise StoreError(
            f"{save_dir} is being upgraded, or its upgrade was interrupted: {save_dir / _STAGING} exists. Run "
            f"`hf-trak upgrade {save_dir}` again."
        )


def _stage(old: FeatureStore, staging: Path) -> None:
    """Write all results anew, in the current format, into the staging directory."""
    config = {key: value for key, value in old.config.items() if key != "format_version"}
    new = FeatureStore.open(staging, {**config, IDENTITY_FORMAT: 1})
    for model_id in old.model_ids:
        info = old.checkpoint_info(model_id)
        new.register_checkpoint(model_id, info["fingerprint"], info.get("source"))
        _copy_rows(old.train(model_id), new.train(model_id))
        _copy_features(FinalizedFiles(old), FinalizedFiles(new), model_id)
    for name in old.experiments:
        info = FinalizedFiles(old).experiment(name)
        for model_id in old.model_ids:
            shards = old.saved_targets(name, model_id)
            if shards.directory.is_dir():
                copied = new.targets(name, model_id, info["num_targets"], info["dataset_fingerprint"])
                _copy_rows(shards, copied)
        _copy_scores(FinalizedFiles(old), FinalizedFiles(new), name)
    create_bytes(staging / _READY, sealed_bytes({"config_hash": new.config_hash}))


def _copy_rows(old: ShardSet, new: ShardSet) -> None:
    """Copy finished shards, and those rows of unfinished shards that match their checksums."""
    for index in range(len(old)):
        if old.is_written(index):
            shard = old.read(index, verify=True)
            new.write(index, shard.grads, shard.out_to_loss)
        elif old.path(index).with_suffix(".partial").exists():
            partial = PartialShard(old, index, mode="r")
            rows = np.setdiff1d(np.flatnonzero(partial.done), partial.damaged())
            copied = PartialShard(new, index)
            grads, out_to_loss = partial.grads[rows], partial.out_to_loss[rows]
            copied.write(rows, torch.from_numpy(grads), torch.from_numpy(out_to_loss))
            copied.mark(rows)


def _copy_features(old: FinalizedFiles, new: FinalizedFiles, model_id: int) -> None:
    saved = old.read_settings(model_id)
    if saved is None:
        return
    content = saved["content"]
    if not saved["grads_deleted"]:
        if old.store.train(model_id).content_hash != content:
            raise StoreError(
                f"{old.settings_path(model_id)} describes features of other rows than those in "
                f"{old.store.checkpoint_dir(model_id)}. Restore the right files, or delete the former file and call "
                "`finalize_features` again."
            )
        content = new.store.train(model_id).content_hash
    features, out_to_loss = old.read_features(model_id)
    new.write_features(model_id, features, out_to_loss, content, saved["settings"])
    if saved["grads_deleted"]:
        new.write_settings(model_id, content, saved["settings"], grads_deleted=True)


def _copy_scores(old: FinalizedFiles, new: FinalizedFiles, name: str) -> None:
    if old.scores_path(name).exists():
        new.write_scores(name, old.read_scores(name, verify=True), old.scores_members(name))


def _switch(save_dir: Path, staging: Path) -> None:
    """Replace the old files by the new ones, the configuration last."""
    last = staging / FeatureStore.CONFIG_FILE
    for path in list(_files(staging)):
        if path not in (last, staging / _READY):
            target = save_dir / path.relative_to(staging)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            if target.suffix == ".safetensors":
                target.with_suffix(".partial").unlink(missing_ok=True)
    if last.exists():
        os.replace(last, save_dir / last.name)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())
