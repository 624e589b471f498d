"""The share of each token of a target in its scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from hf_trak.data.rows import RowBatches
from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.base import AbstractModelOutput
from hf_trak.report.text import visible
from hf_trak.scores.spans import single_labels

MOST_TOKENS = 128
"""Targets with more labels are not broken down: each label takes a gradient."""

MOST_SCORES = 1 << 22
"""Number of scores of single tokens that are kept, n times the tokens."""


@dataclass(frozen=True)
class Token:
    """A piece of a target, and its share of the scores shown: −1 to 1, of the largest share; `None` without one."""

    text: str
    share: float | None = None


@dataclass(frozen=True)
class TokenScores:
    """Scores of all training rows for every label of one target.

    Attributes:
        positions: positions of the labels in the row, ascending.
        scores: `(n, labels)`, float32, which add up to the scores of the target.
    """

    positions: list[int]
    scores: np.ndarray

    def of_rows(self, rows: Sequence[int]) -> np.ndarray:
        """Add up the scores of some training rows, for each label: `(labels,)`."""
        return np.asarray(self.scores[list(rows)].sum(axis=0))


def label_rows(task: AbstractModelOutput, batches: RowBatches, rows: Dataset, n: int) -> Dataset | None:
    """Repeat a target once for each of its labels, see [`~hf_trak.scores.spans.single_labels`].

    Args:
        task: the model output function.
        batches: collates the rows.
        rows: the target.
        n: number of training rows.

    Returns:
        One row per label; `None` if the task has one label per row, or there are too many.
    """
    if not isinstance(task, AggregatedModelOutput) or rows.format["type"] == "custom":
        return None
    singles = single_labels(task, batches, rows)
    most = min(MOST_TOKENS, MOST_SCORES // max(1, n))
    return singles if 0 < len(singles) <= most else None


def tokens_of(
    row: dict[str, Any], text: str | None, tokenizer: Any, positions: Sequence[int], shares: Any
) -> list[Token]:
    """Cut a target into its tokens, each with its share.

    Args:
        row: the prepared row, with `input_ids`, and `offset_mapping` if its text was tokenized as a whole.
        text: the text that the offsets belong to.
        tokenizer: decodes tokens where there are no offsets; `None` shows their numbers.
        positions: positions of tokens with a share.
        shares: their shares, in units of the score.
    """
    largest = float(np.abs(shares).max(initial=0.0)) or 1.0
    known = {position: float(share) / largest for position, share in zip(positions, shares, strict=True)}
    offsets = row.get("offset_mapping")
    if text is not None and isinstance(offsets, list):
        return _of_text(text, offsets, known)
    ids = row.get("input_ids") or []
    decode = getattr(tokenizer, "decode", None)
    words = [f" {number}" if decode is None else str(decode([number])) for number in ids]
    return [Token(visible(word), known.get(place)) for place, word in enumerate(words)]


def _of_text(text: str, offsets: Sequence[Sequence[int]], known: dict[int, float]) -> list[Token]:
    found, end = list[Token](), 0
    for place, (start, stop) in enumerate(offsets):
        if stop <= start or start < end:
            continue
        if start > end:
            found.append(Token(visible(text[end:start])))
        found.append(Token(visible(text[start:stop]), known.get(place)))
        end = stop
    if end < len(text):
        found.append(Token(visible(text[end:])))
    return found
