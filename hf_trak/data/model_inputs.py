"""From columns of a dataset to inputs of a model: what is missing, said in terms of the dataset before either fails.

A column that the collator drops (text), or that never was there (tokens, pixels), otherwise shows as an error from
deep inside the model.
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
"""Arguments of models of `transformers` that carry a sample itself, not something beside it."""

_BESIDE = frozenset({*LABEL_NAMES, "label_ids", *TOKEN_COLUMNS, "attention_mask", "token_type_ids", "position_ids"})
_LABELS = (*LABEL_NAMES, "label_ids")
_TOKENIZE = "`dataset.map(lambda rows: tokenizer(rows['text'], truncation=True), batched=True)` makes it of texts"
_PROCESS = (
    "`dataset.set_transform(lambda rows: {**image_processor(rows['image'], return_tensors='pt'), 'labels': "
    "rows['label']})` makes it of images"
)
LABEL_REMEDY = (
    "Expected class numbers, those that the model was trained with; data collators drop text. Map names to them: "
    "`dataset.map(lambda row: {'labels': model.config.label2id[row['labels']]})`, or `class_encode_column` where the "
    "training did so."
)
"""For labels that are texts."""
_REMEDIES = {"input_ids": _TOKENIZE, "pixel_values": _PROCESS}


def input_names(model: torch.nn.Module) -> tuple[str, ...]:
    """Arguments by which a model of `transformers` can be given a sample, its main input first; none for any other."""
    main = getattr(model, "main_input_name", None)
    if main is None:
        return ()
    arguments = inspect.signature(model.forward).parameters
    mains = [main] if isinstance(main, str) else list(main)
    return tuple(dict.fromkeys(name for name in (*mains, *INPUT_NAMES) if name in arguments))


def check_inputs(batch: Any, names: Sequence[str], model: str, columns: str) -> None:
    """Refuse a batch that holds labels and masks alone.

    Args:
        batch: what the collator made. One that is no mapping, or holds something of another name that a task may make
            inputs of, is left alone.
        names: see [`input_names`].
        model: the class of the model.
        columns: see [`stored_columns`].

    Raises:
        ValueError: none of the names is there.
    """
    if not names or not isinstance(batch, Mapping) or any(batch.get(name) is not None for name in names):
        return
    if any(name not in _BESIDE and getattr(value, "ndim", 2) > 1 for name, value in batch.items()):
        return
    either = f" (or {', '.join(f'`{name}`' for name in names[1:])})" if names[1:] else ""
    made = _REMEDIES.get(names[0], "the processor of the model makes it")
    raise ValueError(
        f"The data collator made a batch of {list(batch)}, in which {model} finds no input. {columns} Expected "
        f"`{names[0]}`{either} as numbers; columns of text or images do not reach the model by themselves. {made}; or "
        "make it in a `data_collator` of your own, with `remove_unused_columns=False`."
    )


def stored_columns(dataset: Any) -> str:
    """One sentence that says which columns a dataset has, and of what type."""
    if not isinstance(dataset, HFDataset):
        return f"The dataset is a {type(dataset).__name__}."
    kinds = (f"{name} ({getattr(kind, 'dtype', type(kind).__name__)})" for name, kind in dataset.features.items())
    return f"The dataset has the columns {', '.join(kinds)}."


def check_rows(rows: Sequence[Any], collator: Callable[[list[Any]], Any], columns: str = "") -> None:
    """Refuse rows that the collators of `transformers` which are chosen by default cannot make a batch of.

    Args:
        rows: of one batch.
        collator: any; others than those are trusted to know their rows.
        columns: see [`stored_columns`].

    Raises:
        ValueError: labels are texts, values are images, lists differ in length, or there are no tokens to pad; names
            the column and the remedy.
    """
    wrapped = hasattr(collator, "collator")  # carries columns of tokens itself
    inner = getattr(collator, "collator", collator)
    padding = isinstance(inner, DataCollatorWithPadding)
    if not (padding or inner is default_data_collator) or not rows or not isinstance(rows[0], Mapping):
        return
    # The default collator passes over `labels` of text, which not every task needs, and fails on those of `label`.
    for name in _LABELS if padding else ("label",):
        if isinstance(rows[0].get(name), str):
            raise ValueError(f"`{name}` of the first row is {rows[0][name]!r}, a text. {LABEL_REMEDY}")
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
                "nothing pads them. Expected rows of one size. Of texts or audio, pass the tokenizer or feature "
                "extractor as `processing_class=`, or a `data_collator=` that pads "
                "(`DataCollatorWithPadding(tokenizer)`; `DataCollatorForTokenClassification(tokenizer)` where each "
                "token has a label). Images need one size from the start."
            )


def _size(value: Any) -> Any:
    if hasattr(value, "shape"):
        return tuple(value.shape) if len(value.shape) != 1 else value.shape[0]
    return len(value) if isinstance(value, list | tuple) else value
