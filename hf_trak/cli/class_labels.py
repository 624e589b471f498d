"""Number the labels of rows by the names of their classes, as the model does."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import ClassLabel, Dataset

from hf_trak.data.columns import LABELS
from hf_trak.runtime.progress import with_column

logger = logging.getLogger(__name__)


def class_numbers(model: Any, rows: Dataset, label_column: str | None) -> dict[str, int]:
    """Number the classes by their names: as the model's config does, or else as the training rows do.

    Args:
        model: the model, whose config names classes `LABEL_0`, … where nobody has given names.
        rows: the training rows. Labels that are a `ClassLabel` have names.
        label_column: the column of labels, if it is named.
    """
    ids = {str(name): int(index) for name, index in (getattr(model.config, "label2id", None) or {}).items()}
    if not all(name.lower().startswith("label_") for name in ids):
        return ids
    kinds = [rows.features.get(name) for name in (LABELS if label_column is None else (label_column,))]
    names = next((kind.names for kind in kinds if isinstance(kind, ClassLabel)), None)
    return ids if names is None or len(names) != len(ids) else {name: index for index, name in enumerate(names)}


def with_labels(rows: Dataset, column: str, ids: Mapping[str, int]) -> Dataset:
    """Put the labels into the column `labels`, as the numbers that belong to the names of their classes.

    Raises:
        ValueError: if there is a column `labels` beside the given one, or a label is not the name of a class.
    """
    if column != "labels":
        if "labels" in rows.column_names:
            raise ValueError(f"`label_column` is {column!r}, but there is a column `labels` too. Remove one of them.")
        rows = rows.rename_column(column, "labels")
    feature = rows.features["labels"]
    if isinstance(feature, ClassLabel):
        return _aligned(rows, feature.names, ids)
    if getattr(feature, "dtype", None) not in ("string", "large_string"):
        return rows
    names, said = [name for name, _ in sorted(ids.items(), key=lambda item: item[1])], set(rows["labels"][:])
    unnamed = [f"LABEL_{index}" for index in range(len(names))]  # as models call classes without names
    if unknown := sorted(said - set(names if said - set(unnamed) else unnamed)):
        raise ValueError(
            f"The labels {unknown[:5]} are not among those of the model and the training rows, {names[:20]}. Expected "
            "some of these. Correct the labels."
        )
    return rows.cast_column("labels", ClassLabel(names=names if said - set(unnamed) else unnamed))


def _aligned(rows: Dataset, names: Sequence[str], ids: Mapping[str, int]) -> Dataset:
    """Return rows whose `labels` are the numbers that a model gives to the names of their classes."""
    known, given = {name.lower(): index for name, index in ids.items()}, [name.lower() for name in names]
    numbers = [known.get(name) for name in given]
    if numbers == list(range(len(names))) or all(name.startswith("label_") for name in known):
        return rows
    in_order = sorted(ids, key=lambda name: ids[name])
    one_each = sorted(known.values()) == list(range(len(ids))) and len({*given}) == len(given)
    used = {numbers[label] for label in rows.unique("labels") if label is not None and label >= 0}
    if None not in used and one_each:
        labels = [numbers[label] if label is not None and label >= 0 else label for label in rows["labels"]]
        return with_column(rows.remove_columns(["labels"]), "labels", labels, feature=ClassLabel(names=in_order))
    logger.warning(
        "The classes of the rows are %s, and those of the model %s. Expected the same names: the numbers of the "
        "labels are taken as they are.",
        list(names)[:20],
        in_order[:20],
    )
    return rows


def without_labels(rows: Dataset, column: str) -> Dataset:
    """Take labels away that the model's own predictions stand for."""
    return rows.remove_columns([name for name in {column, *LABELS} if name in rows.column_names])
