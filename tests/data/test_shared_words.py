"""Words that texts share, against loops over all places, and BM25 against its formula and `bm25s`."""

import math
import random
import unicodedata

import numpy as np
import pytest

from hf_trak.data.shared_words import Run, WordIndex, Words


def longest(passage: list[str], first: int, last: int, text: list[str]) -> Run | None:
    """Compare all pairs of places: the longest sequence through the part of the passage, and its first place."""
    found = None
    for i in range(len(passage)):
        for j in range(len(text)):
            for count in range(1, min(len(passage) - i, len(text) - j) + 1):
                through = first < last and i < last and i + count > first
                if through and passage[i : i + count] == text[j : j + count]:
                    found = max(found or (0, 0), (count, -j))
    return None if found is None else Run(-found[1], found[0])


@pytest.mark.parametrize("words", ["ab", "abc", "abcdefgh"])
def test_longest_sequences_are_those_of_all_pairs_of_places(words: str) -> None:
    drawn = random.Random(0)
    for _ in range(30):
        texts = [drawn.choices(words, k=drawn.randint(0, 12)) for _ in range(5)]
        index = WordIndex(" ".join(text) for text in texts)
        passage = drawn.choices(words + "z", k=drawn.randint(0, 9))
        first = drawn.randint(0, len(passage))
        last = drawn.randint(first, len(passage))
        found = index.longest(passage, first, last)
        expected = {i: run for i, text in enumerate(texts) if (run := longest(passage, first, last, text))}
        assert dict(found) == expected
        assert [i for i, _ in found] == sorted(expected, key=lambda i: (-expected[i].count, i))
        assert index.longest(passage, first, last, 2) == found[:2]
        assert index.longest(passage) == index.longest(passage, 0, len(passage))


def test_words_have_no_case_and_no_punctuation() -> None:
    text = "The King's ship, HMS Ärger -- 首都 moved."
    found = Words.of(text)
    assert found.words == ("the", "king", "s", "ship", "hms", "ärger", "首", "都", "moved")
    assert [text[a:b].casefold() for a, b in found.ranges] == list(found.words)
    assert WordIndex(["nothing", text]).longest(["king", "s", "SHIP".casefold(), "sank"]) == [(1, Run(1, 3))]


def divided(text: str) -> list[str]:
    """Walk over the characters: marks and joiners go on with a word, and every character of Chinese is one."""
    words, open_word = [""], False
    for place, one in enumerate(text):
        kind, after = unicodedata.category(one)[0], unicodedata.category(text[place + 1 : place + 2] or " ")[0]
        alone = "\u3040" <= one <= "\u30ff" or "\u3400" <= one <= "\u9fff"
        if open_word and (kind == "M" or (one in "\u200c\u200d" and after in "LMN")):
            words[-1] += one
        elif kind in "LN" or one == "_":
            alone_before = bool(words[-1]) and "\u3040" <= words[-1][0] <= "\u9fff"
            if not open_word or alone or alone_before:
                words.append("")
            words[-1], open_word = words[-1] + one, True
        else:
            open_word = False
    return words[1:]


SCRIPTS = [
    "हिन्दी में लिखा", "वह घर का राजा है", "ภาษาไทย ที่นี่", "தமிழ் மொழி", "বাংলা ভাষা", "می\u200cخواهم رفت",
    "क्\u200dष क्\u200d ।", "naïve cafe\u0301 café", "한국어 " + unicodedata.normalize("NFD", "한국어"),
    "日本語です か\u3099く 𠮷野家", "don't 3.14 a_b \u0301x", "שָׁלוֹם עוֹלָם", "العَرَبِيَّة", "Việt Nam",
]  # fmt: skip


@pytest.mark.parametrize("text", SCRIPTS)
def test_words_go_on_through_marks(text: str) -> None:
    found = Words.of(text)
    assert [text[start:stop] for start, stop in found.ranges] == divided(text)
    for form in ("NFC", "NFD"):
        other = unicodedata.normalize(form, text)
        assert Words.of(other).words == found.words  # however it is encoded
        assert [other[a:b] for a, b in Words.of(other).ranges] == divided(other)
        assert WordIndex(["zzz", other]).longest(found.words) == [(1, Run(0, len(found.words)))]
        assert WordIndex(["zzz", text]).bm25(Words.of(other).words)[1] > 0
    assert len(Words.of("हिन्दी में लिखा").words) == 3 and Words.of("में").words != Words.of("म").words


def test_names_of_roles_are_no_words() -> None:
    chat = "user: Is it the assistant?\nassistant: the user is\nassistant\nfine"
    words = Words.of(chat)
    assert words.words == ("is", "it", "the", "assistant", "the", "user", "is", "fine")
    assert [chat[first:last].casefold() for first, last in words.ranges] == list(words.words)
    index = WordIndex(["user: yes\nassistant: no", "user: no"])
    assert index.longest(("assistant", "no")) == [(0, Run(1, 1)), (1, Run(0, 1))]
    assert not index.bm25(("assistant", "user")).any()


def test_no_texts_and_no_words() -> None:
    assert WordIndex([]).longest(["a"]) == [] and WordIndex([]).bm25(["a"]).shape == (0,)
    empty = WordIndex(["", "..."])
    assert empty.longest(["a"]) == [] and empty.bm25(["a"]).tolist() == [0, 0]


def drawn_texts() -> list[list[str]]:
    drawn = random.Random(1)
    return [drawn.choices("abcdefgh", k=drawn.randint(1, 12)) for _ in range(20)]


QUERIES = [["a", "b"], ["a", "zebra"], ["zebra"], [], ["a", "a", "c"]]


def test_bm25_is_its_formula() -> None:
    documents = drawn_texts()
    mean, k1, b = np.mean([len(one) for one in documents]), 1.5, 0.75

    def score(document: list[str], word: str) -> float:
        holders, count = sum(word in one for one in documents), document.count(word)
        rarity = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
        return rarity * count / (count + k1 * (1 - b + b * len(document) / mean)) if count else 0.0

    truth = [[sum(score(one, word) for word in query) for one in documents] for query in QUERIES]
    index = WordIndex(" ".join(one) for one in documents)
    np.testing.assert_allclose([index.bm25(query) for query in QUERIES], truth, rtol=1e-12)


def test_bm25_is_that_of_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s")
    documents = drawn_texts()
    peer, index = bm25s.BM25(), WordIndex(" ".join(one) for one in documents)
    peer.index(documents, show_progress=False)
    for query in filter(None, QUERIES):
        np.testing.assert_allclose(index.bm25(query), peer.get_scores(query), rtol=1e-5, atol=1e-6)
