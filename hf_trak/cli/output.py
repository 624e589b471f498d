"""Output of commands: one JSON object for scripts, or lines of text, printed by the main process alone."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any


def answer(content: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print the result of a command, in the process of rank 0."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    if as_json:
        print(json.dumps(content, indent=2, ensure_ascii=False, default=str))
    else:
        for line in lines:
            print(line)


def table(rows: Mapping[str, Any]) -> list[str]:
    """Format names and values in two columns."""
    width = max((len(name) for name in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def size(count: float) -> str:
    """Format a number of bytes, in powers of 1000."""
    if count < 1000:
        return f"{count:.0f} bytes"
    unit = "kB"
    for larger in ("MB", "GB", "TB"):
        if count < 1e6:
            break
        count, unit = count / 1000, larger
    return f"{count / 1000:.1f} {unit}"
