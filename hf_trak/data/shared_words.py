"""Words that texts share: the longest sequence of them, and BM25.

Both look at words alone, so that they show what an attribution adds to a search. Case and punctuation do not count.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_trak.runtime.checks import required

BM25_MISSING = "BM25 needs the package `bm25s`, which is not installed. Install it with `pip install bm25s`."

_CHARACTERS = "\u3040-\u30ff\u3400-\u9fff"  # of Japanese and Chinese, which put no spaces between words

_WORD = re.compile(rf"[{_CHARACTERS}]|[^\W{_CHARACTERS}]+")


@dataclass(frozen=True)
class Words:
    """The words of a text in lower case, and the range of characters of each."""

    words: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, text: str) -> "Words":
        """Divide a text into words.

        Args:
            text: the text.
        """
        found = list(_WORD.finditer(text))
        return cls(tuple(one[0].casefold() for one in found), tuple(one.span() for one in found))


@dataclass(frozen=True)
class Run:
    """Words in a row: `count` of them from `start` on."""

    start: int
    count: int


class SharedRuns:
    """Finds the longest sequences of words that a text shares with each of several spans."""

    def __init__(self, spans: Sequence[Sequence[str]]) -> None:
        """
        Args:
            spans: the words of each span.
        """
        self._places: dict[str, list[tuple[int, int]]] = {}
        for number, words in enumerate(spans):
            for place, word in enumerate(words):
                self._places.setdefault(word, []).append((number, place))

    def longest(self, words: Sequence[str]) -> dict[int, Run]:
        """Find the longest sequence, the first of several, for each span that shares a word.

        Args:
            words: the words of a text.

        Returns:
            Places in `words`, by the number of the span.
        """
        best: dict[int, Run] = {}
        before: dict[tuple[int, int], int] = {}
        for end, word in enumerate(words, 1):
            counts = {}
            for number, place in self._places.get(word, ()):
                counts[number, place] = count = before.get((number, place - 1), 0) + 1
                if number not in best or count > best[number].count:
                    best[number] = Run(end - count, count)
            before = counts
        return best


def bm25_scores(documents: Sequence[Sequence[str]], queries: Sequence[Sequence[str]]) -> np.ndarray:
    """Compute BM25 of documents for queries, both lists of words: `(queries, documents)`.

    Args:
        documents: the documents.
        queries: the queries.

    Raises:
        ImportError: `bm25s` is not installed.
    """
    index, nothing = required("bm25s", BM25_MISSING).BM25(), np.zeros(len(documents), dtype=np.float32)
    if not any(documents):
        return np.stack([nothing for _ in queries])
    index.index([list(one) for one in documents], show_progress=False)
    return np.stack([index.get_scores(list(one)) if one else nothing for one in queries])  # it wants a word or more
