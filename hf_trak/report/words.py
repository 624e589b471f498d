"""Words with their sources: the rows that made a model say something, those that read like it, and what is verified.

Influence says which rows made a model say something. Beside it are the rows with the longest sequence of the same
words, and those with the highest BM25: where they name the row, too, it was probably copied, and where influence alone
does, no search would have found it. A training step on each of all these rows tells which ones do raise what was said.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from datasets import Dataset

from hf_trak.data.columns import PREDICTED
from hf_trak.data.said import decoded, said_by, said_column, turns_of
from hf_trak.data.shared_words import Run, WordIndex, Words
from hf_trak.evaluation.single_steps import RowSteps, step_on_each
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.modelout_functions.aggregated import TARGET_MASK
from hf_trak.modelout_functions.seq2seq_lm import Seq2SeqLMModelOutput
from hf_trak.modelout_functions.token_tasks import CausalLMModelOutput
from hf_trak.modelout_functions.tokens import IGNORED
from hf_trak.report.content import Columns, content_of
from hf_trak.runtime.progress import RowProgress, with_column
from hf_trak.scores.said_parts import OF_TARGET
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, WORDS_COLUMN

MOST_ROWS = 200_000
"""Training rows whose words are read. Of more rows, those that a score names are read, which are a shortlist then."""

LONGEST = 2000
"""Characters of a training row that are kept beside a target, around the words that it shares."""

_AT_ONCE = 1000  # rows that are read together

Found = list[tuple[int, float]]
"""Numbers of training rows with a score, best first."""


def with_words(features: FeaturizedModel, scored: Dataset, count: int = 5, verify: bool = False) -> Dataset:
    """Add what words alone find for targets of a language model, and what training steps say of all rows found.

    Args:
        features (`FeaturizedModel`):
            The model that was attributed, and its training rows.
        scored (`datasets.Dataset`):
            The result of `attribute(..., per="target")`, with `top_k`. What a target says is its span, the model's own
            answer, the turns of an assistant, a completion, or its text.
        count (`int`, *optional*, defaults to 5):
            Training rows of each kind to name.
        verify (`bool`, *optional*, defaults to `False`):
            Take a training step on each row that influence or words name, see
            [`~hf_trak.evaluation.single_steps.step_on_each`]. The targets that `trak_target` says are parts of one
            share the steps.

    Returns:
        `datasets.Dataset`: `scored` with the column `trak_words`. In each row, `said` is a text, and `start` and
        `stop` the characters of it that the target is about. `same` has the training rows with the longest sequences
        of the same words through these, exact: `row`, `score` (the number of words), `text`, and `start` and `stop`,
        characters of that text. `bm25` has those with the highest BM25. `verified` has all rows named, by the change
        of the output by a step on the row, in `score`; `effect` tells whether it is more than random rows do. It is
        null without `verify`. `scored` as it is if it has the column, or nothing in it is text.
    """
    train, tokenizer, ids_column = features.train_dataset, features.processing_class, _ids_column(features)
    if ids_column is None or not isinstance(train, Dataset) or WORDS_COLUMN in scored.column_names:
        return scored
    said = list(_said(scored, tokenizer, ids_column))

    def read(rows: Sequence[int]) -> dict[int, str]:
        return row_texts(train, tokenizer, rows) or {}

    if row_texts(train, tokenizer, []) is None or not any(stop > start for _, start, stop in said):
        return scored
    numbers = range(len(train)) if len(train) <= MOST_ROWS else _named(scored)
    index = _index_of(features, numbers, read)
    passages = [_passage(*one) for one in said]
    same = [_same(index, numbers, *passage, count) for passage in passages]
    bm25 = [_bm25(index, numbers, words[first:last], count) for words, first, last in passages]
    names: list[list[int]] = [
        list(dict.fromkeys([*_helped(row, count), *(row for row, _ in shared), *(row for row, _ in ranked)]))
        for row, shared, ranked in zip(scored.with_format(None), same, bm25, strict=True)
    ]
    steps = _verified(features, scored, names) if verify else [None] * len(said)
    shown = read(sorted({row for rows in names for row in rows}))
    columns = [
        {
            "said": text,
            "start": start,
            "stop": stop,
            "same": [_entry(row, run.count, shown[row], run) for row, run in shared],
            "bm25": [_entry(row, score, shown[row]) for row, score in ranked],
            "verified": of_steps
            and [{**_entry(row, score, shown[row]), "effect": effect} for row, score, effect in of_steps],
        }
        for (text, start, stop), shared, ranked, of_steps in zip(said, same, bm25, steps, strict=True)
    ]
    return with_column(scored, WORDS_COLUMN, columns)


def ids_column_of(features: FeaturizedModel) -> str:
    """Name the column of the tokens that a language model says.

    Args:
        features: the model.

    Raises:
        TypeError: it is no language model that writes.
    """
    if (found := _ids_column(features)) is None:
        raise TypeError(
            f"The task is a {type(features.task).__name__}. Expected that of a language model that writes, whose "
            "words have sources. Use `attribute`, or pass `task='causal_lm'`."
        )
    return found


def _ids_column(features: FeaturizedModel) -> str | None:
    task = getattr(features.task, "of_task", None) or features.task
    if isinstance(task, CausalLMModelOutput):
        return "input_ids"
    return "labels" if isinstance(task, Seq2SeqLMModelOutput) else None


def _helped(row: Mapping[str, Any], count: int) -> list[int]:
    pairs = zip(row[TOP_K_COLUMNS[0]][:count], row[TOP_K_COLUMNS[1]][:count], strict=True)
    return [number for number, score in pairs if score > 0]


def _named(scored: Dataset) -> list[int]:
    named = scored.select_columns([TOP_K_COLUMNS[0], TOP_K_COLUMNS[2]]).with_format(None)
    return sorted({row for target in named for rows in target.values() for row in rows})


# -- texts -----------------------------------------------------------------------------------------------------------


def _said(scored: Dataset, tokenizer: Any, ids_column: str) -> Iterator[tuple[str, int, int]]:
    """Yield a text for each target, and the characters of it that the target is about; nothing where it is no text."""
    plain, names = scored.with_format(None), scored.column_names
    marked = {TARGET_MASK, ids_column} <= set(names) and hasattr(tokenizer, "decode")
    column = PREDICTED if PREDICTED in names else said_column(scored)
    for row in plain.select_columns([name for name in names if not name.startswith("trak_")]):
        if marked:
            ids = [token if token != IGNORED else tokenizer.pad_token_id or 0 for token in row[ids_column]]
            text, ranges = decoded(ids, tokenizer, True)
            own = [one for one, kept in zip(ranges, row[TARGET_MASK], strict=True) if kept and one[1] > one[0]]
            start, stop = min((first for first, _ in own), default=0), max((last for _, last in own), default=0)
            yield text, start + len(text[start:stop]) - len(text[start:stop].lstrip()), stop
            continue
        if column in ("messages", "completion"):
            found = "\n".join(said_by(turn) for turn in turns_of(row) if turn.get("role") == "assistant")
        else:
            found = "" if column is None or not isinstance(row[column], str) else row[column]
        yield found, 0, len(found)


def _passage(text: str, start: int, stop: int) -> tuple[tuple[str, ...], int, int]:
    """Divide a text into words, and find those between two characters."""
    words = Words.of(text)
    inside = [place for place, (first, last) in enumerate(words.ranges) if first < stop and last > start]
    return words.words, inside[0] if inside else 0, inside[-1] + 1 if inside else 0


_DIALOGUE = {"messages", "conversations", "prompt", "completion", "chosen", "rejected"}
"""Columns of chats and of answers, whose template puts words between theirs."""


def row_texts(train: Any, tokenizer: Any, rows: Sequence[int]) -> dict[int, str] | None:
    """Read training rows as a report shows them, or else what their tokens say; `None` if neither is there.

    Of several columns of texts, which the model may not have seen, tokens tell.

    Args:
        train: the training rows.
        tokenizer: decodes tokens.
        rows: numbers of rows.
    """
    texts_of, numbers = Columns.find(train).texts, list(rows)
    columns = Columns(texts=tuple(name for name in texts_of if name in _DIALOGUE) or texts_of)
    tokens = "input_ids" in train.column_names and hasattr(tokenizer, "decode")
    if columns.texts and not (tokens and len(columns.texts) > 1 and _DIALOGUE.isdisjoint(columns.texts)):
        shown = train.select_columns(list(columns.texts)).with_format("arrow")[numbers].to_pylist()
        texts = ["\n".join(text for _, text in content_of(one, columns).texts) for one in shown]
    elif tokens:
        ids = train.with_format(None).select_columns(["input_ids"])[numbers]["input_ids"]
        texts = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
    else:
        return None
    return dict(zip(numbers, texts, strict=True))


# -- rows that words find --------------------------------------------------------------------------------------------

_INDEXES: WeakKeyDictionary[FeaturizedModel, WordIndex] = WeakKeyDictionary()
"""The words of all training rows of a model, which are read once."""


def _index_of(
    features: FeaturizedModel, numbers: Sequence[int], read: Callable[[Sequence[int]], dict[int, str]]
) -> WordIndex:
    parts = (numbers[first : first + _AT_ONCE] for first in range(0, len(numbers), _AT_ONCE))
    texts = (text for part in parts for text in read(part).values())
    if len(numbers) < len(features.train_dataset):
        return WordIndex(texts)
    if features not in _INDEXES:
        _INDEXES[features] = WordIndex(texts)
    return _INDEXES[features]


def _same(
    index: WordIndex, numbers: Sequence[int], words: tuple[str, ...], first: int, last: int, count: int
) -> list[tuple[int, Run]]:
    """Find the rows with the longest sequences, of two words or more where as many are asked for."""
    found = index.longest(words, first, last, count)
    return [(numbers[number], run) for number, run in found if run.count >= min(2, last - first)]


def _bm25(index: WordIndex, numbers: Sequence[int], words: tuple[str, ...], count: int) -> Found:
    """Find the rows with the highest BM25 above 0."""
    scores = index.bm25(words)
    best = np.argsort(-scores, kind="stable")[:count]
    return [(numbers[int(place)], float(scores[place])) for place in best if scores[place] > 0]


# -- rows that steps verify ------------------------------------------------------------------------------------------


def _verified(
    features: FeaturizedModel, scored: Dataset, names: Sequence[Sequence[int]]
) -> list[list[tuple[int, float, bool]]]:
    """Take a step on each row named, and order them for each target by what it does."""
    owners = scored[OF_TARGET][:] if OF_TARGET in scored.column_names else list(range(len(scored)))
    targets = scored.remove_columns([name for name in scored.column_names if name.startswith("trak_")])
    found: list[list[tuple[int, float, bool]]] = [[] for _ in owners]
    with RowProgress(len(owners), "Verifying", show=features.processes.is_main_process) as bar:
        for owner in dict.fromkeys(owners):
            places = [place for place, one in enumerate(owners) if one == owner]
            if rows := list(dict.fromkeys(row for place in places for row in names[place])):
                steps = step_on_each(features, targets.select(places), rows)
                for column, place in enumerate(places):
                    found[place] = _ordered(steps, column, set(names[place]))
            bar.update(len(places))
    return found


def _ordered(steps: RowSteps, column: int, named: set[int]) -> list[tuple[int, float, bool]]:
    found = zip(steps.rows, steps.changes[:, column].tolist(), steps.has_effect[:, column].tolist(), strict=True)
    return sorted((one for one in found if one[0] in named), key=lambda one: -one[1])


def _entry(row: int, score: float, text: str, run: Run | None = None) -> dict[str, Any]:
    """Describe a row, cut around the words that it shares."""
    start, stop = 0, 0
    if run is not None:
        ranges = Words.of(text).ranges
        start, stop = ranges[run.start][0], ranges[run.start + run.count - 1][1]
    first = max(0, min(start - LONGEST // 4, len(text) - LONGEST))
    cut = text[first : first + LONGEST]
    start, stop = start - first, min(stop - first, len(cut))
    return {"row": row, "score": float(score), "text": cut, "start": start, "stop": stop}
