"""The columns of a dataset that a task reads, by their names and types."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from datasets import ClassLabel, Features, Image, Value

_ANSWERED: tuple[tuple[str, ...], ...] = (("messages",), ("prompt", "completion"))

_PAIRS: tuple[tuple[str, ...], ...] = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("text1", "text2"), ("premise", "hypothesis"),
    ("question", "sentence"), ("question", "passage"), ("query", "passage"),
)  # fmt: skip

_SINGLE: tuple[tuple[str, ...], ...] = (("text",), ("sentence",), ("content",), ("caption",))

_OF_PAIRS = ("text_classification", "regression", "multi_label_classification")

SOURCES = ("id", "idx", "uuid", "guid", "url", "path", "file", "file_name", "filename", "split", "source")

"""Columns that say where a row comes from."""

LABELS = ("labels", "label")

PREDICTED = "predicted"
"""The column of predictions as texts or names of classes."""


@dataclass(frozen=True)
class ColumnsRead:
    """The columns that are read.

    Attributes:
        text_columns: one or two columns of text, or a column of conversations.
        image_column: the column of images.
        label_column: the column of labels.
    """

    text_columns: list[str] | None = None
    image_column: str | None = None
    label_column: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the columns that there are, by the names of the options."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join([*(self.text_columns or ()), *filter(None, (self.image_column, self.label_column))])


def require_class_numbers(train_dataset: Any, rows: Any, name: str) -> None:
    """Refuse rows whose label numbers stand for other classes than those of the training rows, by their names.

    Args:
        train_dataset: the training rows.
        rows: other rows.
        name: what these are, for the error message.

    Raises:
        ValueError: a name of a class has two numbers.
    """
    given = [getattr(one, "features", None) for one in (train_dataset, rows)]
    features = [one for one in given if isinstance(one, Features)]
    for column in LABELS if len(features) == len(given) else ():
        kinds = [one.get(column) for one in features]
        kinds = [getattr(kind, "feature", kind) for kind in kinds]  # also of lists, with a label for each token
        numbered = [
            {label.casefold(): place for place, label in enumerate(kind.names)}
            for kind in kinds
            if isinstance(kind, ClassLabel)
        ]
        if len(numbered) < len(kinds):
            continue
        known, said = numbered
        names = dict(zip(known.values(), known, strict=True))
        odd = next((label for label, number in said.items() if names.get(number, label) != label), None)
        odd = next((label for label in said if known.get(label, said[label]) != said[label]), odd)
        if odd is not None and said.keys() & known.keys():  # else they may be the same classes in other words
            raise ValueError(
                f"In `{column}` of {name} {said[odd]} stands for {odd!r}, and in the training rows for "
                f"{names.get(said[odd])!r}. Expected the same numbers. Use "
                f"`align_labels_with_mapping({known}, {column!r})` of these rows."
            )


def is_text(kind: Any) -> bool:
    """Tell whether a column of this type holds texts."""
    return getattr(kind, "dtype", None) in ("string", "large_string")


def text_columns(
    features: Features, task: str, named: Sequence[str] | None = None, label: str | None = None
) -> list[str]:
    """Choose the columns of text that a task reads: those named, or those whose names leave no choice.

    Args:
        features: the columns with their types.
        task: name of the task.
        named: names of columns.
        label: name of the column of labels, if it is another than `labels` or `label`.

    Raises:
        ValueError: a named column does not exist or holds no text, more are named than the task reads, or the names
            leave a choice.
    """
    pairs = _ANSWERED[1:] if task == "causal_lm" else _PAIRS if task in _OF_PAIRS else ()
    if named:
        return _named(features, named, 2 if pairs else 1, task)
    found = [names for names in (*_ANSWERED, *_PAIRS, *_SINGLE) if set(names) <= set(features)]
    found = [names for names in found if not any(set(names) < set(other) for other in found)]
    texts = [name for name, kind in features.items() if is_text(kind) and name not in (*LABELS, label)]
    if not found and len(texts) == 1 and texts[0] not in SOURCES:
        return texts
    read = [*(_ANSWERED[:1] if task == "causal_lm" else ()), *pairs, *_SINGLE]
    if len(found) != 1 or found[0] not in read:
        raise ValueError(
            f"The rows have the columns {list(features)}, whose names leave open what the task {task!r} reads. "
            f"Expected exactly one of {[' and '.join(names) for names in read]}, or a single column of text. Name "
            f"{'one column or two' if pairs else 'the column'} with `--text_columns`."
        )
    return list(found[0])


def _named(features: Features, names: Sequence[str], most: int, task: str) -> list[str]:
    existing(features, names, "text_columns")
    if len(names) > most:
        raise ValueError(
            f"`text_columns` is {list(names)}. Expected at most {most} for the task {task!r}. Name what the model was "
            "trained on."
        )
    kinds = {name: features[name] for name in names if not is_text(features[name])}
    if wrong := [name for name, kind in kinds.items() if task != "causal_lm" or isinstance(kind, Value)]:
        raise ValueError(
            f"`text_columns` names {wrong}, of the type {kinds[wrong[0]]}. Expected columns of text. Name others."
        )
    return list(names)


def image_column(features: Features, named: str | None = None) -> str:
    """Choose the column of images: the one named, or the only one of that type.

    Args:
        features: the columns with their types.
        named: name of the column.

    Raises:
        ValueError: the named column does not exist, or there is none or a choice.
    """
    if named:
        return existing(features, [named], "image_column")[0]
    found = [name for name, kind in features.items() if isinstance(kind, Image)]
    if len(found) != 1:
        raise ValueError(
            f"The columns of images are {found} among {list(features)}. Expected one. Name it with `--image_column`."
        )
    return found[0]


def label_column(features: Features, named: str | None = None) -> str:
    """Choose the column of labels: the one named, or `labels` or `label`.

    Args:
        features: the columns with their types.
        named: name of the column.

    Raises:
        ValueError: the named column does not exist, or there is none.
    """
    if named:
        return existing(features, [named], "label_column")[0]
    found = next((name for name in LABELS if name in features), None)
    if found is None:
        raise ValueError(
            f"There is no column of {list(LABELS)} among {list(features)}. Expected the labels that the model was "
            "trained with. Name their column with `--label_column`."
        )
    return found


def existing(features: Features, names: Sequence[str], option: str) -> list[str]:
    """Return the names of columns after making sure that they exist.

    Args:
        features: the columns with their types.
        names: names of columns.
        option: the option that names them, for the error message.

    Raises:
        ValueError: one of them does not exist.
    """
    if missing := [name for name in names if name not in features]:
        raise ValueError(f"`{option}` names {missing}. Expected some of {list(features)}. Correct `--{option}`.")
    return list(names)
