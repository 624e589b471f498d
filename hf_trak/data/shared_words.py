"""Words that texts share: the longest sequences of them, and BM25.

Both look at words alone, so that they show what an attribution adds to a search. Case, punctuation, the names of roles
in a chat and the way in which a letter with marks is encoded do not count.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

_CHARACTERS = "\u3040-\u30ff\u3400-\u9fff"  # of Japanese and Chinese, which put no spaces between words

_MARKS = "".join(
    one for one in map(chr, [*range(0x20000), *range(0xE0100, 0xE01F0)]) if unicodedata.category(one)[0] == "M"
)
"""Accents, and vowels of Indic scripts, which belong to the letter before them and are no letters for `re`."""

_JOINERS = "\u200c\u200d"  # within words of Persian and of Indic scripts, to shape the letters beside them

_LETTER = rf"[^\W{_CHARACTERS}]"

_WORD = re.compile(  # no mark and no joiner comes before U+0300, which is seen sooner than that a character is one
    rf"{_LETTER}+(?:[^\x00-\u02ff](?:(?<=[{_MARKS}])|(?<=[{_JOINERS}])(?=[{_MARKS}]|{_LETTER})){_LETTER}*)*"
    rf"|[{_CHARACTERS}][{_MARKS}]*"
)

_ROLE = re.compile(r"^(?:system|user|assistant|tool)(?=:|$)", re.MULTILINE)
"""Names of those who speak in a chat, at the beginning of a turn as reports and chat templates write it."""

_BETWEEN, _UNKNOWN = -1, -2  # numbers of no word, which are equal to none that is looked for


def _without_roles(text: str) -> str:
    """Blank out the names of those who speak, which all chats share and nobody says."""
    return _ROLE.sub(lambda found: " " * len(found[0]), text)


def _folded(word: str) -> str:
    """Write a word in lower case, and composed: equal for words that differ in nothing that a reader sees."""
    if word.isascii():
        return word.casefold()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())


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
        found = list(_WORD.finditer(_without_roles(text)))
        return cls(tuple(_folded(one[0]) for one in found), tuple(one.span() for one in found))


@dataclass(frozen=True)
class Run:
    """Words in a row: `count` of them from `start` on."""

    start: int
    count: int


class _Numbers(dict[str, int]):
    """Numbers of words as they are written, the same for those that differ in case alone."""

    def __init__(self) -> None:
        self.folded: dict[str, int] = {}
        self._next = count()

    def __missing__(self, word: str) -> int:
        folded = _folded(word)
        if folded not in self.folded:
            self.folded[folded] = next(self._next)
        self[word] = self.folded[folded]
        return self[word]


class WordIndex:
    """The words of many texts, and the places of each word: finds sequences of words, and BM25.

    A word takes 8 bytes of memory, and twice as many while the index is made.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        """
        Args:
            texts: the texts, which are numbered from 0.
        """
        numbers, parts, lengths = _Numbers(), [np.array([_BETWEEN], dtype=np.int32)], list[int]()
        for text in texts:
            found = _WORD.findall(_without_roles(text))
            lengths.append(len(found))
            parts.append(np.fromiter(map(numbers.__getitem__, found), np.int32, len(found)))
            parts.append(parts[0])
        self._numbers = numbers.folded
        self._lengths = np.array(lengths, dtype=np.int64)
        self._words = np.concatenate(parts)  # those of all texts, with no word before, between and behind them
        self._starts = np.concatenate([[1], 1 + np.cumsum(self._lengths + 1)])
        self._places = np.argsort(self._words, kind="stable").astype(np.int32)
        self._bounds = np.searchsorted(self._words, np.arange(len(numbers.folded) + 1), sorter=self._places)

    def __len__(self) -> int:
        return len(self._lengths)

    def longest(
        self, words: Sequence[str], first: int = 0, last: int | None = None, count: int | None = None
    ) -> list[tuple[int, Run]]:
        """Find the texts that share the longest sequences of words with a passage.

        Args:
            words: the words of the passage, in lower case.
            first, last: a part of it, `words[first:last]`. Sequences go through a word of it, and may be longer.
            count: number of texts; `None` for all that share a word of the part.

        Returns:
            Numbers of texts, each with the longest sequence in it, the first of several; the longest of all first, of
            equals that of the lower number.
        """
        asked = np.array([_UNKNOWN, *(self._numbers.get(word, _UNKNOWN) for word in words), _UNKNOWN])
        best = np.zeros(len(self), dtype=np.int64)
        for place in range(first + 1, (len(words) if last is None else last) + 1):
            found = self._of(asked[place])
            before = np.zeros(len(found), dtype=np.int64)
            if place == first + 1:
                before = self._alike(found, asked[:place][::-1], -1)
            else:  # longer ones were found through the word before
                found = found[self._words[found - 1] != asked[place - 1]]
                before = before[: len(found)]
            if not len(found):
                continue
            counts = 1 + before + self._alike(found, asked[place + 1 :], 1)
            # The highest of these has most words, and is the first of those.
            ranked = counts * len(self._words) + len(self._words) - 1 - (found - before)
            texts = self._texts_of(found)
            heads = np.flatnonzero(np.diff(texts, prepend=-1))
            best[texts[heads]] = np.maximum(best[texts[heads]], np.maximum.reduceat(ranked, heads))
        order = np.argsort(-(best // len(self._words)), kind="stable")[:count]
        sequences = list[tuple[int, Run]]()
        for text in order[best[order] > 0].tolist():
            many, rest = divmod(int(best[text]), len(self._words))
            sequences.append((text, Run(len(self._words) - 1 - rest - int(self._starts[text]), many)))
        return sequences

    def bm25(self, words: Sequence[str]) -> np.ndarray:
        """Compute BM25 of all texts, `(texts,)`, as Lucene does, with k₁ = 1.5 and b = 0.75.

        Args:
            words: the words of the query, in lower case.
        """
        scores, n = np.zeros(len(self)), len(self)
        relative = self._lengths / max(float(self._lengths.mean()), 1e-9) if n else scores
        for word, times in Counter(words).items():
            texts, counts = np.unique(self._texts_of(self._of(self._numbers.get(word, _UNKNOWN))), return_counts=True)
            rarity = np.log(1 + (n - len(texts) + 0.5) / (len(texts) + 0.5))
            scores[texts] += times * rarity * counts / (counts + 1.5 * (0.25 + 0.75 * relative[texts]))
        return scores

    def _of(self, number: int) -> np.ndarray:
        """List the places of a word, ascending."""
        if number < 0:
            return self._places[:0]
        return self._places[self._bounds[number] : self._bounds[number + 1]]

    def _texts_of(self, places: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._starts, places, side="right") - 1

    def _alike(self, places: np.ndarray, words: np.ndarray, step: int) -> np.ndarray:
        """Count the words that follow each place as they do in a passage, forwards or backwards."""
        counts, going = np.zeros(len(places), dtype=np.int64), np.arange(len(places))
        for offset, word in enumerate(words, 1):
            going = going[self._words[places[going] + step * offset] == word]
            if not len(going):
                break
            counts[going] = offset
        return counts
