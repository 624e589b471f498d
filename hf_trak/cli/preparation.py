"""Turn rows as they are stored into rows that a model accepts.

Tokens and labels become columns, so that the fingerprint of a dataset covers how it was tokenized. Images become
pixels when rows are read. Text columns stay, for the report.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import ClassLabel, Dataset, DatasetDict, Image
from huggingface_hub import constants
from jinja2 import TemplateError
from transformers import DataCollatorForTokenClassification

from hf_trak.cli.parser import DataArguments
from hf_trak.data.image_text import ImageTextCollator
from hf_trak.data.language import mask_tokens, tokenize_chat, tokenize_prompt_completion
from hf_trak.errors import HubAccessError
from hf_trak.hub import safe_loading
from hf_trak.hub.access import without_secrets
from hf_trak.hub.names import shown
from hf_trak.hub.safe_loading import load_dataset, load_saved_dataset
from hf_trak.modelout_functions.question_answering import ENDS

AUTO_CLASSES = {
    "image_classification": "AutoModelForImageClassification",
    "iterative_image_classification": "AutoModelForImageClassification",
    "text_classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "multi_label_classification": "AutoModelForSequenceClassification",
    "audio_classification": "AutoModelForAudioClassification",
    "clip": "AutoModel",
    "siglip": "AutoModel",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
}

"""The auto class of each task. A task without one takes the class that the model's config names."""


def check_exists(path: Path, name: str, what: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse the name of a file or directory that does not exist, rather than ask the Hub for it.

    Args:
        path: the path that the name stands for.
        name: the name as given. Names of repos have none of the suffixes, and do not start with a dot, a slash or `~`.
        what: what is expected, for the error message.
        suffixes: suffixes of files.

    Raises:
        FileNotFoundError: nothing exists at the path.
    """
    local = name.startswith((".", "/", "~")) or path.suffix in suffixes
    if local and not path.exists():
        raise FileNotFoundError(
            f"There is no such file or directory: {name!r} (looked in {str(Path.cwd())!r}). Expected a {what} on this "
            "machine, or the name of one on the Hub, 'user/name'. Correct the path."
        )


def evenly_spaced(dataset: Dataset, limit: int | None) -> Dataset:
    """Select rows ⌊i · rows / limit⌋, so that a dataset sorted by class keeps all of its classes."""
    if limit is None or limit >= len(dataset):
        return dataset
    return dataset.select([i * len(dataset) // limit for i in range(limit)])


def load_model(name: str, revision: str, task: str | None) -> torch.nn.Module:
    """Load a model in the class of the task, or in the class that its config names. No code of a repo is run.

    Raises:
        FileNotFoundError: the name is a path that does not exist.
        HubAccessError: the model cannot be loaded from the Hub, or is not in the cache while offline.
        ValueError: the config names no class of transformers, and no task is given; or the repo refers to code or to
            files elsewhere, or is damaged.
    """
    return _load(name, revision, task, "model", may_be_adapter=True)


def _load(name: str, revision: str, task: str | None, what: str, may_be_adapter: bool) -> torch.nn.Module:
    check_exists(Path(name), name, what)
    if Path(name).is_dir():
        return _load_model(name, revision, task, may_be_adapter)
    try:
        return _load_model(name, revision, task, may_be_adapter)
    except OSError as error:
        if isinstance(error, HubAccessError):  # from loading the base model of an adapter, which it names
            raise
        offline = " HF_HUB_OFFLINE is set, so that only the cache is searched." if constants.HF_HUB_OFFLINE else ""
        reason = without_secrets(" ".join(str(error).split()))[:300]
        raise HubAccessError(
            f"The {what} {name!r} at revision {revision!r} could not be loaded: there is no such directory, and the "
            f"Hub or its cache gave: {reason}{offline} Expected a directory that `save_pretrained` wrote, or a model "
            "repo. Correct the name."
        ) from error


def _load_model(name: str, revision: str, task: str | None, may_be_adapter: bool) -> torch.nn.Module:
    if may_be_adapter:

        def load_base(base: str, base_revision: str | None) -> torch.nn.Module:
            return _load(base, base_revision or "main", task, "base model", may_be_adapter=False)

        adapter = safe_loading.load_adapter(name, revision, load_base)
        if adapter is not None:
            return adapter
    auto = AUTO_CLASSES.get(task or "")
    if auto is not None:
        return safe_loading.load_model(name, revision, getattr(transformers, auto))
    named = safe_loading.architectures(name, revision)
    found = map(safe_loading.model_class, named if isinstance(named, list) else [])
    kind = next((kind for kind in found if kind is not None), None)
    if kind is None:
        raise ValueError(
            f"The config of {name!r} names the classes {shown(named)}, of which transformers has none. Set `task` to "
            f"one of {sorted(AUTO_CLASSES)}."
        )
    return safe_loading.load_model(name, revision, kind)


def load_tokenizer(name: str, revision: str) -> Any:
    """Load the tokenizer of a model. Raises as [`safe_loading.load_model`]."""
    return safe_loading.load_tokenizer(name, revision)


def load_image_processor(name: str, revision: str) -> Any:
    """Load the image processor of a model. Raises as [`safe_loading.load_model`]."""
    return safe_loading.load_image_processor(name, revision)


def load_processor(name: str, revision: str) -> Any:
    """Load the processor of images and texts of a model. Raises as [`safe_loading.load_model`]."""
    return safe_loading.load_processor(name, revision)


READY = ("input_ids", "pixel_values", "input_features", "input_values")

"""Columns of rows that need no preparation."""


_IMAGE_TASKS = ("image_classification", "iterative_image_classification")

_TEXT_TASKS = ("text_classification", "regression", "multi_label_classification")

_PAIR_TASKS = ("clip", "siglip")

_LABELS = ("labels", "label")

_LABELLED = (
    *_IMAGE_TASKS, *_TEXT_TASKS, "audio_classification", "masked_lm", "seq2seq_lm", "token_classification",
    "question_answering",
)  # fmt: skip

"""Tasks that cannot do without a column of labels."""


@dataclass
class Preparation:
    """The preparation of rows for one model and task."""

    prepare: Callable[[Dataset], Dataset]
    collator: Any = None
    processing_class: Any = None


def preparation(model: Any, task: str, rows: Dataset, args: DataArguments, name: str, revision: str) -> Preparation:
    """Choose the preparation of training rows and targets for a task.

    Args:
        model: the model, whose config names the labels.
        task: name of the task.
        rows: the training rows, whose columns determine the preparation.
        args: names of columns.
        name, revision: name and revision of the model, for its tokenizer or processor.

    Raises:
        ValueError: a required column is missing, or the user must prepare rows for this task.
    """
    if any(column in rows.column_names for column in READY):
        return _ready(task, rows, name, revision)
    if task in _IMAGE_TASKS:
        column = args.image_column or _image_column(rows)
        label = _label_column(rows, args)
        processor = load_image_processor(name, revision)

        def pixels(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
            images = [_as_rgb(image, column) for image in batch[column]]
            return {"pixel_values": processor(images, return_tensors="pt")["pixel_values"], "labels": batch["labels"]}

        def prepare(data: Dataset) -> Dataset:
            return _with_labels(_with_columns(data, [column, label]), label, model).with_transform(pixels)

        return Preparation(prepare, None, processor)
    if task in _PAIR_TASKS:
        image, text = args.image_column or _image_column(rows), _text_columns(rows, args)[0]
        processor = load_processor(name, revision)
        pairs = ImageTextCollator(image, text, processor=processor)
        return Preparation(lambda data: _with_columns(data, [image, text]), pairs, processor)
    if task in _TEXT_TASKS or task in ("causal_lm", "masked_lm"):
        tokenizer = load_tokenizer(name, revision)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if task in _TEXT_TASKS:
            return _classified(model, tokenizer, rows, args)
        return _language(task, tokenizer, rows, args)
    raise ValueError(
        f"Rows for the task {task!r} have to be prepared beforehand: they have the columns {rows.column_names}. "
        f"Expected one of {list(READY)} and labels, as the model accepts them. Save such a dataset with "
        "`save_to_disk`."
    )


def _as_rgb(image: Any, column: str) -> Any:
    if not hasattr(image, "convert"):
        raise ValueError(f"A row has {image!r:.80} in the column {column!r}. Expected an image. Leave such rows out.")
    return image.convert("RGB")


def _ready(task: str, rows: Dataset, name: str, revision: str) -> Preparation:
    """Prepare rows that the model accepts as they are: the tokenizer, if there is one, pads them."""

    def prepare(data: Dataset) -> Dataset:
        _check_label_columns(task, data)
        return data

    if "input_ids" not in rows.column_names:
        return Preparation(prepare)
    try:
        tokenizer = load_tokenizer(name, revision)
    except (OSError, ValueError):  # a model without a tokenizer: rows of one length need none
        return Preparation(prepare)
    return Preparation(prepare, _collator(tokenizer, rows), tokenizer)


def _check_label_columns(task: str, rows: Dataset) -> None:
    """Refuse rows without the labels that a task reads. Causal language models need none beside their tokens."""
    answers = task == "question_answering"
    expected = ENDS if answers else _LABELS
    found = [name for name in expected if name in rows.column_names]
    if task in _LABELLED and len(found) < (len(ENDS) if answers else 1):
        raise ValueError(
            f"The rows have the columns {rows.column_names}, and no labels for the task {task!r}. Expected "
            f"{'both' if answers else 'one'} of {list(expected)}. Add the labels that the model was trained with."
        )


def _with_columns(data: Dataset, names: Sequence[str]) -> Dataset:
    """Return rows, training rows or targets, after making sure that they have the columns that were chosen."""
    if missing := [name for name in names if name not in data.column_names]:
        raise ValueError(
            f"The rows have the columns {data.column_names}, and not {missing}, which the training rows have. "
            "Expected the same columns in training rows and targets. Rename the columns of one of them."
        )
    return data


def _collator(tokenizer: Any, rows: Dataset) -> Any:
    """Return a collator that also pads labels, if these are lists."""
    listed = "labels" in rows.column_names and isinstance(rows[0]["labels"], list)
    return DataCollatorForTokenClassification(tokenizer) if listed else None


def _classified(model: Any, tokenizer: Any, rows: Dataset, args: DataArguments) -> Preparation:
    texts, label = _text_columns(rows, args)[:2], _label_column(rows, args)

    def tokens(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        columns = [list(batch[column]) for column in texts]
        return dict(tokenizer(*columns, truncation=True, max_length=args.max_length))

    def prepare(data: Dataset) -> Dataset:
        return _with_labels(_with_columns(data, [*texts, label]), label, model).map(
            tokens, batched=True, desc="Tokenizing"
        )

    return Preparation(prepare, None, tokenizer)


def _language(task: str, tokenizer: Any, rows: Dataset, args: DataArguments) -> Preparation:
    chat = task == "causal_lm" and "messages" in rows.column_names
    completion = task == "causal_lm" and {"prompt", "completion"} <= set(rows.column_names)
    text = "" if chat or completion else _text_columns(rows, args)[0]

    def tokens(row: Mapping[str, Any]) -> dict[str, Any]:
        if chat:
            found = _chat_tokens(row["messages"], tokenizer, args.max_length)
        elif completion:
            found = tokenize_prompt_completion(row["prompt"], row["completion"], tokenizer, args.max_length)
        else:
            offsets = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
            found = dict(tokenizer(row[text], truncation=True, max_length=args.max_length, **offsets))
            if task == "masked_lm":
                found |= mask_tokens(found["input_ids"], tokenizer)
            else:
                found["labels"] = list(found["input_ids"])
        return found

    collator = DataCollatorForTokenClassification(tokenizer)
    needed = ["messages"] if chat else ["prompt", "completion"] if completion else [text]
    return Preparation(lambda data: _with_columns(data, needed).map(tokens, desc="Tokenizing"), collator, tokenizer)


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


def _text_columns(rows: Dataset, args: DataArguments) -> list[str]:
    if args.text_columns:
        return _existing(rows, args.text_columns, "text_columns")
    skipped = {"id", "idx", "label", "labels", args.label_column}
    found = [
        name
        for name, feature in rows.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string") and name not in skipped
    ]
    if not found or len(found) > 2:
        raise ValueError(f"The columns of text are {found} among {rows.column_names}. Choose with `text_columns`.")
    return found


def _image_column(rows: Dataset) -> str:
    found = [name for name, feature in rows.features.items() if isinstance(feature, Image)]
    if len(found) != 1:
        raise ValueError(f"The columns of images are {found} among {rows.column_names}. Choose with `image_column`.")
    return found[0]


def _label_column(rows: Dataset, args: DataArguments) -> str:
    if args.label_column:
        return _existing(rows, [args.label_column], "label_column")[0]
    found = next((name for name in _LABELS if name in rows.column_names), None)
    if found is None:
        raise ValueError(f"There is no column of {list(_LABELS)} among {rows.column_names}. Set `label_column`.")
    return found


def _existing(rows: Dataset, names: Sequence[str], argument: str) -> list[str]:
    if missing := [name for name in names if name not in rows.column_names]:
        raise ValueError(f"`{argument}` names {missing}. Expected some of {rows.column_names}.")
    return list(names)


def _with_labels(rows: Dataset, column: str, model: Any) -> Dataset:
    """Put the labels into the column `labels`, as the numbers that the model's config assigns to their names."""
    if column != "labels":
        if "labels" in rows.column_names:
            raise ValueError(f"`label_column` is {column!r}, but there is a column `labels` too. Remove one of them.")
        rows = rows.rename_column(column, "labels")
    feature = rows.features["labels"]
    if isinstance(feature, ClassLabel) or getattr(feature, "dtype", None) not in ("string", "large_string"):
        return rows
    ids = {str(name): int(index) for name, index in (getattr(model.config, "label2id", None) or {}).items()}
    if unknown := sorted(set(rows["labels"][:]) - set(ids)):
        raise ValueError(f"The labels {unknown[:5]} are not among those of the model, {list(ids)[:20]}.")
    names = [name for name, _ in sorted(ids.items(), key=lambda item: item[1])]
    return rows.cast_column("labels", ClassLabel(names=names))


_BUILDERS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow",
}  # fmt: skip


def load_rows(
    name: str, config_name: str | None, split: str | None, preferred: tuple[str, ...], limit: int | None
) -> Dataset:
    """Load one split.

    Args:
        name: a dataset on the Hub, a directory of `save_to_disk`, a data file, or a directory of data files.
        config_name: configuration of a dataset on the Hub.
        split: name of the split. By default the only one, or the first of `preferred` that exists.
        preferred: names of splits.
        limit: number of rows to take, evenly spaced. By default all.

    Raises:
        FileNotFoundError: the name is a path that does not exist.
        ValueError: the split does not exist, or is not given and cannot be chosen; a file is damaged or of an unknown
            kind; or there are no rows.
    """
    path = Path(name)
    if path.is_dir() and any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
        splits = load_saved_dataset(name)
    elif path.is_file():
        if path.suffix not in _BUILDERS:
            raise ValueError(f"The data file {name!r} ends in {path.suffix!r}. Expected one of {list(_BUILDERS)}.")
        splits = load_dataset(_BUILDERS[path.suffix], data_files=name)
    else:
        check_exists(path, name, "dataset", tuple(_BUILDERS))
        splits = load_dataset(name, config_name)
    if isinstance(splits, Dataset):
        if split is not None:
            raise ValueError(f"`split` is {split!r}, but {name!r} has no splits. Leave the split out.")
        rows = splits
    else:
        rows = splits[_split(name, splits, split, preferred)]
    if len(rows) == 0:
        raise ValueError(f"{name!r} has no rows. Expected at least one. Name another dataset or split.")
    return evenly_spaced(rows, limit)


def _split(name: str, splits: DatasetDict, split: str | None, preferred: tuple[str, ...]) -> str:
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else next((s for s in preferred if s in splits), None)
    if split is None or split not in splits:
        raise ValueError(
            f"{name!r} has the splits {list(splits)}"
            + (f", not {split!r}. Choose one of them." if split else f", none of {list(preferred)}. Choose one.")
        )
    return split
