"""Checks that rows and batches contain what the model takes, with errors that name columns of the dataset.

Without them, a column that the collator drops (text), or that does not exist (tokens, pixels), shows up as an error
from inside the model.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset as HFDataset
from torch import Tensor
from transformers import DataCollatorWithPadding, default_data_collator

from hf_trak.modelout_functions.batches import LABEL_NAMES
from hf_trak.modelout_functions.tokens import TOKEN_COLUMNS

INPUT_NAMES = (
    "input_ids", "inputs_embeds", "encoder_outputs", "pixel_values", "pixel_values_videos", "input_values",
    "input_features", "inputs", "audio_values", "hidden_states", "flattened_patches", "past_values",
)  # fmt: skip
"""Arguments of `transformers` models that carry the sample itself, as opposed to masks, positions or labels."""

_NOT_SAMPLES = frozenset(
    {*LABEL_NAMES, "label_ids", *TOKEN_COLUMNS, "attention_mask", "token_type_ids", "position_ids"}
)
_LABELS = (*LABEL_NAMES, "label_ids")
_TOKENIZE = "`dataset.map(lambda rows: tokenizer(rows['text'], truncation=True), batched=True)` makes it from texts"
_PROCESS = (
    "`dataset.set_transform(lambda rows: {**image_processor(rows['image'], return_tensors='pt'), 'labels': "
    "rows['label']})` makes it from images"
)
_REMEDIES = {"input_ids": _TOKENIZE, "pixel_values": _PROCESS}


def input_names(model: torch.nn.Module) -> tuple[str, ...]:
    """List the arguments through which a `transformers` model can be given a sample, its main input first.

    Returns:
        The names; empty for any other model.
    """
    main = getattr(model, "main_input_name", None)
    if main is None:
        return ()
    arguments = inspect.signature(model.forward).parameters
    mains = [main] if isinstance(main, str) else list(main)
    return tuple(dict.fromkeys(name for name in (*mains, *INPUT_NAMES) if name in arguments))


def check_inputs(batch: Any, names: Sequence[str], model: str, columns: str) -> None:
    """Refuse a batch that contains only labels and masks.

    Args:
        batch: a batch from the collator. It passes if it is no mapping, or has an entry of another name with more
            than one dimension, from which a task may make inputs.
        names: see [`input_names`].
        model: name of the model's class, for the error message.
        columns: see [`stored_columns`], for the error message.

    Raises:
        ValueError: the batch has none of the names.
    """
    if not names or not isinstance(batch, Mapping) or any(batch.get(name) is not None for name in names):
        return
    if any(name not in _NOT_SAMPLES and getattr(value, "ndim", 2) > 1 for name, value in batch.items()):
        return
    either = f" (or {', '.join(f'`{name}`' for name in names[1:])})" if names[1:] else ""
    made = _REMEDIES.get(names[0], "the processor of the model makes it")
    raise ValueError(
        f"The data collator made a batch of {list(batch)}, in which {model} finds no input. {columns} Expected "
        f"`{names[0]}`{either} as numbers, since columns of text or images do not reach the model: {made}, or make it "
        "in a `data_collator` of your own, with `remove_unused_columns=False`."
    )


def stored_columns(dataset: Any) -> str:
    """Describe the columns of a dataset and their types in one sentence, for error messages."""
    if not isinstance(dataset, HFDataset):
        return f"The dataset is a {type(dataset).__name__}."
    kinds = (f"{name} ({getattr(kind, 'dtype', type(kind).__name__)})" for name, kind in dataset.features.items())
    return f"The dataset has the columns {', '.join(kinds)}."


def check_rows(rows: Sequence[Any], collator: Callable[[list[Any]], Any], columns: str = "") -> None:
    """Refuse rows that the default collators of `transformers` cannot make a batch of.

    Args:
        rows: the rows of one batch.
        collator: the collator. Rows for a collator other than the default ones are not checked.
        columns: see [`stored_columns`], for the error message.

    Raises:
        TypeError: the rows are texts, or arrays.
        ValueError: labels are texts or missing, values are images, lists differ in length, or no tokens are there. The
            error names the column and the remedy.
    """
    wrapped = hasattr(collator, "collator")  # a wrapper that adds the token columns itself
    inner: Any = collator
    while hasattr(inner, "collator"):
        inner = inner.collator
    padding = isinstance(inner, DataCollatorWithPadding)
    if not (padding or inner is default_data_collator) or not rows:
        return
    if isinstance(rows[0], str):
        raise TypeError(
            f"The rows are texts, such as {rows[0]!r:.80}. Expected rows with the inputs of the model. Make them with "
            "`Dataset.from_dict({'text': texts}).map(lambda rows: tokenizer(rows['text']), batched=True)`."
        )
    if hasattr(rows[0], "__array__"):
        raise TypeError(
            f"The rows are of the type {type(rows[0]).__name__}, without names. Expected the inputs of the model by "
            "name. Make rows with `Dataset.from_dict({'input_ids': …, 'labels': …})`, or pass a `data_collator=`."
        )
    if not isinstance(rows[0], Mapping):
        return
    # The default collator ignores texts in `labels`, which not every task needs, but fails on texts in `label`.
    for name in _LABELS if padding else ("label",):
        if isinstance(rows[0].get(name), str):
            raise ValueError(
                f"`{name}` of the first row is {rows[0][name]!r}, a text. Expected the class numbers that the "
                "model was trained with, since data collators drop text. Map names to them: `dataset.map(lambda row: "
                f"{{'labels': model.config.label2id[row[{name!r}]]}})`, or `class_encode_column` if the training used "
                "it."
            )
    for name in _LABELS:
        absent = [place for place, row in enumerate(rows) if name in row and row[name] is None]
        if 0 < len(absent) < len(rows):
            raise ValueError(
                f"`{name}` of row {absent[0]} of a batch is None. Expected a label for each row. Leave rows without "
                "labels out."
            )
    if isinstance(inner, DataCollatorWithPadding):
        first = inner.tokenizer.model_input_names[0]
        if first not in rows[0]:
            raise ValueError(
                f"The rows have {sorted(rows[0])}, and no `{first}` for {type(inner.tokenizer).__name__} to pad. "
                f"{columns} Expected rows that it has processed: "
                f"{_REMEDIES.get(first, 'call it on them in `dataset.map`')}."
            )
        return
    for name, value in rows[0].items():
        if wrapped and name in TOKEN_COLUMNS:
            continue
        if type(value).__module__.startswith("PIL."):
            raise ValueError(
                f"`{name}` of the first row is a {type(value).__name__}. Expected a tensor or numbers: {_PROCESS}."
            )
        if isinstance(value, list | tuple | Tensor | np.ndarray):
            _check_sizes(name, [row.get(name) for row in rows])


def _check_sizes(name: str, values: Sequence[Any]) -> None:
    sizes = [_size(value) for value in values]
    for row, size in enumerate(sizes):
        if size != sizes[0]:
            raise ValueError(
                f"`{name}` has the size {sizes[0]} in the first row of a batch and {size} in row {row} of it, and "
                "nothing pads them. Expected rows of one size, which images need to have from the start. For texts or "
                "audio, pass the tokenizer or feature extractor as `processing_class=`, or a `data_collator=` that "
                "pads (`DataCollatorWithPadding(tokenizer)`, or `DataCollatorForTokenClassification(tokenizer)` if "
                "each token has a label)."
            )


def _size(value: Any) -> Any:
    if hasattr(value, "shape"):
        return tuple(value.shape) if len(value.shape) != 1 else value.shape[0]
    return len(value) if isinstance(value, list | tuple) else value
