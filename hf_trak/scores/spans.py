"""Attribution of parts of a target: spans of its labels, and scores broken down by label.

The model output of a language model is a sum over label tokens, f = Σ_t w_t m_t with margins m_t and weights w_t
(TRAK paper, arXiv 2303.14186, Section 3.3, per token). A score is linear in the gradient of the target's f, hence

    τ(z_i, target) = Σ_t τ(z_i, target restricted to label t)

* A *span* is a target restricted to some of its labels by the column `target_mask`. It answers questions such as
  "which documents made the model write this word?".
* The scores of the single labels, each with its own weight in the column `target_weights`, add up to the score of the
  whole target.

Both columns have one entry per label: per entry of `labels` if the row has them, and of `input_ids` otherwise.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, List, Value, concatenate_datasets
from torch import Tensor

from hf_trak.data.columns import PREDICTED
from hf_trak.data.rows import RowBatches
from hf_trak.data.said import Range, places, said_column, said_tokens
from hf_trak.modelout_functions.aggregated import TARGET_MASK, TARGET_WEIGHTS, AggregatedModelOutput, labels_of
from hf_trak.modelout_functions.base import AbstractModelOutput
from hf_trak.runtime.arguments import named_arguments
from hf_trak.runtime.checks import is_int
from hf_trak.runtime.progress import with_column
from hf_trak.scores.scored_dataset import HARMFUL_TOKEN_SCORES, TOKEN_POSITIONS, TOKEN_SCORES


@named_arguments
@dataclass(frozen=True)
class Span:
    """A part of every target, such as one word of an answer: what `attribute(part=...)` takes.

    Exactly one of `tokens`, `chars`, `words` and `mask_column` says which part. A token belongs to a span of
    characters if it shares at least one character with it.

    Args:
        tokens (`tuple[int, int]`, a sequence of them, or `str`, *optional*):
            Ranges of token positions: one for all rows, one per row, or the name of a column that holds them.
        chars (`tuple[int, int]`, a sequence of them, or `str`, *optional*):
            Ranges of characters of the text, given in the same ways.
        words (`str` or `Sequence[str]`, *optional*):
            A piece that occurs exactly once in the text: one for all rows, or one per row.
        mask_column (`str`, *optional*):
            Name of a column of lists of 0 and 1, with one entry per token.
        text_column (`str`, *optional*):
            Name of the column with the text that was tokenized. By default the text is what the model says:
            `predicted` in rows of `predict`, the assistant's turns of `messages` (for `words`), the `completion` of a
            prompt, and else `text`, or all that the tokens say.
        ids_column (`str`, *optional*, defaults to `"input_ids"`):
            Name of the column with its token ids: `labels` for sequence-to-sequence models.
    """

    tokens: Range | Sequence[Range] | str | None = None
    chars: Range | Sequence[Range] | str | None = None
    words: str | Sequence[str] | None = None
    mask_column: str | None = None
    text_column: str | None = None
    ids_column: str = "input_ids"

    def of(
        self, dataset: Dataset, tokenizer: Any = None, ready: Callable[[list[Any]], list[Any]] | None = None
    ) -> Dataset:
        """Restrict every target to the part.

        Args:
            dataset (`datasets.Dataset`):
                The targets.
            tokenizer (`PreTrainedTokenizerFast`, *optional*):
                A fast tokenizer, for `chars` and `words`. Not needed if the dataset has a column `offset_mapping`.
            ready (`Callable`, *optional*):
                Makes tokens of rows that are none yet, as the trainer does.

        Returns:
            `datasets.Dataset`: the dataset with a column `target_mask`.

        Raises:
            TypeError: the targets are no `datasets.Dataset`.
            ValueError: none or several of the four arguments are given, or one is of another form; a range is empty or
                contains no token of its row (because the row was truncated before it, for example); the words do not
                occur exactly once; the tokenizer gives other ids than the row has; or a column does not exist.
        """
        dataset = with_tokens(dataset, ready, self.ids_column)
        _require_dataset(dataset)
        kinds = ("tokens", "chars", "words", "mask_column")
        given = {name: value for name in kinds if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise ValueError(
                f"Given {list(given) or 'none'} of {list(kinds)}. Expected exactly one of them, which says what the "
                "span is."
            )
        masks = self._masks(dataset.with_format(None), tokenizer)
        for index, mask in enumerate(masks):
            if not any(mask):
                raise ValueError(
                    f"The span of row {index} ({', '.join(f'{name}={value!r}' for name, value in given.items())}) "
                    f"holds none of its {len(mask)} tokens. Expected at least one. If the row was truncated before "
                    "it, tokenize with a larger `max_length`, or leave the row out."
                )
        kept = dataset.remove_columns([TARGET_MASK]) if TARGET_MASK in dataset.column_names else dataset
        return with_column(kept, TARGET_MASK, masks)

    def _masks(self, dataset: Dataset, tokenizer: Any) -> list[list[int]]:
        """Mark the tokens of the part in every row."""
        if self.mask_column is not None:
            return [[int(bool(entry)) for entry in mask] for mask in _column(dataset, self.mask_column)]
        if self.tokens is not None:
            lengths = [len(ids) for ids in _column(dataset, self.ids_column)]
            given = _ranges(dataset, self.tokens, "tokens")
            spans = [_resolved(span, n) for span, n in zip(given, lengths, strict=True)]
            return [[int(a <= i < b) for i in range(n)] for (a, b), n in zip(spans, lengths, strict=True)]
        words = None if self.words is None else _words(self.words, len(dataset))
        if self.text_column is None and (said := said_column(dataset)) != "text":
            return self._masks_of_said(dataset, words, tokenizer, said)
        texts = list(_column(dataset, self.text_column or "text"))
        if words is not None:
            spans = [_only_place(text, word, i) for i, (text, word) in enumerate(zip(texts, words, strict=True))]
        else:
            given = _ranges(dataset, self.chars, "chars")
            spans = [_resolved(span, len(text)) for span, text in zip(given, texts, strict=True)]
        offsets = _offsets(dataset, texts, tokenizer, self.ids_column)
        return [
            [int(start < b and stop > a and stop > start) for start, stop in row]
            for (a, b), row in zip(spans, offsets, strict=True)
        ]

    def _masks_of_said(
        self, dataset: Dataset, words: list[str] | None, tokenizer: Any, said: str | None
    ) -> list[list[int]]:
        """Mark the tokens of `chars` or `words` in what the model says, which is found in what the tokens say."""
        if not hasattr(tokenizer, "decode") or (words is None and said != PREDICTED):
            raise ValueError(
                f"`tokenizer` is {type(tokenizer).__name__}, and what the model says is in {said!r}. Expected a "
                "tokenizer and, except for 'predicted', `words` in place of `chars`. Otherwise, give the span as "
                "`tokens`."
            )
        ranges, masks = _ranges(dataset, self.chars, "chars") if words is None else [], list[list[int]]()
        for index, (row, ids) in enumerate(zip(dataset, _column(dataset, self.ids_column), strict=True)):
            text, own, offsets, within = said_tokens(row, ids, tokenizer, said)
            if words is None:
                first, last = _resolved(ranges[index], len(text))
            else:
                found = places(text, words[index], within)
                _require_one(len(found), words[index], index, repr(said))
                first, last = found[0], found[0] + len(words[index])
            chosen = {i for i, (start, stop) in zip(own, offsets, strict=True) if start < last and stop > first}
            masks.append([int(i in chosen) for i in range(len(ids))])
        return masks


def with_tokens(dataset: Dataset, ready: Callable[[list[Any]], list[Any]] | None, ids_column: str) -> Dataset:
    """Add tokens to rows that have none.

    Args:
        dataset: the rows.
        ready: makes tokens of rows, as the trainer does; `None` leaves them as they are.
        ids_column: the column of token ids.
    """
    if ready is not None and isinstance(dataset, Dataset) and ids_column not in dataset.column_names:
        rows = ready(list(dataset.with_format(None)))
        for name in [name for name in rows[0] if name not in dataset.column_names]:
            dataset = with_column(dataset, name, [row[name] for row in rows])
    return dataset


def single_labels(task: AbstractModelOutput, batches: RowBatches, dataset: Dataset) -> Dataset:
    """Repeat every target once per label, restricted to that label with the weight w_t that it has in f.

    Args:
        task: the model output function, which aggregates over labels.
        batches: collates rows of `dataset`.
        dataset: the targets.

    Returns:
        The rows of `dataset`, each as many times as it has labels of nonzero weight, with the columns
        `target_weights`, `trak_target` (row of `dataset`) and `trak_position` (position of the label in the row).

    Raises:
        TypeError: the task does not aggregate over labels, or `dataset` is no `datasets.Dataset`.
    """
    _require_dataset(dataset)
    if (labelled := labels_of(task)) is None:
        raise TypeError(
            f"The task is a {type(task).__name__}, which has one number per target. Expected one that aggregates over "
            "labels. Leave `per_token` out, or pass `task=`, such as 'causal_lm' or 'token_classification'."
        )
    columns: dict[str, list[Any]] = {"trak_target": [], "trak_position": [], TARGET_WEIGHTS: []}
    for target, weights in enumerate(label_weights(labelled, batches, dataset)):
        for position in np.flatnonzero(weights).tolist():
            alone = np.zeros(len(weights))
            alone[position] = weights[position]
            columns["trak_target"].append(target)
            columns["trak_position"].append(position)
            columns[TARGET_WEIGHTS].append(alone.tolist())
    kept = dataset.select_columns([name for name in dataset.column_names if name not in columns])
    repeated = kept.select(columns["trak_target"])
    for name, values in columns.items():
        repeated = with_column(repeated, name, values)
    return repeated


def label_weights(task: AggregatedModelOutput, batches: RowBatches, dataset: Dataset) -> Iterator[np.ndarray]:
    """Yield the weights w_t of the labels of every row in its model output f = Σ_t w_t m_t.

    Args:
        task: the model output function.
        batches: collates rows of `dataset`.
        dataset: the rows.

    Yields:
        `(labels,)` for every row, without entries for padding.
    """
    has_tokens = task.beside is not None and task.beside in dataset.column_names
    plain = dataset.with_format(None)
    for (row,), batch in batches.iterate([[row] for row in range(len(dataset))]):
        weights = task.label_weights(batch)[0].cpu().numpy()
        if has_tokens and (count := len(plain[row][task.beside])) < len(weights):  # the row is padded
            mask = batch.get("attention_mask")
            left = isinstance(mask, Tensor) and task.beside == "input_ids" and int(mask[0, 0]) == 0
            weights = weights[-count:] if left else weights[:count]
        yield weights


def with_token_scores(scored: Dataset, singles: Dataset) -> Dataset:
    """Break the scores of a top-k result down by label.

    Args:
        scored: the result of `attribute(dataset, top_k=k)`.
        singles: the result of `attribute(single_labels(...), top_k=None)` for the same targets.

    Returns:
        `scored` with `trak_token_positions`, and with `trak_token_scores` and `trak_harmful_token_scores`: for
        target j, `scored[j]["trak_token_scores"][r][t]` is what label t contributes to `scored[j]["trak_scores"][r]`.
    """
    owners = np.asarray(singles.with_format(None)["trak_target"][:])
    positions = np.asarray(singles.with_format(None)["trak_position"][:])
    full = singles.select_columns(["trak_scores"]).with_format("numpy")
    wanted = {TOKEN_SCORES: "trak_indices", HARMFUL_TOKEN_SCORES: "trak_harmful_indices"}
    columns: dict[str, list[Any]] = {TOKEN_POSITIONS: [], **{name: [] for name in wanted}}
    chosen = scored.with_format(None)
    for target in range(len(scored)):
        rows = np.flatnonzero(owners == target)
        columns[TOKEN_POSITIONS].append(positions[rows].tolist())
        scores = np.stack([full[int(row)]["trak_scores"] for row in rows])  # (labels, n_train)
        for name, indices in wanted.items():
            columns[name].append(scores[:, chosen[target][indices]].T.tolist())
    table = Dataset.from_dict(columns)
    for name in wanted:
        table = table.cast_column(name, List(List(Value("float32"))))
    stale = [name for name in columns if name in scored.column_names]
    return concatenate_datasets([chosen.remove_columns(stale), table], axis=1)


def _require_dataset(dataset: Any) -> None:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"The targets are a {type(dataset).__name__}. Expected a `datasets.Dataset`, which can take new columns. "
            "Make one with `Dataset.from_list` or `Dataset.from_generator`."
        )


def _column(dataset: Dataset, name: str) -> Iterable[Any]:
    if name not in dataset.column_names:
        raise ValueError(
            f"The targets have the columns {dataset.column_names}, not {name!r}. Expected the column that the span "
            "refers to. Name one that exists."
        )
    return dataset[name]


def _ranges(dataset: Dataset, given: Any, name: str) -> list[Range]:
    """Read ranges given for all rows, per row, or as a column: one per row."""
    ranges: list[Any] = []
    if isinstance(given, str):
        ranges = list(_column(dataset, given))
    elif hasattr(given, "__len__"):
        ranges = [given] * len(dataset) if len(given) == 2 and all(map(is_int, given)) else list(given)
    pairs: list[Any] = [
        (*span,) for span in ranges if hasattr(span, "__len__") and len(span) == 2 and all(map(is_int, span))
    ]
    if not len(pairs) == len(ranges) == len(dataset):
        raise ValueError(
            f"`{name}` is {given!r} for {len(dataset)} rows. Expected one (start, stop) for all of them, one for "
            "each, or the name of a column of such pairs."
        )
    return pairs


def _resolved(span: Range, length: int) -> Range:
    """Resolve negative and excessive ends of a range as slices do."""
    start, stop, _ = slice(*span).indices(length)
    return start, stop


def _words(given: Any, rows: int) -> list[str]:
    """Read words given for all rows or per row: one per row."""
    words = [given] * rows if isinstance(given, str) else list(given) if hasattr(given, "__len__") else []
    if len(words) != rows or not all(isinstance(word, str) for word in words):
        raise ValueError(
            f"`words` is {given!r} for {rows} rows. Expected one text for all of them, or one for each. Give a text."
        )
    return words


def _only_place(text: str, word: str, row: int) -> Range:
    _require_one(text.count(word) if word else 0, word, row, "text")
    start = text.index(word)
    return start, start + len(word)


def _require_one(found: int, word: str, row: int, column: str) -> None:
    if found != 1:
        raise ValueError(
            f"{word!r} occurs {found} times in the {column} of row {row}. Expected it to occur once. Give more of the "
            "words around it, or the place with `chars` or `tokens`."
        )


def _offsets(dataset: Dataset, texts: list[str], tokenizer: Any, ids_column: str) -> list[list[Range]]:
    """Find the range of characters of every token; (0, 0) for tokens without characters."""
    if "offset_mapping" in dataset.column_names:
        return [[tuple(pair) for pair in row] for row in dataset["offset_mapping"]]
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"`tokenizer` is {type(tokenizer).__name__}, and the targets have no column `offset_mapping`. Expected a "
            "fast tokenizer, which knows the characters of its tokens, or that column. Otherwise, give the span as "
            "`tokens`."
        )
    result = []
    for index, (text, ids) in enumerate(zip(texts, _column(dataset, ids_column), strict=True)):
        encoded = tokenizer(text, return_offsets_mapping=True)
        same = min(len(ids), len(encoded["input_ids"]))  # the row may be truncated, or have an extra end token
        if list(ids[:same]) != encoded["input_ids"][:same]:
            raise ValueError(
                f"The tokenizer makes other tokens of the text of row {index} than the row has in `{ids_column}`. "
                "Expected the tokenizer, the text column and the options that the row was tokenized with. Otherwise, "
                "tokenize with `return_offsets_mapping=True` and keep that column."
            )
        offsets = [tuple(pair) for pair in encoded["offset_mapping"][: len(ids)]]
        result.append(offsets + [(0, 0)] * (len(ids) - len(offsets)))
    return result
