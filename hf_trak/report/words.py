"""What words alone find: the training rows that share most words in a row with what a model says, and BM25.

Influence says which rows made a model say something, and these say which rows read like it. Where both name a row, it
was probably copied; where influence alone does, no search would have found it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from hf_trak.data.said import PREDICTED, said_column, said_in
from hf_trak.data.shared_words import BM25_MISSING, Run, SharedRuns, Words, bm25_scores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.modelout_functions.aggregated import TARGET_MASK
from hf_trak.modelout_functions.seq2seq_lm import Seq2SeqLMModelOutput
from hf_trak.modelout_functions.token_tasks import CausalLMModelOutput
from hf_trak.report.content import WORDS_COLUMN, Columns, content_of, stored
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS

logger = logging.getLogger(__name__)

MOST_ROWS = 200_000
"""Training rows whose words are read. Of more rows, those that a score names are read, which are a shortlist then."""

LONGEST = 2000
"""Characters of a training row that are kept beside a target, around the words that it shares."""


def with_words(features: FeaturizedModel, scored: Dataset, count: int = 5) -> Dataset:
    """Add what words alone find for targets of a language model.

    Args:
        features (`FeaturizedModel`):
            The model that was attributed, and its training rows.
        scored (`datasets.Dataset`):
            The result of `attribute(..., per="target")`, with `top_k`. What a target says is its span, the model's own
            answer, the turns of an assistant, a completion, or its text.
        count (`int`, *optional*, defaults to 5):
            Training rows of each kind to name.

    Returns:
        `datasets.Dataset`: `scored` with the column `trak_words`. In each row, `said` is what the words are
        compared with; `same` has the training rows with the longest sequences of the same words, two or more, exact:
        `row`, `score` (the number of words), `text`, and `start` and `stop`, characters of the text; `bm25` has those
        with the highest BM25, or is null if `bm25s` is not installed. `scored` as it is if nothing in it is text.
    """
    task = getattr(features.task, "of_task", None) or features.task
    train = features.train_dataset
    if not isinstance(task, CausalLMModelOutput | Seq2SeqLMModelOutput) or not isinstance(train, Dataset):
        return scored
    said = list(_said(scored, features.processing_class, isinstance(task, CausalLMModelOutput)))
    texts = _texts(train, features.processing_class, _rows_read(scored, len(train)))
    if texts is None or not any(said):
        return scored
    targets, rows = [Words.of(text) for text in said], {row: Words.of(text) for row, text in texts.items()}
    same, bm25 = _same(targets, rows, count), _bm25(targets, rows, count)
    columns = [
        {
            "said": text,
            "same": [_entry(row, run.count, texts[row], rows[row], run) for row, run in same[place]],
            "bm25": None if bm25 is None else [_entry(row, score, texts[row]) for row, score in bm25[place]],
        }
        for place, text in enumerate(said)
    ]
    kept = scored.remove_columns([name for name in (WORDS_COLUMN,) if name in scored.column_names])
    return kept.add_column(WORDS_COLUMN, columns)


def _rows_read(scored: Dataset, n: int) -> list[int]:
    if n <= MOST_ROWS:
        return list(range(n))
    named = scored.select_columns([TOP_K_COLUMNS[0], TOP_K_COLUMNS[2]]).with_format(None)
    return sorted({row for target in named for rows in target.values() for row in rows})


def _said(scored: Dataset, tokenizer: Any, causal: bool) -> Iterator[str]:
    """Yield what each target says; nothing where that is no text."""
    plain, names = scored.with_format(None), scored.column_names
    marked = causal and {TARGET_MASK, "input_ids"} <= set(names) and hasattr(tokenizer, "decode")
    column = PREDICTED if PREDICTED in names else said_column(scored)
    for row in plain.select_columns([name for name in names if not name.startswith("trak_")]):
        if marked:
            ids = [one for one, kept in zip(row["input_ids"], row[TARGET_MASK], strict=True) if kept]
            yield tokenizer.decode(ids, skip_special_tokens=True)
        elif column in ("messages", "completion"):
            text = "\n".join(_turns(row, column))
            yield "\n".join(text[start:stop] for start, stop in said_in(text, row))
        else:
            found = None if column is None else row[column]
            yield found if isinstance(found, str) else ""


def _turns(row: Mapping[str, Any], column: str) -> Iterator[str]:
    """Yield the texts of a conversation, or of a prompt and its completion."""
    for value in (row["messages"],) if column == "messages" else (row.get("prompt") or "", row["completion"]):
        yield from (value,) if isinstance(value, str) else (str(turn["content"]).strip() for turn in value)


def _texts(train: Dataset, tokenizer: Any, rows: Sequence[int]) -> dict[int, str] | None:
    """Read training rows as a report shows them, or else what their tokens say; `None` if neither is there."""
    columns = Columns(texts=Columns.find(train).texts)
    if columns.texts:
        shown = stored(train.select_columns(list(columns.texts)))
        return {row: "\n".join(text for _, text in content_of(shown[row], columns).texts) for row in rows}
    if "input_ids" not in train.column_names or not hasattr(tokenizer, "decode"):
        return None
    tokens = train.with_format(None).select_columns(["input_ids"])
    return {row: tokenizer.decode(tokens[row]["input_ids"], skip_special_tokens=True) for row in rows}


def _same(targets: Sequence[Words], rows: Mapping[int, Words], count: int) -> list[list[tuple[int, Run]]]:
    """Find the rows with the longest sequences for each target; of equals the first ones."""
    runs = SharedRuns([one.words for one in targets])
    found: list[list[tuple[int, Run]]] = [[] for _ in targets]
    for row, words in rows.items():
        for target, run in runs.longest(words.words).items():
            if run.count >= min(2, len(targets[target].words)):
                found[target].append((row, run))
    return [sorted(one, key=lambda pair: -pair[1].count)[:count] for one in found]


def _bm25(targets: Sequence[Words], rows: Mapping[int, Words], count: int) -> list[list[tuple[int, float]]] | None:
    """Find the rows with the highest BM25 above 0 for each target; `None` if `bm25s` is not installed."""
    try:
        scores = bm25_scores([one.words for one in rows.values()], [one.words for one in targets])
    except ImportError:
        logger.warning("%s The report goes without it.", BM25_MISSING)
        return None
    numbers = list(rows)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return [
        [(numbers[i], float(one[i])) for i in order if one[i] > 0] for one, order in zip(scores, best, strict=True)
    ]


def _entry(row: int, score: float, text: str, words: Words | None = None, run: Run | None = None) -> dict[str, Any]:
    """Describe a row, cut around the words that it shares."""
    start, stop = 0, 0
    if words is not None and run is not None:
        start, stop = words.ranges[run.start][0], words.ranges[run.start + run.count - 1][1]
    first = max(0, min(start - LONGEST // 4, len(text) - LONGEST))
    cut = text[first : first + LONGEST]
    return {
        "row": row,
        "score": float(score),
        "text": cut,
        "start": start - first,
        "stop": min(stop - first, len(cut)),
    }
