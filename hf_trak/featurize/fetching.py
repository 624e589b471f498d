"""Training rows that are not at hand, fetched by their numbers and compared with those of the index."""

from collections.abc import Sequence
from typing import Any

from hf_trak.data.row_part import HeldRows
from hf_trak.data.rows import forward_columns, row_count
from hf_trak.errors import ConfigMismatchError
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.identity.collation import collation_changes, probe_rows


def row_source(model: FeaturizedModel) -> Any:
    """Return the training rows, or what fetches them (with the attribute `remote`); `None` where they cannot be had.

    Args:
        model: the model and its training rows.
    """
    absent = getattr(model.train_dataset, "absent", False)
    return getattr(model.train_dataset, "remote", None) if absent else model.train_dataset


def fetched_rows(model: FeaturizedModel, source: Any, numbers: Sequence[int]) -> HeldRows:
    """Fetch rows of a dataset that is elsewhere. All processes call this together, and the main process fetches.

    Rows are compared with their digests. What becomes of them on the way to the model is compared on the same rows
    as for a dataset that is at hand as a whole, which are fetched as well.

    Args:
        model: the model, its collator and its store.
        source: what fetches the rows, a `hub.RemoteRows`.
        numbers: numbers of the rows.

    Raises:
        ConfigMismatchError: rows have changed, or the collator has.
        HubAccessError: they cannot be downloaded.
    """
    n = row_count(model.train_dataset, "train_dataset")
    if model.args.remove_unused_columns:
        collator = model.task.collator(model.data_collator)
        columns = [*forward_columns(model.model, model.args.label_names), *model.task.batch_columns]
        source.restrict([*columns, *getattr(collator, "columns", ())])
    source.show = not model.args.disable_tqdm
    probed = sorted({*numbers, *probe_rows(n)})
    model.processes.broadcast_from_main(lambda: source.fetch(probed))
    with model.processes.all_or_none():
        held = HeldRows(source.select(probed), probed, n)
        saved = model.store.config.get("collation")
        changes = [] if saved is None else collation_changes(saved, model.collation(held))
        if changes:
            raise ConfigMismatchError(
                "The training rows that were fetched do not become what the index was made from:\n  "
                + "\n  ".join(changes)
                + "\nExpected the same collator and the same preparation of rows. Pass the `data_collator=` and "
                "`processing_class=` that the index was made with, and rows as they were then."
            )
    return held
