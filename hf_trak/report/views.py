"""Views: everything that a page shows, as plain values for the templates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_trak.report.content import (
    LONGEST_TEXT,
    Columns,
    Content,
    Piece,
    Span,
    content_of,
    pieces,
    plain,
    stored,
    visible,
)
from hf_trak.report.distributions import Histogram
from hf_trak.report.images import PictureBook, Thumbnail, UnreadableImageError
from hf_trak.report.run import AttributionRun
from hf_trak.report.sounds import MOST_CHARACTERS_OF_PAGE, UnreadableSoundError, as_uri
from hf_trak.scores.scored_dataset import RANK_COLUMNS, TOP_K_COLUMNS, WORDS_COLUMN

_LONGEST_LABEL = 60
EXAMPLE_TEXT = 420
"""Characters of the text of a training row that are shown."""


@dataclass(frozen=True)
class TextView:
    """One text of a row."""

    column: str
    pieces: list[Piece]
    left_out: int

    @property
    def marked(self) -> bool:
        """Tell whether a span is marked."""
        return any(piece.marked for piece in self.pieces)


@dataclass(frozen=True)
class RowView:
    """A training row or a target. `alt` describes its picture in words."""

    row: int | None
    """Its number; `None` for a target without one."""
    alt: str = ""
    texts: tuple[TextView, ...] = ()
    label: str | None = None
    prediction: str | None = None
    picture: Thumbnail | None = None
    sound: str | None = None
    """A `data:` URL."""
    unshown: str | None = None
    """The part of the row that cannot be shown, and the reason."""

    @classmethod
    def of(cls, content: Content, row: int | None, kind: str, book: PictureBook, size: str, limit: int) -> "RowView":
        """Make the view of a row.

        Args:
            content: the content of the row.
            row: its number.
            kind: `"Target"` or `"Training row"`.
            book: collects the picture.
            size: size of the picture, see [`~hf_trak.report.images.PictureBook`].
            limit: number of characters of a text that are shown.
        """
        texts = []
        for place, (column, text) in enumerate(content.texts):
            cut, left_out = pieces(text, content.spans if place == 0 else (), limit)
            texts.append(TextView(visible(column[:_LONGEST_LABEL]), cut, left_out))
        label, prediction = _label(content.label), _label(content.prediction)
        alt = kind if row is None else f"{kind} {row}"
        alt += "" if label is None else f", label {label}"
        alt += "" if prediction is None else f", predicted {prediction}"
        alt += f": {plain(texts[0].pieces)}" if texts else ""
        picture, sound, unshown = None, None, None
        if content.image is not None:
            try:
                picture = book.add(content.image, size)
            except UnreadableImageError as error:
                unshown = visible(f"the image: {error}")
        if content.sound is not None:
            try:
                sound = as_uri(content.sound)
            except UnreadableSoundError as error:
                unshown = visible(f"the sound: {error}")
        return cls(row, alt, tuple(texts), label, prediction, picture, sound, unshown)

    @property
    def wrong(self) -> bool:
        """Tell whether the prediction and the label are known and differ."""
        return self.prediction is not None and self.label is not None and self.prediction != self.label


@dataclass(frozen=True)
class ScoredView:
    """A training row with its score, next to a target or in the list of outliers."""

    example: RowView
    score: str
    sign: str
    bar: float
    """Size of the score in percent of the largest score on the page, or next to the same target."""
    differs: bool = False
    """True if its label is another than the target's."""
    rank: str | None = None
    """In a reranked result, its rank by the index."""
    verified: bool = False
    """True if a training step on it raises the target by more than random rows do."""

    @classmethod
    def of(
        cls, row: RowView, score: float, largest: float, label: str | None = None, rank: str | None = None
    ) -> "ScoredView":
        """Make the view of a training row beside a target, whose label is `label`."""
        differs = label is not None and row.label is not None and row.label != label
        return cls(row, signed(score), sign_of(score), bar(score, largest), differs, rank)


@dataclass(frozen=True)
class WordsView:
    """Training rows that words find for what a model says, and what steps say of all rows named."""

    said: list[Piece]
    """The part that is explained is marked, and the words around it are not."""
    same: list[ScoredView]
    bm25: list[ScoredView]
    verified: list[ScoredView] | None
    """`None` if no step was taken."""

    @classmethod
    def of(cls, found: Any) -> "WordsView":
        """Read an entry of [`WORDS_COLUMN`].

        Raises:
            ValueError: it has another form.
        """
        try:
            start, stop, verified = int(found["start"]), int(found["stop"]), found["verified"]
            said = pieces(str(found["said"]), [Span(start, stop, 1.0)], EXAMPLE_TEXT)[0]
            words = len(str(found["said"])[start:stop].split())
            raised = {int(one["row"]) for one in verified or () if one["effect"] and float(one["score"]) > 0}

            def views(entries: Any) -> list[ScoredView]:
                largest = max((abs(float(one["score"])) for one in entries), default=0.0)
                return [_alike(one, signed(float(one["score"])), largest, raised) for one in entries]

            same = [
                _alike(one, f"{int(one['score'])} word{'s' * (one['score'] != 1)}", max(words, one["score"]), raised)
                for one in found["same"]
            ]
            return cls(said, same, views(found["bm25"]), None if verified is None else views(verified))
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"The column `{WORDS_COLUMN}` cannot be read: {error}. Expected what `attribute` and `report` write. "
                "Correct it, or remove it."
            ) from error


def _alike(entry: Mapping[str, Any], score: str, largest: float, raised: set[int]) -> ScoredView:
    """Make the view of a row that words found, with the words marked that it shares."""
    text, row, value = str(entry["text"]), int(entry["row"]), float(entry["score"])
    cut, left_out = pieces(text, [Span(int(entry["start"]), int(entry["stop"]), 1.0)], EXAMPLE_TEXT)
    view = RowView(row, f"Training row {row}: {plain(cut)}", (TextView("text", cut, left_out),))
    return ScoredView(view, score, sign_of(value), min(100.0, bar(value, largest)), verified=row in raised)


@dataclass(frozen=True)
class TargetView:
    """A target with its histogram, and training rows: those that helped have scores above 0, the others below."""

    target: RowView
    helped: list[ScoredView]
    harmed: list[ScoredView]
    histogram: Histogram | None
    alike: WordsView | None = None

    @property
    def words(self) -> str:
        """Return the text that the filter of the page searches, in lower case."""
        parts = [f"row {self.target.row}", self.target.label or "", self.target.prediction or ""]
        return " ".join([*parts, *(piece.text for text in self.target.texts for piece in text.pieces)]).lower()[:600]

    @property
    def lines(self) -> list[str]:
        """Return the target and its rows in a few lines of text, the first row of each kind in words."""
        lines = [self.target.alt]
        # of few rows, some at either end have the other sign
        helped = [one for one in self.helped if one.sign != "negative"]
        sides = {"helped most": helped, "harmed most": [one for one in self.harmed if one.sign != "positive"]}
        if self.alike is not None:
            sides |= {"same words": self.alike.same, "BM25": self.alike.bm25}
            sides |= {} if self.alike.verified is None else {"verified": self.alike.verified}
        for name, side in sides.items():
            rows = ", ".join(f"row {one.example.row} ({one.score})" for one in side)
            lines.append(f"  {name}: {rows or 'no row'}")
            lines += [f"    {one.example.alt}" for one in side[:1] if one.example.texts]
        return lines


class SoundRoom:
    """The room of a page for sounds, which it repeats with each row."""

    def __init__(self) -> None:
        self._left = MOST_CHARACTERS_OF_PAGE

    def within(self, row: RowView) -> RowView:
        """Leave the sound of a row out where the page has no room for it."""
        size = len(row.sound or "")
        if size > self._left:
            full = f"the sound: the page has {MOST_CHARACTERS_OF_PAGE >> 20} MB of them"
            return replace(row, sound=None, unshown=full)
        self._left -= size
        return row


@dataclass
class RunViews:
    """Makes the views of a run, and collects their pictures in `book`."""

    run: AttributionRun
    examples: int = 5
    columns: Mapping[str, Any] = field(default_factory=dict)
    """`image_column`, `text_columns`, `label_column` and `label_names`, unless they are to be inferred."""

    def __post_init__(self) -> None:
        self.book = PictureBook()
        self._scored, self._train = stored(self.run.scored), stored(self.run.train)
        self._target_columns = self._columns_of(self._scored)
        self._train_columns = Columns() if self._train is None else self._columns_of(self._train)
        self._rows: dict[int, RowView] = {}
        self._room = SoundRoom()

    def _columns_of(self, rows: Any) -> Columns:
        given: dict[str, Any] = {"text_columns": self.run.text_columns(rows)}
        given |= {name: value for name, value in self.columns.items() if value is not None}
        return Columns.find(rows, **given)

    def target(self, index: int, shown_as: int | None = None) -> TargetView:
        """Make the view of a target.

        Args:
            index: its row in the scored dataset.
            shown_as: the row number that the page shows. By default `index`.

        Raises:
            IndexError: there is no such row.
            StoreError: the run lacks a training row.
        """
        if not 0 <= index < len(self._scored):
            raise IndexError(f"There is no target {index}. Expected 0 … {len(self._scored) - 1}.")
        row = self._scored[index]
        number = index if shown_as is None else shown_as
        content = content_of(row, self._target_columns)
        view = self._room.within(RowView.of(content, number, "Target", self.book, "large", LONGEST_TEXT))
        ends = [
            [(i, score) for i, score in _end(row, columns, self.examples) if sign * score > 0]
            for sign, columns in ((1, TOP_K_COLUMNS[:2]), (-1, TOP_K_COLUMNS[2:]))
        ]
        largest = max((abs(score) for end in ends for _, score in end), default=0.0)
        ranks = [index_ranks(row, *names) for names in zip(TOP_K_COLUMNS[::2], RANK_COLUMNS, strict=True)]
        helped, harmed = (
            [ScoredView.of(self._train_row(i), score, largest, view.label, found.get(i)) for i, score in end]
            for end, found in zip(ends, ranks, strict=True)
        )
        histogram = None
        if self.run.distributions is not None:
            histogram = Histogram.of(self.run.distributions, index, [score for end in ends for _, score in end])
        alike = None if row.get(WORDS_COLUMN) is None else WordsView.of(row[WORDS_COLUMN])
        raised = {one.example.row for one in (alike and alike.verified) or () if one.verified}
        helped = [replace(one, verified=one.example.row in raised) for one in helped]
        return TargetView(view, helped, harmed, histogram, alike)

    def outliers(self) -> list[ScoredView]:
        """Make the views of the training rows of the highest self-influence."""
        found = self.run.outliers()
        largest = max((score for _, score in found), default=0.0)
        return [ScoredView.of(self._train_row(index), score, largest) for index, score in found]

    def _train_row(self, index: int) -> RowView:
        if index not in self._rows:
            row = {} if self._train is None else self._train[self.run.train_place(index)]
            content = content_of(row, self._train_columns)
            self._rows[index] = RowView.of(content, index, "Training row", self.book, "small", EXAMPLE_TEXT)
        self._rows[index] = self._room.within(self._rows[index])
        return self._rows[index]


def _end(row: Mapping[str, Any], columns: Sequence[str], count: int) -> list[tuple[int, float]]:
    return [(int(i), float(s)) for i, s in zip(row[columns[0]][:count], row[columns[1]][:count], strict=True)]


def index_ranks(row: Mapping[str, Any], rows: str, ranks: str) -> dict[int, str]:
    """Map training rows to the ranks that the index gave them, in words.

    Args:
        row: a target of a result.
        rows: the column with training rows.
        ranks: the column with their ranks; a result that is not reranked has none.
    """
    found = row.get(ranks)
    if not isinstance(found, Sequence) or len(found) != len(row[rows]):
        return {}
    return {
        int(index): f"{rank:,}" if isinstance(rank, int) else "behind the shortlist"
        for index, rank in zip(row[rows], found, strict=True)
    }


def _label(label: str | None) -> str | None:
    return None if label is None else shortened(label)


def shortened(label: str) -> str:
    """Shorten a label, and write out what cannot be seen."""
    label = visible(label[: 2 * _LONGEST_LABEL])
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def signed(score: float) -> str:
    """Format a score with its sign and three digits: +0.125, −3.2e−5."""
    return number(score) if score < 0 else f"+{number(abs(score))}"


def number(value: float) -> str:
    """Format a number with three digits, a typographic minus sign, and no leading zeros in the exponent."""
    return re.sub(r"e([+-])0+", r"e\1", f"{value:.3g}").replace("e+", "e").replace("-", "−")


def bar(score: float, largest: float) -> float:
    """Return the size of a score in percent of the largest one."""
    return round(100 * abs(score) / largest, 1) if largest else 0.0


def sign_of(score: float) -> str:
    """Return the sign of a score as `"positive"`, `"negative"` or `"zero"`."""
    return "positive" if score > 0 else "negative" if score < 0 else "zero"
