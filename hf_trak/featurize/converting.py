"""Converting a feature store to fewer bits per number: floating-point features to codes, or codes to smaller ones.

The result is a store of its own, shard by shard that of the source. Its configuration is the one that featurizing with
the smaller `feature_dtype` has, so that the same attributor opens it. From float32 its shards have the same bits, too,
since these features are what featurizing encodes. From anything else they carry the rounding of the source, and the
record of each checkpoint, `checkpoint-<model_id>/checkpoint.json`, says so in two more keys: `converted_from`, the
storage dtypes that the features had before, and `converted_content`, the hash of the checksums of the source's shards.

Taken over: records and fingerprints of checkpoints, references of the task, weights q. Computed anew: Gram matrices,
or what another solver of the ridge regression keeps. Left behind: features of targets, scores and curvatures, whose
identities have another configuration; all of them are computed again where they are asked for.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_trak.config import BITS, TrakConfig
from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.progress import RowProgress, log_on_interrupt
from hf_trak.store.atomic import TEMPORARY, differing
from hf_trak.store.checkpoint_records import code_settings
from hf_trak.store.references import read_references, write_references
from hf_trak.store.revised import RevisedStore
from hf_trak.store.sealed import create_sealed
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.store import FeatureStore
from hf_trak.version import __version__

if TYPE_CHECKING:  # they import datasets and transformers
    from hf_trak.featurize.featurized import FeaturizedModel
    from hf_trak.scores.scorer import Scorer

FROM, CONTENT = "converted_from", "converted_content"
"""Keys of the record of a converted checkpoint."""

EXACT = ("float32",)
"""What converted features were before that have the bits of featurized ones."""


def convert_store(
    source: FeatureStore,
    output_dir: str | os.PathLike[str],
    feature_dtype: str,
    args: TrakConfig | None = None,
    processes: Processes | None = None,
) -> FeatureStore:
    """Write the features of a store with fewer bits per number into another directory.

    All processes call this together, and divide the shards. A call after an interruption converts the rest.

    Args:
        source (`FeatureStore`):
            A complete store. It is only read.
        output_dir (`str` or `os.PathLike`):
            Directory of the result: a new or empty one, or that of an earlier call.
        feature_dtype (`str`):
            Storage of the result, of fewer bits than the source has.
        args (`TrakConfig`, *optional*):
            Settings of the ridge regression. By default `TrakConfig()`.
        processes (`Processes`, *optional*):
            The processes that take part. By default those that this one was started with.

    Returns:
        `FeatureStore`: the result, with its Gram matrices or what another solver keeps.

    Raises:
        ValueError: `feature_dtype` has as many bits as the source or more, or the directories contain each other.
        ConfigMismatchError: `output_dir` holds something else.
        IncompleteStoreError: the source has no checkpoint, or lacks shards.
        StoreError: the source is of another kind, or a file is damaged or cannot be written.
        PeerProcessError: another process failed.
    """
    args, processes = args or TrakConfig(), processes or Processes()
    directory = Path(output_dir)
    config = converted_config(source, feature_dtype)

    def prepare() -> list[int]:
        ids = source.model_ids
        if not ids:
            raise IncompleteStoreError(f"{source.output_dir} holds no checkpoint to convert. Featurize first.")
        for model_id in ids:
            source.train(model_id).require_complete("Featurize the remaining rows before converting.")
        _check_destination(source, directory)
        result = FeatureStore.open(directory, config)
        for model_id in ids:
            _prepare_checkpoint(source, result, model_id)
        return ids

    ids = processes.broadcast_from_main(prepare)
    result = FeatureStore.load(directory)
    for model_id in ids:
        _convert_checkpoint(source, result, model_id, processes)
    for model_id in ids:
        scorer_of(result, args, processes).prepare(model_id)
    return result


def converted(model: "FeaturizedModel", output_dir: str | os.PathLike[str], feature_dtype: str) -> "FeaturizedModel":
    """Convert the store of a featurized model, and return the same kind of featurized model of the result.

    Args:
        model (`FeaturizedModel`):
            The featurized model, which is left as it is.
        output_dir, feature_dtype:
            See [`convert_store`].

    Returns:
        `FeaturizedModel`: of the class of `model`, with the same weights and training rows.

    Raises:
        As [`convert_store`].
    """
    dtype: Any = feature_dtype
    args = replace(model.args, output_dir=str(output_dir), feature_dtype=dtype, proj_dim=model.proj_dim)
    store = convert_store(model.store, output_dir, feature_dtype, args, model.processes)
    return model.another(args, store=store, recorded_rows=model.recorded_rows, num_workers=model.num_workers)


def converted_config(source: FeatureStore, feature_dtype: str) -> dict[str, Any]:
    """Describe the result of a conversion: the configuration of the source with another storage dtype.

    Raises:
        ValueError: `feature_dtype` is unknown, or has as many bits as the source or more.
        StoreError: the source is not a store of an attributor.
    """
    config = source.config
    if isinstance(source, RevisedStore):
        raise StoreError(
            f"{source.output_dir} is a revision, which cannot be converted. Expected a store of a `TrakAttributor`. "
            "Featurize the rows of a revision in a directory of their own."
        )
    before = str(config["feature_dtype"])
    fewer = sorted((name for name in BITS if BITS[name] < BITS[before]), key=lambda name: -BITS[name])
    if feature_dtype not in fewer:
        raise ValueError(
            f"`feature_dtype` is {feature_dtype!r}, and {source.output_dir} holds {before} features. Expected one of "
            f"{fewer}, which have fewer bits: what was rounded away does not come back."
        )
    kept = {key: value for key, value in config.items() if key not in ("format_version", *code_settings(before))}
    return {**kept, "hf_trak_version": __version__, "feature_dtype": feature_dtype, **code_settings(feature_dtype)}


def history_of(store: FeatureStore, model_id: int) -> tuple[str, ...]:
    """Return the storage dtypes that the features of a checkpoint had before they were converted, in order.

    Args:
        store (`FeatureStore`):
            The store.
        model_id (`int`):
            A registered checkpoint.

    Returns:
        `tuple[str, ...]`: empty for features that were not converted. Those of `("float32",)` have the bits of
        featurized ones.

    Raises:
        StoreError: the record of the checkpoint is damaged.
    """
    known = store.checkpoint_info(model_id).get(FROM, [])
    if not isinstance(known, list) or not set(map(str, known)) <= set(BITS):
        raise StoreError(
            f"Checkpoint {model_id} in {store.output_dir} was converted from {known!r} by its record. Expected a list "
            "of storage dtypes. Restore its checkpoint.json from a copy, or convert into another directory."
        )
    return tuple(map(str, known))


def scorer_of(store: FeatureStore, args: TrakConfig, processes: Processes) -> "Scorer":
    """Make the scorer of a store without its model."""
    from hf_trak.scores.scorer import Scorer

    solver = (args.solver_kind, args.solver_rank)
    return Scorer(store, processes, processes.device, args.lambda_relative, *solver)


def _check_destination(source: FeatureStore, directory: Path) -> None:
    """Refuse a directory that holds anything else than an earlier conversion."""
    ours, theirs = directory.resolve(), source.output_dir.resolve()
    if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
        raise ValueError(
            f"The directory of the result is {str(directory)!r}, and that of the source {str(source.output_dir)!r}. "
            "Expected two directories; none contains the other. Name another one for the result."
        )
    if not directory.exists() or (directory / FeatureStore.CONFIG_FILE).exists():
        return
    others = sorted(path.name for path in directory.iterdir() if TEMPORARY.fullmatch(path.name) is None)
    if others:
        raise ConfigMismatchError(
            f"{directory} holds {others[:4]}, and no feature store. Expected a new or empty directory, or that of an "
            "earlier conversion of the same store. Use another directory."
        )


def _prepare_checkpoint(source: FeatureStore, result: FeatureStore, model_id: int) -> None:
    """Register a checkpoint of the source, and copy its references."""
    origin = {
        FROM: [*history_of(source, model_id), source.config["feature_dtype"]],
        CONTENT: source.train(model_id).content_hash,
    }
    info = {**source.checkpoint_info(model_id), "config_hash": result.config_hash, **origin}
    create_sealed(result.checkpoint_dir(model_id) / "checkpoint.json", info)
    result.register_checkpoint(model_id, info["fingerprint"], info.get("source"))
    saved = result.checkpoint_info(model_id)
    if changes := differing({key: saved[key] for key in origin if key in saved}, origin):
        raise ConfigMismatchError(
            f"{result.checkpoint_dir(model_id)} holds features that come from elsewhere than {source.output_dir} ("
            + "; ".join(changes)
            + "). Expected a new or empty directory, or that of an earlier conversion of the same features. Use "
            "another directory."
        )
    references = read_references(source, model_id)
    if references is not None:
        write_references(result, model_id, references)


def _convert_checkpoint(source: FeatureStore, result: FeatureStore, model_id: int, processes: Processes) -> None:
    """Convert the missing shards that fall to this process, and wait for those of the others."""
    old, new = source.train(model_id), result.train(model_id)
    if source.code_format is not None:  # codes are rotated already
        new = replace(new, rotation=None)
    todo = processes.broadcast_from_main(new.unwritten)
    mine = [todo[position] for position in processes.share(len(todo))]
    what = f"{result.config['feature_dtype']} features, checkpoint {model_id}"
    with (
        processes.all_or_none(),
        log_on_interrupt(lambda: _progress(new, what)),
        RowProgress.over(processes, sum(len(new.plan.rows(index)) for index in mine), what) as progress,
    ):
        for index in mine:
            shard = old.read(index, mapped=False)
            if not new.is_written(index):
                new.write(index, shard.grads, shard.out_to_loss)
            progress.update(shard.stop - shard.start)
    processes.broadcast_from_main(lambda: new.require_complete("Convert the same store again; finished shards stay."))


def _progress(shards: ShardSet, what: str) -> str:
    done = sum(map(shards.exists, range(len(shards))))
    return (
        f"{done} of {len(shards)} shards of {what} are complete in {shards.directory}. Run the same command again to "
        "convert the others, with any number of processes."
    )
