"""Text of a dataset made fit to be shown: every character visible or harmless, and not endless."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST_TEXT = 1200
"""Characters of one text that are shown."""

_CONTEXT = 400
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class Span:
    """Characters `start … stop` of a text, and the part of the score that they account for."""

    start: int
    stop: int
    score: float


@dataclass(frozen=True)
class Piece:
    """A part of a text, marked or not."""

    text: str
    marked: bool = False


def visible(text: str) -> str:
    """The text with control characters, lone surrogates and noncharacters written out, U+0000 as `\\x00`.

    Newlines and tabs stay. Escaping is left to the template.
    """
    return _CONTROL.sub(_written_out, text.replace("\r\n", "\n").replace("\r", "\n"))


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def pieces(text: str, spans: Iterable[Span] = (), limit: int = LONGEST_TEXT) -> tuple[list[Piece], int]:
    """A text cut to `limit` characters, with the span of the highest score marked.

    Args:
        text: as the dataset has it.
        spans: a breakdown of its score. A long text is cut around the marked span.
        limit: characters to keep.

    Returns:
        The parts in order, and how many characters were left out.
    """
    best = _most_attributed(text, spans)
    if best is None:
        return [Piece(visible(text[:limit]))], max(0, len(text) - limit)
    start, stop = best
    first = 0 if stop <= limit else max(0, start - _CONTEXT)
    last = min(len(text), first + limit)
    stop = min(stop, last)
    cut = [Piece(visible(text[first:start])), Piece(visible(text[start:stop]), True), Piece(visible(text[stop:last]))]
    if first:
        cut.insert(0, Piece("…"))
    return [piece for piece in cut if piece.text], len(text) - (last - first)


def _most_attributed(text: str, spans: Iterable[Span]) -> tuple[int, int] | None:
    """Where the span of the highest score is; `None` if there is none inside the text."""
    inside = [span for span in spans if 0 <= span.start < span.stop <= len(text)]
    if not inside:
        return None
    best = max(inside, key=lambda span: span.score)
    return best.start, best.stop


def plain(parts: Sequence[Piece], limit: int = 80) -> str:
    """A text in one short line, for the description of a picture."""
    line = " ".join("".join(part.text for part in parts).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
