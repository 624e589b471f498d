"""Turn rows as they are stored into rows that a model accepts.

Tokens and labels become columns, so that the fingerprint of a dataset covers how it was tokenized. Images become
pixels when rows are read. Text columns stay, for the report.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from jinja2 import TemplateError
from transformers import DataCollatorForTokenClassification

from hf_trak.cli.class_labels import class_numbers, with_labels, without_labels
from hf_trak.cli.parser import DataArguments
from hf_trak.cli.stored_rows import evenly_spaced
from hf_trak.data.columns import LABELS, ColumnsRead, image_column, is_text, label_column, text_columns
from hf_trak.data.image_text import ImageTextCollator
from hf_trak.data.language import mask_tokens, tokenize_chat, tokenize_prompt_completion
from hf_trak.hub import safe_loading
from hf_trak.modelout_functions.question_answering import ENDS
from hf_trak.modelout_functions.tokens import IGNORED, ROLE_MASKS
from hf_trak.runtime.progress import no_progress_bars

READY = ("input_ids", "pixel_values", "input_features", "input_values")

"""Columns of rows that need no preparation."""


_IMAGE_TASKS = ("image_classification", "iterative_image_classification")

_TEXT_TASKS = ("text_classification", "regression", "multi_label_classification")

_PAIR_TASKS = ("clip", "siglip")

_LABELLED = (
    *_IMAGE_TASKS, *_TEXT_TASKS, "audio_classification", "masked_lm", "seq2seq_lm", "token_classification",
    "question_answering",
)  # fmt: skip

"""Tasks that cannot do without a column of labels."""


@dataclass
class Preparation:
    """The preparation of rows for one model and task.

    Attributes:
        prepare: prepares rows, or with `labelled=False` rows for `predict`, whose labels are not looked at.
        collator: the data collator, if it is not the default.
        processing_class: the tokenizer or processor.
        columns: the columns that are read.
    """

    prepare: Callable[..., Dataset]
    collator: Any = None
    processing_class: Any = None
    columns: ColumnsRead = field(default_factory=ColumnsRead)


def preparation(model: Any, task: str, rows: Dataset, args: DataArguments, name: str, revision: str) -> Preparation:
    """Choose the preparation of training rows and targets for a task, and print which columns are read.

    Args:
        model: the model, whose config names the labels.
        task: name of the task.
        rows: the training rows, whose columns determine the preparation.
        args: names of columns.
        name, revision: name and revision of the model, for its tokenizer or processor.

    Raises:
        ValueError: a required column is missing, or the user must prepare rows for this task.
    """
    found = _chosen(model, task, rows, args, name, revision, class_numbers(model, rows, args.label_column))
    if int(os.environ.get("RANK", "0")) == 0:
        read = str(found.columns) or ", ".join(name for name in (*READY, *LABELS) if name in rows.column_names)
        print(f"Columns read: {read}", file=sys.stderr)
    return found


def _chosen(
    model: Any, task: str, rows: Dataset, args: DataArguments, name: str, revision: str, ids: Mapping[str, int]
) -> Preparation:
    if any(column in rows.column_names for column in READY):
        return _ready(model, task, rows, args, name, revision, ids)
    if task in _IMAGE_TASKS:
        column = image_column(rows.features, args.image_column)
        label = label_column(rows.features, args.label_column)
        processor = safe_loading.load_image_processor(name, revision)
        mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"

        def pixels(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
            images = [_converted(image, column, mode) for image in batch[column]]
            made = {"pixel_values": processor(images, return_tensors="pt")["pixel_values"]}
            return {**made, **{name: batch[name] for name in ("labels",) if name in batch}}

        def prepare(data: Dataset, labelled: bool = True) -> Dataset:
            if not labelled:
                data = without_labels(_with_columns(data, [column]), label)
                return data.map(pixels, batched=True, desc="Reading images")
            return with_labels(_with_columns(data, [column], [label]), label, ids).with_transform(pixels)

        return Preparation(prepare, None, processor, ColumnsRead(None, column, label))
    if task in _PAIR_TASKS:
        image = image_column(rows.features, args.image_column)
        (text,) = text_columns(rows.features, task, args.text_columns)
        processor = safe_loading.load_processor(name, revision)
        pairs = ImageTextCollator(image, text, processor=processor)
        read = ColumnsRead([text], image)
        return Preparation(lambda data, labelled=True: _with_columns(data, [image, text]), pairs, processor, read)
    if task in _TEXT_TASKS or task in ("causal_lm", "masked_lm"):
        tokenizer = safe_loading.load_tokenizer(name, revision)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if task in _TEXT_TASKS:
            return _classified(task, tokenizer, rows, args, ids)
        return _language(task, tokenizer, rows, args)
    raise ValueError(
        f"Rows for the task {task!r} have to be prepared beforehand: they have the columns {rows.column_names}. "
        f"Expected one of {list(READY)} and labels, as the model accepts them. Save such a dataset with "
        "`save_to_disk`."
    )


def _converted(image: Any, column: str, mode: str) -> Any:
    if not hasattr(image, "convert"):
        raise ValueError(f"A row has {image!r:.80} in the column {column!r}. Expected an image. Leave such rows out.")
    return image.convert(mode)


def _ready(
    model: Any, task: str, rows: Dataset, args: DataArguments, name: str, revision: str, ids: Mapping[str, int]
) -> Preparation:
    """Prepare rows that the model accepts as they are: the tokenizer, if there is one, pads them.

    Targets may be texts. They are tokenized if the texts of the training rows then become the tokens that these have.
    """

    def prepare(data: Dataset, labelled: bool = True) -> Dataset:
        if not any(column in data.column_names for column in READY):
            ready = [column for column in READY if column in rows.column_names]
            known = data if labelled else rows.remove_columns(ready)
            how = _chosen(model, task, known, args, name, revision, ids)
            _check_same_tokens(rows, how, task)
            return how.prepare(data, labelled)
        if labelled:
            _check_label_columns(task, data)
        return data

    if "input_ids" not in rows.column_names:
        return Preparation(prepare)
    try:
        tokenizer = safe_loading.load_tokenizer(name, revision)
    except (OSError, ValueError):  # a model without a tokenizer: rows of one length need none
        return Preparation(prepare)
    if task == "causal_lm" and "labels" not in rows.column_names:
        return Preparation(prepare, _LabellingCollator(tokenizer), tokenizer)
    return Preparation(prepare, _collator(tokenizer, rows), tokenizer)


def _check_same_tokens(rows: Dataset, how: Preparation, task: str) -> None:
    """Refuse to tokenize targets in another way than the training rows were. 32 rows are compared.

    Args:
        rows: the training rows, with tokens.
        how: the preparation of the targets.
        task: name of the task.
    """
    texts = how.columns.text_columns or []
    remedy = "Expected targets that the model accepts as they are. Save them with `save_to_disk`."
    if not texts or "input_ids" not in rows.column_names or not set(texts) <= set(rows.column_names):
        raise ValueError(
            f"The training rows have the columns {rows.column_names}, ready for the model, and the targets have "
            f"{texts or 'others'}, which these do not have to compare with. {remedy}"
        )
    some = evenly_spaced(rows, 32)
    with no_progress_bars():
        made = how.prepare(some.select_columns(texts), labelled=task not in _TEXT_TASKS)
    marked = [name for name in ROLE_MASKS if name in rows.column_names]
    names = [name for name in ("input_ids", "labels") if name in made.column_names and name in rows.column_names]
    for row, again in zip(some, made, strict=True):
        seen = row.get("attention_mask") or [1] * len(row["input_ids"])
        for name in (*names, *marked):
            own = [one for one, there in zip(row[name], seen, strict=True) if there]
            if own != again.get(name):
                raise ValueError(
                    f"The training rows were tokenized in another way than {texts} of the targets would be: "
                    f"`{name}` of a row is {str(own)[:100]}, and its text gives {str(again.get(name))[:100]} "
                    f"(`max_length` is one reason). {remedy}"
                )


def _check_label_columns(task: str, rows: Dataset) -> None:
    """Refuse rows without the labels that a task reads. Causal language models need none beside their tokens."""
    answers = task == "question_answering"
    expected = ENDS if answers else LABELS
    found = [name for name in expected if name in rows.column_names]
    if task in _LABELLED and len(found) < (len(ENDS) if answers else 1):
        raise ValueError(
            f"The rows have the columns {rows.column_names}, and no labels for the task {task!r}. Expected "
            f"{'both' if answers else 'one'} of {list(expected)}. Add the labels that the model was trained with."
        )


def _with_columns(data: Dataset, names: Sequence[str], answers: Sequence[str] = ()) -> Dataset:
    """Return rows, training rows or targets, after making sure that the chosen columns are there and full."""
    if missing := [name for name in (*names, *answers) if name not in data.column_names]:
        remedy = "Rename the columns of one of them."
        if not set(missing) & set(names):
            remedy = "Add them, or let `--predict` of `hf-trak attribute` attribute what the model itself says."
        raise ValueError(
            f"The rows have the columns {data.column_names}, and not {missing}, which the training rows have. "
            f"Expected the same columns in training rows and targets. {remedy}"
        )
    for name in (*names, *answers):
        if data.data.column(name).null_count:
            values = data.with_format(None)[name]
            if (row := next((row for row, value in enumerate(values) if value is None), None)) is not None:
                raise ValueError(
                    f"Row {row} has nothing in the column {name!r}, as where a cell of a CSV file is empty or NA. "
                    "Expected a value in every row. Leave such rows out, or fill them in."
                )
    return data


def _collator(tokenizer: Any, rows: Dataset) -> Any:
    """Return a collator that also pads labels, if these are lists."""
    listed = "labels" in rows.column_names and isinstance(rows[0]["labels"], list)
    return DataCollatorForTokenClassification(tokenizer) if listed else None


class _LabellingCollator:
    """Pads rows of tokens, and gives those without labels the ones that they have in a training.

    `DataCollatorForLanguageModeling(mlm=False)` of `transformers` leaves out every pad token, also one that ends a
    text. That of TRL, whose rows have no `attention_mask`, leaves out the padding, and what masks of the roles hide.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self._pad, self._pad_token = DataCollatorForTokenClassification(tokenizer), tokenizer.pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        return self._pad([self._labelled(row) for row in rows])

    def _labelled(self, row: Mapping[str, Any]) -> dict[str, Any]:
        labels, masks = list(row.get("labels", row["input_ids"])), [row[name] for name in ROLE_MASKS if name in row]
        if not masks and "labels" not in row and "attention_mask" in row:
            labels = [IGNORED if token == self._pad_token else token for token in labels]
        for mask in masks:
            labels = [label if shown else IGNORED for label, shown in zip(labels, mask, strict=True)]
        return {**{name: value for name, value in row.items() if name not in ROLE_MASKS}, "labels": labels}


def _classified(task: str, tokenizer: Any, rows: Dataset, args: DataArguments, ids: Mapping[str, int]) -> Preparation:
    label = label_column(rows.features, args.label_column)
    texts = text_columns(rows.features, task, args.text_columns, label)

    def tokens(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        columns = [list(batch[column]) for column in texts]
        return dict(tokenizer(*columns, truncation=True, max_length=args.max_length))

    def prepare(data: Dataset, labelled: bool = True) -> Dataset:
        data = _with_columns(data, texts, [label] if labelled else ())
        data = with_labels(data, label, ids) if labelled else without_labels(data, label)
        return data.map(tokens, batched=True, desc="Tokenizing")

    return Preparation(prepare, None, tokenizer, ColumnsRead(texts, None, label))


def _language(task: str, tokenizer: Any, rows: Dataset, args: DataArguments) -> Preparation:
    columns = text_columns(rows.features, task, args.text_columns)
    chat, completion = not is_text(rows.features[columns[0]]) and len(columns) == 1, len(columns) == 2

    def tokens(row: Mapping[str, Any]) -> dict[str, Any]:
        first = row[columns[0]]
        if chat:
            return _chat_tokens(first, tokenizer, args.max_length)
        if completion:
            return tokenize_prompt_completion(first, row[columns[1]], tokenizer, args.max_length)
        offsets = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
        found = dict(tokenizer(first, truncation=True, max_length=args.max_length, **offsets))
        if task == "masked_lm":
            return found | mask_tokens(found["input_ids"], tokenizer)
        return {**found, "labels": list(found["input_ids"])}

    def prepare(data: Dataset, labelled: bool = True) -> Dataset:
        data = _with_columns(data, columns[:1], columns[1:] if labelled else ())
        if labelled:
            return data.map(tokens, desc="Tokenizing")
        asked = "messages" if chat else "prompt" if completion else "text"
        others = [name for name in ("messages", "prompt", "text") if name in data.column_names and name != columns[0]]
        data = data.remove_columns(others)
        return data if columns[0] == asked else data.rename_column(columns[0], asked)

    return Preparation(prepare, DataCollatorForTokenClassification(tokenizer), tokenizer, ColumnsRead(columns))


def _chat_tokens(messages: Any, tokenizer: Any, max_length: int | None) -> dict[str, Any]:
    """Tokenize a conversation with the template of the tokenizer, which may refuse it."""
    try:
        found: dict[str, Any] = tokenize_chat(messages, tokenizer, max_length)
    except (TemplateError, OverflowError) as error:
        raise ValueError(
            f"The chat template of the tokenizer fails on the messages {messages!r:.200} ({type(error).__name__}: "
            f"{error}). Expected roles and contents that it accepts. Change the rows, or name another model."
        ) from error
    return found
