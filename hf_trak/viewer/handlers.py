"""The actions behind the controls of the page: plain values in, documents and files out. Nothing here knows Gradio."""

import csv
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hf_trak.errors import HfTrakError
from hf_trak.report.content import visible
from hf_trak.viewer.index_session import IndexSession, Question
from hf_trak.viewer.page import answer_page, facts_page, frame, groups_page, rows_page
from hf_trak.viewer.session import Answer, RunSession, Session
from hf_trak.viewer.train_rows import RowFilter

ExportFormat = Literal["csv", "json", "parquet"]

FORMATS: tuple[ExportFormat, ...] = ("csv", "json", "parquet")


_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def write_rows(rows: Sequence[Mapping[str, Any]], directory: Path, form: str) -> Path:
    """Write rows into a file.

    In CSV, texts that a spreadsheet would take for a formula get an apostrophe in front.

    Args:
        rows: the rows, with the same keys in each.
        directory: where the file `hf_trak-rows.<form>` is written.
        form: `"csv"`, `"json"` or `"parquet"`.

    Returns:
        The file.

    Raises:
        ValueError: there is nothing to write, or no such format.
    """
    if form not in FORMATS:
        raise ValueError(f"The format is {form!r:.40}. Expected one of {list(FORMATS)}. Choose one.")
    if not rows:
        raise ValueError("Nothing is shown. Expected rows to export. Ask a question first.")
    path = directory / f"hf_trak-rows.{form}"
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form == "parquet":
        columns = {name: [row.get(name) for row in rows] for name in names}
        pq.write_table(pa.table(columns), path)
    elif form == "json":
        path.write_text(json.dumps(list(rows), ensure_ascii=True, indent=1) + "\n", encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([_cell(name) for name in names])
            writer.writerows([[_cell(row.get(name)) for name in names] for row in rows])
    return path


def _encodable(text: str) -> str:
    """Replace lone surrogates, which no file format takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value


ROWS_PER_PAGE = 20

MOST_ROWS = 100

"""Most rows of each end that are shown or exported."""


ANY_LABEL = "any"

PREDICTION = "the model’s prediction"

BY_NUMBER, BY_INFLUENCE = "row number", "self-influence"


EXPECTED_ERRORS = (HfTrakError, ValueError, TypeError, OSError, ImportError, RuntimeError)

"""Errors whose text says what to do, as on the command line. Of others the page says only that something failed."""


_LONGEST_MESSAGE = 1500

_LONGEST_SEARCH = 200


def message_of(error: Exception) -> str:
    """Return the text of an error as HTML, since the page shows messages as such."""
    return escape(visible(f"{error}"[:_LONGEST_MESSAGE]) or type(error).__name__)


@dataclass(frozen=True)
class Listing(RowFilter):
    """The filter of a list of rows, and how many are shown of each end."""

    count: int = 10

    @classmethod
    def of(cls, count: Any, text: Any, label: Any) -> "Listing":
        """Read the values of the controls.

        Raises:
            ValueError: a value is out of range.
        """
        number = int(count or 0)
        if not 1 <= number <= MOST_ROWS:
            raise ValueError(f"The number of rows is {count!r:.40}. Expected 1 to {MOST_ROWS}. Change it.")
        wanted = str(text or "")
        if len(wanted) > _LONGEST_SEARCH:
            raise ValueError(
                f"The text to search has {len(wanted)} characters. Expected at most {_LONGEST_SEARCH}. Shorten it."
            )
        return cls(wanted, None if label in (None, ANY_LABEL, "") else str(label), number)


class Handlers:
    """Answers what the page asks of one session."""

    def __init__(self, session: Session, directory: Path) -> None:
        """
        Args:
            session: the index or run.
            directory: where exported files are written, each in a directory of its own.
        """
        self.session = session
        self._directory = directory

    def ask(self, values: Mapping[str, Any]) -> Answer:
        """Answer a question about a new target.

        Args:
            values: values of the controls, by name: `text.<column>`, `upload`, `label`, `predicted`, `words`,
                `checkpoints`, `ridge`, `rerank` and `tokens`.

        Raises:
            ValueError: a value is out of range.
            HfTrakError: the question cannot be answered.
        """
        session = self.session
        if not isinstance(session, IndexSession):
            raise ValueError("This is a saved run, without its model. Expected an index. Start the viewer with one.")
        texts = {name[5:]: str(value or "") for name, value in values.items() if name.startswith("text.")}
        label = values.get("label")
        chosen = values.get("checkpoints")
        return session.ask(
            Question(
                texts=texts,
                upload=values.get("upload"),
                label=None if label in (None, PREDICTION, "") else str(label),
                predicted=bool(values.get("predicted")),
                words=str(values.get("words") or "") or None,
                model_ids=None if chosen is None else [int(one) for one in chosen],
                lambda_relative=_ridge(values.get("ridge")),
                rerank=int(values["rerank"]) if values.get("rerank") else None,
                tokens=bool(values.get("tokens")),
            )
        )

    def target(self, number: Any) -> Answer:
        """Read a target of a saved run.

        Raises:
            ValueError: there is none of this number, or this is no saved run.
        """
        if not isinstance(self.session, RunSession):
            raise ValueError("This is an index. Expected a saved run, whose targets have numbers.")
        return self.session.answer(-1 if number is None else int(number))

    def answer(self, answer: Answer, listing: Listing) -> str:
        """Show an answer."""
        return frame(answer_page(self.session, answer, listing.count, listing)[0], "Answer")

    def rows(self, listing: Listing, order: str, page: Any) -> str:
        """Show training rows.

        Args:
            listing: what they have to match.
            order: by number, or by self-influence, the highest first.
            page: number of the page, from 1.
        """
        shown, values, first, total = self._listed(listing, order, page)
        return frame(rows_page(self.session, shown, values, first, total), "Training rows")

    def groups(self, answer: Answer | None, column: str | None) -> str:
        """Show the summed scores of groups of training rows.

        Raises:
            ValueError: there is no answer yet, or no such column.
        """
        found = self.session.groups(_given(answer), str(column or ""))
        return frame(groups_page(self.session, found, str(column), _given(answer).whole), "Groups")

    def facts(self) -> str:
        """Show what is known of the index or run."""
        return frame(facts_page(self.session), "About")

    def export_answer(self, answer: Answer | None, listing: Listing, form: str) -> str:
        """Write the rows that are shown of an answer, and return the path of the file."""
        return self._written(self.answer_rows(_given(answer), listing), form)

    def answer_rows(self, answer: Answer, listing: Listing) -> list[dict[str, Any]]:
        """List what is shown of an answer: end, rank, row number, score, label and whole texts of each row."""
        shown = answer.ends(listing.count, self.session.matching(listing))
        return [
            {
                "end": end,
                "rank": rank,
                "row": (number := int(answer.rows[place])),
                "score": float(answer.scores[place]),
                **({"index_rank": answer.ranks.get(number)} if answer.ranks else {}),
                **self._contents(number),
            }
            for end, places in (("helped", shown.helped), ("harmed", shown.harmed))
            for rank, place in enumerate(places, start=1)
        ]

    def export_rows(self, listing: Listing, order: str, page: Any, form: str) -> str:
        """Write the training rows of a page, and return the path of the file."""
        shown, values, _, _ = self._listed(listing, order, page)
        known = [{} if values is None else {"self_influence": float(values[number])} for number in shown]
        rows = [{"row": number, **one, **self._contents(number)} for number, one in zip(shown, known, strict=True)]
        return self._written(rows, form)

    def _contents(self, number: int) -> dict[str, Any]:
        content = self.session.rows.content(number)
        label = {} if self.session.rows.columns.label is None else {"label": content.label}
        return {**label, **{f"text.{name}": _encodable(text) for name, text in content.texts}}

    def _listed(self, listing: Listing, order: str, page: Any) -> tuple[list[int], np.ndarray | None, int, int]:
        """Return the rows of a page, the self-influence of all, the place of the first, and how many match."""
        numbers, values = self.session.rows.matching(listing), None
        if order == BY_INFLUENCE:
            if (values := self.session.self_influence()) is None:
                raise ValueError(
                    "The run has no self-influence. Expected it, to sort by. Attribute again without "
                    "`--no_self_influence`, or sort by row number."
                )
            numbers = numbers[np.argsort(-values[numbers], kind="stable")]
        first = ROWS_PER_PAGE * max(0, int(page or 1) - 1)
        return numbers[first : first + ROWS_PER_PAGE].tolist(), values, first, len(numbers)

    def _written(self, rows: Sequence[Mapping[str, Any]], form: str) -> str:
        return str(write_rows(rows, Path(tempfile.mkdtemp(dir=self._directory)), form))


def _given(answer: Answer | None) -> Answer:
    if answer is None:
        raise ValueError("There is no answer yet. Expected one to look at. Ask about a target first.")
    return answer


def _ridge(value: Any) -> float | None:
    if value in (None, ""):
        return None
    ridge = float(value)
    if not 0 < ridge <= 1e6:
        raise ValueError(f"λ is {value!r:.40}. Expected a number above 0, at most 1,000,000. Change it.")
    return ridge
