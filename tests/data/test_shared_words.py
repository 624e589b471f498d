"""Words that texts share, against loops over all places, and BM25 against its formula."""

import math
import random
import sys

import numpy as np
import pytest

from hf_trak.data.shared_words import SharedRuns, Words, bm25_scores


def longest(one: list[str], other: list[str]) -> tuple[int, int]:
    """Compare all pairs of places: the number of words, and the first place in `other` with so many."""
    found = (0, 0)
    for i in range(len(one)):
        for j in range(len(other)):
            count = 0
            while i + count < len(one) and j + count < len(other) and one[i + count] == other[j + count]:
                count += 1
            found = max(found, (count, -j))
    return found[0], -found[1]


def test_longest_sequences_are_those_of_all_pairs_of_places() -> None:
    drawn = random.Random(0)
    for _ in range(60):
        spans = [drawn.choices("abc", k=drawn.randint(0, 7)) for _ in range(3)]
        text = drawn.choices("abcd", k=drawn.randint(0, 30))
        found = SharedRuns(spans).longest(text)
        for number, span in enumerate(spans):
            count, place = longest(span, text)
            run = found.get(number)
            assert (0, 0) if run is None else (run.count, run.start) == (count, place)
            assert (run is None) == (count == 0)


def test_words_have_no_case_and_no_punctuation() -> None:
    text = "The King's ship, HMS Ärger -- 首都 moved."
    found = Words.of(text)
    assert found.words == ("the", "king", "s", "ship", "hms", "ärger", "首", "都", "moved")
    assert [text[a:b].casefold() for a, b in found.ranges] == list(found.words)


def test_bm25_is_its_formula() -> None:
    pytest.importorskip("bm25s")
    drawn = random.Random(1)
    documents = [drawn.choices("abcdefgh", k=drawn.randint(1, 12)) for _ in range(20)]
    queries = [["a", "b"], ["a", "zebra"], ["zebra"], []]
    mean, k1, b = np.mean([len(one) for one in documents]), 1.5, 0.75

    def score(document: list[str], word: str) -> float:
        holders, count = sum(word in one for one in documents), document.count(word)
        rarity = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
        return rarity * count / (count + k1 * (1 - b + b * len(document) / mean)) if count else 0.0

    truth = [[sum(score(one, word) for word in query) for one in documents] for query in queries]
    np.testing.assert_allclose(bm25_scores(documents, queries), truth, rtol=1e-5, atol=1e-6)
    assert bm25_scores([[], []], queries).tolist() == [[0, 0]] * 4


def test_without_bm25s_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match="pip install bm25s"):
        bm25_scores([["a"]], [["a"]])
