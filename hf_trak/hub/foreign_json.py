"""JSON files that anybody may have written: parsed within bounds of size, depth and numbers.

What a file can cost is known before it is parsed: its bytes, and the number of values in it (an empty list takes three
bytes in a file and over sixty in memory).
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
"""Lists and objects inside each other. What the library and its peers write has less than ten."""

MAX_DIGITS = 64
"""Digits of a whole number: tokenizers write 10³⁰ where they know no longest text."""

_SMALL = 1024


def read_foreign_object(
    path: Path, max_bytes: int, bytes_per_value: int = 4, max_digits: int = MAX_DIGITS
) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
        max_bytes: its largest size.
        bytes_per_value: a file may have one value for so many bytes, and 1,024 more.
        max_digits: of whole numbers.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is too large, or not such an object; says why, without naming the file.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(too_large(size, max_bytes))
    data = path.read_bytes()
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > _SMALL + len(data) // bytes_per_value:
        raise ValueError(f"it has up to {values} values in {len(data)} bytes, more than such a file can need")
    try:
        content = json.loads(
            data, parse_constant=_not_json, parse_float=_finite, parse_int=partial(_whole, max_digits=max_digits)
        )
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({type(error).__name__}: {shown(str(error))})") from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a JSON {type(content).__name__}, not an object")
    _check_depth(content)
    return content


def too_large(size: int, most: int) -> str:
    """Why a file of this size is refused."""
    return f"it has {size} bytes, more than the {most} that such a file can need"


def shown(value: Any) -> str:
    """A value for a message, short whatever it is."""
    text = f"a {type(value).__name__} of {len(value)}" if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"


def _check_depth(content: dict[str, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _not_json(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _whole(text: str, max_digits: int) -> int:
    if len(text.lstrip("-")) > max_digits:
        raise ValueError(f"{text[:40]}… has {len(text)} digits")
    return int(text)
