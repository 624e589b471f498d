"""Leaving out training rows or adding some, with the features that are there already: `exclude` and `extend`."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset as HFDataset
from datasets import concatenate_datasets
from torch.utils.data import ConcatDataset, Subset

from hf_trak.data.columns import require_class_numbers
from hf_trak.data.rows import row_count
from hf_trak.errors import HfTrakError
from hf_trak.featurize.featurized import FeaturizedModel, Revision
from hf_trak.identity.row_digest import fingerprint_dataset
from hf_trak.runtime.checks import is_int
from hf_trak.store.atomic import json_bytes
from hf_trak.store.revised import RevisedStore
from hf_trak.store.store import FeatureStore
from hf_trak.weights.checkpoints import Checkpoint


def revise(
    model: FeaturizedModel,
    exclude: Iterable[int] = (),
    added_rows: Any = None,
    sources: Mapping[int, Checkpoint | None] | None = None,
) -> FeaturizedModel:
    """Make the same kind of featurized model for the training dataset less some rows and with others below them.

    Args:
        model: featurized, and left as it is.
        exclude: numbers of the rows to leave out.
        added_rows: rows with the columns of the training dataset, or `None`.
        sources: where the weights of the featurized checkpoints are, for added rows.

    Raises:
        ValueError: a row number is out of range, no row is left, or columns are missing.
        IncompleteStoreError: the original is not featurized, or only in part.
        HfTrakError: the task's features depend on the training dataset as a whole.
    """
    n, store = len(model.train_dataset), model.store
    excluded = _checked_rows(exclude, n)
    if len(model.task.reference_rows(n)) > 0:
        raise HfTrakError(
            f"The features of {type(model.task).__name__} depend on examples drawn from the whole training "
            "dataset (its simulated negatives), so those of the unchanged rows cannot be used again. Featurize the "
            "changed dataset in an output directory of its own."
        )
    if "draws" in store.config.get("collation", {}):
        raise HfTrakError(
            "The training rows come at random, and the seeds of their draws belong to row numbers, which would "
            "change. Expected rows that are always the same. Featurize the changed dataset in an output directory of "
            "its own."
        )
    for model_id in model.scorer.ensemble(None):
        store.train(model_id).require_complete("Call `featurize` on the original dataset first.")
    if model.args.curvature.whitened:
        raise HfTrakError(
            "The features are whitened with a curvature that was fitted to rows of the original training dataset. "
            "Expected plain features, which do not depend on other rows. Featurize the changed dataset in an output "
            "directory of its own, or with `curvature.whitened=False`."
        )
    config = store.config
    fingerprint = None if added_rows is None else fingerprint_dataset(added_rows)
    change: dict[str, Any] = {"revision_of": store.config_hash, "excluded": _ranges(excluded), "added": fingerprint}
    digest = hashlib.sha256(json_bytes(change)).hexdigest()
    directory = store.output_dir / "revisions" / digest[:12]
    n_added = 0 if added_rows is None else row_count(added_rows, "new_rows")
    train_dataset = _changed(model.train_dataset, excluded, added_rows)
    change |= {"train_size": n - len(excluded) + n_added, "train_fingerprint": digest[:32]}
    opened = FeatureStore.open(directory, {**config, **change})
    added = None
    if added_rows is not None:
        added_config = {**config, "train_size": n_added, "train_fingerprint": fingerprint}
        if "collation" in config:
            tail = range(len(train_dataset) - n_added, len(train_dataset))  # with the format of the training rows
            read = train_dataset.select(tail) if isinstance(train_dataset, HFDataset) else added_rows
            added_config["collation"] = model.collation(read)
        added = FeatureStore.open(directory / "added", added_config)
    revised = model.another(
        replace(model.args, output_dir=str(directory)),
        train_dataset=train_dataset,
        store=RevisedStore(directory, opened.config, store, excluded, added),
        revision=Revision(model, change),
    )
    if added is not None:
        revised.featurize({model_id: model.source_of(model_id, sources or {}) for model_id in store.model_ids})
    return revised


def _checked_rows(exclude: Iterable[int], n: int) -> list[int]:
    if not isinstance(exclude, Iterable):
        raise TypeError(f"`rows` is {exclude!r}. Expected numbers of training rows. Pass a list: `[{exclude!r}]`.")
    rows = exclude.tolist() if hasattr(exclude, "tolist") else list(exclude)
    bad = [row for row in rows if not is_int(row, 0, n - 1)]
    if bad:
        raise ValueError(
            f"`rows` has {bad[:5]}. Expected row numbers of the training dataset, from 0 to {n - 1}. For a boolean "
            "mask, pass the positions where it is true."
        )
    if len(set(rows)) == n:
        raise ValueError(f"All {n} training rows are excluded. Expected at least one to be left.")
    return sorted(set(rows))


def _ranges(rows: Sequence[int]) -> str:
    """Format ascending numbers, runs of them shortened: `3, 17-20`."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and row == parts[-1][-1] + 1:
            parts[-1][1:] = [row]
        else:
            parts.append([row])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _changed(train_dataset: Any, excluded: Sequence[int], added_rows: Any) -> Any:
    """Return the rows that are kept and the added ones below them, in the format that is set on the training
    dataset."""
    gone = set(excluded)
    kept = [row for row in range(len(train_dataset)) if row not in gone]
    if not isinstance(train_dataset, HFDataset):
        parts = [Subset(train_dataset, kept)] if gone else [train_dataset]
        return ConcatDataset([*parts, added_rows]) if added_rows is not None else parts[0]
    chosen = train_dataset.select(kept) if gone else train_dataset
    if added_rows is None:
        return chosen
    if not isinstance(added_rows, HFDataset) or set(chosen.column_names) - set(added_rows.column_names):
        given = added_rows.column_names if isinstance(added_rows, HFDataset) else type(added_rows).__name__
        raise ValueError(
            f"The new rows have {given}. Expected a `datasets.Dataset` with the columns of the training dataset, "
            f"{chosen.column_names}."
        )
    require_class_numbers(chosen, added_rows, "the new rows")
    new = added_rows.with_format(None).select_columns(chosen.column_names).cast(chosen.features)
    both = concatenate_datasets([chosen.with_format(None), new])
    kept_format = train_dataset.format
    if kept_format["type"] is None:
        return both
    return both.with_format(
        kept_format["type"], kept_format["columns"], kept_format["output_all_columns"], **kept_format["format_kwargs"]
    )
