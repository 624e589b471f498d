"""Preparation of texts for display: unsafe characters written out, long texts cut, one span marked."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST_TEXT = 1200
"""Number of characters of a text that are shown."""

_CONTEXT = 400  # characters shown before the marked span of a long text
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class Span:
    """Characters `start … stop - 1` of a text, and the part of the score that they account for."""

    start: int
    stop: int
    score: float


@dataclass(frozen=True)
class Piece:
    """A part of a text, marked or not."""

    text: str
    marked: bool = False


def visible(text: str) -> str:
    """Write out control characters, lone surrogates and noncharacters of a text, for example U+0000 as `\\x00`.

    Newlines and tabs stay. Escaping is left to the template.
    """
    return _CONTROL.sub(_written_out, text.replace("\r\n", "\n").replace("\r", "\n"))


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def pieces(text: str, spans: Iterable[Span] = (), limit: int = LONGEST_TEXT) -> tuple[list[Piece], int]:
    """Cut a text to `limit` characters, and mark the span of the highest score.

    Args:
        text: the text, as stored in the dataset.
        spans: a breakdown of its score. A long text is cut around the marked span.
        limit: number of characters to keep.

    Returns:
        The parts in order, and the number of characters that were left out.
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
    """Find the span of the highest score, or `None` if no span is inside the text."""
    inside = [span for span in spans if 0 <= span.start < span.stop <= len(text)]
    if not inside:
        return None
    best = max(inside, key=lambda span: span.score)
    return best.start, best.stop


def plain(parts: Sequence[Piece], limit: int = 80) -> str:
    """Shorten a text to one line of at most `limit` characters, for the description of a picture."""
    line = " ".join("".join(part.text for part in parts).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
