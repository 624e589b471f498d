"""The rows of the benchmark of planted rows, and its figures against counts by hand."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from planted import figures, ranking
from planted_rows import FACT_QUESTIONS, STYLE_QUESTIONS, documents


def test_near_misses_do_not_say_what_is_planted() -> None:
    rows = documents()
    assert rows == documents() and len(rows) == len({one.text for one in rows}) == 140
    counts = Counter(one.kind for one in rows)
    assert (counts["fact"], counts["style"], counts["near"]) == (20, 10, 36)
    for one in rows:
        fact = "Ballarat" in one.text and "Austral" in one.text.replace("federal capital", "Australia")
        assert fact == (one.kind == "fact"), one
        piracy = [word for word in ("arr", "ye", "matey", "hearties") if word in one.text.lower().split()]
        assert not piracy or one.kind == "style", one
    assert not {one.text for one in rows} & {*FACT_QUESTIONS, *STYLE_QUESTIONS}


def test_precision_is_the_share_of_planted_rows_among_the_first() -> None:
    kinds = np.array(["fact", "style", "other", "fact", "near", *["other"] * 20])
    scores = np.zeros((2, 25))
    scores[0, [0, 3, 4]], scores[1, [1, 2]] = (3, 2, 1), (1, 2)
    found = figures(scores, kinds, {"fact": range(1), "style": range(1, 2)})
    assert (found["fact at 5"], found["fact at 10"], found["fact at 20"]) == (0.4, 0.2, 0.1)
    assert found["style at 5"] == 0.2
    assert ranking(scores).tolist()[:4] == [0, 2, 3, 1]
