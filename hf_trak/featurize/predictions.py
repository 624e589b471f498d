"""Rows with the model's own predictions in place of labels: what made the model say this, right or wrong?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from inspect import signature
from typing import Any

import torch
from datasets import ClassLabel, Dataset, concatenate_datasets
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hf_trak.data.batch_limits import BatchLimits
from hf_trak.data.columns import PREDICTED, is_text
from hf_trak.data.language import TOKENS, tokenize_prompt
from hf_trak.data.rows import attribute_of, batch_rows, row_count
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.modelout_functions.base import STACKED, call_model
from hf_trak.modelout_functions.batches import LABEL_NAMES, class_labels, evaluating, find_logits
from hf_trak.modelout_functions.classification import ClassificationModelOutput
from hf_trak.modelout_functions.seq2seq_lm import Seq2SeqLMModelOutput
from hf_trak.modelout_functions.token_tasks import CausalLMModelOutput
from hf_trak.modelout_functions.tokens import IGNORED, ROLE_MASKS, TARGET_MASK
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.progress import with_column

_NOT_GENERATED_FROM = ("labels", "completion_mask", "use_cache", STACKED, TARGET_MASK)


_MOST_TOKENS = 20
"""Tokens of an answer at most, by default that of `generate`."""


def predicted_rows(model: FeaturizedModel, dataset: Any, generation: Mapping[str, Any]) -> Dataset:
    """Put predictions of the model, with the weights that it has now, in place of the labels of rows.

    Args:
        model: the model, its task and its collator.
        dataset: rows, whose labels are not looked at, but for where an answer begins.
        generation: arguments of `generate`, for language models.

    Returns:
        The rows with predicted labels, and [`PREDICTED`].

    Raises:
        TypeError: the dataset is no `datasets.Dataset`, or its transform or the collator makes other labels than the
            stored ones, or the task has no prediction that could be a label.
        ValueError: there are arguments of `generate` for a classifier, or unknown ones, or an answer is empty.
    """
    row_count(dataset, "dataset")
    if not isinstance(dataset, Dataset):
        raise _unlabelled(f"a {type(dataset).__name__}")
    task = _task_of_targets(model)
    transformed = dataset.format["type"] == "custom"
    if transformed and not (isinstance(task, ClassificationModelOutput) and _label_column(dataset)):
        raise _unlabelled("one with a transform")
    if isinstance(task, ClassificationModelOutput):
        if generation:
            raise ValueError(
                f"The options {sorted(generation)} are given for a classifier, which generates nothing. Expected "
                "none. Leave them out."
            )
        found = _classified(model, dataset)
        # One row with either label: a transform or collator may read another column, which agrees with one of them.
        probe, column = found.select([0, 0]), _label_column(found)
        probe = with_column(probe.remove_columns(column), column, [0, 1], feature=found.features[column])
        if transformed:
            given = dataset.format
            read = None if set(given["columns"]) == set(dataset.column_names) else given["columns"]
            form = {**given["format_kwargs"], "columns": read, "output_all_columns": given["output_all_columns"]}
            probe = probe.with_transform(**form)
            own = form["transform"]
            own = own.transform if isinstance(own, _KeepingPredicted) else own  # of rows that were predicted before
            form |= {"transform": _KeepingPredicted(own), "columns": read and list(dict.fromkeys([*read, PREDICTED]))}
            found = found.with_transform(**form)
        _check_labels(model, probe)
        return found
    if isinstance(task, CausalLMModelOutput | Seq2SeqLMModelOutput) and hasattr(model.model, "generate"):
        return _generated(model, dataset, generation)
    raise TypeError(
        f"The task is {type(task).__name__}. Expected one of images, texts or language models, whose predictions are "
        "labels. Put predictions into the rows yourself."
    )


class _KeepingPredicted:
    """A transform of a user's, beside which the predictions stay."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, rows: Any) -> Any:
        made = self.transform({name: values for name, values in rows.items() if name != PREDICTED})
        return {**made, PREDICTED: rows[PREDICTED]} if PREDICTED in rows else made


def _check_labels(model: FeaturizedModel, probe: Dataset) -> None:
    """Refuse rows with the labels 0 and 1 whose batches have others."""
    batches, made = model.featurizer().batches(probe, "target"), list[Any]()
    for row in range(len(probe)):
        try:
            made.append(int(class_labels(batches.alone(row))))
        except Exception as error:  # whatever a user's transform or collator may raise of a number
            made.append(f"{type(error).__name__}: {error}")
    if made != [0, 1]:
        raise TypeError(
            f"Of rows with the labels 0 and 1 the transform and the collator make {made}. Expected the same numbers, "
            "in a column 'labels' or 'label', since the model's predictions take their place. Store such a column, or "
            "put the predictions into the rows yourself."
        )


def _unlabelled(given: str) -> TypeError:
    return TypeError(
        f"`dataset` is {given}. Expected a `datasets.Dataset`, whose labels are replaced: stored as 'labels' or "
        "'label' where it has a transform. Apply the transform with `map`, or put the model's predictions into the "
        "rows yourself."
    )


def _label_column(dataset: Dataset) -> str:
    """Name the column of labels; empty without any."""
    return next((name for name in LABEL_NAMES if name in dataset.column_names), "")


def _task_of_targets(model: FeaturizedModel) -> Any:
    """Return the task that says what a target is, which tasks of losses have inside."""
    model.task.bind(model.model)  # the task `loss` takes that of the model
    inside = getattr(model.task, "of_task", None)
    return model.task if inside is None else inside


def with_predicted_classes(model: FeaturizedModel, scored: Dataset, rows: Any) -> Dataset:
    """Put the class that a classifier gives to each target beside its label, for reports.

    Args:
        model: the model, with the weights that were asked.
        scored: targets with their scores.
        rows: the targets as the model takes them.

    Returns:
        The targets with a column such as `label_predicted`; as they are if they have no labels, or predictions, or
        if the model is no classifier.
    """
    label = _label_column(scored)
    there = {*scored.column_names} & {PREDICTED, f"{label}_predicted"}
    classifies = isinstance(_task_of_targets(model), ClassificationModelOutput)
    if not label or there or not classifies or not isinstance(rows, Dataset):
        return scored
    return with_column(scored, f"{label}_predicted", _classes(model, rows))


def _classes(model: FeaturizedModel, dataset: Dataset) -> list[int]:
    """Find the class with the highest logit for every row."""
    featurizer = model.featurizer()
    batches = featurizer.batches(_with_some_label(dataset), "target")
    size, found = model.args.batch_size, dict[int, int]()
    for rows, batch in batches.iterate(batch_rows(0, len(dataset), size)):
        args, kwargs = _task_of_targets(model).model_inputs(featurizer.in_dtype_of_model(batch))
        with evaluating(model.model), pass_settings(model.model):
            classes = find_logits(call_model(model.model, None, None, args, kwargs)).argmax(-1).tolist()
        found |= dict(zip(rows, classes, strict=True))
    return [found[row] for row in range(len(dataset))]  # batches may come in another order, by sizes of images


def _classified(model: FeaturizedModel, dataset: Dataset) -> Dataset:
    """Put the class with the highest logit in place of the label of every row."""
    labels = _classes(model, dataset)
    dataset = dataset.with_format(None)
    own = _label_column(dataset) or LABEL_NAMES[0]
    names = getattr(getattr(model.model, "config", None), "id2label", None) or {}
    kept = dataset.remove_columns([name for name in (own, PREDICTED) if name in dataset.column_names])
    said = [str(names.get(label, label)) for label in labels]
    made = Dataset.from_dict({own: labels, PREDICTED: said})
    for rows in (model.train_dataset, dataset):  # the names of the model's classes, for reports
        feature = rows.features.get(own) if isinstance(rows, Dataset) else None
        if isinstance(feature, ClassLabel) and max(labels, default=0) < feature.num_classes:
            made = made.cast_column(own, feature)
            break
    return _beside(kept, made)


def _with_some_label(dataset: Dataset) -> Dataset:
    """Give rows without labels one, which a batch needs and a forward pass does not read."""
    if _label_column(dataset):
        return dataset
    return with_column(dataset, LABEL_NAMES[0], [0] * len(dataset))


def _generated(model: FeaturizedModel, dataset: Dataset, generation: Mapping[str, Any]) -> Dataset:
    """Generate what the model writes after each prompt. Prompts go one at a time, so that none is padded."""
    causal = isinstance(_task_of_targets(model), CausalLMModelOutput)
    _check_options(generation, model.model)
    if "images" in dataset.column_names and "prompt" in dataset.column_names and causal:
        return _answers_to_images(model, dataset, generation)
    made, positions = list[dict[str, Any]](), BatchLimits.of(model.model).positions
    own: Any = getattr(model.model, "generation_config", None)
    told = bool({"max_new_tokens", "max_length", "generation_config"} & {*generation})
    unset = own is not None and own.max_new_tokens is None and own.max_length in (None, _MOST_TOKENS)
    for row, prompt in enumerate(_prompts(model, dataset, causal)):
        if causal:
            _check_length(row, prompt.shape[1], generation.get("max_new_tokens", 1), positions)
        with evaluating(model.model), pass_settings(model.model):
            given: dict[str, Any] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            if causal and unset and not told:  # what `generate` takes by itself, with a warning
                left = _MOST_TOKENS if positions is None else positions - prompt.shape[1]
                given["max_new_tokens"] = min(_MOST_TOKENS, left)
            written = model.model.generate(**{"do_sample": False, **given, **generation})[0].tolist()  # type: ignore[operator]
        start = prompt.shape[1] if causal else 1  # a decoder begins with a token of its own
        answer = written[start:]
        made.append(_causal_row(prompt[0].tolist(), answer) if causal else _seq2seq_row(prompt[0].tolist(), answer))
        made[-1][PREDICTED] = _said(model, answer, row)
    replaced = [name for name in made[0] if name in dataset.column_names]
    tokens = [name for name in dataset.column_names if _is_per_token(dataset, name)]
    kept = dataset.remove_columns(list(dict.fromkeys([*replaced, *tokens])))
    return _beside(kept, Dataset.from_list(made))


def _check_options(generation: Mapping[str, Any], model: Any) -> None:
    """Refuse options that neither `generate` nor the model has."""
    known = {
        *GenerationConfig().to_dict(),
        *signature(model.generate).parameters,
        *signature(model.forward).parameters,
    }
    if unknown := [name for name in generation if name not in known]:
        near = get_close_matches(unknown[0], known, n=1)
        hint = f" (did you mean `{near[0]}`?)" if near else ""
        raise ValueError(
            f"`generate` has no option `{unknown[0]}`{hint}. Expected fields of `transformers.GenerationConfig`, such "
            "as `max_new_tokens`. Correct the name."
        )
    if generation.get("max_new_tokens") is not None:
        checked_int(generation["max_new_tokens"], "max_new_tokens", 1, type_error=ValueError)


def _prompts(model: FeaturizedModel, dataset: Dataset, causal: bool) -> Iterator[Tensor]:
    """Yield the tokens that come before each answer, `(1, T)`."""
    columns, rows = dataset.column_names, dataset.with_format(None)
    tokenize: Callable[[Mapping[str, Any]], list[int]] | None = None
    settings = attribute_of(model.data_collator, "prompt_settings") or {}
    if causal and isinstance(model.processing_class, PreTrainedTokenizerBase) and "images" not in columns:
        chat = _of_chats(model.train_dataset)
        tokenize = partial(tokenize_prompt, tokenizer=model.processing_class, chat=chat, **settings)
    asked = tokenize is not None and any(name in columns for name in ("messages", "prompt"))
    if tokenize is not None and TOKENS not in columns and (asked or settings.get("text_column", "text") in columns):
        yield from (torch.tensor([tokenize(row)], device=model.device) for row in rows)
        return
    batches = model.featurizer().batches(dataset, "target")
    padding = getattr(attribute_of(model.data_collator, "tokenizer") or model.processing_class, "pad_token_id", None)
    masks = rows.select_columns([name for name in ("labels", *ROLE_MASKS) if name in columns])
    for (row,), batch in batches.iterate([[row] for row in range(len(dataset))]):
        if "pixel_values" in batch:
            raise TypeError(
                f"The rows have images, and the columns {columns}. Expected the columns `images` and `prompt`, which "
                "tell where an answer begins. Divide messages into a prompt and a completion, as TRL's `SFTTrainer` "
                "takes them."
            )
        prompt = _prompt(batch, causal, padding, _masked(masks[row]) if masks.column_names else 0)
        if tokenize is not None and asked and prompt.shape[1] == _tokens(batch):  # no label tells where it ends
            prompt = _beginning(prompt, tokenize(rows[row]), row)
        yield prompt


def _of_chats(train_dataset: Any) -> bool:
    """Tell whether training rows are conversations, so that a text is what a user says."""
    kinds = train_dataset.features if isinstance(train_dataset, Dataset) else {}
    return "messages" in kinds or "conversations" in kinds or ("prompt" in kinds and not is_text(kinds["prompt"]))


def _tokens(batch: Mapping[str, Any]) -> int:
    """Count the tokens of a batch of one row."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].shape[1] if mask is None else int(mask.sum())


def _beginning(tokens: Tensor, prompt: list[int], row: int) -> Tensor:
    """Return the prompt of a row, which its tokens begin with."""
    both = min(tokens.shape[1], len(prompt))
    if tokens[0, :both].tolist() != prompt[:both]:
        raise ValueError(
            f"The tokens of row {row} are not those of its prompt, and no label is masked. Expected to find where the "
            "answer begins. Mask the labels of the prompt with -100, or leave `input_ids` out."
        )
    return tokens.new_tensor([prompt])


def _answers_to_images(model: FeaturizedModel, dataset: Dataset, generation: Mapping[str, Any]) -> Dataset:
    """Write an answer to each prompt with images, as the text of a completion, which the collator tokenizes."""
    featurizer, answers = model.featurizer(), list[str]()
    kept = dataset.remove_columns([name for name in ("completion", PREDICTED) if name in dataset.column_names])
    asked = with_column(
        kept, "completion", [_completion(row["prompt"], ".") for row in kept.select_columns(["prompt"])]
    )
    positions = BatchLimits.of(model.model).positions
    for (row,), batch in featurizer.batches(asked, "target").iterate([[row] for row in range(len(asked))]):
        prompt = _prompt(batch, causal=True)
        _check_length(row, prompt.shape[1], generation.get("max_new_tokens"), positions)
        given = _prompt_inputs(batch, prompt)
        with evaluating(model.model), pass_settings(model.model):
            written = model.model.generate(**{"do_sample": False, **given, **generation})[0].tolist()  # type: ignore[operator]
        answers.append(_said(model, written[prompt.shape[1] :], row))
    said = [
        _completion(row["prompt"], text) for row, text in zip(kept.select_columns(["prompt"]), answers, strict=True)
    ]
    return _beside(kept, Dataset.from_dict({"completion": said, PREDICTED: answers}))


def _prompt_inputs(batch: Mapping[str, Any], prompt: Tensor) -> dict[str, Any]:
    """Return what `generate` gets of a row: its images as the model takes them, and the entries of the prompt's
    tokens."""
    start = int((batch["input_ids"] == prompt[0, 0])[0].int().argmax())
    tokens, shape, images = slice(start, start + prompt.shape[1]), batch["input_ids"].shape, batch.get(STACKED, ())
    given = {name: batch[name].flatten(0, 1) for name in images}
    for name, value in batch.items():
        if name in given or name in _NOT_GENERATED_FROM:
            continue
        of_tokens = isinstance(value, Tensor) and value.shape[:2] == shape
        given[name] = value[:, tokens] if of_tokens else value
    return given


def _completion(prompt: Any, text: str) -> Any:
    """Return a completion in the form of its prompt: a text, or the messages of a chat."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def _check_length(row: int, tokens: int, new_tokens: Any, positions: int | None) -> None:
    """Refuse to generate more than the model has positions for, which fails deep inside of it."""
    if positions is not None and isinstance(new_tokens, int) and tokens + new_tokens > positions:
        raise ValueError(
            f"Row {row} has a prompt of {tokens} tokens, `max_new_tokens` is {new_tokens}, and the model has "
            f"{positions} positions. Expected room for all tokens. Ask for at most "
            f"{max(0, positions - tokens)} new tokens, or shorten the row."
        )


def _prompt(batch: Mapping[str, Any], causal: bool, padding: int | None = None, masked: int = 0) -> Tensor:
    """Return the tokens before the answer `(1, T)`: those before the first label, or all if none is masked.

    Collators mask every `padding` token, also one that begins a text. So such tokens alone are a prompt only if the
    row itself masks as many.
    """
    ids, mask, labels = batch["input_ids"], batch.get("attention_mask"), batch.get("labels")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    if causal and isinstance(labels, Tensor) and labels.shape == ids.shape:
        labelled = (labels != IGNORED) & real
        first = int(labelled[0].int().argmax()) if bool(labelled.any()) else ids.shape[1]
        before = real & (torch.arange(ids.shape[1], device=ids.device) < first)
        asked = before if padding is None or int(before.sum()) == masked else before & (ids != padding)
        if bool(asked.any()):
            real = before
    return ids[real].unsqueeze(0)


def _masked(row: Mapping[str, Any]) -> int:
    """Count the tokens before the first label that a row itself masks, in its labels or beside them."""
    marked = [[label != IGNORED for label in row.get("labels") or ()], *(row.get(name) or () for name in ROLE_MASKS)]
    return max(next((i for i, counts in enumerate(one) if counts), len(one)) for one in marked)


def _causal_row(prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
    return {
        "input_ids": [*prompt, *answer],
        "attention_mask": [1] * (len(prompt) + len(answer)),
        "labels": [IGNORED] * len(prompt) + list(answer),
        TARGET_MASK: [0] * len(prompt) + [1] * len(answer),
    }


def _seq2seq_row(prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
    return {"input_ids": list(prompt), "attention_mask": [1] * len(prompt), "labels": list(answer)}


def _is_per_token(dataset: Dataset, name: str) -> bool:
    """Tell whether a column has an entry for each token, so that it does not fit the new tokens."""
    first, tokens = dataset[0][name], dataset[0].get("input_ids")
    return isinstance(first, list) and isinstance(tokens, list) and len(first) == len(tokens)


def _beside(dataset: Dataset, columns: Dataset) -> Dataset:
    return concatenate_datasets([dataset, columns], axis=1) if dataset.column_names else columns


def _said(model: FeaturizedModel, answer: Sequence[int], row: int) -> str:
    """Return an answer as text. Raises `ValueError` if it is empty."""
    decode = getattr(model.processing_class, "decode", None)
    ends = getattr(getattr(model.model, "generation_config", None), "eos_token_id", None)
    words = [token for token in answer if token not in (ends if isinstance(ends, list) else [ends])]
    text = " ".join(map(str, words)) if decode is None else str(decode(list(answer), skip_special_tokens=True))
    if not text.strip():
        raise ValueError(
            f"The answer to row {row} is empty: the tokens {list(answer)[:8]}, none of them text. Expected something "
            "that the model says. Ask with the template it was trained with or `min_new_tokens`, or leave the row out."
        )
    return text
