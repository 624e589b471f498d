"""Reading JSON files from untrusted sources, within bounds on size, depth and numbers.

The memory that a file can take is known before it is parsed: its bytes and the number of its values are counted (an
empty list takes three bytes in a file and over sixty in memory).
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of lists and objects. Files of hf_trak and transformers have less than ten levels."""

MAX_DIGITS = 64
"""Maximum number of digits of an integer. Tokenizers write 10³⁰ if they have no maximum length."""

_ALWAYS_ALLOWED_VALUES = 1024


def read_foreign_object(
    path: Path, max_bytes: int, bytes_per_value: int = 4, max_digits: int = MAX_DIGITS
) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
        max_bytes: maximum size of the file.
        bytes_per_value: a file of n bytes may have up to n / `bytes_per_value` + 1,024 values.
        max_digits: maximum number of digits of an integer.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is too large, or is not a JSON object. The message begins with "it", so that the caller
            can put the name of the file in front.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(too_large(size, max_bytes))
    return parse_foreign_object(path.read_bytes(), bytes_per_value, max_digits)


def parse_foreign_object(data: bytes, bytes_per_value: int = 4, max_digits: int = MAX_DIGITS) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        data: its bytes.
        bytes_per_value, max_digits: see [`read_foreign_object`].

    Raises:
        ValueError: it is not a JSON object, or holds too much. The message begins with "it".
    """
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > _ALWAYS_ALLOWED_VALUES + len(data) // bytes_per_value:
        raise ValueError(f"it has up to {values} values in {len(data)} bytes, more than such a file can need")
    try:
        content = json.loads(
            data, parse_constant=_not_json, parse_float=_finite, parse_int=partial(_integer, max_digits=max_digits)
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
    """Say why a file of this size is refused."""
    return f"it has {size} bytes, more than the {most} that such a file can need"


def shown(value: Any) -> str:
    """Show a value in a message, in at most 120 characters."""
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
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _integer(text: str, max_digits: int) -> int:
    if len(text.lstrip("-")) > max_digits:
        raise ValueError(f"{text[:40]}… has {len(text)} digits")
    return int(text)
