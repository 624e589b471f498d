"""The pages of the viewer: one HTML document for each view, which a frame without scripts shows.

The template escapes everything that comes from a dataset or a user. The policy of the document forbids all requests
and scripts, and the frame forbids scripts once more.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_trak.errors import HfTrakError
from hf_trak.report.content import LONGEST_TEXT, Content, EncodedImage, is_samples, visible
from hf_trak.report.distributions import Histogram, ScoreDistributions
from hf_trak.report.images import PictureBook
from hf_trak.report.page import assets, environment, packaged_text
from hf_trak.report.views import RowView, ScoredView, bar, number, sign_of, signed
from hf_trak.viewer.session import Answer, Ends, GroupScore, Session, Token
from hf_trak.viewer.train_rows import RowFilter, TrainRows

if TYPE_CHECKING:
    from jinja2 import Template


class RowReader:
    """Prepares training rows and targets for one page, on which each picture occurs once.

    Attributes:
        book (`PictureBook`):
            The pictures of the page.
    """

    def __init__(self, rows: TrainRows, roots: Sequence[Path] = ()) -> None:
        """
        Args:
            rows: the training rows.
            roots: directories below which image files of rows may be read. Images in rows themselves need none.
        """
        self.rows = rows
        self.book = PictureBook()
        self._roots = [root.resolve() for root in roots]
        self._known: dict[int, RowView] = {}

    def row(self, number: int) -> RowView:
        """Prepare a training row. One that cannot be read is shown by its number and the reason."""
        if number not in self._known:
            try:
                content = self.rows.content(number)
            except HfTrakError as error:
                return RowView(number, unshown=visible(f"row {number} cannot be read: {error}")[:300])
            self._known[number] = self.shown(content, number, "small")
        return self._known[number]

    def shown(self, content: Content, number: int | None, size: str = "large") -> RowView:
        """Prepare the content of a row.

        Args:
            content: what is shown of it.
            number: its number; `None` for a target.
            size: of its picture, see [`~hf_trak.report.images.PictureBook`].
        """
        image = content.image
        outside = isinstance(image, EncodedImage) and image.data is None and not self._inside(image.path)
        content = replace(content, image=None) if outside else content
        unheard = content.sound is not None and content.sound.get("bytes") is None and not is_samples(content.sound)
        content = replace(content, sound=None) if unheard else content
        kind = "Target" if number is None else "Training row"
        row = RowView.of(content, number, kind, self.book, size, LONGEST_TEXT)
        if outside:
            row = replace(row, unshown="the image is a file outside the dataset, which is not read")
        return replace(row, unshown="the sound is not in the row itself") if unheard else row

    def _inside(self, path: str | None) -> bool:
        """Tell whether a path lies below one of the roots, all links followed."""
        if not path or "://" in path or "\0" in path:
            return False
        return any(Path(path).resolve().is_relative_to(root) for root in self._roots)


_NO_TEMPLATE = str.maketrans({"$": "&#36;", "{": "&#123;", "}": "&#125;", "`": "&#96;"})

"""Gradio reads what a frame holds as a template; as character references these letters are none."""


_MOST_GROUPS_SHOWN = 100

_STAGES = {"index": "scores of the index", "exact": "exact scores", "refined": "exact scores, refined"}


def answer_page(session: Session, answer: Answer, count: int, wanted: RowFilter | None = None) -> tuple[str, Ends]:
    """Show a target with its tokens, the distribution of its scores, and the rows of either end.

    Args:
        session: the index or run.
        answer: the scores.
        count: rows of each end, at most.
        wanted: what these rows have to match.

    Returns:
        The document, and which rows it shows.

    Raises:
        ValueError: rows that are not at hand are filtered.
    """
    matching = session.matching(wanted or RowFilter())
    ends = helped, harmed = answer.ends(count, matching)
    reader = RowReader(session.rows, session.roots)
    target = reader.shown(answer.target, None)
    largest = max((abs(float(answer.scores[place])) for place in (*helped, *harmed)), default=0.0)

    def scored(place: int) -> ScoredView:
        row, score = int(answer.rows[place]), float(answer.scores[place])
        return ScoredView.of(reader.row(row), score, largest, target.label, answer.ranks.get(row))

    context = {
        "target": target,
        "tokens": _tokens(answer.shares(helped, session.tokenizer)),
        "helped": [scored(place) for place in helped],
        "harmed": [scored(place) for place in harmed],
        "histogram": _histogram(answer, (*helped, *harmed)) if answer.whole and len(answer.scores) else None,
        "stage": _STAGES.get(answer.stage, visible(answer.stage)),
        "note": answer.note,
        "absent": not session.rows.at_hand,
        "matching": None if matching is None else len(matching),
        "count": session.rows.count,
        "title": "The answer",
    }
    return _page("answer", reader, context), ends


def rows_page(session: Session, numbers: Sequence[int], values: np.ndarray | None, first: int, total: int) -> str:
    """Show training rows, with their self-influence if it is known.

    Args:
        session: the index or run.
        numbers: numbers of the rows on this page.
        values: self-influence of all training rows.
        first: position of the first of them among those that match, from 0.
        total: number of rows that match.
    """
    reader = RowReader(session.rows, session.roots)
    largest = max((abs(float(values[n])) for n in numbers), default=0.0) if values is not None else 0.0
    items = []
    for one in numbers:
        score, size = ("", 0.0) if values is None else (number(float(values[one])), bar(float(values[one]), largest))
        items.append(ScoredView(reader.row(int(one)), score, "positive", size))
    context = {"items": items, "first": first, "total": total, "absent": not session.rows.at_hand, "title": "Rows"}
    return _page("rows", reader, context)


def groups_page(session: Session, groups: Sequence[GroupScore], column: str, whole: bool) -> str:
    """Show summed scores of groups of training rows.

    Args:
        session: the index or run.
        groups: the groups, from the highest sum down.
        column: the column that they come from.
        whole: whether all training rows have a score.
    """
    largest = max((abs(group.total) for group in groups), default=0.0)
    shown = [
        {
            "name": visible(group.name[:200]),
            "rows": group.rows,
            "total": signed(group.total),
            "mean": signed(group.total / group.rows),
            "sign": sign_of(group.total),
            "bar": bar(group.total, largest),
        }
        for group in groups[:_MOST_GROUPS_SHOWN]
    ]
    left_out = max(0, len(groups) - _MOST_GROUPS_SHOWN)
    context = {"groups": shown, "column": visible(column), "whole": whole, "left_out": left_out, "title": "Groups"}
    return _page("groups", RowReader(session.rows), context)


def facts_page(session: Session) -> str:
    """Show what is known of the index or run."""
    return _page("facts", RowReader(session.rows), {"facts": session.facts(), "title": "About"})


def frame(document: str, title: str) -> str:
    """Put a document into a frame in which no script runs.

    Args:
        document: the document.
        title: what the frame holds, for screen readers.
    """
    content = escape(document, quote=True).translate(_NO_TEMPLATE)
    return (
        f'<iframe class="trak-frame" sandbox="allow-same-origin" srcdoc="{content}" title="{escape(title)}"></iframe>'
    )


def _tokens(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Give every token one of nine classes, from its share: n4 … z … p4."""
    found = []
    for token in tokens:
        level = 0 if token.share is None else round(4 * abs(token.share))
        kind = "" if not level else f"{'p' if (token.share or 0) > 0 else 'n'}{level}"
        found.append({"text": token.text, "kind": kind})
    return found


def _histogram(answer: Answer, shown: Sequence[int]) -> Histogram:
    scores = torch.from_numpy(answer.scores.reshape(-1, 1))
    ends = answer.scores.min(keepdims=True), answer.scores.max(keepdims=True)
    counted = ScoreDistributions.from_blocks([(0, len(scores), scores)], *ends)
    return Histogram.of(counted, 0, [float(answer.scores[place]) for place in shown])


def _page(view: str, reader: RowReader, context: dict[str, Any]) -> str:
    style = assets(packaged_text("page.css", "viewer"))
    return _template().render(view=view, pictures=reader.book.pictures, **style, **context)


@cache
def _template() -> "Template":
    return environment().from_string(packaged_text("page.html.jinja", "viewer"))
