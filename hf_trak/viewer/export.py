"""What is shown, as a file: CSV, JSON or Parquet."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from hf_trak.viewer.page import ShownAnswer
from hf_trak.viewer.session import Answer, Session

ExportFormat = Literal["csv", "json", "parquet"]
FORMATS: tuple[ExportFormat, ...] = ("csv", "json", "parquet")

_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def answer_rows(session: Session, answer: Answer, shown: ShownAnswer) -> list[dict[str, Any]]:
    """List what a page shows of an answer: rank, end, row number, score, label and whole texts of each row."""
    found = []
    for end, places in (("helped", shown.helped), ("harmed", shown.harmed)):
        for rank, place in enumerate(places, start=1):
            number = int(answer.rows[place])
            found.append(
                {
                    "end": end,
                    "rank": rank,
                    "row": number,
                    "score": float(answer.scores[place]),
                    **({"index_rank": answer.ranks.get(number)} if answer.ranks else {}),
                    **_contents(session, number),
                }
            )
    return found


def listed_rows(session: Session, numbers: Sequence[int], values: Any) -> list[dict[str, Any]]:
    """List training rows with their self-influence, if it is known."""
    return [
        {
            "row": int(number),
            **({} if values is None else {"self_influence": float(values[number])}),
            **_contents(session, int(number)),
        }
        for number in numbers
    ]


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


def _contents(session: Session, number: int) -> dict[str, Any]:
    content = session.rows.content(number)
    label = {} if session.rows.columns.label is None else {"label": content.label}
    return {**label, **{f"text.{name}": _encodable(text) for name, text in content.texts}}


def _encodable(text: str) -> str:
    """Replace lone surrogates, which no file format takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULAS):
        return f"'{value}"
    return value
