"""What it takes to find the rows that share the longest sequences of words with what a model says, and BM25.

    python benchmarks/words.py --rows 100000 --words 100

Rows are drawn from the words of Python's documentation, and some of them repeat what is asked. `--loops` compares the
sequences with those of a loop over all places of as many rows.
"""

import argparse
import random
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from hf_trak.data.shared_words import WordIndex, Words


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return processor seconds and the result."""
    begun = time.process_time()
    found = run()
    return time.process_time() - begun, found


def longest(passage: list[str], first: int, last: int, text: list[str]) -> int:
    """Return the number of words of the longest sequence through a part, by dynamic programming over all places."""
    best, before = 0, np.zeros(len(passage) + 1, dtype=int)
    words = np.array([*passage, ""])
    ends = np.arange(len(words))
    for word in text:
        now = np.where(words == word, np.roll(before, 1) + 1, 0)
        now[-1] = 0
        through = now[(ends >= first) & (ends - now + 1 < last)]
        best = max(best, int(through.max(initial=0)))
        before = now
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--words", type=int, default=100, help="words of a row")
    parser.add_argument("--answer", type=int, default=50, help="words of an answer")
    parser.add_argument("--loops", type=int, default=300, help="rows to compare with loops")
    given = parser.parse_args()
    drawn = random.Random(0)
    known = Words.of(" ".join(topics.values())).words  # as often as Python says them
    answer = drawn.choices(known, k=given.answer)
    rows = []
    for number in range(given.rows):
        row = drawn.choices(known, k=given.words)
        if number % 10 == 0:
            start, place = drawn.randrange(given.answer), drawn.randrange(given.words)
            copied = answer[start : start + drawn.randrange(1, 20)]
            row[place : place + len(copied)] = copied
        rows.append(row)
    seconds, index = timed(lambda: WordIndex(" ".join(row) for row in rows))
    print(f"{given.rows:,} rows of {given.words} words read in {seconds:.1f} s")
    seconds, whole = timed(lambda: index.longest(answer, count=5))
    print(f"an answer of {given.answer} words asked in {seconds:.2f} s: {[run.count for _, run in whole]} words")
    seconds, _ = timed(lambda: [index.longest(answer, i, i + 1, 5) for i in range(given.answer)])
    print(f"each of its words asked in {seconds / given.answer:.3f} s")
    seconds, _ = timed(lambda: index.bm25(answer))
    print(f"BM25 of the answer in {seconds:.2f} s")
    few = WordIndex(" ".join(row) for row in rows[: given.loops])
    for first, last in ((0, given.answer), (10, 11), (5, 20)):
        found = {number: run.count for number, run in few.longest(answer, first, last)}
        truth = {i: many for i, row in enumerate(rows[: given.loops]) if (many := longest(answer, first, last, row))}
        print(
            f"words {first} to {last}: {'equal to' if found == truth else 'OTHER THAN'} loops over {given.loops} rows"
        )


if __name__ == "__main__":
    main()
