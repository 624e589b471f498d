"""What every session of the viewer has: training rows, answers, facts and self-influence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.report.content import Content
from hf_trak.viewer.token_parts import Token, TokenScores, tokens_of
from hf_trak.viewer.train_rows import RowFilter, TrainRows


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

    def ends(self, count: int, matching: np.ndarray | None) -> tuple[list[int], list[int]]:
        """List positions of the rows with the highest scores, from the highest down, and of those with the lowest.

        Rows of score 0 or of the other sign are left out. Among equal scores, the lower row number comes first.

        Args:
            count: rows of each end, at most.
            matching: numbers of the rows that may be listed, ascending; `None` allows all.
        """
        allowed = np.arange(len(self.rows)) if matching is None else np.flatnonzero(np.isin(self.rows, matching))
        found = []
        for sign in (1.0, -1.0):
            values = sign * self.scores[allowed]
            kept = allowed[values > 0]
            order = np.argsort(-sign * self.scores[kept], kind="stable")[:count]
            found.append([int(place) for place in kept[order]])
        return found[0], found[1]

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
    """

    title: str
    rows: TrainRows
    roots: list[Path]
    tokenizer: Any = None

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
        totals, sizes = dict[str, float](), dict[str, int]()
        for place, number, score in zip(places, answer.rows, answer.scores, strict=True):
            if place < len(numbers) and numbers[place] == number:
                name = names[place]
                totals[name] = totals.get(name, 0.0) + float(score)
                sizes[name] = sizes.get(name, 0) + 1
        found = [GroupScore(name, sizes[name], total) for name, total in totals.items()]
        return sorted(found, key=lambda group: (-group.total, group.name))
