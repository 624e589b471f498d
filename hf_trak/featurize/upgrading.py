"""Bringing a feature store of format 1 up to date, after comparing it with the model and the rows it was made from.

Nothing of format 1 says under which id a shard was projected, how rows were collated, or what settings the model had
besides its weights. So one row of every shard is computed again: it has the same features only if all of that is as it
was. Then the same features are written with identities and checksums of the current format, beside the old files, and
take their place. An interruption at any moment loses nothing: the same call goes on.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hf_trak.errors import IncompleteStoreError
from hf_trak.featurize.definition import COMPARISONS
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.featurizer import StoredRows
from hf_trak.store.atomic import create_bytes
from hf_trak.store.references import read_references, write_references
from hf_trak.store.sealed import sealed_bytes
from hf_trak.store.store import FeatureStore
from hf_trak.weights.checkpoints import Checkpoint

logger = logging.getLogger(__name__)

_STAGING = "upgrading"
_READY = "ready.json"


def upgrade_store(attributor: FeaturizedModel, sources: Mapping[int, Checkpoint | None]) -> None:
    """Bring the store of an attributor up to date.

    Args:
        attributor: with the model, the rows and the settings that the store was made with.
        sources: the weights of checkpoints, by model id, where they are not at the paths that the store names.

    Raises:
        ConfigMismatchError: they are not those; the store is left as it was.
        CheckpointMismatchError: the weights are others.
        IncompleteStoreError: the training rows are not at hand.
        StoreError: a file is damaged.
    """
    store, staging = attributor.store, attributor.store.output_dir / _STAGING
    if store.version > 1:
        shutil.rmtree(staging, ignore_errors=True)
        return
    if not (staging / _READY).exists():
        if getattr(attributor.train_dataset, "absent", False):
            raise IncompleteStoreError(
                f"{store.output_dir} is of format 1, and its training rows are not at hand. Expected them, since rows "
                "are computed again to see whether they fit. Pass `train_dataset`."
            )
        _stage(attributor, staging, sources)
    _switch(store.output_dir, staging)
    attributor.reopen_store()


def _stage(attributor: FeaturizedModel, staging: Path, sources: Mapping[int, Checkpoint | None]) -> None:
    """Compare all shards with the model, and write them anew in the current format."""
    old = attributor.store
    new = FeatureStore.open(staging, attributor.store_config(), compare=COMPARISONS)
    for model_id in old.model_ids:
        shards, info = old.train(model_id), old.checkpoint_info(model_id)
        with attributor.weights(model_id, attributor.source_of(model_id, sources)):
            present = [index for index in range(len(shards)) if shards.is_written(index)]
            rows = [StoredRows(shards, index, attributor.train_dataset, "train") for index in present]
            attributor.featurizer().check(rows, model_id)
        new.register_checkpoint(model_id, info["fingerprint"], info.get("source"))
        references = read_references(old, model_id)
        if references is not None:
            write_references(new, model_id, references)
        copied = new.train(model_id)
        for index in present:
            if not copied.is_written(index):
                shard = shards.read(index, verify=True)
                copied.write(index, shard.grads, shard.out_to_loss)
        gram = old.read_gram(model_id)
        if gram is not None:
            new.write_gram(model_id, gram.matrix, gram.n)
        logger.info("Checkpoint %d: %d shards agree with the model and are written anew.", model_id, len(present))
    create_bytes(staging / _READY, sealed_bytes({"config_hash": new.config_hash}))


def _switch(output_dir: Path, staging: Path) -> None:
    """Put the new files in the place of the old ones, the configuration last."""
    shutil.rmtree(output_dir / "experiments", ignore_errors=True)  # target features are computed again when asked for
    shutil.rmtree(output_dir / "revisions", ignore_errors=True)  # they refer to the old configuration
    last = staging / FeatureStore.CONFIG_FILE
    for path in sorted(staging.rglob("*")):
        if path.is_file() and path not in (last, staging / _READY):
            target = output_dir / path.relative_to(staging)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    os.replace(last, output_dir / last.name)
    shutil.rmtree(staging, ignore_errors=True)
