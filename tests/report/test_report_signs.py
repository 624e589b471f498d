"""Sides of a report have scores of their sign, and the page of one target is visible in any frame."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from kit.grid import image_grid
from kit.outcome import attributions
from test_report import Elements, with_scores

from hf_trak.report import AttributionRun, write_report
from hf_trak.report.page import target_page
from hf_trak.report.views import RunViews

SCORES = torch.tensor([[3.0, -1.0, 0.0, 2.0], [2.0, -2.0, 0.0, -1.0], [1.0, -3.0, 0.0, 1.0]])
"""Three training rows for four targets: all scores positive, all negative, all zero, and one negative."""


@pytest.fixture
def run() -> AttributionRun:
    train = Dataset.from_dict({"text": ["first", "second", "third"]})
    targets = Dataset.from_dict({"text": ["up", "down", "none", "both"]})
    return AttributionRun(with_scores(targets, SCORES, 3), train, None, None, None, {})


def test_harmful_rows_have_negative_scores(run: AttributionRun, tmp_path: Path) -> None:
    views = RunViews(run)
    sides = [
        [[item.score for item in side] for side in (view.helped, view.harmed)] for view in map(views.target, range(4))
    ]
    assert sides == [
        [["+3", "+2", "+1"], []],
        [[], ["−3", "−2", "−1"]],
        [[], []],
        [["+2", "+1"], ["−1"]],
    ]
    text = Elements(write_report(run, tmp_path / "report.html").read_text()).text
    assert text.count("No training row has a negative score.") == 2
    assert text.count("No training row has a positive score.") == 2


def test_recipes_list_the_same_sides(run: AttributionRun) -> None:
    found = attributions(run.scored, range(4), 3, lambda row: {}, lambda row: {})
    rows = [[[item["row"] for item in entry[side]] for side in ("helped_most", "harmed_most")] for entry in found]
    assert rows == [[[0, 1, 2], []], [[], [2, 1, 0]], [[], []], [[0, 2], [1]]]


def test_pictures_have_the_same_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = {"image": [[[float(i), 1.0], [0.0, 1.0]] for i in range(3)], "label": [0, 1, 2]}
    targets = Dataset.from_dict({"image": pictures["image"][:1] * 4, "label": [0] * 4})
    drawn: list[tuple[int, float]] = []

    def note(axes: Any, image: Any, row: int, score: float, *labels: Any) -> None:
        drawn.append((row, score))

    monkeypatch.setattr("kit.grid._draw_example", note)
    image_grid(with_scores(targets, SCORES, 3), Dataset.from_dict(pictures), range(4), tmp_path / "grid.png", n=3)
    assert drawn == [(0, 3), (1, 2), (2, 1), (2, -3), (1, -2), (0, -1), (0, 2), (2, 1), (1, -1)]


def test_the_page_of_one_target_leaves_no_part_unrendered(run: AttributionRun) -> None:
    """With `content-visibility: auto` a browser need not render what it takes to be outside of the window.

    In headless Chromium that is everything in the frame of a notebook. So the property is for articles in the list of
    a report alone, which a frame does not have.
    """
    style = re.sub(r"/\*.*?\*/", "", (files("hf_trak.report") / "templates" / "report.css").read_text(), flags=re.S)
    lazy = re.findall(r"([^{}]*)\{[^{}]*content-visibility:\s*(?:auto|hidden)[^{}]*\}", style)
    assert [selector.strip() for selector in lazy] == ["#targets .target"]
    views = RunViews(run)
    elements = Elements(target_page(views.target(0), views.book.pictures)).tags
    assert not [tag for tag, attributes in elements if attributes.get("id") == "targets"]
    assert not [tag for tag, attributes in elements if "content-visibility" in (attributes.get("style") or "")]
    assert any(tag == "article" for tag, _ in elements)
