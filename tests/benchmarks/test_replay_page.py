"""The page of replayed runs shows the figures that are stored."""

import json
import sys

import pytest
from doc_pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import replay


def test_tables_of_the_page() -> None:
    text = replay.PAGE.read_text("utf-8")
    assert replay.page(text, json.loads(replay.RESULTS.read_text())) == text


@pytest.mark.parametrize("share", [*replay.SHARES])
def test_the_best_of_a_row_is_bold(share: str) -> None:
    results = {"lr": {
        "about": {"title": "one", "parameters": 1000, "rows": 10, "steps": 2, "losses": [2.0, 1.0], "seconds": 1.0},
        "retrainings": {share: 3},
        "methods": {"index": {"seconds": 1, share: [-0.5, -0.6, 0.0]}, "recipe": {"seconds": 2, share: [1, 0.9, 1]}},
    }}  # fmt: skip
    header, _, row = replay.tables(results)[share].splitlines()
    shown = {name.strip(): cell.strip() for name, cell in zip(header.split("|"), row.split("|"), strict=True)}
    assert shown.pop(share) == "one"
    assert {name: cell for name, cell in shown.items() if cell} == {
        "index": "−.50 (−.60–.00)",
        "recipe": "**1.00** (.90–1.00)",
    }


def test_every_case_has_figures() -> None:
    assert set(json.loads(replay.RESULTS.read_text())) == set(replay.CASES)
