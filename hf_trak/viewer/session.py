"""Sessions of the viewer: their common part, with training rows, answers, facts and self-influence, and saved runs."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from hf_trak.data.rows import RowBatches
from hf_trak.modelout_functions.aggregated import labels_of
from hf_trak.modelout_functions.base import AbstractModelOutput
from hf_trak.report.content import Columns, Content, content_of, stored, visible
from hf_trak.report.page import facts_shown
from hf_trak.report.run import AttributionRun
from hf_trak.report.views import index_ranks
from hf_trak.scores.scored_dataset import RANK_COLUMNS, STAGE_COLUMN, TOP_K_COLUMNS
from hf_trak.scores.spans import single_labels
from hf_trak.viewer.train_rows import RowFilter, TrainRows

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
    if labels_of(task) is None or rows.format["type"] == "custom":
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
        tokenizer: decodes tokens without offsets; `None` shows their numbers.
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


class Ends(NamedTuple):
    """Positions of the rows of an answer that a page and an export show, from the most helpful or harmful one on."""

    helped: list[int]
    harmed: list[int]


@dataclass(frozen=True)
class Answer:
    """Scores of training rows for one target.

    Attributes:
        target (`Content`): what is shown of the target.
        rows (`numpy.ndarray` of shape `(r,)`): numbers of the rows with a score, ascending.
        scores (`numpy.ndarray` of shape `(r,)`): float32.
        stage (`str`): `"index"`, `"exact"` or `"refined"`.
        whole (`bool`): whether all training rows have a score.
        ranks (`dict[int, str]`): in a reranked answer, the ranks of rows in the index.
        note (`str`): what the user should know of this answer.
        tokens (`TokenScores`, *optional*): scores of every label of the target.
        prepared (`dict`): the target as the model got it, for its tokens.
    """

    target: Content
    rows: np.ndarray
    scores: np.ndarray
    stage: str = "index"
    whole: bool = True
    ranks: dict[int, str] = field(default_factory=dict)
    note: str = ""
    tokens: TokenScores | None = None
    prepared: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_lists(cls, row: Mapping[str, Any], target: Content, n_train: int) -> "Answer":
        """Read the scores that a target of a result keeps, those of a few rows from both ends.

        Args:
            row: the target with its score columns.
            target: what is shown of it.
            n_train: number of training rows, n.
        """
        found, ranks = dict[int, float](), dict[int, str]()
        for place in (0, 2):
            found |= dict(zip(row[TOP_K_COLUMNS[place]], row[TOP_K_COLUMNS[place + 1]], strict=True))
            ranks |= index_ranks(row, TOP_K_COLUMNS[place], RANK_COLUMNS[place // 2])
        numbers = np.array(sorted(found), dtype=np.int64)
        scores = np.array([found[number] for number in numbers.tolist()], dtype=np.float32)
        return cls(target, numbers, scores, str(row.get(STAGE_COLUMN) or "index"), len(numbers) == n_train, ranks)

    def ends(self, count: int, matching: np.ndarray | None) -> Ends:
        """List positions of the rows with the highest scores, from the highest down, and of those with the lowest.

        Rows of score 0 or of the other sign are left out. Among equal scores, the lower row number comes first.

        Args:
            count: rows of each end, at most.
            matching: numbers of the rows that may be listed, ascending; `None` allows all.
        """
        allowed = np.arange(len(self.rows)) if matching is None else np.flatnonzero(np.isin(self.rows, matching))
        found = []
        for sign in (1.0, -1.0):
            kept = allowed[sign * self.scores[allowed] > 0]
            order = np.argsort(-sign * self.scores[kept], kind="stable")[:count]
            found.append(kept[order].tolist())
        return Ends(*found)

    def shares(self, places: Sequence[int], tokenizer: Any) -> list[Token]:
        """Cut the target into tokens with their shares in the scores of some rows; empty where none are known.

        Args:
            places: positions of the rows in `rows`.
            tokenizer: decodes tokens.
        """
        if self.tokens is None or not places:
            return []
        text = self.target.texts[0][1] if self.target.texts else None
        shares = self.tokens.of_rows([int(self.rows[place]) for place in places])
        return tokens_of(self.prepared, text, tokenizer, self.tokens.positions, shares)


@dataclass(frozen=True)
class GroupScore:
    """The summed score of a group of training rows."""

    name: str
    rows: int
    total: float


class Session(ABC):
    """Something to look at: an index with its model, or a saved run.

    Attributes:
        title (`str`): the heading of the page.
        rows (`TrainRows`): the training rows.
        roots (`list[Path]`): directories below which image files of rows may be read.
        tokenizer: decodes tokens; `None` if there is none.
        scratch (`Path`, *optional*): where files of a question are written; by default among temporary files.
    """

    title: str
    rows: TrainRows
    roots: list[Path]
    tokenizer: Any = None
    scratch: Path | None = None

    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """Return names and values of what is known of the index or run."""

    @abstractmethod
    def self_influence(self) -> np.ndarray | None:
        """Return τ(z_i, z_i) of every training row, `(n,)`; `None` where it is not known."""

    def matching(self, wanted: RowFilter) -> np.ndarray | None:
        """Find the rows that match a filter; `None` allows all."""
        return None if wanted.empty else self.rows.matching(wanted)

    def groups(self, answer: Answer, column: str) -> list[GroupScore]:
        """Add up the scores of an answer over the groups of training rows that have the same value in a column.

        Args:
            answer: the answer.
            column: the column.

        Returns:
            The groups, from the highest sum down.

        Raises:
            ValueError: the values of the column form no groups, or rows are not at hand.
        """
        names, numbers = self.rows.group_names(column), self.rows.numbers()
        places = np.searchsorted(numbers, answer.rows)
        by_name = defaultdict[str, list[float]](list)
        for place, number, score in zip(places, answer.rows, answer.scores, strict=True):
            if place < len(numbers) and numbers[place] == number:
                by_name[names[place]].append(float(score))
        found = [GroupScore(name, len(scores), math.fsum(scores)) for name, scores in by_name.items()]
        return sorted(found, key=lambda group: (-group.total, group.name))


class RunSession(Session):
    """Shows the targets of a run that `hf-trak attribute` or `AttributionRun.save` has written, without the model."""

    def __init__(self, run: AttributionRun, title: str = "Which training rows did this?", roots: Sequence[Path] = ()):
        """
        Args:
            run (`AttributionRun`):
                Scores and rows.
            title (`str`, *optional*):
                Heading of the page.
            roots (`Sequence[Path]`, *optional*):
                Directories below which image files of rows may be read.
        """
        self.run = run
        self.title = title
        self.roots = list(roots)
        self.rows = TrainRows(run.train, run.n_train, run.train_rows)
        self._scored = stored(run.scored)
        self._columns = Columns.find(self._scored, text_columns=run.text_columns(self._scored))

    def __len__(self) -> int:
        """Return the number of targets."""
        return len(self.run.scored)

    def facts(self) -> list[tuple[str, str]]:
        return facts_shown(self.run.facts)

    def self_influence(self) -> np.ndarray | None:
        return self.run.self_influence

    def answer(self, target: int) -> Answer:
        """Read the scores of a target.

        Args:
            target: its row in the run.

        Raises:
            ValueError: there is no such target.
        """
        if not 0 <= target < len(self):
            raise ValueError(f"The target is {target}. Expected a number from 0 to {len(self) - 1}. Choose one.")
        row = self._scored[target]
        found = Answer.of_lists(row, content_of(row, self._columns), self.rows.count)
        if found.whole:
            return found
        note = f"The run keeps {len(found.rows):,} of {self.rows.count:,} scores of this target."
        return replace(found, note=note)
